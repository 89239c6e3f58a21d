"""Memory of layers with one norm for attention and MLP, with norms of rotated heads, with an MLP without a gate."""

from dataclasses import replace

import pytest
from steps_for_tests import counted, measured, simulated, small_plan

from bloomery.facts.config import ModelConfig
from bloomery.recipe.schema import Lora, NoAdapter

pytestmark = pytest.mark.soak
LLAMA = ModelConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_positions=256,
)
CONFIGS = {
    "cohere": replace(
        LLAMA,
        family="cohere",
        norm="layer",
        norm_bias=False,
        norm_placement="shared",
        rope_interleave=True,
        logit_scale=0.25,
    ),
    "hunyuan": replace(LLAMA, family="hunyuan_v1_dense", qk_norm="rotated_head"),
    "nemotron": replace(
        LLAMA, family="nemotron", norm="layer_unit_offset", gated_mlp=False, activation="relu2"
    ),
    "sinks": replace(LLAMA, attention_sinks=True),
}
LORA = Lora(kind="lora", rank=8, target_modules=["all-linear"])


@pytest.mark.parametrize("adapter", [NoAdapter(), LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", CONFIGS)
def test_three_figures_agree(name: str, adapter: Lora | NoAdapter) -> None:
    plan = small_plan(sizes={"vocab_size": 1024}, precision="bfloat16")
    model = plan.model.model_copy(update={"config": CONFIGS[name]})
    plan = plan.model_copy(update={"model": model, "adapter": adapter})
    real = measured(plan)
    assert simulated(plan) == pytest.approx(real, rel=0.01)
    assert counted(plan) == pytest.approx(real, rel=0.02)
