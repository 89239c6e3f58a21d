"""Memory of an activation with numbers of its own: from shapes, on fake tensors, measured."""

import pytest
from steps_for_tests import counted, measured, simulated, small_plan

pytestmark = pytest.mark.soak
SIZES = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "head_dim": 64}
LORA = {"kind": "lora", "rank": 8, "target_modules": ["all-linear"]}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bfloat16"},
        {"precision": "bfloat16", "activation_checkpointing": "full"},
        {"precision": "bfloat16", "adapter": LORA},
    ],
)
def test_three_figures_agree(settings) -> None:
    plan = small_plan("apertus", sizes=SIZES | {"intermediate_size": 1024}, rows=2, **settings)
    real = measured(plan)
    assert simulated(plan) == pytest.approx(real, rel=0.01)
    assert counted(plan) == pytest.approx(real, rel=0.03)
