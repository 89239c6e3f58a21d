"""Answers to held-out questions before training and after, on the report's page"""

import json
from types import SimpleNamespace

import pytest

from bloomery.data.prepare.prepare import prepare
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.io.weights import fresh_decoder, load_decoder
from bloomery.recipe.load import load_recipe
from bloomery.recipe.schema import Sft
from bloomery.report import validation_text
from bloomery.report.charts import part
from bloomery.report.validation_text import compare_models
from bloomery.train.evaluation.answers import answer, shown, validation_prompts
from models_for_tests import make_config, make_model, save_model

TOKENS = 24
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }}\n{% else %}{{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Answers of two dozen tokens; a report has longer ones."""
    monkeypatch.setattr(validation_text, "MAX_TOKENS", TOKENS)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base, a checkpoint of another seed, and prepared conversations of two turns."""
    return conversations(tmp_path_factory.mktemp("answers"), TEMPLATE)


def conversations(root, template, *more):
    base = make_model(root / "base")
    rows = [
        {
            "messages": [
                {"role": role, "content": f"{text} {n}"}
                for role, text in (
                    ("user", "return"),
                    ("assistant", "def f"),
                    ("user", "more"),
                    ("assistant", "x"),
                )
            ]
        }
        for n in range(60)
    ]
    (root / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "objective.kind=sft",
        f"data.path={root}/talk.jsonl",
        "data.validation=20%",
        f"tokenizer.from={base}",
        "data.sequence_length=64",
        f"data.chat.template={json.dumps(template)}",
        *more,
    ]
    prepare(load_recipe("go-coder-tiny", words), root / "prepared")
    config = make_config(load_tokenizer(root / "prepared"))
    save_model(root / "checkpoints", 1, fresh_decoder(config, seed=7), root / "prepared")
    plan = SimpleNamespace(
        model=SimpleNamespace(source=base, config=config),
        objective=Sft(kind="sft"),
        data=SimpleNamespace(prepared=root / "prepared"),
        train=SimpleNamespace(seed=0),
    )
    return plan, root / "checkpoints", load_tokenizer(base)


def test_questions_end_where_the_first_answer_begins(made):
    plan, _, tokenizer = made
    questions = validation_prompts(plan.data.prepared, 3)
    assert len(questions) == 3
    for question in questions:
        number = tokenizer.decode(question.prompt).split()[-1]
        assert tokenizer.decode(question.prompt) == f"Q return {number}\n"
        assert tokenizer.decode(question.reference[:-1]) == f"def f {number}"
        assert question.reference[-1] == tokenizer.eos_id


def test_both_models_answer_the_same_questions(made):
    plan, checkpoints, tokenizer = made
    told = compare_models(plan, checkpoints, 1)[1]
    assert len(told) == 4 and all(
        one.prompt.startswith("return") and "def f" in one.reference for one in told
    )
    questions = validation_prompts(plan.data.prepared, 64)
    first = min(questions, key=lambda question: len(question.prompt))
    said = answer(load_decoder(plan.model.source), tokenizer, first, max_new_tokens=TOKENS)
    assert told[0].before == shown(tokenizer, said.ids) + ("" if said.ended else " …")
    assert any(one.before != one.after for one in told)


def test_a_question_with_several_answers_is_asked_once(made, monkeypatch):
    from bloomery.train.evaluation import answers

    plan, checkpoints, _ = made
    real = answers.validation_prompts
    monkeypatch.setattr(
        answers, "validation_prompts", lambda *words: [q for q in real(*words) for _ in range(2)]
    )
    told = [one.prompt for one in compare_models(plan, checkpoints, 1)[1]]
    assert len(told) == len(set(told)) == 4


def test_a_base_is_asked_in_tokens_that_the_run_has_added(tmp_path):
    plan, checkpoints, _ = conversations(
        tmp_path, TEMPLATE.replace("Q ", "<q>"), 'tokenizer.additional_special_tokens=["<q>"]'
    )
    assert [one.prompt[:6] for one in compare_models(plan, checkpoints, 1)[1]] == ["return"] * 4


def test_pretraining_and_runs_without_a_checkpoint_have_none(made, tmp_path):
    plan, checkpoints, _ = made
    assert compare_models(plan, tmp_path, 1)[1] == []
    fresh = SimpleNamespace(
        **{**vars(plan), "model": SimpleNamespace(source=None, config=plan.model.config)}
    )
    assert compare_models(fresh, checkpoints, 1)[1] == []


def test_answers_are_text_and_no_markup():
    page = part("responses", prompts=[("<q>", [("<r>", "<b>"), ("x", "<a>")])], note="")
    assert all(f"&lt;{letter}&gt;" in page for letter in "qrba") and "<q>" not in page


def test_ids_of_a_padded_vocabulary_stand_for_no_text(made):
    """Qwen2.5 has rows for 151,936 tokens and a tokenizer of 151,665: a model may draw one that nobody named."""
    _, _, tokenizer = made
    ids = tokenizer.encode("def f")
    assert (
        shown(tokenizer, [*ids, tokenizer.vocab_size, tokenizer.vocab_size + 500])
        == shown(tokenizer, ids)
        == "def f"
    )
