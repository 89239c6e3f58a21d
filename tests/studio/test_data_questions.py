"""What New run asks about data: columns without usual names, rows that cannot be read, files that are dropped."""

import json
from pathlib import Path

import pytest
from starlette.datastructures import QueryParams
from studio_for_tests import RecordedCommands, until, with_user
from test_new_run_page import (
    mistake_at,
    open_new_run,
    recipe_with_proposed_columns,
    settled,
    start_button,
)

from bloomery.core.errors import UserError
from bloomery.recipe.load import load_recipe
from bloomery.studio.data_choices import facts_of
from bloomery.studio.given_files import places_of
from bloomery.studio.recipe_answers import Answers
from bloomery.studio.run_draft import LONGEST_ADDRESS, RunDraft, address_of_draft, draft_in

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")

# An export of a help desk: a BOM, semicolons, empty cells in the first row, dates and ratings.
MESSY = "\ufeffTicket ID;Created at;Customer wrote;We wrote;Rating\n"
MESSY += (
    "0;2026-11-01;;;5\n"
    + '1;2026-11-02;Where is it?;"On its way.\nWait."\n;n/a\n'.replace('"\n;', '";') * 30
)
PAIR = {"question": "How?", "good_answer": "Press the button.", "bad_answer": "No idea."}

pytestmark = pytest.mark.usefixtures("empty_folder")


def write_pairs() -> None:
    Path("pairs.jsonl").write_text(f"{json.dumps(PAIR)}\n" * 40)


def test_columns_are_proposed_by_all_first_rows_and_their_names() -> None:
    Path("messy.csv").write_text(MESSY, encoding="utf-8")
    write_pairs()
    messy, pairs = facts_of("messy.csv"), facts_of("pairs.jsonl")
    assert messy.texts == ("Ticket ID", "Created at", "Customer wrote", "We wrote", "Rating")
    assert messy.roles_of("") == {"instruction": "Customer wrote", "output": "We wrote"}
    assert pairs.likeliest == "preferences"
    roles = {"prompt": "question", "chosen": "good_answer", "rejected": "bad_answer"}
    assert pairs.roles_of("") == roles
    assert pairs.roles_of("instructions") == {"instruction": "question", "output": "good_answer"}
    # Columns that describe rows of a known kind are no prompt and response.
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    Path("chats.jsonl").write_text(json.dumps(chat | {"id": "x", "source": "y"}) + "\n")
    assert facts_of("chats.jsonl").questions == {}


def test_preference_pairs_train_with_the_columns_that_are_chosen() -> None:
    write_pairs()
    recipe = load_recipe(recipe_with_proposed_columns("pairs.jsonl")).recipe
    assert recipe.objective.kind == "dpo"
    columns = {"prompt": "question", "chosen": "good_answer", "rejected": "bad_answer"}
    assert (recipe.data.format, dict(recipe.data.columns)) == ("preference", columns)


def test_rows_that_cannot_be_read_are_left_out_at_a_button() -> None:
    commands = RecordedCommands()
    Path("messy.csv").write_text(MESSY, encoding="utf-8")

    async def visit(user) -> None:
        await open_new_run(user, "messy.csv")
        await user.should_see("Say which column is which.", retries=50)
        user.find("Use these columns").click()
        await until(lambda: "is empty" in mistake_at(user, "Dataset"))
        assert mistake_at(user, "Dataset") == "line 2: Customer wrote is empty: correct it"
        assert not start_button(user).enabled
        user.find("Leave out rows that cannot be read").click()
        await settled(user)
        assert mistake_at(user, "Dataset") == ""
        await user.should_see("1 of 31 rows is left out, the first at messy.csv:2")
        user.find("Start").click()
        await until(lambda: commands.started)

    with_user(visit, commands)
    assert load_recipe(commands.started[0][1]).recipe.data.on_error == "skip"


@pytest.mark.parametrize(
    ("names", "dataset", "places"),
    [
        (["my rows.jsonl"], "my-rows.jsonl", ["my-rows.jsonl"]),
        (["a.md", "b.txt", ".DS_Store"], "uploaded", ["uploaded/a.md", "uploaded/b.txt", None]),
        (
            ["notes/a.md", "notes/deep/b.go", "notes/x.png", "notes/../../etc/c.md"],
            "notes",
            ["notes/a.md", "notes/deep/b.go", None, "notes/etc/c.md"],
        ),
        (["one/a.md", "two/b.md"], "uploaded", ["uploaded/one/a.md", "uploaded/two/b.md"]),
        (["taken/a.md"], "taken-2", ["taken-2/a.md"]),
    ],
)
def test_dropped_files_and_folders_are_new_ones_here(
    names: list[str], dataset: str, places: list[str | None]
) -> None:
    Path("taken").mkdir()
    found, paths = places_of(names)
    assert str(found) == dataset
    assert [None if path is None else str(path) for path in paths] == places


def test_a_folder_without_data_is_refused() -> None:
    with pytest.raises(UserError, match="none of the files has rows or text"):
        places_of(["photos/a.png", "photos/b.png"])


def test_a_draft_is_the_address_of_its_page() -> None:
    answers = Answers("models/a b", "dätä & more.csv", "text", {"text": "We wrote"}, "{x: 1}")
    sweep = {"adapter.rank": ("8", "16")}
    draft = RunDraft(
        answers, {"train.epochs": "2", "data.glob": ""}, name="mine", run="old/one", sweep=sweep
    )
    address = address_of_draft(draft)
    assert draft_in(QueryParams(address.partition("?")[2])) == draft
    typed = RunDraft(text="model: {from: x}\n# ü\n", name="mine")
    assert draft_in(QueryParams(address_of_draft(typed).partition("?")[2])) == typed
    assert address_of_draft(RunDraft()) == "/new"
    assert address_of_draft(RunDraft(text="x" * LONGEST_ADDRESS)) == "/new"


@pytest.mark.parametrize(
    "query",
    ["for=nothing", "set.=1", "set.train.epochs=[", "set.a b=: :", "compare.x=1", "column.=y&run="],
)
def test_an_address_that_says_nothing_is_an_empty_page(query: str) -> None:
    async def visit(user) -> None:
        await user.open(f"/new?{query}")
        await user.should_see("Choose a model and your data.")
        assert not start_button(user).enabled

    with_user(visit, RecordedCommands())
