"""A SkyPilot task and a PyTorchJob of Kubeflow: their fields, and the script that starts the ranks of a node."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner
from runs_of_bloomery import Bloomery, losses, wait_for, write_workshop

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.hardware.sites import Site
from bloomery.launch.cloud_jobs import IMAGE_PYTHON, write_pytorch_job
from bloomery.monitor.events import Resumed, StepDone

RECIPE = """
model: {family: llama, vocab_size: 4096, hidden_size: 256, intermediate_size: 512, num_layers: 4, num_heads: 4,
        num_kv_heads: 4, head_dim: 64, max_positions: 512, rope_theta: 10000.0}
tokenizer: {from: models/any}
data: {path: corpus, sequence_length: 512}
train: {max_tokens: 1B, tokens_per_step: 65536}
"""
IMAGE = ["--image", "registry.example.org/bloomery:rocm"]
VOLUME = ["--volume", "training"]


def closed(**fields: object) -> dict[str, object]:
    """The schema of an object with these fields and no others, as both servers are strict."""
    required = [name.removesuffix("_") for name in fields if not name.endswith("_")]
    properties = {name.removesuffix("_"): schema for name, schema in fields.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def listed(schema: object) -> dict[str, object]:
    return {"type": "array", "items": schema, "minItems": 1}


TEXT = {"type": "string", "minLength": 1}
NUMBER = {"type": "integer", "minimum": 1}
TEXTS = {"type": "object", "additionalProperties": TEXT}
# Those fields that we write, of SkyPilot 0.14 (sky/utils/schemas.py). A name that ends with _ is optional.
SKYPILOT = closed(
    name=TEXT,
    workdir=TEXT,
    num_nodes=NUMBER,
    resources=closed(
        accelerators={"type": "string", "pattern": r"^[A-Za-z0-9-]+:\d+$"},
        image_id_={"type": "string", "pattern": "^docker:."},
        job_recovery=closed(recover_on_exit_codes=listed({"type": "integer", "maximum": 255})),
    ),
    volumes_={"type": "object", "patternProperties": {"^/": TEXT}, "additionalProperties": False},
    envs_=TEXTS,
    file_mounts_=TEXTS,
    setup_=TEXT,
    run=TEXT,
)
# Those of the training operator 1.9 (kubeflow.org_pytorchjobs.yaml), and its webhook's rules for name and replicas.
POD = closed(
    terminationGracePeriodSeconds=NUMBER,
    containers=listed(
        closed(
            name={"const": "pytorch"},
            image=TEXT,
            workingDir=TEXT,
            command=listed(TEXT),
            env_=listed(closed(name=TEXT, value=TEXT)),
            volumeMounts=listed(closed(name=TEXT, mountPath=TEXT)),
            resources=closed(limits={"type": "object", "additionalProperties": NUMBER}),
        )
    ),
    volumes=listed(
        closed(
            name=TEXT,
            persistentVolumeClaim_=closed(claimName=TEXT),
            emptyDir_=closed(medium_={"enum": ["Memory"]}),
        )
    ),
    affinity_=closed(
        nodeAffinity=closed(
            requiredDuringSchedulingIgnoredDuringExecution=closed(
                nodeSelectorTerms=listed(
                    closed(
                        matchExpressions=listed(
                            closed(key=TEXT, operator={"enum": ["NotIn"]}, values=listed(TEXT))
                        )
                    )
                )
            )
        )
    ),
)
REPLICA = {
    "replicas": NUMBER,
    "restartPolicy": {"enum": ["ExitCode"]},
    "template": closed(spec=POD),
}
KUBEFLOW = closed(
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=closed(
        name={"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$"}, labels_=TEXTS
    ),
    spec=closed(
        runPolicy=closed(cleanPodPolicy={"enum": ["None"]}),
        nprocPerNode={"type": "string", "pattern": r"^\d+$"},
        pytorchReplicaSpecs=closed(
            Master=closed(**REPLICA | {"replicas": {"const": 1}}), Worker_=closed(**REPLICA)
        ),
    ),
)
JOBS = [
    ["--site", "skypilot", "--gpu", "8xMI300X", "--nodes", "2", *VOLUME],
    ["--site", "skypilot", "--gpu", "1xRTX 4090", "--nodes", "1"],
    ["--site", "skypilot", "--gpu", "8xA100 80GB", "--nodes", "1", *IMAGE],
    ["--site", "kubernetes", "--gpu", "8xMI300X", "--nodes", "1", *IMAGE, *VOLUME],
    ["--site", "kubernetes", "--gpu", "8xH100", "--nodes", "4", *IMAGE, *VOLUME],
    [
        *["--site", "kubernetes", "--gpu", "4xMI210", "--nodes", "3", *IMAGE, *VOLUME],
        *["--exclude", "node7,node-9.local", "--queue", "team"],
    ],
]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "large.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(*words: str, recipe: str = "large.yaml") -> str:
    result = CliRunner().invoke(cli, ["slurm", recipe, *words])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def script_of(document: dict) -> str:
    if "run" in document:
        return document["run"]
    pod = document["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    return pod["containers"][0]["command"][2]


@pytest.mark.parametrize("words", JOBS)
def test_a_job_has_fields_that_its_tool_knows(folder, words) -> None:
    document = yaml.safe_load(job(*words))
    jsonschema.validate(document, SKYPILOT if "skypilot" in words else KUBEFLOW)
    checked = subprocess.run(
        ["bash", "-n"], input=script_of(document), text=True, capture_output=True
    )
    assert checked.returncode == 0 and not checked.stderr, checked.stderr


def test_an_argument_of_several_lines_is_a_comment_of_several_lines(folder) -> None:
    prompts = 'sample.prompts=["one\n  two: 2"]'
    document = yaml.safe_load(job(prompts, *JOBS[0]))
    jsonschema.validate(document, SKYPILOT)
    assert shlex.quote(prompts) in script_of(document)


def test_a_skypilot_task_asks_for_the_machines_of_the_plan(folder) -> None:
    tasks = [yaml.safe_load(job(*words)) for words in JOBS if "skypilot" in words]
    assert [task["resources"]["accelerators"] for task in tasks] == [
        "MI300X:8",
        "RTX4090:1",
        "A100-80GB:8",
    ]
    assert tasks[0]["num_nodes"] == 2 and tasks[0]["volumes"] == {"/mnt/bloomery": "training"}
    assert "WORLD_SIZE=16 LOCAL_WORLD_SIZE=8" in tasks[0]["run"]
    # without an image the machines install this Bloomery
    assert "scripts/setup.py" in tasks[0]["setup"] and "setup" not in tasks[2]
    source = Path(tasks[0]["file_mounts"]["~/bloomery"])
    assert (source / "src/bloomery/launch/cloud_jobs.py").is_file()


def test_a_pytorch_job_asks_for_the_pods_of_the_plan(folder) -> None:
    one, four, with_options = [
        yaml.safe_load(job(*words))["spec"] for words in JOBS if "kubernetes" in words
    ]
    assert "Worker" not in one["pytorchReplicaSpecs"]
    assert four["pytorchReplicaSpecs"]["Worker"]["replicas"] == 3
    pods = [spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"] for spec in (one, four)]
    assert [pod["containers"][0]["resources"]["limits"] for pod in pods] == [
        {"amd.com/gpu": 8},
        {"nvidia.com/gpu": 8},
    ]
    pod = with_options["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert "node-9.local" in json.dumps(pod["affinity"])
    label = yaml.safe_load(job(*JOBS[-1]))["metadata"]["labels"]
    assert label == {"kueue.x-k8s.io/queue-name": "team"}


@pytest.mark.parametrize(
    ("words", "submit"),
    [
        (JOBS[0], "sky jobs launch large-skypilot.yaml"),
        (JOBS[3], "kubectl apply -f large-kubernetes.yaml"),
    ],
)
def test_the_notes_say_how_to_submit(folder, words, submit) -> None:
    result = CliRunner().invoke(cli, ["slurm", "large.yaml", *words])
    assert f"submit    {submit}" in result.stderr
    assert "submit" not in result.stdout.partition("ranks=()")[0]
    printed = json.loads(CliRunner().invoke(cli, ["slurm", "large.yaml", *words, "--json"]).stdout)
    assert printed["submit"] == submit and printed["script"] == result.stdout.removesuffix("\n")


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (
            ["--site", "kubernets", "--gpu", "8xH100", "--nodes", "1"],
            "unknown site 'kubernets'",
            "kubernetes",
        ),
        (
            ["--site", "elcap", "--nodes", "1"],
            "unknown site 'elcap'",
            "frontier, lumi, generic, skypilot, kubernetes",
        ),
        (["--site", "skypilot", "--nodes", "1"], "does not say which GPUs", "--gpu"),
        (["--site", "skypilot", "--gpu", "8xH100", "--nodes", "2"], "share no folder", "--volume"),
        ([*JOBS[0], "--queue", "q"], "--queue does not apply to SkyPilot", "leave it out"),
        ([*JOBS[0], "--exclude", "a"], "--exclude does not apply to SkyPilot", "leave it out"),
        ([*JOBS[0], "--account", "A"], "--account does not apply to SkyPilot", "leave it out"),
        ([*JOBS[3], "--time", "4h"], "--time does not apply to Kubernetes", "train.max_time"),
        ([*JOBS[3], "--exclude", "node[1-3]"], "supports no ranges", "node20,node21"),
        ([*JOBS[3], "--exclude", "a b"], "no list of hosts", "node17"),
        (
            ["--site", "kubernetes", "--gpu", "8xH100", "--nodes", "1", *VOLUME],
            "need an image",
            "--image",
        ),
        (
            ["--site", "kubernetes", "--gpu", "8xH100", "--nodes", "1", *IMAGE],
            "need a volume",
            "--volume",
        ),
        (
            ["--site", "lumi", "--nodes", "1", "--account", "A", *IMAGE],
            "--image does not apply to LUMI-G",
            "leave it out",
        ),
        (
            ["--site", "generic", "--gpu", "8xH100", "--nodes", "1", *VOLUME],
            "--volume does not apply",
            "share",
        ),
    ],
)
def test_what_a_job_cannot_have_is_refused_in_a_sentence(folder, words, problem, fix) -> None:
    error = CliRunner().invoke(cli, ["slurm", "large.yaml", *words]).exception
    assert isinstance(error, UserError), error
    assert problem in error.problem and fix in (error.fix or "")


def test_a_recipe_that_the_machines_would_not_see_is_refused(folder, monkeypatch) -> None:
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    for recipe in ("../large.yaml", str(folder / "large.yaml")):
        error = CliRunner().invoke(cli, ["slurm", recipe, *JOBS[0]]).exception
        assert isinstance(error, UserError) and "not below the working folder" in error.problem


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("kind = 'kubernetes'\ngpu = 'H100'\nneeds_account = true\n", "needs_account"),
        ("gpu = 'H100'\nvolume = 'training'\n", "volume"),
    ],
)
def test_a_site_file_has_no_keys_without_effect(folder, text, key) -> None:
    (folder / "mine.toml").write_text(text)
    words = ["slurm", "large.yaml", "--site", "mine.toml", "--nodes", "1"]
    error = CliRunner().invoke(cli, words).exception
    assert isinstance(error, UserError) and error.where == f"mine.toml: {key}"


# The script of a node.

# A rank that ends with the next exit code of its file, or, for a code of 0, waits for SIGTERM and ends with 75.
RANK = f"""#!{sys.executable}
import os, signal, sys
from pathlib import Path
rank = os.environ.get("RANK", "0")
codes = Path(f"codes-{{rank}}")
first, *rest = codes.read_text().split()
codes.write_text(" ".join(rest))
with open(f"words-{{rank}}", "a") as words:
    print(*sys.argv[4:], file=words)
if first == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    Path(f"waits-{{rank}}").touch()
    signal.pause()
if first == "saves":
    Path("runs/tiny/checkpoints/step-00000005").mkdir(parents=True)
    Path("runs/tiny/recipe.yaml").touch()
    first = "1"
sys.exit(int(first))
"""


def node_script(folder: Path, *, ranks: int, nodes: int = 1) -> str:
    site = Site(kind="kubernetes", gpu="cpu", gpus_per_node=ranks, image="i", volume="v")
    site = site.model_copy(update={"local_disk": str(folder / "local")})
    written = write_pytorch_job(
        site,
        name="tiny",
        arguments="tiny.yaml",
        command="bloomery slurm",
        nodes=nodes,
        queue=None,
        excluded_hosts=None,
        signal_seconds=60,
    )
    return script_of(yaml.safe_load(written.text))


def start_node(folder: Path, script: str, number: int, python: str, **variables: str):
    return subprocess.Popen(
        ["bash", "-c", script.replace(IMAGE_PYTHON, python)],
        cwd=folder,
        env=os.environ | {"PET_NODE_RANK": str(number)} | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize(
    ("codes", "ends"),
    [
        (["0"], [0]),
        (["2"], [2]),  # a mistake in the recipe stays one
        (["75", "75", "75", "0"], [203, 203, 203, 0]),
        (["1", "1", "1"], [203, 203, 1]),
        (["137", "saves", "1", "1", "1"], [203, 203, 203, 1]),  # a new checkpoint counts anew
    ],
)
def test_a_node_asks_to_be_started_again(tmp_path, codes, ends) -> None:
    rank = tmp_path / "rank"
    rank.write_text(RANK)
    rank.chmod(0o755)
    for number in range(2):
        (tmp_path / f"codes-{number}").write_text(" ".join(codes if number else ["0"] * 9))
    script = node_script(tmp_path, ranks=2)
    codes_of_node = []
    for _ in ends:
        with start_node(tmp_path, script, 0, str(rank)) as node:
            node.communicate(timeout=30)
        codes_of_node.append(node.returncode)
    assert codes_of_node == ends


def test_a_node_passes_the_request_to_end_to_its_ranks(tmp_path) -> None:
    rank = tmp_path / "rank"
    rank.write_text(RANK)
    rank.chmod(0o755)
    for number in range(3):
        (tmp_path / f"codes-{number}").write_text("wait")
    with start_node(tmp_path, node_script(tmp_path, ranks=3), 0, str(rank)) as node:
        wait_for(lambda: len(list(tmp_path.glob("waits-*"))) == 3)
        node.send_signal(signal.SIGTERM)
        node.communicate(timeout=30)
    assert node.returncode == 203


def test_a_job_of_one_rank_goes_on_in_its_folder(tmp_path) -> None:
    rank = tmp_path / "rank"
    rank.write_text(RANK)
    rank.chmod(0o755)
    (tmp_path / "codes-0").write_text("saves 0")
    for _ in range(2):
        with start_node(tmp_path, node_script(tmp_path, ranks=1), 0, str(rank)) as node:
            node.communicate(timeout=30)
    words = (tmp_path / "words-0").read_text().splitlines()
    assert words == ["train tiny.yaml --run-dir runs/tiny", "resume runs/tiny"]


@pytest.mark.soak
def test_two_nodes_train_save_when_asked_to_end_and_go_on(tmp_path) -> None:
    """Two nodes of two ranks each; pods that are asked to end and start again. Oracle: the same without an end."""
    results = []
    for name, is_ended in (("ended", True), ("calm", False)):
        folder = tmp_path / name
        folder.mkdir()
        write_workshop(folder)
        script = node_script(folder, ranks=2, nodes=2)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        meeting["OMP_NUM_THREADS"] = "1"
        bloomery = Bloomery(folder)
        (folder / "runs").mkdir(exist_ok=True)
        (folder / "runs/one").symlink_to(folder / "runs/tiny")
        codes = []
        for number in range(2 if is_ended else 1):
            nodes = [start_node(folder, script, node, sys.executable, **meeting) for node in (0, 1)]
            if is_ended and not number:
                wait_for(bloomery.saw(StepDone, 4))
                nodes[1].send_signal(signal.SIGTERM)  # one node is drained
            told = [node.communicate(timeout=300)[0] for node in nodes]
            codes.append([node.returncode for node in nodes])
        assert codes == ([[203, 203], [0, 0]] if is_ended else [[0, 0]]), told
        resumed = [event for event in bloomery.events() if isinstance(event, Resumed)]
        assert bool(resumed) == is_ended
        results.append(losses(bloomery.run_dir))
    assert len(results[0]) == 16 and results[0] == results[1]


# The tools themselves, from the package index.

KUBEFLOW_CHECK = """
import sys, yaml
from kubernetes.client import models as kubernetes
from kubeflow.training import models as kubeflow

def check(value, kind, where):
    if kind.startswith("list["):
        for number, item in enumerate(value):
            check(item, kind[5:-1], f"{where}[{number}]")
    elif kind.startswith("dict("):
        for key, item in value.items():
            check(item, kind[5:-1].split(", ", 1)[1], f"{where}.{key}")
    elif kind in ("str", "int", "bool", "float", "object", "datetime"):
        quantity = ".limits." in where and isinstance(value, int)
        assert quantity or kind == "object" or isinstance(value, eval(kind)), (where, kind)
    else:
        model = getattr(kubeflow, kind, None) or getattr(kubernetes, kind)
        names = {name: attribute for attribute, name in model.attribute_map.items()}
        assert set(value) <= set(names), (where, set(value) - set(names))
        for name, item in value.items():
            check(item, model.openapi_types[names[name]], f"{where}.{name}")
        model(**{names[name]: item for name, item in value.items()})  # raises without a required one

for path in sys.argv[1:]:
    check(yaml.safe_load(open(path)), "KubeflowOrgV1PyTorchJob", "job")
"""
SKYPILOT_CHECK = """
import sys, sky, yaml
from sky.utils import schemas, validator
for path in sys.argv[1:]:
    task = yaml.safe_load(open(path))
    validator.get_schema_validator()(schemas.get_task_schema()).validate(task)
    validator.get_schema_validator()(schemas.get_resources_schema()).validate(task["resources"])
    assert sky.Task.from_yaml(path).num_nodes == task["num_nodes"]
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("site", "package", "check"),
    [
        ("kubernetes", "kubeflow-training==1.9.4", KUBEFLOW_CHECK),
        ("skypilot", "skypilot==0.14.1", SKYPILOT_CHECK),
    ],
)
def test_a_job_is_valid_to_its_own_tool(folder, site, package, check) -> None:
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin/python"
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", package, "pyyaml"],
        capture_output=True,
        text=True,
    )
    if installed.returncode != 0:
        pytest.skip(f"no package index: {installed.stderr.strip().splitlines()[-1]}")
    paths = []
    for number, words in enumerate(words for words in JOBS if site in words):
        paths.append(folder / f"job-{number}.yaml")
        paths[-1].write_text(job(*words))
    checked = subprocess.run(
        [python, "-c", check, *paths],
        capture_output=True,
        text=True,
        env=os.environ | {"HOME": str(folder)},
    )
    shutil.rmtree(environment)
    assert checked.returncode == 0, checked.stderr
