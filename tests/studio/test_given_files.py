"""Datasets that a page is given, and what it finds on the Hub, which a stand-in answers for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from studio_for_tests import RecordedCommands, with_user

from bloomery.core.errors import UserError
from bloomery.studio import hub_search
from bloomery.studio.data_choices import data_here, facts_of
from bloomery.studio.given_files import free_path, save_pasted, suffix_of_text
from models_for_tests import make_chat_model

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")
CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("chats.jsonl", "chats.jsonl"),
        ("../../etc/chats.jsonl", "chats.jsonl"),
        ("C:\\data\\my chats.csv", "my-chats.csv"),
        (".hidden.jsonl", "hidden.jsonl"),
        ("a.jsonl.gz", "a.jsonl.gz"),
        ("\x1b[31m.txt", "31m.txt"),
        ("taken.csv", "taken-2.csv"),
        ("run.py", None),
        ("recipe.yaml", None),
        ("", None),
        ("..", None),
    ],
)
def test_an_upload_is_a_new_file_of_this_folder_or_refused(name: str, path: str | None) -> None:
    Path("taken.csv").write_text("a,b\n")
    if path is None:
        with pytest.raises(UserError, match="not a file of rows or text"):
            free_path(name)
    else:
        assert free_path(name) == Path(path)


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        (CHAT, ".jsonl"),
        (f"{CHAT}\n\n{CHAT}\n", ".jsonl"),
        (f"[{CHAT},\n {CHAT}]", ".json"),
        ('question,answer\n"a, b",c\n', ".csv"),
        ("question\tanswer\na\tb\n", ".tsv"),
        ("Once upon a time,\nthere was a forge.\nIt burned.\n", ".txt"),
        ("[" * 100_000, ".txt"),
    ],
)
def test_a_pasted_text_has_the_suffix_of_its_format(text: str, suffix: str) -> None:
    assert suffix_of_text(text) == suffix


def test_pasted_rows_are_a_dataset() -> None:
    path = save_pasted(f"{CHAT}\n{CHAT}")
    assert data_here() == [str(path)]
    facts = facts_of(str(path))
    assert (facts.about, facts.proposed) == ("2 conversations, JSONL", "chat")
    with pytest.raises(UserError, match="nothing was pasted"):
        save_pasted(" \n")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": "3 + 4"}], "secret": 7},
        {"prompt": "3 + 4", "answer": 7},
    ],
)
def test_prompts_without_answers_are_for_rewards_alone(row: dict[str, object]) -> None:
    path = save_pasted("\n".join([json.dumps(row)] * 20))
    facts = facts_of(str(path))
    assert (facts.proposed, facts.objective, facts.problem) == ("rewards", "grpo", "")
    assert facts.lacks.keys() == {"chat", "instructions", "preferences", "text"}


def test_the_hub_is_searched_by_words_and_never_for_paths(monkeypatch) -> None:
    searches = []

    class Api:
        def __init__(self, token: object) -> None:
            pass

        def list_models(self, **words: object) -> list[SimpleNamespace]:
            searches.append(words["search"])
            return [SimpleNamespace(id="ORG/qwen", downloads=1_500_000)]

        def list_datasets(self, **words: object) -> list[SimpleNamespace]:
            searches.append(words["search"])
            return []

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr(hub_search, "_is_reachable", lambda: True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (choice,) = hub_search.search("model", "qwen").choices
    assert (choice.value, choice.words) == ("ORG/qwen", "1.5 M downloads")
    assert "no dataset" in hub_search.search("dataset", "hub:chats").remark
    assert searches == ["qwen", "chats"]
    Path("secret-project").mkdir()
    for words in ("qw", "./qwen", "/home/me/qwen", "~/qwen", "secret-project", "..\\qwen"):
        assert not hub_search.is_searched(words)
    assert hub_search.is_searched("qwen")

    # Without a network a line says so.
    monkeypatch.setattr(hub_search, "_is_reachable", lambda: False)
    assert "cannot be reached" in hub_search.search("model", "qwen").remark
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in hub_search.search("model", "qwen").remark
    assert len(searches) == 2


def test_the_rows_that_are_shown_are_those_of_the_command_line(tmp_path: Path) -> None:
    from test_new_run_page import open_new_run, settled

    make_chat_model(tmp_path / "tiny")
    Path("chats.jsonl").write_text(f"{CHAT}\n" * 30)
    command = [sys.executable, "-m", "bloomery", "prepare"]
    command += ["--model", "tiny", "--data", "chats.jsonl", "--preview", "1"]
    printed = subprocess.run(command, capture_output=True, text=True, env={**os.environ}).stdout
    marked = printed.partition("⟦")[2].partition("⟧")[0].replace("¦", "")
    assert "b<|im_end|>" in marked

    async def visit(user) -> None:
        from nicegui.elements.mixins.text_element import TextElement

        await open_new_run(user, "chats.jsonl", model="tiny")
        await settled(user)
        user.find("Show rows as the model reads them").click()
        await user.should_see("It learns the marked part", retries=100)
        pieces = [e for e in user.find(TextElement).elements if "studio-loss" in e.classes]
        assert len(pieces) == 3
        assert {piece.text for piece in pieces} == {marked}

    with_user(visit, RecordedCommands())
    assert not list(Path().glob("*.yaml"))  # looking at rows writes no recipe
