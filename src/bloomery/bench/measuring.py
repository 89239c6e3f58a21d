"""Settings measured one by one, each in a child of its own, and the output of `bloomery bench`.

First the largest micro-batch, then the points of a sweep: a table of measured and planned figures, and a verdict.
"""

import itertools
import os
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, final

from bloomery.core import __version__
from bloomery.core.child import LONGEST_REASON, Child
from bloomery.core.device import is_accelerator
from bloomery.core.errors import UserError
from bloomery.core.text import labelled
from bloomery.core.units import GIB, format_count, format_seconds
from bloomery.facts.attention import SHORT_SEQUENCE, missing_feature
from bloomery.facts.counting import parameter_count, smallest_window
from bloomery.hardware.calibration import Calibration, Point, calibrations, device_of
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.plan.choices import memory_setting
from bloomery.plan.estimate.measured import compile_gain
from bloomery.plan.resolve import child_environment, local_plan
from bloomery.plan.types import Estimate, MemoryEstimate, RunPlan
from bloomery.plan.unsupported_layouts import refuse_several_devices
from bloomery.recipe.axes import axes_of
from bloomery.recipe.load import load_recipe

CHILD = "bloomery.bench.child"
# Compilation, or a step of a large model on a small CPU, takes minutes without a message.
SILENCE_SECONDS = 900.0
# A point is measured longer than a trial on the way to the largest micro-batch.
SECONDS = 8.0
SEARCH_SECONDS = 2.0
# A measurement is disturbed when its thread had no core for more than this share of the time.
DISTURBED = 0.15
# Timing both ways takes a minute or two, which pays off in a training of at least this length.
TRIAL_PAYS_SECONDS = 3600.0
SLOWEST_STEP = 90.0  # seconds: the search does not try micro-batches that would take longer

Outcome = Literal["ok", "memory", "crashed", "hung", "failed", "refused"]
OnPhase = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Some steps on one micro-batch: its loss before and after them, and the gradient norm of the first."""

    steps: int
    loss_before: float
    loss_after: float
    grad_norm: float

    @property
    def problem(self) -> str:
        """Why the steps were no training; empty where they were."""
        if self.grad_norm == 0:
            return "the gradient norm is 0"
        if not self.loss_after < self.loss_before:
            return "the loss of a micro-batch did not fall"
        return ""

    @property
    def sentence(self) -> str:
        losses = f"loss {self.loss_before:.4f} -> {self.loss_after:.4f}"
        return (
            f"{losses} in {self.steps} steps on one micro-batch; gradient norm {self.grad_norm:.3g}"
        )


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """A setting: its plan and its measurement. `plan` is None where the recipe was refused.

    `peak_gib`: on a GPU what tensors held, on a CPU what the process held; `step_seconds` is of one optimizer step.
    """

    overrides: tuple[str, ...]
    plan: RunPlan | None
    outcome: Outcome
    message: str = ""
    step_seconds: float | None = None
    fastest_seconds: float | None = None  # `step_seconds` is the median
    peak_gib: float | None = None
    reserved_gib: float | None = None
    # The share of the time that the measuring thread was ready to run and had no core.
    core_wait: float | None = None
    learning: "Learning | None" = None  # None where it was not tried

    @property
    def disturbed(self) -> bool:
        """Whether other programs used the CPU so much that the figures are not comparable."""
        return self.core_wait is not None and self.core_wait > DISTURBED

    @property
    def tokens_per_second(self) -> float | None:
        if self.plan is None or self.step_seconds is None:
            return None
        return self.plan.train.tokens_per_step / self.step_seconds

    @property
    def micro_batch_size(self) -> int:
        return self.plan.train.micro_batch_size if self.plan else 0

    @property
    def planned_gib(self) -> float | None:
        """The plan's figure for what `peak_gib` counts."""
        if self.plan is None:
            return None
        memory = self.plan.memory
        return (
            memory.allocated if is_accelerator(self.plan.train.device) else memory.total
        ) / 2**30


@final
@dataclass(frozen=True, kw_only=True)
class Bench:
    """A recipe on a machine. `memory_limit`: bytes, instead of the planned limit."""

    recipe: str
    overrides: tuple[str, ...]
    machine: Machine
    memory_limit: float | None = None

    def plan(self, *overrides: str) -> RunPlan:
        """Raises UserError for what the recipe or this version refuses."""
        loaded = load_recipe(self.recipe, (*self.overrides, *overrides))
        refuse_several_devices(loaded.recipe)
        plan, _ = local_plan(loaded, machine=self.machine)
        if self.memory_limit is None:
            return plan
        return plan.model_copy(
            update={"memory": plan.memory.model_copy(update={"limit": self.memory_limit})}
        )

    def point(self, *overrides: str, on_phase: OnPhase) -> BenchResult:
        """The recipe with these overrides, measured."""
        try:
            plan = self.plan(*overrides)
        except UserError as error:
            return BenchResult(
                overrides=overrides, plan=None, outcome="refused", message=error.problem
            )
        return measure_plan(plan, overrides, seconds=SECONDS, on_phase=on_phase, learns=True)

    def trial(self, size: int, *, on_phase: OnPhase) -> BenchResult:
        """A micro-batch size that need not divide the step; the step has whole micro-batches."""
        base_plan = self.plan()
        micro_batches = max(1, sequences_per_step(base_plan) // size)
        tokens_per_step = micro_batches * size * base_plan.data.sequence_length
        size_override = f"train.micro_batch_size={size}"
        overrides = (size_override, f"train.tokens_per_step={tokens_per_step}")
        plan = self.plan(*overrides)
        result = measure_plan(plan, overrides, seconds=SEARCH_SECONDS, on_phase=on_phase)
        # The step was changed for the trial alone: its row names only the size.
        return replace(result, overrides=(size_override,))


def compile_trial(plan: RunPlan, machine: Machine, *, on_phase: OnPhase) -> tuple[BenchResult, ...]:
    """The plan compiled and uncompiled, measured one after the other; empty where `train.compile` needs no trial.

    A trial pays off when a run on a CPU trains for at least TRIAL_PAYS_SECONDS and this machine has no measurement of
    both.
    """
    if plan.train.device != "cpu" or not plan.train.compile:
        return ()

    # What this machine has measured once for the model is not measured again, and a short run is not delayed.
    measured_gain = compile_gain(
        calibrations(machine),
        model=plan.model.config,
        precision=plan.train.precision,
        setting=memory_setting(plan),
    )
    if measured_gain is not None:
        return ()
    if plan.seconds is None or plan.seconds.value < TRIAL_PAYS_SECONDS:
        return ()

    measurements = []
    for compiled in (True, False):
        train = plan.train.model_copy(update={"compile": compiled})
        variant = plan.model_copy(update={"train": train})
        measurements.append(measure_plan(variant, (), seconds=SECONDS, on_phase=on_phase))
    return tuple(measurements)


def sequences_per_step(plan: RunPlan) -> int:
    return plan.train.micro_batch_size * plan.train.accumulation


def measure_plan(
    plan: RunPlan,
    overrides: tuple[str, ...],
    *,
    seconds: float,
    on_phase: OnPhase,
    learns: bool = False,
) -> BenchResult:
    """Measures `plan` in a child process. Every end of the child is a result: none raises.

    `learns`: a setting whose steps do not lower the loss counts as failed.
    """
    prepared = (plan.data.prepared / "manifest.json").is_file()
    job = {
        "plan": plan.model_dump(mode="json"),
        "seconds": seconds,
        "text": "prepared" if prepared else "random",
        "learns": learns,
    }
    result = partial(BenchResult, overrides=overrides, plan=plan)

    # The child tells its phases until it replies with a measurement, or it ends without one.
    on_phase("starting")
    with Child(CHILD, job, environment=child_environment(plan, os.environ)) as child:
        while True:
            reply = child.next(SILENCE_SECONDS)
            if reply == "silent":
                return result(outcome="hung", message=f"no message for {SILENCE_SECONDS:.0f} s")
            # The system sends SIGKILL when the machine is out of memory.
            if reply == "ended" and child.code == -9:
                return result(
                    outcome="memory",
                    message="the system killed the process (SIGKILL): out of memory",
                )
            if reply == "ended":
                return result(outcome="crashed", message=child.ending()[:LONGEST_REASON])
            assert isinstance(reply, dict)
            if "phase" not in reply:
                break
            on_phase(reply["phase"])
    if reply["outcome"] != "ok":
        return result(outcome=reply["outcome"], message=reply["message"])

    # A step that ran, but over the limit that the plan keeps to, counts as out of memory, with its figures.
    step_times = reply["step_seconds"]
    peak = reply["peak_gib"]
    limit = plan.memory.limit / 2**30
    outcome: Outcome = "ok"
    message = ""
    learning = None if reply["learning"] is None else Learning(**reply["learning"])
    if learning is not None and learning.problem:
        outcome = "failed"
        message = f"{learning.problem}: {learning.sentence}"
    if peak is not None and peak > limit:
        outcome = "memory"
        message = f"peak memory {peak:.2f} GiB exceeds the limit of {limit:.2f}"
    return result(
        outcome=outcome,
        message=message,
        step_seconds=statistics.median(step_times),
        fastest_seconds=min(step_times),
        peak_gib=peak,
        reserved_gib=reply["reserved_gib"],
        core_wait=reply["core_wait"],
        learning=learning,
    )


@dataclass(frozen=True, kw_only=True)
class Largest:
    """`size`: the largest micro-batch that fits, 0 when none does. `bound`: the limit that stopped the search."""

    size: int
    usable: int  # the largest that also divides the step
    bound: Literal["memory", "step", "time", "crash"]
    reason: str


def search(
    trial: Callable[[int], BenchResult],
    *,
    full_step: int,
    on_row: Callable[[BenchResult], None],
    slowest: float = SLOWEST_STEP,
    time_left: Callable[[], bool] = lambda: True,
) -> Largest:
    """Doubles until a failure or `full_step` sequences, then bisects to an eighth; at least one trial."""
    fits = 0
    fails = full_step + 1
    reason = f"the recipe has {full_step} sequences per step"
    bound: Literal["memory", "step", "time", "crash"] = "step"

    # Powers of two, then the full step, until one fails or the next would take too long.
    for size in [*(2**n for n in range((full_step - 1).bit_length())), full_step]:
        row = trial(size)
        on_row(row)
        if row.outcome != "ok":
            fails = size
            bound = "memory" if row.outcome == "memory" else "crash"
            reason = row.message
            break
        fits = size
        if size == full_step:
            break
        if row.plan is not None and row.step_seconds is not None:
            micro_batch_seconds = row.step_seconds / row.plan.train.accumulation
            if 2 * micro_batch_seconds > slowest:
                bound = "time"
                reason = f"twice the size would take more than {slowest:.0f} s per step"
                break
        if not time_left():
            bound = "time"
            reason = "half of --limit was over"
            break

    # Between the largest that fits and the smallest that fails, an eighth is precise enough.
    failed = bound in ("memory", "crash")
    while failed and fits and fails - fits > max(1, fits // 8) and time_left():
        middle = (fits + fails) // 2
        row = trial(middle)
        on_row(row)
        if row.outcome == "ok":
            fits = middle
        else:
            fails = middle
    usable = next((size for size in range(fits, 0, -1) if full_step % size == 0), 0)
    return Largest(size=fits, usable=usable, bound=bound, reason=reason)


MOST_POINTS = 64


def points(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """`["train.micro_batch_size=8,16", "train.compile=true,false"]` as four lists of overrides. Raises UserError.

    Commas inside brackets and quotes belong to a value.
    """
    # Every sweep is an axis: one key with its values.
    example = "--sweep train.micro_batch_size=8,16,32"
    axes = axes_of(sweeps, where="--sweep", example=example)
    settings = [[f"{key}={value}" for value in values] for key, values in axes.items()]

    # Every combination is a measurement, and their number grows with each axis.
    combinations = list(itertools.product(*settings))
    if len(combinations) > MOST_POINTS:
        problem = f"too many combinations to measure: {len(combinations)}"
        raise UserError(
            problem, where="--sweep", fix=f"use at most {MOST_POINTS} combinations", code=2
        )
    return combinations


def usual_points(plan: RunPlan, machine: Machine, *, largest: int) -> list[tuple[str, ...]]:
    """The recipe as planned, then the settings that most often change speed or memory, one at a time."""
    settings: list[tuple[str, ...]] = [()]
    if largest > plan.train.micro_batch_size:
        settings.append((f"train.micro_batch_size={largest}",))
    other_checkpointing = "full" if plan.train.activation_checkpointing == "none" else "none"
    settings.append((f"train.activation_checkpointing={other_checkpointing}",))
    if plan.train.compile:
        settings.append(("train.compile=false",))
    elif build_profile(machine).compile.value:
        settings.append(("train.compile=true",))
    attention = other_attention(plan)
    if attention is not None:
        settings.append((f"train.attention={attention}",))
    return settings


def other_attention(plan: RunPlan) -> str | None:
    """The next best backend with the same results; None: no other is worth a trial."""
    config = plan.model.config
    length = plan.data.sequence_length
    if is_accelerator(plan.train.device) and plan.model.attention == "blockwise":
        return None  # no fused kernel for this GPU: one built for another GPU may hang the driver
    if plan.model.attention == "triton":
        return "blockwise"

    # The first backend in the order of preference that supports what the plan needs.
    window = smallest_window(config)
    for backend in ("varlen", "flex", "per_document", "mask", "blockwise"):
        if backend == plan.model.attention:
            continue
        if (
            backend == "mask" and length > 4 * SHORT_SEQUENCE
        ):  # its mask has length x length entries
            continue
        reason_against = missing_feature(
            backend,
            device_type=plan.train.device,
            packed=plan.data.layout == "packed",
            window=window is not None and window < length,
            softcap=config.attention_softcap is not None,
            dropout=config.attention_dropout > 0,
            sinks=config.attention_sinks,
            float32=plan.train.precision == "float32",
            torch=plan.torch or None,
        )
        if reason_against is None:
            return backend
    return None


ANONYMOUS = "anonymous"


def make_measurement_file(
    rows: Sequence[BenchResult], machine: Machine, *, contributor: str = ANONYMOUS
) -> Calibration | None:
    """The settings of one model shape that could be measured, the recipe as planned first; None: there are none.

    A point whose model differs from the first one's is left out: a file is of one model.
    """
    measured = [row for row in rows if row.outcome == "ok" and row.plan is not None]
    if not measured or measured[0].plan is None:
        return None
    plan = measured[0].plan
    measured_points = []
    for row in measured:
        if row.plan is None or row.plan.model.config != plan.model.config:
            continue
        if row.tokens_per_second and row.peak_gib:
            point = _point(row.plan, row.tokens_per_second, row.peak_gib)
            measured_points.append(point)

    # The device and the software on which these figures are valid.
    profile = build_profile(machine)
    device = device_of(machine)
    software = machine.software
    accelerator = profile.accelerator
    memory = accelerator.usable_bytes if accelerator else machine.host.memory_bytes
    calibration = Calibration(
        device=device.name,
        arch=device.arch,
        cores=device.cores,
        cpu_check=machine.cpu_check if device.cores else None,
        memory_gib=round(memory / GIB, 2),
        torch=software.torch or "",
        bloomery=__version__,
        model=plan.model_dump(mode="json")["model"]["config"],
        parameters=parameter_count(plan.model.config),
        text="prepared" if (plan.data.prepared / "manifest.json").is_file() else "random",
        contributor=author_name(contributor),
        day=time.strftime("%Y-%m-%d"),
        points=tuple(measured_points),
    )
    return calibration.model_copy(update=machine.software.runtimes)


def _point(plan: RunPlan, tokens_per_second: float, peak_gib: float) -> Point:
    return Point(
        sequence_length=plan.data.sequence_length,
        micro_batch_size=plan.train.micro_batch_size,
        accumulation=plan.train.accumulation,
        precision=plan.train.precision,
        attention=plan.model.attention,
        compiled=plan.train.compile,
        activation_checkpointing=plan.train.activation_checkpointing,
        optimizer=plan.optimizer.kind,
        setting=memory_setting(plan),
        tokens_per_second=round(tokens_per_second, 1),
        peak_gib=round(peak_gib, 3),
    )


def author_name(text: str) -> str:
    """A cleaned author name. Raises UserError for other text, such as markup."""
    name = " ".join(text.split())
    if not re.fullmatch(r"[\w .,'@+-]{1,60}", name):
        fix = 'write --author "Ada L.", or leave it out to stay anonymous'
        raise UserError(f"not an author name: {text}", where="--author", fix=fix, code=2)
    return name


WIDTH = 100
LABEL = 10
SETTING = 38
NOISY = 1.25  # the median of equal steps over the fastest, above which something else was running
ORIGINS = {"table": "estimated", "probe": "from a probe", "measured": "measured"}
PLACES = {"inside": "within the plan's", "above": "ABOVE the plan's", "below": "BELOW the plan's"}
OUTCOMES = {
    "memory": "out of memory",
    "crashed": "crashed",
    "hung": "hung",
    "failed": "failed",
    "refused": "refused",
}


def opening(plan: RunPlan, *, recipe: str, device: str, prepared: bool) -> Iterator[str]:
    """The recipe, the device and the dataset of the measurements."""
    train = plan.train
    kind = "compiled" if train.compile else "uncompiled"
    yield _line(
        "bench",
        f"{recipe} on {device} · {train.precision} · {kind} · {plan.model.attention} attention",
    )
    batch = f"micro-batch {train.micro_batch_size} x {plan.data.sequence_length:,} tokens"
    batch += f", gradient accumulation {train.accumulation}"
    yield _line("plan", f"{batch} · activation checkpointing {train.activation_checkpointing}")
    text = "the recipe's dataset" if prepared else "random tokens: the dataset is not prepared"
    yield _line("dataset", f"speed on {text}; memory on the longest documents")


def heading(plan: RunPlan, label: str) -> Iterator[str]:
    """`memory` is what tensors held on a GPU, what the whole process held on a CPU."""
    memory = "GiB of tensors" if is_accelerator(plan.train.device) else "GiB resident"
    yield ""
    yield f"{label:<{SETTING}}{'tokens/s':>10}{'plan':>9}{'ratio':>7}  {memory:>14}{'plan':>8}{'ratio':>7}"


def line(row: BenchResult) -> str:
    """The row of one setting; a long name of a setting stands on a line above its figures."""
    keys = [override.removeprefix("train.") for override in row.overrides]
    setting_text = ", ".join(keys) or "as planned"
    line_above = ""
    if len(setting_text) >= SETTING:
        line_above = f"{setting_text}\n"
        setting_text = ""
    column = f"{setting_text:<{SETTING}}"
    if row.outcome != "ok":
        return line_above + wrapped(column, f"{OUTCOMES[row.outcome]}: {row.message}")

    # Measured and planned speed and memory, each pair with its ratio.
    assert row.plan is not None and row.tokens_per_second is not None
    planned = planned_rate(row.plan)
    speed = _compared(row.tokens_per_second, planned.value if planned else None, "{:,.0f}", (10, 9))
    memory = _compared(row.peak_gib, row.planned_gib, "{:.2f}", (16, 8))
    return f"{line_above}{column}{speed}{memory}"


def _compared(
    measured: float | None, planned: float | None, number_format: str, widths: tuple[int, int]
) -> str:
    measured_text = "" if measured is None else number_format.format(measured)
    planned_text = "unknown" if planned is None else number_format.format(planned)
    ratio = "" if measured is None or not planned else f"{measured / planned:.2f}"
    return f"{measured_text:>{widths[0]}}{planned_text:>{widths[1]}}{ratio:>7}"


def planned_rate(plan: RunPlan) -> Estimate | None:
    """The planned tokens per second; None where the table does not know the device."""
    if plan.step_seconds is None:
        return None
    return plan.step_seconds.inverse(plan.trained_tokens_per_step)


def largest_lines(largest: Largest, plan: RunPlan) -> Iterator[str]:
    """The largest micro-batch, and what bounds it."""
    bounds = {
        "memory": "out of memory",
        "step": "bounded by the step",
        "time": "not tried further",
        "crash": "crash",
    }
    if not largest.size:
        yield _line("largest", f"not even micro-batch 1 fits: {largest.reason}")
        return
    tokens = f"micro-batch {largest.size:,}, {largest.size * plan.data.sequence_length:,} tokens"
    usable = "" if largest.usable == largest.size else f"; {largest.usable:,} divides the step"
    beyond = " beyond" if largest.bound in ("memory", "crash") else ""
    yield _line("largest", f"{tokens}{usable} ({bounds[largest.bound]}{beyond}: {largest.reason})")


def verdict(row: BenchResult) -> dict[str, str]:
    """Of speed and memory: inside, above or below the plan's interval, unknown, or failed when nothing was measured."""
    if row.outcome != "ok" or row.plan is None:
        return {"speed": "failed", "memory": "failed"}
    rate = planned_rate(row.plan)
    speed = "unknown"
    if rate is not None:
        speed = _placed(row.tokens_per_second or 0.0, rate.low, rate.high)
    memory = _placed(row.peak_gib or 0.0, *_planned_range(row, row.plan.memory))
    return {"speed": speed, "memory": memory}


def _planned_range(row: BenchResult, memory: MemoryEstimate) -> tuple[float, float]:
    """Low and high GiB of what `peak_gib` counts: the interval of the total, scaled.

    What an allocator and a driver add is in the planned total, and not in what tensors hold.
    """
    share = (row.planned_gib or 0.0) * GIB / memory.total if memory.total else 0.0
    return memory.low * share / GIB, memory.high * share / GIB


def _placed(value: float, low: float, high: float) -> str:
    if value < low:
        return "below"
    return "above" if value > high else "inside"


def verdict_lines(row: BenchResult) -> Iterator[str]:
    """Whether the plan was right, in two sentences."""
    places = verdict(row)
    if places["speed"] == "failed":
        yield _line(
            "verdict",
            f"the recipe as planned could not be measured: {OUTCOMES[row.outcome]}, {row.message}",
        )
        return
    assert row.plan is not None and row.tokens_per_second is not None and row.peak_gib is not None

    # Speed, where the plan has an estimate for this device.
    rate = planned_rate(row.plan)
    speed = f"{row.tokens_per_second:,.0f} tokens/s"
    if rate is None:
        yield _line("verdict", f"{speed}: the plan had no estimate for this device")
    else:
        span = f"{rate.low:,.0f} to {rate.high:,.0f} ({rate.by or ORIGINS[rate.origin]})"
        yield _line("verdict", f"{speed}: {PLACES[places['speed']]} {span}")

    # Memory, which every plan estimates.
    memory = row.plan.memory
    low, high = _planned_range(row, memory)
    memory_span = f"{low:.2f} to {high:.2f} ({ORIGINS[memory.origin]})"
    yield _line("", f"{row.peak_gib:.2f} GiB: {PLACES[places['memory']]} {memory_span}")
    if row.learning is not None:
        yield _line("", row.learning.sentence)
    if row.reserved_gib is not None:
        yield _line(
            "", f"the allocator reserved {row.reserved_gib:.2f} GiB of {memory.limit / GIB:.2f}"
        )


def noise_line(rows: Sequence[BenchResult]) -> Iterator[str]:
    """A warning when other programs used the CPU, or equal steps took unequal times."""
    disturbed = [row.core_wait for row in rows if row.disturbed and row.core_wait is not None]
    if disturbed:
        text = (
            f"other programs used the CPU for {max(disturbed):.0%} of a measurement: not comparable"
        )
        yield _line("warning", text)
        return

    # Without a direct sign of other programs, unequal times in half of the rows are one.
    timed_rows = 0
    noisy_times = []
    for row in rows:
        if row.fastest_seconds and row.step_seconds:
            timed_rows += 1
            if row.step_seconds > NOISY * row.fastest_seconds:
                noisy_times.append((row.fastest_seconds, row.step_seconds))
    if noisy_times and 2 * len(noisy_times) >= timed_rows:
        fastest, median = max(noisy_times, key=lambda pair: pair[1] / pair[0])
        text = f"half of the steps took {median:.2g} s or more, the fastest {fastest:.2g} s: did other programs run?"
        yield _line("warning", text)


def closing(row: BenchResult, *, remembered: bool, source: str) -> Iterator[str]:
    """The time of the whole run, what is remembered, and the next command."""
    if row.outcome == "ok" and row.plan is not None and row.tokens_per_second:
        total_tokens = row.plan.total_tokens
        if total_tokens is not None:
            duration = format_seconds(total_tokens / row.tokens_per_second)
            yield _line("", f"{format_count(total_tokens)} tokens (the whole run) take {duration}")
        if remembered:
            yield _line("kept", "`bloomery plan` uses this measurement from now on")
        elif row.disturbed:
            yield _line("kept", "nothing: close other programs, then measure again")
    yield from labelled("next", f"bloomery train {source}", indent=LABEL, width=WIDTH)


def _line(label: str, text: str) -> str:
    return wrapped(f"{label:<{LABEL}}", text)


def wrapped(head: str, text: str) -> str:
    """`text` after `head`, on as many lines of WIDTH as needed, all of which begin below the end of `head`."""
    lines = textwrap.wrap(text, WIDTH - len(head)) or [""]
    return "\n".join([head + lines[0], *(" " * len(head) + rest for rest in lines[1:])]).rstrip()
