"""Quantized stacks of experts: the numbers that they stand for, the memory that they take, and nothing left out."""

import pytest
import torch
from test_architectures import architectures
from test_quantize import INT8, NF4, build_quantized, gradients, lora, with_floats
from tiny_models import saved_reference, tokens
from torch import Tensor
from torch.testing import assert_close

from bloomery.check.small_model import exact_weight
from bloomery.core import Choice
from bloomery.core.errors import UserError
from bloomery.facts.config import Experts, ModelConfig
from bloomery.facts.counting import is_layer_matrix, parameter_shapes
from bloomery.facts.limits import storage_bytes
from bloomery.model import quantized_experts
from bloomery.model.adapters.lora import adapt, adapted_stacks
from bloomery.model.adapters.settings import linear_modules, target_modules
from bloomery.model.configs import read_config
from bloomery.model.decoder import Decoder
from bloomery.model.experts import grouped_linear, sorted_by_expert
from bloomery.model.io import quantized
from bloomery.model.io.expert_tensors import refuse_unquantizable, stacks_of_transformers
from bloomery.model.io.quantized import QuantizedWeight, dequantized_part
from bloomery.model.io.weights import (
    fresh_decoder,
    init_weights,
    load_decoder,
    quantize_model,
    quantized_weights,
)
from bloomery.model.quantized_experts import QuantizedExperts
from bloomery.plan.adapters import adapter_choices, quantized_choices
from bloomery.plan.estimate.states import TrainedModel
from bloomery.recipe.schema import Quantize, Recipe
from foreign_models import saved_model

ADAPTER = lora(target_modules=["all-linear"])
SINGLE = Quantize(kind="nf4", double_quant=False)
KINDS = {"nf4": NF4, "single": SINGLE, "int8": INT8}
CASES = ("qwen3-moe", "mixtral", "gpt-oss")
WIDE = ModelConfig(
    vocab_size=8,
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    experts=Experts(count=16, per_token=1, width=64),
)


def stack_of(shape: tuple[int, ...], quantize: Quantize) -> QuantizedWeight:
    weight = QuantizedWeight(shape, quantize)
    values = torch.empty(shape).normal_(generator=torch.Generator().manual_seed(0))
    weight.fill([values.flatten(0, -2)], name="stack")
    return weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5, 12, 16), (3, 70, 256), (4, 256, 64)])
def test_a_matrix_is_read_back_by_the_formula(kind, shape) -> None:
    """Blocks of scales end inside of matrices, or with them."""
    weight = stack_of(shape, KINDS[kind])
    whole = weight.dequantized(torch.float32)
    exact = exact_weight(weight.stored).view(shape)
    assert_close(whole.double(), exact, atol=1e-6, rtol=1e-6)
    for number in range(shape[0]):
        assert torch.equal(
            dequantized_part(weight.part_buffers, number, torch.float32), whole[number]
        )
    # A matrix alone has the same codes and largest sizes; its scales of scales are those of fewer.
    if kind != "nf4":
        alone = QuantizedWeight(shape[1:], KINDS[kind])
        values = torch.empty(shape).normal_(generator=torch.Generator().manual_seed(0))
        alone.fill([values[1]], name="matrix")
        assert torch.equal(alone.dequantized(torch.float32), whole[1])
    assert sum(buffer.nbytes for buffer in weight.buffers()) == storage_bytes(
        shape, KINDS[kind].kind, KINDS[kind].double_quant
    )


def rows() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(9, 64, generator=numbers), torch.randint(0, 5, (9, 2), generator=numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_are_those_of_the_stack_read_back(dtype) -> None:
    weight = stack_of((6, 20, 64), NF4)
    bias = torch.randn(6, 20)
    x, experts = rows()
    pairs = sorted_by_expert(experts, 6)
    results = []
    for product in ("quantized", "floats"):
        inner = x.to(dtype).requires_grad_()
        if product == "quantized":
            y = QuantizedExperts(weight)(inner, pairs, bias, is_sorted=False)
        else:
            y = grouped_linear(inner, weight.dequantized(dtype), pairs, bias, is_sorted=False)
        y.float().square().sum().backward()
        results.append((y.detach(), inner.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_the_operator_passes_torchs_own_check() -> None:
    weight = stack_of((6, 20, 64), NF4)
    x, experts = rows()
    pairs = sorted_by_expert(experts, 6)
    for per_token, inputs in ((2, x), (0, x[pairs.tokens_S])):
        torch.library.opcheck(
            torch.ops.bloomery.quantized_experts,
            (
                inputs.requires_grad_(),
                *weight.part_buffers,
                0,
                None,
                pairs.ends_E,
                pairs.order_S,
                pairs.place_S,
                per_token,
            ),
        )


def test_only_experts_with_rows_are_dequantized_one_at_a_time(monkeypatch) -> None:
    decoder = fresh_decoder(WIDE, seed=0).requires_grad_(False)
    quantize_model(decoder, NF4)
    experts = decoder.model.layers[0].mlp.experts
    x = torch.randn(4, 64, requires_grad=True)
    choice = decoder.model.layers[0].mlp.gate(x)
    met = set(choice.experts_NK.flatten().tolist())
    read: list[int] = []

    def noted(buffers, number, dtype, *, first):
        read.append(first + number)
        return dequantized_part(buffers, number, dtype)

    monkeypatch.setattr(quantized_experts, "dequantized_part", noted)
    experts(x, choice).sum().backward()
    assert 1 < len(met) < 16 and set(read) == met
    assert len(read) == 4 * len(met)  # two stacks, forward and backward

    # Nothing larger than the matrix of one expert is made of codes.
    sizes: list[int] = []
    dequantized = quantized.dequantized

    def measured(buffers, dtype):
        weight = dequantized(buffers, dtype)
        sizes.append(weight.numel())
        return weight

    monkeypatch.setattr(quantized, "dequantized", measured)
    choice = decoder.model.layers[0].mlp.gate(x)
    experts(x, choice).sum().backward()
    assert sorted(set(sizes)) == [64 * 64, 128 * 64]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_dequantized_weights(case, kind, tmp_path) -> None:
    saved_reference(case, tmp_path)
    model = build_quantized(tmp_path, KINDS[kind], ADAPTER)
    numbers = torch.Generator().manual_seed(5)
    for _, stack in adapted_stacks(model):
        stack.lora_B.data.normal_(0.0, 0.05, generator=numbers)
    float_model = with_floats(model, tmp_path, ADAPTER)
    ids = tokens()
    assert_close(model(ids).head, float_model(ids).head, atol=1e-6, rtol=1e-5)
    ours, theirs = gradients(model, ids), gradients(float_model, ids)
    assert ours.keys() == theirs.keys() and any(".experts.lora." in name for name in ours)
    for name, gradient in ours.items():
        assert_close(
            gradient, theirs[name], atol=1e-6, rtol=1e-4, msg=lambda t, n=name: f"{n}: {t}"
        )


@pytest.mark.parametrize("case", CASES)
def test_a_model_read_in_pieces_has_the_bits_of_one_read_at_once(
    case, tmp_path, monkeypatch
) -> None:
    saved_reference(case, tmp_path)
    read_at_once = load_decoder(tmp_path)
    quantize_model(read_at_once.requires_grad_(False), NF4)
    monkeypatch.setattr("bloomery.model.io.safetensors.STAGE_BYTES", 1000)
    monkeypatch.setattr("bloomery.model.io.quantized.AT_ONCE", 500)
    expected = dict(quantized_weights(read_at_once))
    read_in_pieces = dict(quantized_weights(build_quantized(tmp_path, NF4, ADAPTER)))
    assert read_in_pieces.keys() == expected.keys()
    for name, weight in read_in_pieces.items():
        for buffer, other in zip(weight.buffers(), expected[name].buffers(), strict=True):
            assert torch.equal(buffer, other), name


def test_nothing_of_the_layers_stays_in_floats_but_what_is_no_matrix(tmp_path) -> None:
    saved_reference("qwen3-moe", tmp_path)
    model = build_quantized(tmp_path, NF4, ADAPTER)
    shapes = parameter_shapes(model.config)
    matrices = {name for name, shape in shapes.items() if is_layer_matrix(name, shape)}
    assert {name for name, _ in quantized_weights(model)} == matrices
    assert sum(name.endswith("experts.down_proj") for name in matrices) == 3
    left = {name for name, _ in model.named_parameters() if name in shapes}
    assert left == shapes.keys() - matrices
    assert any(name.endswith("mlp.gate.weight") for name in left)


def test_fresh_weights_are_those_of_a_float_model() -> None:
    expected = fresh_decoder(WIDE, seed=3)
    quantize_model(expected.requires_grad_(False), NF4)
    with torch.device("meta"):
        model = Decoder(WIDE).requires_grad_(False)
    quantize_model(model, NF4)
    model.to_empty(device="cpu")
    init_weights(model, 3)
    weights = dict(quantized_weights(model))
    for name, weight in quantized_weights(expected):
        assert torch.equal(weight.codes, weights[name].codes), name


def test_blocks_that_would_belong_to_two_experts_are_refused() -> None:
    experts = Experts(count=2, per_token=1, width=6)
    config = ModelConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        experts=experts,
    )
    decoder = fresh_decoder(config, seed=0).requires_grad_(False)
    with pytest.raises(UserError, match="48 weights, no multiple of 64") as refused:
        quantize_model(decoder, NF4)
    assert "quantize.kind=none" in refused.value.fix


def test_experts_of_transformers_layers_are_not_left_in_floats_unsaid(tmp_path) -> None:
    saved_model("phimoe", tmp_path)
    config = read_config(tmp_path)
    stacks = stacks_of_transformers(config)
    assert {name.rpartition(".")[2] for name in stacks} == {"gate_up_proj", "down_proj"}
    with pytest.raises(UserError, match="of the parameters in floats"):
        refuse_unquantizable(config, "nf4")
    recipe = Recipe.model_validate(
        {
            "model": {"from": str(tmp_path)},
            "adapter": {"kind": "lora"},
            "data": {"path": "x"},
            "train": {"max_steps": 1},
        }
    )
    trained = TrainedModel.of(recipe, config)
    choices = dict(adapter_choices(recipe, trained, known_vocabulary=None, added=0))
    assert "parameters of experts stay frozen" in choices["adapter.target_modules"].reason


def test_a_router_that_is_a_linear_map_is_no_target(tmp_path) -> None:
    architectures.tiny_model("afmoe").save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert any(name.endswith("mlp.router.gate") for name in linear_modules(config))
    assert not any("router" in name for name in target_modules(config, ["all-linear", "*"]))
    for name in ("router", "router.gate"):
        with pytest.raises(UserError, match="the router is no target"):
            target_modules(config, ["q_proj", name])


def test_a_plan_counts_what_is_quantized_and_what_trains() -> None:
    """As the model does."""
    recipe = Recipe.model_validate(
        {
            "model": {"family": "qwen3_moe"},
            "adapter": {"kind": "lora", "rank": 2},
            "quantize": {"kind": "nf4"},
            "data": {"path": "x"},
            "train": {"max_steps": 1},
        }
    )
    trained = TrainedModel.of(recipe, WIDE)
    (_, choice), *_ = quantized_choices(recipe, trained, Choice("torch", "native"))
    decoder = fresh_decoder(WIDE, seed=0)
    adapt(decoder, recipe.adapter)
    quantize_model(decoder, NF4)
    weights = dict(quantized_weights(decoder))
    sizes = {name: weight.rows * weight.inputs for name, weight in weights.items()}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert f"{sum(sizes.values()):,} of " in choice.reason
    assert f"{of_experts:,} of them in experts" in choice.reason
    choices = dict(adapter_choices(recipe, trained, known_vocabulary=None, added=0))
    lora = sum(p.numel() for name, p in decoder.named_parameters() if ".experts.lora." in name)
    assert f"routed experts: 32 matrices, {lora:,} parameters" in (
        choices["adapter.target_modules"].reason
    )
    assert "the router stays frozen" in choices["adapter.target_modules"].reason
