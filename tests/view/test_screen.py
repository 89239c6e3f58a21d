"""The picture of a run for whoever looks at it from outside."""

import re
import time

import pytest
from rich.cells import cell_len

from bloomery.monitor.events import (
    DeviceStats,
    EventLog,
    Phase,
    Resumed,
    RunEnded,
    RunStarted,
    Sampled,
    Tail,
    Warned,
    to_json,
)
from bloomery.view.planned_figures import PlannedFigures
from bloomery.view.plot import interval_strips, plot, settled_top
from bloomery.view.run_view import RunView
from bloomery.view.screen import Screen, frame, view_for_screen
from runs_for_tests import made_up_run, step_done

FACTS = PlannedFigures(name="tiny-1", steps=40, memory_limit_gib=11.0)


def seen_of(events) -> RunView:
    seen = view_for_screen()
    for event in events:
        seen.add(event)
    return seen


def drawn(events, width=100, height=None, plain=False, state="running", now=30.0):
    return frame(seen_of(events), FACTS, Screen(width, height, plain), state=state, now=now)


@pytest.mark.parametrize("width", [40, 80, 100, 200])
@pytest.mark.parametrize("height", [None, 12, 24, 40])
def test_no_line_is_wider_and_no_picture_higher_than_the_screen(width, height):
    long = [
        Warned(reason="a word " * 80, step=3),
        Sampled(step=40, prompt="漢字" * 60, completion="\x1b[2J" + "x" * 300),
    ]
    lines = drawn([*made_up_run(), *long], width, height)
    assert all(cell_len(line) <= width for line in lines)
    assert height is None or len(lines) <= height
    assert not any("\x1b" in line for line in lines)


def test_everything_that_a_person_looks_for_is_there():
    gpu = DeviceStats(
        device=0, seconds=5.0, utilization=98.0, power=200.0, temperature=71.0, time=22.0
    )
    events = [*made_up_run(steps=40, kill_at=25), gpu]
    text = "\n".join(drawn([*events[:-2], gpu]))
    for part in (
        "tiny-1 · running · step 40 of 40",
        "loss, nats per token",
        "validation loss",
        "val bpb",
        " at step 40",
        "16,384 tokens/s",
        "0.58 of 11.0 GiB",
        "gpu 0",
        "98%",
        "71 °C",
        "J/token",
        "step 20: resumed from step-00000020",
        "step skipped",
        "its update was skipped",
        "at 40",
        "step 40",
        "      lr  ",
        "tokens/s  ",
    ):
        assert part in text, part


def test_it_can_be_drawn_with_ascii_alone():
    text = "\n".join(drawn(made_up_run(), plain=True))
    text.encode("ascii")
    assert "*" in text and "o" in text and "###" in text


def test_a_run_that_says_nothing_yet_has_a_picture():
    assert drawn([])[0].startswith("tiny-1 · running · step 0 of 40")
    assert "tokenizer" in drawn([Phase(name="tokenizer", done=3, total=10, time=1.0)])[0]
    assert " 30%  " in drawn([Phase(name="tokenizer", done=3, total=10, time=1.0)])[1]


def test_a_kill_is_told_although_nobody_wrote_it_down():
    started = RunStarted(
        schema=2, version="1", parameters=1, steps=9, attention="sdpa", device="cpu", step=3
    )
    lines = drawn([step_done(5), started, Resumed(path="checkpoints/step-00000003", step=3)])
    assert any("step 5: killed" in line for line in lines)
    ended = [step_done(5), RunEnded(status="stopped", step=5), started]
    assert not any("killed" in line for line in drawn(ended))


def test_an_error_that_a_resumed_run_left_behind_has_one_line():
    error = "training killed by SIGSEGV: segmentation fault\n       (compiled code accessed invalid memory)"
    failed = [step_done(5), RunEnded(status="failed", error=error, step=5)]
    assert any("compiled code" in line for line in drawn(failed, state="failed"))
    resumed = [
        *failed,
        Resumed(path="checkpoints/step-00000003", step=3),
        step_done(4),
        step_done(5),
    ]
    lines = drawn(resumed)
    assert sum("SIGSEGV" in line for line in lines) == 1
    assert not any("compiled code" in line for line in lines)
    assert sum("compiled code" in line for line in drawn([*resumed, *failed], state="failed")) == 1


def test_the_curve_holds_nothing_of_a_future_that_a_resume_gave_up():
    events = [
        *(step_done(step, 5.0) for step in range(1, 9)),
        Resumed(path="x", step=4),
        step_done(5, 1.0),
    ]
    points = seen_of(events).curves.by_name["loss"].values_by_step().tolist()
    assert points == [[1, 5.0], [2, 5.0], [3, 5.0], [4, 5.0], [5, 1.0]]


def test_time_stands_still_for_a_run_that_has_ended():
    past = [*made_up_run()]
    assert drawn(past, state="done", now=1e9)[:2] == drawn(past, state="done", now=2e9)[:2]


def test_a_night_between_a_stop_and_its_resume_does_not_count():
    started = RunStarted(
        schema=2,
        version="0",
        parameters=1,
        steps=9,
        attention="x",
        device="cpu",
        time=50_000.0,
        step=40,
    )
    events = [*made_up_run(), started, Resumed(path="x", step=40, time=50_000.0)]
    assert "28 s" in drawn(made_up_run(), state="done", now=40_000.0)[1]
    assert "33 s" in drawn(events, now=50_005.4)[1]


def test_a_million_steps_stay_drawable():
    seen = seen_of(step_done(step, 1 / step) for step in range(1, 50_001))
    assert len(seen.curves.by_name["loss"].values) <= 20_001
    begun = time.process_time()  # other programs may use the cores
    frame(seen, FACTS, Screen(100), state="running", now=0.0)
    assert time.process_time() - begun < 1


def heights(rows: list[str], column: int) -> list[int]:
    """Rows of a drawn curve, from the bottom, whose cell in that column is not empty."""
    cells = [row[10:].ljust(200)[column] for row in rows]
    return [len(rows) - 1 - at for at, cell in enumerate(cells) if cell not in " ⠀"]


def test_a_falling_line_falls():
    rows = plot([(x, -float(x)) for x in range(50)], [], width=60, height=8, plain=True)
    tops = [max(heights(rows[:-1], column)) for column in range(50)]
    assert tops[0] == 7 and tops[-1] == 0 and tops == sorted(tops, reverse=True)
    assert rows[-1].split() == ["step", "0", "49"]
    assert rows[0].split()[0] == "0" and rows[7].split()[0] == "-49"


def test_a_spike_is_joined_and_a_gap_is_bridged():
    rows = plot([(0, 0.0), (10, 10.0), (100, 0.0)], [], width=60, height=5)
    assert all(heights(rows[:-1], column) for column in range(50))


def test_flat_and_short_lines():
    assert plot([(1, 2.0)], [], width=60, height=5) == []
    assert plot([(1, 2.0), (2, 2.0)], [], width=60, height=5)
    assert plot([(1, 2.0), (2, 1.0)], [], width=15, height=5) == []


def test_marks_stand_where_they_belong():
    rows = plot([(0, 1.0), (100, 0.0)], [(0, 0.0), (100, 1.0)], width=60, height=5)
    assert rows[0].endswith("o") and rows[4][10] == "o"


def test_a_tail_waits_for_the_rest_of_a_line(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert not [*tail.read()]
    with EventLog(path) as emit:
        emit(step_done(1))
    assert [event.step for event in tail.read()] == [1] and not [*tail.read()]
    line = to_json(step_done(2)).encode()
    with path.open("ab") as file:
        file.write(line[:20])
        file.flush()
        assert not [*tail.read()]
        file.write(line[20:] + b"\n")
    assert [event.step for event in tail.read()] == [2]
    assert not re.search(
        "killed", "".join(frame(seen_of([]), FACTS, Screen(80), state="done", now=0))
    )


def test_what_is_not_an_event_of_this_version_is_counted_and_passed_over(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        b'{"event": "Tomorrow"}\n\xff\xfe\n'
        + to_json(step_done(1)).encode()
        + b'\n\n{"event": "StepDo'
    )
    tail = Tail(path)
    assert [event.step for event in tail.read()] == [1]
    assert (tail.unknown_lines, tail.read_lines) == (2, 3)


def test_a_request_to_stop_is_seen_until_the_run_has_ended():
    asked = [step_done(1), Phase(name="stopping", step=1), step_done(2)]
    assert seen_of(asked).summary.stopping
    assert any("stop requested" in line for line in drawn(asked))
    assert not seen_of([*asked, RunEnded(status="stopped", step=2)]).summary.stopping


def test_a_long_way_is_told_by_the_clock_too():
    events = [
        RunStarted(
            schema=2,
            version="1",
            parameters=1,
            steps=10_000,
            attention="sdpa",
            device="cpu",
            time=0.0,
        )
    ]
    events += [step_done(step, time=60.0 * step) for step in range(1, 11)]
    head = drawn(events, now=600.0)[1]
    assert "ETA 7 days" in head or "ETA 6.9 days" in head, head
    assert re.search(r"\(\w{3} \d\d Jan \d\d:\d\d\)", head), head


def test_the_first_steps_do_not_flatten_the_rest():
    falling = [(x, 10.0 if x < 20 else 3.0 - x / 1000) for x in range(1, 400)]
    assert settled_top(falling) == pytest.approx(2.96)
    assert settled_top([(x, 10.0 - x) for x in range(10)]) is None
    assert settled_top([(x, -float(x)) for x in range(400)]) is None
    rows = plot(falling, [], width=60, height=8, top=settled_top(falling), plain=True)
    assert max(heights(rows[:-1], 0)) == 7 and max(heights(rows[:-1], 25)) >= 3


def test_strips_begin_at_zero_and_lie_below_the_curve():
    line = [(x, 1.0) for x in range(50)]
    rows = plot(
        line, [], {"lr": [(x, float(x)) for x in range(50)], "none": []}, width=60, height=3
    )
    assert rows[-1].startswith("      lr  ▁") and rows[-1].endswith("█") and len(rows) == 5
    assert plot(line, [], {"flat": line}, width=60, height=3)[-1].count("█") == 50


def eight_gpus():
    for number in range(8):
        shared, why = number - 1 if number % 2 else None, "temperature" if number == 7 else ""
        yield DeviceStats(
            device=number,
            seconds=5.0,
            utilization=98.0,
            temperature=71.0,
            power=None if number % 2 else 480.0,
            shared_with=shared,
            clock_mhz=1650.0,
            memory_gib=41.0,
            memory_total_gib=64.0,
            throttled=why,
            allocated_gib=36.0,
            reserved_gib=42.0,
            time=22.0,
        )


def test_eight_gpus_have_a_place_on_a_small_terminal_beside_the_curve_and_what_happened():
    lines = drawn([*made_up_run(), *eight_gpus(), Warned(reason="too hot", step=40)], 80, 24)
    text = "\n".join(lines)
    assert all(f"gpu {number}" in text for number in range(8)) and len(lines) <= 24
    assert "gpu 1  98%  71 °C  with 0   41 GiB" in text and "41 GiB slow" in text
    assert "too hot" in text and sum("│" in line for line in lines) >= 3
    roomy = "\n".join(drawn([*made_up_run(), *eight_gpus()], 130, 60))
    assert "with GPU 0" in roomy and "throttled: temperature" in roomy and "reserved 42.0" in roomy


def test_a_narrow_screen_leaves_out_what_pytorch_holds_first_then_the_clock():
    gpus = [*eight_gpus()]
    assert "throttled: temperature" in "\n".join(drawn(gpus, 90)) and "reserved" not in "\n".join(
        drawn(gpus, 90)
    )
    assert "MHz" not in "\n".join(drawn(gpus, 80)) and "throttled: temperature" in "\n".join(
        drawn(gpus, 80)
    )


def test_a_small_screen_shows_more_of_the_newest_sample_instead_of_two_beginnings():
    samples = [
        Sampled(step=step, prompt="def f():\n", completion="a\nb\nc\nd\ne") for step in (10, 20)
    ]
    low = "\n".join(drawn([step_done(1), step_done(2), *samples], 80, 26))
    assert "at 20" in low and "at 10" not in low and " b" in low
    high = "\n".join(drawn([step_done(1), step_done(2), *samples], 80, 50))
    assert "at 20" in high and "at 10" in high


def test_intervals_are_drawn_on_one_scale():
    """From 0 to 10 on eleven columns: a column per unit."""
    figures = [(1.0, 0.0, 3.0), (10.0, 9.0, 10.0), (5.0, None, None)]
    assert interval_strips(figures, width=11, plain=True) == ["-o--", "         -o", "     o"]
    assert interval_strips([(2.0, None, None)], width=11) == ["●"]
