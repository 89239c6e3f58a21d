"""The check of a step against a device of which one operator gives wrong values: it names the part that uses it."""

from collections.abc import Iterator

import pytest
import simulated
from faulty_devices import plan_of

from bloomery.check.examination import examine

PARTS = {
    "aten::bmm": "results in attention",
    "aten::mm": "results in q_proj",
    "aten::silu": "results in MLP activation",
    "aten::silu_backward": "gradients in MLP activation",
    "aten::_fused_rms_norm": "results in input_layernorm",
    "aten::_fused_rms_norm_backward": "gradients in input_layernorm",
    "aten::embedding_dense_backward": "gradients in embedding",
    "aten::exp": "results in cross-entropy head",
}
QUICK = ("aten::mm",)


@pytest.fixture(autouse=True)
def right_again() -> Iterator[None]:
    yield
    simulated.faulty("", 1.0)


@pytest.mark.parametrize(
    "operator",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.soak) for name in PARTS],
)
def test_the_part_with_a_wrong_operator_is_named(operator: str) -> None:
    """Two percent too much, in every call."""
    simulated.faulty(operator, 1.02)
    assert examine(plan_of()).faults[0].text == f"computes wrong {PARTS[operator]}"
