"""The life of a run from the command line: stopped, damaged, prolonged, refused; and what it says each time."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from runs_of_bloomery import PATIENCE_SECONDS, Bloomery, assert_bitwise_equal, losses, wait_for

import preloaded
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.infer.held_model import held_model
from bloomery.infer.model_folder import newest_valid, saved_steps
from bloomery.monitor.events import Phase, Resumed, RunEnded, Saved, StepDone, Warned
from bloomery.runs import resume_inputs

TRAIN = ("train", "tiny.yaml", "--run-dir", "runs/one")
RESUME = ("resume", "one")
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


def worker_of(run: Path) -> int | None:
    """The process that trains in this folder."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"bloomery.launch.worker" in words and str(run).encode() in words and b"train" in words:
            return int(entry.parent.name)
    return None


def is_gone(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def read_all(screen: int, into: bytearray) -> None:
    """What is drawn on a terminal, until everybody has left it."""
    try:
        while chunk := os.read(screen, 4096):
            into += chunk
    except OSError:  # how Linux tells that
        os.close(screen)


def last(bloomery: Bloomery, kind: type):
    return [event for event in bloomery.events() if isinstance(event, kind)][-1]


def test_a_run_that_is_stopped_damaged_and_resumed_equals_the_undisturbed_one(
    bloomery: Bloomery, undisturbed: Bloomery
) -> None:
    checkpoints = bloomery.run_dir / "checkpoints"
    assert bloomery.run_until(bloomery.saw(StepDone, 7), signal.SIGUSR1, *TRAIN) == 75
    whole, stopped_at = saved_steps(checkpoints)
    assert last(bloomery, StepDone).step == stopped_at
    assert last(bloomery, RunEnded).status == "stopped"
    newest = newest_valid(checkpoints, on_damage=pytest.fail)
    assert newest is not None
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "model.safetensors").write_bytes(content)

    done = bloomery.run(*RESUME)
    assert done.returncode == 0, done.stderr
    warning = next(event for event in bloomery.events() if isinstance(event, Warned))
    assert newest.name in warning.reason
    assert "model.safetensors has changed" in warning.reason
    assert "model.safetensors has changed" in " ".join(done.stdout.split())
    assert last(bloomery, Resumed).path.endswith(f"step-{whole:08d}")
    assert_bitwise_equal(bloomery.run_dir, undisturbed.run_dir)
    metrics = json.loads((bloomery.run_dir / "metrics.json").read_text())
    assert (metrics["step"], metrics["max_steps"], metrics["planned"]["max_steps"]) == (16, 16, 16)
    assert metrics["status"] == "done"


def test_a_done_run_says_so_and_can_be_prolonged(bloomery: Bloomery) -> None:
    assert bloomery.run(*TRAIN, "train.max_steps=4", "checkpoint.every=2 steps").returncode == 0
    before = (bloomery.run_dir / "events.jsonl").read_bytes()
    again = bloomery.here(*RESUME)
    assert again.returncode == 0
    assert "nothing left to train" in again.stdout
    assert "bloomery resume one train.max_steps=8 " in again.stdout  # the key of its recipe
    refused = bloomery.here(*TRAIN)
    assert refused.returncode == 1
    assert "already has a run" in refused.stderr
    assert "bloomery resume one" in refused.stderr
    other = bloomery.here(*RESUME, "optimizer.learning_rate=1")
    assert other.returncode == 2
    assert "optimizer.learning_rate" in other.stderr
    assert (bloomery.run_dir / "events.jsonl").read_bytes() == before
    shorter = bloomery.here(*RESUME, "train.max_steps=3")
    assert shorter.returncode == 1
    assert "less than the 4 steps already trained" in shorter.stderr
    assert bloomery.here(*RESUME, "--from", "3").returncode == 1
    assert bloomery.here(*RESUME, "train.max_steps=9", "-d", "7").returncode == 2
    assert (bloomery.run_dir / "events.jsonl").read_bytes() == before, (
        "a refused word is no failure of the run"
    )
    shutil.rmtree(bloomery.folder / "prepared")
    longer = bloomery.run(*RESUME, "train.max_steps=6", "--from", "2")
    assert longer.returncode == 0, longer.stderr
    assert last(bloomery, Resumed).step == 2
    assert len(losses(bloomery.run_dir)) == 6
    assert list((bloomery.run_dir / "checkpoints").glob("before-*/step-00000004"))
    assert any(
        "preparing it again" in event.reason
        for event in bloomery.events()
        if isinstance(event, Warned)
    )
    shutil.rmtree(bloomery.folder / "prepared")
    (bloomery.folder / "text/0.txt").write_text("another text " * 50)
    other_text = bloomery.here(*RESUME, "train.max_steps=8")
    assert other_text.returncode == 1
    assert "prepared dataset has changed" in " ".join(other_text.stderr.split())
    missing = bloomery.here(*RESUME, "--from", "3")
    assert missing.returncode == 1
    assert (
        "checkpoint of step 3" in missing.stderr
        and "fix:   use one of these steps: " in missing.stderr
    )


def test_a_refused_return_to_an_earlier_checkpoint_moves_nothing(
    bloomery: Bloomery, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bloomery.run(*TRAIN, "train.max_steps=4", "checkpoint.every=2 steps").returncode == 0
    checkpoints = bloomery.run_dir / "checkpoints"
    text = bloomery.folder / "text/0.txt"
    machine = bloomery.run_dir / "machine.json"
    first_text, first_machine = text.read_text(), machine.read_bytes()
    goes_back = (*RESUME, "--from", "2")

    def pressed() -> Machine:
        os.kill(os.getpid(), signal.SIGINT)
        return detect()

    def assert_refused(code: int, problem: str, *words: str) -> None:
        refused = bloomery.here(*goes_back, *words)
        assert refused.returncode == code, refused.stderr
        assert problem in " ".join(refused.stderr.split())
        assert saved_steps(checkpoints) == [2, 4]
        assert not list(checkpoints.glob("before-*"))

    assert_refused(2, "no such device: '7'", "-d", "7")
    assert_refused(1, "less than the 2 steps already trained", "train.max_steps=1")
    machine.unlink()  # the run would be planned again
    assert_refused(2, "no such device: '7'", "-d", "7")
    machine.write_bytes(first_machine)

    # Ctrl+C while the machine is read.
    with monkeypatch.context() as patched:
        patched.setattr(resume_inputs, "detect", pressed)
        assert_refused(75, "", "-d", "cpu")

    # Another command reads what would be moved: refused before anything is planned again, and no end of the run.
    machine.unlink()
    events = (bloomery.run_dir / "events.jsonl").read_bytes()
    with held_model(bloomery.run_dir, "4"):
        assert_refused(1, "step-00000004 is being read by another command")
    assert (bloomery.run_dir / "events.jsonl").read_bytes() == events
    machine.write_bytes(first_machine)

    shutil.rmtree(bloomery.folder / "prepared")
    text.write_text("another text " * 50)
    assert_refused(1, "prepared dataset has changed")

    # Steps after the one that the user goes back to do not count for the new length.
    shutil.rmtree(bloomery.folder / "prepared")
    text.write_text(first_text)
    shorter = bloomery.run(*goes_back, "train.max_steps=3")
    assert shorter.returncode == 0, shorter.stderr
    assert last(bloomery, Resumed).step == 2
    assert saved_steps(checkpoints) == [2, 3]
    assert list(checkpoints.glob("before-*/step-00000004"))


def test_without_its_plan_a_run_goes_back_to_an_earlier_checkpoint(bloomery: Bloomery) -> None:
    assert bloomery.run(*TRAIN, "train.max_steps=4", "checkpoint.every=2 steps").returncode == 0
    (bloomery.run_dir / "plan.json").unlink()
    resumed = bloomery.run(*RESUME, "--from", "2")
    assert resumed.returncode == 0, resumed.stderr
    assert last(bloomery, Resumed).step == 2
    assert list((bloomery.run_dir / "checkpoints").glob("before-*/step-00000004"))


def test_ctrl_c_twice_ends_at_once_even_when_training_hangs(bloomery: Bloomery) -> None:
    screen, terminal = os.openpty()
    drawn = bytearray()
    reader = threading.Thread(target=read_all, args=(screen, drawn))
    reader.start()
    with bloomery.start(*TRAIN, stdout=terminal) as process:
        os.close(terminal)
        wait_for(bloomery.saw(Saved))
        worker = worker_of(bloomery.run_dir)
        assert worker is not None
        os.kill(worker, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    reader.join()
    assert process.returncode == 130
    assert drawn.rfind(SHOW_CURSOR) > drawn.rfind(HIDE_CURSOR) >= 0  # the terminal is as it was
    assert "bloomery resume one" in err
    assert "Traceback" not in err
    assert is_gone(worker)
    assert last(bloomery, RunEnded).status == "stopped"


def test_a_killed_trainer_ends_in_a_sentence_and_so_does_a_damaged_plan(bloomery: Bloomery) -> None:
    with bloomery.start(*TRAIN) as process:
        wait_for(bloomery.saw(StepDone, 2))
        worker = worker_of(bloomery.run_dir)
        assert worker is not None
        os.kill(worker, signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "SIGKILL" in err and "out-of-memory kill" in err and "train.micro_batch_size=1" in err
    assert "Traceback" not in err
    assert "bloomery resume one" in err
    assert last(bloomery, RunEnded).status == "failed"

    (bloomery.run_dir / "plan.json").write_text("{")
    broken = bloomery.here(*RESUME)
    assert broken.returncode == 1
    assert "plan.json has changed since the run wrote it" in broken.stderr
    assert "Traceback" not in broken.stderr


def test_the_trainer_dies_with_its_parent(bloomery: Bloomery) -> None:
    with bloomery.start(*TRAIN) as process:
        wait_for(lambda: worker_of(bloomery.run_dir) is not None)
        worker = worker_of(bloomery.run_dir)
        assert worker is not None
        process.kill()
        process.communicate()
    wait_for(lambda: is_gone(worker))


def test_a_stop_while_preparing_is_quick_and_resumable(bloomery: Bloomery) -> None:
    assert bloomery.run_until(bloomery.saw(Phase), signal.SIGINT, *TRAIN) == 75
    assert last(bloomery, RunEnded).status == "stopped"
    assert not (bloomery.run_dir / "plan.json").exists()


def test_a_disk_that_is_full_costs_checkpoints_but_not_the_run(bloomery: Bloomery) -> None:
    limit = 150_000  # above every file but the optimizer's
    code = (
        f"import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
    )
    words = [
        sys.executable,
        "-c",
        code + "runpy.run_module('bloomery', run_name='__main__')",
        *TRAIN,
    ]
    done = preloaded.run(
        [*words, "train.max_steps=8"], cwd=bloomery.folder, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 1
    assert "cannot write the checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(losses(bloomery.run_dir)) == 8
    warnings = [event.reason for event in bloomery.events() if isinstance(event, Warned)]
    assert any("was not saved, training continues" in reason for reason in warnings)
    assert not list((bloomery.run_dir / "checkpoints").iterdir())


def test_what_needs_no_text_to_be_seen_is_refused_before_text_is_prepared(
    bloomery: Bloomery,
) -> None:
    misspelt = ("adapter.kind=lora", "adapter.target_modules=[q_porj]")
    for words, said in (
        (("-d", "7"), "device: '7'"),
        (("train.micro_batch_size=3",), "size to one of 1, 2, 4"),
        (misspelt, "q_proj"),
    ):
        refused = bloomery.here(*TRAIN, *words)
        assert refused.returncode == 2 and said in refused.stderr
        assert not (bloomery.folder / "prepared").exists() and not bloomery.run_dir.exists()


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"pytorch_model.bin": ""}, "pytorch_model.bin is a pickle"),
        ({}, "no model.safetensors is here"),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "one.safetensors"}}'},
            "one.safetensors is missing",
        ),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "../one.safetensors"}}'},
            "not a file of this folder",
        ),
    ],
)
def test_weights_that_cannot_be_read_are_refused_before_text_is_prepared(
    bloomery: Bloomery, held: dict[str, str], said: str
) -> None:
    model = bloomery.folder / "model"
    model.mkdir()
    for name, text in {"config.json": "{}", **held}.items():
        (model / name).write_text(text)
    refused = bloomery.here(*TRAIN, "model.from=model")
    assert refused.returncode == 1 and said in refused.stderr and "fix:" in refused.stderr
    assert not (bloomery.folder / "prepared").exists() and not bloomery.run_dir.exists()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.path=txet", "did you mean data.path="),
        ("data.glob=*.md", 'data.glob="*.txt"'),
        ("data.validation=held", "data.validation: held"),
    ],
)
def test_text_that_is_not_there_is_refused_before_there_is_a_folder(
    bloomery: Bloomery, word: str, said: str
) -> None:
    refused = bloomery.here(*TRAIN, word)
    assert refused.returncode == 1 and said in refused.stderr
    assert not (bloomery.folder / "prepared").exists() and not bloomery.run_dir.exists()


def test_a_place_that_cannot_be_written_is_one_sentence(bloomery: Bloomery) -> None:
    refused = bloomery.here("train", "tiny.yaml", "--run-dir", "text/0.txt/run")
    assert refused.returncode == 1
    assert "cannot write the run folder" in refused.stderr
    assert "Traceback" not in refused.stderr
