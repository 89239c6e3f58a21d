"""Unsupported and contradictory settings of a recipe, refused before anything is built."""

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.hardware.profile import Profile
from bloomery.model.config import ModelConfig
from bloomery.model.families.presets import CONTEXT_KEYS
from bloomery.plan.estimate.states import OPTIMIZERS
from bloomery.plan.rules.adapters import (
    refuse_method_misfits,
    refuse_new_rows,
    refuse_quantized_misfits,
    refuse_settings,
)
from bloomery.plan.rules.backend import refuse_transformers_misfits
from bloomery.plan.types import DatasetFacts
from bloomery.recipe.schema import Recipe

OPTIMIZER_MEMORY_KEYS = ("offload", "fused_backward", "stochastic_rounding")


def refuse_recipe(recipe: Recipe) -> None:
    """Raises UserError for unsupported keys, and for keys that contradict each other."""
    keys = [f"objective.kind={recipe.objective.kind}"] if recipe.objective.spec.rollouts else []
    _refuse_keys([*keys, *_keys_of_mesh(recipe, "tensor", "context", "pipeline_microbatches")])
    refuse_optimizer_memory_misfits(recipe)
    refuse_method_misfits(recipe)
    refuse_quantized_misfits(recipe)


def refuse_several_devices(recipe: Recipe) -> None:
    """Raises UserError where the recipe sets more than one device, for a measurement of one."""
    _refuse_keys(_keys_of_mesh(recipe, "replicate", "shard", "pipeline"))


def refuse_pipeline(recipe: Recipe) -> None:
    """Raises UserError for pipeline stages, which this version plans and does not train."""
    _refuse_keys(_keys_of_mesh(recipe, "pipeline"))


def _keys_of_mesh(recipe: Recipe, *keys: str) -> list[str]:
    asked = {key: getattr(recipe.parallel, key) for key in keys}
    return [f"parallel.{key}={value}" for key, value in asked.items() if value not in (1, "auto")]


def _refuse_keys(keys: list[str]) -> None:
    """One UserError for all unsupported keys."""
    if keys:
        problem = f"not supported in this version of Bloomery: {', '.join(keys)}"
        fix = f"remove {'them' if len(keys) > 1 else 'it'} from the recipe"
        raise UserError(problem, where="recipe", fix=fix, code=2)


def refuse_optimizer_memory_misfits(recipe: Recipe) -> None:
    """Raises UserError for memory settings that the optimizer or a fused backward does not support."""
    optimizer, train, spec = recipe.optimizer, recipe.train, OPTIMIZERS[recipe.optimizer.kind]
    asked = {key: f"optimizer.{key}" for key in OPTIMIZER_MEMORY_KEYS if getattr(optimizer, key)}
    if optimizer.paged:
        asked["offload"] = "optimizer.paged"  # another name for it
    if optimizer.state_dtype != "float32":
        asked["state_dtype"] = f"optimizer.state_dtype={optimizer.state_dtype}"
    if refused := [text for key, text in asked.items() if key not in spec.settings and key not in spec.idle]:
        raise UserError(
            f"{spec.name} does not support this setting: {refused[0]}",
            where=f"optimizer.kind={optimizer.kind}",
            fix=f"set optimizer.kind=adamw, or remove {' and '.join(refused)}",
            code=2,
        )
    rows = train.micro_batch_size
    asked_tokens = recipe.tokens_per_step
    if not optimizer.fused_backward or asked_tokens == "auto" or rows == "auto":
        return
    tokens = rows * recipe.data.sequence_length
    if asked_tokens != tokens:
        raise UserError(
            "optimizer.fused_backward has no gradient accumulation: a step is one micro-batch of"
            f" {tokens:,} tokens, not {asked_tokens:,}",
            where="train.tokens_per_step",
            fix=f"set train.tokens_per_step={tokens}, or optimizer.fused_backward=false",
            code=2,
        )


def refuse_mesh(config: ModelConfig, profile: Profile, *, gpus: int, nodes: int) -> None:
    """Raises UserError for several devices of a CPU or an integrated GPU, or with layers of transformers."""
    asked = [f"{flag} {count}" for flag, count in (("--gpus", gpus), ("--nodes", nodes)) if count > 1]
    if not asked:
        return
    where = " ".join(asked)
    if profile.accelerator is None:
        if nodes > 1:
            fix = f'name a GPU: --gpu "MI300X" {where}'
            raise UserError("several nodes without GPUs are not planned", where=where, fix=fix, code=2)
        return  # ranks of one CPU share its cores and its memory
    if profile.accelerator.integrated or (profile.gpu is not None and profile.gpu.link == "APU"):
        problem = f"the table has no links between several {profile.accelerator.name}"
        raise UserError(problem, where=where, fix=f"leave out {where}", code=2)
    if config.transformers_backend is not None:
        problem = "the transformers implementation supports one device: no tensor, pipeline or context parallelism"
        fix = "leave out --gpus and --nodes"
        raise UserError(problem, where="model.implementation=transformers", fix=fix, code=2)


def refuse_misfits(
    recipe: Recipe, config: ModelConfig, dataset: DatasetFacts | None, *, known: int | None, added: int
) -> None:
    """Raises UserError for a recipe that no machine can train: settings that the model or its implementation lacks, a
    dataset that does not fit it (ids without embeddings, tokens without positions).

    `known`: tokens of the pretrained model; `added`: new tokens of the recipe.
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
    refuse_new_rows(recipe, config, known=known, added=added)
    if config.positions == "learned" and length > config.max_positions:
        raise UserError(
            f"sequence length exceeds the model's {config.max_positions:,} learned positions: {length:,}",
            where="data.sequence_length",
            fix=f"set data.sequence_length={config.max_positions}, or a larger model.max_positions",
            code=2,
        )
    refuse_transformers_misfits(recipe, config)
    asked = recipe.train.length
    refuse_settings(recipe, config, steps=round(asked.amount) if asked.unit == "steps" else None)


def refuse_few_positions(teacher: ModelConfig, length: int, *, where: str) -> None:
    """Raises UserError when sequences are longer than the teacher's learned positions."""
    if teacher.positions == "learned" and length > teacher.max_positions:
        problem = f"sequence length exceeds the teacher's {teacher.max_positions:,} learned positions: {length:,}"
        fix = f"set data.sequence_length={teacher.max_positions}, or choose another teacher"
        raise UserError(problem, where=where, fix=fix)


def refuse_other_words(teacher: Tokenizer, student: Tokenizer, *, where: str) -> None:
    """Raises UserError when the tokenizers differ."""
    if teacher.hash == student.hash:
        return
    shared = min(teacher.vocab_size, student.vocab_size)
    other = next((i for i in range(shared) if teacher.decode([i]) != student.decode([i])), None)
    if other is None and teacher.vocab_size == student.vocab_size:
        return
    difference = f"{teacher.vocab_size:,} ids, not {student.vocab_size:,}"
    if other is not None:
        difference = f"id {other} is {teacher.decode([other])!r}, not {student.decode([other])!r}"
    raise UserError(
        f"the teacher has another tokenizer: {difference}",
        where=where,
        fix="choose a teacher of the same family, with the same tokenizer",
    )
