"""Mixtures of experts on several ranks: losses, weights, checkpoints and states of one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import assert_same_tensors
from test_rank_writers import (
    HALF,
    STEPS,
    parts_in_files,
    saved_by_one_rank,
    step_of,
    tensors,
    train_divided,
)

from bloomery.facts.config import Experts
from bloomery.facts.hf_config import config_from_hf
from bloomery.plan.types import RouterPlan
from ranks import fields, losses, on_ranks, train


def mixture(**changes: Any):
    """Two layers with experts, of widths whose matrices are whole blocks of int8 states."""
    experts = {"count": 4, "per_token": 2, "width": 16, "normalize": True} | changes.pop(
        "experts", {}
    )
    facts = {"vocab_size": 300, "tie_embeddings": False, "family": "qwen3_moe"}
    return tiny_config(experts=Experts(**experts), **facts | changes)


def mixtral():
    return mixture(family="mixtral", qk_norm="none", intermediate_size=16)


def oss():
    """Its stacks are files' tensors, transposed, and gate and up take turns in their rows."""
    from transformers import GptOssConfig

    widths = {"hidden_size": 32, "intermediate_size": 24, "head_dim": 16, "vocab_size": 300}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
    rotation = {"rope_type": "default", "rope_theta": 1e4}
    theirs = GptOssConfig(**widths, **heads, **experts, sliding_window=8, rope_parameters=rotation)
    return config_from_hf(theirs.to_dict())


def plan_of(prepared: Path, *, config: Any = None, **sections: Any):
    train = {"micro_batch_size": 2, "accumulation": 2, "tokens_per_step": 128, "steps": STEPS}
    return tiny_plan(
        prepared,
        config=config or mixture(),
        train=train | sections.pop("train", {}),
        checkpoint={"every_steps": HALF},
        eval={"every_steps": HALF},
        **sections,
    )


def norms(events: list[Any]) -> list[float]:
    return [event["grad_norm"] for event in fields(events, "StepDone")]


MESHES = {
    "2 shards": {"shard": 2},
    "4 shards": {"shard": 4},
    "2 copies": {"replicate": 2},
    "2 x 2": {"replicate": 2, "shard": 2},
}
# Two experts on three ranks: the last one has none.
FEW = {"experts": {"count": 2, "per_token": 1, "normalize": False}}


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        pytest.param({"shard": 2}, {}, id="2 shards"),
        pytest.param({"shard": 3}, FEW, id="more ranks than experts"),
        pytest.param({"replicate": 2, "shard": 2}, {}, id="2 x 2", marks=pytest.mark.soak),
        pytest.param({"replicate": 2}, {}, id="2 copies", marks=pytest.mark.soak),
    ],
)
def test_ranks_train_and_save_as_one_rank(prepared, tmp_path, mesh, changes) -> None:
    plan = plan_of(prepared, config=mixture(**changes))
    several = on_ranks(plan, **mesh)
    alone = train(plan, tmp_path / "one")
    many = train(several, tmp_path / "many")
    assert losses(many) == pytest.approx(losses(alone), rel=0, abs=1e-6)
    assert norms(many) == pytest.approx(norms(alone), rel=1e-5)
    one, other = (tensors(step_of(tmp_path / name, STEPS)) for name in ("one", "many"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            other[name], tensor, rtol=0, atol=1e-3 * float(tensor.abs().max()), msg=name
        )


@pytest.mark.parametrize(
    ("mesh", "config_of"),
    [
        pytest.param({"replicate": 2, "shard": 2}, mixture, id="2 x 2"),
        pytest.param({"shard": 3}, lambda: mixture(**FEW), id="more ranks than experts"),
        pytest.param({"pipeline": 2, "shard": 2}, mixtral, id="2 stages of 2 shards"),
        pytest.param({"shard": 2}, oss, id="stacks in files"),
    ],
)
def test_ranks_write_the_files_of_one_rank(prepared, tmp_path, mesh, config_of) -> None:
    """Divided over all ranks the same tensors; in one file of each part the same bytes. transformers opens them."""
    from transformers import AutoModelForCausalLM

    config = config_of()
    plan = plan_of(
        prepared, config=config, model={"attention": "math" if config.attention_sinks else "mask"}
    )
    several = on_ranks(plan, **mesh)
    train_divided(several, tmp_path / "divided", stop_after=HALF)
    divided = step_of(tmp_path / "divided", HALF)
    assert parts_in_files(divided)["model"] > 1
    train(several, tmp_path / "small", stop_after=HALF)
    small = step_of(tmp_path / "small", HALF)
    assert_same_tensors(tensors(divided), tensors(small))

    copy = saved_by_one_rank(plan, divided, tmp_path / "one")
    for name in ("model.safetensors", "optimizer.safetensors", "config.json"):
        assert (copy / name).read_bytes() == (small / name).read_bytes(), name
    _, report = AutoModelForCausalLM.from_pretrained(divided, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


@pytest.mark.parametrize("after", [{}, {"shard": 4}, {"replicate": 2}], ids=str)
def test_other_ranks_take_over(prepared, tmp_path, after) -> None:
    """What another mesh reads and saves again is bitwise what was saved, and training goes on as on one rank."""
    plan = plan_of(prepared)
    whole = train(plan, tmp_path / "whole")
    train(on_ranks(plan, shard=2), tmp_path / "two", stop_after=HALF)
    checkpoint = step_of(tmp_path / "two", HALF)
    other = on_ranks(plan, **after)
    rest = train(other, tmp_path / "rest", resume_from=checkpoint)
    expected = {step: loss for step, loss in losses(whole).items() if step > HALF}
    assert losses(rest) == pytest.approx(expected, rel=0, abs=1e-6)
    if other.train.ranks > 1:
        train_divided(other, tmp_path / "copy", checkpoint, stop_after=0)
        assert_same_tensors(tensors(step_of(tmp_path / "copy", HALF)), tensors(checkpoint))


# The states of stacks: of AdamW in 8 bits (blocks of 256, which no expert shares), of single matrices in Muon, factored
# in Adafactor.
OPTIMIZERS = {
    "int8": {"state_dtype": "int8", "fused": False},
    "bfloat16": {"state_dtype": "bfloat16", "fused": False},
    "muon": {"kind": "muon"},
    "adafactor": {"kind": "adafactor"},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_stacks_are_those_of_one_rank(prepared, tmp_path, name) -> None:
    config = mixture(hidden_size=64, vocab_size=512) if name == "int8" else mixture()
    plan = plan_of(prepared, config=config, optimizer=OPTIMIZERS[name])
    alone = train(plan, tmp_path / "one")
    two = train(on_ranks(plan, shard=2), tmp_path / "two")
    near = 5e-4 if name == "muon" else 1e-5  # Newton-Schulz runs in bfloat16
    assert losses(two) == pytest.approx(losses(alone), rel=0, abs=near)
    one, other = (tensors(step_of(tmp_path / run, STEPS)) for run in ("one", "two"))
    assert {key: value.shape for key, value in other.items()} == {
        key: value.shape for key, value in one.items()
    }
    # Exactly what it saved goes on, on four ranks.
    checkpoint = step_of(tmp_path / "two", HALF)
    four = on_ranks(plan, shard=4)
    rest = train(four, tmp_path / "four", resume_from=checkpoint)
    expected = {step: loss for step, loss in losses(two).items() if step > HALF}
    assert losses(rest) == pytest.approx(expected, rel=0, abs=near)
    copy = saved_by_one_rank(four, checkpoint, tmp_path / "copy")
    assert_same_tensors(tensors(copy), tensors(checkpoint))


@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_pipeline_of_mixtures_resumes_bitwise(prepared, tmp_path, chunks) -> None:
    """Stages with experts in some of their layers, whose balance fills the loss."""
    experts = {"layers": (False, True, True, True)}
    config = mixture(num_layers=4, experts=experts)
    plan = plan_of(prepared, config=config, train={"router": RouterPlan(loss=0.1)})
    schedule = "interleaved" if chunks > 1 else "1f1b"
    several = on_ranks(plan, pipeline=2, chunks=chunks, schedule=schedule)
    whole = train(several, tmp_path / "whole")
    train(several, tmp_path / "rest", stop_after=HALF)
    rest = train(several, tmp_path / "rest", resume_from=step_of(tmp_path / "rest", HALF))
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > HALF}
    one, other = (tensors(step_of(tmp_path / name, STEPS)) for name in ("whole", "rest"))
    assert_same_tensors(one, other)
    alone = losses(train(plan, tmp_path / "one"))
    assert losses(whole) == pytest.approx(alone, rel=0, abs=1e-6)
