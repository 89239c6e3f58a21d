"""How a plan balances experts: coefficients with their reasons, refusals, and what counting a step first costs."""

from dataclasses import replace

import pytest
from plan_help import SMALL, gpu_machine, loaded, machine, planned

from bloomery.core.errors import UserError
from bloomery.plan.routers import choose_loss
from bloomery.plan.types import RouterPlan

EXPERTS = {"count": 8, "per_token": 2, "width": 64}
MIXTURE = {"family": "qwen3_moe", "experts": EXPERTS}


def router_of(**sections) -> tuple[RouterPlan | None, dict[str, str]]:
    """The plan of the router, and its choices as text."""
    plan = planned(loaded(model=sections.pop("model", MIXTURE), **sections), machine())
    choices = {c.key: f"{c.value}: {c.reason}" for c in plan.choices if c.key.startswith("router")}
    return plan.train.router, choices


def test_full_training_takes_the_coefficient_of_the_config():
    router, choices = router_of()
    assert router == RouterPlan(loss=0.001)
    assert choices.keys() == {"router.loss"}
    assert "router_aux_loss_coef" in choices["router.loss"]
    olmoe, _ = router_of(model=MIXTURE | {"family": "olmoe", "intermediate_size": 64})
    assert olmoe == RouterPlan(loss=0.01)


@pytest.mark.parametrize(("stated", "taken"), [(0.1, 0.1), (0.9, 0.001)])
def test_a_coefficient_that_outweighs_the_loss_of_tokens_is_not_taken(stated, taken):
    recipe = loaded(model=MIXTURE)
    config = planned(recipe, machine()).model.config
    config = replace(config, experts=replace(config.experts, balance=stated))
    choice = choose_loss(recipe.recipe, config)
    assert choice.value == taken
    assert (f"router.loss={stated:g}" in choice.reason) == (stated != taken)


def test_a_frozen_router_has_no_loss_unless_asked():
    adapter = {"kind": "lora", "target_modules": ["q_proj"]}
    router, choices = router_of(adapter=adapter)
    assert router == RouterPlan()
    assert "frozen" in choices["router.loss"]
    asked, _ = router_of(adapter=adapter, router={"loss": 0.02})
    assert asked == RouterPlan(loss=0.02)
    trained, _ = router_of(adapter=adapter | {"modules_to_save": ["mlp.gate"]})
    assert trained == RouterPlan(loss=0.001)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"loss": "none"}, RouterPlan()),
        ({"loss": 0}, RouterPlan()),
        ({"loss": 0.5, "z_loss": 0.25}, RouterPlan(loss=0.5, z_loss=0.25)),
        ({"pooled": False}, RouterPlan(loss=0.001, pooled=False)),
        ({"z_loss": "none", "counts": "micro_batch"}, RouterPlan(loss=0.001, counts="micro_batch")),
    ],
)
def test_a_recipe_has_the_last_word(asked, expected):
    assert router_of(router=asked)[0] == expected


def test_a_dense_model_has_no_router():
    assert router_of(model=SMALL) == (None, {})
    assert router_of(model=SMALL, router={"loss": "none"}) == (None, {})


@pytest.mark.parametrize("section", [{"loss": 0.1}, {"z_loss": 0.1}, {"bias_update": 0.1}])
def test_a_router_of_a_dense_model_is_refused(section):
    with pytest.raises(UserError) as error:
        router_of(model=SMALL, router=section)
    assert error.value.where.startswith(f"router.{next(iter(section))}")
    assert error.value.code == 2


def test_a_bias_update_needs_biases():
    with pytest.raises(UserError, match="e_score_correction_bias"):
        router_of(router={"bias_update": 0.001})


def test_counting_the_step_first_costs_a_forward_of_the_layers():
    def seconds(counts: str, size: int, gpu: str = "RTX 4090") -> float:
        recipe = loaded(
            model=MIXTURE | {"hidden_size": 512, "num_layers": 8, "experts": EXPERTS},
            router={"counts": counts},
            train={"tokens_per_step": 16384, "micro_batch_size": size},
        )
        estimate = planned(recipe, gpu_machine(gpu)).step_seconds
        assert estimate is not None
        return estimate.value

    assert seconds("step", 128) == seconds("micro_batch", 128)
    slower = seconds("step", 16) / seconds("micro_batch", 16)
    assert 1.1 < slower < 1.4


def test_the_choice_says_what_it_costs():
    batches = {"tokens_per_step": 1024, "micro_batch_size": 2}
    assert "one more forward" in router_of(train=batches)[1]["router.loss"]
    once = {"tokens_per_step": 1024, "micro_batch_size": 8}
    assert "forward" not in router_of(train=once)[1]["router.loss"]
