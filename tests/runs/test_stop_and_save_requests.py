"""`bloomery stop` and `bloomery save`: a run that another process works on hears, and nobody else does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs_of_bloomery import PATIENCE_SECONDS, Bloomery, assert_bitwise_equal, wait_for

from bloomery.cli.stop_and_save import runner_of, save_run, stop_run
from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder
from bloomery.core.run_lock import holder_of, host_name, start_mark
from bloomery.infer.model_folder import NOT_SAVED, damage, saved_steps
from bloomery.launch.stop_flag import StopFlag
from bloomery.monitor.events import EventLog, Recovered, RunEnded, Saved, StepDone, Warned

TRAIN = (
    "train",
    "tiny.yaml",
    "--run-dir",
    "runs/one",
    "train.max_steps=4000",
    "checkpoint.every=4000 steps",
)


def test_a_run_saves_is_recorded_and_stops_when_asked(bloomery: Bloomery) -> None:
    with bloomery.start(*TRAIN) as process:
        wait_for(bloomery.saw(StepDone, 2))
        saved = bloomery.run("save", "one")
        assert saved.returncode == 0, saved.stderr
        (step,) = saved_steps(bloomery.run_dir / "checkpoints")
        folder = bloomery.run_dir / "checkpoints" / f"step-{step:08d}"
        assert f"step {step}" in saved.stdout
        assert saved.stdout.strip().endswith(str(folder))
        assert damage(folder) is None
        wait_for(bloomery.saw(StepDone, step + 1))
        recorded = bloomery.run("save", "one", "--profile", "2")
        assert recorded.returncode == 0, recorded.stderr
        assert process.poll() is None  # it went on
        stopped = bloomery.run("stop", "last")
        assert stopped.returncode == 0, stopped.stderr
        assert process.wait(60) == 75
        process.communicate()
    ended = bloomery.events()[-1]
    assert isinstance(ended, RunEnded)
    assert ended.status == "stopped"
    assert f"at step {ended.step:,}" in stopped.stdout
    assert "bloomery resume one" in stopped.stdout
    assert saved_steps(bloomery.run_dir / "checkpoints")[-1] == ended.step

    (trace,) = (bloomery.run_dir / "profile").glob("*.trace.json.gz")
    assert str(trace) in recorded.stdout
    names = {path.name.partition(".")[2] for path in (bloomery.run_dir / "profile").iterdir()}
    assert names == {"trace.json.gz", "operators.txt", "memory.txt"}
    assert not (bloomery.run_dir / "profile-asked").exists()

    for words in (("stop", "one"), ("save", "one", "--profile", "2")):
        late = bloomery.here(*words)
        assert late.returncode == 1
        assert "no process is training this run" in late.stderr
        assert "bloomery resume one" in late.stderr
    assert bloomery.here("save", "one", "--profile", "0").returncode == 2


def test_wishes_to_save_before_training_and_between_steps_change_nothing(
    bloomery: Bloomery, undisturbed
) -> None:
    """The one that comes before there is a step is kept for the first."""
    with bloomery.start("train", "tiny.yaml", "--run-dir", "runs/one") as process:
        wait_for(lambda: bool(holder_of(bloomery.run_dir / "lock")))
        os.kill(process.pid, signal.SIGUSR2)
        wait_for(bloomery.saw(StepDone, 4))
        os.kill(process.pid, signal.SIGUSR2)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    assert next(event.step for event in bloomery.events() if isinstance(event, Saved)) == 1
    assert_bitwise_equal(bloomery.run_dir, undisturbed.run_dir)


def write_lock(folder: Path, pid: int, **changes) -> RunFolder:
    entry = {
        "pid": pid,
        "started": start_mark(pid),
        "host": host_name(),
        "receives_signals": True,
    } | changes
    (folder / "lock").write_text(json.dumps(entry))
    (folder / "recipe.yaml").touch()
    return RunFolder(folder)


@pytest.fixture
def sleeper():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    "change", [{"started": "another boot 1"}, {"host": "node17"}, {"receives_signals": False}]
)
def test_a_process_that_is_not_the_runs_own_is_never_signalled(
    tmp_path: Path, sleeper, change
) -> None:
    folder = write_lock(tmp_path, sleeper.pid, **change)
    with pytest.raises(UserError) as caught:
        stop_run(runner_of(folder), on_event=lambda _: None)
    assert caught.value.fix
    time.sleep(0.1)
    assert sleeper.poll() is None


def test_a_number_that_passed_to_another_process_is_not_signalled(tmp_path: Path, sleeper) -> None:
    folder = write_lock(tmp_path, sleeper.pid)
    runner = runner_of(folder)
    runner.entry["started"] = "earlier"
    with pytest.raises(UserError, match="no process is training"):
        runner.send(signal.SIGTERM)
    assert sleeper.poll() is None


@pytest.mark.parametrize(("since", "answer"), [(50.0, "stopped"), (150.0, None)])
def test_a_run_that_is_about_to_leave_has_answered_before_it_is_asked(
    tmp_path: Path, sleeper, since, answer
) -> None:
    """What was told before its process took the run up is the end of another one."""
    folder = write_lock(tmp_path, sleeper.pid, since=since)
    with EventLog(folder.events) as log:
        log(RunEnded(step=3, status="stopped", time=100.0))
    ended = stop_run(runner_of(folder), on_event=lambda _: None)
    sleeper.wait()
    assert (ended and ended.status) == answer


@pytest.mark.parametrize("lock", ["", '{"pid": 17, "sta', None])
def test_without_a_holder_nothing_runs(tmp_path: Path, lock) -> None:
    if lock is not None:
        (tmp_path / "lock").write_text(lock)
    with pytest.raises(UserError, match="no process is training this run"):
        runner_of(RunFolder(tmp_path))


@pytest.fixture
def deaf():
    """A process that hears the wish to save and does nothing."""
    code = "import signal, time; signal.signal(signal.SIGUSR2, lambda *_: None); print('up', flush=True); time.sleep(9)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def answered(folder: Path, deaf, *told) -> Saved:
    """What `save` makes of a run that has taken three steps and then tells this."""
    runner = runner_of(write_lock(folder, deaf.pid))
    with EventLog(folder / "events.jsonl") as emit:
        emit(
            StepDone(
                step=3,
                loss=1,
                learning_rate=1,
                grad_norm=1,
                tokens=1,
                tokens_per_second=1,
                sequences_per_second=1,
                step_seconds=1,
                data_wait_seconds=0,
                memory_gib=0,
            )
        )
        original = runner.send
        object.__setattr__(runner, "send", lambda number: (original(number), *map(emit, told)))
        return save_run(runner, on_event=lambda _: None)


def test_a_save_that_fails_is_said(tmp_path: Path, deaf) -> None:
    with pytest.raises(UserError, match="the disk is full"):
        answered(
            tmp_path,
            deaf,
            Warned(step=3, reason=f"the checkpoint of step 3 {NOT_SAVED}: the disk is full"),
        )
    deaf.kill()
    deaf.wait()
    with pytest.raises(UserError, match="no process is training"):
        save_run(runner_of(RunFolder(tmp_path)), on_event=lambda _: None)


def test_an_older_checkpoint_that_was_still_being_written_is_no_answer(
    tmp_path: Path, deaf
) -> None:
    older, asked = (Saved(step=step, path=f"step-{step}", bytes=1, seconds=1.0) for step in (2, 4))
    late = Warned(step=2, reason=f"the checkpoint of step 2 {NOT_SAVED}: the disk is full")
    assert answered(tmp_path, deaf, older, late, asked) == asked


def test_a_run_that_goes_back_answers_with_an_earlier_step(tmp_path: Path, deaf) -> None:
    back, asked = (
        Recovered(step=0, reason="nan", action="back"),
        Saved(step=1, path="x", bytes=1, seconds=1.0),
    )
    assert answered(tmp_path, deaf, back, asked) == asked


def test_a_request_that_comes_while_the_last_one_is_read_is_kept() -> None:
    class Flag:
        """A signal arrives right after the flag was read for the first time."""

        reads = 0
        requested = False

        @property
        def save_asked(self) -> bool:
            self.reads += 1
            requested = self.requested
            if self.reads == 1:
                self.requested = True
            return requested

        @save_asked.setter
        def save_asked(self, value: bool) -> None:
            self.requested = value

    flag = Flag()
    assert [StopFlag.take_save(flag) for _ in range(3)] == [False, True, False]
