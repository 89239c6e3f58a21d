"""The completions on a run's page: copied, damaged and crafted files. Oracle: the rows that were written."""

import json
import random
import shutil
from pathlib import Path

import pytest

from bloomery.monitor.events import EvalDone, EventLog, is_damaged, stamped_line
from bloomery.report import write_report
from bloomery.report.rewards import ShownTurn, shown_completions, shown_turns
from runs_for_tests import made_up_run

NAME = "step-00000001.jsonl"


def write(folder: Path, rows: list[dict[str, object]], name: str = NAME) -> Path:
    path = folder / "completions" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(stamped_line(json.dumps(row, ensure_ascii=False)) for row in rows))
    return path


def row(number: int, **changed: object) -> dict[str, object]:
    entry = {"prompt": f"p{number}", "completion": f"c{number}", "reward": number / 10}
    return entry | {"rewards": {"own": number / 10}, "advantage": 0.0, "truncated": False} | changed


ROWS = [row(number) for number in range(9)]


@pytest.mark.parametrize(
    "name", ["step-00000001 (copy).jsonl", "step-1.jsonl", "step-.jsonl", "step-1e9.jsonl", "a"]
)
def test_a_file_of_another_name_is_no_rollout(tmp_path: Path, name: str) -> None:
    shutil.copy(write(tmp_path, ROWS), tmp_path / "completions" / name)
    assert [title for title, _ in shown_completions(tmp_path)] == ["step 1, 9 completions"]


@pytest.mark.parametrize("place", ["a file", "a pipe", "nothing"])
def test_something_else_in_the_place_of_the_folder_has_none(tmp_path: Path, place: str) -> None:
    if place == "a file":
        (tmp_path / "completions").write_text("")
    assert shown_completions(tmp_path) == []


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), "good", None, True, [1.0], {}, float("nan"), float("inf"), 1e308]
)
@pytest.mark.parametrize(
    "key", ["reward", "advantage", "advantages", "rewards", "prompt", "messages"]
)
def test_an_odd_value_spoils_no_page(tmp_path: Path, key: str, value: object) -> None:
    for odd in (value, [value], {"own": value}):
        write(tmp_path, [*ROWS, row(9, **{key: odd})])
        ((title, shown),) = shown_completions(tmp_path)
        assert title == "step 1, 10 completions" and len(shown) == 3
        write(tmp_path, [row(0, **{key: odd})])
        ((_, shown),) = shown_completions(tmp_path)
        assert len(shown) == 1


def test_a_flipped_bit_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, ROWS)
    whole = path.read_bytes()
    draw = random.Random(0)
    for _ in range(300):
        place = draw.randrange(len(whole))
        flipped = bytes([whole[place] ^ (1 << draw.randrange(8))])
        path.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        ((title, shown),) = shown_completions(tmp_path)
        texts = {one.completion for one in shown} | {one.prompt for one in shown}
        assert texts <= {f"{letter}{number}" for letter in "pc" for number in range(9)}
        in_stamp = b', "crc32": "' not in path.read_bytes().splitlines()[whole[:place].count(b"\n")]
        assert "damaged" in title or in_stamp, (place, title)


def test_lines_of_an_earlier_version_have_no_checksum(tmp_path: Path) -> None:
    path = write(tmp_path, ROWS)
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert not any(map(is_damaged, path.read_bytes().splitlines()))
    assert shown_completions(tmp_path)[0][0] == "step 1, 9 completions"


def test_an_episode_is_a_conversation_with_its_calls() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "assistant", "content": "so", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": '{"error": "no b"}'},
        {"role": "assistant", "content": "done"},
    ]
    asked, result, last = shown_turns(messages)
    assert asked == ShownTurn("assistant", "so", calls=(("add", '{"a": 1}'),))
    assert result == ShownTurn("tool", '{"error": "no b"}', "add", failed=True)
    assert last == ShownTurn("assistant", "done")


@pytest.mark.parametrize("odd", [None, 7, "x", [], {}, [None], [{"role": "tool"}]])
def test_messages_that_are_none_spoil_nothing(odd: object) -> None:
    shown_turns([{"role": "assistant", "content": odd, "tool_calls": odd}, odd])
    shown_turns([{"role": "assistant", "tool_calls": [odd, {"function": odd}]}])
    shown_turns(odd)


def test_the_page_folds_calls_and_results(tmp_path: Path) -> None:
    """One conversation in place of the text of the whole episode; markup of a tool stays text."""
    messages = [
        {
            "role": "assistant",
            "content": "look",
            "tool_calls": [{"function": {"name": "find", "arguments": "<b>"}}],
        },
        {"role": "tool", "name": "find", "content": "<script>"},
    ]
    write(tmp_path, [row(0, messages=messages, completion="WHOLE"), row(1, completion="PLAIN")])
    with EventLog(tmp_path / "events.jsonl") as log:
        for event in made_up_run():
            log(event)
    page = write_report(tmp_path).read_text()
    assert "<summary>calls find</summary><pre>&lt;b&gt;</pre>" in page
    assert "<summary>find answers</summary><pre>&lt;script&gt;</pre>" in page
    assert "PLAIN" in page and "WHOLE" not in page


def test_the_page_begins_with_what_the_model_could_do_before(tmp_path: Path) -> None:
    before = EvalDone(
        step=0,
        loss=-0.125,
        perplexity=None,
        bits_per_byte=None,
        tokens=9,
        seconds=1.0,
        metrics={"reward": 0.125},
    )
    with EventLog(tmp_path / "events.jsonl") as log:
        for event in (*made_up_run(), before):
            log(event)
    assert "held-out reward before training 0.125" in write_report(tmp_path).read_text()
