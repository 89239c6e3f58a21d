"""What pages show of run folders, whole and damaged, and what long ones cost."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from studio_for_tests import make_run

from bloomery.core.errors import UserError
from bloomery.monitor.events import (
    DeviceStats,
    EvalDone,
    Event,
    EventLog,
    Phase,
    Resumed,
    RunEnded,
    RunStarted,
    StepHealth,
    Tail,
    Warned,
    decode_json,
    fast_decode,
    read_events,
    to_json,
)
from bloomery.plan.store import begin
from bloomery.studio.watching import END_BYTES, OpenRun, Watching
from bloomery.view import reader_processes
from bloomery.view.reader import RunReader
from bloomery.view.reader_processes import ReaderProcesses
from bloomery.view.run_view import RunView
from bloomery.view.step_columns import StepColumns, read_ends, read_groups
from bloomery.view.summary import summary_of
from runs_for_tests import made_up_run, step_done

pytestmark = pytest.mark.usefixtures("empty_folder")


def needs_nicegui() -> None:
    pytest.importorskip("nicegui", reason="the extra `studio` is not installed")


def long_run(name: str, steps: int = 3000) -> Path:
    return make_run(name, events=[*made_up_run(), *(step_done(step) for step in range(41, steps))])


def test_the_ends_of_a_long_run_give_the_figures_of_the_whole() -> None:
    path = long_run("long") / "events.jsonl"
    assert path.stat().st_size > 4 * END_BYTES
    whole = summary_of(read_events(path))
    ends = summary_of(read_ends(path, END_BYTES, fast_decode()))
    assert ends.step == whole.step == 2999
    assert ends.began == whole.began
    assert ends.smoothed == pytest.approx(whole.smoothed, abs=1e-6)
    assert ends.tokens_per_second == whole.tokens_per_second
    assert ends.last_step == whole.last_step


def test_the_ends_of_a_short_run_are_its_events() -> None:
    path = make_run("short") / "events.jsonl"
    whole = summary_of(read_events(path))
    assert summary_of(read_ends(path, END_BYTES, fast_decode())) == whole
    assert list(read_ends(Path("absent"), END_BYTES, fast_decode())) == []


def test_both_parsers_read_the_same_events() -> None:
    path = make_run("demo") / "events.jsonl"
    with path.open("ab") as file:
        file.write(b'{"event": "StepDone", "loss": NaN}\n\xff\xfe\n{"half')
    assert list(Tail(path, decode=fast_decode()).read()) == list(Tail(path).read())


def events_of(seed: int) -> Iterator[Event]:
    """Some hundred events of every kind that comes between steps, with repeated and skipped steps."""
    generator = random.Random(seed)
    yield Phase(name="tokens", time=999.0)
    step = 0
    for number in range(700):
        time = 1000.0 + number
        step += 1
        loss = None if generator.random() < 0.02 else generator.random()
        metrics = {"reward": generator.random()} if generator.random() < 0.3 else {}
        yield step_done(step, loss, time, metrics=metrics)
        draw = generator.random()
        if draw < 0.1:
            yield DeviceStats(step=step, time=time, device=0, seconds=1.0, power=90.0)
        elif draw < 0.2:
            yield StepHealth(step=step, time=time, seconds=1.0)
        elif draw < 0.21:
            yield Warned(step=step, time=time, reason="a warning")
        elif draw < 0.22:
            step = max(0, step - 30)
            yield Resumed(step=step, time=time, path="checkpoints/step-00000001")
        elif draw < 0.23:
            yield Phase(step=step, time=time, name="compile")


@pytest.mark.parametrize("seed", range(8))
def test_steps_that_are_read_together_are_the_steps_one_by_one(seed: int) -> None:
    """With the parser of each kind, and lines among them that are damaged, of another version or without a checksum."""
    path = make_run("demo", events=events_of(seed)) / "events.jsonl"
    lines = path.read_bytes().splitlines()
    generator = random.Random(seed)
    for place in generator.sample(range(1, len(lines)), seed):  # the first file is whole
        damages = (
            lines[place].replace(b"1", b"2", 1),
            lines[place][:-30],
            b'{"event": "StepDone", "step": "one"}',
            b'{"event": "Unheard", "step": 1}',
            b'{"event": "StepDone", "step": 1, "loss": [], "metrics": 3}',
            lines[place].rpartition(b', "crc32"')[0] + b"}",
        )
        lines[place] = generator.choice(damages)
    path.write_bytes(b"\n".join(lines) + b"\n")

    for decode in (decode_json, fast_decode()):
        one_by_one = Tail(path)
        view = RunView()
        for event in one_by_one.read():
            view.add(event)
        together = Tail(path, decode=decode)
        same_view = RunView()
        num_columns = 0
        for group in read_groups(together):
            if isinstance(group, StepColumns):
                num_columns += 1
            same_view.add_group(group)
        assert num_columns
        assert together.read_lines == one_by_one.read_lines == len(lines)
        assert together.unknown_lines == one_by_one.unknown_lines
        same_view.summary.latest_time = view.summary.latest_time  # of an event between steps
        assert same_view.summary == view.summary
        assert same_view.incidents == view.incidents
        for name, curve in view.curves.by_name.items():
            assert same_view.curves.by_name[name].steps == curve.steps
            assert same_view.curves.by_name[name].values.tobytes() == curve.values.tobytes()


@pytest.fixture
def processes(monkeypatch) -> Iterator[ReaderProcesses]:
    monkeypatch.setattr(reader_processes, "PIECE_BYTES", 60_000)
    readers = ReaderProcesses()
    yield readers
    readers.close()


@pytest.mark.parametrize("seed", range(3))
def test_processes_read_what_one_reads(seed: int, processes: ReaderProcesses) -> None:
    """Damaged lines among them, and a part of a line at the end, which is read once it is complete."""
    path = make_run("demo", events=events_of(seed)) / "events.jsonl"
    lines = path.read_bytes().splitlines()
    for place in random.Random(seed).sample(range(1, len(lines)), 5):
        lines[place] = lines[place].replace(b"1", b"2", 1)
    path.write_bytes(b"\n".join(lines)[:-20])
    alone = OpenRun(path.parent, decode_json)
    run = OpenRun(path.parent, decode_json, processes)
    for end in (b"", lines[-1][-20:] + b"\n"):
        with path.open("ab") as file:
            file.write(end)
        for opened in (alone, run):
            opened.update()
        assert (run.status, run.problem) == (alone.status, alone.problem)
        assert run.summary == alone.summary
        for count in ("read_lines", "unknown_lines"):
            assert getattr(run.reader.tail, count) == getattr(alone.reader.tail, count)
        assert alone.reader.tail.unknown_lines
        for name, curve in alone.curves.by_name.items():
            assert run.curves.by_name[name].steps == curve.steps
            assert run.curves.by_name[name].values.tobytes() == curve.values.tobytes()


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_killed_reader_process_loses_nothing(moment: str, processes: ReaderProcesses) -> None:
    folder = make_run("demo", events=events_of(1))
    alone = OpenRun(folder, decode_json)
    alone.update()
    num_groups = 0

    def kill() -> None:
        nonlocal num_groups
        num_groups += 1
        if num_groups == 3 or moment == "before":
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):  # its parent has not waited for it yet
                    if "bloomery.view.reader_processes" in child.cmdline():
                        child.kill()

    if moment == "before":
        OpenRun(folder, decode_json, processes).update()
        kill()
    reader = RunReader(folder, RunView(), processes=processes)
    assert reader.read(kill) == alone.status
    assert reader.view.summary == alone.summary
    assert reader.tail.read_lines == alone.reader.tail.read_lines


def test_a_process_that_dies_as_it_is_asked_loses_nothing(
    processes: ReaderProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run("demo", events=events_of(1))
    alone = OpenRun(folder, decode_json, processes)
    alone.update()
    for child in processes._all:
        child.kill()
        child.wait()
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "poll", lambda _: None)  # it lived when it was looked at
        run = OpenRun(folder, decode_json, processes)
        run.update()
    assert run.summary == alone.summary
    processes.close()


def test_a_reading_ends_where_the_processes_are_closed(processes: ReaderProcesses) -> None:
    folder = make_run("demo", events=events_of(1))
    alone = OpenRun(folder, decode_json)
    alone.update()
    reader = RunReader(folder, RunView(), processes=processes)
    reader.read(processes.close)
    assert 0 < reader.tail.read_lines < alone.reader.tail.read_lines


def test_another_schema_is_refused_by_name_where_processes_read_it(
    processes: ReaderProcesses,
) -> None:
    began = next(event for event in made_up_run() if isinstance(event, RunStarted))
    other = replace(began, schema=99, version="9.9")
    folder = make_run("demo", events=[*events_of(1), other, *events_of(2)])
    run = OpenRun(folder, decode_json, processes)
    run.update()
    assert run.status == "unreadable"
    assert run.problem == "Bloomery 9.9 wrote this run with another event schema"


def test_reader_processes_end_with_the_one_that_asks() -> None:
    folder = make_run("demo", events=events_of(1))
    program = f"""
import os, sys, psutil
from pathlib import Path
from bloomery.view import reader_processes
from bloomery.monitor.events import Tail
reader_processes.PIECE_BYTES = 60_000
list(reader_processes.ReaderProcesses().groups(Tail(Path({str(folder / "events.jsonl")!r}))))
print(*(child.pid for child in psutil.Process().children()), flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split(), done.stderr
    _, alive = psutil.wait_procs(
        [psutil.Process(int(pid)) for pid in done.stdout.split() if psutil.pid_exists(int(pid))],
        timeout=20,
    )
    assert not alive


def test_a_line_of_known_fields_and_a_wrong_type_is_still_refused() -> None:
    folder = make_run("demo", events=[step_done(1), step_done(2)])
    lines = (folder / "events.jsonl").read_text().splitlines()
    entry = json.loads(lines[1])
    del entry["crc32"]
    for wrong in ({"loss": "low"}, {"metrics": {"a": "b"}}, {"step": None}):
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({**entry, **wrong}) + "\n")
    tail = Tail(folder / "events.jsonl")
    assert [event.step for event in tail.read()] == [1, 2]
    assert tail.unknown_lines == 3


def test_the_list_has_a_reason_for_each_status() -> None:
    make_run("a-done", end=RunEnded(step=40, status="done"))
    make_run("b-stopped", end=RunEnded(step=40, status="stopped"))
    make_run("c-failed", end=RunEnded(step=40, status="failed", error="out of memory\nat line 3"))
    make_run("d-killed", events=[*made_up_run()][:-1])
    reasons = {row.name: (row.status, row.reason) for row in Watching().rows()}
    assert reasons == {
        "a-done": ("done", "done"),
        "b-stopped": ("stopped", "stopped at step 40, resumes exactly"),
        "c-failed": ("failed", "failed at step 40: out of memory"),
        "d-killed": ("killed", "killed at step 40, resumes from its last checkpoint"),
    }


def test_an_unchanged_run_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    make_run("old", end=RunEnded(step=40, status="done"))
    folder = make_run("new", end=RunEnded(step=40, status="stopped"))
    watching = Watching()
    watching.rows()
    read = list[str]()
    from bloomery.studio import watching as module

    row_of = module.row_of
    monkeypatch.setattr(
        module, "row_of", lambda folder, decode: read.append(folder.name) or row_of(folder, decode)
    )
    with EventLog(folder / "events.jsonl") as log:
        log(step_done(41))
    rows = {row.name: row.step for row in watching.rows()}
    assert read == ["new"]
    assert rows == {"old": 40, "new": 41}


def test_damaged_runs_stay_in_the_list_and_hide_no_other() -> None:
    make_run("whole", end=RunEnded(step=40, status="done"))
    (make_run("of-another-version") / "events.jsonl").write_text(
        '{"event": "RunStarted", "schema": 99, "version": "9.9"}\n'
    )
    (make_run("noise") / "events.jsonl").write_bytes(bytes(range(256)) * 4000)
    plan = make_run("bad-plan", end=RunEnded(step=40, status="done")) / "plan.json"
    plan.write_text("{" * 100_000)
    folder = make_run("a-link")
    (folder / "events.jsonl").unlink()
    (folder / "events.jsonl").symlink_to("/etc/passwd")
    statuses = {row.name: row.status for row in Watching().rows()}
    assert statuses == {
        "whole": "done",
        "of-another-version": "unreadable",
        "noise": "killed",
        "bad-plan": "done",
        "a-link": "unreadable",
    }


@pytest.mark.parametrize(
    "number", ["NaN", "1e999", "1e308", f"1{'0' * 400}", f"{2**64}", "1e20", "-1"]
)
def test_a_number_that_no_run_has_spoils_no_list(number: str) -> None:
    """A line that another program wrote: those of Bloomery have a checksum."""
    needs_nicegui()
    from bloomery.studio.compare_page import snapshot_of
    from bloomery.studio.run_charts import run_figures
    from bloomery.studio.runs_page import run_cells

    make_run("whole", end=RunEnded(step=40, status="done"))
    step = json.loads(to_json(step_done(20)))
    sensors = json.loads(
        to_json(DeviceStats(step=20, device=0, temperature=50.0, power=9.0, seconds=1.0))
    )
    length = json.loads(to_json(Phase(name="length", total=9.0, time=9.0)))
    for event in (step, sensors, length):
        for key in (key for key in event if isinstance(event[key], int | float)):
            line = json.dumps({**event, key: "NUMBER"}).replace('"NUMBER"', number)
            path = make_run(f"{event['event']}-{key}") / "events.jsonl"
            path.write_text(f"{line}\n{path.read_text()}{line}\n")
    (Path("runs") / "whole" / "metrics.json").write_text(f'{{"seconds": {number}}}')
    watching = Watching()
    rows = [run_cells(row) for row in watching.rows()]
    assert len(rows) > 15
    json.dumps(rows, allow_nan=False)
    for row in rows:
        run = watching.run(row["name"])
        run.update()
        assert run.problem == ""
        assert dict(run_figures(run))["Step"]
        points = snapshot_of(run, "hours").points
        json.dumps({name: values.tolist() for name, values in points.items()}, allow_nan=False)


def test_the_list_has_the_figures_that_decide() -> None:
    """The validation loss; of a run that is judged by rewards the reward, and no loss near 0."""
    needs_nicegui()
    from bloomery.studio.run_charts import run_figures
    from bloomery.studio.runs_page import run_cells, visible_columns

    make_run("text", end=RunEnded(step=40, status="done"))
    started = RunStarted(
        schema=2,
        version="0",
        parameters=1,
        steps=4,
        attention="mask",
        device="cpu",
        loss_unit="completion",
    )
    steps = [step_done(step, 1e-7, metrics={"reward": 0.25 * step}) for step in (1, 2, 3, 4)]
    held_out = EvalDone(
        step=4,
        loss=0.0,
        perplexity=1.0,
        bits_per_byte=None,
        tokens=1,
        seconds=1.0,
        metrics={"reward": 0.625},
    )
    make_run("rollouts", events=[started, *steps])
    make_run("held-out", events=[started, *steps, held_out])
    watching = Watching()
    rows = {row.name: run_cells(row) for row in watching.rows()}
    assert rows["text"]["validation_loss"] > 0 and rows["text"]["shown"]["validation_loss"]
    assert rows["text"]["reward"] is None and rows["text"]["loss"] > 0
    assert rows["rollouts"]["loss"] is rows["rollouts"]["validation_loss"] is None
    assert 0.25 < rows["rollouts"]["reward"] <= 1.0
    assert rows["held-out"]["shown"]["reward"] == "0.625"
    assert {"validation_loss", "reward"} <= set(visible_columns([*rows.values()]))
    assert "reward" not in visible_columns([rows["text"]])

    # The figure on the page of a run is a moving average, and says so.
    run = watching.run("text")
    run.update()
    assert [name for name in dict(run_figures(run)) if name.startswith("Loss, moving average")]


def test_a_name_that_no_page_shows_is_taken_for_no_other_run() -> None:
    needs_nicegui()
    from bloomery.studio.runs_page import run_cells

    names = [
        "demo",
        "demo\x1b",
        "demo\u202e",
        "demo\x7f",
        os.fsdecode(b"demo\xff"),
        "-rf",
        "a?b",
        "é",
    ]
    for name in names:
        make_run(name, end=RunEnded(step=40, status="done"))
    watching = Watching()
    rows = [run_cells(row) for row in watching.rows()]
    json.dumps(rows, ensure_ascii=False).encode()  # as it is sent
    assert len({row["name"] for row in rows}) == len(names)
    opened = list[str]()
    for row in rows:
        with suppress(UserError):
            opened.append(watching.run(row["name"]).reader.folder.name)
    assert sorted(opened) == sorted(["demo", "-rf", "a?b", "é"])
    assert {row["name"]: row["address"] for row in rows}["a?b"] == "/run/a%3Fb"


def test_an_open_run_reads_only_what_is_new_and_survives_its_folder() -> None:
    folder = make_run("demo", events=[step_done(1), step_done(2)])
    watching = Watching()
    opened = watching.run("demo")
    opened.update()
    assert opened.curves.points("loss").tolist() == [[1, 2.0], [2, 2.0]]
    with EventLog(folder / "events.jsonl") as log:
        log(step_done(3, loss=1.5))
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "StepDone", "step": 4, "lo')  # a half-written event
    opened.update()
    assert opened.curves.points("loss").tolist()[-1] == [3, 1.5]
    assert opened.reader.tail.read_lines == 3
    assert watching.run("demo") is opened

    shutil.rmtree(folder)
    opened.update()
    assert (opened.status, opened.problem) == ("deleted", "the run folder is gone")
    assert opened.curves.points("loss").tolist()[-1] == [3, 1.5]


@pytest.mark.parametrize("way", ["deleted and made anew", "copied over it", "cut"])
def test_another_run_of_the_same_name_is_read_anew(way: str) -> None:
    """`bloomery demo` always has one name. A longer run after a shorter one, and the other way round."""
    for first_steps, second_steps in ((12, 40), (40, 12)):
        for name in ("demo", "other"):
            shutil.rmtree(Path("runs") / name, ignore_errors=True)
        folder = make_run("demo", events=[step_done(step) for step in range(1, first_steps)])
        begin(folder, {})
        watching = Watching()
        before = watching.run("demo")
        before.update()
        assert before.summary.step == first_steps - 1
        steps = [step_done(step) for step in range(1, second_steps)]
        other = make_run("other", events=steps)
        begin(other, {})
        if way == "deleted and made anew":
            shutil.rmtree(folder)
            other.rename(folder)
        elif way == "copied over it":
            shutil.copytree(other, folder, dirs_exist_ok=True)
        else:
            (folder / "events.jsonl").write_text("")
        after = watching.run("demo")
        after.update()
        assert after is not before and after.status != "unreadable"
        expected_step = 0 if way == "cut" else second_steps - 1
        assert after.summary.step == expected_step
        assert [row.step for row in Watching().rows() if row.name == "demo"] == [expected_step]
        before.update()
        assert before.status == "unreadable" and "another run" in before.problem
        assert before.is_replaced and not after.is_replaced
        assert watching.run("demo") is after


def test_a_run_that_is_deleted_while_the_list_is_made_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_run("kept", end=RunEnded(step=40, status="done"))
    (Path("runs") / "deleted").mkdir()  # its recipe is gone after the first look
    monkeypatch.setattr("bloomery.core.run_folder.is_run", lambda folder: True)
    assert [row.name for row in Watching().rows()] == ["kept"]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../demo", "a/b", "/etc", "nul\0", "absent", "a" * 300]
)
def test_a_name_reaches_no_other_folder(name: str) -> None:
    make_run("demo")
    with pytest.raises(UserError, match=r"no run|too long"):
        Watching().run(name)


def test_the_run_pointed_at_is_read_ahead_and_of_many_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("first", "passed", "last"):
        make_run(name)
    watching = Watching()
    first_is_read = threading.Event()
    wait_for_others = threading.Event()
    read = list[str]()
    update = OpenRun.update

    def slow_update(opened: OpenRun, wait_seconds: float = 0.0) -> None:
        read.append(opened.reader.folder.name)
        first_is_read.set()
        assert wait_for_others.wait(30)
        update(opened)

    monkeypatch.setattr(OpenRun, "update", slow_update)
    reading = threading.Thread(target=watching.read_ahead, args=("first",))
    reading.start()
    assert first_is_read.wait(30)
    for name in ("passed", "../other", "last"):
        watching.read_ahead(name)  # returns at once
    wait_for_others.set()
    reading.join()
    watching.read_ahead("gone")
    assert read == ["first", "last"]
    assert watching.run("last").curves.points("loss").tolist()


def test_a_page_waits_for_the_reading_that_another_thread_began() -> None:
    long_run("long", 8000)
    opened = Watching().run("long")
    reading = threading.Thread(target=opened.update)
    reading.start()
    while reading.is_alive() and not opened.is_reading:
        pass
    opened.update(wait_seconds=60)
    assert opened.points("loss").tolist()[-1] == [7999, 2.0]
    reading.join()


def test_points_are_asked_for_while_the_run_is_read() -> None:
    """Values are looked at without a copy, which must not stop those that are read from being added."""
    long_run("long", 8000)
    opened = Watching().run("long")
    reading = threading.Thread(target=opened.update)
    reading.start()
    while reading.is_alive():
        opened.points("loss", 10, 6000).tolist()
        opened.points("loss").tolist()
    reading.join()
    assert opened.points("loss").tolist()[-1] == [7999, 2.0]
    assert (opened.status, opened.problem) == ("done", "")
