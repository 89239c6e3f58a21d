"""Crafted adapters, adapters of other models, and recipes whose adapter means nothing: each is one sentence."""

import json
import shutil

import pytest
import torch
from command_line import assert_clear, here
from safetensors.torch import save_file

from bloomery.model.adapters import patterns

GENERATE = ("--prompt", "the", "--max-new-tokens", "3")
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "model"}
TENSORS = {
    f"{MODULE}.lora_A.weight": torch.zeros(2, 16),
    f"{MODULE}.lora_B.weight": torch.zeros(16, 2),
}


@pytest.fixture
def adapter(model):
    """A good adapter for `model`, in the folder `adapter` beside it."""
    folder = model.parent / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, folder / "adapter_model.safetensors")
    return folder


def said(folder, **changes):
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))


def holds(folder, tensors):
    save_file(tensors, folder / "adapter_model.safetensors")


def test_a_good_adapter_is_taken_alone_and_beside_its_base(adapter):
    for name in ("adapter", "model+adapter"):
        assert here("generate", name, *GENERATE).code == 0
    (adapter.parent / "some.txt").write_text("the cat sat")
    assert here("eval", "model+adapter", "--data", "some.txt").code == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "verb",
    [
        ("generate", "adapter", *GENERATE),
        ("eval", "adapter", "--data", "some.txt"),
        *(("export", "adapter", "--to", kind, "--out", "copy") for kind in ("adapter", "merged")),
    ],
    ids=" ".join,
)
def test_an_adapter_that_is_not_finite_is_nowhere_taken(adapter, value, verb):
    (adapter.parent / "some.txt").write_text("the cat sat")
    name = f"{MODULE}.lora_B.weight"
    holds(adapter, TENSORS | {name: torch.full((16, 2), value)})
    assert_clear(here(*verb), mentions=[name, "not finite"])
    assert not (adapter.parent / "copy").exists()


def test_a_method_of_peft_that_is_not_finite_is_refused_too(adapter):
    said(adapter, peft_type="IA3", target_modules=["k_proj"], feedforward_modules=[])
    holds(
        adapter, {f"{MODULE.replace('q_proj', 'k_proj')}.ia3_l": torch.full((8, 1), float("nan"))}
    )
    assert_clear(here("generate", "adapter", *GENERATE), mentions=["ia3_l", "not finite"])


def test_an_adapter_of_whole_numbers_is_refused(adapter):
    holds(adapter, {name: tensor.int() for name, tensor in TENSORS.items()})
    assert_clear(here("generate", "adapter", *GENERATE), mentions=["is stored as I32"])


CONFIGS = {
    "nothing": "",
    "half an object": '{"peft_type": "LORA"',
    "a list": "[]",
    "deep": "[" * 100_000,
    "no method": '{"r": 2}',
    "a method that is no word": '{"peft_type": 3}',
}


@pytest.mark.parametrize("case", CONFIGS)
def test_an_adapter_config_that_is_none(adapter, case):
    (adapter / "adapter_config.json").write_text(CONFIGS[case])
    assert_clear(here("generate", "adapter", *GENERATE), mentions=["adapter_config.json"])


SETTINGS = {
    "rank 0": ({"r": 0}, "r is '0'"),
    "a rank that is a word": ({"r": "two"}, "two"),
    "true": ({"r": True}, "True"),
    "rank of 2**40": ({"r": 2**40}, "number"),
    "alpha null": ({"lora_alpha": None}, "lora_alpha"),
    "another rank": ({"r": 3}, "[3, 16]"),
    "dora without magnitudes": ({"use_dora": True}, "magnitude"),
    "what nobody knows": ({"use_qalora": True}, "use_qalora"),
    "a residual": ({"init_lora_weights": "corda"}, "corda"),
    "a base of LoftQ": ({"init_lora_weights": "loftq"}, "loftq"),
    "a pattern that never ends": ({"alpha_pattern": {r"(\w*\.*)*!": 2}}, "take longer"),
    "a pattern that is none": ({"rank_pattern": {"[": 2}}, "no regular expression"),
    "patterns that are a list": ({"rank_pattern": [1]}, "no object"),
    "a base of control characters": (
        {"base_model_name_or_path": "\x1b[2Jmodel"},
        "names no base model",
    ),
    "a key of control characters": ({"use_\x1b[2Jmagic": "\x1b[31mred"}, "magic"),
    "no base": ({"base_model_name_or_path": None}, "names no base model"),
    "a base that is gone": ({"base_model_name_or_path": "/gone/model"}, "/gone/model"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_of_an_adapter(adapter, case, monkeypatch):
    changes, told = SETTINGS[case]
    monkeypatch.setattr(patterns, "PATTERN_SECONDS", 1.0)
    said(adapter, **changes)
    assert_clear(here("generate", "adapter", *GENERATE), mentions=[told])


FILES = {
    "half a pair": ({next(iter(TENSORS)): torch.zeros(2, 16)}, "lacks"),
    "another width": (TENSORS | {f"{MODULE}.lora_A.weight": torch.zeros(2, 24)}, "[2, 24]"),
    "a layer too far": (
        {name.replace("layers.0", "layers.7"): t for name, t in TENSORS.items()},
        "layers 0 to 0",
    ),
    "a path": ({"../../../etc/passwd": torch.zeros(1)}, "no name that PEFT"),
    "another architecture": (
        {f"{MODULE.replace('q_proj', 'c_attn')}.lora_A.weight": torch.zeros(2, 16)},
        "c_attn",
    ),
    "an adapted embedding": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 9)},
        "embed",
    ),
    "no tensor": ({}, "changes nothing"),
}


@pytest.mark.parametrize("case", FILES)
def test_tensors_of_an_adapter(adapter, case):
    tensors, told = FILES[case]
    holds(adapter, tensors)
    assert_clear(here("generate", "adapter", *GENERATE), mentions=[told])


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 100_000, '{"base": {"digest": "other"}}'], ids=range(4)
)
def test_the_state_of_a_run_beside_an_adapter(adapter, text):
    (adapter / "state.json").write_text(text)
    told = here("generate", "adapter", *GENERATE)
    if text == "[]":
        assert told.code == 0
    else:
        assert_clear(told, mentions=["other weights" if "{" in text else "JSON"])


def test_a_pickled_adapter(adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert_clear(here("generate", "adapter", *GENERATE), mentions=["pickle"])


def test_an_adapter_whose_tensors_are_missing_or_linked_from_elsewhere(adapter):
    shutil.move(adapter / "adapter_model.safetensors", adapter.parent / "outside")
    assert_clear(here("generate", "adapter", *GENERATE), mentions=["adapter_model.safetensors"])
    (adapter / "adapter_model.safetensors").symlink_to(adapter.parent / "outside")
    assert_clear(here("generate", "adapter", *GENERATE), mentions=["link"])


def test_two_whole_models_are_no_base_and_adapter(adapter, model):
    shutil.copytree(model, model.parent / "other")
    assert_clear(here("generate", "model+other", *GENERATE), mentions=["not an adapter"])


def test_an_adapter_is_no_model_to_start_from_or_to_copy(adapter):
    assert_clear(
        here("export", "adapter", "--to", "hf", "--out", "copy"), code=2, mentions=["merged"]
    )
    assert_clear(
        here("export", "model", "--to", "merged", "--out", "copy"), code=2, mentions=["--to hf"]
    )
    (adapter.parent / "r.yaml").write_text("model: {from: adapter}\ndata: {path: text}\n")
    assert_clear(here("plan", "r.yaml"), mentions=["--to merged"])


RECIPES = {
    "a misspelt target": ("{kind: lora, target_modules: [q_porj]}", "q_proj"),
    "a layer that is none": (
        "{kind: dora, target_modules: ['model.layers.9.*.q_proj']}",
        "layers 0 to 0",
    ),
    "the head": ("{kind: lora, target_modules: [lm_head]}", "modules_to_save"),
    "no target": ("{kind: lora, target_modules: []}", "adapter.target_modules"),
    "nothing to train": ("{kind: lora, modules_to_save: [lm_haed]}", "lm_head"),
    "both": ("{kind: lora, modules_to_save: [q_proj]}", "one of the two"),
    "more than there is": ("{kind: lora, init: pissa, rank: 64}", "singular values"),
}


@pytest.mark.parametrize("case", RECIPES)
def test_recipes_whose_adapter_means_nothing(workshop, case):
    section, told = RECIPES[case]
    recipe = workshop / "tiny.yaml"
    recipe.write_text(f"{recipe.read_text()}\nadapter: {section}\n")
    assert_clear(here("plan", "tiny.yaml"), code=2, mentions=[told])
