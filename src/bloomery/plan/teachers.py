"""The forms that a teacher may have, their memory and time, and which is the fastest that fits. No torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

from bloomery.core import Choice
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes, format_seconds
from bloomery.plan.estimate.measured import StepEstimator
from bloomery.plan.estimate.memory import teacher_parts
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.estimate.streaming import streamed_by_layer, teacher_shape
from bloomery.plan.types import MemoryEstimate


@final
@dataclass(frozen=True)
class TeacherForm:
    """`device_bytes`: of the teacher on the device; `seconds`: of a step's training with it, None where the device or
    its link is unknown. `changes`: whether its probabilities change a little.
    """

    name: str
    edit: str
    device_bytes: float
    seconds: float | None
    fits: bool
    changes: bool

    def __str__(self) -> str:
        time = "" if self.seconds is None else f" and {format_seconds(self.seconds)} per step"
        too_much = "" if self.fits else ", which does not fit"
        return f"{self.name} {format_bytes(self.device_bytes)}{time}{too_much}"


def teacher_forms(
    step: StepShape,
    *,
    measure: Callable[[StepShape], MemoryEstimate],
    seconds: Callable[[StepShape], float | None],
    devices: int,
    states_tokens: int,
) -> tuple[TeacherForm, ...]:
    """On the device, streamed from the host, and on the device in 4 bits. `measure` and `seconds`: of a step in the
    plan's layout, in which as many `devices` with the head share the tokens of a step.

    `states_tokens`: of a step, whose hidden states a teacher that streams gives before it.
    """
    forms = []
    for name, edit, quantize, streams in (
        ("on the device", "teacher_stream=off", "none", False),
        ("streamed from the host", "teacher_stream=layers", "none", True),
        ("in nf4 on the device", "teacher_quantize=nf4", "nf4", False),
    ):
        shape = replace(
            step,
            teacher_quantize=quantize,
            teacher_stream=streams,
            teacher_tokens=states_tokens if streams else 0,
        )
        of_device = replace(shape, teacher_tokens=-(-shape.teacher_tokens // devices))
        forms.append(
            TeacherForm(
                name,
                f"objective.{edit}",
                teacher_parts(of_device)["teacher"],
                seconds(shape),
                measure(shape).fits,
                quantize != "none",
            )
        )
    return tuple(forms)


def fastest(forms: tuple[TeacherForm, ...]) -> TeacherForm | None:
    """Of those that fit and whose time is known; of equal ones the first, whose probabilities do not change."""
    known = [form for form in forms if form.fits and form.seconds is not None]
    return min(known, key=lambda form: (round(form.seconds or 0.0, 3), form.changes), default=None)


def teacher_form_choice(
    step: StepShape, forms: tuple[TeacherForm, ...]
) -> Iterator[tuple[str, Choice[str]]]:
    """The forms of the teacher, by memory and time. Nothing without any."""
    if not forms:
        return
    best = fastest(forms)
    reason = "; ".join(map(str, forms))
    if best is not None:
        reason += f". The fastest that fits: {best.name} ({best.edit})"
    value = "layers on the host" if step.teacher_stream else "on the device"
    yield "objective.teacher_stream", Choice(value, reason)


def refuse_small_host(step: StepShape, estimator: StepEstimator, *, copies: int = 1) -> None:
    """Raises UserError where a host has no room for a teacher that streams. `copies`: each device has its own."""
    if step.teacher is None or not step.teacher_stream or estimator.profile.accelerator is None:
        return
    needed = copies * sum(streamed_by_layer(teacher_shape(step, step.teacher)))
    free = estimator.machine.host.memory_free_bytes
    if needed > free:
        of_each = f", once for each of {copies} devices" if copies > 1 else ""
        raise UserError(
            f"the layers of the teacher need {format_bytes(needed)} of host memory{of_each}, {format_bytes(free)} are"
            " free",
            where="objective.teacher_stream=layers",
            fix="set objective.teacher_quantize=nf4, which streams a third of it, or choose a smaller teacher",
        )
