"""The job script of `bloomery slurm`, with scripts for srun and scontrol: when it returns a job to the queue."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs_of_bloomery import losses, write_workshop

from bloomery.hardware.sites import Site
from bloomery.launch.job_script import write_job_script
from bloomery.monitor.events import Resumed, read_events

JOB = "77"
# `attempts.json`: for each start the exit code, and the checkpoints that exist afterwards. `faulty`, if it exists,
# is what the run says of its hosts.
SRUN = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
if sys.argv[-1] == "true":  # the step before the training
    sys.exit(0)
attempts = json.loads(Path("attempts.json").read_text())
number = len(Path("starts").read_text()) if Path("starts").exists() else 0
Path("starts").write_text("x" * (number + 1))
with open("commands", "a") as commands:
    print(*sys.argv[sys.argv.index("bloomery") + 1:], file=commands)
code, steps = attempts[number]
for step in steps:
    os.makedirs(f"runs/frontier-slurm-{JOB}.1/checkpoints/step-{{step:08d}}", exist_ok=True)
    Path("runs/frontier-slurm-{JOB}.1/recipe.yaml").touch()
if os.path.exists("stops"):  # `bloomery stop`
    os.replace("stops", "runs/frontier-slurm-{JOB}.1/stop-requested")
if os.path.exists("faulty"):
    os.makedirs("runs/frontier-slurm-{JOB}.1", exist_ok=True)
    os.replace("faulty", "runs/frontier-slurm-{JOB}.1/excluded-hosts.txt")
sys.exit(code)
"""
# As Slurm does, `requeue` ends the script that asks for it, and `update` refuses a job that does not wait.
SCONTROL = """#!/bin/bash
[ "$2" = 77 ] || [ "$2" = JobId=77 ] || exit 1
case $1 in
  requeue) touch requeued; kill -TERM $PPID;;
  update) [ -f requeued ] || exit 1; echo "$3" >> updates;;
esac
"""
# Two ranks of one node, as srun starts them; on the first start one of them is killed after a checkpoint.
REAL_SRUN = f"""#!{sys.executable}
import json, os, signal, subprocess, sys, time
from pathlib import Path
if sys.argv[-1] == "true":
    sys.exit(0)
first = not Path("started").exists()
Path("started").touch()
ranks = []
for rank in "01":
    own = {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "1",
           "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_RESTART_COUNT": "0" if first else "1"}}
    ranks.append(subprocess.Popen([*sys.argv[1:], "-d", "cpu"], env=os.environ | own))
checkpoints = Path("runs/tiny-slurm-{JOB}.1/checkpoints")
while first and not list(checkpoints.glob("step-*")) and ranks[1].poll() is None:
    time.sleep(0.02)
if first:
    os.kill(ranks[1].pid, signal.SIGKILL)
codes = [rank.wait() for rank in ranks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""


def script(
    arguments: str = "frontier.yaml",
    *,
    ranks: int = 2,
    excluded_hosts: str | None = None,
    command: str = "bloomery slurm",
) -> str:
    """As for a site without modules and GPUs."""
    job = write_job_script(
        Site(gpu="cpu", gpus_per_node=ranks),
        site_name="generic",
        name="frontier",
        arguments=arguments,
        command=command,
        nodes=1,
        account=None,
        seconds=3600,
        queue_name=None,
        excluded_hosts=excluded_hosts,
        step_seconds=1.0,
        save_seconds=0.0,
        run_seconds=None,
    )
    assert "--signal=TERM@" in job.text and "--requeue" in job.text
    return job.text


def run_job(folder: Path, text: str, srun: str, *, most: int = 10) -> list[int]:
    """Runs the job as often as it returns to the queue: the exit code of each start."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, program in (("srun", srun), ("scontrol", SCONTROL)):
        (programs / name).write_text(program)
        (programs / name).chmod(0o755)
    (folder / "job.sh").write_text(text)
    variables = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": JOB}
    codes: list[int] = []
    while len(codes) < most:
        (folder / "requeued").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", "job.sh"], cwd=folder, env=variables, capture_output=True, check=False
        )
        codes.append(done.returncode)
        if not (folder / "requeued").exists():
            break
    return codes


@pytest.mark.parametrize(
    ("attempts", "starts"),
    [
        ([(0, [])], 1),
        ([(2, [])], 1),  # a mistake in the recipe stays one
        # the time limit, as often as it comes
        ([(75, [5]), (75, [9]), (75, [12]), (75, [15]), (0, [20])], 5),
        ([(1, [5]), (0, [20])], 2),
        ([(1, []), (1, []), (1, []), (0, [])], 3),  # twice again, and no more
        ([(1, [5]), (1, [5]), (1, [5]), (0, [])], 3),
        # a new checkpoint counts anew
        ([(137, [5]), (1, [5]), (1, [5, 9]), (1, [9]), (1, [9]), (0, [])], 5),
        ([(1, [5]), (75, [5]), (1, [5]), (1, [5]), (0, [])], 4),  # a stop in between does not
    ],
)
def test_a_job_returns_to_the_queue_at_most_twice_without_a_new_checkpoint(
    tmp_path, attempts, starts
) -> None:
    (tmp_path / "attempts.json").write_text(json.dumps(attempts))
    assert run_job(tmp_path, script(), SRUN) == [code for code, _ in attempts[:starts]]


@pytest.mark.parametrize(
    ("given", "faulty", "excluded"),
    [
        (None, None, []),
        (None, "", []),
        (None, "node17\n", ["ExcNodeList=node17"]),
        ("node1,node[3-4]", "node9.cluster.org\nnode17\nnode9\n", None),
        (None, "$(touch harm)\n; touch harm\n", []),
    ],
)
def test_a_job_returns_to_the_queue_without_the_hosts_that_its_run_names(
    tmp_path, given, faulty, excluded
) -> None:
    (tmp_path / "attempts.json").write_text(json.dumps([(1, [5]), (0, [20])]))
    if faulty is not None:
        (tmp_path / "faulty").write_text(faulty)
    assert run_job(tmp_path, script(excluded_hosts=given), SRUN) == [1, 0]
    updates = tmp_path / "updates"
    made = updates.read_text().splitlines() if updates.exists() else []
    assert made == (["ExcNodeList=node1,node[3-4],node17,node9"] if excluded is None else excluded)
    assert not (tmp_path / "harm").exists()


def test_an_argument_of_several_lines_does_not_end_the_options_of_the_job() -> None:
    """Slurm reads no options after the first line that is no comment."""
    arguments = """a.yaml 'sample.prompts=["first line\ntouch harm"]'"""
    text = script(arguments, command=f"bloomery slurm {arguments} --nodes 1")
    options, _, _ = text.rpartition("#SBATCH")
    assert [line for line in options.splitlines() if not line.startswith("#")] == []


def test_a_job_that_the_user_stops_does_not_return_to_the_queue(tmp_path) -> None:
    (tmp_path / "attempts.json").write_text(json.dumps([(75, [5]), (75, [9]), (0, [])]))
    assert run_job(tmp_path, script(), SRUN, most=1) == [75]  # the time limit
    (tmp_path / "stops").touch()
    assert run_job(tmp_path, script(), SRUN) == [75]
    assert not (tmp_path / f"runs/frontier-slurm-{JOB}.1/stop-requested").exists()


def test_a_job_of_one_rank_goes_on_in_its_folder(tmp_path) -> None:
    # The first start is killed when it has made the folder, and nothing in it.
    run = f"runs/frontier-slurm-{JOB}.1"
    (tmp_path / run).mkdir(parents=True)
    (tmp_path / "attempts.json").write_text(json.dumps([(137, []), (75, [5]), (0, [20])]))
    assert run_job(tmp_path, script("a.yaml train.seed=7", ranks=1), SRUN) == [137, 75, 0]
    train = f"train a.yaml train.seed=7 --run-dir {run}"
    commands = (tmp_path / "commands").read_text().splitlines()
    assert commands == [train, train, f"resume {run}"]


@pytest.mark.soak
def test_a_job_whose_rank_is_killed_is_requeued_and_resumes(tmp_path) -> None:
    write_workshop(tmp_path)
    text = script("tiny.yaml")
    assert run_job(tmp_path, text, REAL_SRUN, most=4) == [137, 0]
    run = tmp_path / f"runs/tiny-slurm-{JOB}.1"
    assert [event for event in read_events(run / "events.jsonl") if isinstance(event, Resumed)]
    assert len(losses(run)) == 16
