"""Jobs for rented machines: a SkyPilot task, and a PyTorchJob of Kubeflow. They save as a Slurm job does. No torch."""

import io
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString, ScalarString

from bloomery.core import __version__
from bloomery.core.errors import UserError
from bloomery.hardware.sites import CPU, Site
from bloomery.hardware.specs import PRODUCT_LINES, find_gpu
from bloomery.launch.job_script import (
    TRUST_CODE,
    checked_hosts,
    commented,
    named,
    script_templates,
)

# Exit codes that start a job again. SkyPilot takes those that its task lists, Kubeflow those above 127.
AGAIN = {"skypilot": 75, "kubernetes": 203}
# Where the ranks of a SkyPilot task meet. Kubeflow sets both variables itself.
SKYPILOT_MEETING = ' MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" MASTER_PORT=29400'
SKYPILOT_VOLUME = "/mnt/bloomery"
SKYPILOT_SOURCE = "~/bloomery"
KUBERNETES_VOLUME = "/workspace"  # the working folder of our images
IMAGE_PYTHON = "/opt/bloomery/.venv/bin/python"  # of our images
LONGEST_NAME = 50  # of a PyTorchJob: its pods append "-worker-63", and have 63 characters


@final
@dataclass(frozen=True)
class CloudJob:
    """A job as a YAML file. `file`: a name for it; `submit`, `follow`, `stop`: commands, once it is written there."""

    text: str
    file: str
    submit: str
    follow: str
    stop: str


def write_skypilot_task(
    site: Site, *, name: str, arguments: str, command: str, nodes: int, names_code: bool = False
) -> CloudJob:
    """The task that trains `arguments` (as for `bloomery train`) on `nodes` machines. `command`: what wrote it.

    `names_code`: as in `write_job_script`.

    Raises UserError (code 2) where machines would share no folder, or Bloomery could not get there.
    """
    if nodes > 1 and not site.volume:
        fix = "pass --volume NAME, a volume of `sky volumes ls` that all machines can write to"
        raise UserError(f"{nodes} machines share no folder", where="--volume", fix=fix, code=2)
    source = Path(__file__).parents[3]
    if not site.image and not (source / "scripts/setup.py").is_file():
        fix = "pass --image IMAGE, one with Bloomery (docker/Dockerfile.rocm) whose user is root"
        problem = "this Bloomery is no checkout that SkyPilot could copy to the machines"
        raise UserError(problem, where="--image", fix=fix, code=2)

    task_name = _dns_name(name)
    script = _node_script(
        site,
        arguments,
        nodes=nodes,
        names_code=names_code,
        node="$SKYPILOT_NODE_RANK",
        folder=f"{SKYPILOT_VOLUME}/runs" if site.volume else "runs",
        run=f"{task_name}-$SKYPILOT_TASK_ID",
        job="$SKYPILOT_TASK_ID",
        python=IMAGE_PYTHON if site.image else f"{SKYPILOT_SOURCE}/.venv/bin/python",
        meeting=SKYPILOT_MEETING,
    )
    resources: dict[str, Any] = {}
    if site.gpu != CPU:
        resources["accelerators"] = f"{_skypilot_name(site.gpu)}:{site.gpus_per_node}"
    if site.image:
        resources["image_id"] = f"docker:{site.image}"
    resources["job_recovery"] = {"recover_on_exit_codes": [AGAIN["skypilot"]]}
    task: dict[str, Any] = {
        "name": task_name,
        "workdir": ".",
        "num_nodes": nodes,
        "resources": resources,
    }
    if site.volume:
        task["volumes"] = {SKYPILOT_VOLUME: site.volume}
    if site.environment:
        task["envs"] = dict(site.environment)
    setup = list(site.setup)
    if not site.image:
        task["file_mounts"] = {SKYPILOT_SOURCE: str(source)}
        setup.append(f"cd {SKYPILOT_SOURCE} && python3 scripts/setup.py")
    if setup:
        task["setup"] = _block("\n".join(setup) + "\n")
    task["run"] = _block(script)
    file = f"{task_name}-skypilot.yaml"
    return CloudJob(
        text=_yaml(task, command),
        file=file,
        submit=f"sky jobs launch {file}   (starts again after a preemption; sky launch {file} does not)",
        follow="sky jobs logs   (after sky launch: sky logs CLUSTER)",
        stop=f"sky jobs cancel --name {task_name}   (after sky launch: sky cancel CLUSTER)",
    )


def write_pytorch_job(
    site: Site,
    *,
    name: str,
    arguments: str,
    command: str,
    nodes: int,
    queue: str | None,
    excluded_hosts: str | None,
    signal_seconds: int,
    names_code: bool = False,
) -> CloudJob:
    """The PyTorchJob that trains `arguments` on `nodes` pods, whose volume is the working folder.

    `queue`: a LocalQueue of Kueue. `signal_seconds`: from the request to end until a pod is killed. `names_code`: as in
    `write_job_script`. Raises UserError (code 2) without an image or a volume.
    """
    if not site.image:
        fix = "build one (docker/Dockerfile.rocm, Dockerfile.cuda), push it, and pass --image IMAGE"
        raise UserError("pods need an image with Bloomery", where="--image", fix=fix, code=2)
    if not site.volume:
        fix = "pass --volume CLAIM, a PersistentVolumeClaim that all pods can write to (ReadWriteMany)"
        problem = "pods keep no files: runs and checkpoints need a volume"
        raise UserError(problem, where="--volume", fix=fix, code=2)

    job_name = _dns_name(name)
    script = _node_script(
        site,
        arguments,
        nodes=nodes,
        names_code=names_code,
        node="${PET_NODE_RANK:-$RANK}",  # the first since training operator 1.7
        folder="runs",
        run=job_name,
        job=job_name,
        python=IMAGE_PYTHON,
        meeting="",
    )
    container: dict[str, Any] = {
        "name": "pytorch",  # Kubeflow asks for this name
        "image": site.image,
        "workingDir": KUBERNETES_VOLUME,
        "command": ["bash", "-c", _block("\n".join([*site.setup, script]))],
        "env": [{"name": key, "value": value} for key, value in site.environment.items()],
        "volumeMounts": [
            {"name": "work", "mountPath": KUBERNETES_VOLUME},
            {"name": "local", "mountPath": site.local_disk},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if not site.environment:
        del container["env"]
    if site.gpu != CPU:
        resource = f"{find_gpu(site.gpu).vendor}.com/gpu"
        container["resources"] = {"limits": {resource: site.gpus_per_node}}
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": signal_seconds,
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": site.volume}},
            {"name": "local", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL's and the loader's
        ],
    }
    if excluded_hosts is not None:
        if "[" in excluded_hosts:
            fix = "pass each name: node20,node21"
            problem = "Kubernetes supports no ranges of hosts"
            raise UserError(problem, where="--exclude", fix=fix, code=2)
        hosts = {
            "key": "kubernetes.io/hostname",
            "operator": "NotIn",
            "values": checked_hosts(excluded_hosts).split(","),
        }
        terms = {"nodeSelectorTerms": [{"matchExpressions": [hosts]}]}
        pod["affinity"] = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}
        }
    template = CommentedMap({"spec": pod})
    template.yaml_set_anchor("pod")  # written once, for both kinds of pods
    replica = {"restartPolicy": "ExitCode", "template": template}
    replicas = {"Master": {"replicas": 1, **replica}}
    if nodes > 1:
        replicas["Worker"] = {"replicas": nodes - 1, **replica}
    metadata: dict[str, Any] = {"name": job_name}
    if queue is not None:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": queue}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "runPolicy": {"cleanPodPolicy": "None"},  # ended pods stay, with their logs
            "nprocPerNode": str(site.ranks_per_node),
            "pytorchReplicaSpecs": replicas,
        },
    }
    file = f"{job_name}-kubernetes.yaml"
    return CloudJob(
        text=_yaml(job, command),
        file=file,
        submit=f"kubectl apply -f {file}",
        follow=f"kubectl logs -f {job_name}-master-0",
        stop=f"kubectl delete -f {file}   (saves first; applied again, the run resumes)",
    )


def _node_script(
    site: Site,
    arguments: str,
    *,
    nodes: int,
    names_code: bool,
    node: str,
    folder: str,
    run: str,
    job: str,
    python: str,
    meeting: str,
) -> str:
    """The shell script that starts and ends the ranks of one node; texts of it may name variables of the shell.

    `node`: its number. `folder`: of the runs, shared by all nodes. `job`: the same for every start of the job.
    `meeting`: assignments of MASTER_ADDR and MASTER_PORT, where they are not set.
    """
    return (
        script_templates()
        .get_template("node_script.sh.jinja")
        .render(
            local_disk=site.local_disk,
            node=node,
            folder=folder,
            run=run,
            job=job,
            python=python,
            meeting=meeting,
            ranks=nodes * site.ranks_per_node,
            ranks_per_node=site.ranks_per_node,
            arguments=arguments,
            trust_code=TRUST_CODE * names_code,
            checkpoints='"$run"/checkpoints/step-*',
            tries=f".tries-{job}-$node",
            restarted="started again",
            failed="1",
            again=AGAIN[site.kind],
        )
    )


def _block(script: str) -> ScalarString:
    """A script as it reads, where YAML can hold it so; characters that end a line there, as U+2028, are escaped."""
    lines = script.split("\n")
    is_plain = all(line.replace("\t", "").isprintable() for line in lines)
    block: ScalarString = (
        LiteralScalarString(script) if is_plain else DoubleQuotedScalarString(script)
    )
    return block


def _yaml(document: dict[str, Any], command: str) -> str:
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 4096  # a line of a script stays one
    out = io.StringIO()
    out.write(f"# {commented(command)}\n# Written by Bloomery {__version__}.\n")
    yaml.dump(document, out)
    return out.getvalue()


def _dns_name(name: str) -> str:
    """A name that Kubernetes takes: lower-case letters, digits and hyphens, a letter first (RFC 1035)."""
    text = re.sub(r"[^a-z0-9]+", "-", named(name).lower()).strip("-")
    if not text[:1].isalpha():
        text = f"run-{text}"
    return text[:LONGEST_NAME].rstrip("-")


def _skypilot_name(gpu: str) -> str:
    """A GPU as `sky show-gpus` lists it: H100, A100-80GB, RTX4090, MI300X."""
    text = re.sub(rf"^{PRODUCT_LINES}\s+", "", gpu.strip(), flags=re.I)
    text = re.sub(r"\s+(SXM\d?|PCIe)$", "", text, flags=re.I)
    text = re.sub(r"^RTX\s+(?=A\d)", "", text, flags=re.I)
    text = re.sub(r"^RTX\s+(?=\d)", "RTX", text, flags=re.I)
    return "A100" if text == "A100 40GB" else re.sub(r"\s+", "-", text)


def refuse_recipe_elsewhere(source: str) -> None:
    """Raises UserError (code 2) for a recipe file outside of the working folder, which alone gets to the machines."""
    path = Path(shlex.split(source)[0])
    if not path.is_file():
        return  # a packaged recipe
    if not path.resolve().is_relative_to(Path.cwd()) or path.is_absolute():
        raise UserError(
            "the recipe is not below the working folder, which is all that the machines see",
            where=str(path),
            fix="change to the folder that has the recipe and its dataset, and pass a relative path",
            code=2,
        )
