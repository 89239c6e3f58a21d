"""Every choice of a plan with its reason, in the order in which `bloomery plan` prints them."""

from collections.abc import Iterator, Mapping
from typing import Any

from bloomery.core import Choice
from bloomery.core.units import GIB
from bloomery.plan import adapters, lengths, streaming, teachers
from bloomery.plan.checkpoints import interval_text
from bloomery.plan.choices import (
    ASKED,
    arithmetic_choices,
    choose_deterministic,
    choose_fused,
    objective_choices,
    optimizer_memory_choices,
    set_or,
    transformers_choices,
)
from bloomery.plan.estimate.activations import gpu_fallback_bytes, keeps_scores
from bloomery.plan.gather import Facts
from bloomery.plan.pictures import step_pictures
from bloomery.plan.routers import router_choices
from bloomery.plan.step import Step
from bloomery.plan.types import CheckpointPlan, Decision
from bloomery.plan.vision import vision_choices
from bloomery.recipe.schema import Recipe


def decisions(
    recipe: Recipe,
    facts: Facts,
    step: Step,
    optimizer_choices: Mapping[str, Choice[float | str]],
    checkpoints: Choice[CheckpointPlan],
) -> tuple[Decision, ...]:
    choices = (
        *_computing_choices(facts, step),
        *_length_choices(recipe, step, checkpoints),
        *_machine_choices(recipe, facts, step),
        *_training_choices(recipe, facts, step, optimizer_choices),
    )
    return tuple(
        Decision(key=key, value=_value_text(choice.value), reason=choice.reason)
        for key, choice in choices
    )


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _computing_choices(facts: Facts, step: Step) -> Iterator[tuple[str, Choice[Any]]]:
    """How a step computes."""
    precision = step.precision
    attention = step.attention
    step_shape = step.layout.micro_batching.step
    if precision.value == "float16":  # always with loss scaling
        precision = Choice("float16 + loss scaling", precision.reason)
    # A GPU for which no fused kernel is known may take PyTorch's fallback, which keeps scores that the estimate does
    # not have: the user reads how many bytes. Half a tenth is rounded up.
    if facts.profile.attention.value == "plain" and not keeps_scores(step_shape):
        fallback_gib = gpu_fallback_bytes(step_shape) / GIB
        more_memory = f"PyTorch's fallback needs {int(fallback_gib * 10 + 0.5) / 10:.1f} GiB more"
        attention = Choice(attention.value, f"{attention.reason}; {more_memory}")
    yield "train.precision", precision
    yield "train.attention", attention
    compiled = "compiled" if step.compiled.value else "uncompiled"
    yield "train.compile", Choice(compiled, step.compiled.reason)
    yield "train.tokens_per_step", step.tokens


def _length_choices(
    recipe: Recipe, step: Step, checkpoints: Choice[CheckpointPlan]
) -> Iterator[tuple[str, Choice[Any]]]:
    """What lengths become in steps, where that is not what the recipe says."""
    partial_step = lengths.left_out(recipe.train.length, step.scale)
    if partial_step and step.scale.steps is not None:
        reason = f"the last {partial_step:,} sequences of {recipe.train.length} fill no step and are left out"
        yield f"train.{recipe.train.length_key}", Choice(f"{step.scale.steps:,} steps", reason)
    if checkpoints.reason != ASKED:
        yield "checkpoint.every", Choice(interval_text(checkpoints.value), checkpoints.reason)


def _machine_choices(recipe: Recipe, facts: Facts, step: Step) -> Iterator[tuple[str, Choice[Any]]]:
    """What the machine decides."""
    profile = facts.profile
    layout = step.layout
    yield "train.micro_batch_size", layout.micro_batching.micro_batch_size
    yield "train.activation_checkpointing", layout.micro_batching.checkpointing
    yield "parallel.stream", layout.stream
    if layout.stream_plan is not None:
        yield from streaming.host_choices(layout.stream_plan).items()
    yield "train.deterministic", choose_deterministic(recipe, profile)
    yield "train.device", profile.device
    yield "model.score_chunk", layout.micro_batching.score_chunk
    workers = recipe.data.num_proc
    loader_reason = profile.workers.reason
    workers_choice = Choice(str(workers), f"{ASKED}: processes of `prepare`; {loader_reason}")
    if workers == "auto":
        reason = f"one process for small datasets, every core for large ones; {loader_reason}"
        workers_choice = Choice("by size", reason)
    yield "data.num_proc", workers_choice
    yield "data.pin_memory", set_or(profile.pin_memory, recipe.data.pin_memory)
    yield "data.prefetch", set_or(profile.prefetch, recipe.data.prefetch)
    yield "optimizer.fused", choose_fused(recipe, profile, facts.model)
    if variables := " ".join(f"{key}={value}" for key, value in profile.environment.value.items()):
        yield "environment", Choice(variables, profile.environment.reason)


def _training_choices(
    recipe: Recipe,
    facts: Facts,
    step: Step,
    optimizer_choices: Mapping[str, Choice[float | str]],
) -> Iterator[tuple[str, Choice[Any]]]:
    """What model, adapter, objective and optimizer decide."""
    layout = step.layout
    on_gpu = facts.profile.accelerator is not None
    yield from adapters.quantized_choices(recipe, facts.model, step.dequantizer)
    yield from transformers_choices(recipe, facts.config)
    yield from adapters.adapter_choices(
        recipe, facts.model, known_vocabulary=facts.known_vocabulary, added=facts.new_tokens
    )
    yield from objective_choices(recipe, facts.dataset, facts.teacher, step.reference)
    yield from teachers.teacher_form_choice(layout.micro_batching.step, layout.teacher_forms)
    yield from vision_choices(recipe)
    yield from router_choices(recipe, facts.config, accumulation=step.accumulation)
    yield from optimizer_choices.items()
    yield from arithmetic_choices(
        recipe,
        facts.model,
        precision=step.precision.value,
        pictures=step_pictures(recipe, facts.dataset),
    )
    yield from optimizer_memory_choices(recipe, accelerator=on_gpu, precision=step.precision.value)
