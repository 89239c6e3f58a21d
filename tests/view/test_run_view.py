"""A run is read once: a terminal, studio and the report say the same of it, and each rule stands in one place."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

import bloomery
from bloomery.cli.runs import describe
from bloomery.monitor.events import (
    EvalDone,
    EventLog,
    Phase,
    Recovered,
    Resumed,
    RunEnded,
    RunStarted,
    Sampled,
    Saved,
    StepDone,
    Warned,
    last_kept_step,
)
from bloomery.report.record import read_run_record
from bloomery.view.incidents import KILLED
from bloomery.view.reader import RunReader
from bloomery.view.run_view import MOST_SAMPLES, RunView
from bloomery.view.screen import view_for_screen
from runs_for_tests import made_up_run, step_done

SOURCE = Path(bloomery.__file__).parent
STARTED = RunStarted(schema=2, version="1", parameters=1, steps=9, attention="sdpa", device="cpu")


def folder_of(tmp_path: Path, events) -> Path:
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    with EventLog(tmp_path / "events.jsonl") as emit:
        for event in events:
            emit(event)
    return tmp_path


def test_a_kill_reads_the_same_everywhere(tmp_path):
    resumed = Resumed(step=1, path="checkpoints/step-00000001", time=9.0)
    folder = folder_of(tmp_path, [STARTED, step_done(1), step_done(2), STARTED, resumed])
    reader = RunReader(folder, view_for_screen())
    reader.read()
    incidents = [(i.step, i.kind, i.text) for i in reader.view.shown_incidents()]
    assert incidents[0] == (2, "kill", KILLED)
    assert [(i.step, i.kind, i.text) for i in read_run_record(folder).incidents] == incidents


def test_the_sentence_of_a_kill_is_written_once():
    sources = [path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")]
    assert sum(text.count("SIGKILL, crash") for text in sources) == 1


def test_one_function_knows_that_a_resume_discards_later_steps():
    """Whoever asks for both kinds of event has a rule of its own."""
    pattern = re.compile(r"Resumed(\(\))? \| Recovered|Recovered(\(\))? \| Resumed")
    places = [path.name for path in SOURCE.rglob("*.py") if pattern.search(path.read_text("utf-8"))]
    assert places == ["events.py"]


@pytest.mark.parametrize(
    "goes_back",
    [
        Resumed(step=4, path="checkpoints/step-00000004", time=9.0),
        Recovered(step=4, reason="it diverged", action="back to step 4", time=9.0),
    ],
)
def test_a_run_that_goes_back_keeps_nothing_of_its_later_steps(goes_back, tmp_path):
    assert last_kept_step(goes_back) == 4
    evaluation = {"perplexity": None, "bits_per_byte": None, "tokens": 9, "seconds": 0.1}
    events = [
        STARTED,
        *(step_done(step) for step in range(1, 9)),
        EvalDone(step=4, loss=2.0, **evaluation),
        EvalDone(step=8, loss=1.0, **evaluation),
        Saved(step=4, path="x", bytes=1, seconds=0.1),
        Saved(step=8, path="x", bytes=1, seconds=0.1),
        goes_back,
        step_done(5, 1.5),
    ]
    view = RunView()
    view.add_all(events)
    assert view.curves.points("loss").tolist() == [[1, 2], [2, 2], [3, 2], [4, 2], [5, 1.5]]
    assert list(view.summary.evaluations) == [4]
    assert view.summary.step == 5
    record = read_run_record(folder_of(tmp_path, events))
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5]
    assert [save.step for save in record.saves] == [4]
    assert [event.step for event in record.evals] == [4]


@pytest.mark.parametrize(
    "event", [STARTED, Phase(name="compile"), Warned(reason="x"), step_done(1)]
)
def test_no_other_event_discards_a_step(event):
    assert last_kept_step(event) is None


def test_an_error_that_the_run_left_behind_keeps_its_first_line():
    view = RunView()
    view.add_all([step_done(1), RunEnded(step=1, status="failed", error="it broke\nbadly")])
    assert [i.text for i in view.shown_incidents()] == ["failed: it broke\nbadly"]
    view.add(Resumed(step=1, path="checkpoints/step-00000001"))
    assert next(iter(view.shown_incidents())).text == "failed: it broke"
    assert view.incidents[0].text == "failed: it broke\nbadly"  # for the report


def test_the_report_reads_every_event_once(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, made_up_run())
    num_lines = len((folder / "events.jsonl").read_text().splitlines())
    from bloomery.monitor import events

    parsed: list[bytes] = []
    from_json = events.from_json
    monkeypatch.setattr(
        events, "from_json", lambda line, decode: parsed.append(line) or from_json(line, decode)
    )
    record = read_run_record(folder)
    assert len(parsed) == num_lines
    assert len(record.steps) == 40


def test_what_a_view_keeps_is_bounded():
    view = view_for_screen()
    view.add_all(Warned(step=step, reason=f"warning {step}") for step in range(1000))
    assert len(view.incidents) == 200 and view.incidents[-1].text == "warning 999"


@pytest.mark.parametrize("prompts", [1, 3, 150, 1000])
def test_of_many_samples_the_first_the_newest_and_some_between_are_kept(prompts):
    view = view_for_screen()
    for step in range(1, 101):
        for prompt in range(prompts):
            view.add(Sampled(step=step, prompt=f"prompt {prompt}", completion=f"at {step}"))
        assert len(view.samples) <= MOST_SAMPLES
    steps = [sample.step for sample in view.samples]
    assert steps == sorted(steps) and steps[-1] == 100
    of_newest = [sample.prompt for sample in view.samples if sample.step == 100]
    assert of_newest == [f"prompt {n}" for n in range(prompts)][-MOST_SAMPLES:]
    if prompts < MOST_SAMPLES // 4:
        assert steps[0] == 1
        gaps = [later - earlier for earlier, later in pairwise(dict.fromkeys(steps))]
        # Evenly, but that the older half of a thinned view is thinner by as much again.
        assert len(gaps) >= 20 // prompts and max(gaps) <= 16 * prompts


def test_a_view_is_told_of_a_skipped_step_by_its_time():
    view = RunView()
    steps = [step_done(step, None if step == 3 else 2.0, time=10.0 * step) for step in range(1, 6)]
    view.add_all([STARTED.__class__(**{**vars(STARTED), "time": 0.0}), *steps])
    assert all(isinstance(step, StepDone) for step in steps)
    assert [(i.step, i.kind, i.seconds) for i in view.incidents] == [(3, "skip", 30.0)]


def test_a_run_that_is_done_before_its_planned_steps_was_extended_and_killed(tmp_path):
    folder = folder_of(tmp_path, [STARTED, step_done(4), RunEnded(step=4, status="done")])
    for planned, status in ((4, "done"), (9, "killed")):
        (folder / "plan.json").write_text(json.dumps({"train": {"steps": planned}}))
        assert RunReader(folder, RunView()).read() == describe(folder).state == status
