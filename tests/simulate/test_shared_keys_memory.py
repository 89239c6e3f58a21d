"""Memory of layers that share keys and are given inputs: counted, simulated, and measured in live bytes."""

from dataclasses import replace

import pytest
from plans_for_tests import sharing_config
from steps_for_tests import counted, measured, simulated, small_plan

from bloomery.facts.config import Experts, LayerSizes
from bloomery.recipe.schema import Lora, NoAdapter

pytestmark = pytest.mark.soak
NARROW, WIDE = (
    LayerSizes(num_heads=4, num_kv_heads=2, head_dim=width, intermediate_size=384)
    for width in (32, 64)
)
E2B = replace(
    sharing_config(),
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=384,
    num_layers=6,
    head_dim=32,
    max_positions=256,
    layer_sizes=(NARROW, WIDE) * 3,
    sliding_window=(64, None) * 3,
    num_kv_shared_layers=3,
    per_layer_input_size=32,
)
UNIFIED = replace(
    E2B,
    family="gemma4_unified_text",
    num_kv_shared_layers=0,
    per_layer_input_size=0,
    keys_are_values=True,
    layer_sizes=(NARROW, replace(WIDE, num_kv_heads=1)) * 3,
)
# As the 26B: experts beside the MLP, with norms of their own.
MIXTURE = replace(
    UNIFIED,
    family="gemma4_text",
    experts=Experts(
        count=8,
        per_token=2,
        width=192,
        shared_width=384,
        normalize=True,
        normed_router=True,
        own_norms=True,
    ),
)
LORA = Lora(kind="lora", rank=8, target_modules=["all-linear"])


def plan_of(config, adapter=NoAdapter(), **settings):  # noqa: B008  # frozen
    plan = small_plan(sizes={"vocab_size": 1024}, **settings)
    model = plan.model.model_copy(update={"config": config})
    return plan.model_copy(update={"model": model, "adapter": adapter})


@pytest.mark.parametrize(
    ("config", "adapter", "settings"),
    [
        (E2B, NoAdapter(), {"activation_checkpointing": "full"}),
        (E2B, NoAdapter(), {}),
        (E2B, NoAdapter(), {"precision": "bfloat16"}),
        (E2B, NoAdapter(), {"micro_batches": 2}),
        (E2B, LORA, {"precision": "bfloat16"}),
        (UNIFIED, NoAdapter(), {}),
        (UNIFIED, NoAdapter(), {"precision": "bfloat16"}),
        (MIXTURE, NoAdapter(), {}),
        (MIXTURE, NoAdapter(), {"precision": "bfloat16"}),
        (MIXTURE, NoAdapter(), {"activation_checkpointing": "full"}),
        (MIXTURE, LORA, {"precision": "bfloat16"}),
    ],
)
def test_three_figures_agree(config, adapter, settings) -> None:
    plan = plan_of(config, adapter, **settings)
    real = measured(plan)
    assert simulated(plan) == pytest.approx(real, rel=0.01)
    assert counted(plan) == pytest.approx(real, rel=0.03)


def test_compiled_blocks_of_a_gpu_share_keys() -> None:
    plan = plan_of(E2B, device="cuda", precision="bfloat16", compile=True, attention="sdpa")
    assert counted(plan) == pytest.approx(simulated(plan), rel=0.08)
