"""Adapters and quantized base weights in a plan: what they train and store, and what they refuse of a recipe.

A PEFT method is counted as a LoRA; PEFT is not imported.
"""

import math
from collections import Counter
from collections.abc import Iterator

from bloomery.core import Choice
from bloomery.core.errors import UserError
from bloomery.core.units import format_count
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import is_layer_matrix, is_of_experts, parameter_count
from bloomery.facts.limits import Dequantizer, storage_bytes
from bloomery.model.adapters.settings import counted_by_kind, method_name, refuse_untrained_rows
from bloomery.model.io.expert_tensors import refuse_unquantizable, stacks_of_transformers
from bloomery.plan.estimate.states import TrainedModel
from bloomery.recipe.schema import Lora, NoAdapter, Peft, Recipe

# So many weights that the average of bits per weight counts scales of scales too.
WEIGHTS_OF_AVERAGE = 2**24


def refuse_method_misfits(recipe: Recipe) -> None:
    """Raises UserError for settings that PEFT methods do not support."""
    adapter = recipe.adapter
    if not isinstance(adapter, Peft):
        return
    where = f"adapter.method={adapter.method}"
    if recipe.objective.spec.values:
        raise UserError(
            "a reward model needs a trainable value head, and PEFT methods freeze it",
            where=where,
            fix="set adapter.kind=lora, which trains the head too",
            code=2,
        )
    if recipe.quantize.kind != "none":
        raise UserError(
            "PEFT methods do not support quantized base weights",
            where=where,
            fix="set quantize.kind=none, or adapter.kind=lora, which supports quantized base weights",
            code=2,
        )
    if recipe.optimizer.fused_backward:
        raise UserError(
            "PEFT methods read all gradients after an update, and a fused backward frees them",
            where=where,
            fix="set optimizer.fused_backward=false",
            code=2,
        )
    if recipe.train.compile is True:
        raise UserError(
            "PEFT layers change during training, and compiled blocks would be recompiled each time",
            where=where,
            fix="set train.compile=false",
            code=2,
        )
    total_steps = (adapter.model_extra or {}).get("total_step")
    is_wall_time = recipe.train.length.unit == "seconds"
    if method_name(adapter.method) == "ADALORA" and is_wall_time and not total_steps:
        raise UserError(
            "AdaLoRA needs the number of steps, which a wall-time length does not have",
            where="train.max_time",
            fix="set train.max_steps=500 instead",
            code=2,
        )


def quantized_choices(
    recipe: Recipe, model: TrainedModel, reader: Choice[Dequantizer]
) -> Iterator[tuple[str, Choice[str]]]:
    """By key: bits per weight, and the implementation that reads them.

    Of a mixture of experts how many of its parameters are quantized. Raises UserError where its experts cannot be.
    """
    quantize = recipe.quantize
    if quantize.kind == "none":
        return
    refuse_unquantizable(model.config, quantize.kind)
    count = WEIGHTS_OF_AVERAGE
    bits = 8 * storage_bytes((count,), quantize.kind, quantize.double_quant) / count
    reason = f"{bits:.4g} bits per weight of the layers; {reader.reason}"
    if model.config.experts is not None:
        shapes = {n: math.prod(s) for n, s in model.frozen.items() if is_layer_matrix(n, s)}
        of_experts = sum(values for name, values in shapes.items() if is_of_experts(name))
        reason = (
            f"{format_count(sum(shapes.values()))} of {format_count(model.weight_count)} parameters, "
            f"{format_count(of_experts)} of them in experts; {reason}"
        )
    yield "quantize.kind", Choice(f"{quantize.kind} base", reason)


def refuse_new_rows(
    recipe: Recipe, config: ModelConfig, *, known_vocabulary: int | None, added: int
) -> None:
    """Raises UserError where an adapter would leave new tokens untrained.

    `known_vocabulary`: tokens of the pretrained model.
    """
    if isinstance(recipe.adapter, NoAdapter) or known_vocabulary is None:
        return
    # In a padded vocabulary (Qwen2.5) new tokens use embeddings that exist and were never trained.
    new = max(config.vocab_size - known_vocabulary, added)
    if isinstance(recipe.adapter, Lora):
        refuse_untrained_rows(config, recipe.adapter, new=new)
    if isinstance(recipe.adapter, Peft) and new:
        raise UserError(
            f"PEFT methods do not train the embeddings of new tokens: {new} tokens",
            where=f"adapter.method={recipe.adapter.method}",
            fix="set adapter.kind=lora adapter.modules_to_save=[embed_tokens, lm_head]",
            code=2,
        )


def adapter_choices(
    recipe: Recipe, model: TrainedModel, *, known_vocabulary: int | None, added: int
) -> Iterator[tuple[str, Choice[str]]]:
    """By key: the adapter, its trainable parameters, and the modules that it changes."""
    adapter = recipe.adapter
    if isinstance(adapter, Lora):
        kind = {"lora": "LoRA", "dora": "DoRA"}[adapter.kind]
        kind += " (rsLoRA)" if adapter.use_rslora else ""
        kind += " from PiSSA" if adapter.init == "pissa" else ""
        trained = model.trainable_count
        total = parameter_count(model.config)
        reason = f"{format_count(trained)} trainable parameters, {trained / total:.2%} of"
        reason += f" {format_count(total)}"
        ranks = sorted({rank for _, rank in model.mode.target_modules})
        yield "adapter.kind", Choice(f"{kind}, rank {' and '.join(map(str, ranks))}", reason)
        targets = [name for name, _ in model.mode.target_modules]
        by_name = Choice(f"{len(targets):,} target modules", counted_by_kind(targets))
        if stacks := stacks_of_transformers(model.config):
            frozen = f"{format_count(sum(stacks.values()))} parameters of experts stay frozen"
            reason = f"{by_name.reason}; {frozen}: transformers' layers have them as stacks"
            by_name = Choice(by_name.value, reason)
        yield (
            "adapter.target_modules",
            by_name if model.config.experts is None else _targets_by_kind(model),
        )
    if known_vocabulary is not None and (
        new := max(model.config.vocab_size - known_vocabulary, added)
    ):
        value = f"{new:,} new token{'s' if new > 1 else ''}"
        yield "model.vocab_size", Choice(value, "their embeddings start as the mean of the others")
    if isinstance(adapter, Peft):
        _, rank = model.mode.target_modules[0]
        reason = (
            f"PEFT layers in this decoder; memory and time are estimated as a LoRA of rank {rank}"
        )
        yield "adapter.kind", Choice(f"PEFT's {adapter.method}", reason)


# Of a mixture of experts: the kinds of matrices that an adapter may change, by what their names in a layer begin with.
ADAPTED_KINDS = {
    "mlp.experts.": "routed experts",
    "mlp.shared_expert": "shared experts",
    "mlp.": "dense MLPs",
}
MIXERS = "attention"


def _targets_by_kind(model: TrainedModel) -> Choice[str]:
    """How many matrices of each kind have LoRA, each expert's by itself, and its trainable parameters."""
    matrices = Counter[str]()
    parameters = Counter[str]()
    for name, _ in model.mode.target_modules:
        kind = _kind_of(name)
        shape = model.shapes.get(f"{name}.weight", model.shapes.get(name, ()))
        matrices[kind] += math.prod(shape[:-2]) if shape else 0
    for name, shape in model.adapter.items():
        parameters[_kind_of(name)] += math.prod(shape)
    kinds = [
        f"{kind}: {matrices[kind]:,} matrices, {format_count(parameters[kind])} parameters"
        for kind in (MIXERS, *ADAPTED_KINDS.values())
        if matrices[kind]
    ]
    routed = ADAPTED_KINDS["mlp.experts."]
    frozen = [] if matrices[routed] else [f"{routed} stay frozen"]
    if not any(name.endswith("mlp.gate") for name in model.mode.modules_to_save):
        frozen.append("the router stays frozen")
    return Choice(f"{len(model.mode.target_modules):,} target modules", "; ".join(kinds + frozen))


def _kind_of(name: str) -> str:
    inside = name.split(".", 3)[-1]
    return next((kind for start, kind in ADAPTED_KINDS.items() if inside.startswith(start)), MIXERS)
