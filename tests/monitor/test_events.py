"""Events outlive the process that wrote them, and readers forgive what a kill left behind."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from dataclasses import replace

import pytest

from bloomery.core.errors import UserError
from bloomery.monitor.events import (
    EvalDone,
    EventLog,
    Phase,
    Recovered,
    Resumed,
    RunEnded,
    RunStarted,
    Sampled,
    StepDone,
    follow_events,
    from_json,
    last_per_step,
    read_events,
    to_json,
)
from bloomery.view.summary import summary_of


def step_done(step, loss=2.0):
    return StepDone(
        step=step,
        time=float(step),
        loss=loss,
        learning_rate=1e-3,
        grad_norm=1.0,
        tokens=step * 8,
        tokens_per_second=1.0,
        sequences_per_second=1.0,
        step_seconds=1.0,
        data_wait_seconds=0.0,
        memory_gib=0.5,
    )


def test_every_event_comes_back_equal(tmp_path):
    written = [
        step_done(1),
        Phase(name="prepare", done=1, total=2),
        Sampled(prompt="é\u2028", completion="\ud800 x\n"),
    ]
    with EventLog(tmp_path / "deep" / "events.jsonl") as emit:
        for event in written:
            emit(event)
    assert list(read_events(tmp_path / "deep" / "events.jsonl")) == written


def test_a_new_writer_begins_on_a_fresh_line(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as emit, EventLog(path) as parent:
        emit(step_done(1))
        with path.open("ab") as file:
            file.write(to_json(step_done(2))[:40].encode())
        parent(RunEnded(status="failed", error="killed"))
        emit(step_done(2))
    assert [type(event).__name__ for event in read_events(path)] == [
        "StepDone",
        "RunEnded",
        "StepDone",
    ]


def test_a_loss_that_is_not_finite_is_null(tmp_path):
    line = to_json(
        EvalDone(loss=math.nan, perplexity=math.inf, bits_per_byte=None, tokens=1, seconds=1.0)
    )
    assert '"loss": null' in line and '"perplexity": null' in line
    assert from_json(line).loss is None


SILENT = ["", "{", "1", "null", '{"event": "Nobody"}', '{"event": "StepDone", "step": 1}', "\0"]


@pytest.mark.parametrize("line", SILENT)
def test_lines_that_say_nothing(line):
    assert from_json(line) is None


def test_fields_of_a_newer_version_are_ignored():
    assert (
        from_json(
            '{"event": "RunEnded", "status": "done", "mood": "good", "step": 3, "time": 1}'
        ).step
        == 3
    )


def test_the_last_telling_of_a_step_counts():
    events = [step_done(1, 5.0), step_done(2, 4.0), Resumed(path="x", step=1), step_done(2, 3.0)]
    assert [event.loss for event in last_per_step(events, StepDone)] == [5.0, 3.0]


def test_a_future_that_a_resume_gave_up_is_not_told():
    events = [step_done(step) for step in (1, 2, 3, 4)] + [Resumed(path="x", step=2)]
    assert [event.step for event in last_per_step(events, StepDone)] == [1, 2]
    assert [event.step for event in last_per_step([*events, step_done(3)], StepDone)] == [1, 2, 3]


def test_a_night_between_a_stop_and_its_resume_is_no_time_of_the_run():
    def started(time):
        return RunStarted(
            schema=2, version="0", parameters=1, steps=9, attention="sdpa", device="cpu", time=time
        )

    def took(step, time):
        return replace(step_done(step), time=time)

    killed = [started(0.0), took(1, 5.0), took(2, 10.0)]
    stopped = [*killed, RunEnded(step=2, status="stopped", time=11.0)]
    assert summary_of(stopped).seconds == 11.0
    again = [started(30_000.0), Resumed(path="x", step=2, time=30_000.0), took(3, 30_004.0)]
    assert summary_of([*stopped, *again]).seconds == 15.0
    assert summary_of([*killed, *again]).seconds == 14.0


def test_a_future_that_a_rewind_gave_up_is_not_told():
    back = Recovered(step=2, reason="the loss was not a finite number", action="back to step 2")
    events = [step_done(1), step_done(2), step_done(3), step_done(4), back]
    assert [event.step for event in last_per_step(events, StepDone)] == [1, 2]
    seen = summary_of(
        [*events, EvalDone(step=2, loss=1.0, perplexity=1, bits_per_byte=1, tokens=1, seconds=1)]
    )
    assert seen.step == 2
    assert [event.loss for event in last_per_step([*events, step_done(3, 9.0)], StepDone)] == [
        2.0,
        2.0,
        9.0,
    ]
    assert summary_of([step_done(5), Recovered(step=5, reason="x", action="y")]).step == 5


def test_follow_waits_for_half_lines_and_reads_to_the_end(tmp_path):
    path, ended, got = tmp_path / "events.jsonl", threading.Event(), []
    reader = threading.Thread(
        target=lambda: got.extend(follow_events(path, ended.is_set, poll_seconds=0.005))
    )
    reader.start()
    line = to_json(step_done(1)).encode()
    with path.open("ab", buffering=0) as file:
        file.write(line[:30])
        time.sleep(0.03)
        file.write(line[30:] + b"\n")
        end = time.monotonic() + 60
        while not got and time.monotonic() < end:
            time.sleep(0.005)
        assert [event.step for event in got] == [1]
        file.write(to_json(step_done(2)).encode() + b"\n")
    ended.set()
    reader.join(60)
    assert [event.step for event in got] == [1, 2]


def test_sigkill_loses_nothing_that_was_emitted(tmp_path):
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from pathlib import Path; from bloomery.monitor.events import EventLog, Phase\n"
        "with EventLog(Path(sys.argv[1])) as emit:\n"
        "    for i in range(10**9):\n        emit(Phase(name='x' * 200, done=i))\n        print(i, flush=True)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    seen = [int(child.stdout.readline()) for _ in range(200)][-1]
    child.send_signal(signal.SIGKILL)
    child.wait()
    done = [event.done for event in read_events(path)]
    assert done == list(range(len(done))) and len(done) > seen


@pytest.mark.parametrize("away", ["deleted", "moved"])
def test_a_folder_that_went_away_ends_the_writing(tmp_path, away):
    run = tmp_path / "run"
    with EventLog(run / "events.jsonl") as emit:
        emit(step_done(1))
        shutil.rmtree(run) if away == "deleted" else run.rename(tmp_path / "elsewhere")
        with pytest.raises(UserError, match="moved or deleted"):
            emit(step_done(2))
    assert not run.exists()


def test_a_full_disk_is_one_sentence(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (
        EventLog(tmp_path / "events.jsonl") as emit,
        pytest.raises(UserError, match="File too large"),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        try:
            emit(step_done(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_flipped_bit_of_a_line_never_reads_as_another_event(tmp_path):
    path, told = (
        tmp_path / "events.jsonl",
        [step_done(1), Sampled(step=1, prompt="a", completion="ä\ud800b"), step_done(2)],
    )
    with EventLog(path) as emit:
        for event in told:
            emit(event)
    assert list(read_events(path)) == told
    whole = path.read_bytes()
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        assert all(event in told for event in read_events(path)), (place, content)


def test_lines_without_an_end_are_bounded(tmp_path):
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.truncate(200 * 2**20)
    tracemalloc.start()
    assert list(read_events(path)) == []
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_what_is_no_file_is_refused_and_nothing_follows_it(tmp_path, kind):
    path = tmp_path / "events.jsonl"
    (tmp_path / "letter").write_text("mine")
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(
        "/dev/zero" if kind == "device" else tmp_path / "letter"
    )
    with pytest.raises(UserError, match="regular file"):
        EventLog(path)
    with pytest.raises(UserError, match="regular file"):
        list(read_events(path))
    assert (tmp_path / "letter").read_text() == "mine"


def test_metrics_are_numbers_and_absent_from_old_logs():
    told = EvalDone(
        loss=0.5,
        perplexity=None,
        bits_per_byte=None,
        tokens=3,
        seconds=1.0,
        metrics={"accuracy": 0.75, "margin": math.nan},
    )
    line = to_json(told)
    assert from_json(line).metrics == {"accuracy": 0.75}
    assert from_json(line.replace("0.75", '"much"')) is None
    entry = json.loads(line)
    del entry["metrics"]
    assert from_json(json.dumps(entry)).metrics == {}
