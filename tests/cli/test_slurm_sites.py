"""The script of `bloomery slurm` for Frontier and LUMI, rule by rule against what OLCF and LUMI publish."""

import re
import subprocess
from collections.abc import Callable
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from bloomery.cli import cli
from bloomery.hardware.sites import find_site


class Script(NamedTuple):
    """A printed script: its #SBATCH options, its lines, and what is said beside it."""

    options: dict[str, str]
    text: str
    notes: str

    def exported(self, name: str) -> str | None:
        found = re.search(rf"^export (?:.* )?{name}=(\S+)", self.text, re.MULTILINE)
        return None if found is None else found[1]

    @property
    def hours(self) -> float:
        days, _, clock = self.options["--time"].rpartition("-")
        hours, minutes, _ = clock.split(":")
        return 24 * int(days or 0) + int(hours) + int(minutes) / 60

    @property
    def cores_per_node(self) -> int:
        return int(self.options["--ntasks-per-node"]) * int(self.options["--cpus-per-task"])

    @property
    def launch(self) -> str:
        (line,) = re.findall(r"^srun .*-m bloomery train.*$", self.text, re.MULTILINE)
        return line


def dry_run(site: str, nodes: int, *words: str) -> Script:
    arguments = ["slurm", "frontier-llama3.1-8b", "--site", site, "--nodes", str(nodes)]
    arguments += ["--account", "ABC123", "--dry-run", *words]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.exception
    lines = re.findall(r"^#SBATCH (.*)$", result.stdout, re.MULTILINE)
    options = [word.partition("=") for line in lines for word in line.split()]
    return Script({name: value for name, _, value in options}, result.stdout, result.stderr)


Rule = tuple[str, Callable[[Script], bool]]
# Of frontier_user_guide.rst and pytorch_frontier.rst of July 2026: the rule as it is there, and what it means here.
OLCF: tuple[Rule, ...] = (
    ("-A project", lambda job: job.options["--account"] == "ABC123"),
    ("-N nodes", lambda job: job.options["--nodes"] == "64"),
    ("batch is the default partition", lambda job: job.options["--partition"] == "batch"),
    ("bin 5, 1 to 91 nodes: 2.0 hours at most", lambda job: job.hours == 2),
    ("56 allocatable cores", lambda job: job.cores_per_node == 56),
    (
        "8 ranks per node, each with 7 cores and 1 GPU",
        lambda job: (
            job.options["--ntasks-per-node"] == "8"
            and job.options["--gpus-per-task"] == "1"
            and "--cpus-per-task=7" in job.launch
        ),
    ),
    ("--gpu-bind=closest", lambda job: job.options["--gpu-bind"] == "closest"),
    (
        "avoid torchrun; do not nest it within srun",
        lambda job: "torchrun" not in job.text and "accelerate" not in job.text,
    ),
    ("-C nvme to use /mnt/bb", lambda job: job.options["--constraint"] == "nvme"),
    (
        "move the environment to the NVMe with sbcast",
        lambda job: "sbcast -f" in job.text and "/mnt/bb/$USER" in job.text,
    ),
    (
        "when sbcast fails, do not start from partial files",
        lambda job: "&& copied=yes" in job.text and '[ "$copied" = yes ]' in job.text,
    ),
    (
        "--network=disable_rdzv_get with rccl-net-plugin",
        lambda job: job.options["--network"] == "disable_rdzv_get",
    ),
    (
        "load rccl-net-plugin after rocm",
        lambda job: 0 < job.text.index("rocm/7.1.1") < job.text.index("rccl-net-plugin"),
    ),
    (
        "LD_LIBRARY_PATH begins with CRAY_LD_LIBRARY_PATH",
        lambda job: job.exported("LD_LIBRARY_PATH") == "$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH",
    ),
    (
        "NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3",
        lambda job: job.exported("NCCL_SOCKET_IFNAME") == "hsn0,hsn1,hsn2,hsn3",
    ),
    ("NCCL_CROSS_NIC=1", lambda job: job.exported("NCCL_CROSS_NIC") == "1"),
    ("NCCL_NET_GDR_LEVEL=PHB", lambda job: job.exported("NCCL_NET_GDR_LEVEL") == "PHB"),
    # OLCF's example has MIOpen's database on the node, too. Language models have no convolutions.
    ("MIOPEN_USER_DB_PATH", lambda job: job.exported("MIOPEN_USER_DB_PATH") is None),
    (
        "a signal before the end of the time limit",
        lambda job: 0 < int(job.options["--signal"].removeprefix("TERM@")) < 3600 * job.hours / 4,
    ),
)
# Of LUMI's partitions.md, lumig-job.md and distribution-binding.md.
LUMI: tuple[Rule, ...] = (
    ("--account=project_<id>", lambda job: job.options["--account"] == "ABC123"),
    ("standard-g: 2 days at most", lambda job: job.hours <= 48),
    ("only 56 cores are available", lambda job: job.cores_per_node == 56),
    (
        "--ntasks-per-node=8 --gpus-per-node=8",
        lambda job: job.options["--ntasks-per-node"] == job.options["--gpus-per-node"] == "8",
    ),
    (
        "mask_cpu for an application that selects its GPU by local rank",
        lambda job: (
            (
                "--cpu-bind=mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,"
                "0xfe,0xfe00,0xfe00000000,0xfe0000000000 "
            )
            in job.launch
        ),
    ),
    (
        "binding applies to whole nodes: --exclusive on other partitions",
        lambda job: "--exclusive" in job.options,
    ),
    (
        "the network's interfaces are hsn",
        lambda job: "hsn0" in (job.exported("NCCL_SOCKET_IFNAME") or ""),
    ),
)


def test_frontiers_script_keeps_olcfs_rules() -> None:
    job = dry_run("frontier", 64)
    assert [rule for rule, holds in OLCF if not holds(job)] == []
    assert "512 on 64 nodes" in job.notes


@pytest.mark.parametrize("queue", [None, "standard-g"])
def test_lumis_script_keeps_lumis_rules(queue) -> None:
    job = dry_run("lumi", 64, *([] if queue is None else ["--queue", queue]))
    assert job.options["--partition"] == "standard-g"
    assert [rule for rule, holds in LUMI if not holds(job)] == []


@pytest.mark.parametrize(
    ("site", "queue", "nodes", "hours"),
    [
        ("frontier", None, 91, 2),
        ("frontier", None, 92, 6),
        ("frontier", None, 184, 12),
        ("frontier", "extended", 64, 24),
        ("frontier", "debug", 64, 2),
        ("lumi", "dev-g", 32, 3),
        ("lumi", None, 64, 48),
    ],
)
def test_without_a_time_a_job_gets_the_queues_longest(site, queue, nodes, hours) -> None:
    words = [] if queue is None else ["--queue", queue]
    job = dry_run(site, nodes, *words, "parallel.shard=8", "parallel.replicate=auto")
    assert job.hours == hours


def test_frontiers_debug_queue_gets_no_chain_of_jobs() -> None:
    """OLCF: "Production work and job chaining using the debug QOS is prohibited"."""
    job = dry_run("frontier", 64, "--queue", "debug")
    assert job.options["--qos"] == "debug" and "--partition" not in job.options
    assert "--no-requeue" in job.options and "scontrol requeue" not in job.text
    assert "no chain of jobs" in job.notes
    checked = subprocess.run(["bash", "-n"], input=job.text, text=True, capture_output=True)
    assert checked.returncode == 0 and not checked.stderr
    assert all(queue.requeue for queue in find_site("frontier").queues if queue.name != "debug")
