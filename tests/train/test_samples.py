"""What a recipe's prompts are to a model: questions where it learns answers, else the beginning of a text."""

import json
from dataclasses import replace

import pytest
import torch
from plans_for_tests import tiny_plan

from bloomery.core.errors import UserError
from bloomery.data.prepare.prepare import prepare
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.decode import sample_tokens
from bloomery.infer.generate import generate
from bloomery.infer.sampling import Sampling
from bloomery.model.io.weights import fresh_decoder
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.objectives import Pretrain, Sft
from bloomery.recipe.schema import Recipe
from bloomery.train.evaluation.answers import open_prompts, samples
from bloomery.train.loop import run

ASKED = "what is iron?"
TALKS = [
    {
        "messages": [
            {"role": "user", "content": f"what is {n}?"},
            {"role": "assistant", "content": f"{n} it is."},
        ]
    }
    for n in range(30)
]
COMPLETIONS = [{"prompt": f"what is {n}?", "completion": f" {n} it is."} for n in range(30)]
ANSWER_SAMPLING = Sampling(max_new_tokens=8, temperature=0.8, top_p=0.95, seed=0)
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def prepared_rows(folder, rows, template="chatml"):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "model": {"preset": "go-coder-tiny"},
        "tokenizer": {"train": {"vocab_size": 290, "special_tokens": SPECIAL}},
        "data": {
            "path": str(folder / "rows.jsonl"),
            "sequence_length": 32,
            "validation": "20%",
            "num_proc": 0,
            "chat": {"template": template},
        },
        "objective": {"kind": "sft"},
    }
    prepare(LoadedRecipe(Recipe.model_validate(recipe), "rows"), folder / "prepared")
    return folder / "prepared"


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    return prepared_rows(tmp_path_factory.mktemp("talks"), TALKS)


def plan_of(prepared, objective=None, prompts=(ASKED,), **sections):
    plan = tiny_plan(prepared, sample={"prompts": prompts, "max_new_tokens": 8}, **sections)
    vocabulary = load_tokenizer(prepared).vocab_size
    model = plan.model.model_copy(
        update={"config": replace(plan.model.config, vocab_size=vocabulary)}
    )
    return plan.model_copy(update={"objective": objective or Sft(kind="sft"), "model": model})


def opened_prompts(plan, tokenizer):
    reads_text = plan.objective.spec.reads_text
    return open_prompts(
        plan.sample.prompts,
        tokenizer,
        plan.data.prepared,
        reads_text=reads_text,
        run_dir=plan.data.prepared,
    )


def test_a_prompt_is_put_as_a_question_as_transformers_puts_it(talks):
    from transformers import AutoTokenizer

    turns = [{"role": "user", "content": ASKED}]
    theirs = AutoTokenizer.from_pretrained(talks)
    theirs = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    tokenizer = load_tokenizer(talks)
    prompts = opened_prompts(plan_of(talks), tokenizer)
    assert prompts.texts_and_ids == ((ASKED, list(theirs["input_ids"])),) and prompts.answers
    assert prompts.ends == (tokenizer.id_of("<|im_end|>"),)


def test_an_answer_ends_at_the_token_that_ends_turns(talks):
    tokenizer, plan = load_tokenizer(talks), plan_of(talks)
    model, prompts = (
        fresh_decoder(plan.model.config, seed=0).eval(),
        opened_prompts(plan, tokenizer),
    )

    def drawn(**changes):
        ((_, text),) = samples(
            model, tokenizer, replace(prompts, **changes), sample=plan.sample, train=plan.train
        )
        return text

    ids = list(sample_tokens(model, prompts.texts_and_ids[0][1], ANSWER_SAMPLING))
    assert drawn() == tokenizer.decode(ids) and len(set(ids)) == len(ids) == 8, (
        "none of these ends an answer"
    )
    assert drawn(ends=(ids[3],)) == tokenizer.decode(ids[:3])
    assert drawn(stops=("never", tokenizer.decode([ids[0]]))) == ""


@pytest.mark.parametrize("rows", [TALKS, COMPLETIONS])
def test_pretraining_and_plain_completions_are_continued(rows, tmp_path):
    prepared = prepared_rows(tmp_path, rows, "chatml" if rows is TALKS else "none")
    tokenizer = load_tokenizer(prepared)
    plan = plan_of(prepared, Pretrain() if rows is TALKS else None)
    prompts = opened_prompts(plan, tokenizer)
    assert not prompts.answers and prompts.texts_and_ids == (
        (ASKED, [tokenizer.bos_id, *tokenizer.encode(ASKED)]),
    )
    model = fresh_decoder(plan.model.config, seed=0).eval()
    ((_, text),) = samples(model, tokenizer, prompts, sample=plan.sample, train=plan.train)
    with torch.no_grad():
        assert text == "".join(generate(model, tokenizer, ASKED, ANSWER_SAMPLING))


def test_a_run_tells_which_samples_are_answers(talks, tmp_path):
    events = []
    plan = plan_of(talks, train={"steps": 1})
    run(plan, run_dir=tmp_path, emit=events.append, stop=lambda: False)
    (sample,) = [event for event in events if type(event).__name__ == "Sampled"]
    assert (
        sample.chat
        and sample.whole == f"{ASKED}\n{sample.completion}"
        and "<|im_start|>" not in sample.completion
    )


def test_a_template_that_takes_no_question_alone_is_refused_before_the_first_step(tmp_path):
    template = "{% if messages | length < 2 %}{{ raise_exception('say more') }}{% endif %}" + (
        "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
    )
    plan = plan_of(prepared_rows(tmp_path, TALKS, template))
    with pytest.raises(UserError, match="say more") as caught:
        run(plan, run_dir=tmp_path / "run", emit=lambda event: None, stop=lambda: False)
    assert "sample.prompts" in caught.value.where and "sample.prompts" in caught.value.fix
