"""Runs over a quantised base: they learn, resume bitwise, and merge into the weights that the base came from."""

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run, crossed, resumed_bitwise
from safetensors.torch import load_file

from bloomery.export.layouts import merged_state
from bloomery.facts.counting import parameter_shapes
from bloomery.facts.limits import storage_bytes
from bloomery.model.io.parameters import local
from bloomery.model.io.weights import (
    fresh_decoder,
    load_decoder,
    model_state,
    quantized_weights,
    write_model,
)
from bloomery.parallel.process_group import join
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Lora, Quantize
from bloomery.train.state import build_state
from ranks import on_ranks, ranks


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_model(model_state(fresh_decoder(CONFIG, seed=3)), CONFIG, folder)
    return folder


def plan_of(prepared, base, *, quantize=None, adapter=None, **sections):
    facts = {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "down_proj"]} | (
        adapter or {}
    )
    sections["model"] = {"source": base} | sections.get("model", {})
    changed = {"adapter": Lora(**facts), "quantize": Quantize(**(quantize or {"kind": "nf4"}))}
    return tiny_plan(prepared, config=CONFIG, **sections).model_copy(update=changed)


@pytest.mark.parametrize(
    ("sections",),
    crossed(
        {
            "lora": ({"kind": "nf4"}, {"dropout": 0.2}, {"precision": "float32"}),
            "dora": (
                {"kind": "nf4", "double_quant": False},
                {"kind": "dora"},
                {"precision": "bfloat16"},
            ),
            "pissa": ({"kind": "int8"}, {"init": "pissa"}, {"precision": "float16"}),
            "whole": (
                {"kind": "nf4"},
                {"modules_to_save": ["norms"], "target_modules": ["all-linear"]},
                {"precision": "bfloat16-pure"},
            ),
            "checkpointed": ({"kind": "nf4"}, {}, {"activation_checkpointing": "selective"}),
        },
        quick="dora pissa checkpointed",
    ),
)
def test_a_run_learns_and_resumes_bitwise(prepared, base, tmp_path, sections):
    quantize, adapter, train = sections
    plan = plan_of(prepared, base, quantize=quantize, adapter=adapter, train={"steps": 5} | train)
    whole = resumed_bitwise(plan, tmp_path)
    assert whole.losses()[5] < whole.losses()[1]
    assert not (whole.checkpoint(5) / "model.safetensors").exists()


def test_losses_stay_near_those_of_a_float_base(prepared, base, tmp_path):
    kinds = [{"kind": "none"}, {"kind": "int8"}, {"kind": "nf4"}]
    plans = [plan_of(prepared, base, quantize=kind, train={"steps": 4}) for kind in kinds]
    runs = [Run(plan, tmp_path / plan.quantize.kind).losses() for plan in plans]
    away = [max(abs(run[step] - runs[0][step]) for step in run) for run in runs]
    assert 0 < away[1] < away[2] < 0.05


def test_what_is_held_is_what_the_plan_says(prepared, base):
    model = build_state(
        plan_of(prepared, base, train={"precision": "bfloat16"})
    ).model_and_optimizer.model
    inside = {
        name: shape
        for name, shape in parameter_shapes(CONFIG).items()
        if ".layers." in name and len(shape) == 2
    }
    held = sum(buffer.nbytes for buffer in model.buffers())
    assert held == sum(storage_bytes(shape, "nf4", True) for shape in inside.values())
    assert inside.keys() == dict(quantized_weights(model)).keys()
    assert not inside.keys() & dict(model.named_parameters()).keys()


def test_merging_takes_the_weights_that_the_base_came_from(prepared, base, tmp_path):
    """Never the 4-bit ones: what quantisation lost would stay lost."""
    plan = plan_of(prepared, base, train={"steps": 3}, optimizer={"learning_rate": 0.03})
    checkpoint = Run(plan, tmp_path / "run").checkpoint(3)
    pairs = load_file(checkpoint / "adapter_model.safetensors")
    original = load_file(base / "model.safetensors")
    merged = merged_state(load_decoder(checkpoint), torch.float32)
    name = "model.layers.1.self_attn.q_proj"
    B, A = (pairs[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "BA")
    torch.testing.assert_close(
        merged[f"{name}.weight"], original[f"{name}.weight"] + 2.0 * (B @ A), atol=1e-6, rtol=0
    )
    assert torch.equal(
        merged["model.layers.0.mlp.up_proj.weight"], original["model.layers.0.mlp.up_proj.weight"]
    )


def parts_on_rank(plan_json: str) -> dict[str, list[str]]:
    """The codes and scales of each quantized weight that this rank holds, as hexadecimal digits."""
    plan = RunPlan.model_validate_json(plan_json)
    model = build_state(plan, mesh=join(plan.train)).model_and_optimizer.model
    return {
        name: [
            local(part.detach()).cpu().view(torch.uint8).numpy().tobytes().hex() for part in parts
        ]
        for name, weight in quantized_weights(model)
        for parts in [(weight.codes, weight.scales)]
    }


@pytest.mark.parametrize(
    "quantize", [{"kind": "nf4"}, {"kind": "nf4", "double_quant": False}, {"kind": "int8"}], ids=str
)
def test_shards_hold_the_bytes_of_one_device_between_them(prepared, base, quantize):
    plan = plan_of(prepared, base, quantize=quantize)
    several = on_ranks(plan, shard=3)  # which no number of bytes here is a multiple of
    first, *others = ranks(3).call(parts_on_rank, several.model_dump_json())
    whole = dict(quantized_weights(build_state(plan).model_and_optimizer.model))
    assert first.keys() == whole.keys()
    for name, weight in whole.items():
        for index, tensor in enumerate((weight.codes, weight.scales)):
            parts = [rank[name][index] for rank in (first, *others)]
            assert "".join(parts) == tensor.cpu().view(torch.uint8).numpy().tobytes().hex(), name
            assert len(parts[0]) == 2 * -(-tensor.numel() // 3)
