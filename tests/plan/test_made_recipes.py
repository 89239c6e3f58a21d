"""A recipe made from a model and a dataset: its objective fits the rows, and it says what was guessed, from what."""

import json

import pytest

from bloomery.core.errors import UserError
from bloomery.plan.gather import unread_columns
from bloomery.plan.made import made_recipe
from bloomery.recipe.load import load_text

MODEL = "Qwen/Qwen3-8B"
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def write(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS = {
    "kto": (
        {"messages": TALK, "label": False, "id": 1},
        "kto",
        ["label is the label", "messages the conversation", "not read: id"],
    ),
    "pairs": (
        {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
        "dpo",
        ["question the prompt", "system the system message", "also possible: ipo"],
    ),
    "a rejected response": ({"messages": TALK, "rejected_response": "c"}, "dpo", ["orpo"]),
    "tokens": (
        {"input_ids": [4, 5], "labels": [-100, 5]},
        "sft",
        ["labels the loss mask", "labels do not mask"],
    ),
    "answers": (
        {"question": "a", "context": "b", "answer": "c"},
        "sft",
        ["context the input after it", "also possible: pretrain"],
    ),
    "a text and its prompt": (
        {"prompt": "Write.", "text": "Boats leave.", "format": "a"},
        "pretrain",
        ["data.columns='{instruction: prompt, output: text}'"],
    ),
    "prompts": ({"prompt": "Write.", "level": 3}, "pretrain", ["also possible: grpo"]),
    "text": ({"text": "a", "url": "b"}, "pretrain", ["text is the text", "not read: url"]),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_recipe_says_what_it_took_the_columns_for(name, tmp_path):
    row, kind, remarks = ROWS[name]
    text = made_recipe(MODEL, write(tmp_path, row)).text
    loaded = load_text(text, name="made", source="test", overrides=())
    assert loaded.recipe.objective.kind == kind
    for remark in remarks:
        assert remark in text


def test_a_table_with_two_texts_is_asked_about(tmp_path):
    path = write(tmp_path, {"customer_text": "When does it leave?", "agent_text": "At nine."})
    with pytest.raises(UserError) as caught:
        made_recipe(MODEL, path)
    assert caught.value.fix.startswith(
        "data.format=alpaca data.columns='{instruction: customer_text, output: agent_text}'"
    )
    named = ["data.format=alpaca", "data.columns={instruction: customer_text, output: agent_text}"]
    assert "kind: sft" in made_recipe(MODEL, path, named).text
    assert "kind: pretrain" in made_recipe(MODEL, path, ["data.columns={text: agent_text}"]).text


def test_the_first_row_may_have_empty_cells(tmp_path):
    rows = [
        "No;When;Question asked;Our words;Rating",
        "1;2026-11-01;;;5",
        "2;2026-11-02;Is it hot?;Yes.;n/a",
    ]
    path = tmp_path / "faq.csv"
    path.write_text("\n".join(rows * 1) + "\n")
    with pytest.raises(UserError) as caught:
        made_recipe(MODEL, str(path))
    assert "'{instruction: Question asked, output: Our words}'" in caught.value.fix


def test_columns_that_nothing_reads_are_noted_for_every_format(tmp_path):
    for row, objective, note in (
        ({"messages": [{**TALK[0], "mood": "x"}, TALK[1]]}, "sft", ["in turns: mood"]),
        (
            {"instruction": "a", "output": "b", "margin": 2},
            "sft",
            ["margin (the margin of a pair)"],
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "n": 1}, "dpo", ["n"]),
        ({"prompt": "a", "completion": "b", "label": True, "n": {"m": 1}}, "kto", ["n"]),
        ({"prompt": "a", "answer": "b"}, "grpo", []),
        ({"text": "a", "n": 1, "m": None}, "pretrain", ["n"]),
        (
            {"input_ids": [4], "position_ids": [0]},
            "pretrain",
            ["position_ids (positions of tokens)"],
        ),
    ):
        path = write(tmp_path, row)
        overrides = (f"objective.kind={objective}", f"data.path={path}", f"model.from={MODEL}")
        loaded = load_text("{}", name="any", source="test", overrides=overrides)
        assert unread_columns(loaded.recipe) == [f"rows.jsonl: {text}" for text in note]


def test_names_of_columns_stay_in_their_comment(tmp_path):
    row = {"question": "a", "answer": "b", "x\nmodel: {from: other}\x1b[2J": "c"}
    text = made_recipe(MODEL, write(tmp_path, row)).text
    assert load_text(text, name="made", source="test", overrides=()).recipe.model.from_ == MODEL
    assert "\x1b" not in text
