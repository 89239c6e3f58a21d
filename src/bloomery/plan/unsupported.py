"""Unsupported settings of a recipe, refused before anything is built: keys that contradict each other or the model.

What objectives refuse is in `bloomery.plan.unsupported_objectives`, what adapters refuse in `bloomery.plan.adapters`,
what several devices refuse in `bloomery.plan.support_matrix` and `bloomery.plan.unsupported_layouts`.
"""

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.model.adapters.settings import method_settings
from bloomery.model.configs import CONTEXT_KEYS
from bloomery.plan.adapters import refuse_method_misfits, refuse_new_rows
from bloomery.plan.choices import refuse_transformers_misfits
from bloomery.plan.routers import refuse_router
from bloomery.plan.stages import refuse_schedule
from bloomery.plan.types import DatasetFacts
from bloomery.plan.unsupported_objectives import refuse_distill_misfits, refuse_reward_misfits
from bloomery.plan.vision import refuse_vision_misfits
from bloomery.recipe.objectives import Distill
from bloomery.recipe.schema import Lora, Peft, Recipe


def refuse_settings(recipe: Recipe, config: ModelConfig, *, steps: int | None) -> None:
    """Raises UserError for keys that the model or PEFT refuses. `steps`: of the run, None where estimated."""
    if recipe.train.ema_decay is not None:
        _refuse_average(recipe)
    if recipe.train.neftune_alpha is not None and config.transformers_backend is not None:
        raise UserError(
            "NEFTune is not supported for the transformers implementation: its embeddings are not Bloomery's",
            where="train.neftune_alpha",
            fix="leave it out, or set model.implementation=native",
            code=2,
        )
    refuse_router(recipe, config)
    if isinstance(recipe.adapter, Peft):
        method_settings(recipe.adapter, config, steps=steps)


def _refuse_average(recipe: Recipe) -> None:
    """Raises UserError for settings that an average of the weights does not support."""
    adapter = recipe.adapter
    conflicts = (  # whether the recipe has it, its key, the reason
        (
            isinstance(adapter, Peft),
            "adapter.kind=peft",
            "PEFT's methods change their parameters during training",
        ),
        (
            recipe.train.precision == "bfloat16-pure",
            "train.precision=bfloat16-pure",
            "bfloat16 rounds it away",
        ),
        (
            isinstance(adapter, Lora) and adapter.dtype != "float32",
            "adapter.dtype",
            "bfloat16 rounds it away",
        ),
        (
            recipe.optimizer.offload,
            "optimizer.offload",
            "the average stays on the device, which offloading empties",
        ),
    )
    for is_set, key, reason in conflicts:
        if is_set:
            raise UserError(
                f"no average of the weights with {key}: {reason}",
                where="train.ema_decay",
                fix=f"leave out train.ema_decay, or {key}",
                code=2,
            )


def refuse_recipe(recipe: Recipe) -> None:
    """Raises UserError for keys that contradict each other."""
    refuse_reward_misfits(recipe)
    refuse_optimizer_memory_misfits(recipe)
    refuse_method_misfits(recipe)
    refuse_schedule(recipe.parallel)
    refuse_vision_misfits(recipe)
    if isinstance(recipe.objective, Distill):
        refuse_distill_misfits(recipe.objective)
    if recipe.quantize.kind != "none" and recipe.adapter.kind == "none":
        raise UserError(
            f"{recipe.quantize.kind} weights are not trainable, and the recipe has no adapter",
            where=f"quantize.kind={recipe.quantize.kind}",
            fix="set adapter.kind=lora, or quantize.kind=none to train every weight",
            code=2,
        )


def refuse_optimizer_memory_misfits(recipe: Recipe) -> None:
    """Raises UserError for memory settings that the optimizer or a fused backward does not support."""
    optimizer = recipe.optimizer
    spec = OPTIMIZERS[optimizer.kind]

    # The memory settings of the recipe as they stand in it, by key.
    settings = {
        key: f"optimizer.{key}"
        for key in ("offload", "fused_backward", "stochastic_rounding")
        if getattr(optimizer, key)
    }
    if optimizer.paged:
        settings["offload"] = "optimizer.paged"  # another name for it
    if optimizer.state_dtype != "float32":
        settings["state_dtype"] = f"optimizer.state_dtype={optimizer.state_dtype}"
    unsupported = [
        setting
        for key, setting in settings.items()
        if key not in spec.settings and key not in spec.ineffective_settings
    ]
    if unsupported:
        raise UserError(
            f"{spec.name} does not support this setting: {unsupported[0]}",
            where=f"optimizer.kind={optimizer.kind}",
            fix=f"set optimizer.kind=adamw, or remove {' and '.join(unsupported)}",
            code=2,
        )

    # A fused backward updates after each micro-batch: both sizes of the recipe must be the same.
    micro_batch_size = recipe.train.micro_batch_size
    tokens_per_step = recipe.tokens_per_step
    if not optimizer.fused_backward or tokens_per_step == "auto" or micro_batch_size == "auto":
        return
    micro_batch_tokens = micro_batch_size * recipe.data.sequence_length
    if tokens_per_step != micro_batch_tokens:
        raise UserError(
            "optimizer.fused_backward has no gradient accumulation: a step is one micro-batch of"
            f" {micro_batch_tokens:,} tokens, not {tokens_per_step:,}",
            where="train.tokens_per_step",
            fix=f"set train.tokens_per_step={micro_batch_tokens}, or optimizer.fused_backward=false",
            code=2,
        )


def refuse_misfits(
    recipe: Recipe,
    config: ModelConfig,
    dataset: DatasetFacts | None,
    *,
    known_vocabulary: int | None,
    added: int,
) -> None:
    """Raises UserError for a recipe that no machine can train: settings that the model or its implementation lacks, a
    dataset that does not fit it (ids without embeddings, tokens without positions).

    `known_vocabulary`: tokens of the pretrained model; `added`: new tokens of the recipe.
    """
    length = recipe.data.sequence_length
    extended = [f"model.{key}" for key in CONTEXT_KEYS if getattr(recipe.model, key) is not None]
    if extended and recipe.model.from_ is not None and recipe.adapter.kind != "none":
        problem = "an adapter cannot store another context length or rotary embedding than its base model's"
        fix = f"set adapter=none, or change config.json of {recipe.model.from_} and remove {', '.join(extended)}"
        raise UserError(problem, where=extended[0], fix=fix, code=2)
    if config.head == "values" and not recipe.objective.spec.values:
        raise UserError(
            "model.from is a reward model, without a language model head",
            where="objective.kind",
            fix="set objective.kind=reward, or use the language model that it was trained from",
            code=2,
        )
    if recipe.objective.spec.values and recipe.sample.prompts:
        problem = "a reward model generates no text for sample.prompts"
        raise UserError(problem, where="sample.prompts", fix="set sample.prompts=[]", code=2)
    if dataset is not None and (dataset.vocab_size or 0) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {dataset.vocab_size:,} ids and the model {config.vocab_size:,} embeddings",
            where="model.vocab_size",
            fix=f"set model.vocab_size={dataset.vocab_size}, or prepare with the model's own tokenizer",
        )
    refuse_new_rows(recipe, config, known_vocabulary=known_vocabulary, added=added)
    if config.positions == "learned" and length > config.max_positions:
        raise UserError(
            f"sequence length exceeds the model's {config.max_positions:,} learned positions: {length:,}",
            where="data.sequence_length",
            fix=f"set data.sequence_length={config.max_positions}, or a larger model.max_positions",
            code=2,
        )
    refuse_transformers_misfits(recipe, config)
    run_length = recipe.train.length
    steps = round(run_length.amount) if run_length.unit == "steps" else None
    refuse_settings(recipe, config, steps=steps)
