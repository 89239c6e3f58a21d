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
from bloomery.core.errors import UserError
from bloomery.core.text import labelled
from bloomery.core.units import GIB, format_count, format_seconds
from bloomery.hardware.calibration import Calibration, Point, calibrations, device_of
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.model.attention.support import SHORT, supports
from bloomery.model.counting import parameter_count
from bloomery.plan.choices import setting
from bloomery.plan.estimate.measured import compile_gain
from bloomery.plan.resolve import child_environment, local_plan
from bloomery.plan.types import Estimate, MemoryEstimate, RunPlan
from bloomery.plan.unsupported import refuse_several_devices
from bloomery.recipe.load import load_recipe

CHILD = "bloomery.bench.child"
# compilation, or a step of a large model on a small CPU, takes minutes without a message
SILENCE_SECONDS = 900.0
# of measuring a point; of a trial on the way to the largest micro-batch
SECONDS = 8.0
SEARCH_SECONDS = 2.0
DISTURBED = 0.15  # of the time without a core
TRIAL_PAYS_SECONDS = 3600.0  # of training, beyond which a minute or two of timing both is worth it
SLOWEST_STEP = 90.0  # seconds: the search does not try micro-batches that would take longer

Outcome = Literal["ok", "memory", "crashed", "hung", "failed", "refused"]
OnPhase = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """A setting: its plan and its measurement. `plan` is None where the recipe was refused.

    `peak_gib`: on a GPU what tensors held, on a CPU what the process held; `step_seconds` is of one optimizer step.
    """

    words: tuple[str, ...]
    plan: RunPlan | None
    outcome: Outcome
    message: str = ""
    step_seconds: float | None = None
    fastest_seconds: float | None = None  # `step_seconds` is the median
    peak_gib: float | None = None
    reserved_gib: float | None = None
    # the share of the time that the measuring thread was ready to run and had no core
    core_wait: float | None = None

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
        return (memory.allocated if self.plan.train.device == "cuda" else memory.total) / 2**30


@final
@dataclass(frozen=True, kw_only=True)
class Bench:
    """A recipe on a machine. `memory_limit`: bytes, instead of the planned limit."""

    recipe: str
    overrides: tuple[str, ...]
    machine: Machine
    memory_limit: float | None = None

    def plan(self, *words: str) -> RunPlan:
        """Raises UserError for what the recipe or this version refuses."""
        loaded = load_recipe(self.recipe, (*self.overrides, *words))
        refuse_several_devices(loaded.recipe)
        plan, _ = local_plan(loaded, machine=self.machine)
        if self.memory_limit is None:
            return plan
        return plan.model_copy(
            update={"memory": plan.memory.model_copy(update={"limit": self.memory_limit})}
        )

    def point(self, *words: str, on_phase: OnPhase) -> BenchResult:
        """The recipe with these overrides, measured."""
        try:
            plan = self.plan(*words)
        except UserError as error:
            return BenchResult(words=words, plan=None, outcome="refused", message=error.problem)
        return run(plan, words, seconds=SECONDS, on_phase=on_phase)

    def trial(self, size: int, *, on_phase: OnPhase) -> BenchResult:
        """A micro-batch size that need not divide the step; the step has whole micro-batches."""
        base = self.plan()
        each = size * base.data.sequence_length
        words = (
            f"train.micro_batch_size={size}",
            f"train.tokens_per_step={max(1, sequences_per_step(base) // size) * each}",
        )
        row = run(self.plan(*words), words, seconds=SEARCH_SECONDS, on_phase=on_phase)
        return replace(row, words=words[:1])


def compile_trial(plan: RunPlan, machine: Machine, *, on_phase: OnPhase) -> tuple[BenchResult, ...]:
    """The plan compiled and uncompiled, measured one after the other; empty where `train.compile` needs no trial.

    A trial pays off when a run on a CPU trains for at least TRIAL_PAYS_SECONDS and this machine has no measurement of
    both.
    """
    if plan.train.device != "cpu" or not plan.train.compile:
        return ()
    known = compile_gain(
        calibrations(machine),
        model=plan.model.config,
        precision=plan.train.precision,
        setting=setting(plan),
    )
    if known is not None or plan.seconds is None or plan.seconds.value < TRIAL_PAYS_SECONDS:
        return ()
    both = [
        plan.model_copy(update={"train": plan.train.model_copy(update={"compile": way})})
        for way in (True, False)
    ]
    return tuple(run(way, (), seconds=SECONDS, on_phase=on_phase) for way in both)


def sequences_per_step(plan: RunPlan) -> int:
    return plan.train.micro_batch_size * plan.train.accumulation


def run(plan: RunPlan, words: tuple[str, ...], *, seconds: float, on_phase: OnPhase) -> BenchResult:
    """One child from its start to its end, whatever that is."""
    prepared = (plan.data.prepared / "manifest.json").is_file()
    job = {
        "plan": plan.model_dump(mode="json"),
        "seconds": seconds,
        "text": "prepared" if prepared else "random",
    }
    result = partial(BenchResult, words=words, plan=plan)
    on_phase("starting")
    with Child(CHILD, job, environment=child_environment(plan, os.environ)) as child:
        while True:
            reply = child.next(SILENCE_SECONDS)
            if reply == "silent":
                return result(outcome="hung", message=f"no message for {SILENCE_SECONDS:.0f} s")
            # the system sends SIGKILL when the machine is out of memory
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
    times = reply["step_seconds"]
    limit = plan.memory.limit / 2**30
    peak = reply["peak_gib"]
    over = peak is not None and peak > limit
    return result(
        outcome="memory" if over else "ok",
        message=f"peak memory {peak:.2f} GiB exceeds the limit of {limit:.2f}" if over else "",
        step_seconds=statistics.median(times),
        fastest_seconds=min(times),
        peak_gib=peak,
        reserved_gib=reply["reserved_gib"],
        core_wait=reply["core_wait"],
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
    most: int,
    on_row: Callable[[BenchResult], None],
    slowest: float = SLOWEST_STEP,
    time_left: Callable[[], bool] = lambda: True,
) -> Largest:
    """Doubles until a failure or a full step, then bisects to an eighth; at least one trial."""
    fits = 0
    fails = most + 1
    reason = f"the recipe has {most} sequences per step"
    bound: Literal["memory", "step", "time", "crash"] = "step"
    for size in [*(2**n for n in range((most - 1).bit_length())), most]:
        row = trial(size)
        on_row(row)
        if row.outcome != "ok":
            fails = size
            bound = "memory" if row.outcome == "memory" else "crash"
            reason = row.message
            break
        fits = size
        step = None if row.plan is None or size == most else row.step_seconds
        if (
            step is not None
            and row.plan is not None
            and 2 * step / row.plan.train.accumulation > slowest
        ):
            bound = "time"
            reason = f"twice the size would take more than {slowest:.0f} s per step"
            break
        if size < most and not time_left():
            bound = "time"
            reason = "half of --limit was over"
            break
    while (
        bound in ("memory", "crash") and fits and fails - fits > max(1, fits // 8) and time_left()
    ):
        middle = (fits + fails) // 2
        row = trial(middle)
        on_row(row)
        if row.outcome == "ok":
            fits = middle
        else:
            fails = middle
    usable = next((size for size in range(fits, 0, -1) if most % size == 0), 0)
    return Largest(size=fits, usable=usable, bound=bound, reason=reason)


MOST_POINTS = 64


def points(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """`["train.micro_batch_size=8,16", "train.compile=true,false"]` as four lists of overrides. Raises UserError.

    Commas inside brackets and quotes belong to a value.
    """
    axes: dict[str, list[str]] = {}
    for sweep in sweeps:
        key, equals, text = sweep.partition("=")
        values = [value for value in split(text) if value]
        if not equals or "." not in key or not values:
            fix = "write --sweep train.micro_batch_size=8,16,32"
            raise UserError(f"not a sweep: {sweep}", where="--sweep", fix=fix, code=2)
        if key in axes:
            fix = f"put all values into one: --sweep {key}=a,b,c"
            raise UserError(f"--sweep has this key twice: {key}", where="--sweep", fix=fix, code=2)
        axes[key] = [f"{key}={value}" for value in values]
    found = list(itertools.product(*axes.values()))
    if len(found) > MOST_POINTS:
        problem = f"too many combinations to measure: {len(found)}"
        raise UserError(
            problem, where="--sweep", fix=f"use at most {MOST_POINTS} combinations", code=2
        )
    return found


def split(text: str) -> list[str]:
    """At commas outside brackets and quotes."""
    parts = [""]
    depth = 0
    quote = ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        if letter == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def usual_points(plan: RunPlan, machine: Machine, *, largest: int) -> list[tuple[str, ...]]:
    """The recipe as planned, then the settings that most often change speed or memory, one at a time."""
    found: list[tuple[str, ...]] = [()]
    if largest > plan.train.micro_batch_size:
        found.append((f"train.micro_batch_size={largest}",))
    other = "full" if plan.train.activation_checkpointing == "none" else "none"
    found.append((f"train.activation_checkpointing={other}",))
    if plan.train.compile:
        found.append(("train.compile=false",))
    elif build_profile(machine).compile.value:
        found.append(("train.compile=true",))
    attention = other_attention(plan)
    if attention is not None:
        found.append((f"train.attention={attention}",))
    return found


def other_attention(plan: RunPlan) -> str | None:
    """The next best backend with the same results; None: no other is worth a trial."""
    config = plan.model.config
    length = plan.data.sequence_length
    if plan.train.device == "cuda" and plan.model.attention == "blockwise":
        return None  # no fused kernel for this GPU: one built for another GPU may hang the driver
    for backend in ("varlen", "flex", "per_document", "mask", "blockwise"):
        too_wide = backend == "mask" and length > 4 * SHORT  # a mask of length x length
        if backend == plan.model.attention or too_wide:
            continue
        unfit = supports(
            backend,
            device_type=plan.train.device,
            packed=plan.data.layout == "packed",
            window=any(window is not None and window < length for window in config.sliding_window),
            softcap=config.attention_softcap is not None,
            dropout=config.attention_dropout > 0,
            float32=plan.train.precision == "float32",
            torch=plan.torch or None,
        )
        if unfit is None:
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
    profile = build_profile(machine)
    device = device_of(machine)
    software = machine.software
    accelerator = profile.accelerator
    memory = accelerator.usable_bytes if accelerator else machine.host.memory_bytes
    return Calibration(
        device=device.name,
        arch=device.arch,
        cores=device.cores,
        cpu_check=machine.cpu_check if device.cores else None,
        memory_gib=round(memory / GIB, 2),
        torch=software.torch or "",
        rocm=software.hip,
        cuda=software.cuda,
        bloomery=__version__,
        model=plan.model_dump(mode="json")["model"]["config"],
        parameters=parameter_count(plan.model.config),
        text="prepared" if (plan.data.prepared / "manifest.json").is_file() else "random",
        contributor=author_name(contributor),
        day=time.strftime("%Y-%m-%d"),
        points=tuple(
            Point(
                sequence_length=each.data.sequence_length,
                micro_batch_size=each.train.micro_batch_size,
                accumulation=each.train.accumulation,
                precision=each.train.precision,
                attention=each.model.attention,
                compiled=each.train.compile,
                activation_checkpointing=each.train.activation_checkpointing,
                optimizer=each.optimizer.kind,
                setting=setting(each),
                tokens_per_second=round(row.tokens_per_second, 1),
                peak_gib=round(row.peak_gib, 3),
            )
            for row in measured
            if (each := row.plan)
            and each.model.config == plan.model.config
            and row.tokens_per_second
            and row.peak_gib
        ),
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
WORDS = {
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
    memory = "GiB of tensors" if plan.train.device == "cuda" else "GiB resident"
    yield ""
    yield f"{label:<{SETTING}}{'tokens/s':>10}{'plan':>9}{'ratio':>7}  {memory:>14}{'plan':>8}{'ratio':>7}"


def line(row: BenchResult) -> str:
    """One setting."""
    name = ", ".join(word.removeprefix("train.") for word in row.words) or "as planned"
    if len(name) >= SETTING:
        name += "\n" + " " * SETTING
    if row.outcome != "ok":
        above, _, last = f"{name:<{SETTING}}".rpartition("\n")
        return (above and above + "\n") + _wrapped(last, f"{WORDS[row.outcome]}: {row.message}")
    assert row.plan is not None and row.tokens_per_second is not None
    planned = planned_rate(row.plan)
    speed = _compared(row.tokens_per_second, planned.value if planned else None, "{:,.0f}", (10, 9))
    memory = _compared(row.peak_gib, row.planned_gib, "{:.2f}", (16, 8))
    return f"{name:<{SETTING}}{speed}{memory}"


def _compared(
    measured: float | None, planned: float | None, form: str, widths: tuple[int, int]
) -> str:
    left = "" if measured is None else form.format(measured)
    right = "unknown" if planned is None else form.format(planned)
    ratio = "" if measured is None or not planned else f"{measured / planned:.2f}"
    return f"{left:>{widths[0]}}{right:>{widths[1]}}{ratio:>7}"


def planned_rate(plan: RunPlan) -> Estimate | None:
    """Tokens per second."""
    return (
        None if plan.step_seconds is None else plan.step_seconds.inverse(plan.train.tokens_per_step)
    )


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
    return {
        "speed": "unknown"
        if rate is None
        else _placed(row.tokens_per_second or 0.0, rate.low, rate.high),
        "memory": _placed(row.peak_gib or 0.0, *_planned_range(row, row.plan.memory)),
    }


def _planned_range(row: BenchResult, memory: MemoryEstimate) -> tuple[float, float]:
    """GiB. The interval is of the total; what an allocator and a driver add is not in what tensors hold."""
    share = (row.planned_gib or 0.0) * GIB / memory.total if memory.total else 0.0
    return memory.low * share / GIB, memory.high * share / GIB


def _placed(value: float, low: float, high: float) -> str:
    return "below" if value < low else "above" if value > high else "inside"


def verdict_lines(row: BenchResult) -> Iterator[str]:
    """Whether the plan was right, in two sentences."""
    places = verdict(row)
    if places["speed"] == "failed":
        yield _line(
            "verdict",
            f"the recipe as planned could not be measured: {WORDS[row.outcome]}, {row.message}",
        )
        return
    assert row.plan is not None and row.tokens_per_second is not None and row.peak_gib is not None
    rate = planned_rate(row.plan)
    memory = row.plan.memory
    speed = f"{row.tokens_per_second:,.0f} tokens/s"
    if rate is None:
        yield _line("verdict", f"{speed}: the plan had no estimate for this device")
    else:
        span = f"{rate.low:,.0f} to {rate.high:,.0f} ({rate.by or ORIGINS[rate.origin]})"
        yield _line("verdict", f"{speed}: {PLACES[places['speed']]} {span}")
    low, high = _planned_range(row, memory)
    span = f"{low:.2f} to {high:.2f} ({ORIGINS[memory.origin]})"
    yield _line("", f"{row.peak_gib:.2f} GiB: {PLACES[places['memory']]} {span}")
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
    times = [
        (row.fastest_seconds, row.step_seconds)
        for row in rows
        if row.fastest_seconds and row.step_seconds
    ]
    noisy = [(fastest, median) for fastest, median in times if median > NOISY * fastest]
    if noisy and 2 * len(noisy) >= len(times):
        fastest, median = max(noisy, key=lambda pair: pair[1] / pair[0])
        text = f"half of the steps took {median:.2g} s or more, the fastest {fastest:.2g} s: did other programs run?"
        yield _line("warning", text)


def closing(row: BenchResult, *, remembered: bool, source: str) -> Iterator[str]:
    """The next commands."""
    if row.outcome == "ok" and row.plan is not None and row.tokens_per_second:
        total = row.plan.total_tokens
        if total is not None:
            whole = f"{format_count(total)} tokens (the whole run) take {format_seconds(total / row.tokens_per_second)}"
            yield _line("", whole)
        if remembered:
            yield _line("kept", "`bloomery plan` uses this measurement from now on")
        elif row.disturbed:
            yield _line("kept", "nothing: close other programs, then measure again")
    yield from labelled("next", f"bloomery train {source}", indent=LABEL, width=WIDTH)


def _line(label: str, text: str) -> str:
    return _wrapped(f"{label:<{LABEL}}", text)


def _wrapped(head: str, text: str) -> str:
    lines = textwrap.wrap(text, WIDTH - len(head)) or [""]
    return "\n".join([head + lines[0], *(" " * len(head) + rest for rest in lines[1:])]).rstrip()
