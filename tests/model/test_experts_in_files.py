"""Experts in files: each matrix by itself or stacks, in either orientation, in composites; and what contradicts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expert_models import choices_of, gradients_of_both, is_close, pair, parts
from packed_documents import documents, packed
from safetensors.torch import load_file, save_file
from tiny_models import CASES, saved_reference, tokens
from torch import Tensor
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.model.io.weights import load_decoder

TOKENS = tokens()
GRANITES = ("granite-moe", "granite4-moe")
LAYER = "model.layers.0.mlp.experts"
Tensors = dict[str, Tensor]


@pytest.mark.parametrize("case", GRANITES)
def test_a_granite_with_experts_is_transformers(case: str, tmp_path: Path) -> None:
    theirs, ours = pair(case, tmp_path)
    seen: list[tuple[Tensor, ...]] = []
    for layer in theirs.model.layers:
        router = layer.block_sparse_moe.router
        router.register_forward_hook(lambda _, __, output: seen.append(output))
    logits = theirs(TOKENS).logits
    for choice, (_, weights, experts) in zip(choices_of(ours, TOKENS), seen, strict=True):
        assert torch.equal(choice.experts_NK, experts)
        assert_close(choice.weights_NK, weights, atol=1e-6, rtol=0)
    assert is_close(ours(TOKENS).head, logits)
    expected, gradients = gradients_of_both(theirs, ours, TOKENS)
    assert expected.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert is_close(gradient, expected[name]), name


@pytest.mark.parametrize("case", GRANITES)
@torch.no_grad()
def test_packed_documents_of_a_granite_are_each_alone(case: str, tmp_path: Path) -> None:
    rows = documents((23, 1, 30, 2, 5))
    decoder = pair(case, tmp_path)[1].double()
    alone = torch.cat([decoder(row).head for row in rows], 1)
    assert_close(packed(decoder, rows), alone, atol=1e-12, rtol=0)


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def stacked(tensors: Tensors, *, transposed: bool = False) -> Tensors:
    """The experts of Qwen 3 as one tensor for each layer, as Qwen3-VL's files have them."""
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in layers:

        def module(name: str, layer: str = layer) -> Tensor:
            count = len({key for key in tensors if key.startswith(f"{layer}.experts.")}) // 3
            return torch.stack(
                [tensors[f"{layer}.experts.{expert}.{name}.weight"] for expert in range(count)]
            )

        gate_up = torch.cat((module("gate_proj"), module("up_proj")), 1)
        down = module("down_proj")
        for name, stack in (("gate_up_proj", gate_up), ("down_proj", down)):
            result[f"{layer}.experts.{name}"] = stack.transpose(1, 2) if transposed else stack
    return result


def composite(tensors: Tensors) -> Tensors:
    return {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    } | {"model.visual.patch_embed.weight": torch.zeros(2)}


@pytest.mark.parametrize("form", ["stacks", "transposed", "composite", "bare"])
def test_every_form_of_a_file_is_the_same_model(form: str, tmp_path: Path) -> None:
    saved_reference("qwen3-moe", tmp_path)
    expected = parts(load_decoder(tmp_path))
    changes: dict[str, Callable[[Tensors], Tensors]] = {
        "stacks": stacked,
        "transposed": lambda tensors: stacked(tensors, transposed=True),
        "composite": lambda tensors: composite(stacked(tensors, transposed=True)),
        # as AutoModel saves it, without its head
        "bare": lambda tensors: {
            name.removeprefix("model."): tensor for name, tensor in stacked(tensors).items()
        },
    }
    rewrite(tmp_path, changes[form])
    actual = parts(load_decoder(tmp_path))
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


def test_a_granite_in_the_names_of_memory_is_the_same_model(tmp_path: Path) -> None:
    saved_reference("granite-moe", tmp_path)
    expected = parts(load_decoder(tmp_path))
    names = {
        "input_linear.weight": "experts.gate_up_proj",
        "output_linear.weight": "experts.down_proj",
        "router.layer.weight": "router.weight",
    }

    def renamed(name: str) -> str:
        for ending, in_memory in names.items():
            if name.endswith(ending):
                return name.removesuffix(ending) + in_memory
        return name

    rewrite(tmp_path, lambda tensors: {renamed(name): t for name, t in tensors.items()})
    actual = parts(load_decoder(tmp_path))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def extra(name: str, like: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensors[like].clone()}


UP = f"{LAYER}.7.up_proj.weight"
FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "both forms": (lambda tensors: stacked(tensors) | tensors, "gate_proj.weight is there twice"),
    "one of both": (
        lambda tensors: stacked(tensors) | {UP: tensors[UP]},
        r"experts.7.up_proj.weight is there twice: .*gate_up_proj holds it, too",
    ),
    "missing": (without(UP), r"experts.7.up_proj.weight is missing"),
    "one more": (
        extra(f"{LAYER}.8.up_proj.weight", UP),
        r"experts.8.up_proj.weight is of expert 8, and config.json has 8 experts",
    ),
    "other width": (
        lambda tensors: tensors | {UP: tensors[UP][:-1]},
        r"up_proj.weight is \[15, 48\]; config.json makes it \[16, 48\]",
    ),
    "fewer in a stack": (
        lambda tensors: {
            name: tensor[:6] if name.endswith("experts.gate_up_proj") else tensor
            for name, tensor in stacked(tensors).items()
        },
        r"gate_up_proj is \[6, 32, 48\]; config.json makes it \[8, 32, 48\]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_contradict_are_refused_in_one_sentence(fault: str, tmp_path: Path) -> None:
    saved_reference("qwen3-moe", tmp_path)
    change, problem = FAULTS[fault]
    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=problem) as refused:
        load_decoder(tmp_path)
    assert "\n" not in refused.value.problem and refused.value.fix


@pytest.mark.parametrize(("count", "problem"), [(4, "expert 4, and config.json has 4"), (9, "8")])
def test_a_config_with_another_number_of_experts_is_refused(
    count: int, problem: str, tmp_path: Path
) -> None:
    saved_reference("qwen3-moe", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    keys = [key for key in ("num_experts", "num_local_experts") if key in config]
    path.write_text(json.dumps(config | dict.fromkeys(keys, count)))
    with pytest.raises(UserError, match=problem):
        load_decoder(tmp_path)


def test_a_stack_of_gpt_oss_with_another_width_is_refused(tmp_path: Path) -> None:
    saved_reference("gpt-oss", tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: {
            name: tensor[:, :, :40] if name.endswith("gate_up_proj") else tensor
            for name, tensor in tensors.items()
        },
    )
    with pytest.raises(UserError, match=r"gate_up_proj is \[4, 48, 40\]; config.json makes it"):
        load_decoder(tmp_path)


@torch.no_grad()
def test_heads_share_the_width_where_the_config_has_none_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, settings = CASES["qwen3-moe"]
    bare = {key: value for key, value in settings.items() if key != "head_dim"}
    monkeypatch.setitem(CASES, "qwen3-moe", (prefix, bare))
    theirs, ours = pair("qwen3-moe", tmp_path)
    assert "head_dim" not in json.loads((tmp_path / "config.json").read_text())
    assert is_close(ours(TOKENS).head, theirs(TOKENS).logits)


VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=48)
VISION |= dict(patch_size=4, spatial_merge_size=1, deepstack_visual_indexes=[0])
VISION |= dict(num_position_embeddings=16)


@pytest.mark.parametrize("case", ["qwen3", "qwen3-moe"])
@torch.no_grad()
def test_the_language_model_of_qwen3_vl_is_opened(case: str, tmp_path: Path) -> None:
    """Its stacks are [E, inputs, outputs] in files, and its router normalizes whatever the config says."""
    import transformers

    _, settings = CASES[case]
    prefix = "Qwen3VLMoe" if case == "qwen3-moe" else "Qwen3VL"
    rope = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 2, 2]}
    text = settings | {"rope_parameters": rope, "head_dim": 16, "tie_word_embeddings": False}
    config = getattr(transformers, f"{prefix}Config")(
        text_config=text, vision_config=VISION, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    for name, parameter in theirs.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    saved["text_config"]["norm_topk_prob"] = False
    path.write_text(json.dumps(saved))
    # As published; transformers 5 opens that, too, and saves [E, outputs, inputs].
    rewrite(
        tmp_path,
        lambda tensors: {
            name: tensor.transpose(1, 2) if ".experts." in name else tensor
            for name, tensor in tensors.items()
        },
    )
    opened = type(theirs).from_pretrained(tmp_path)
    expected = theirs(TOKENS).logits
    assert torch.equal(opened(TOKENS).logits, expected)
    assert is_close(load_decoder(tmp_path)(TOKENS).head, expected)


@torch.no_grad()
def test_experts_in_fp8_are_read_one_by_one(tmp_path: Path) -> None:
    saved_reference("qwen3-moe", tmp_path)
    expected: Tensors = {}

    def packed_tensors(tensors: Tensors) -> Tensors:
        written: Tensors = {}
        for name, tensor in tensors.items():
            if ".experts." not in name:
                written[name] = tensor
                continue
            scale = tensor.abs().max().reshape(1, 1) / 448
            codes = (tensor / scale).to(torch.float8_e4m3fn)
            written |= {name: codes, f"{name}_scale_inv": scale}
            expected[name] = codes.float() * scale
        return written

    rewrite(tmp_path, packed_tensors)
    path = tmp_path / "config.json"
    quantization = {"quant_method": "fp8", "fmt": "e4m3"}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization})
    )
    actual = parts(load_decoder(tmp_path, dtype=torch.float32))
    assert len(expected) == 3 * 8 * 3
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
