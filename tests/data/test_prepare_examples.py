"""Conversations, pairs and marked answers in shards: the renderer's tokens and flags, whatever happened on the way."""

import json
import random
import time

import numpy as np
import pytest
from small_text import WORDS, sentences
from test_example_documents import write_rows
from test_prepare import SMALL, contents, journal_of_stopped, kill_after

from bloomery.core.errors import UserError
from bloomery.data.chat.render import Renderer
from bloomery.data.examples import Example, Message, texts_of
from bloomery.data.prepare.pipeline import streams
from bloomery.data.prepare.prepare import finished_manifest, identity, prepare
from bloomery.data.shards import Split, open_split, read_manifest
from bloomery.data.sources.documents import ReadStats, open_datasets, read_documents
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.plan import dataset_size
from bloomery.plan.choices import objective_choices
from bloomery.plan.gather import guessed, prepared_facts
from bloomery.recipe.load import LoadedRecipe

TOKENIZER = {"train": {"vocab_size": 300, "special_tokens": ["<|im_start|>", "<|im_end|>"]}}


def talk(number: int) -> list[dict]:
    question, answer, follow_up = sentences(3, 5 + number % 7, first=3 * number)
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": follow_up},
        {"role": "assistant", "content": f"{WORDS[number % 13]} {number}"},
    ]


def chat_rows(count: int) -> list[dict]:
    return [{"messages": talk(number)[: 2 + 2 * (number % 2)]} for number in range(count)]


def pair_rows(count: int) -> list[dict]:
    texts = sentences(3 * count)
    return [
        {"prompt": a, "chosen": b, "rejected": c}
        for a, b, c in zip(*[iter(texts)] * 3, strict=True)
    ]


def kto_rows(count: int) -> list[dict]:
    texts = sentences(2 * count)
    return [
        {"prompt": texts[2 * (n // 3)], "completion": texts[2 * n + 1], "label": n % 3 == 0}
        for n in range(count)
    ]


ROWS = {"sft": chat_rows, "dpo": pair_rows, "kto": kto_rows}
KINDS = {"sft": "chat", "dpo": "pairs", "kto": "kto"}


@pytest.fixture
def recipe(tmp_path, recipe_of):
    def make(
        objective: str = "sft", count: int = 60, rows: list[dict] | None = None, **data
    ) -> LoadedRecipe:
        path = tmp_path / "rows.jsonl"
        rows = ROWS[objective](count) if rows is None else rows
        content = "".join(json.dumps(row) + "\n" for row in rows)
        if not path.exists() or path.read_text() != content:
            path.write_text(content)
        settings = {
            "chat": {"template": "chatml"},
            "sequence_length": 256,
            "validation": "10%",
            **data,
        }
        return recipe_of(tokenizer=TOKENIZER, objective=objective, path=str(path), **settings)

    return make


def examples(loaded_recipe: LoadedRecipe) -> list[Example]:
    documents = read_documents(streams(loaded_recipe.recipe)[0], on_error="skip", stats=ReadStats())
    return [document.example for document in documents if document.example]


def stored(split: Split, document: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    start, end = int(split.bounds[document]), int(split.bounds[document + 1])
    assert split.loss_mask is not None
    return tuple(split.tokens[start:end].tolist()), tuple(split.loss_mask[start:end].tolist())


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_shards_hold_what_the_renderer_says(recipe, tmp_path, objective):
    loaded_recipe = recipe(objective)
    manifest = prepare(loaded_recipe, tmp_path / "p", limits=SMALL)
    assert (
        manifest
        == read_manifest(tmp_path / "p")
        == finished_manifest(loaded_recipe, tmp_path / "p")
    )
    assert (manifest.kind, manifest.formats) == (
        KINDS[objective],
        ({"sft": "messages", "dpo": "preference"}[objective],),
    )
    with Renderer(
        load_tokenizer(tmp_path / "p"), template="chatml", train_on="assistant"
    ) as renderer:
        expected = [renderer.encode(example) for example in examples(loaded_recipe)]
    units = [
        tuple((tuple(s.ids), tuple(map(int, s.loss_mask))) for s in sequences)
        for sequences in expected
    ]
    stored_units = []
    for name in ("train", "validation"):
        split, step = open_split(tmp_path / "p", name), len(units[0])
        assert len(split) % step == 0
        stored_units += [
            tuple(stored(split, i + side) for side in range(step))
            for i in range(0, len(split), step)
        ]
        loss_mask = split.loss_mask[0 : len(split.tokens)]
        assert split.record.loss_tokens == loss_mask.sum()
        first_loss_tokens = [
            next(
                (i for i, flag in enumerate(stored(split, d)[1]) if flag and i),
                len(stored(split, d)[1]),
            )
            for d in range(len(split))
        ]
        assert split.first_loss_tokens.tolist() == first_loss_tokens
    assert sorted(stored_units) == sorted(units)
    assert len(read_manifest(tmp_path / "p").train.loss_mask) > 1


def test_a_tokenizer_sees_the_texts_and_keeps_the_template(recipe, tmp_path):
    prepare(recipe(), tmp_path / "p")
    tokenizer = load_tokenizer(tmp_path / "p")
    assert "<|im_start|>" in tokenizer.config["chat_template"]
    assert '{"role"' not in tokenizer.decode(list(range(300)))


def test_every_answer_of_kto_has_a_twin_of_another_prompt(recipe, tmp_path):
    loaded_recipe = recipe("kto", chat={"template": "none"})
    prepare(loaded_recipe, tmp_path / "p", limits=SMALL)
    examples_by_pair = {
        (example.prompt, example.responses[0]): example for example in examples(loaded_recipe)
    }
    tokenizer, num_units = load_tokenizer(tmp_path / "p"), 0
    by_answer = {answer: example for (_, answer), example in examples_by_pair.items()}
    twin_prompts = {"train": set(), "validation": set()}
    prompts = {"train": set(), "validation": set()}
    for name in ("train", "validation"):
        split = open_split(tmp_path / "p", name)
        for unit in range(0, len(split), 2):
            sides = []
            for side in (unit, unit + 1):
                ids, flags = stored(split, side)
                start = flags.index(1)
                sides.append(
                    (tokenizer.decode(list(ids[1:start])), tokenizer.decode(list(ids[start:-1])))
                )
            (prompt, own_answer), (twin_prompt, twin_answer) = sides
            assert prompt == twin_prompt
            assert (
                split.kto_labels[unit]
                == split.kto_labels[unit + 1]
                == examples_by_pair[prompt, own_answer].desirable
            )
            assert by_answer[twin_answer].prompt != prompt
            twin_prompts[name].add(by_answer[twin_answer].prompt)
            prompts[name].add(prompt)
            num_units += 1
    assert num_units == 60
    assert len(prompts["validation"]) > 1 and not prompts["train"] & prompts["validation"]
    assert all(twin_prompts[name] <= prompts[name] for name in twin_prompts), (
        "what is held out lends no answer to training"
    )


@pytest.mark.parametrize(
    ("template", "template_text"),
    [
        ("chatml", "the built-in template chatml"),
        ("none", "none"),
        (None, "none"),
    ],
)
def test_the_plan_says_whether_texts_are_formatted_before_and_after_they_are_prepared(
    recipe, tmp_path, template, template_text
):
    loaded_recipe = recipe("dpo", chat={"template": template})
    manifest = prepare(loaded_recipe, tmp_path / "p")
    assert manifest.turns == (template == "chatml")
    first = load_tokenizer(tmp_path / "p").decode(
        open_split(tmp_path / "p", "train").document(0).tolist()
    )
    assert ("<|im_start|>assistant" in first) == manifest.turns
    for corpus in (
        guessed(loaded_recipe.recipe),
        prepared_facts(manifest, loaded_recipe.recipe, tmp_path / "p"),
    ):
        choices = dict(objective_choices(loaded_recipe.recipe, corpus, None))
        assert choices["data.chat.template"].value == template_text


def test_a_split_of_one_prompt_borrows_its_twin(recipe, tmp_path):
    rows = [
        {"prompt": word, "completion": f"b{n}", "label": True}
        for word in ("one", "two")
        for n in range(3)
    ]
    manifest = prepare(recipe("kto", rows=rows), tmp_path / "p")
    assert (manifest.train.documents, manifest.validation.documents) == (6, 6)


def test_kto_refuses_rows_of_a_single_prompt(recipe, tmp_path):
    rows = [{"prompt": "a", "completion": f"b{n}", "label": True} for n in range(5)]
    with pytest.raises(UserError, match="every row has the same prompt"):
        prepare(recipe("kto", rows=rows), tmp_path / "p")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("objective", ["kto", "sft"])
def test_several_processes_write_the_same_bytes(recipe, tmp_path, objective):
    for workers in (0, 3):
        prepare(recipe(objective, num_proc=workers), tmp_path / str(workers), limits=SMALL)
    assert contents(tmp_path / "0") == contents(tmp_path / "3")


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_killed_and_run_again_gives_the_same_bytes(recipe, tmp_path, kills):
    loaded_recipe = recipe("kto", 300, num_proc=2)
    file = tmp_path / "recipe.json"
    file.write_text(loaded_recipe.recipe.model_dump_json(by_alias=True))
    started = time.monotonic()
    assert kill_after(120, file, tmp_path / "whole") == 0
    whole_seconds, chance = time.monotonic() - started, random.Random(3)
    for _ in range(kills):
        kill_after(chance.uniform(0.3, 0.9) * whole_seconds, file, tmp_path / "killed")
    assert kill_after(120, file, tmp_path / "killed") == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
@pytest.mark.parametrize("batches", [1, 4])
def test_work_that_the_journal_records_is_not_done_again(recipe, tmp_path, batches, objective):
    rows = ROWS[objective](60)
    rows[7] = {**rows[7], "extra": "\ud800"}  # unread
    rows.insert(3, {"messages": "no", "prompt": 1})
    loaded_recipe = recipe(objective, rows=rows, on_error="skip")
    manifest = prepare(loaded_recipe, tmp_path / "whole", limits=SMALL)
    assert manifest.skipped == 1
    journal = journal_of_stopped(loaded_recipe, tmp_path / "p", batches)
    mask_bytes = sum(
        tokens for split in ("train", "validation") for tokens, _ in journal[split]["parts"]
    )
    assert (
        sum(path.stat().st_size for path in (tmp_path / "p").glob("*-loss-mask-*.bin"))
        == mask_bytes
    )
    prepare(loaded_recipe, tmp_path / "p", limits=SMALL)
    assert contents(tmp_path / "p") == contents(tmp_path / "whole")


def test_conversations_that_the_template_refuses_are_named_or_skipped(recipe, tmp_path):
    rows = chat_rows(20)
    rows[4]["messages"] = [{"role": "system", "content": "s"}, *rows[4]["messages"]]
    refusing_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        )
    )
    (tmp_path / "t.jinja").write_text(refusing_template)
    chat = {"template": str(tmp_path / "t.jinja")}
    with pytest.raises(UserError, match="no system") as caught:
        prepare(recipe(rows=rows, chat=chat), tmp_path / "p")
    assert "rows.jsonl:5" in (caught.value.where or "")
    manifest = prepare(recipe(rows=rows, chat=chat, on_error="skip"), tmp_path / "q", limits=SMALL)
    assert manifest.skipped == 1
    assert "rows.jsonl:5" in manifest.first_skipped
    assert manifest.train.documents + manifest.validation.documents == 19


def test_folder_depends_on_chat_settings_where_they_decide_tokens(recipe, recipe_of, tmp_path):
    plain_recipe = recipe()
    other_recipes = [
        recipe(chat={"template": "gemma"}),
        recipe(chat={"template": "chatml", "train_on": "all"}),
        recipe_of(tokenizer=TOKENIZER, objective="dpo", **_data(plain_recipe)),
        recipe_of(tokenizer=TOKENIZER, objective="pretrain", **_data(plain_recipe)),
    ]
    assert len({identity(loaded_recipe) for loaded_recipe in (plain_recipe, *other_recipes)}) == 5
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    recipe_of_file = recipe(chat={"template": str(tmp_path / "t.jinja")})
    identity_before = identity(recipe_of_file)
    (tmp_path / "t.jinja").write_text("{{ messages }} ")
    assert identity(recipe_of_file) != identity_before
    text = {"path": "a", "format": "text"}
    assert identity(recipe_of(objective="sft", **text)) == identity(recipe_of(**text))
    assert identity(recipe(packing=False)) == identity(plain_recipe)


def _data(loaded_recipe: LoadedRecipe) -> dict:
    return loaded_recipe.recipe.data.model_dump(mode="json")


def test_pretraining_learns_every_token_of_conversations(recipe, recipe_of, tmp_path):
    manifest = prepare(recipe_of(tokenizer=TOKENIZER, **_data(recipe())), tmp_path / "p")
    assert manifest.kind == "chat"
    assert manifest.train.loss_tokens == manifest.train.tokens


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("mask", "flags"),
    [
        ("labels", [-100, -100, 50, 2]),
        ("assistant_masks", [0, 0, 1, 1]),
        ("loss_mask", [False, False, True, True]),
    ],
)
def test_pretokenized_rows_keep_their_masks(corpus, recipe_of, tmp_path, suffix, mask, flags):
    prepare(recipe_of(path=str(corpus)), tmp_path / "first")
    rows = [
        {"input_ids": [1, 40 + n, 50, 2], mask: flags, "attention_mask": [1] * 4} for n in range(20)
    ]
    path = write_rows(tmp_path / f"a.{suffix}", rows)
    data_settings = {
        "tokenizer": {"from": str(tmp_path / "first")},
        "path": str(path),
        "validation": 0,
    }
    manifest = prepare(recipe_of(objective="sft", **data_settings), tmp_path / "p")
    assert (manifest.kind, manifest.formats) == ("chat", (f"tokens with {mask}",))
    split = open_split(tmp_path / "p", "train")
    assert [stored(split, n) for n in range(20)] == [
        ((1, 40 + n, 50, 2), (0, 0, 1, 1)) for n in range(20)
    ]
    # Pretraining masks what labels mask, and no assistant's turns.
    pretraining_manifest = prepare(recipe_of(objective="pretrain", **data_settings), tmp_path / "q")
    assert pretraining_manifest.kind == ("chat" if mask == "labels" else "text")
    assert pretraining_manifest.unread_columns == (
        () if mask == "labels" else ("attention_mask", mask)[1:]
    )
    write_rows(path, [{**rows[0], mask: flags[:3]}])
    with pytest.raises(UserError, match="has 3 entries where input_ids has 4 tokens"):
        prepare(recipe_of(objective="sft", **data_settings), tmp_path / "r")


def test_sources_of_several_formats_are_mixed(recipe_of, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows(20)))
    (tmp_path / "b.json").write_text(
        json.dumps([{"instruction": text, "output": "yes"} for text in sentences(9)])
    )
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pair_rows(9)))
    data = {"chat": {"template": "chatml"}, "sequence_length": 256, "validation": 0}

    def mixed(*names: str, **fields) -> LoadedRecipe:
        sources = [
            {"path": str(tmp_path / name), "weight": 0.5 + index}
            for index, name in enumerate(names)
        ]
        return recipe_of(tokenizer=TOKENIZER, objective="sft", sources=sources, **data, **fields)

    manifest = prepare(mixed("a.jsonl", "b.json"), tmp_path / "p")
    assert manifest.formats == ("alpaca", "messages")
    assert [(part.documents, part.weight) for part in manifest.train.parts] == [(20, 0.5), (9, 1.5)]
    with pytest.raises(UserError, match="rows are preference pairs"):
        prepare(mixed("a.jsonl", "c.jsonl"), tmp_path / "q")


def test_rows_without_learned_labels_are_refused(recipe, tmp_path):
    rows = [{"messages": [*talk(n)[:1], {**talk(n)[1], "weight": 0}]} for n in range(12)]
    with pytest.raises(UserError, match="all labels are masked"):
        prepare(recipe(rows=rows), tmp_path / "p")
    with pytest.raises(
        UserError, match="no loss tokens: the first 8 labels of every row are masked"
    ) as caught:
        prepare(recipe(sequence_length=8), tmp_path / "q")
    assert "sequence_length" in (caught.value.where or "")


def test_plans_count_the_rows_of_the_loader(recipe, tmp_path):
    from bloomery.data.loader import Loader

    for objective, layout in (
        ("sft", "packed"),
        ("dpo", "packed"),
        ("kto", "padded"),
        ("sft", "fixed"),
    ):
        loaded_recipe = recipe(
            objective, packing=layout != "padded", document_masking=layout != "fixed"
        )
        folder = tmp_path / objective / layout
        manifest = prepare(loaded_recipe, folder)
        facts = prepared_facts(manifest, loaded_recipe.recipe, folder)
        assert (
            facts.sequences_per_epoch
            == Loader(folder, sequence_length=256, layout=layout, seed=0).sequences
        )
        assert facts.left_out == facts.cut_short == 0
        if layout == "packed":
            guess = guessed(loaded_recipe.recipe)
            assert guess is not None
            assert guess.tokens > 0


def test_a_plan_counts_documents_left_out_and_cut_short(recipe, tmp_path):
    loaded_recipe = recipe(sequence_length=40)
    manifest = prepare(loaded_recipe, tmp_path / "p")
    facts, split = (
        prepared_facts(manifest, loaded_recipe.recipe, tmp_path / "p"),
        open_split(tmp_path / "p", "train"),
    )
    sizes = np.diff(np.asarray(split.bounds).astype(np.int64))
    assert facts.left_out == sum(split.first_loss_tokens >= 40)
    assert facts.left_out + facts.cut_short == sum(sizes > 40)
    assert facts.left_out
    assert facts.cut_short
    tokenizer = loaded_recipe.recipe.tokenizer.model_copy(
        update={"from_": str(tmp_path / "p"), "train": None}
    )
    guess = guessed(loaded_recipe.recipe.model_copy(update={"tokenizer": tokenizer}))
    assert (guess.left_out, guess.cut_short) == (facts.left_out, facts.cut_short)
    assert guess.sequences_per_epoch == facts.sequences_per_epoch


@pytest.mark.parametrize("validation", ["auto", "20%", 0])
@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        ("sft", "packed"),
        ("sft", "padded"),
        ("sft", "fixed"),
        ("pretrain", "packed"),
        ("pretrain", "padded"),
        ("dpo", "packed"),
        ("dpo", "padded"),
        ("kto", "packed"),
    ],
)
def test_a_plan_of_small_files_counts_what_prepare_writes(
    recipe, tmp_path, objective, layout, validation
):
    """Rows, tokens, the validation set and the packing are those of `prepare`, with the same tokenizer."""
    texts = [{"text": sentence} for sentence in sentences(60)]
    loaded_recipe = recipe(
        objective,
        rows=texts if objective == "pretrain" else None,
        packing=layout != "padded",
        document_masking=layout != "fixed",
        validation=validation,
    )
    manifest = prepare(loaded_recipe, tmp_path / "p")
    facts = prepared_facts(manifest, loaded_recipe.recipe, tmp_path / "p")
    tokenizer = loaded_recipe.recipe.tokenizer.model_copy(
        update={"from_": str(tmp_path / "p"), "train": None}
    )
    guess = guessed(loaded_recipe.recipe.model_copy(update={"tokenizer": tokenizer}))
    # The second response of a KTO row is another row's.
    slack = 0.15 if objective == "kto" else 0.0
    assert guess.sequences_per_epoch == pytest.approx(facts.sequences_per_epoch, rel=slack)
    assert guess.tokens == pytest.approx(facts.tokens, rel=slack)
    assert guess.loss_share == pytest.approx(facts.loss_share, rel=slack or 1e-6)
    assert 0 < guess.spread < 0.02  # a plan still says "about"


def test_a_plan_of_large_files_samples_them(recipe, tmp_path, monkeypatch):
    """Every n-th row gives the tokens per byte of the others; the first rows stand for rows that are not read."""
    loaded_recipe = recipe("sft")
    manifest = prepare(loaded_recipe, tmp_path / "p")
    facts = prepared_facts(manifest, loaded_recipe.recipe, tmp_path / "p")
    tokenizer = loaded_recipe.recipe.tokenizer.model_copy(
        update={"from_": str(tmp_path / "p"), "train": None}
    )
    sampled_recipe = loaded_recipe.recipe.model_copy(update={"tokenizer": tokenizer})
    size = dataset_size.sample_rows(
        open_datasets(sampled_recipe.data, "sft")[0], files=1, on_error="stop", stats=ReadStats()
    )
    monkeypatch.setattr(dataset_size, "ENCODED_BYTES", sum(size.sizes) // 4)
    some_rows = guessed(sampled_recipe)
    assert some_rows.spread == dataset_size.OF_SOME_ROWS
    assert some_rows.sequences_per_epoch == pytest.approx(facts.sequences_per_epoch, rel=0.1)
    monkeypatch.setattr(dataset_size, "READ_BYTES", sum(size.sizes) // 2)
    first_rows = guessed(sampled_recipe)
    assert first_rows.spread == dataset_size.OF_FIRST_ROWS
    assert first_rows.sequences_per_epoch == pytest.approx(facts.sequences_per_epoch, rel=0.15)


def test_the_standard_library_becomes_rows(recipe_of, tmp_path, monkeypatch):
    from bloomery.data.sources import builtin as mined

    mined_examples = [
        Example(
            f"m.py:{n}", "chat", (), ((Message("user", f"Write {n}."), Message("assistant", text)),)
        )
        for n, text in enumerate(sentences(30))
    ]
    monkeypatch.setattr(mined, "conversations", lambda files: iter(mined_examples))
    data = {"builtin": "stdlib-chat", "chat": {"template": "chatml"}, "sequence_length": 128}
    manifest = prepare(recipe_of(tokenizer=TOKENIZER, objective="sft", **data), tmp_path / "p")
    assert manifest.formats == ("stdlib-chat",)
    assert manifest.train.documents + manifest.validation.documents == 30
    assert texts_of(mined_examples[0])[0] == "Write 0."
    assert np.all(np.asarray(open_split(tmp_path / "p", "train").first_loss_tokens) > 0)
