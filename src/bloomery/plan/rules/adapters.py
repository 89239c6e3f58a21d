"""Adapter methods of PEFT in a plan: what they are counted as, and what they do not go with. PEFT is not asked."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from bloomery.core.choice import Choice
from bloomery.core.errors import UserError
from bloomery.core.units import format_count
from bloomery.model.adapters.peft_settings import method_settings, named, targets_of
from bloomery.model.adapters.targets import ALL_LINEAR, Adaptation, adaptation, refuse_untrained_rows
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.model.quantization.sizes import Dequantizer, storage_bytes
from bloomery.recipe.schema import Lora, NoAdapter, Peft, Recipe

MANY = 2**24  # weights, to say how many bits one takes: the scales of scales are spread over all
RANKS = ("init_r", "r", "rank")  # the keys that say a rank; init_r is AdaLoRA's at the start, when it needs most
USUAL_RANKS = {"ADALORA": 12}  # PEFT's AdaLoraConfig.init_r; of the others 8


def counted_as(adapter: Peft, config: ModelConfig) -> Lora:
    """The LoRA whose memory and time stand for the method's: of its rank, on its modules."""
    said: dict[str, Any] = adapter.model_extra or {}
    usual = USUAL_RANKS.get(named(adapter.method), 8)
    rank = next((said[key] for key in RANKS if isinstance(said.get(key), int) and said[key] > 0), usual)
    targets = targets_of(adapter, config)
    lora = Lora(kind="lora", rank=rank, target_modules=[targets] if isinstance(targets, str) else list(targets))
    try:
        adaptation(config, lora)
    except UserError:  # a regular expression, which only PEFT reads: at most everything
        return lora.model_copy(update={"target_modules": [ALL_LINEAR]})
    return lora


def refuse_method_misfits(recipe: Recipe) -> None:
    """Raises UserError for what PEFT's layers cannot do inside of this decoder."""
    if not isinstance(recipe.adapter, Peft):
        return
    name = named(recipe.adapter.method)
    method = f"adapter.method={recipe.adapter.method}"
    if recipe.objective.spec.values:
        problem = "a reward model's values head must learn beside the adapter, and PEFT's methods leave it alone"
        raise UserError(problem, where=method, fix="set adapter.kind=lora, which trains it, too", code=2)
    if recipe.quantize.kind != "none":
        problem = "PEFT's methods need a base in floating point: they read its matrices themselves"
        fix = "set quantize.kind=none, or adapter.kind=lora, which trains beside a quantised base"
        raise UserError(problem, where=method, fix=fix, code=2)
    if recipe.optimizer.fused_backward:
        problem = "a method of PEFT looks at all gradients together after an update, and in backward they are gone"
        raise UserError(problem, where=method, fix="set optimizer.fused_backward=false", code=2)
    if recipe.train.compile is True:
        problem = "PEFT's layers change while they train, and compiled blocks would be compiled again each time"
        raise UserError(problem, where=method, fix="set train.compile=false", code=2)
    total = (recipe.adapter.model_extra or {}).get("total_step")
    if name == "ADALORA" and recipe.train.length.unit == "seconds" and not total:
        problem = "AdaLoRA's ranks follow the number of steps, which a wall-time length does not tell"
        raise UserError(problem, where="train.max_time", fix="set it to steps: train.max_steps=500", code=2)


def refuse_settings(recipe: Recipe, config: ModelConfig, *, steps: int | None) -> None:
    """Raises UserError for what PEFT would refuse of its own keys. `steps`: of the run, None where they are guessed."""
    if isinstance(recipe.adapter, Peft):
        method_settings(recipe.adapter, config, steps=steps)


def refuse_quantized_misfits(recipe: Recipe) -> None:
    """Raises UserError where the quantised weights themselves would have to learn."""
    if recipe.quantize.kind != "none" and recipe.adapter.kind == "none":
        raise UserError(
            f"{recipe.quantize.kind} weights cannot learn: they stand still under an adapter",
            where=f"quantize.kind={recipe.quantize.kind}",
            fix="set adapter.kind=lora, or quantize.kind=none to train every weight",
            code=2,
        )


def quantized_choices(recipe: Recipe, reader: Choice[Dequantizer]) -> Iterator[tuple[str, Choice[str]]]:
    """By key, in how many bits what is kept, and who reads it."""
    base, double = recipe.quantize.kind, recipe.quantize.double_quant
    if base == "none":
        return
    bits = 8 * storage_bytes((MANY,), base, double) / MANY
    yield "quantize.kind", Choice(f"{base} base", f"{bits:.4g} bits a weight of the layers; {reader.reason}")


def refuse_new_rows(recipe: Recipe, config: ModelConfig, *, known: int | None, added: int) -> None:
    """Raises UserError where an adapter would leave new tokens untrained. `known`: tokens of the model of the start."""
    if isinstance(recipe.adapter, NoAdapter) or known is None:
        return
    # Where the vocabulary is padded (Qwen2.5), new tokens take rows that are there and were never learned.
    new = max(config.vocab_size - known, added)
    if isinstance(recipe.adapter, Lora):
        refuse_untrained_rows(config, recipe.adapter, new=new)
    if isinstance(recipe.adapter, Peft) and new:
        raise UserError(
            f"{new} tokens are new to the model, and a method of PEFT would never learn them",
            where=f"adapter.method={recipe.adapter.method}",
            fix="set adapter.kind=lora adapter.modules_to_save=[embed_tokens, lm_head]", code=2,
        )  # fmt: skip


def adapter_choices(
    recipe: Recipe, config: ModelConfig, *, known: int | None, added: int
) -> Iterator[tuple[str, Choice[str]]]:
    """By key, what is asked for and what it means for this model."""
    adapter = recipe.adapter
    if isinstance(adapter, Lora):
        kind = {"lora": "LoRA", "dora": "DoRA"}[adapter.kind]
        kind += " (rsLoRA)" if adapter.use_rslora else ""
        kind += " from PiSSA" if adapter.init == "pissa" else ""
        found, total = adapted(config, adapter.model_dump_json()), parameter_count(config)
        trained = found.trained(config)
        reason = f"{format_count(trained)} numbers are trained, {trained / total:.2%} of the model's"
        reason += f" {format_count(total)}, on {len(found.pairs):,} matrices"
        yield "adapter.kind", Choice(f"{kind}, rank {adapter.rank}", reason)
    if known is not None and (new := max(config.vocab_size - known, added)):
        told = f"{new:,} new token{'s' if new > 1 else ''}"
        yield "model.vocab_size", Choice(told, "rows of the embedding and the head begin as the mean of the others")
    if isinstance(adapter, Peft):
        rank = counted_as(adapter, config).rank
        reason = f"PEFT trains it in this decoder; memory and time are those of a LoRA of rank {rank}"
        yield "adapter.kind", Choice(f"PEFT's {adapter.method}", reason)


@lru_cache(maxsize=64)  # 10 ms for a model of 7B, and the same for each of a hundred cards
def adapted(config: ModelConfig, adapter: str) -> Adaptation:
    """What a Lora, as JSON, is on this model. Raises UserError where its names match nothing."""
    return adaptation(config, Lora.model_validate_json(adapter))
