"""What training would refuse, `plan`, `train --dry-run` and `prepare --check` refuse at once, with one sentence.

Only the settings of a PEFT method are refused later, by `train`.
"""

import json

import pytest
from command_line import assert_clear, here
from safetensors.torch import load_file, save_file
from test_bad_models import TOKENIZERS, WEIGHTS

from bloomery.data.tokenizer.tokenizer import load_tokenizer

TURNS = {
    "messages": [
        {"role": "user", "content": "who sat"},
        {"role": "assistant", "content": "the cat sat"},
    ]
}
PAIR = {"prompt": "who sat", "chosen": "the cat", "rejected": "the mat"}
MARKED = {"prompt": "who sat", "completion": "the cat", "label": True}
TEXT = {"text": "the cat sat on the mat and then it was seen "}
PEFT = {"kind": "peft", "method": "vera"}
ADALORA = {"kind": "peft", "method": "adalora"}
VERBS = (("plan",), ("train", "--dry-run"), ("prepare", "--check"), ("train",))


def recipe(folder, rows, **sections):
    """Written as recipe.yaml, with rows in rows.jsonl, beside the model."""
    words = {
        "model": {"from": "model"},
        "data": {"path": "rows.jsonl", "sequence_length": 32, "num_proc": 0},
        "train": {"max_steps": 2, "tokens_per_step": 64},
    }
    if "epochs" in sections.get("train", {}):
        del words["train"]["max_steps"]
    for name, section in sections.items():
        words[name] = words.get(name, {}) | section
    (folder.parent / "recipe.yaml").write_text(json.dumps(words))
    written = (
        rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows * 20)
    )
    (folder.parent / "rows.jsonl").write_text(written)


def refused_alike(model, mentions, *, code=None):
    told = {words: here(words[0], "recipe.yaml", *words[1:]) for words in VERBS}
    for result in told.values():
        assert_clear(result, code=code or result.code, mentions=mentions)
        assert result.code != 0
    errors = {words: result.err[result.err.index("error:") :] for words, result in told.items()}
    assert len(set(errors.values())) == 1, errors
    assert not (model.parent / "runs").exists() and not (model.parent / "prepared").exists()


DATA = {
    "dpo of conversations": ([TURNS], {"objective": {"kind": "dpo"}}, "conversations"),
    "dpo of text": ([TEXT], {"objective": {"kind": "dpo"}}, "plain text"),
    "dpo of completions": (
        [{"prompt": "a", "completion": "b"}],
        {"objective": {"kind": "dpo"}},
        "completions",
    ),
    "kto of conversations": ([TURNS], {"objective": {"kind": "kto"}}, "conversations"),
    "sft of pairs": ([PAIR], {"objective": {"kind": "sft"}}, "objective.kind=dpo"),
    "sft of marked answers": ([MARKED], {"objective": {"kind": "sft"}}, "objective.kind=kto"),
    "a reward model of completions": ([MARKED], {"objective": {"kind": "reward"}}, "KTO labels"),
    "text behind conversations": (
        [TURNS, {"messages": "hi"}],
        {"objective": {"kind": "sft"}},
        "rows.jsonl:2",
    ),
    "conversations without a template": (
        [TURNS],
        {"objective": {"kind": "sft"}},
        "no chat template",
    ),
    "a template that is not there": (
        [TURNS],
        {"objective": {"kind": "sft"}, "data": {"chat": {"template": "chatmll"}}},
        "did you mean chatml?",
    ),
    "a template that fails": (
        [TURNS],
        {"objective": {"kind": "sft"}, "data": {"chat": {"template": "{% if %}"}}},
        "template",
    ),
    "a template for turns set to none": (
        [TURNS],
        {"objective": {"kind": "sft"}, "data": {"chat": {"template": "none"}}},
        "data.chat.template=none",
    ),
    "prompts that are formatted already": (
        [
            {
                "prompt": "<|im_start|>user\nwho<|im_end|>\n<|im_start|>assistant\n",
                "completion": "the cat",
            }
        ],
        {"objective": {"kind": "sft"}, "data": {"chat": {"template": "chatml"}}},
        "data.chat.template=none",
    ),
    "a role that no message has": (
        [{"messages": [{"role": "robot", "content": "hi"}]}],
        {"objective": {"kind": "sft"}},
        "unknown role",
    ),
    "no JSON": ("the cat\n", {}, "not JSON"),
    "nothing": ("", {}, "is empty"),
    "blank lines": ("\n\n\n", {}, "is empty"),
    "columns that are not there": ([TEXT], {"data": {"columns": {"text": "body"}}}, "body"),
    "an unknown role of columns": ([TEXT], {"data": {"columns": {"tezt": "text"}}}, "unknown role"),
    "a column that nobody can choose": ([{"a": "x", "b": "y"}], {}, "a usual name for the text"),
    "tokens that no tokenizer made": (
        [{"input_ids": [5, 6]}],
        {"tokenizer": {"train": {"vocab_size": 300}}},
        "tokenizer.from",
    ),
    "tokens beyond the vocabulary": ([{"input_ids": [5, 10**6]}], {}, "1,000,000"),
    "pairs in a fixed layout": (
        [PAIR],
        {"objective": {"kind": "dpo"}, "data": {"document_masking": False}},
        "data.document_masking",
    ),
    "a validation file that is not there": (
        [TEXT],
        {"data": {"validation": "held.jsonl"}},
        "held.jsonl",
    ),
    "a tokenizer without room for bytes": (
        [TEXT],
        {"tokenizer": {"train": {"vocab_size": 100}}},
        "vocab_size",
    ),
    "a tokenizer that is not there": (
        [TEXT],
        {"tokenizer": {"from": "/nowhere/at/all"}},
        "/nowhere/at/all",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", DATA)
def test_data(model, case):
    rows, sections, word = DATA[case]
    recipe(model, rows, **sections)
    refused_alike(model, [word])


SET_BY_THE_RUN = {
    "a method within a method": ({**PEFT, "peft_type": "LOHA"}, "adapter.method names the method"),
    "an adapter for inference": ({**PEFT, "inference_mode": True}, "a run trains its adapter"),
    "a task": ({**PEFT, "task_type": "SEQ_CLS"}, "the objective decides it"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", SET_BY_THE_RUN)
def test_settings_of_peft_that_a_run_makes_itself(model, case):
    adapter, word = SET_BY_THE_RUN[case]
    recipe(model, [TEXT], adapter=adapter)
    refused_alike(model, [word], code=2)


REFUSED_WITH_PEFT = {
    "a rank that is a word": ({**PEFT, "r": "abc"}, "r=abc: input should be a valid integer"),
    "a rank of half a column": ({**PEFT, "r": 1.5}, "a valid integer"),
    "a rank of 0": ({**PEFT, "r": 0}, "above 0"),
    "a negative rank": ({**ADALORA, "target_r": -1}, "above 0"),
    "a switch that is a word": (
        {"kind": "peft", "method": "loha", "rank_dropout": "much"},
        "a valid number",
    ),
    "a choice that is not one": (
        {"kind": "peft", "method": "glora", "config_A_B": "lorra"},
        "'lora'",
    ),
    "a key of another method": ({**PEFT, "boft_block_size": 4}, "has no key"),
    "no number": (
        {"kind": "peft", "method": "loha", "module_dropout": float("nan")},
        "module_dropout",
    ),
    "what PEFT refuses of two keys": (
        {**ADALORA, "total_step": 10, "tinit": 8, "tfinal": 8},
        "budgeting phase",
    ),
    "ranks after the run's end": ({**ADALORA, "tinit": 8}, "budgeting phase"),
    "layers without a pattern": ({**PEFT, "layers_pattern": "h"}, "layers_to_transform"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", REFUSED_WITH_PEFT)
def test_settings_of_peft(model, case):
    """A plan does without PEFT, which imports torch. A run asks it before the dataset is prepared."""
    adapter, word = REFUSED_WITH_PEFT[case]
    recipe(model, [TEXT], adapter=adapter)
    assert here("plan", "recipe.yaml").code == 0
    assert_clear(here("train", "recipe.yaml"), mentions=[word], code=2)
    assert not (model.parent / "prepared").exists()


PIPELINES = {
    "a key of other trainers": ({"schedule": "banana"}, "parallel.pipeline_schedule"),
    "an unknown schedule": ({"pipeline_schedule": "banana"}, "1f1b"),
    "no micro-batch": ({"pipeline": 2, "pipeline_microbatches": 0}, "above 0"),
}


@pytest.mark.parametrize("case", PIPELINES)
def test_keys_of_a_pipeline(model, case):
    parallel, word = PIPELINES[case]
    recipe(model, [TEXT], parallel=parallel)
    refused_alike(model, [word], code=2)


def whole_numbers(folder):
    state = load_file(folder / "model.safetensors")
    save_file(
        state | {"model.norm.weight": state["model.norm.weight"].int()},
        folder / "model.safetensors",
    )


def truncated(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1000])


def of_another_shape(folder):
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | {"intermediate_size": 48}))


MODELS = WEIGHTS | {
    "whole numbers": whole_numbers,
    "cut short": truncated,
    "another shape": of_another_shape,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", MODELS)
def test_weights(model, case):
    MODELS[case](model)
    recipe(model, [TEXT])
    refused_alike(model, ["model"])


def test_weights_of_a_teacher(model):
    (model.parent / "student").mkdir()
    for file in model.iterdir():
        (model.parent / "student" / file.name).write_bytes(file.read_bytes())
    truncated(model)
    recipe(
        model,
        [TURNS],
        model={"from": "student"},
        objective={"kind": "distill", "teacher": "model"},
        data={"chat": {"template": "chatml"}},
    )
    refused_alike(model, ["model.safetensors"])


@pytest.mark.parametrize("case", ["an id twice", "no vocabulary", "added tokens that are null"])
def test_tokenizers(model, case):
    described = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(TOKENIZERS[case](described)))
    recipe(model, [TEXT])
    refused_alike(model, ["tokenizer.json"])


@pytest.mark.parametrize(
    "verb",
    [
        ("generate", "model", "--prompt", "the"),
        ("eval", "model", "--data", "some.txt"),
        ("export", "model", "--to", "hf", "--out", "copy"),
    ],
    ids=lambda words: words[0],
)
def test_a_model_whose_weights_are_whole_numbers_is_nowhere_taken(model, verb):
    (model.parent / "some.txt").write_text("the cat sat")
    whole_numbers(model)
    assert_clear(here(*verb), mentions=["model.norm.weight is stored as I32", "F32"])


def test_a_new_model_takes_its_vocabulary_from_a_tokenizer_before_its_text_is_prepared(model):
    sizes = dict(family="llama", hidden_size=16, num_layers=1, num_heads=2, max_positions=32)
    recipe(model, [TEXT], tokenizer={"from": "model"})
    words = json.loads((model.parent / "recipe.yaml").read_text()) | {"model": sizes}
    (model.parent / "recipe.yaml").write_text(json.dumps(words))
    told = here("plan", "recipe.yaml", "--json")
    assert told.code == 0, told.err
    assert load_tokenizer(model).vocab_size == 300
    weights = json.loads(told.out)["memory"]["parts"]["weights"] * 2**30
    assert weights > 4 * 300 * 16 * 2, "the embedding and the head of 300 tokens"


def test_text_that_fills_no_step_by_its_size_alone_is_not_refused(model):
    """A guess from bytes cannot know how many padded rows there are."""
    recipe(
        model,
        [{"text": "cat"}],
        data={"packing": False},
        train={"epochs": 1, "tokens_per_step": 512},
    )
    assert here("plan", "recipe.yaml").code == 0


def test_a_good_recipe_is_refused_nowhere(model):
    for rows, sections in (
        ([TEXT], {"adapter": {**PEFT, "r": 2}}),
        ([TEXT], {"adapter": {**ADALORA, "init_r": 4, "target_r": 2}, "train": {"max_steps": 20}}),
        ([TEXT], {"adapter": {"kind": "peft", "method": "oft", "oft_block_size": 8}}),
        ([PAIR], {"objective": {"kind": "dpo"}}),
        ([{"prompt": "who sat", "completion": "the cat"}], {"objective": {"kind": "sft"}}),
        ([TURNS], {"objective": {"kind": "sft"}, "data": {"chat": {"template": "chatml"}}}),
        (["the cat", {"text": "the cat sat on it"}], {"data": {"on_error": "skip"}}),
    ):
        recipe(model, rows, **sections)
        told = here("plan", "recipe.yaml")
        assert told.code == 0, told.err
