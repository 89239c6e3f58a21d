"""Adapters in a plan: the LoRA that a PEFT method is counted as, unsupported combinations. PEFT is not imported."""

from collections.abc import Iterator

from bloomery.core import Choice
from bloomery.core.errors import UserError
from bloomery.core.units import format_count
from bloomery.model.adapters.peft_settings import method_settings, named
from bloomery.model.adapters.targets import refuse_untrained_rows
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.model.quantization.sizes import Dequantizer, storage_bytes
from bloomery.plan.estimate.states import TrainedModel
from bloomery.recipe.schema import Lora, NoAdapter, Peft, Recipe

MANY = 2**24  # weights, for the average of bits per weight with double quantization


def refuse_method_misfits(recipe: Recipe) -> None:
    """Raises UserError for settings that PEFT methods do not support."""
    if not isinstance(recipe.adapter, Peft):
        return
    name = named(recipe.adapter.method)
    method = f"adapter.method={recipe.adapter.method}"
    if recipe.objective.spec.values:
        problem = "a reward model needs a trainable value head, and PEFT methods freeze it"
        raise UserError(problem, where=method, fix="set adapter.kind=lora, which trains the head too", code=2)
    if recipe.quantize.kind != "none":
        problem = "PEFT methods do not support quantized base weights"
        fix = "set quantize.kind=none, or adapter.kind=lora, which supports quantized base weights"
        raise UserError(problem, where=method, fix=fix, code=2)
    if recipe.optimizer.fused_backward:
        problem = "PEFT methods read all gradients after an update, and a fused backward frees them"
        raise UserError(problem, where=method, fix="set optimizer.fused_backward=false", code=2)
    if recipe.train.compile is True:
        problem = "PEFT layers change during training, and compiled blocks would be recompiled each time"
        raise UserError(problem, where=method, fix="set train.compile=false", code=2)
    total = (recipe.adapter.model_extra or {}).get("total_step")
    if name == "ADALORA" and recipe.train.length.unit == "seconds" and not total:
        problem = "AdaLoRA needs the number of steps, which a wall-time length does not have"
        raise UserError(problem, where="train.max_time", fix="set train.max_steps=500 instead", code=2)


def refuse_settings(recipe: Recipe, config: ModelConfig, *, steps: int | None) -> None:
    """Raises UserError for keys that PEFT refuses. `steps`: of the run, None where estimated."""
    if isinstance(recipe.adapter, Peft):
        method_settings(recipe.adapter, config, steps=steps)


def refuse_quantized_misfits(recipe: Recipe) -> None:
    """Raises UserError where quantized weights would have to be trainable."""
    if recipe.quantize.kind != "none" and recipe.adapter.kind == "none":
        raise UserError(
            f"{recipe.quantize.kind} weights are not trainable, and the recipe has no adapter",
            where=f"quantize.kind={recipe.quantize.kind}",
            fix="set adapter.kind=lora, or quantize.kind=none to train every weight",
            code=2,
        )


def quantized_choices(recipe: Recipe, reader: Choice[Dequantizer]) -> Iterator[tuple[str, Choice[str]]]:
    """By key: bits per weight, and the implementation that reads them."""
    base, double = recipe.quantize.kind, recipe.quantize.double_quant
    if base == "none":
        return
    bits = 8 * storage_bytes((MANY,), base, double) / MANY
    yield "quantize.kind", Choice(f"{base} base", f"{bits:.4g} bits per weight of the layers; {reader.reason}")


def refuse_new_rows(recipe: Recipe, config: ModelConfig, *, known: int | None, added: int) -> None:
    """Raises UserError where an adapter would leave new tokens untrained. `known`: tokens of the pretrained model."""
    if isinstance(recipe.adapter, NoAdapter) or known is None:
        return
    # In a padded vocabulary (Qwen2.5) new tokens use embeddings that exist and were never trained.
    new = max(config.vocab_size - known, added)
    if isinstance(recipe.adapter, Lora):
        refuse_untrained_rows(config, recipe.adapter, new=new)
    if isinstance(recipe.adapter, Peft) and new:
        raise UserError(
            f"PEFT methods do not train the embeddings of new tokens: {new} tokens",
            where=f"adapter.method={recipe.adapter.method}",
            fix="set adapter.kind=lora adapter.modules_to_save=[embed_tokens, lm_head]", code=2,
        )  # fmt: skip


def adapter_choices(
    recipe: Recipe, model: TrainedModel, *, known: int | None, added: int
) -> Iterator[tuple[str, Choice[str]]]:
    """By key: the adapter and its trainable parameters."""
    adapter = recipe.adapter
    if isinstance(adapter, Lora):
        kind = {"lora": "LoRA", "dora": "DoRA"}[adapter.kind]
        kind += " (rsLoRA)" if adapter.use_rslora else ""
        kind += " from PiSSA" if adapter.init == "pissa" else ""
        trained, total = model.trained_count, parameter_count(model.config)
        reason = f"{format_count(trained)} trainable parameters, {trained / total:.2%} of"
        reason += f" {format_count(total)}, on {len(model.mode.pairs):,} target modules"
        yield "adapter.kind", Choice(f"{kind}, rank {adapter.rank}", reason)
    if known is not None and (new := max(model.config.vocab_size - known, added)):
        value = f"{new:,} new token{'s' if new > 1 else ''}"
        yield "model.vocab_size", Choice(value, "their embeddings start as the mean of the others")
    if isinstance(adapter, Peft):
        _, rank = model.mode.pairs[0]
        reason = f"PEFT layers in this decoder; memory and time are estimated as a LoRA of rank {rank}"
        yield "adapter.kind", Choice(f"PEFT's {adapter.method}", reason)
