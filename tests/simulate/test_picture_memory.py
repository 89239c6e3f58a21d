"""A plan has the memory of a step with pictures: of three sizes, with a tower that is frozen or trained."""

from itertools import product

import picture_steps
import pytest
from picture_steps import planned_and_measured, wide_config

import tiny_composites

SIZES = ((128, 128), (256, 192), (384, 320))
FROZEN = ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "mistral3", "smolvlm")
WHOLE = ("adapter.kind=none", "vision.train=all")
FIRST_STAGE = ("adapter.kind=none", "vision.train=projector", "vision.freeze_language_model=true")


@pytest.fixture
def wide(monkeypatch):
    """A function that gives the tiny model of a kind a tower that weighs more than its language model."""

    def widen(kind):
        config = wide_config(kind)
        monkeypatch.setitem(tiny_composites.CONFIGS, kind, config)
        monkeypatch.setitem(picture_steps.CONFIGS, kind, config)

    return widen


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("kind", "size", "precision"), [*product(FROZEN, SIZES, ("float32", "bfloat16"))]
)
def test_the_plan_has_the_memory_of_a_step(kind, size, precision, wide, tmp_path):
    wide(kind)
    plan, planned, measured = planned_and_measured(tmp_path, kind, size, precision=precision)
    assert plan.memory.parts["pictures"] > 0
    assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.soak
@pytest.mark.parametrize("edits", [WHOLE, FIRST_STAGE])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_plan_has_the_memory_of_a_tower_that_is_trained(edits, precision, wide, tmp_path):
    wide("qwen3_vl")
    _, planned, measured = planned_and_measured(
        tmp_path, "qwen3_vl", SIZES[2], *edits, precision=precision
    )
    assert planned == pytest.approx(measured, rel=0.05)
