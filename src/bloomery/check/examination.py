"""Whether a device computes what the CPU computes: the parts of a step of a small model, then the step.

A small model of the run's widths takes one step on the device and in float32 on the CPU; so does every part of it. What
differs by more than rounding is named.
"""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import final

import torch

from bloomery.check.comparison import RESULT, Deviation, PartResult
from bloomery.check.parts import Kind, examine_part, parts_of
from bloomery.check.small_model import ModelPair, build_pair, small_plan
from bloomery.check.updates import examine_optimizer
from bloomery.check.whole_step import exact_step, step_differences, step_on_device
from bloomery.core.device import generators_restored, release_cached_memory, reset_peak_memory
from bloomery.plan.types import RunPlan, TrainPlan
from bloomery.train.process import out_of_memory


@final
@dataclass(frozen=True)
class Fault:
    """A part at fault. `quantity`: what of it is wrong; "" and a `message`: it could not be computed."""

    part: str
    kind: Kind
    quantity: str
    error: float = 0.0
    bound: float = 0.0
    message: str = ""
    # An error after which the device does nothing in this process any more.
    is_fatal: bool = False

    @property
    def text(self) -> str:
        """What the device does, such as "computes wrong gradients in q_proj"."""
        if self.message:
            return f"fails in {self.part}"
        if self.quantity.startswith("update"):
            return f"computes wrong updates in {self.part}"
        kind = "gradients" if "gradient" in self.quantity else "results"
        if self.kind == "step":
            return f"computes wrong {kind} in a whole step, where each part is right by itself"
        return f"computes wrong {kind} in {self.part}"

    @property
    def detail(self) -> str:
        if self.message:
            return self.message
        quantity = "" if self.quantity == RESULT else f"{self.quantity}: "
        return f"{quantity}error {self.error:.2g}, at most {self.bound:.2g} is rounding"


@final
@dataclass(frozen=True)
class Examination:
    """What a check found, the first part at fault first. `unrepeatable`: parts with other bits at the second time."""

    faults: tuple[Fault, ...]
    unrepeatable: tuple[str, ...]
    seconds: float


def examine(plan: RunPlan) -> Examination:
    """Check the plan's device. Raises torch's out-of-memory errors, and what building the small model raises.

    The state of random generators is as before, and compiled code of the small model is forgotten.
    """
    began = time.perf_counter()
    faults: list[Fault] = []
    unrepeatable: list[str] = []
    try:
        with generators_restored(plan.train.device):
            _examine_pair(build_pair(small_plan(plan)), faults, unrepeatable)
        gc.collect()
        if plan.train.compile:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
        release_cached_memory()
        reset_peak_memory(plan.train.device)
    except torch.AcceleratorError:
        # After an error of the device nothing works on it any more, not even to restore a generator.
        if not faults:
            raise
    return Examination(tuple(faults), tuple(unrepeatable), time.perf_counter() - began)


def _examine_pair(pair: ModelPair, faults: list[Fault], unrepeatable: list[str]) -> None:
    """Adds what is wrong, and the parts whose bits differ."""
    for fault, name in _examined_parts(pair):
        if fault is not None:
            faults.append(fault)
        if name:
            unrepeatable.append(name)
    # A part at fault makes a step wrong, too, and is the better name for it.
    if not faults:
        step_faults, same_bits = examine_step(pair)
        faults += step_faults
        if not same_bits and not unrepeatable:
            unrepeatable.append("a whole step")


def _examined_parts(pair: ModelPair) -> Iterator[tuple[Fault | None, str]]:
    """Of each part, what is wrong with it, and its name where bits differ.

    A layer is made of the other parts, so that it is not looked at where one of these is wrong; nor is anything after
    an error of the device, which may be in no state to go on.
    """
    is_wrong = False
    for part in parts_of(pair):
        if is_wrong and part.kind in ("layer", "compiled layer"):
            continue
        fault, unrepeatable = _examined(part.name, part.kind, partial(examine_part, part, pair))
        is_wrong |= fault is not None
        yield fault, unrepeatable
        if fault is not None and fault.message:
            return
    kind = pair.tested.plan.optimizer.kind
    yield _examined(f"the optimizer ({kind})", "optimizer", lambda: examine_optimizer(pair))


def _examined(name: str, kind: Kind, compute: Callable[[], PartResult]) -> tuple[Fault | None, str]:
    try:
        result = compute()
    except Exception as error:  # whatever a driver, a compiler or a library raises is a fault
        if out_of_memory(error):
            raise
        first_line = str(error).strip().partition("\n")[0][:200]
        message = f"{type(error).__name__}: {first_line}"
        is_fatal = isinstance(error, torch.AcceleratorError)
        return Fault(name, kind, "", message=message, is_fatal=is_fatal), ""
    fault = None
    if result.differences:
        first = result.differences[0]
        fault = Fault(name, kind, first.quantity, first.error, first.bound)
    return fault, name if result.different_bits else ""


def examine_step(pair: ModelPair) -> tuple[list[Fault], bool]:
    """What is wrong in two equal steps, and whether their bits are the same."""
    exact = exact_step(pair)
    steps = [step_on_device(pair) for _ in range(2)]
    # The first step that differs is enough.
    differences: list[Deviation] = []
    for numbers in steps:
        differences = differences or step_differences(pair, numbers, exact)
    faults = [
        Fault("a whole step", "step", difference.quantity, difference.error, difference.bound)
        for difference in differences
    ]
    return faults[:1], steps[0].has_bits_of(steps[1])


def problem_of(train: TrainPlan, fault: Fault) -> str:
    """Such as "this GPU computes wrong gradients in q_proj with bfloat16"."""
    device = "CPU" if train.device == "cpu" else "GPU"
    precision = "" if fault.kind == "optimizer" else f" with {train.precision}"
    return f"this {device} {fault.text}{precision}"
