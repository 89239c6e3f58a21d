"""The sections of a plan that follow from the recipe's own words, a section a function."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.core.choice import Choice
from bloomery.core.units import GIB, Duration
from bloomery.hardware.profile import Profile
from bloomery.model.quantization.sizes import Reader
from bloomery.plan import batch, lengths
from bloomery.plan.estimate import speed
from bloomery.plan.estimate.activations import keeps_scores, kept_layers, quadratic_bytes
from bloomery.plan.rules.choices import ASKED
from bloomery.plan.types import (
    CheckpointPlan,
    CorpusFacts,
    DataPlan,
    Decision,
    Estimate,
    EvalPlan,
    Lengths,
    MeshPlan,
    MonitorPlan,
    OptimizerPlan,
)
from bloomery.recipe.schema import Command, Recipe, Wsd


@dataclass(frozen=True, kw_only=True)
class Settled:
    """Choices that depend on each other. `parts`: seconds of a step by what takes them; None where nothing is known."""

    tokens: Choice[int]
    precision: Choice[str]
    attention: Choice[str]
    compiled: Choice[bool]
    reader: Choice[Reader]
    scale: lengths.Scale
    cut: batch.Cut
    parts: dict[str, Estimate] | None
    mesh: MeshPlan | None

    @property
    def seconds(self) -> Estimate | None:
        return speed.total(self.parts) if self.parts else None

    @property
    def told_precision(self) -> Choice[str]:
        """float16 never trains without loss scaling, and the plan says so."""
        scaled = self.precision.value == "float16"
        return Choice("float16 + loss scaling", self.precision.because) if scaled else self.precision

    @property
    def told_compile(self) -> Choice[str]:
        return Choice("compiled" if self.compiled.value else "uncompiled", self.compiled.because)

    @property
    def priced_attention(self) -> Choice[str]:
        """With what the fallback that was not taken would have cost."""
        load = self.cut.load
        if keeps_scores(load):
            return self.attention
        layers = max(1, kept_layers(load.checkpointing, load.config.num_layers))
        price = quadratic_bytes(load) * layers / GIB
        added = f"{int(price * 10 + 0.5) / 10:.1f} GiB"
        return Choice(self.attention.value, f"{self.attention.because}; PyTorch's fallback would add {added}")


def decision(key: str, choice: Choice[Any]) -> Decision:
    value = choice.value
    if isinstance(value, bool):
        value = "yes" if value else "no"
    return Decision(key=key, value=str(value), because=choice.because)


def data(recipe: Recipe, profile: Profile, prepared: Path) -> DataPlan:
    return DataPlan(
        prepared=prepared.absolute(),
        sequence_length=recipe.data.sequence_length,
        layout=recipe.data.layout,
        pin_memory=pin_memory(recipe, profile).value,
        prefetch=prefetch(recipe, profile).value,
    )


def own_lengths(recipe: Recipe, corpus: CorpusFacts | None) -> Lengths:
    return Lengths(
        train=recipe.train.length,
        warmup=recipe.optimizer.warmup,
        decay=_decay(recipe.optimizer.schedule),
        checkpoint=recipe.checkpoint.every,
        evaluation=recipe.eval.every,
        evaluation_tokens=_number(recipe.eval.tokens),
        monitor=recipe.monitor.every,
        rows_per_epoch=corpus.rows_per_epoch if corpus else None,
    )


def optimizer(recipe: Recipe, profile: Profile, scale: lengths.Scale) -> OptimizerPlan:
    asked = recipe.optimizer
    decay = _decay(asked.schedule)
    return OptimizerPlan(
        kind=asked.kind,
        learning_rate=asked.learning_rate,
        matrix_learning_rate=asked.matrix_learning_rate or asked.learning_rate,
        momentum=asked.momentum,
        betas=asked.betas,
        epsilon=asked.epsilon,
        weight_decay=asked.weight_decay,
        fused=fused(recipe, profile).value,
        schedule=Wsd() if asked.schedule == "wsd" else asked.schedule,
        floor=asked.floor,
        warmup_steps=lengths.steps_of(asked.warmup, scale, key="optimizer.warmup"),
        decay_steps=0 if decay is None else lengths.steps_of(decay, scale, key="optimizer.schedule.decay"),
        states=asked.states,
        paged=asked.paged,
        offload=asked.offload,
        in_backward=asked.in_backward,
        stochastic_rounding=asked.stochastic_rounding,
    )


def checkpoint(recipe: Recipe, scale: lengths.Scale) -> CheckpointPlan:
    asked = recipe.checkpoint
    return CheckpointPlan(
        every_steps=lengths.steps_of(asked.every, scale, key="checkpoint.every"),
        keep=asked.keep,
        asynchronous=True if asked.asynchronous == "auto" else asked.asynchronous,
    )


def evaluation(recipe: Recipe, scale: lengths.Scale, micro_batch: int) -> EvalPlan:
    asked = recipe.eval
    every_steps = lengths.steps_of(asked.every, scale, key="eval.every")
    return EvalPlan(
        every_steps=every_steps,
        rows=lengths.evaluation_rows(every_steps, scale, tokens=_number(asked.tokens)),
        prompts=tuple(asked.prompts),
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        stop_early=None if asked.stop_early == "none" else asked.stop_early,
        micro_batch=micro_batch,
    )


def monitor(recipe: Recipe, scale: lengths.Scale) -> MonitorPlan:
    asked = recipe.monitor
    return MonitorPlan(
        every_steps=lengths.steps_of(asked.every, scale, key="monitor.every"),
        sinks=tuple(sink for sink in asked.to if not isinstance(sink, Command)),
        commands=tuple(sink.command for sink in asked.to if isinstance(sink, Command)),
        pause_above=None if asked.pause_above == "none" else asked.pause_above,
        memory=asked.memory,
        trace_steps=(asked.trace_steps[0], asked.trace_steps[1]) if asked.trace_steps else None,
    )


def workers(recipe: Recipe, profile: Profile) -> Choice[str]:
    """Processes that cut the text into tokens, before training; training itself reads with one thread."""
    asked, reads = recipe.data.workers, profile.workers.because
    if asked == "auto":
        return Choice("by size", f"small texts are prepared in one process, large ones on every core; {reads}")
    return Choice(str(asked), f"{ASKED}: processes that prepare the text; {reads}")


def fused(recipe: Recipe, profile: Profile) -> Choice[bool]:
    """Whether torch's fused AdamW does the update: what saves memory is of our own, in backward or after it."""
    asked = recipe.optimizer
    lean = asked.in_backward or asked.paged or asked.offload or asked.stochastic_rounding or asked.states != "float32"
    if asked.kind == "adafactor" or (lean and asked.kind == "adamw"):
        name = "Adafactor" if asked.kind == "adafactor" else "AdamW"
        return Choice(False, f"Bloomery's {name}, in float32 pieces of bounded size")
    return profile.fused_optimizer


def pin_memory(recipe: Recipe, profile: Profile) -> Choice[bool]:
    asked = recipe.data.pin_memory
    return profile.pin_memory if asked == "auto" else Choice(asked, ASKED)


def prefetch(recipe: Recipe, profile: Profile) -> Choice[int]:
    asked = recipe.data.prefetch
    return profile.prefetch if asked == "auto" else Choice(asked, ASKED)


def _decay(schedule: str | Wsd) -> Duration | None:
    if schedule == "wsd":
        return Wsd().decay
    return schedule.decay if isinstance(schedule, Wsd) else None


def _number(asked: int | str) -> int | None:
    """None for auto."""
    return asked if isinstance(asked, int) else None
