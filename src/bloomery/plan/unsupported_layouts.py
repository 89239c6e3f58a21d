"""Layouts that a machine, a model or a measurement refuses: sequences and experts that devices cannot share."""

import math
from collections.abc import Iterator

from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import layers
from bloomery.facts.optimizers import OPTIMIZERS, PLAIN_SETTINGS
from bloomery.hardware.profile import Profile
from bloomery.plan.support_matrix import (
    ALL_AXES,
    ALL_PARAMETERS,
    ONE_GRADIENT,
    OTHER_ROWS,
    WHOLE_LAYERS,
)
from bloomery.recipe.objectives import Rollouts
from bloomery.recipe.schema import Peft, Recipe


def refuse_several_devices(recipe: Recipe) -> None:
    """Raises UserError where the recipe sets more than one device, for a measurement of one, or samples completions."""
    if isinstance(recipe.objective, Rollouts):
        raise UserError(
            f"not supported yet: measuring {recipe.objective.kind}, whose steps need sampled completions",
            where="objective.kind",
            fix="`bloomery train RECIPE --smoke-test` times the first steps",
            code=2,
        )
    sizes = {key: getattr(recipe.parallel, key) for key in ALL_AXES}
    keys = [f"parallel.{key}={size}" for key, size in sizes.items() if size not in (1, "auto")]
    if keys:
        raise UserError(
            f"not supported in a measurement of one device: {', '.join(keys)}",
            where="recipe",
            fix=f"remove {'them' if len(keys) > 1 else 'it'} from the recipe",
            code=2,
        )


def refuse_mesh(profile: Profile, *, gpus: int, nodes: int) -> None:
    """Raises UserError for several nodes without GPUs, and for several integrated GPUs."""
    if gpus * nodes == 1:
        return
    where = f"{gpus * nodes:,} devices"
    if profile.accelerator is None:
        if nodes > 1:
            fix = f'name a GPU: --gpu "MI300X" --gpus {gpus} --nodes {nodes}'
            raise UserError(
                "several nodes without GPUs are not planned", where=where, fix=fix, code=2
            )
        return  # ranks of one CPU share its cores and its memory
    if profile.accelerator.integrated or (profile.gpu is not None and profile.gpu.link == "APU"):
        problem = f"the table has no links between several {profile.accelerator.name}"
        fix = "plan and train on one device: no --gpus or --nodes, and no sizes above 1 in parallel"
        raise UserError(problem, where=where, fix=fix, code=2)


def refuse_context(
    recipe: Recipe, config: ModelConfig, devices: int, *, teacher: ModelConfig | None = None
) -> None:
    """Raises UserError where the `devices` with copies or shards of the model cannot share sequences as the recipe
    asks. `teacher`: another model, which reads them as well.
    """
    size = recipe.parallel.context
    if size == 1:
        return
    length = recipe.data.sequence_length
    problem = ""
    fix = "set parallel.context=1"
    if recipe.parallel.pipeline not in (1, "auto"):
        problem = "a pipeline does not share sequences between devices"
        fix = "set parallel.context=1, or parallel.pipeline=1"
    elif devices % size:
        problem = f"{counted(devices, 'devices')} cannot be divided into groups of {size:,} that share sequences"
        fix = f"set parallel.context={math.gcd(devices, size)}, or train on a multiple of {size:,}"
    elif length % size:
        problem = f"sequences of {length:,} tokens cannot be divided among {size:,} devices"
        fix = f"set data.sequence_length={-(-length // size) * size}"
    else:
        problem, fix = _unshared(config, size)
        if not problem and teacher is not None:
            problem, fix = _unshared(teacher, size)
            if teacher.transformers_backend is not None:
                problem = "its layers are those of transformers, which do not exchange heads"
                fix = "set parallel.context=1, or choose a teacher with native layers"
            problem = problem and f"the teacher cannot share sequences: {problem}"
    if problem:
        raise UserError(problem, where=f"parallel.context={size}", fix=fix, code=2)


def _unshared(config: ModelConfig, size: int) -> tuple[str, str]:
    """Why so many devices cannot share the sequences of a model, and what to set instead; "" where they can."""
    # Each device takes as many heads of every layer.
    key_heads = math.gcd(*(layer.num_kv_heads for layer in layers(config)))
    mixers = {layer.mixer for layer in layers(config)} - {"attention"}
    fix = "set parallel.context=1, and parallel.shard for memory"
    if mixers:
        # Only attention exchanges heads: other mixers read the tokens before theirs.
        name = sorted(mixers)[0].replace("_", " ")
        return f"each layer with a {name} reads whole sequences, which devices cannot share", fix
    if config.attention_sinks:
        return "devices that share sequences share heads, and not the sinks of their attention", fix
    if key_heads % size:
        heads = counted(key_heads, "key/value heads")
        fix = f"set parallel.context={math.gcd(key_heads, size)}"
        return f"{size:,} devices cannot share the model's {heads}", fix
    return "", ""


def refuse_divided_experts(
    recipe: Recipe, config: ModelConfig, *, devices: int, shard: int = 1
) -> None:
    """Raises UserError where the `devices` with copies or shards of the model cannot divide its experts as the recipe
    asks. `shard`: of a split that the recipe names.
    """
    size = recipe.parallel.expert
    if size == 1:
        return
    experts = config.experts
    problem = ""
    fix = "set parallel.expert=1"
    if experts is None or config.transformers_backend is not None:
        problem = "there are no experts to divide: the model is no mixture of Bloomery's decoder"
    elif experts.count % size:
        problem = f"{experts.count:,} experts cannot be divided over {counted(size, 'devices')}"
        fix = f"set parallel.expert={math.gcd(experts.count, size)}"
    elif devices % size:
        problem = f"{counted(devices, 'devices')} cannot be divided into groups of {size:,} that divide the experts"
        fix = f"set parallel.expert={math.gcd(devices, size)}, or train on a multiple of {size:,}"
    elif shard not in (1, size):
        problem = f"the {shard:,} devices of a sharded copy divide the experts together, not {size:,} of them"
        fix = f"set parallel.expert={shard}, or parallel.shard={size}"
    else:
        for reason, setting in _not_with_divided_experts(recipe):
            problem = f"not supported while devices divide the experts: {reason}"
            fix = f"set {setting}, or parallel.expert=1"
            break
    if problem:
        raise UserError(problem, where=f"parallel.expert={size}", fix=fix, code=2)


def _not_with_divided_experts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What the recipe uses and does not train so: the feature with the reason, and what to set instead."""
    optimizer = recipe.optimizer
    if isinstance(recipe.adapter, Peft):
        yield f"PEFT methods: {ALL_PARAMETERS}", "adapter.kind=lora"
    if recipe.train.compile is True:
        yield f"train.compile: {OTHER_ROWS}", "train.compile=false"
    if recipe.parallel.stream in ("layers", "experts"):
        yield f"parallel.stream: {WHOLE_LAYERS}", "parallel.stream=off"
    if optimizer.fused_backward:
        yield f"optimizer.fused_backward: {ONE_GRADIENT}", "optimizer.fused_backward=false"
    for key, reason in OPTIMIZERS[optimizer.kind].settings_over_shards.items():
        if getattr(optimizer, key) != PLAIN_SETTINGS[key]:
            yield f"optimizer.{key}, {optimizer.kind}: {reason}", f"optimizer.{key}=false"
