"""Lengths as steps: "3 epochs", "10B tokens", "20%", "8h"."""

import math
from dataclasses import dataclass, replace
from typing import TypeVar

from bloomery.core import Choice
from bloomery.core.errors import UserError
from bloomery.core.units import Duration, format_count
from bloomery.plan.choices import ASKED
from bloomery.plan.types import DatasetFacts, RunPlan

N = TypeVar("N", int, float)

# Assumed of a wall-time run on a device of unknown speed, and of a dataset that is not here, to size evaluations.
UNKNOWN_STEPS = 1000


def in_epochs(plan: RunPlan) -> str:
    """ "about 3 epochs"; empty where the number is unknown."""
    epochs = plan.epochs
    if epochs is None:
        return ""
    number = f"{epochs:,.0f}" if epochs >= 100 else f"{float(f'{epochs:.2g}'):g}"
    uncounted = plan.train.seconds is not None or (
        plan.dataset is not None and plan.dataset.spread > 0
    )
    return f"{'about ' if uncounted else ''}{number} {'epoch' if number == '1' else 'epochs'}"


def too_many_epochs(plan: RunPlan) -> str | None:
    """A warning with the edit, where the dataset is repeated so often that the model overfits."""
    repeats = plan.objective.spec.repeats
    epochs = plan.epochs
    dataset = plan.dataset
    if (
        repeats is None
        or epochs is None
        or dataset is None
        or epochs <= repeats.most_epochs * (1 + dataset.spread) + 0.05
    ):
        return None
    edit = f"set train.epochs={repeats.usual_epochs}"
    count = dataset.sequences_per_epoch
    sequences = "one sequence" if count == 1 else f"{count:,} sequences"
    run = f"the run trains for {in_epochs(plan)} on its {sequences}"
    return f"{run}: {repeats.reason}; {edit}"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One step in every unit; None where unknown."""

    tokens_per_step: int
    sequences_per_step: int
    sequences_per_epoch: int | None
    steps: int | None  # of the whole run
    step_seconds: float | None
    epochs: float | None = None  # of the whole run, where its length is in epochs
    guessed: bool = False  # sequences_per_epoch is estimated from files


def scale_of(
    length: Duration, sequence_length: int, dataset: DatasetFacts | None, tokens_per_step: int
) -> Scale:
    """The scale of a run of `length`, before a step is measured. Raises UserError."""
    scale = Scale(
        tokens_per_step=tokens_per_step,
        sequences_per_step=tokens_per_step // sequence_length,
        sequences_per_epoch=dataset.sequences_per_epoch if dataset else None,
        guessed=bool(dataset and dataset.spread),
        steps=None,
        step_seconds=None,
        epochs=length.amount if length.unit == "epochs" else None,
    )
    return replace(scale, steps=total_steps(length, scale))


def total_steps(length: Duration, scale: Scale) -> int | None:
    """Steps of a run; None for a wall-time length, and for epochs of an unknown dataset.

    Tokens are rounded up to whole steps; the last partial step of an epoch count is dropped. Raises UserError.
    """
    if length.unit == "seconds":
        return None
    if length.unit == "epochs":
        if scale.sequences_per_epoch is None:
            return None
        sequences = int(scale.sequences_per_epoch * length.amount)
        steps = sequences // scale.sequences_per_step
        if steps == 0 and not scale.guessed:
            raise UserError(
                f"{length.amount:g} epochs of the dataset are {format_count(sequences)} sequences,"
                f" fewer than one step: {scale.sequences_per_step}",
                where="train.epochs",
                fix="add data, lower data.sequence_length or set train.tokens_per_step=auto",
            )
        return max(1, steps)
    per_unit = scale.tokens_per_step if length.unit == "tokens" else 1
    return max(1, math.ceil(length.amount / per_unit))


def left_out(length: Duration, scale: Scale) -> int:
    """Rows at the end of an epoch count that fill no step; 0 for any other length."""
    if length.unit != "epochs" or scale.sequences_per_epoch is None:
        return 0
    sequences = int(scale.sequences_per_epoch * length.amount)
    return sequences % scale.sequences_per_step if sequences >= scale.sequences_per_step else 0


def steps_of(length: Duration, scale: Scale, *, key: str) -> int:
    """Steps of a part of a run, at least 1 unless the length is 0.

    Raises UserError when the unit cannot be converted: a time on a device of unknown speed.
    """
    if length.amount == 0:
        return 0
    amount = length.amount
    if length.unit == "tokens":
        amount = length.amount / scale.tokens_per_step
    elif length.unit == "percent":
        # Rounded up: every 20% of 366 steps is five times, the last of them at the end.
        amount = math.ceil(round(length.amount / 100 * (scale.steps or UNKNOWN_STEPS), 6))
    elif length.unit == "epochs":
        amount = length.amount * _steps_per_epoch(scale)
    elif length.unit == "seconds":
        amount = length.amount / _known(
            scale.step_seconds, key, "the speed of this device is unknown"
        )
    return max(1, round(amount))


def _steps_per_epoch(scale: Scale) -> float:
    """Of a dataset that is not here yet: an assumption, as `train` prepares the dataset before it plans."""
    if scale.sequences_per_epoch is not None:
        return scale.sequences_per_epoch / scale.sequences_per_step
    return (scale.steps or UNKNOWN_STEPS) / (scale.epochs or 1)


def on_evaluations(checkpoint: N, evaluation: N | None) -> N:
    """The checkpoint interval as the nearest whole multiple of the evaluation interval, so that a checkpoint has an
    evaluation; both in steps or both as shares of a run.

    A shorter one stays: it limits what a crash repeats, and the best evaluation saves its weights on its own.
    """
    if evaluation is None or checkpoint <= evaluation:
        return checkpoint
    return evaluation * math.ceil(round(checkpoint / evaluation, 9) - 0.5)


def checkpoint_steps(interval: Duration, scale: Scale, *, evaluation: int | None) -> Choice[int]:
    """Steps between checkpoints; `evaluation`: those between evaluations, None without any. Raises as `steps_of`."""
    steps = steps_of(interval, scale, key="checkpoint.every")
    moved_steps = on_evaluations(steps, evaluation)
    # Of a run without a number of steps, those of a share are an assumption: no reason cites them.
    is_assumed = scale.steps is None and interval.unit in ("percent", "epochs")
    if moved_steps == steps or is_assumed:
        return Choice(steps, ASKED)
    asked_text = (
        f"{interval} is {steps:,}"
        if interval.unit != "steps"
        else f"{steps:,} steps were asked for"
    )
    return Choice(
        moved_steps, f"{asked_text}: moved to a multiple of eval.every, {evaluation:,} steps"
    )


def _known(value: float | None, key: str, reason: str) -> float:
    if value is None:
        problem = f"cannot convert {key} into steps: {reason}"
        raise UserError(problem, where=key, fix="write it in steps or in %", code=2)
    return value


def provisional_steps(length: Duration, step_seconds: float | None) -> int | None:
    """Estimated steps of a wall-time length; None when the step time is unknown."""
    if length.unit != "seconds" or step_seconds is None:
        return None
    return max(1, round(length.amount / step_seconds))


def evaluation_sequences(
    every_steps: int | None, scale: Scale, *, tokens: int | None
) -> int | None:
    """Rows that an evaluation reads at most: as many as hold the `tokens` that were asked for; else a tenth of those
    trained on since the last (3% of the time), or 64.
    """
    if every_steps is None:
        return None
    if tokens is not None:
        return -(-tokens * scale.sequences_per_step // scale.tokens_per_step)
    return max(64, every_steps * scale.sequences_per_step // 10)
