"""Tags and a note of a run: what is written is read again, and what another program wrote harms nothing."""

import json
from pathlib import Path

import pytest

from bloomery.core.errors import UserError
from bloomery.core.run_notes import MOST_CHARACTERS, MOST_TAGS, RunNotes, change_notes, read_notes


def test_tags_are_added_and_removed_and_a_note_replaced(tmp_path: Path) -> None:
    assert read_notes(tmp_path) == RunNotes()
    assert change_notes(tmp_path, add=["lr:1e-4", "baseline"], note="first try\n") == RunNotes(
        ("baseline", "lr:1e-4"), "first try"
    )
    assert change_notes(tmp_path, remove=["baseline", "absent"]).tags == ("lr:1e-4",)
    assert read_notes(tmp_path) == RunNotes(("lr:1e-4",), "first try")
    assert change_notes(tmp_path, note="").note == ""


def test_a_run_that_has_no_notes_gets_no_file(tmp_path: Path) -> None:
    change_notes(tmp_path, remove=["absent"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tag", ["", " ", "a b", "-x", "a" * 41, "\x1b[31m", "a,b", "../x"])
def test_what_is_no_tag_is_refused_and_changes_nothing(tmp_path: Path, tag: str) -> None:
    change_notes(tmp_path, add=["kept"])
    with pytest.raises(UserError, match="not a tag") as refusal:
        change_notes(tmp_path, add=[tag], note="lost")
    assert refusal.value.fix
    assert read_notes(tmp_path) == RunNotes(("kept",))


def test_too_much_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="more than 20 tags"):
        change_notes(tmp_path, add=[f"t{number}" for number in range(MOST_TAGS + 1)])
    with pytest.raises(UserError, match="more than 10,000 characters"):
        change_notes(tmp_path, note="x" * (MOST_CHARACTERS + 1))
    assert read_notes(tmp_path) == RunNotes()


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"tags": 3}', '{"note": []}', "[" * 100_000, "\xff"]
)
def test_a_file_of_another_program_is_said_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.json"
    path.write_text(content, encoding="latin-1")
    assert read_notes(tmp_path) == RunNotes(problem="notes.json cannot be read")
    with pytest.raises(UserError, match=r"notes\.json cannot be read"):
        change_notes(tmp_path, add=["new"])
    assert path.read_text(encoding="latin-1") == content


def test_escapes_in_a_note_control_no_terminal(tmp_path: Path) -> None:
    document = {"tags": ["fine", "\x1b]0;x\x07", 5], "note": "\x1b[2Jgone"}
    (tmp_path / "notes.json").write_text(json.dumps(document), encoding="utf-8")
    assert read_notes(tmp_path) == RunNotes(("fine",), "[2Jgone")
