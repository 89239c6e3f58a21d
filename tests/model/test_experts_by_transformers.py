"""Mixtures that our decoder lacks, through transformers' layers: its experts in files and in memory, both ways."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_architectures import architectures
from tiny_models import saved_reference
from transformers import AutoModelForCausalLM

from bloomery.core.errors import UserError
from bloomery.facts.counting import active_parameter_count, layers, parameter_count
from bloomery.model.configs import read_config
from bloomery.model.io.stored import read_headers
from bloomery.model.io.weights import (
    load_decoder,
    model_state,
    write_model,
    write_model_piecewise,
)
from foreign_models import saved_model

FILE = "model.safetensors"
EXPERTS = "model.layers.0.block_sparse_moe.experts"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [
        "mixtral",  # three matrices of each expert in files
        "gpt_oss",  # one form in both, with biases
        "exaone_moe",  # numbers of the choice under another name in files
        "flex_olmo",
        "jamba",  # beside state spaces
    ],
)
def test_a_mixture_goes_the_whole_way(name: str) -> None:
    row = architectures.attempt(name, "transformers")
    assert row.passes, row.problem
    assert row.layers == "transformers"


def rewrite(folder: Path, change) -> None:
    tensors = {name: value.clone() for name, value in change(load_file(folder / FILE)).items()}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def in_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of each layer as transformers computes with them."""
    result = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in range(2):
        experts = f"model.layers.{layer}.block_sparse_moe.experts"
        w1, w2, w3 = (
            torch.stack([tensors[f"{experts}.{expert}.{name}.weight"] for expert in range(4)])
            for name in ("w1", "w2", "w3")
        )
        stack = f"model.layers.{layer}.mlp.experts"
        result |= {f"{stack}.gate_up_proj": torch.cat((w1, w3), 1), f"{stack}.down_proj": w2}
    return result


@torch.no_grad()
def test_files_in_the_form_of_memory_are_the_same_model(tmp_path: Path) -> None:
    saved_model("phimoe", tmp_path)
    expected = model_state(load_decoder(tmp_path))
    rewrite(tmp_path, in_memory)
    actual = model_state(load_decoder(tmp_path))
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


@torch.no_grad()
def test_a_model_is_written_piece_by_piece_as_at_once(tmp_path: Path) -> None:
    saved_model("phimoe", tmp_path)
    ours = load_decoder(tmp_path)
    state = model_state(ours)
    written = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        if number == 0:
            write_model(state, ours.config, folder)
        else:
            calls: list[str] = []

            def produce(name: str, calls: list[str] = calls) -> torch.Tensor:
                calls.append(name)
                return state[name]

            write_model_piecewise(produce, ours.config, torch.float32, folder)
            assert len(calls) == len(set(calls)), "each parameter is made once"
        written.append(load_file(folder / FILE))
    saved = load_file(tmp_path / FILE)
    for tensors in written:
        assert tensors.keys() == saved.keys()
        assert all(torch.equal(tensors[name], saved[name]) for name in saved)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda tensors: {k: v for k, v in tensors.items() if "experts.3.w2" not in k},
            r"experts.3.w2.weight is missing",
        ),
        (
            lambda tensors: {k: v[:-1] if "3.w1" in k else v for k, v in tensors.items()},
            r"experts.3.w1.weight is \[47, 32\]; config.json makes it \[48, 32\]",
        ),
        (
            lambda tensors: tensors | {f"{EXPERTS}.4.w1.weight": tensors[f"{EXPERTS}.3.w1.weight"]},
            r"experts.4.w1.weight has no place",
        ),
        (
            lambda tensors: in_memory(tensors) | tensors,
            r"experts.0.w1.weight has no place",
        ),
    ],
    ids=["missing", "width", "more", "twice"],
)
def test_files_that_contradict_are_refused(change, problem: str, tmp_path: Path) -> None:
    saved_model("phimoe", tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=problem):
        load_decoder(tmp_path)


def test_transformers_reads_a_trained_mixture_in_evaluation_as_we_do(tmp_path: Path) -> None:
    """The head has a bias, and what a token meets is drawn in training alone."""
    theirs = saved_model("phimoe", tmp_path, router_jitter_noise=0.9)
    ours = load_decoder(tmp_path)
    tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))
    assert torch.equal(ours(tokens).head, theirs(tokens).logits)
    torch.manual_seed(1)
    drawn = ours.train()(tokens).head
    torch.manual_seed(1)
    assert torch.equal(drawn, theirs.train()(tokens).logits)
    assert not torch.equal(drawn, ours.eval()(tokens).head)


def test_the_config_counts_the_experts_and_files_name_their_tensors(tmp_path: Path) -> None:
    saved_model("phimoe", tmp_path)
    config = read_config(tmp_path)
    assert config.transformers_backend.experts == 4
    # Its router is a linear map of PyTorch's that chooses, too: no adapter and no 4 bits take it.
    matrices = {name for name, *_ in config.transformers_backend.matrices}
    assert matrices == {f"self_attn.{name}_proj" for name in "qkvo"}
    conversions = config.transformers_backend.conversions
    assert len(conversions) == 4  # gate and up, and down, of two layers
    headers = read_headers(tmp_path, config).by_name
    names = {name for conversion in conversions for name, _ in conversion.stored}
    assert len(names) == 24 and names <= headers.keys()
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "phimoe"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() > 0


@pytest.mark.parametrize("case", ["mixtral", "gpt-oss", "qwen3-moe"])
def test_a_token_is_counted_in_the_experts_that_it_meets(case: str, tmp_path: Path) -> None:
    """As natively: transformers' layers hold the same parameters."""
    saved_reference(case, tmp_path)
    native, through = (read_config(tmp_path, kind) for kind in ("native", "transformers"))
    assert through.transformers_backend is not None
    assert parameter_count(through) == parameter_count(native)
    assert (
        active_parameter_count(through) == active_parameter_count(native) < parameter_count(native)
    )
    assert [layer.active_products for layer in layers(through)] == [
        layer.active_products for layer in layers(native)
    ]
