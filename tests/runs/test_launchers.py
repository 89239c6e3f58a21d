"""Ranks as processes: launchers, deaths, hangs and stops. Oracle of a run: the undisturbed one on the same mesh."""

import importlib.util
import json
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from plans_of_runs import plan_of
from runs_of_bloomery import (
    Bloomery,
    losses,
    rank_process,
    ranks_of,
    wait_for,
    write_workshop,
)

import preloaded
from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder
from bloomery.core.run_lock import hold_run_lock
from bloomery.core.signals import StopRequests
from bloomery.hardware.detect import detect
from bloomery.launch import supervisor, worker
from bloomery.launch.launchers import Board, current_launch, new_folder
from bloomery.launch.stage_ends import Stage, StageResult, failure, training_place
from bloomery.launch.supervisor import run_stage
from bloomery.monitor.events import (
    Event,
    Phase,
    Recovered,
    Resumed,
    RunEnded,
    StepDone,
    Warned,
    read_events,
)
from bloomery.plan.store import read_plan, write_sealed
from bloomery.plan.types import Estimate
from bloomery.recipe.load import load_recipe, unset_keys
from bloomery.runs.devices import chosen_devices
from bloomery.runs.follow import follow_rank_0
from bloomery.runs.lifecycle import start
from bloomery.runs.new_run import new_run
from bloomery.runs.resume_plan import refuse_other_recipe
from ranks import train as train_on_ranks

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job7",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-a-12@1",
}
PMI = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "PBS_JOBID": "99.pbs",
}


@pytest.mark.parametrize(
    ("given", "launcher", "place", "job"),
    [
        (TORCHRUN, "torchrun", (1, 4, 1, 2), "torchrun-job7"),
        (
            TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"},
            "accelerate launch",
            (1, 4, 1, 2),
            "torchrun-job7",
        ),
        (SRUN, "srun", (5, 8, 1, 4), "slurm-4711.0"),
        (OPEN_MPI, "mpirun (Open MPI)", (3, 4, 1, 2), "mpi-prterun-a-12@1"),
        (PMI, "mpiexec (PMI)", (1, 2, 1, 2), "mpi-99.pbs"),
        # One daemon of an inner launcher on each host of a Slurm step: the ranks are the inner ones.
        (
            SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} | OPEN_MPI,
            "mpirun (Open MPI)",
            (3, 4, 1, 2),
            "mpi-prterun-a-12@1",
        ),
        (
            SRUN | {"SLURM_STEP_NUM_TASKS": "2"} | TORCHRUN,
            "torchrun",
            (1, 4, 1, 2),
            "torchrun-job7",
        ),
    ],
)
def test_the_launcher_is_read_from_its_variables(given, launcher, place, job) -> None:
    launch = current_launch(given)
    assert launch is not None
    assert (launch.launcher, launch.job) == (launcher, job)
    assert (launch.rank, launch.world, launch.local_rank, launch.local_world) == place


def test_no_launcher() -> None:
    assert current_launch({}) is None
    assert current_launch({"RANK": "0", "WORLD_SIZE": "1"}) is None
    batch_script = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"} | {
        "SLURM_PROCID": "0"
    }
    assert current_launch(batch_script) is None
    with pytest.raises(UserError, match="RANK=4 is not a rank of WORLD_SIZE=4"):
        current_launch(TORCHRUN | {"RANK": "4"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("WORLD_SIZE", "two"),
        ("WORLD_SIZE", "0"),
        ("RANK", "-1"),
        ("RANK", "first"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("MASTER_PORT", "99999"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "http"),
    ],
)
def test_a_variable_that_is_no_number_is_named(name, text) -> None:
    with pytest.raises(UserError, match=f"{name}={text} is not") as refused:
        current_launch(TORCHRUN | {name: text})
    assert refused.value.where and refused.value.fix and refused.value.code == 2


def test_more_ranks_than_any_machine_has_are_refused_at_once() -> None:
    with pytest.raises(UserError, match="1,000,000,000 ranks"):
        current_launch(TORCHRUN | {"WORLD_SIZE": "1000000000"})
    with pytest.raises(UserError, match="1,000 processes on one CPU"):
        chosen_devices(detect(), ",".join(["cpu"] * 1000))


def test_a_restart_is_another_start_of_the_same_job_and_ranks_agree_on_both() -> None:
    first, other = (
        current_launch(TORCHRUN),
        current_launch(TORCHRUN | {"RANK": "2", "LOCAL_RANK": "0"}),
    )
    again = current_launch(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert first and other and again
    assert (first.job, first.start) == (other.job, other.start)
    assert first.job == again.job and first.start != again.start


def test_ranks_that_were_started_in_two_shells_agree_on_the_start(monkeypatch) -> None:
    """The later one heard rank 0, and took its messages for those of another start: it waited without end."""
    given = by_hand_variables(0)
    first = current_launch(given)
    monkeypatch.setattr("bloomery.launch.launchers.os.getppid", lambda: os.getpid())
    second = current_launch(given | {"RANK": "1"})
    assert first and second and first.job != second.job
    assert (first.start, first.meeting) == (second.start, second.meeting)


def test_a_job_name_that_is_used_again_does_not_continue_a_run_of_another_recipe(
    tmp_path, monkeypatch
) -> None:
    for name, value in (TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    write_workshop(tmp_path)
    recipe = next(tmp_path.glob("*.yaml"))
    with new_run(load_recipe(recipe), tmp_path / "run") as (folder, _):
        write_sealed(folder.path, {"plan.json": "{}"})
        board = Board(folder, current_launch())
        board.begin(resumed=False)
    with pytest.raises(
        UserError, match=r"torchrun-job7 has another recipe: train.seed is \d+ there, and 77 now"
    ):
        start(load_recipe(recipe, ["train.seed=77"]), run_dir=folder.path)
    # what a resumed run may change
    longer = load_recipe(recipe, ["train.max_steps=77", "eval.every=5"])
    refuse_other_recipe(folder, longer, job="torchrun-job7")

    # A default that another version had, in a run of that version: neither recipe sets the key.
    text = folder.recipe.read_text()
    older = text.replace("momentum: 0.95  # default", "momentum: 0.9  # default")
    assert older != text and "optimizer.momentum" in unset_keys(text)
    write_sealed(folder.path, {folder.recipe.name: older})
    refuse_other_recipe(folder, load_recipe(recipe), job="torchrun-job7")
    with pytest.raises(UserError, match=r"optimizer.momentum is 0.9 there, and 0.8 now"):
        refuse_other_recipe(
            folder, load_recipe(recipe, ["optimizer.momentum=0.8"]), job="torchrun-job7"
        )


def test_the_run_folder_has_the_name_of_the_job(monkeypatch) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert new_folder("my recipe").name == "my-recipe-slurm-4711.0"
    for name in SRUN:
        monkeypatch.delenv(name)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "far",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="cannot agree on a run folder"):
        new_folder("my recipe")


# Ranks that compute nothing: what the launcher makes of their ends.


@pytest.fixture
def act(tmp_path, monkeypatch):
    """Runs ranks with these acts; the error's sentence, or the exit code. None of them is left."""
    monkeypatch.setattr(supervisor, "WORKER", "paper_rank_worker")
    monkeypatch.setattr(supervisor, "LAST_WORDS_SECONDS", 1.5)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])
    }

    def run(*acts: list[str], hang: float = 0.0, requests: StopRequests | None = None) -> str | int:
        (tmp_path / "acts.json").write_text(json.dumps(dict(enumerate(acts))))
        own = environment | ({"BLOOMERY_HANG_SECONDS": str(hang / 10)} if hang else {})
        began = time.monotonic()
        ended = run_stage(
            "train",
            folder,
            environment=own,
            inherited=(),
            requests=requests or StopRequests(),
            on_event=lambda _: None,
            on_line=lambda _: None,
            ranks=len(acts),
        )
        assert time.monotonic() - began < 25
        assert ranks_of(folder.path) == []
        return ended.code if ended.code in (0, 75) else str(failure(ended, folder, step=3))

    return run


def test_a_rank_that_dies_is_named_and_ends_the_others(act) -> None:
    told = act(["steps 3", "hang"], ["nap 0.3", "kill 9"])
    assert "rank 1 of training process killed from outside after step 3 (SIGKILL)" in told


def test_a_rank_that_hangs_is_named_by_its_stack(act, tmp_path) -> None:
    told = act(["wait"], ["hang"], hang=1.5)
    assert "rank 1 hangs in sleep (paper_rank_worker.py:" in told
    assert "all_reduce" in (tmp_path / "run/stacks/rank-0.txt").read_text()


def test_a_stopped_rank_is_named_though_it_says_nothing(act) -> None:
    assert "rank 1 does not respond" in act(["wait"], ["stop", "hang"], hang=1.5)


def test_a_rank_that_never_begins_is_named(act, tmp_path) -> None:
    told = act(["wait"], ["late"], hang=1.5)
    assert "rank 1 does not respond: it was not started" in told
    assert "all_reduce" in (tmp_path / "run/stacks/rank-0.txt").read_text()


def test_a_rank_whose_device_is_behind_is_named_where_all_hosts_wait_for_devices(
    act, tmp_path
) -> None:
    """As on GPUs: no stack is inside a collective. Rank 2 has not entered the one in which the others wait."""
    waits = ["notes 8 7 sum of gradients, replicate", "hang"]
    told = act(waits, waits, ["notes 7 7 all_reduce", "hang"], waits, hang=1.5)
    assert "rank 2 hangs in sleep (paper_rank_worker.py:" in told
    assert "and the others wait for it in collective 8 (sum of gradients, replicate)" in told
    lines = (tmp_path / "run/stacks/collectives.txt").read_text().splitlines()
    assert lines[2] == "rank 2: collective 7 (all_reduce) is its last finished one"
    assert lines[3].startswith("rank 3: collective 7 (sum of gradients, replicate) is its last")
    assert lines[3].endswith("it waits in 8 (sum of gradients, replicate)")


def test_a_rank_in_an_earlier_collective_than_the_others_is_named(act) -> None:
    late = ["notes 7 6 all_gather, shard", "hang"]
    ahead = ["notes 9 8 all_reduce", "hang"]
    assert "rank 1 hangs in sleep" in act(ahead, late, ahead, hang=1.5)
    # Where all wait in the same one, none of them is behind.
    told = act(ahead, ahead, hang=1.5)
    assert "training hangs on all ranks, in sleep" in told
    assert "in collective 9 (all_reduce)" in told


def test_of_several_hosts_the_one_of_the_rank_behind_is_left_out(act, tmp_path) -> None:
    waits = ["hosts n1 n1 n2 n2", "notes 8 7 all_reduce", "hang"]
    told = act(waits, waits, ["notes 7 7 all_reduce", "hang"], waits, hang=1.5)
    assert "rank 2 on n2 hangs in sleep" in told
    assert "leave the host out: start the ranks on other hosts than n2" in told
    assert "rank 2 on n2: collective 7" in (tmp_path / "run/stacks/collectives.txt").read_text()
    # All ranks of a host are stopped.
    stopped = ["notes 7 7 all_reduce", "stop", "hang"]
    told = act(waits, waits, stopped, stopped, hang=1.5)
    assert "host n2, with 2 ranks from 2 to 3, does not respond: it is stopped" in told


def test_the_report_of_one_rank_is_told_with_its_number(act) -> None:
    told = act(["wait"], ["report unreadable 1"])
    assert told.startswith("error: unreadable") and "rank 1" in told
    told = act(["report same 1"], ["report same 1"])
    assert told.startswith("error: same") and "rank" not in told


def test_a_lost_connection_does_not_hide_the_error_that_closed_it(act) -> None:
    lost = "say RuntimeError: [enforce fail] Connection closed by peer [127.0.0.1]:3000"
    told = act([lost, "exit 1"], ["nap 0.3", "say ValueError: the first cause", "exit 1"])
    assert told.startswith("error: rank 1 of training failed after step 3: ValueError"), told


class SilentRank:
    """As on a GPU: it waits for its device, and does not notice that another rank has ended."""

    code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def dump(self) -> None:
        """It has no stack."""

    def kill(self) -> None:
        self.code = -signal.SIGKILL

    def result(self, stage: Stage, rank: int | None) -> StageResult:
        return StageResult(stage, -signal.SIGKILL, None, (), rank)


def test_a_report_is_told_though_ranks_of_other_processes_wait_in_silence(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(supervisor, "PEER_WORDS_SECONDS", 0.1)
    report = {"problem": "out of memory", "where": "", "fix": "", "code": 1, "host": ""}
    ends = {2: {"code": worker.OUT_OF_MEMORY, "report": report, "tail": [], "host": "n2"}}
    board = SimpleNamespace(end_of=ends.get)
    peers = {rank: supervisor._Peer(board, rank) for rank in (1, 2, 3)}
    group = supervisor._Group({0: SilentRank(), **peers}, 4, RunFolder(tmp_path))
    wait_for(group.over)
    ending = group.result("train")
    assert (ending.rank, ending.code, ending.report) == (2, worker.OUT_OF_MEMORY, report)
    assert not ending.lost

    # Where no rank explains the end, one that is gone without a word does.
    lost = StageResult("train", 1, None, ("RuntimeError: Connection closed by peer",), 0)
    first = SilentRank()
    monkeypatch.setattr(first, "result", lambda stage, rank: lost)
    first.code = 1
    group = supervisor._Group({0: first, 1: supervisor._Peer(board, 1)}, 2, RunFolder(tmp_path))
    wait_for(group.over)
    assert group.result("train").rank == 1 and group.result("train").lost


def test_an_agreed_save_and_a_stop_before_the_first_step_are_75(act) -> None:
    assert act(["steps 1", "save", "exit 75"], ["exit 75"]) == 75
    assert act(["exit 1"], ["exit 75"]) == 75  # rank 0 only lost the other


def test_a_stop_that_no_step_answers_ends_on_the_last_checkpoint(
    act, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.5)
    requests = StopRequests()

    def ask() -> None:
        wait_for(lambda: len(list((tmp_path / "run").glob("deaf-*"))) == 2)
        requests.ask(signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    assert act(["deaf", "hang"], ["deaf", "hang"], requests=requests) == 75
    asking.join()


def test_a_stop_waits_for_steps_as_long_as_the_plan_has_them(act, monkeypatch, tmp_path) -> None:
    """A step of 76 s, as on Frontier, was ended 25 s after the signal, and its run lost all since the last save."""
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.5)
    step_seconds = Estimate(value=2.0, low=1.0, high=4.0, origin="table")
    plan = plan_of().model_copy(update={"step_seconds": step_seconds})
    monkeypatch.setattr(supervisor, "read_plan", lambda _: plan)
    requests = StopRequests()

    def ask() -> None:
        wait_for(lambda: len(list((tmp_path / "run").glob("deaf-*"))) == 2)
        requests.ask(signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    step = ["deaf", "nap 2", "save", "nap 0.2", "exit 75"]
    assert act(step, step, requests=requests) == 75
    asking.join()
    events = list(read_events(tmp_path / "run/events.jsonl"))
    assert any(isinstance(event, Phase) and event.name == "saving" for event in events)


def test_where_a_rank_waits_is_read_from_its_main_thread() -> None:
    stack = """Timeout (0:02:00)!
Thread 0x01 (most recent call first):
  File "/lib/threading.py", line 1 in wait
Thread 0x02 (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 3 in all_reduce
  File "/src/bloomery/parallel/mesh.py", line 90 in _all_reduce_floats
  File "/src/bloomery/launch/worker.py", line 80 in main
"""
    place = training_place(stack)
    assert place.waits and place.line == "_all_reduce_floats (mesh.py:90)"
    assert not training_place(stack.replace("torch/distributed", "numpy")).waits


def test_a_rank_that_waits_for_a_scoring_process_is_the_one_that_the_others_wait_for() -> None:
    stack = """Timeout (0:02:00)!
Thread 0x02 (most recent call first):
  File "/src/bloomery/core/child.py", line 148 in _converse
  File "/src/bloomery/core/child.py", line 122 in next
  File "/src/bloomery/train/scorers/client.py", line 77 in _next
  File "/src/bloomery/launch/worker.py", line 80 in main
"""
    place = training_place(stack)
    assert not place.waits and place.line == "a request to a scoring process (client.py:77)"


# Ranks that a launcher started: one process supervises each.


def launched(rank: int, restart: int = 0):
    given = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "a",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
    }
    launch = current_launch(given)
    assert launch is not None
    return launch


def test_ranks_of_a_launcher_start_together_and_hear_the_end_of_rank_0(tmp_path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    first, second = Board(folder, launched(0)), Board(folder, launched(1))
    heard = []
    with hold_run_lock(folder), closing(second), closing(first):
        Board(folder, launched(0)).conclude(1)  # of an earlier start with the same variables
        first.open()
        waiting = threading.Thread(target=lambda: heard.append(second.wait(lambda: False)))
        waiting.start()
        time.sleep(0.3)
        assert not heard
        first.begin(resumed=False)
        waiting.join(60)
        assert heard[0].attempt == 0 and heard[0].code is None and heard[0].port > 0
        assert not second.over()
        second.leave(1, StageResult("train", 4, {"problem": "out of memory"}, ("last",)))
        wait_for(lambda: first.end_of(1) is not None)
        assert first.end_of(1)["report"] == {"problem": "out of memory"}
        first.begin(resumed=True)  # again, with safer settings
        again = second.wait(lambda: False)
        assert again is not None and (again.attempt, again.resumed) == (1, True)
        assert first.end_of(1) is None
        assert not second.saves()
        first.save()
        wait_for(second.saves)
        first.conclude(1)
        last = second.wait(lambda: False)
    assert last is not None and last.code == 1


def by_hand_variables(rank: int, world: int = 2, port: int = 29511) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def by_hand(rank: int, world: int = 2, port: int = 29511):
    launch = current_launch(by_hand_variables(rank, world, port))
    assert launch is not None
    return launch


@pytest.fixture
def locked_run(tmp_path):
    """The folder of a run that a process has locked."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.recipe.touch()
    with hold_run_lock(folder):
        yield folder


@pytest.mark.parametrize(
    ("launches", "problem"),
    [
        ((by_hand(0), by_hand(0)), "two processes have rank 0: process "),
        ((by_hand(0), by_hand(1), by_hand(1)), "two processes have rank 1: process "),
        (
            (by_hand(0), by_hand(1, world=3)),
            "rank 0 was started as one of 2 ranks, and rank 1 as one of 3",
        ),
        (
            (by_hand(0, world=3), by_hand(1)),
            "rank 0 was started as one of 3 ranks, and rank 1 as one of 2",
        ),
    ],
)
def test_processes_of_a_launch_see_its_mistakes(locked_run, launches, problem) -> None:
    with ExitStack() as stack:
        boards = [stack.enter_context(closing(Board(locked_run, each))) for each in launches]
        boards[0].open()
        for board in boards[1:]:
            board._client.start()
        wait_for(lambda: all(board._client.state.mistake for board in boards[1:]))
        told = [boards[0].mistake(), *(board._client.state.error() for board in boards[1:])]
        # Rank 0 ends with it. Who only reads the files after that still knows better than "rank 0 failed".
        boards[0].conclude(1)
        boards[0].close()
        wait_for(lambda: boards[-1]._client.state.version != "")
        told.append(boards[-1]._client.state.error())
    sentences = {(error.problem, error.where, error.fix, error.code) for error in told}
    ((said, where, fix, code),) = sentences
    assert said.startswith(problem) and where and fix and code == 2


def test_a_right_launch_and_another_one_have_no_mistake(locked_run) -> None:
    """The other launch cannot lock the folder."""
    launches = [by_hand(0), by_hand(1), by_hand(1, port=29512)]
    with ExitStack() as stack:
        first, second, other = (
            stack.enter_context(closing(Board(locked_run, each))) for each in launches
        )
        first.open()
        assert first.absent() == "1 of 2 ranks, such as rank 1"
        for board in (second, other):
            board._client.start()
        wait_for(lambda: first.absent() == "" and other._client.state.looked)
        assert first.mistake() is None and second.mistake() is None and other.mistake() is None


def test_a_second_rank_0_is_told_what_is_wrong(locked_run) -> None:
    with closing(Board(locked_run, by_hand(0))) as first:
        first.open()
        second = Board(locked_run, by_hand(0))
        with closing(second), pytest.raises(UserError, match="two processes have rank 0"):
            second.refuse_second_start()
        wait_for(lambda: first.mistake() is not None)


def test_a_rank_says_that_it_waits_for_rank_0(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("bloomery.launch.launchers.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("bloomery.launch.launchers.FIRST_MESSAGE_SECONDS", 1.0)
    said = list[str]()
    board = Board(RunFolder(tmp_path / "run"), by_hand(1))
    assert board.wait(lambda: False, said.append) is None
    assert not board.met_rank_0
    (sentence,) = said
    assert sentence.startswith("for rank 0, at most 1 s") and str(tmp_path / "run") in sentence


def test_a_rank_that_waits_for_rank_0_in_vain_does_not_call_it_ended(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("bloomery.launch.launchers.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("bloomery.launch.launchers.FIRST_MESSAGE_SECONDS", 1.0)
    with pytest.raises(UserError, match="rank 0 did not come to rank 1"):
        follow_rank_0(by_hand(1), tmp_path / "run", "cpu")
    assert "waiting    for rank 0" in capsys.readouterr().err


def test_a_later_rank_points_to_the_error_of_rank_0(locked_run, monkeypatch, capsys) -> None:
    Board(locked_run, by_hand(0)).conclude(1)
    monkeypatch.setattr("bloomery.launch.launchers.GONE_SECONDS", 0.5)
    with monkeypatch.context() as patched:
        patched.setattr("bloomery.launch.launchers.worked_on", lambda _: False)
        assert follow_rank_0(by_hand(1), locked_run.path, "cpu").code == 1
    told = capsys.readouterr().err
    assert "ended      by rank 0, which failed" in told and str(locked_run.log) in told


def test_rank_0_names_the_ranks_that_have_not_come(locked_run, monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "QUIET_SECONDS", 0.0)
    heard = list[Event]()
    with (
        closing(Board(locked_run, by_hand(0, world=3))) as board,
        closing(Board(locked_run, by_hand(1, world=3))) as second,
    ):
        board.open()
        second._client.start()
        wait_for(lambda: "rank 1" not in board.absent())
        absence = supervisor._Absence(board, heard.append)
        absence.look()
        absence.look()
        (warning,) = heard
        assert (
            isinstance(warning, Warned)
            and "training waits for 1 of 3 ranks, such as rank 2" in warning.reason
        )
        board.met()
        assert board.absent() == ""


def test_a_killed_process_is_no_second_one_and_its_end_is_seen(locked_run, monkeypatch) -> None:
    """A launcher starts its ranks again in the same folder. Slurm has a name of its own for the host."""
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    rank_1 = (
        "import json, os, sys, time; from pathlib import Path;"
        "from bloomery.core.run_folder import RunFolder;"
        "from bloomery.launch.launchers import Board, current_launch;"
        "board = Board(RunFolder(Path(sys.argv[1])), current_launch(json.loads(sys.argv[2])));"
        "board._client.start(); time.sleep(60)"
    )
    given = by_hand_variables(1)
    with closing(Board(locked_run, by_hand(0))) as board:
        board.open()
        for _ in range(2):
            board.begin(resumed=False)
            words = [sys.executable, "-c", rank_1, str(locked_run.path), json.dumps(given)]
            with preloaded.Popen(words) as process:
                wait_for(lambda: board.absent() == "")
                assert board.end_of(1) is None
                process.kill()
                process.wait()
                wait_for(lambda: board.end_of(1) is not None)
                assert board.end_of(1)["code"] == -signal.SIGKILL
                # It is the host of rank 0 as well, which is not to be left out.
                peer = supervisor._Peer(board, 1)
                assert peer.poll() == -signal.SIGKILL
                assert peer.result("train", 1).lost and peer.result("train", 1).host == ""
        assert board.mistake() is None


def ended_ranks(bloomery: Bloomery, *environments: dict[str, str]) -> list[tuple[int, str]]:
    """Exit code and stderr of processes that are started together, each within 20 seconds of processor time."""
    words = ("train", "tiny.yaml", "--run-dir", "runs/one", "-d", "cpu")
    with ExitStack() as stack:
        processes = []
        for environment in environments:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                processes.append(stack.enter_context(bloomery.start(*words)))
        return [
            (process.returncode, err)
            for process in processes
            for _, err in [process.communicate(timeout=60)]
        ]


def variables(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        pytest.param([(0, 2), (1, 2), (1, 2)], "two processes have rank 1", id="rank 1 twice"),
        pytest.param([(0, 2), (0, 2)], "two processes have rank 0", id="rank 0 twice"),
        pytest.param(
            [(0, 2), (1, 3)],
            "rank 0 was started as one of 2 ranks",
            id="other sizes",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_wrong_launch_ends_every_process_with_one_sentence(
    bloomery, one_thread, members, problem
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ends = ended_ranks(bloomery, *(variables(rank, world, port) for rank, world in members))
    assert [code for code, _ in ends] == [2] * len(members), ends
    for _, said in ends:
        assert (
            said.count("error: ") == said.count("where: ") == said.count("fix: ") == 1
            and problem in said
        ), said
        assert "Traceback" not in said


def test_a_taken_port_is_named_before_data_is_prepared(bloomery, one_thread, tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ends = ended_ranks(bloomery, variables(0, 2, port), variables(1, 2, port))
    assert [code for code, _ in ends] == [1, 1], ends
    assert f"port {port} of 127.0.0.1 is taken" in ends[0][1]
    assert "by rank 0, which failed" in ends[1][1]
    assert not list(tmp_path.rglob("*.bin"))


def test_rank_0_does_not_look_for_another_rank_0_after_an_error_of_its_own_run(
    bloomery, monkeypatch
) -> None:
    """That would delay every error of a run by three seconds."""
    looks = list[Board]()
    monkeypatch.setattr(Board, "refuse_second_start", lambda board: looks.append(board))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for name, value in variables(0, 2, taken.getsockname()[1]).items():
            monkeypatch.setenv(name, value)
        told = bloomery.here("train", "tiny.yaml", "--run-dir", "runs/one", "-d", "cpu")
    assert told.returncode == 1 and "is taken" in told.stderr
    assert looks == []


def test_a_rank_hears_of_a_failure_that_was_over_before_it_looked_again(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("bloomery.launch.launchers.GONE_SECONDS", 60.0)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    first = Board(folder, launched(0))
    first.conclude(1)  # an earlier start of the same launch
    heard = []
    waiting = threading.Thread(
        target=lambda: heard.append(Board(folder, launched(1)).wait(lambda: False))
    )
    waiting.start()
    time.sleep(0.5)
    assert not heard
    with closing(first):
        first.open()
        first.message = None
        first.conclude(1)  # the run folder is not locked any more
        waiting.join(60)
    assert heard and heard[0].code == 1


def test_another_start_is_not_heard_and_without_rank_0_a_rank_ends(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("bloomery.launch.launchers.FIRST_MESSAGE_SECONDS", 0.5)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    Board(folder, launched(0, restart=0)).begin(resumed=False)
    assert Board(folder, launched(1, restart=1)).wait(lambda: False) is None


def test_a_rank_that_cannot_start_tells_rank_0(tmp_path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with hold_run_lock(folder), closing(Board(folder, launched(0))) as first:
        first.open()
        first.begin(resumed=False)
        with pytest.raises(UserError) as told:  # the plan cannot be read there
            follow_rank_0(launched(1), folder.path, "cpu")
        wait_for(lambda: first.end_of(1) is not None)
        ended = first.end_of(1)
    assert ended is not None and ended["code"] == 1
    assert ended["report"]["problem"] == told.value.problem and "plan.json" in str(told.value)


# Real ranks.

TRAIN = ("train", "tiny.yaml", "--run-dir", "runs/one", "-d", "cpu,cpu")


@pytest.fixture
def bloomery(tmp_path) -> Bloomery:
    write_workshop(tmp_path)
    return Bloomery(tmp_path)


@pytest.fixture
def one_thread(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")


def struck(bloomery: Bloomery, number: int, *, rank: int | None, step: int) -> str:
    """Starts or resumes the run and sends the signal to a rank after that step (None: to all); the error."""
    words = TRAIN if bloomery.go_on[0] == "train" else bloomery.go_on
    begun = len(bloomery.events())
    with bloomery.start(*words) as process:

        def moment() -> bool:
            events = bloomery.events()[begun:]
            return any(isinstance(event, StepDone) and event.step >= step for event in events)

        wait_for(lambda: moment() or process.poll() is not None)
        struck = [
            rank_process(bloomery.run_dir, each) for each in ([0, 1] if rank is None else [rank])
        ]
        for each in filter(None, struck):
            with suppress(ProcessLookupError):  # the first kill may have ended the other rank
                os.kill(each, number)
        since = time.monotonic()
        _, told = process.communicate(timeout=60)
        assert time.monotonic() - since < 15
    assert ranks_of(bloomery.run_dir) == []
    assert "Traceback" not in told
    return told if process.returncode == 1 else str(process.returncode)


def assert_as_undisturbed(bloomery: Bloomery) -> None:
    """Oracle: the same plan trained without a stop, by ranks that no launcher supervises."""
    plan = read_plan(bloomery.run_dir / "plan.json")
    assert plan.train.ranks == 2
    calm = bloomery.folder / "calm"
    events = train_on_ranks(plan, calm)
    expected = {event.step: event.loss for event in events if isinstance(event, StepDone)}
    assert dict(enumerate(losses(bloomery.run_dir), 1)) == expected
    ours, theirs = (folder / "checkpoints/step-00000016" for folder in (bloomery.run_dir, calm))
    names = sorted(path.name for path in theirs.glob("*.safetensors"))
    assert names
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def test_killed_ranks_leave_no_trace(bloomery, one_thread) -> None:
    """Two kills and a stop: of one rank, of both."""
    assert "rank 0 of training process killed from outside" in struck(
        bloomery, signal.SIGKILL, rank=0, step=2
    )
    assert struck(bloomery, signal.SIGTERM, rank=1, step=5) == "75"
    assert "killed from outside" in struck(bloomery, signal.SIGKILL, rank=None, step=10)
    done = bloomery.run(*bloomery.go_on)
    assert done.returncode == 0, done.stderr
    log = (bloomery.run_dir / "log.txt").read_text()
    assert "[rank 1] binding: rank 1 on" in log and "binding: 2 ranks without a GPU" in log
    assert_as_undisturbed(bloomery)


@pytest.mark.soak
def test_a_rank_without_memory_restarts_all_with_a_smaller_micro_batch(
    dying_workshop, one_thread
) -> None:
    (dying_workshop / "runs/deaths.json").write_text(
        json.dumps([[{"rank": 1, "rows": 2}, 5, "memory"]])
    )
    run = start(
        load_recipe(dying_workshop / "tiny.yaml"),
        run_dir=Path("runs/one"),
        devices="cpu,cpu",
        quiet=True,
    )
    assert run.code == 0
    events = list(read_events(run.folder / "events.jsonl"))
    (recovered,) = [event for event in events if isinstance(event, Recovered)]
    assert (
        "out of memory after step 4" in recovered.reason
        and "micro-batch 2 -> 1" in recovered.action
    )
    # of the last checkpoint
    assert [event.step for event in events if isinstance(event, Resumed)] == [3]


@pytest.mark.soak
def test_a_stopped_rank_of_a_real_run_is_named_and_the_run_goes_on(
    bloomery, one_thread, monkeypatch
) -> None:
    monkeypatch.setenv("BLOOMERY_HANG_SECONDS", "6")
    with bloomery.start(*TRAIN) as process:
        wait_for(lambda: bloomery.saw(StepDone, 4)() or process.poll() is not None)
        stopped = rank_process(bloomery.run_dir, 1)
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 1 and "rank 1 does not respond" in told, told
    assert "torch/distributed" in (bloomery.run_dir / "stacks/rank-0.txt").read_text()
    assert ranks_of(bloomery.run_dir) == []
    assert bloomery.run(*bloomery.go_on).returncode == 0
    assert_as_undisturbed(bloomery)


@pytest.mark.soak
def test_a_full_disk_of_rank_0_is_told_once(bloomery, one_thread) -> None:
    struck(bloomery, signal.SIGKILL, rank=0, step=2)
    done = bloomery.faulted("fsync:error=ENOSPC:when=6+", *bloomery.go_on)
    assert bloomery.injected()
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "disk" in done.stderr or "No space" in done.stderr, done.stderr
    assert ranks_of(bloomery.run_dir) == []
    assert bloomery.run(*bloomery.go_on).returncode == 0
    assert_as_undisturbed(bloomery)


def test_arguments_after_two_dashes_go_to_torchrun(bloomery) -> None:
    told = bloomery.here(
        "train", "tiny.yaml", "train.seed=3", "--dry-run", "--", "--nproc-per-node", "2"
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1].endswith(
        f"-m torch.distributed.run --nproc-per-node 2 --no-python {sys.executable} -P -u -m bloomery train tiny.yaml"
        " train.seed=3"
    )
    assert "environment" in told.stdout and "OMP_NUM_THREADS=" in told.stdout


@pytest.mark.parametrize("devices", ["cpu,cpu", pytest.param("cpu", marks=pytest.mark.soak)])
def test_a_disk_without_room_for_the_first_checkpoint_is_refused_with_the_number(
    bloomery, monkeypatch, devices
) -> None:
    usage = shutil.disk_usage(bloomery.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**19))
    refused = bloomery.here("train", "tiny.yaml", "-d", devices, "--run-dir", "runs/one")
    assert refused.returncode == 1
    pattern = r"error: 512\.0 KiB of disk are free, and a checkpoint of this run needs ([\d.]+) MiB"
    said = re.search(pattern, refused.stderr)
    assert said, refused.stderr
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    trained = bloomery.run(
        "train", "tiny.yaml", "-d", devices, "--run-dir", "runs/two", "train.max_steps=2"
    )
    assert trained.returncode == 0, trained.stderr
    (saved,) = (bloomery.folder / "runs/two/checkpoints").glob("step-*")
    needs, written = float(said[1]) * 2**20, sum(path.stat().st_size for path in saved.iterdir())
    assert written < needs < 1.1 * written + 2**20


@pytest.mark.soak
def test_two_sequences_train_on_three_ranks_as_on_one_and_resume_on_two(
    bloomery, one_thread
) -> None:
    words = (
        "train",
        "tiny.yaml",
        "train.tokens_per_step=128",
        "train.micro_batch_size=1",
        "train.max_steps=4",
        "checkpoint.every=2",
        "model.dropout=0",
    )
    for folder, devices in (("one", "cpu"), ("three", "cpu,cpu,cpu")):
        ended = bloomery.run(*words, "-d", devices, "--run-dir", f"runs/{folder}")
        assert ended.returncode == 0, ended.stderr
    plan = read_plan(bloomery.folder / "runs/three/plan.json")
    assert (plan.train.ranks, plan.train.empty_sequences, plan.train.sequences_per_step) == (
        3,
        1,
        2,
    )
    alone, three = (losses(bloomery.folder / "runs" / name) for name in ("one", "three"))
    assert three == pytest.approx(alone, abs=1e-5)
    resumed = bloomery.run("resume", "three", "--from", "2", "-d", "cpu,cpu")
    assert resumed.returncode == 0, resumed.stderr
    plan = read_plan(bloomery.folder / "runs/three/plan.json")
    assert (plan.train.ranks, plan.train.empty_sequences) == (2, 0)
    assert losses(bloomery.folder / "runs/three") == pytest.approx(alone, abs=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_kills_leave_no_trace(bloomery, one_thread, seed) -> None:
    draw = random.Random(seed)
    for _ in range(10):
        number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
        struck(bloomery, number, rank=draw.choice([0, 1, None]), step=draw.randrange(0, 15))
    done = bloomery.run(*bloomery.go_on)
    assert done.returncode == 0, done.stderr
    assert_as_undisturbed(bloomery)


@pytest.mark.soak
def test_torchrun_restarts_the_ranks_and_the_run_goes_on(bloomery, one_thread) -> None:
    command = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "-m",
        "bloomery",
    )
    process = bloomery.start(
        "train", "tiny.yaml", "--run-dir", "runs/one", command=(sys.executable, *command)
    )
    with process:
        wait_for(lambda: bloomery.saw(StepDone, 4)() or process.poll() is not None)
        killed = rank_process(bloomery.run_dir, 1)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert "rank 1 of training process killed from outside" in told
    # at the start and after the kill
    assert told.count("torchrun: rank 0 of 2, 2 on this host") == 2
    assert any(isinstance(event, Resumed) and event.step for event in bloomery.events())
    assert ranks_of(bloomery.run_dir) == []
    assert_as_undisturbed(bloomery)


# Launchers that are not part of torch.

PYTHON = sys.executable
LAUNCHERS = {
    "accelerate launch": (
        PYTHON,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--module",
        "bloomery",
    ),
    "mpirun (Open MPI)": ("mpirun", "--oversubscribe", "-n", "2", PYTHON, "-m", "bloomery"),
    "srun": ("srun", "-N", "2", "-n", "2", PYTHON, "-m", "bloomery"),
}
OF_SLURM = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1 RealMemory=1000
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={third} CPUs=1 RealMemory=1000
PartitionName=batch Nodes=n1,n2,n3 Default=YES State=UP MaxTime=60
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Three nodes of Slurm on this machine, where it is installed and the tests may start it."""
    folder = tmp_path / "slurm"
    for name in ("state", "spool-n1", "spool-n2", "spool-n3"):
        (folder / name).mkdir(parents=True)
    port, first, second, third = free_ports(4)
    host = platform.node().partition(".")[0]
    configuration = folder / "slurm.conf"
    configuration.write_text(
        OF_SLURM.format(
            host=host, folder=folder, port=port, first=first, second=second, third=third
        )
    )
    monkeypatch.setenv("SLURM_CONF", str(configuration))
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    # it refuses to run twice
    subprocess.run(["runuser", "-u", "munge", "--", "munged"], capture_output=True)
    try:
        nodes = (["slurmd", "-N", name] for name in ("n1", "n2", "n3"))
        for command in (["slurmctld", "-c"], *nodes):
            subprocess.run(command, check=True, capture_output=True)
        ready = ["sinfo", "--noheader", "--format", "%t %D"]
        wait_for(
            lambda: subprocess.run(ready, capture_output=True, text=True).stdout.strip() == "idle 3"
        )
        yield
    finally:
        for file in folder.glob("*.pid"):
            os.kill(int(file.read_text()), signal.SIGTERM)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def why_not(launcher: str) -> str:
    """Why it cannot be tried here; "" where it can."""
    if launcher == "accelerate launch":
        return "" if importlib.util.find_spec("accelerate") else "accelerate is not installed"
    needed = (
        ("srun", "slurmctld", "slurmd", "munged", "runuser") if launcher == "srun" else ("mpirun",)
    )
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    return "only root starts Slurm's daemons" if launcher == "srun" and os.getuid() else ""


@pytest.mark.soak
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_recipe_under_another_launcher(
    bloomery, one_thread, monkeypatch, request, launcher
) -> None:
    if why := why_not(launcher):
        pytest.skip(why)
    if launcher == "srun":
        request.getfixturevalue("slurm")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    # No --run-dir: the ranks agree on a folder.
    process = bloomery.start("train", "tiny.yaml", command=LAUNCHERS[launcher])
    with process:
        out, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert f"{launcher}: rank 0 of 2, {1 if launcher == 'srun' else 2} on this host" in out + told
    assert "\x1b" not in out + told
    (run,) = (bloomery.folder / "runs").iterdir()
    (bloomery.folder / "runs/one").symlink_to(run)
    assert ranks_of(run) == []
    assert_as_undisturbed(bloomery)


def of_slurm(folder: Path, *words: str) -> str:
    """What a command of Slurm, or of Bloomery, prints in that folder."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def submitted_job(bloomery: Bloomery, *overrides: str, nodes: int = 2) -> str:
    """The number of a job that trains the tiny recipe; its run is `runs/one`."""
    folder = bloomery.folder
    (folder / "site.toml").write_text('gpu = "cpu"\nlocal_disk = "/tmp"\n')
    words = ["tiny.yaml", *overrides, "--site", "site.toml", "--nodes", str(nodes), "--time", "1h"]
    command = (PYTHON, "-m", "bloomery", "slurm", *words)
    (folder / "job.sh").write_text(of_slurm(folder, *command, "--dry-run"))
    of_slurm(folder, "sbatch", "--test-only", "job.sh")  # Slurm itself accepts the script
    job = str(json.loads(of_slurm(folder, *command, "--json"))["job"])
    (folder / "runs").mkdir(exist_ok=True)
    (folder / "runs/one").symlink_to(folder / f"runs/tiny-slurm-{job}.1")
    return job


def state_of_job(folder: Path, job: str) -> str:
    return of_slurm(folder, "squeue", "--noheader", "--format=%T", "--job", job)


@pytest.mark.soak
def test_a_submitted_job_saves_requeues_itself_and_resumes(bloomery, one_thread, request) -> None:
    if why := why_not("srun"):
        pytest.skip(why)
    request.getfixturevalue("slurm")
    folder = bloomery.folder
    job = submitted_job(bloomery, "train.max_steps=200")
    wait_for(bloomery.saw(StepDone, 4))
    # what --signal does: the steps get it, the batch shell does not
    of_slurm(folder, "scancel", "--signal=TERM", job)
    wait_for(lambda: state_of_job(folder, job) == "PENDING")
    stopped = max(event.step for event in bloomery.events() if isinstance(event, StepDone))
    assert 4 <= stopped < 200
    # Slurm starts it again when its credential has expired
    wait_for(bloomery.saw(StepDone, 200))
    wait_for(lambda: state_of_job(folder, job) in ("", "COMPLETED"))
    assert [event.step for event in bloomery.events() if isinstance(event, Resumed)] == [stopped]
    log = (folder / f"tiny-{job}.log").read_text()
    assert "srun: rank 0 of 2, 1 on this host" in log


@pytest.mark.soak
def test_a_job_whose_node_is_lost_returns_to_the_queue_and_ends_as_undisturbed(
    bloomery, one_thread, request
) -> None:
    if why := why_not("srun"):
        pytest.skip(why)
    request.getfixturevalue("slurm")
    folder = bloomery.folder
    job = submitted_job(bloomery)
    wait_for(bloomery.saw(StepDone, 6))
    of_slurm(folder, "scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    wait_for(lambda: state_of_job(folder, job) == "PENDING")
    # the node answers and returns to service by itself (ReturnToService=2)
    wait_for(lambda: state_of_job(folder, job) in ("", "COMPLETED"))
    assert [event for event in bloomery.events() if isinstance(event, Resumed)]
    assert_as_undisturbed(bloomery)


@pytest.mark.soak
def test_a_job_goes_on_without_the_host_that_its_run_names(bloomery, one_thread, request) -> None:
    if why := why_not("srun"):
        pytest.skip(why)
    request.getfixturevalue("slurm")
    folder = bloomery.folder
    job = submitted_job(bloomery, nodes=1)
    wait_for(bloomery.saw(StepDone, 6))
    (host,) = of_slurm(folder, "squeue", "--noheader", "--format=%N", "--job", job).split()
    RunFolder(bloomery.run_dir).excluded_hosts.write_text(f"{host}\n")
    os.kill(json.loads(RunFolder(bloomery.run_dir).lock.read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: state_of_job(folder, job) == "PENDING")
    wait_for(lambda: f"requeued without {host}" in (folder / f"tiny-{job}.log").read_text())
    wait_for(lambda: state_of_job(folder, job) in ("", "COMPLETED"))
    shown = of_slurm(folder, "scontrol", "show", "job", job)
    assert f"ExcNodeList={host}" in shown and f"NodeList={'n2' if host == 'n1' else 'n1'}" in shown
    assert [event for event in bloomery.events() if isinstance(event, Resumed)]
    assert bloomery.saw(StepDone, 16)()


@pytest.mark.soak
def test_a_job_whose_rank_is_killed_goes_on_without_its_host(bloomery, one_thread, request) -> None:
    if why := why_not("srun"):
        pytest.skip(why)
    request.getfixturevalue("slurm")
    folder = bloomery.folder
    job = submitted_job(bloomery)
    wait_for(bloomery.saw(StepDone, 6))
    os.kill(rank_process(bloomery.run_dir.resolve(), 1), signal.SIGKILL)
    wait_for(lambda: state_of_job(folder, job) == "PENDING")
    wait_for(lambda: "requeued without n2" in (folder / f"tiny-{job}.log").read_text())
    wait_for(lambda: state_of_job(folder, job) in ("", "COMPLETED"))
    log = (folder / f"tiny-{job}.log").read_text()
    assert "rank 1 of training on n2 process killed from outside" in log
    assert "`sbatch --exclude=n2`" in log and "`bloomery slurm RECIPE --exclude n2`" in log
    shown = of_slurm(folder, "scontrol", "show", "job", job)
    assert "ExcNodeList=n2" in shown and " NodeList=n[1,3]" in shown, shown
    failed = next(event for event in bloomery.events() if isinstance(event, RunEnded))
    assert failed.status == "failed" and failed.host == "n2"
    assert_as_undisturbed(bloomery)
