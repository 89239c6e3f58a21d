"""The forms that a teacher may have, their memory and time, and which is the fastest that fits. No torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

from bloomery.core import Choice
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes, format_seconds
from bloomery.plan.estimate.measured import StepEstimator
from bloomery.plan.estimate.memory import teacher_parts
from bloomery.plan.estimate.scoring import scoring_memory
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
    host_devices: int,
    states_tokens: int,
) -> tuple[TeacherForm, ...]:
    """On the device, streamed from the host, on the device in 4 bits, and on another device, where there is one.
    `measure` and `seconds`: of a step in the plan's layout, in which as many `devices` with the head share the tokens
    of a step.

    `states_tokens`: of a step, whose hidden states a teacher that streams gives before it. `host_devices`: of a host,
    with those that score.
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
            teacher_place="device",
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
    if host_devices > 1:
        forms.append(
            _on_another_device(step, measure=measure, seconds=seconds, host_devices=host_devices)
        )
    return tuple(forms)


def _on_another_device(
    step: StepShape,
    *,
    measure: Callable[[StepShape], MemoryEstimate],
    seconds: Callable[[StepShape], float | None],
    host_devices: int,
) -> TeacherForm:
    """One of the host's devices then does not train, and the others have its part of the step."""
    training = host_devices - 1
    shape = replace(
        step,
        teacher_quantize="none",
        teacher_stream=False,
        teacher_tokens=0,
        teacher_place="output",
        ranks_per_scorer=training,
    )
    memory = measure(shape)
    there = scoring_memory(shape, (), limit=memory.limit)
    step_seconds = seconds(shape)
    # The plan's layout has the devices that train now, which are one fewer where one scores already.
    if step_seconds is not None and step.teacher_place == "device":
        step_seconds *= host_devices / training
    return TeacherForm(
        f"on another device, which needs {format_bytes(there.total)} and then does not train,",
        "parallel.scoring_devices=1",
        teacher_parts(shape)["teacher"],
        step_seconds,
        memory.fits and there.fits,
        changes=False,
    )


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
    if step.teacher_place != "device":
        value = "on a device that only scores"
    yield "objective.teacher_stream", Choice(value, reason)


def refuse_small_host(step: StepShape, estimator: StepEstimator, *, copies: int = 1) -> None:
    """Raises UserError where a host has no room for a teacher that streams, `copies` of which are on it."""
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
