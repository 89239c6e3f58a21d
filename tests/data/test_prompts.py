"""Prompts for rewards: transformers says which tokens they are, the rows say what goes with them."""

import json
import random
import time
from pathlib import Path

import chat_tokenizers
import numpy as np
import pytest
from small_text import WORDS, sentences
from test_example_documents import write_rows
from test_prepare import SMALL, contents, journal_of_stopped, kill_after

from bloomery.core import files
from bloomery.core.errors import UserError
from bloomery.data.chat.render import Renderer
from bloomery.data.order import feistel, mix
from bloomery.data.prepare.pipeline import Limits
from bloomery.data.prepare.prepare import identity, prepare
from bloomery.data.prepare.split import size_warnings
from bloomery.data.prepare.stats import check_dataset
from bloomery.data.prompts import Prompts
from bloomery.data.shards import read_manifest
from bloomery.data.sources.formats import read_example
from bloomery.data.tokenizer.templates import builtin_template
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.schema import Recipe

TOKENIZER = {"train": {"vocab_size": 300, "special_tokens": ["<|im_start|>", "<|im_end|>"]}}
TOOL = {
    "type": "function",
    "function": {"name": "add_up", "description": "d", "parameters": {"type": "object"}},
}
VALUES = [None, 3, 2.5, True, "4", '[{"role": "user"}]', [1, "a", None], {"b": {"c": [0.1]}}, ""]


def prompt_rows(count: int) -> list[dict]:
    """Texts and, in every third row, other columns of all types."""
    return [
        {
            "prompt": f"{text} {number}",
            "answer": VALUES[number % len(VALUES)],
            "level": number,
            **({"é": WORDS[number % 13]} if number % 3 == 0 else {}),
        }
        for number, text in enumerate(sentences(count, 6))
    ]


@pytest.fixture
def recipe(tmp_path):
    def make(
        rows: list[dict] | None = None,
        *,
        suffix: str = "jsonl",
        tokenizer: dict | None = None,
        objective: dict | None = None,
        **data,
    ) -> LoadedRecipe:
        path = tmp_path / f"rows.{suffix}"
        rows = prompt_rows(60) if rows is None else rows
        if suffix != "jsonl":
            write_rows(path, rows)
        else:
            content = "".join(json.dumps(row) + "\n" for row in rows)
            if not path.exists() or path.read_text() != content:  # another time is another file
                path.write_text(content)
        settings = {"sequence_length": 256, "num_proc": 0, "validation": "10%", **data}
        recipe_fields = {
            "model": {"preset": "go-coder-tiny"},
            "tokenizer": TOKENIZER if tokenizer is None else tokenizer,
            "data": {"path": str(path), **settings},
            "objective": {"kind": "grpo", "max_completion_length": 64, **(objective or {})},
        }
        return LoadedRecipe(Recipe.model_validate(recipe_fields), "small")

    return make


def read_all(folder: Path) -> list:
    return [
        prompt for name in ("train", "validation") for prompt in Prompts(folder, seed=0, split=name)
    ]


# Tokens

TALKS = {
    "a question": [{"role": "user", "content": "what is it"}],
    "a system message": [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "what is it "},
    ],
    "turns before": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello there"},
        {"role": "user", "content": "jumps"},
    ],
}


@pytest.mark.parametrize("template", ["chatml", "llama3", "gemma"])
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_messages_are_what_transformers_gives_for_generation(recipe, tmp_path, kind, template):
    text = builtin_template(template)
    chat_tokenizers.ours(kind, text).save(tmp_path / "tokenizer")
    library = chat_tokenizers.theirs(kind, text)
    talks = {
        name: turns
        for name, turns in TALKS.items()
        if template != "gemma" or name != "a system message"
    }
    rows = [{"prompt": turns, "name": name} for name, turns in talks.items()]
    from_folder = {"from": str(tmp_path / "tokenizer")}
    prepare(recipe(rows, tokenizer=from_folder), tmp_path / "p")
    prompts = read_all(tmp_path / "p")
    assert {prompt.columns["name"] for prompt in prompts} == set(talks)
    for prompt in prompts:
        turns = talks[prompt.columns["name"]]
        expected = library.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        assert prompt.ids.tolist() == expected["input_ids"]
        assert prompt.messages == turns
        assert all(turn["content"].strip() in prompt.text for turn in turns)


def test_tools_are_given_to_the_template(recipe, tmp_path):
    template = "{{ tools | tojson if tools else 'none' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    chat_tokenizers.ours("bytes", template).save(tmp_path / "tokenizer")
    library = chat_tokenizers.theirs("bytes", template)
    rows = [{"prompt": TALKS["a question"], "tools": [TOOL]}, {"prompt": TALKS["turns before"]}]
    prepare(recipe(rows, tokenizer={"from": str(tmp_path / "tokenizer")}), tmp_path / "p")
    for prompt in read_all(tmp_path / "p"):
        expected = library.apply_chat_template(
            prompt.messages, tools=prompt.columns.get("tools"), return_dict=True
        )
        assert prompt.ids.tolist() == expected["input_ids"]
    assert sorted(len(prompt.columns) for prompt in read_all(tmp_path / "p")) == [0, 1]


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("template", [None, "chatml", "none"])
def test_a_text_is_the_prompt_that_fine_tuning_masks(recipe, tmp_path, kind, template):
    """A model that was fine-tuned on rows of prompt and completion sees the form that it knows."""
    chat_tokenizers.ours(kind).save(tmp_path / "tokenizer")
    texts = ["what is it", " hello there\n", "the lazy dog"]
    loaded_recipe = recipe(
        [{"prompt": text} for text in texts],
        tokenizer={"from": str(tmp_path / "tokenizer")},
        chat={"template": template},
    )
    prepare(loaded_recipe, tmp_path / "p")
    with Renderer(
        load_tokenizer(tmp_path / "p"), template=template, train_on="assistant"
    ) as renderer:
        for prompt in read_all(tmp_path / "p"):
            # No token may hold the end of the prompt with the beginning of the completion.
            completion = " jumps" if kind == "bytes" else "jumps"
            row = {"prompt": prompt.text, "completion": completion}
            example = read_example(row, format="completion", columns={}, where="a:1")
            (sequence,) = renderer.encode(example)
            assert prompt.ids.tolist() == sequence.ids[: sequence.loss_mask.index(True)]
            assert prompt.messages is None
            if template != "chatml":
                library = chat_tokenizers.theirs(kind)
                assert prompt.ids.tolist() == library(prompt.text)["input_ids"]
    assert sorted(prompt.text for prompt in read_all(tmp_path / "p")) == sorted(texts)


# Columns


def test_columns_come_back_with_their_types(recipe, tmp_path):
    rows = prompt_rows(60)
    manifest = prepare(recipe(rows), tmp_path / "p", limits=SMALL)
    assert (manifest.kind, manifest.formats) == ("prompts", ("prompts",))
    assert len(manifest.train.shards) > 1
    by_text = {row["prompt"]: row for row in rows}
    prompts = read_all(tmp_path / "p")
    assert sorted(prompt.text for prompt in prompts) == sorted(by_text)
    for prompt in prompts:
        expected = {name: value for name, value in by_text[prompt.text].items() if name != "prompt"}
        assert json.dumps(prompt.columns) == json.dumps(expected)  # 1, 1.0 and True are equal


def test_columns_of_a_table_are_all_read(recipe, tmp_path):
    rows = [
        {"prompt": text, "answer": [n, n + 1], "level": n, "score": n / 3, "remark": None}
        for n, text in enumerate(sentences(20))
    ]
    prepare(recipe(rows, suffix="parquet"), tmp_path / "p")
    columns_of_text = {prompt.text: prompt.columns for prompt in read_all(tmp_path / "p")}
    assert columns_of_text == {row.pop("prompt"): row for row in rows}
    for value, problem in ((float("nan"), "holds NaN or infinity"), (b"4", "is not valid JSON")):
        rows = [{"prompt": text, "answer": value} for text in sentences(3)]
        with pytest.raises(UserError, match=problem) as caught:
            prepare(recipe(rows, suffix="parquet"), tmp_path / "q")
        assert caught.value.where.endswith("rows.parquet, row 1, answer")


def test_the_prompt_may_have_another_name(recipe, tmp_path):
    rows = [{"question": text, "answer": "4"} for text in sentences(9)]
    manifest = prepare(recipe(rows), tmp_path / "p")
    assert manifest.formats == ("prompts (question is the prompt)",)
    assert {tuple(prompt.columns) for prompt in read_all(tmp_path / "p")} == {("answer",)}
    two_column_rows = [{"question": text, "prompt": "p", "answer": "4"} for text in sentences(9)]
    prepare(recipe(two_column_rows, columns={"prompt": "question"}), tmp_path / "q")
    prompts = read_all(tmp_path / "q")
    assert {prompt.text for prompt in prompts} == set(sentences(9))
    assert {tuple(prompt.columns) for prompt in prompts} == {("prompt", "answer")}
    alpaca_rows = [{"instruction": text, "input": "4"} for text in sentences(9)]
    prepare(recipe(alpaca_rows), tmp_path / "r")
    assert {prompt.text for prompt in read_all(tmp_path / "r")} == {
        f"{text}\n4" for text in sentences(9)
    }
    nameless_rows = [{"riddle": text, "level": 4} for text in sentences(9)]
    with pytest.raises(UserError, match="plain text; the objective needs prompts") as caught:
        prepare(recipe(nameless_rows), tmp_path / "s")
    assert "data.columns={prompt: NAME}" in caught.value.fix


# Order


def test_the_seed_decides_the_order_of_prompts(recipe, tmp_path):
    prepare(recipe(), tmp_path / "p")
    prompts = Prompts(tmp_path / "p", seed=5)
    size = len(prompts)
    stored_levels = [prompt.columns["level"] for prompt in prompts_on_disk(tmp_path / "p")]
    assert len(stored_levels) == size
    epochs = [
        [prompts[epoch * size + number].columns["level"] for number in range(size)]
        for epoch in range(3)
    ]
    for epoch, levels in enumerate(epochs):
        assert levels == [
            stored_levels[feistel(number, size=size, key=mix(5, epoch))] for number in range(size)
        ]
        assert sorted(levels) == sorted(stored_levels)
    assert epochs[0] != epochs[1]
    resumed_prompts = Prompts(tmp_path / "p", seed=5)
    assert resumed_prompts[2 * size + 7].columns["level"] == epochs[2][7], "as after a resume"
    assert [prompt.columns["level"] for prompt in Prompts(tmp_path / "p", seed=6)] != epochs[0]


def prompts_on_disk(folder: Path) -> list:
    prompts = Prompts(folder, seed=0)
    return [prompts._read(number) for number in range(read_manifest(folder).train.documents)]


def from_sources(tmp_path: Path, weights: dict[str, float]) -> Path:
    """A prepared folder of 12 prompts of each source."""
    for name in weights:
        rows = [{"prompt": f"{name} {text}", "source": name} for text in sentences(12)]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    sources = [
        {"path": str(tmp_path / f"{name}.jsonl"), "weight": weight}
        for name, weight in weights.items()
    ]
    recipe_fields = {
        "model": {"preset": "go-coder-tiny"},
        "tokenizer": TOKENIZER,
        "data": {"sources": sources, "validation": 0, "sequence_length": 600, "num_proc": 0},
        "objective": {"kind": "rloo"},
    }
    prepare(LoadedRecipe(Recipe.model_validate(recipe_fields), "small"), tmp_path / "p")
    return tmp_path / "p"


def test_sources_are_visited_by_their_weights(tmp_path):
    folder = from_sources(tmp_path, {"a": 2.0, "b": 0.5})
    prompts = Prompts(folder, seed=0)
    of_source = [prompt.columns["source"] for prompt in prompts]
    assert (of_source.count("a"), of_source.count("b")) == (24, 6)
    texts = [prompts[number].text for number in range(2 * len(prompts))]
    assert {texts.count(text) for text in set(texts) if text.startswith("a ")} == {4}
    assert not len(Prompts(folder, seed=0, split="validation"))


def test_weights_that_read_nothing_are_refused(tmp_path):
    with pytest.raises(UserError, match="weights of the sources round to none"):
        Prompts(from_sources(tmp_path, {"a": 0.01}), seed=0)


def test_held_out_prompts_are_read_once_in_the_order_of_the_dataset(recipe, tmp_path):
    rows = [
        {"prompt": text, "answer": answer, "number": 2 * number + answer}
        for number, text in enumerate(sentences(60))
        for answer in (0, 1)
    ]
    prepare(recipe(rows), tmp_path / "p")
    held_out = Prompts(tmp_path / "p", seed=0, split="validation")
    numbers = [prompt.columns["number"] for prompt in held_out]
    assert numbers == sorted(numbers) and len(numbers) >= 4
    texts = {prompt.text for prompt in held_out}
    assert not texts & {prompt.text for prompt in Prompts(tmp_path / "p", seed=0)}
    assert len(numbers) == 2 * len(texts), "rows of one prompt stay in one split"
    with pytest.raises(IndexError):
        held_out[len(held_out)]


# Rows that cannot be used

BAD = {
    "an empty text": ({"prompt": ""}, "prompt is empty"),
    "a blank text": ({"prompt": " \n"}, "prompt is empty"),
    "no messages": ({"prompt": []}, "has no messages"),
    "an empty turn": ({"prompt": [{"role": "user", "content": " "}]}, "empty turn of the user"),
    "an answered prompt": (
        {"prompt": [*TALKS["a question"], {"role": "assistant", "content": "a dog"}]},
        "ends with a turn of the assistant",
    ),
    "a number": ({"prompt": 4}, "is a number, not a text"),
    "no prompt": ({"answer": 4}, "has no column 'prompt'"),
    "too long": ({"prompt": "dog " * 300}, "and a prompt may have 192"),
    "not a number": ({"prompt": "a", "score": float("nan")}, "NaN is no JSON value"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_or_skipped(recipe, tmp_path, case):
    row, problem = BAD[case]
    rows = [*prompt_rows(20), row, *prompt_rows(30)[20:]]
    chat = {"template": "chatml"}
    with pytest.raises(UserError, match=problem) as caught:
        prepare(recipe(rows, chat=chat), tmp_path / "p")
    assert "rows.jsonl:21" in caught.value.where
    manifest = prepare(recipe(rows, chat=chat, on_error="skip"), tmp_path / "q")
    assert manifest.skipped == 1
    assert "rows.jsonl:21" in manifest.first_skipped
    assert len(read_all(tmp_path / "q")) == 30


def test_a_prompt_may_fill_what_completions_leave(recipe, tmp_path):
    """The longest prompt of the rest of a sequence is kept, and is refused where one token less is left."""
    rows = [{"prompt": text} for text in sentences(9, 12)]
    prepare(recipe(rows), tmp_path / "p")
    longest_prompt = max(len(prompt.ids) for prompt in read_all(tmp_path / "p"))
    from_folder = {"from": str(tmp_path / "p")}
    exact_recipe = recipe(rows, tokenizer=from_folder, sequence_length=longest_prompt + 64)
    assert len(read_all_of(exact_recipe, tmp_path / "q")) == 9
    longer_completions = {"max_completion_length": 65}
    short_recipe = recipe(
        rows,
        tokenizer=from_folder,
        sequence_length=longest_prompt + 64,
        objective=longer_completions,
    )
    with pytest.raises(
        UserError,
        match=f"prompt of {longest_prompt} tokens, and a prompt may have {longest_prompt - 1} ",
    ):
        prepare(short_recipe, tmp_path / "r")
    assert identity(short_recipe) != identity(exact_recipe)
    with pytest.raises(UserError, match="leave no room for a prompt") as caught:
        prepare(recipe(rows, sequence_length=64), tmp_path / "s")
    assert caught.value.fix.startswith("set data.sequence_length=128")


def read_all_of(loaded_recipe: LoadedRecipe, folder: Path) -> list:
    prepare(loaded_recipe, folder)
    return read_all(folder)


def test_rows_of_other_objectives_are_refused(recipe, recipe_of, tmp_path):
    conversations = [{"messages": [*TALKS["turns before"], {"role": "assistant", "content": "a"}]}]
    for rows, data, problem in (
        (conversations, {}, "ends with a turn of the assistant, with nothing to answer"),
        (
            conversations,
            {"format": "messages"},
            "rows are conversations; the objective needs prompts",
        ),
        ([{"text": "words"}], {}, "plain text; the objective needs prompts"),
    ):
        with pytest.raises(UserError, match=problem):
            prepare(recipe(rows, **data), tmp_path / "p")
    path = str(recipe([{"prompt": "a", "answer": "b"}] * 3).recipe.data.path)
    for objective in ("sft", "pretrain", "dpo"):
        with pytest.raises(UserError, match="rows are prompts without responses") as caught:
            prepare(recipe_of(objective=objective, path=path, format="prompts"), tmp_path / "q")
        assert "objective.kind=grpo" in caught.value.fix
    chat = {"template": "chatml"}
    prepare(recipe_of(objective="sft", path=path, sequence_length=64, chat=chat), tmp_path / "r")
    with pytest.raises(UserError, match="has no prompts"):
        Prompts(tmp_path / "r", seed=0)
    from_folder = {"from": str(tmp_path / "r")}
    with pytest.raises(UserError, match="no prompts to train on"):
        prepare(
            recipe([{"prompt": "a"}] * 3, validation=path, tokenizer=from_folder), tmp_path / "s"
        )


# On disk


def test_several_processes_write_the_same_bytes(recipe, tmp_path):
    for workers in (0, 3):
        prepare(recipe(num_proc=workers), tmp_path / str(workers), limits=SMALL)
    assert contents(tmp_path / "0") == contents(tmp_path / "3")


@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=pytest.mark.soak)])
def test_killed_and_run_again_gives_the_same_bytes(recipe, tmp_path, kills):
    loaded_recipe = recipe(prompt_rows(400), num_proc=2)
    file = tmp_path / "recipe.json"
    file.write_text(loaded_recipe.recipe.model_dump_json(by_alias=True))
    started = time.monotonic()
    assert kill_after(120, file, tmp_path / "whole") == 0
    whole_seconds, chance = time.monotonic() - started, random.Random(3)
    for _ in range(kills):
        kill_after(chance.uniform(0.3, 0.9) * whole_seconds, file, tmp_path / "killed")
    assert kill_after(120, file, tmp_path / "killed") == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.parametrize("batches", [1, 4, 9])
def test_work_that_the_journal_records_is_not_done_again(recipe, tmp_path, batches):
    rows = prompt_rows(60)
    rows.insert(3, {"prompt": 1})
    loaded_recipe = recipe(rows, on_error="skip")
    prepare(loaded_recipe, tmp_path / "whole", limits=SMALL)
    journal = journal_of_stopped(loaded_recipe, tmp_path / "p", batches)
    row_bytes = sum(journal[split]["row_bytes"] for split in ("train", "validation"))
    assert row_bytes
    for name in ("train", "validation"):  # what a kill leaves behind the journal
        with (tmp_path / "p" / f"{name}-rows.bin").open("ab") as file:
            file.write(b"more")
    prepare(loaded_recipe, tmp_path / "p", limits=SMALL)
    assert contents(tmp_path / "p") == contents(tmp_path / "whole")


def test_every_flipped_bit_is_refused_when_it_is_read(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 256)
    loaded_recipe = recipe()
    prepare(loaded_recipe, tmp_path / "p")
    names = sorted(path.name for path in (tmp_path / "p").glob("*.bin"))
    assert {"train-rows.bin", "train-row-starts.bin", "validation-rows.bin"} <= set(names)
    for name in names:
        path = tmp_path / "p" / name
        content = path.read_bytes()
        for position in (0, len(content) // 2, len(content) - 1):
            path.write_bytes(
                content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
            )
            for reading in (
                lambda: read_all(tmp_path / "p"),
                lambda: prepare(loaded_recipe, tmp_path / "p"),
            ):
                with pytest.raises(UserError, match="changed") as caught:
                    reading()
                assert caught.value.where == str(path)
        path.write_bytes(content)
    read_all(tmp_path / "p")


def test_a_row_is_read_without_the_others(recipe, tmp_path, monkeypatch):
    """A damaged row stops the run at that row alone."""
    monkeypatch.setattr(files, "BLOCK", 256)
    prepare(recipe(validation=0), tmp_path / "p")
    path = tmp_path / "p" / "train-rows.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"]")
    prompts = Prompts(tmp_path / "p", seed=0)
    num_damaged = 0
    for number in range(len(prompts)):
        try:
            prompts[number]
        except UserError:
            num_damaged += 1
    assert 0 < num_damaged < 10


# Statistics


def test_a_check_counts_prompts(recipe, tmp_path):
    rows = [*prompt_rows(60), prompt_rows(1)[0], {**prompt_rows(1)[0], "answer": "another"}]
    manifest = prepare(recipe(rows, validation=0), tmp_path / "p", limits=Limits())
    check = check_dataset(
        tmp_path / "p",
        manifest,
        load_tokenizer(tmp_path / "p"),
        sequence_length=256,
        layout="packed",
    )
    assert (check.unit_name, check.units, check.sequences) == ("prompts", 62, 62)
    assert check.duplicates == 1, "another answer makes another row"
    lengths = [len(prompt.ids) for prompt in read_all(tmp_path / "p")]
    assert sum(count for _, count in check.lengths) == 62
    assert check.tokens == sum(lengths)
    assert (check.missing_eos, check.other_eos) == (0, 0)
    assert not any("EOS" in warning or "sequence" in warning for warning in check.warnings)
    small_manifest = prepare(recipe(prompt_rows(60), validation="10%"), tmp_path / "q")
    assert 0 < small_manifest.validation.documents < 20
    assert [
        line
        for line in size_warnings(small_manifest, sequence_length=256)
        if "its reward is noisy" in line
    ]
    assert np.all(np.array(lengths) <= 192)
