"""Where events go besides the terminal, and what must never go there."""

import json
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from bloomery.core.text import HIDDEN, redact_secrets
from bloomery.monitor.events import (
    EventLog,
    Phase,
    RunEnded,
    Sampled,
    StepDone,
    Warned,
    read_events,
)
from bloomery.monitor.sinks import TRACKERS, CommandSink, LogFile, Tracker, TrackerSink, open_sinks
from bloomery.recipe.schema import IF_INSTALLED
from bloomery.view.metrics_json import write_metrics
from runs_for_tests import made_up_run, step_done

CANARY = "CanaryCanaryCanaryCanary1234567890"
LEAKS = {
    "a Hugging Face token": f"hf_{CANARY}",
    "a URL's login": f"https://user:{CANARY}@example.org/x",
    "a W&B key": "WANDB_API_KEY=" + "0123456789abcdef" * 2 + "01234567",
    "a W&B key in netrc": "wandb: " + "0123456789abcdef" * 2 + "01234567",
    "an assignment": f"api_key: {CANARY}",
    "JSON": f'{{"password": "{CANARY}"}}',
    "a header": f"Authorization: Bearer {CANARY}",
    "a GitHub token": f"ghp_{CANARY}",
}


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS.keys())
def test_secrets_are_taken_out(leak):
    told = redact_secrets(f"before {leak} after", {})
    assert CANARY not in told and "0123456789abcdef" not in told and HIDDEN in told
    assert told.startswith("before ") and told.endswith(" after")


def test_the_values_of_secret_variables_are_taken_out():
    assert (
        redact_secrets("x swordfish-99 y", {"MY_SECRET": "swordfish-99", "EDITOR": "x"})
        == f"x {HIDDEN} y"
    )


INNOCENT = [
    "tokens: 8192",
    "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
    "https://a.org/b?c=d",
    "key",
]


@pytest.mark.parametrize("text", INNOCENT)
def test_innocent_text_stays(text):
    assert redact_secrets(text, {"SOME_TOKEN": "1"}) == text


def test_log_holds_no_canary_and_no_traceback_is_lost(tmp_path):
    log = LogFile(tmp_path / "log.txt")
    for leak in LEAKS.values():
        log.write(Warned(reason=leak))
        log.write(Sampled(prompt=leak, completion=leak))
        log.text(f"Traceback\n  File x\n{leak}")
    log.close()
    text = (tmp_path / "log.txt").read_text()
    assert (
        CANARY not in text
        and "0123456789abcdef" not in text
        and text.count("Traceback") == len(LEAKS)
    )


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS.keys())
def test_events_hold_no_canary_and_stay_readable(leak, tmp_path):
    with EventLog(tmp_path / "events.jsonl") as emit:
        emit(RunEnded(status="failed", error=f'"{leak}"'))
    assert CANARY not in (tmp_path / "events.jsonl").read_text()
    assert [event.status for event in read_events(tmp_path / "events.jsonl")] == ["failed"]


def test_log_paces_steps_but_never_skips_a_skipped_one(tmp_path):
    log = LogFile(tmp_path / "log.txt", every_steps=10)
    for event in made_up_run():
        log.write(event)
    log.close()
    text = (tmp_path / "log.txt").read_text()
    assert (
        "  step 7  loss skipped" in text
        and "  step 10  loss 4." in text
        and "  step 11  " not in text
    )
    assert (
        "recovered at step 7" in text and "ended: done" in text and "evaluation at step 20" in text
    )


def test_tensorboard_reads_each_step_once_after_a_resume(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TrackerSink("tensorboard", tmp_path, pytest.fail)
    for event in made_up_run():
        sink.write(event)
    sink.close()
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    losses = read.Scalars("train/loss")
    assert [point.step for point in losses] == [step for step in range(1, 41) if step != 7]
    last = {event.step: event.loss for event in made_up_run() if isinstance(event, StepDone)}
    assert all(abs(point.value - last[point.step]) < 1e-6 for point in losses)
    assert {"eval/bits_per_byte", "train/learning_rate", "speed/tokens_per_second"} <= set(
        read.Tags()["scalars"]
    )


def test_tensorboard_does_not_import_torch(tmp_path):
    import subprocess

    code = (
        "import sys; from pathlib import Path; from bloomery.monitor.sinks import TRACKERS, TrackerSink;"
        "TrackerSink('tensorboard', Path(sys.argv[1]), sys.exit).close(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0


def warnings_of(tmp_path, *names):
    told = []
    for sink in open_sinks(tmp_path, names, [], every_steps=1, folder=tmp_path, warn=told.append):
        sink.write(step_done(1))
        sink.close()
    return told


def test_a_missing_tensorboard_is_a_warning_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    (told,) = warnings_of(tmp_path, "tensorboard")
    assert "pip install 'tensorboard>=2.17'" in told


def test_a_tensorboard_that_nobody_asked_for_is_not_missed(tmp_path, monkeypatch):
    assert (
        not warnings_of(tmp_path / "with", IF_INSTALLED)
        and (tmp_path / "with/tensorboard").is_dir()
    )
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    assert (
        not warnings_of(tmp_path / "without", IF_INSTALLED)
        and not (tmp_path / "without/tensorboard").exists()
    )


def hook(tmp_path, body):
    script = tmp_path / "hook.py"
    script.write_text(body)
    told = []
    return CommandSink(f"{sys.executable} '{script}'", tmp_path, told.append), told


def test_a_hook_reads_each_event_as_json(tmp_path):
    sink, told = hook(tmp_path, "import sys; open('got.txt', 'a').write(sys.stdin.read())")
    sink.write(step_done(3, 1.5))
    sink.write(Warned(reason=LEAKS["a Hugging Face token"]))
    first, second = (tmp_path / "got.txt").read_text().splitlines()
    assert json.loads(first)["loss"] == 1.5 and CANARY not in second and not told


def test_a_hook_is_never_run_by_a_shell(tmp_path):
    told = []
    CommandSink("echo x; touch owned", tmp_path, told.append).write(Phase(name="x"))
    assert not (tmp_path / "owned").exists()


def test_a_failing_hook_is_a_warning_and_is_left_alone_after_three(tmp_path):
    sink, told = hook(tmp_path, "import sys; sys.exit('no route')")
    for _ in range(5):
        sink.write(Phase(name="x"))
    assert len(told) == 3 and "no route" in told[0] and "not called again" in told[2]


def test_a_hook_that_hangs_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("bloomery.monitor.sinks._HOOK_SECONDS", 0.2)
    sink, told = hook(tmp_path, "import time; time.sleep(60)")
    sink.write(Phase(name="x"))
    assert "timed out" in told[0]


def test_a_hook_that_is_missing_is_a_warning(tmp_path):
    told = []
    CommandSink("./nothing.sh", tmp_path, told.append).write(Phase(name="x"))
    assert "cannot be started: No such file" in told[0]


def test_metrics_are_those_of_the_events(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as emit:
        for event in made_up_run():
            emit(event)
    metrics = json.loads(write_metrics(tmp_path).read_text())
    assert metrics["step"] == metrics["max_steps"] == 40 and metrics["tokens"] == 40 * 8192
    assert metrics["skipped_steps"] == 1 and metrics["resumes"] == 1 and metrics["status"] == "done"
    assert metrics["best_eval"]["step"] == 40 and metrics["peak_memory_gib"] == 0.58


NOISE = {
    "a Latin-1 byte": "import sys; sys.stdout.buffer.write(b'caf\\xe9'); sys.stderr.buffer.write(b'caf\\xe9')",
    "an end that nobody waits for": "import subprocess; subprocess.Popen(['sleep', '30'])",
    "an event that is not read": "import os; os.close(0)",
    "closed pipes": "import os, time; os.close(1); os.close(2); time.sleep(0.1)",
}


@pytest.mark.parametrize("body", NOISE.values(), ids=NOISE.keys())
def test_whatever_a_hook_does_is_no_matter_of_the_run(body, tmp_path):
    sink, told = hook(tmp_path, body)
    began = time.monotonic()
    sink.write(Warned(reason="x" * 1_000_000))
    assert not told and time.monotonic() - began < 25  # a process that it starts sleeps for 30


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_hook_that_writes_without_end_is_stopped_and_nothing_of_it_is_kept(
    stream, tmp_path, monkeypatch
):
    monkeypatch.setattr("bloomery.monitor.sinks._HOOK_SECONDS", 1.5)
    sink, told = hook(tmp_path, f"import sys\nwhile True: sys.{stream}.write('y' * 65536)")
    # Threads of other tests in this process may allocate meanwhile: output that is kept would be in both figures.
    peaks = []
    for number in (1, 2):
        tracemalloc.start()
        sink.write(Phase(name="x"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(told) == number and "timed out" in told[-1]
    assert min(peaks) < 4 * 2**20


def test_the_last_words_of_a_hook_that_fails_are_told_without_control_characters(tmp_path):
    sink, told = hook(tmp_path, "import sys; sys.exit('x' * 100_000 + '\\nno \\x1b[31mroute\\xe9')")
    sink.write(Phase(name="x"))
    assert told[0].endswith("exit code 1: no [31mroute\xe9")


def test_what_a_hook_has_started_ends_with_it_when_it_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr("bloomery.monitor.sinks._HOOK_SECONDS", 1.5)
    body = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); open('pid', 'w').write(str(p.pid)); p.wait()"
    sink, told = hook(tmp_path, body)
    sink.write(Phase(name="x"))
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "timed out" in told[0] and not lives(child)


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def broken(run_info):
    """A tracker whose library fails as libraries do."""

    def log(figures, step, when):
        raise RuntimeError("the writer's thread has died")

    return Tracker(log, end=lambda status: None)


def test_a_tracker_that_fails_is_one_warning_and_never_ends_a_run(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKERS, "tensorboard", broken)
    told = []
    _, sink = open_sinks(
        tmp_path, ["tensorboard"], [], every_steps=1, folder=tmp_path, warn=told.append
    )
    for _ in range(3):
        sink.write(step_done(1))
    sink.close()
    assert (
        len(told) == 1
        and "tensorboard failed at step 1" in told[0]
        and "thread has died" in told[0]
    )


def test_a_tracker_that_cannot_be_opened_is_a_warning(tmp_path):
    (tmp_path / "tensorboard").write_text("a file stands here")
    (told,) = warnings_of(tmp_path, "tensorboard")
    assert "tensorboard cannot be started" in told
