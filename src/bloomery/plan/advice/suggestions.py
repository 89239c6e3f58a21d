"""Recipe edits that make a run fit or make it faster, cheapest first; each is planned again before it is offered."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bloomery.core.choice import Choice
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes, format_count, format_seconds
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.plan.estimate.states import (
    FULL,
    Way,
    adapter_bytes,
    held_bytes,
    largest,
    learning_bytes,
    optimizer_bytes,
    way_of,
)
from bloomery.plan.types import Plan, Remedy
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.schema import Recipe


def arithmetic_choices(recipe: Recipe, config: ModelConfig, *, precision: str) -> Iterator[tuple[str, Choice[str]]]:
    """By key, bytes of weights, gradients and states beside those of training everything."""
    if recipe.model.from_ is None:
        return
    whole = state_parts(config, FULL, "adamw", "bfloat16")
    each = {name: size / parameter_count(config) for name, size in whole.items()}
    rule = f"{sum(each.values()):.0f} bytes ({', '.join(f'{name} {size:.0f}' for name, size in each.items())})"
    held = state_parts(config, way_of(recipe, config), recipe.optimizer.kind, precision)
    count, in_full = format_count(parameter_count(config)), _decimal(sum(whole.values()))
    if held == whole:
        yield "model.from", Choice(f"{in_full} to train all", f"each of {count} parameters holds {rule}")
        return
    told = ", ".join(f"{name} {_decimal(size)}" for name, size in held.items())
    because = f"{told}; in full with AdamW each of {count} parameters holds {rule}"
    yield "model.from", Choice(f"{_decimal(sum(held.values()))}, not {in_full}", because)


def state_parts(config: ModelConfig, way: Way, kind: str, precision: str) -> dict[str, float]:
    """Bytes that lie there whatever the text is. A gradient that is used in backward is the largest one alone."""
    learning = largest(config, way, precision) if way.in_backward else learning_bytes(config, way, precision)
    return {
        "weights": held_bytes(config, way, precision) + adapter_bytes(config, way),
        "gradients": learning,
        "states": optimizer_bytes(config, way, kind, precision),
    }


def _decimal(size: float) -> str:
    """In decimal units, as this arithmetic is done everywhere."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


WORTH = 0.9  # of the time: an edit that saves less than a tenth is not offered
LITTLE = 0.05  # of the memory: shorter rows that save less and are not enough are not offered
SHORTEST = 256  # tokens of a row that a plan would still propose
PlanOf = Callable[[LoadedRecipe], Plan]


def remedies(loaded: LoadedRecipe, plan: Plan, plan_of: PlanOf) -> tuple[Remedy, ...]:
    """What makes a run fit that does not; what makes one clearly faster that its recipe slows down."""
    return tuple(_to_fit(loaded, plan, plan_of) if not plan.fits else _faster(loaded, plan, plan_of))


def edited(loaded: LoadedRecipe, edit: str) -> LoadedRecipe:
    """The recipe with overrides ("train.micro_batch=8 optimizer.kind=muon"), as the command line lays them on it."""
    data = loaded.recipe.model_dump(by_alias=True)
    for word in edit.split():
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        data[section][name] = int(value) if value.isdigit() else value
    return LoadedRecipe(Recipe.model_validate(data), loaded.name, loaded.provenance)


def _to_fit(loaded: LoadedRecipe, plan: Plan, plan_of: PlanOf) -> Iterator[Remedy]:
    """What is enough alone, shorter rows only where nothing else is; or each rung, and the fewest that are together."""
    rungs = _best_of_each_key([rung for rung in _tried(loaded, plan, plan_of) if not rung.idle])
    enough = [rung for rung in rungs if rung.after.fits]
    others = [rung for rung in enough if not rung.shortens]
    shown = enough if loaded.recipe.model.from_ is not None else others  # of a tuning, rows are the user's choice, too
    for rung in shown or enough or rungs:
        yield Remedy(edit=rung.edit, saves=_saved(plan, rung.after, rung.cost))
    for count in range(2, 0 if enough else len(rungs) + 1):
        together = " ".join(rung.edit for rung in rungs[:count])
        tried = _planned(loaded, together, plan_of)
        if tried is not None and tried.fits:
            yield Remedy(edit=together, saves=_saved(plan, tried, "all of these"))
            return


@dataclass(frozen=True)
class _Rung:
    """An edit, what it costs in words, and the plan without and with it."""

    edit: str
    cost: str
    before: Plan
    after: Plan

    @property
    def key(self) -> str:
        return self.edit.partition("=")[0]

    @property
    def shortens(self) -> bool:
        return self.key == "data.sequence_length"

    @property
    def idle(self) -> bool:
        """It saves nothing, or for another training next to nothing."""
        left = self.after.memory.total / self.before.memory.total
        return left >= 1 or (self.shortens and left > 1 - LITTLE and not self.after.fits)


def _tried(loaded: LoadedRecipe, plan: Plan, plan_of: PlanOf) -> Iterator[_Rung]:
    for edit, cost in _ladder(loaded.recipe, plan):
        after = _planned(loaded, edit, plan_of)
        if after is not None:
            yield _Rung(edit, cost, plan, after)


def _best_of_each_key(rungs: list[_Rung]) -> list[_Rung]:
    """The first that is enough, else the one that saves most: half a micro-batch need not be followed by a quarter."""
    found: dict[str, _Rung] = {}
    for rung in rungs:
        held = found.get(rung.key)
        if held is None or (not held.after.fits and rung.after.memory.total < held.after.memory.total):
            found[rung.key] = rung
    return list(found.values())


def _ladder(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, str]]:
    """Edits that this version accepts, by what they cost, with that cost in words."""
    train, asked = plan.train, recipe.train
    rows = train.micro_batch
    while asked.micro_batch != "auto" and rows % 2 == 0:
        rows //= 2
        yield f"train.micro_batch={rows}", "the same training"
    if train.activation_checkpointing not in ("full", "selective"):
        yield "train.activation_checkpointing=selective", "a sixth more compute"
    if train.activation_checkpointing != "full":
        yield "train.activation_checkpointing=full", "a third more compute"
    if asked.precision == "float32" and plan.train.device != "cpu":
        yield "train.precision=auto", "half-precision products"
    yield from _lean(recipe, plan)
    yield from _smaller_steps(recipe, plan)
    if recipe.optimizer.kind == "adamw" and recipe.adapter.kind == "none":
        yield "optimizer.kind=muon", "another optimizer: its rates are to be chosen anew"
    if recipe.optimizer.kind != "adafactor" and recipe.adapter.kind == "none":
        yield "optimizer.kind=adafactor", "another optimizer: its rates are to be chosen anew"
    if train.precision == "bfloat16":
        yield "train.precision=bfloat16-pure", "weights round to 8 bits: small updates are lost"
    length = plan.data.sequence_length
    while length > SHORTEST and train.tokens_per_step % (length // 2) == 0:
        length //= 2
        yield f"data.sequence_length={length}", f"another training: the model never sees more than {length:,} tokens"


def _lean(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, str]]:
    """What holds states, activations or frozen weights in less, or elsewhere."""
    optimizer, gpu = recipe.optimizer, plan.train.device != "cpu"
    if gpu and not recipe.train.offload_activations:
        yield "train.offload_activations=true", "activations wait in the processor's memory and travel twice"
    if optimizer.kind == "adamw" and optimizer.states == "float32":
        yield "optimizer.states=int8", "states round to 8 bits; nearly the same training"
    if recipe.adapter.kind in ("lora", "dora") and recipe.quantize.base == "none":
        yield "quantize.base=nf4", "the frozen weights round to 4 bits, which costs time and some exactness"
    if recipe.adapter.kind == "none" and recipe.model.from_ is not None:
        yield "adapter.kind=lora", "another training: adapters learn, the weights stand still"


def _smaller_steps(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, str]]:
    """In backward a step is one micro-batch: what does not fit is a smaller step, or one whose gradients are kept."""
    if not recipe.optimizer.in_backward or recipe.train.tokens_per_step == "auto":
        return
    tokens = plan.train.tokens_per_step
    while tokens % (2 * plan.data.sequence_length) == 0:
        tokens //= 2
        yield f"train.tokens_per_step={tokens}", "another training: each step learns from fewer tokens"
    yield "optimizer.in_backward=false", "gradients are kept and added up over micro-batches"


def _faster(loaded: LoadedRecipe, plan: Plan, plan_of: PlanOf) -> Iterator[Remedy]:
    """What the recipe asks for and pays with time, where the plan's own choice is quicker and fits."""
    yield from _without_dropout(loaded, plan, plan_of)
    asked = loaded.recipe.train
    for key in ("activation_checkpointing", "precision", "attention", "compile", "micro_batch"):
        if getattr(asked, key) == "auto" or plan.step_seconds is None:
            continue
        tried = _planned(loaded, f"train.{key}=auto", plan_of)
        if tried is None or not tried.fits or tried.step_seconds is None:
            continue
        if tried.step_seconds.value < WORTH * plan.step_seconds.value:
            yield Remedy(edit=f"train.{key}=auto", saves=_hurried(plan, tried))


def _without_dropout(loaded: LoadedRecipe, plan: Plan, plan_of: PlanOf) -> Iterator[Remedy]:
    """Fused attention has no dropout on packed rows: where that costs much it is said, with what dropping it means."""
    if plan.model.config.attention_dropout == 0 or plan.step_seconds is None or loaded.recipe.train.attention != "auto":
        return
    tried = _planned(loaded, "model.dropout=0", plan_of)
    if tried is None or not tried.fits or tried.step_seconds is None:
        return
    if tried.model.attention != plan.model.attention and tried.step_seconds.value < WORTH * plan.step_seconds.value:
        price = "another training: it learns a text seen many times by heart sooner"
        yield Remedy(edit="model.dropout=0", saves=f"{_hurried(plan, tried)}; {price}")


def _planned(loaded: LoadedRecipe, edit: str, plan_of: PlanOf) -> Plan | None:
    """None where the edit contradicts the rest of the recipe."""
    try:
        return plan_of(edited(loaded, edit))
    except UserError:
        return None


def _saved(before: Plan, after: Plan, cost: str) -> str:
    saved = format_bytes(before.memory.total - after.memory.total)
    verdict = "fits" if after.fits else "still too much"
    return f"{saved}: {format_bytes(after.memory.total)} in all, {verdict}; {cost}"


def _hurried(before: Plan, after: Plan) -> str:
    assert before.step_seconds is not None
    assert after.step_seconds is not None
    share = 1 - after.step_seconds.value / before.step_seconds.value
    if before.seconds is None or after.seconds is None:
        return f"{share:.0%} of the time"
    saved = format_seconds(before.seconds.value - after.seconds.value)
    return f"{share:.0%} of the time: {saved}"
