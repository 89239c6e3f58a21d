"""What people see of a run."""

import io
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from bloomery.monitor.events import (
    DeviceStats,
    EvalDone,
    Phase,
    Recovered,
    Resumed,
    RunEnded,
    RunStarted,
    Sampled,
    Saved,
    StepChecked,
    Warned,
)
from bloomery.monitor.words import STARTING_PHASES, devices_text, log_line
from bloomery.view.metrics_json import metrics_of
from bloomery.view.planned_figures import PlannedFigures
from bloomery.view.plot import sparkline
from bloomery.view.screen import Screen, frame, view_for_screen
from bloomery.view.summary import RunSummary, summary_of
from bloomery.view.terminal import PlainView, header, showing
from runs_for_tests import made_up_run, step_done


def lines_of(events, every=10, **facts):
    lines = []
    view = PlainView(PlannedFigures(every_steps=every, **facts), lines.append)
    for event in events:
        view.write(event)
    view.close()
    return lines


def rows_of(lines, titles=None):
    told = lines[lines.index(titles or header()) + 1 :]
    return [
        line
        for line in told
        if line[:6].strip().isdigit() and any(letter.isdigit() for letter in line[6:18])
    ]


def test_a_checked_step_has_a_line_and_a_known_one_none():
    checked = StepChecked(
        device="RX 6700 XT", arch="gfx1031", torch="2.13.0", precision="float16", seconds=3.2
    )
    (line,) = lines_of([checked, replace(checked, from_cache=True)])
    assert line == "check      one step on RX 6700 XT equals the CPU's in float16 (3.2 s)"
    problem = "this GPU computes wrong gradients in q_proj with float16"
    lines = lines_of([replace(checked, problem=problem, detail="error 1.5, at most 0.0039")])
    assert problem in " ".join(lines[0].split()) and "0.0039" in " ".join(lines)


def test_samples_of_devices_do_not_part_a_line_from_its_exam():
    events = [
        event
        for told in made_up_run()
        for event in (told, DeviceStats(device=0, seconds=5.0, step=told.step))
    ]
    assert lines_of(events) == lines_of(made_up_run())


def test_plain_rows_are_aligned_under_their_header():
    rows = rows_of(lines_of(made_up_run()))
    assert [int(row[:6]) for row in rows] == [7, 10, 20, 30, 40]
    for title in ("tokens", "loss", "val bpb", "tokens/s", "ETA"):
        end = header().index(title) + len(title)
        assert all(row[end] == " " for row in rows if len(row) > end), title
    assert all(len(line) <= 100 for line in lines_of(made_up_run()))


def test_exam_save_and_end_stand_on_the_line_of_their_step():
    rows = rows_of(lines_of(made_up_run()))
    exam = next(
        event for event in made_up_run() if isinstance(event, EvalDone) and event.step == 20
    )
    assert f"{exam.bits_per_byte:.2f}" in rows[2] and rows[2].endswith("checkpoint (best)")
    assert "done in" in rows[4]


def test_the_last_line_has_room_for_its_curve():
    rows = rows_of(lines_of(made_up_run()))
    assert rows[4].endswith("best, done in 28 s") and "checkpoint" not in rows[4]
    assert [sum(letter in "▁▂▃▄▅▆▇█" for letter in row) for row in rows] == [1, 2, 3, 4, 5]


def test_memory_has_a_column_and_leaves_the_curve_its_room():
    titles = header(memory=True)
    rows = rows_of(lines_of(made_up_run(), show_memory=True), titles)
    end = len(titles)
    assert all(row[:end].endswith(" 0.58") and len(row) <= 100 for row in rows) and titles.endswith(
        " GiB"
    )
    assert rows[4].endswith("best, done in 28 s")
    assert [sum(letter in "▁▂▃▄▅▆▇█" for letter in row) for row in rows] == [1, 2, 3, 4, 5]


def test_an_exam_of_pairs_keeps_its_distance_from_the_loss():
    exam = EvalDone(step=1, loss=0.69, perplexity=None, bits_per_byte=None, tokens=9, seconds=1)
    exam = replace(exam, metrics={"accuracy": 1.0})
    started = RunStarted(
        schema=2,
        version="0",
        parameters=1,
        steps=9,
        attention="sdpa",
        device="cpu",
        loss_unit="pair",
    )
    titles = header("pair")
    (row,) = rows_of(lines_of([started, step_done(1, 0.69), exam], every=1), titles)
    assert row[26 : len(titles)].split("  ")[0] == "" and "0.69, 100%  " in row
    assert row.index("0.69, 100%") + 10 == titles.index("val loss, acc") + 13


def test_a_save_that_ends_some_steps_later_is_told_below():
    """An asynchronous checkpoint of step 4 is written while step 5 is computed."""
    saved = Saved(step=4, path="checkpoints/step-00000004", bytes=1, seconds=0.1, best=True)
    lines = lines_of(
        [*(step_done(step) for step in (1, 2, 3, 4, 5)), saved, step_done(6), saved], every=2
    )
    assert [int(row[:6]) for row in rows_of(lines)] == [2, 4, 6]
    assert lines[-1] == "     6     checkpoint (best) of step 4", (
        "the numbers of steps never go backwards"
    )
    better = EvalDone(step=5, loss=1.0, perplexity=1.0, bits_per_byte=1.0, tokens=1, seconds=1)
    lines = lines_of(
        [*(step_done(step) for step in (1, 2, 3, 4, 5)), better, step_done(6), saved], every=2
    )
    assert lines[-1] == "     6     checkpoint of step 4", "step 5 is the best by now"


def test_an_exam_of_a_future_that_a_resume_gave_up_counts_no_more():
    events = [
        EvalDone(step=s, loss=loss, perplexity=1.0, bits_per_byte=1.0, tokens=1, seconds=1.0)
        for s, loss in ((10, 3.0), (20, 2.0), (30, 2.5))
    ]
    summary = summary_of(events)
    assert (summary.evaluation, summary.best) == (events[2], events[1])
    summary.add(Resumed(step=10, path="x"))
    assert summary.evaluation == summary.best == events[0]


def test_a_skipped_step_is_never_a_number():
    row = rows_of(lines_of(made_up_run()))[0]
    assert "skipped" in row and "0.00" not in row[17:26]


def test_the_loss_is_the_mean_since_the_line_before():
    row = rows_of(lines_of([step_done(1, 1.0), step_done(2, 2.0)], every=2))[0]
    assert row[17:26].strip() == "1.50"


def test_time_left_counts_evaluations_too():
    """Ten steps of 0.5 s with 5 s of evaluation between them leave (90 steps) x 1 s."""
    summary = RunSummary(planned_steps=100)
    for step in range(1, 12):
        summary.add(step_done(step, time=step * 0.5 + (5 if step > 5 else 0)))
    assert summary.eta_seconds == (100 - 11) * 1.0


def test_preparing_the_dataset_is_not_training_time():
    """Planned seconds of a run begin with its training process."""
    phases = [
        Phase(name=name, done=1, total=1, time=time)
        for name, time in (("tokenizer", 0.0), ("checksums", 30.0))
    ]
    started = RunStarted(
        schema=2, version="1", parameters=1, steps=9, attention="sdpa", device="cpu", time=34.0
    )
    summary = summary_of([*phases, started, step_done(1, time=35.0), step_done(2, time=40.0)])
    assert (summary.seconds, summary.training_seconds) == (40.0, 10.0)


def test_a_first_step_that_compiled_says_nothing_of_the_time_left():
    summary = RunSummary(planned_steps=100)
    for step in range(1, 12):
        took = 30.0 if step <= 2 else 0.5
        summary.add(
            replace(
                step_done(step, time=30.0 * min(step, 2) + 0.5 * max(step - 2, 0)),
                step_seconds=took,
            )
        )
    assert summary.eta_seconds == (100 - 11) * 0.5


def test_a_clock_that_is_set_back_takes_no_time_away():
    """An hour back between steps 5 and 6; the half second in which it happened is lost."""
    summary = RunSummary(planned_steps=100)
    for step in range(1, 12):
        summary.add(step_done(step, time=step * 0.5 - (3600 if step > 5 else 0)))
    assert summary.seconds == 4.5
    assert summary.eta_seconds == pytest.approx(89 * 0.45)


def test_a_save_that_is_told_late_takes_no_time():
    summary = RunSummary(planned_steps=100)
    saved = Saved(step=1, path="x", bytes=1, seconds=1.0, time=1.5)
    for event in (step_done(1, time=1.0), step_done(2, time=2.0), saved, step_done(3, time=3.0)):
        summary.add(event)
    assert summary.seconds == 2.0


def test_a_resume_does_not_count_the_pause():
    summary = RunSummary(planned_steps=100)
    for event in (
        step_done(1, time=0.5),
        step_done(2, time=1.0),
        Resumed(step=1, path="x", time=9000.0),
    ):
        summary.add(event)
    assert summary.eta_seconds is None and summary.step == 1
    for event in (step_done(2, time=9000.5), step_done(3, time=9001.0)):
        summary.add(event)
    assert summary.eta_seconds == 97 * 0.5


def test_smoothing_is_bias_corrected():
    summary = summary_of([step_done(1, 4.0), step_done(2, 2.0)])
    assert abs(summary.smoothed - (0.9 * 0.1 * 4 + 0.1 * 2) / (1 - 0.9**2)) < 1e-12


def test_a_failure_says_why():
    lines = lines_of(
        [step_done(10), RunEnded(step=10, status="failed", error="the disk is full", time=10.0)]
    )
    assert lines[-1] == "failed     after 0.0 s: the disk is full"


def test_phases_are_told_once_begun_and_once_done():
    titled = [line for line in lines_of(made_up_run()) if line.startswith("tokenizer")]
    assert titled == ["tokenizer    0%", "tokenizer  100%"]


def test_what_comes_before_the_first_step_is_in_the_view_and_the_log():
    """A plain terminal has no line of it: the first steps follow."""
    for name, text in STARTING_PHASES.items():
        phase = Phase(name=name)
        assert lines_of([phase]) == []
        assert text in view_of([phase])
        assert log_line(phase) == text


def test_long_warnings_wrap():
    lines = lines_of([Warned(reason="word " * 60)])
    assert len(lines) > 2 and all(len(line) <= 100 for line in lines)


def test_mfu_is_arithmetic_and_absent_where_the_peak_is_unknown():
    assert PlannedFigures(flops_per_token=2e6, peak_flops=1e12).utilization(1e5) == 0.2
    assert PlannedFigures(flops_per_token=2e6).utilization(1e5) is None


def test_sparkline():
    assert sparkline([3, 2, 1], 9) == "▇▄▁" and sparkline([1, 1], 9) == "▁▁"
    assert sparkline([], 9) == "" == sparkline([1, 2], 0)


NOW = 1_800_000_000.0
WARNING = (
    "the learning rate is too high for this model: the gradient norm is clipped in nine steps of ten, and the "
    "validation loss has not fallen since step 195,000; optimizer.learning_rate=3e-4 is usual"
)


def a_long_run():
    """The widest figures of a run of weeks, told in the last minute."""
    for step in range(194_990, 195_001):
        yield step_done(
            step, 12.3456, NOW - 60 + step % 10, tokens=3_194_880_000, tokens_per_second=1_222_808.0
        )
    exam = EvalDone(
        step=195_000, loss=0.693, perplexity=None, bits_per_byte=None, tokens=9, seconds=1, time=NOW
    )
    yield replace(exam, metrics={"accuracy": 0.712})
    yield Sampled(
        step=195_000,
        prompt="def first(sentence: str) -> str:\n",
        completion="    return sentence",
        time=NOW,
    )
    yield Saved(step=195_000, path="checkpoints/step-00195000", bytes=2**30, seconds=1.0, time=NOW)
    devices = {
        "seconds": 5.0,
        "utilization": 97.0,
        "memory_total_gib": 191.7,
        "temperature": 71.0,
        "power": 702.0,
    }
    yield DeviceStats(
        device=0, memory_gib=151.2, throttled="thermal throttling", time=NOW, **devices
    )
    yield DeviceStats(device=-1, memory_gib=18.1, time=NOW, **devices)
    yield Warned(step=195_000, reason=WARNING, time=NOW)


def screen_of(
    events, width=80, height=23, name="llama2-7b-full-24gb-20261122-110305", state="running"
):
    facts = PlannedFigures(
        name=name, steps=390_000, flops_per_token=1e5, peak_flops=1e12, memory_limit_gib=176.0
    )
    seen = view_for_screen(facts.steps)
    for event in events:
        seen.add(event)
    return frame(seen, facts, Screen(width, height), state=state, now=NOW)


def test_a_terminal_of_80_by_24_shows_every_figure_whole():
    lines = screen_of(a_long_run())
    text = " ".join(" ".join(lines).split())
    assert len(lines) <= 23 and all(len(line) <= 80 for line in lines) and "…" not in text
    for part in (
        "llama2-7b-full-24gb-20261122-110305",
        "step 195,000 of 390,000",
        "12.3456, smoothed 12.3456",
        "1,222,808 tokens/s, MFU 12.2%",
        "0.693, accuracy 71.2% at step 195,000",
        "3.19 B",
        "0.58 of 176.0 GiB",
        "1.000",
        "1.0% of step time",
        "def first(sentence: str) -> str:",
        "throttled: thermal throttling",
        WARNING,
    ):
        assert part in text, part


def test_a_long_line_of_a_sample_goes_on_in_the_next():
    lines = screen_of([step_done(1), Sampled(prompt="", completion="ab " * 60)])
    shown = "".join(
        line[11:].ljust(69) for line in lines if "ab ab" in line or line.strip().startswith("ab")
    )
    assert shown.startswith(("ab " * 60).rstrip())


def test_the_live_picture_of_a_skipped_step():
    text = "\n".join(screen_of([step_done(1, None)]))
    assert text.count("skipped") >= 2 and "0.0000" not in text


def view_of(events, before=(), **console):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, **console)
    with showing(PlannedFigures(name="a-run", steps=9), terminal, before) as view:
        for event in events:
            view.write(event)
        view.note(5, "said")
    return terminal.file.getvalue()


def test_a_resumed_run_does_not_show_how_it_ended_before():
    before = [step_done(3), RunEnded(step=3, status="failed", error="the disk is full")]
    shown = view_of([Phase(name="compile")], before)
    assert (
        "failed" not in shown
        and "a-run · starting · compiling the first step · step 3 of 9" in shown
    )
    assert "failed: the GPU is gone" in view_of(
        [RunEnded(step=3, status="failed", error="the GPU is gone")], before
    )


HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x1b[2J\x9b1m\x90q\x9c\u202etxt\u2066\r\x08"


@pytest.mark.parametrize("terminal", [True, False], ids=["live view", "plain lines"])
def test_text_of_a_dataset_never_reaches_the_terminal_raw(terminal):
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=80, height=24, color_system=None
    )
    events = [
        Warned(reason=f"a row {HOSTILE} is odd"),
        step_done(1),
        Sampled(step=1, prompt=HOSTILE, completion=f"a{HOSTILE}b"),
        Phase(name=f"x{HOSTILE}"),
        Recovered(step=1, reason=HOSTILE, action=HOSTILE),
        Saved(step=1, path=f"a/{HOSTILE}", bytes=1, seconds=1),
        Resumed(step=1, path=HOSTILE),
        RunEnded(step=1, status="failed", error=f"{HOSTILE}"),
    ]
    with showing(PlannedFigures(name=f"run{HOSTILE}"), console, events) as view:
        for event in events:
            view.write(event)
        view.note(1, HOSTILE)
    shown = console.file.getvalue()
    assert "red" in shown
    if terminal:  # rich moves the cursor and clears lines
        shown = re.sub(r"\x1b\[(\?25[hl]|[0-9]*[A-K])|\r", "", shown)
    assert not [letter for letter in shown if letter in HOSTILE and not letter.isprintable()]


def test_a_terminal_gets_the_live_view_and_a_pipe_gets_lines():
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, height=40)
    with showing(PlannedFigures(), terminal) as view:
        for event in made_up_run():
            view.write(event)
        view.note(5, "said")
    assert "\x1b[" in terminal.file.getvalue() and terminal.file.getvalue().rstrip().endswith(
        "\x1b[?25h"
    )
    pipe = Console(file=io.StringIO(), width=60)
    with showing(PlannedFigures(), pipe) as view:
        for event in made_up_run():
            view.write(event)
    assert header() in pipe.file.getvalue() and "\x1b" not in pipe.file.getvalue()


def test_how_much_of_a_model_is_trained_is_said_where_it_is_not_all():
    whole = RunStarted(
        schema=2, version="0", parameters=16_081_536, steps=1, attention="mask", device="cpu"
    )
    part = replace(whole, trainable=98_304)
    assert lines_of([whole])[0].endswith("16,081,536 parameters on cpu, attention: mask")
    assert lines_of([part])[0].endswith(
        "16,081,536 parameters (98,304 trainable) on cpu, attention: mask"
    )


def test_a_run_with_an_adapter_begins_with_the_modules_that_it_trains():
    targets = "70 target modules: q_proj, v_proj: 30 each; in_proj: 10"
    started = RunStarted(
        schema=2,
        version="0",
        parameters=16_081_536,
        steps=1,
        attention="mask",
        device="cpu",
        reasons={"adapter.target_modules": targets, "quantize.kind": "nf4 base: 4.127 bits"},
    )
    adapter, base = lines_of([started])[1:3]
    assert adapter.split(maxsplit=1) == ["adapter", targets]
    assert base.split(maxsplit=1) == ["base", "nf4 base: 4.127 bits"]


def test_a_notebook_gets_one_output_that_is_redrawn(monkeypatch):
    drawn = []

    class Handle:
        def update(self, shown):
            drawn.append(shown._repr_mimebundle_())

    def display(shown, *, display_id):
        assert display_id
        drawn.append(shown._repr_mimebundle_())
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    with showing(PlannedFigures(name="a<b", steps=2), Console(force_jupyter=True)) as view:
        for step in (1, 2):
            view.write(step_done(step))
        view.write(RunEnded(step=2, status="done"))
    assert len(drawn) == 2  # the start and the end: no redraw within half a second
    assert "a<b · done · step 2 of 2" in drawn[-1]["text/plain"]
    assert "a&lt;b · done · step 2 of 2" in drawn[-1]["text/html"]


def test_several_devices_are_counted_with_their_axes() -> None:
    def started(**facts) -> RunStarted:
        return RunStarted(
            schema=2,
            version="1",
            parameters=10,
            steps=3,
            attention="mask",
            device="MI300X",
            **facts,
        )

    assert devices_text(started()) == "MI300X"
    assert (
        devices_text(started(world_size=8, mesh={"replicate": 2, "shard": 4}))
        == "8 x MI300X (replicate 2, shard 4)"
    )


def test_a_run_that_starts_over_forgets_its_earlier_losses():
    summary = summary_of(
        [
            step_done(1, 9.0),
            step_done(2, 3.0),
            Resumed(step=0, path="", time=9.0),
            step_done(1, 9.0),
        ]
    )
    assert abs(summary.smoothed - 9.0) < 1e-12


def test_a_run_that_starts_over_and_ends_before_a_step_has_no_figures_of_discarded_steps():
    steps = [step_done(1, 9.0), step_done(2, 3.0)]
    restarted = [*steps, Resumed(step=0, path="", time=9.0), RunEnded(status="stopped", time=9.5)]
    figures = metrics_of(summary_of(restarted))
    assert (figures["step"], figures["tokens"], figures["loss"]) == (0, 0, None)
    assert metrics_of(summary_of(steps))["tokens"] > 0
