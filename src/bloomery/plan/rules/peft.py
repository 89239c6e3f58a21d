"""Adapter methods of PEFT in a plan: what they are counted as, and what they do not go with. PEFT is not asked."""

from collections.abc import Iterator
from typing import Any

from bloomery.core.choice import Choice
from bloomery.core.errors import UserError
from bloomery.core.units import format_count
from bloomery.data.tokenizer.tokenizer import new_tokens
from bloomery.model.adapters.peft_settings import method_settings, named, targets_of
from bloomery.model.adapters.targets import ALL_LINEAR, adaptation, refuse_untrained_rows
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.model.families.presets import known_config
from bloomery.recipe.schema import Lora, NoAdapter, Peft, Recipe

RANKS = ("init_r", "r", "rank")  # the keys that say a rank; init_r is AdaLoRA's at the start, when it needs most
USUAL_RANKS = {"ADALORA": 12}  # PEFT's AdaLoraConfig.init_r; of the others 8


def counted_as(adapter: Peft, config: ModelConfig) -> Lora:
    """The LoRA whose memory and time stand for the method's: of its rank, on its modules."""
    said: dict[str, Any] = adapter.model_extra or {}
    usual = USUAL_RANKS.get(named(adapter.method), 8)
    rank = next((said[key] for key in RANKS if isinstance(said.get(key), int) and said[key] > 0), usual)
    targets = targets_of(adapter, config)
    lora = Lora(kind="lora", rank=rank, targets=[targets] if isinstance(targets, str) else list(targets))
    try:
        adaptation(config, lora)
    except UserError:  # a regular expression, which only PEFT reads: at most everything
        return lora.model_copy(update={"targets": [ALL_LINEAR]})
    return lora


def refuse_method_misfits(recipe: Recipe) -> None:
    """Raises UserError for what PEFT's layers cannot do inside of this decoder."""
    if not isinstance(recipe.adapter, Peft):
        return
    name = named(recipe.adapter.method)
    method = f"adapter.method={recipe.adapter.method}"
    if recipe.objective.spec.values:
        problem = "a reward model's values head must learn beside the adapter, and PEFT's methods leave it alone"
        raise UserError(problem, where=method, remedy="set adapter.kind=lora, which trains it, too", code=2)
    if recipe.quantize.base != "none":
        problem = "PEFT's methods need a base in floating point: they read its matrices themselves"
        remedy = "set quantize.base=none, or adapter.kind=lora, which trains beside a quantised base"
        raise UserError(problem, where=method, remedy=remedy, code=2)
    if recipe.optimizer.in_backward:
        problem = "a method of PEFT looks at all gradients together after an update, and in backward they are gone"
        raise UserError(problem, where=method, remedy="set optimizer.in_backward=false", code=2)
    if recipe.train.compile is True:
        problem = "PEFT's layers change while they train, and compiled blocks would be compiled again each time"
        raise UserError(problem, where=method, remedy="set train.compile=false", code=2)
    total = (recipe.adapter.model_extra or {}).get("total_step")
    if name == "ADALORA" and recipe.train.length.unit == "seconds" and not total:
        problem = "AdaLoRA's ranks follow the number of steps, which a wall-time length does not tell"
        raise UserError(problem, where="train.length", remedy='set it to steps: train.length="500 steps"', code=2)


def refuse_settings(recipe: Recipe, config: ModelConfig, *, steps: int | None) -> None:
    """Raises UserError for what PEFT would refuse of its own keys. `steps`: of the run, None where they are guessed."""
    if isinstance(recipe.adapter, Peft):
        method_settings(recipe.adapter, config, steps=steps)


def method_choices(recipe: Recipe, config: ModelConfig) -> Iterator[tuple[str, Choice[str]]]:
    """By key, what is asked for and how it is planned."""
    if isinstance(recipe.adapter, Peft):
        lora = counted_as(recipe.adapter, config)
        because = f"PEFT trains it in this decoder; memory and time are those of a LoRA of rank {lora.rank}"
        yield "adapter.kind", Choice(f"PEFT's {recipe.adapter.method}", because)


def refuse_new_rows(recipe: Recipe, config: ModelConfig) -> None:
    """Raises UserError where an adapter would leave new tokens untrained."""
    if isinstance(recipe.adapter, NoAdapter) or (known := known_tokens(recipe)) is None:
        return
    # Where the vocabulary is padded (Qwen2.5), new tokens take rows that are there and were never learned.
    new = max(config.vocab_size - known, new_tokens(recipe))
    if isinstance(recipe.adapter, Lora):
        refuse_untrained_rows(config, recipe.adapter, new=new)
    if isinstance(recipe.adapter, Peft) and new:
        raise UserError(
            f"{new} tokens are new to the model, and a method of PEFT would never learn them",
            where=f"adapter.method={recipe.adapter.method}",
            remedy="set adapter.kind=lora adapter.train_also=[embed_tokens, lm_head]", code=2,
        )  # fmt: skip


def known_tokens(recipe: Recipe) -> int | None:
    """The vocabulary of the model that training starts from; None for a fresh one."""
    return None if recipe.model.from_ is None else known_config(recipe.model.from_).vocab_size


def adapter_choices(recipe: Recipe, config: ModelConfig) -> Iterator[tuple[str, Choice[str]]]:
    """By key, what is asked for and what it means for this model."""
    if isinstance(recipe.adapter, Lora):
        yield "adapter.kind", Choice(f"{_kind(recipe.adapter)}, rank {recipe.adapter.rank}", _share(recipe, config))
    known = known_tokens(recipe)
    if known is not None and (new := max(config.vocab_size - known, new_tokens(recipe))):
        told = f"{new:,} new token{'s' if new > 1 else ''}"
        yield "model.vocab_size", Choice(told, "rows of the embedding and the head begin as the mean of the others")


def _kind(adapter: Lora) -> str:
    names = {"lora": "LoRA", "dora": "DoRA"}
    scale, start = " (rsLoRA)" if adapter.scale == "rslora" else "", " from PiSSA" if adapter.init == "pissa" else ""
    return f"{names[adapter.kind]}{scale}{start}"


def _share(recipe: Recipe, config: ModelConfig) -> str:
    assert isinstance(recipe.adapter, Lora)
    settings, total = adaptation(config, recipe.adapter), parameter_count(config)
    trained = settings.trained(config)
    told = f"{format_count(trained)} numbers are trained, {trained / total:.2%} of the model's {format_count(total)}"
    return f"{told}, on {len(settings.pairs):,} matrices"
