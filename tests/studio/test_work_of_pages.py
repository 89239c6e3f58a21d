"""What pages cost, counted in files, bytes, events and rows: seconds would be those of the machine."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from studio_for_tests import make_run, opened_list, with_user

from bloomery.core.files import size_of
from bloomery.monitor import events
from bloomery.monitor.events import RunEnded
from bloomery.studio import watching
from bloomery.studio.watching import END_BYTES, Watching
from bloomery.view.step_columns import NEWEST
from runs_for_tests import made_up_run, step_done

SMALL_FILES = 2**14  # bytes of a run's plan, notes, lock and figures, and of reads that find an end
OPENED: list[str] = []


def note_opened(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook stays for the whole process: it notes what lies in runs/ and nothing else."""
    if event == "open" and "runs/" in (path := str(arguments[0])):
        OPENED.append(path)


sys.addaudithook(note_opened)

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def looking() -> Iterator[Watching]:
    one = Watching()
    yield one
    one.processes.close()


def long_run(name: str, steps: int) -> Path:
    later = (step_done(step) for step in range(41, steps + 1))
    return make_run(name, events=[*made_up_run(), *later], end=RunEnded(step=steps, status="done"))


def read_bytes() -> int:
    """That this process has read so far, from files and pipes."""
    return psutil.Process().io_counters().read_chars


def test_a_row_of_a_long_run_costs_what_one_of_a_shorter_costs(
    looking: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {name: long_run(name, steps) for name, steps in (("short", 2000), ("long", 8000))}
    assert all(
        (folder / "events.jsonl").stat().st_size > 4 * END_BYTES for folder in sizes.values()
    )
    made = list[object]()
    from_entry = events.from_entry
    monkeypatch.setattr(events, "from_entry", lambda entry: made.append(1) or from_entry(entry))
    looking.rows()  # what is imported late is not counted
    bytes_of = {}
    events_of = {}
    for name, folder in sizes.items():
        made.clear()
        began = read_bytes()
        row = watching.row_of(folder, looking.decode)
        bytes_of[name], events_of[name] = read_bytes() - began, len(made)
        assert row.status == "done" and row.loss is not None
    assert max(bytes_of.values()) < 2 * END_BYTES + SMALL_FILES
    # Steps are read by field: as events there are the newest of either end, the first few, and the end of the run.
    assert max(events_of.values()) <= 2 * NEWEST + len([*made_up_run()]) + 1


def test_a_list_that_has_not_changed_opens_no_file(looking: Watching) -> None:
    for number in range(5):
        long_run(f"run-{number}", 300)
    OPENED.clear()
    rows = looking.rows()
    assert len({path for path in OPENED if path.endswith("events.jsonl")}) == len(rows) == 5
    OPENED.clear()
    assert looking.rows() == rows
    assert OPENED == []


def test_the_first_page_finds_the_list_read_and_processes_for_long_runs(
    looking: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = long_run("demo", 300)
    looking.look_around()
    assert [row.name for row in looking.known_rows()] == ["demo"]
    assert looking.processes.begun == 0  # the run is short: it is read by studio itself
    monkeypatch.setattr(watching, "PIECE_BYTES", (folder / "events.jsonl").stat().st_size // 2)
    looking.look_around()
    looking.processes.close()  # which waits for those that are about to begin
    assert looking.processes.begun > 0


def test_the_size_of_a_folder_is_that_of_its_files_and_links(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    (folder / "inner" / "deep").mkdir(parents=True)
    (folder / "inner" / "deep" / "file").write_bytes(b"x" * 1000)
    (folder / "file").write_bytes(b"y" * 24)
    (folder / "link").symlink_to(folder / "inner")
    (folder / "dangling").symlink_to("absent")
    links = sum((folder / name).lstat().st_size for name in ("link", "dangling"))
    assert size_of(folder) == 1024 + links
    assert size_of(folder / "file") == 24
    assert size_of(folder / "link") == (folder / "link").lstat().st_size


def test_a_page_whose_rows_have_not_changed_sends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nicegui", reason="the extra `studio` is not installed")
    for number in range(3):
        make_run(f"run-{number}", end=RunEnded(step=40, status="done"))

    async def visit(user) -> None:
        from nicegui import ui

        from bloomery.studio import runs_page

        sent = list[int]()
        update = ui.table.update

        def noted_update(table: ui.table) -> None:
            sent.append(len(table.props.get("rows", ())))
            update(table)

        monkeypatch.setattr(ui.table, "update", noted_update)
        monkeypatch.setattr(runs_page, "UPDATE_SECONDS", 0.02)
        looks = list[int]()
        rows = Watching.rows
        monkeypatch.setattr(Watching, "rows", lambda self: looks.append(1) or rows(self))
        await opened_list(user)
        sent.clear()
        first = len(looks)
        while len(looks) < first + 5:
            await asyncio.sleep(0.01)
        assert sent == []
        make_run("another")
        while not sent:
            await asyncio.sleep(0.01)
        assert set(sent) == {4}

    with_user(visit)
