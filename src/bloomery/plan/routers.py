"""How the experts of a mixture are balanced: the choices of a plan, with their reasons, and what it refuses."""

from collections.abc import Iterator

from bloomery.core import Choice
from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.model.adapters.settings import modules_to_save
from bloomery.plan.choices import ASKED
from bloomery.plan.types import RouterPlan
from bloomery.recipe.schema import Adapter, Lora, NoAdapter, Recipe, RouterSection

ROUTER = ".mlp.gate"  # how the names of routers end
# The largest coefficient of a config that `auto` takes, ten times the largest default of a class of transformers; and
# what it takes instead, the default of most.
LARGEST_STATED = 0.1
USUAL_LOSS = 0.001


def router_plan(recipe: Recipe, config: ModelConfig) -> RouterPlan | None:
    """None for a model whose experts this version does not compute, or that has none."""
    if config.experts is None or config.transformers_backend is not None:
        return None
    section = recipe.router
    return RouterPlan(
        loss=choose_loss(recipe, config).value,
        z_loss=section.z_loss or 0.0,
        bias_update=section.bias_update or 0.0,
        counts=section.counts,
        pooled=section.pooled,
    )


def choose_loss(recipe: Recipe, config: ModelConfig) -> Choice[float]:
    """The coefficient of the loss that evens the load of the experts."""
    assert config.experts is not None, "only mixtures have a router"
    asked = recipe.router.loss
    stated = config.experts.balance
    if asked != "auto":
        return Choice(0.0 if asked == "none" else asked, ASKED)
    if recipe.router.bias_update:
        return Choice(0.0, "router.bias_update evens the load without a loss")
    if not trains_router(recipe.adapter, config):
        reason = "the adapter leaves the router frozen"
        return Choice(0.0, f"{reason}; the config's {stated:g} is for full training")
    if not stated:
        return Choice(0.0, "the model's config states no coefficient (router_aux_loss_coef)")
    if stated > LARGEST_STATED:
        # gpt-oss: 0.9, which transformers reads and, with output_router_logits off, does not apply.
        reason = (
            f"the config's router_aux_loss_coef {stated:g} would outweigh the loss of tokens; this is transformers' "
            f"default, router.loss={stated:g} takes the other"
        )
        return Choice(USUAL_LOSS, reason)
    return Choice(stated, "router_aux_loss_coef of the model's config")


def trains_router(adapter: Adapter, config: ModelConfig) -> bool:
    if isinstance(adapter, NoAdapter):
        return True
    if not isinstance(adapter, Lora):
        return False
    saved = modules_to_save(config, adapter.modules_to_save)
    return any(module.endswith(ROUTER) for module in saved)


def counts_first(recipe: Recipe, config: ModelConfig) -> bool:
    """Whether a step of several micro-batches counts the load of the experts before its first backward."""
    plan = router_plan(recipe, config)
    return plan is not None and plan.loss > 0 and plan.counts == "step"


def router_choices(
    recipe: Recipe, config: ModelConfig, *, accumulation: int
) -> Iterator[tuple[str, Choice[str]]]:
    """By key: what evens the load of the experts, and what it costs. `accumulation`: micro-batches of a step."""
    plan = router_plan(recipe, config)
    if plan is None:
        return
    loss = choose_loss(recipe, config)
    value = f"balance loss {loss.value:g}" if loss.value else "no balance loss"
    reason = loss.reason
    if loss.value and plan.counts == "step" and accumulation > 1:
        reason += (
            f"; one more forward of the layers per step counts the load of its {accumulation:,} micro-batches"
            " first, so that they train as one; router.counts=micro_batch: without it"
        )
    elif loss.value and accumulation > 1:
        reason += "; of each micro-batch by itself: stronger than that of the whole step"
    yield "router.loss", Choice(value, reason)
    if plan.z_loss:
        yield "router.z_loss", Choice(f"router z-loss {plan.z_loss:g}", f"{ASKED}; no more passes")
    if plan.bias_update:
        reason = f"{ASKED}; after each step the bias of an expert moves by it towards an even load"
        yield "router.bias_update", Choice(f"bias update {plan.bias_update:g}", reason)


def refuse_router(recipe: Recipe, config: ModelConfig) -> None:
    """Raises UserError for a router that the model does not have, or that cannot be balanced as the recipe asks."""
    section = recipe.router
    asked = [
        name
        for name, field in RouterSection.model_fields.items()
        # No loss is what every other model has.
        if getattr(section, name) not in (field.default, "none", 0)
    ]
    if not asked:
        return
    where = f"router.{asked[0]}={getattr(section, asked[0])}"
    if config.experts is None or config.transformers_backend is not None:
        problem = "the model has no experts whose load a router could even"
        if config.transformers_backend is not None:
            problem = "routers of the transformers implementation are not balanced here"
        raise UserError(problem, where=where, fix="leave out router", code=2)
    if section.bias_update and not config.experts.choice_bias:
        is_new = recipe.model.from_ is None
        family = "set model.family=glm4_moe, which has them, or " if is_new else ""
        raise UserError(
            "the routers of this model have no bias of the choice (e_score_correction_bias)",
            where=f"router.bias_update={section.bias_update:g}",
            fix=f"{family}set router.loss={config.experts.balance or 0.001:g}, which every router takes",
            code=2,
        )
    if section.bias_update and not isinstance(recipe.adapter, NoAdapter):
        raise UserError(
            "an adapter does not store the biases of its base model's routers",
            where=f"router.bias_update={section.bias_update:g}",
            fix="leave it out, or set adapter.kind=none",
            code=2,
        )
