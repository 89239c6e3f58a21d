"""Where events go besides the terminal, and what must never go there."""

import json
import sys

import pytest
from runs_for_tests import made_up_run, step_done

from bloomery.monitor.events import EventLog, Phase, RunEnded, Sampled, StepDone, Warned, read_events
from bloomery.monitor.scrub import HIDDEN, scrub
from bloomery.monitor.sinks import CommandSink, LogFile, TensorBoard, open_sinks, write_metrics

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
    told = scrub(f"before {leak} after", {})
    assert CANARY not in told and "0123456789abcdef" not in told and HIDDEN in told
    assert told.startswith("before ") and told.endswith(" after")


def test_the_values_of_secret_variables_are_taken_out():
    assert scrub("x swordfish-99 y", {"MY_SECRET": "swordfish-99", "EDITOR": "x"}) == f"x {HIDDEN} y"


INNOCENT = ["tokens: 8192", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b", "https://a.org/b?c=d", "key"]


@pytest.mark.parametrize("text", INNOCENT)
def test_innocent_text_stays(text):
    assert scrub(text, {"SOME_TOKEN": "1"}) == text


def test_log_holds_no_canary_and_no_traceback_is_lost(tmp_path):
    log = LogFile(tmp_path / "log.txt")
    for leak in LEAKS.values():
        log.write(Warned(because=leak))
        log.write(Sampled(prompt=leak, text=leak))
        log.text(f"Traceback\n  File x\n{leak}")
    log.close()
    text = (tmp_path / "log.txt").read_text()
    assert CANARY not in text and "0123456789abcdef" not in text and text.count("Traceback") == len(LEAKS)


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS.keys())
def test_events_hold_no_canary_and_stay_readable(leak, tmp_path):
    with EventLog(tmp_path / "events.jsonl") as emit:
        emit(RunEnded(why=f'failed: "{leak}"'))
    assert CANARY not in (tmp_path / "events.jsonl").read_text()
    assert [event.why[:8] for event in read_events(tmp_path / "events.jsonl")] == ["failed: "]


def test_log_paces_steps_but_never_skips_a_skipped_one(tmp_path):
    log = LogFile(tmp_path / "log.txt", every_steps=10)
    for event in made_up_run():
        log.write(event)
    log.close()
    text = (tmp_path / "log.txt").read_text()
    assert "  step 7  loss skipped" in text and "  step 10  loss 4." in text and "  step 11  " not in text
    assert "recovered at step 7" in text and "ended: done" in text and "exam at step 20" in text


def test_tensorboard_reads_each_step_once_after_a_resume(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoard(tmp_path, every_steps=1)
    for event in made_up_run():
        sink.write(event)
    sink.close()
    read = accumulator.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    read.Reload()
    losses = read.Scalars("train/loss")
    assert [point.step for point in losses] == [step for step in range(1, 41) if step != 7]
    last = {event.step: event.loss for event in made_up_run() if isinstance(event, StepDone)}
    assert all(abs(point.value - last[point.step]) < 1e-6 for point in losses)
    assert {"eval/bits_per_byte", "train/learning_rate", "speed/tokens_per_second"} <= set(read.Tags()["scalars"])


def test_tensorboard_does_not_import_torch(tmp_path):
    import subprocess

    code = (
        "import sys; from pathlib import Path; from bloomery.monitor.sinks import TensorBoard;"
        "TensorBoard(Path(sys.argv[1])).close(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0


def test_a_missing_tensorboard_is_a_warning_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    told = []
    sinks = open_sinks(tmp_path, ["tensorboard"], [], every_steps=1, folder=tmp_path, warn=told.append)
    assert len(sinks) == 1 and "bloomery[track]" in told[0]


def hook(tmp_path, body):
    script = tmp_path / "hook.py"
    script.write_text(body)
    told = []
    return CommandSink(f"{sys.executable} '{script}'", tmp_path, told.append), told


def test_a_hook_reads_each_event_as_json(tmp_path):
    sink, told = hook(tmp_path, "import sys; open('got.txt', 'a').write(sys.stdin.read())")
    sink.write(step_done(3, 1.5))
    sink.write(Warned(because=LEAKS["a Hugging Face token"]))
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
    assert "did not answer" in told[0]


def test_a_hook_that_is_missing_is_a_warning(tmp_path):
    told = []
    CommandSink("./nothing.sh", tmp_path, told.append).write(Phase(name="x"))
    assert "could not be started: No such file" in told[0]


def test_metrics_are_those_of_the_events(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as emit:
        for event in made_up_run():
            emit(event)
    metrics = json.loads(write_metrics(tmp_path).read_text())
    assert metrics["steps"] == metrics["steps_planned"] == 40 and metrics["tokens"] == 40 * 8192
    assert metrics["skipped_steps"] == 1 and metrics["resumes"] == 1 and metrics["ended"] == "done"
    assert metrics["best_evaluation"]["step"] == 40 and metrics["peak_memory_gib"] == 0.58
