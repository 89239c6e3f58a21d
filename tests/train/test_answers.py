"""Prompts of a validation set, and their answers as text."""

import json

import pytest

from bloomery.data.prepare.prepare import prepare
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.io.weights import load_decoder
from bloomery.recipe.load import load_recipe
from bloomery.train.evaluation.answers import readable_text, sample_answer, validation_prompts
from models_for_tests import make_model

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }}\n{% else %}{{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
TURNS = (("user", "return"), ("assistant", "def f"), ("user", "more"), ("assistant", "x"))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """A model, and a dataset of conversations of two turns prepared with its tokenizer."""
    root = tmp_path_factory.mktemp("answers")
    model = make_model(root / "model")
    rows = [
        {"messages": [{"role": role, "content": f"{text} {n}"} for role, text in TURNS]}
        for n in range(60)
    ]
    (root / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        "objective.kind=sft",
        f"data.path={root}/talk.jsonl",
        "data.validation=20%",
        f"tokenizer.from={model}",
        "data.sequence_length=64",
        f"data.chat.template={json.dumps(TEMPLATE)}",
    ]
    prepare(load_recipe("go-coder-tiny", overrides), root / "prepared")
    return model, root / "prepared", load_tokenizer(model)


def test_a_prompt_ends_where_the_first_response_begins(conversations):
    _, prepared, tokenizer = conversations
    prompts = validation_prompts(prepared, 3)
    assert len(prompts) == 3
    for item in prompts:
        number = tokenizer.decode(item.prompt).split()[-1]
        assert tokenizer.decode(item.prompt) == f"Q return {number}\n"
        assert tokenizer.decode(item.reference[:-1]) == f"def f {number}"
        assert item.reference[-1] == tokenizer.eos_id


def test_an_answer_is_short_and_the_same_each_time(conversations):
    model, prepared, tokenizer = conversations
    (item,) = validation_prompts(prepared, 1)
    first, second = (
        sample_answer(load_decoder(model), tokenizer, item, max_new_tokens=24) for _ in range(2)
    )
    assert first == second and len(first.ids) <= 24
    assert first.ended or len(first.ids) == 24
    assert tokenizer.eos_id not in first.ids


def test_ids_of_a_padded_vocabulary_stand_for_no_text(conversations):
    """Qwen2.5 has rows for 151,936 tokens and a tokenizer of 151,665: a model may draw one that nobody named."""
    _, _, tokenizer = conversations
    ids = tokenizer.encode("def f")
    assert (
        readable_text(tokenizer, [*ids, tokenizer.vocab_size, tokenizer.vocab_size + 500])
        == readable_text(tokenizer, ids)
        == "def f"
    )
