"""Settings measured one by one, each in a child of its own: the largest micro-batch, then the points of a sweep."""

import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, final

from bloomery.core.child import LONGEST, Child
from bloomery.core.errors import UserError
from bloomery.hardware.calibration import calibrations
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.model.attention.support import SHORT, supports
from bloomery.plan.estimate.speed import compile_gain
from bloomery.plan.resolve import child_environment, local_plan
from bloomery.plan.rules.choices import setting
from bloomery.plan.rules.unsupported import refuse_several_devices
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe

CHILD = "bloomery.bench.child"
SILENCE_SECONDS = 900.0  # compilation, or a step of a large model on a small CPU, takes minutes without a message
SECONDS, SEARCH_SECONDS = 8.0, 2.0  # of measuring a point; of a trial on the way to the largest micro-batch
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
    core_wait: float | None = None  # the share of the time that the measuring thread was ready to run and had no core

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
        return plan.model_copy(update={"memory": plan.memory.model_copy(update={"limit": self.memory_limit})})

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
        calibrations(machine), model=plan.model.config, precision=plan.train.precision, setting=setting(plan)
    )
    if known is not None or plan.seconds is None or plan.seconds.value < TRIAL_PAYS_SECONDS:
        return ()
    both = [plan.model_copy(update={"train": plan.train.model_copy(update={"compile": way})}) for way in (True, False)]
    return tuple(run(way, (), seconds=SECONDS, on_phase=on_phase) for way in both)


def sequences_per_step(plan: RunPlan) -> int:
    return plan.train.micro_batch_size * plan.train.accumulation


def run(plan: RunPlan, words: tuple[str, ...], *, seconds: float, on_phase: OnPhase) -> BenchResult:
    """One child from its start to its end, whatever that is."""
    prepared = (plan.data.prepared / "manifest.json").is_file()
    job = {"plan": plan.model_dump(mode="json"), "seconds": seconds, "text": "prepared" if prepared else "random"}
    result = partial(BenchResult, words=words, plan=plan)
    on_phase("starting")
    with Child(CHILD, job, environment=child_environment(plan, os.environ)) as child:
        while True:
            reply = child.next(SILENCE_SECONDS)
            if reply == "silent":
                return result(outcome="hung", message=f"no message for {SILENCE_SECONDS:.0f} s")
            if reply == "ended" and child.code == -9:  # the system sends SIGKILL when the machine is out of memory
                return result(outcome="memory", message="the system killed the process (SIGKILL): out of memory")
            if reply == "ended":
                return result(outcome="crashed", message=child.ending()[:LONGEST])
            assert isinstance(reply, dict)
            if "phase" not in reply:
                break
            on_phase(reply["phase"])
    if reply["outcome"] != "ok":
        return result(outcome=reply["outcome"], message=reply["message"])
    times, limit, peak = reply["step_seconds"], plan.memory.limit / 2**30, reply["peak_gib"]
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
    fits, fails, reason = 0, most + 1, f"the recipe has {most} sequences per step"
    bound: Literal["memory", "step", "time", "crash"] = "step"
    for size in [*(2**n for n in range((most - 1).bit_length())), most]:
        row = trial(size)
        on_row(row)
        if row.outcome != "ok":
            fails, bound, reason = size, "memory" if row.outcome == "memory" else "crash", row.message
            break
        fits = size
        step = None if row.plan is None or size == most else row.step_seconds
        if step is not None and row.plan is not None and 2 * step / row.plan.train.accumulation > slowest:
            bound, reason = "time", f"twice the size would take more than {slowest:.0f} s per step"
            break
        if size < most and not time_left():
            bound, reason = "time", "half of --limit was over"
            break
    while bound in ("memory", "crash") and fits and fails - fits > max(1, fits // 8) and time_left():
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
        raise UserError(problem, where="--sweep", fix=f"use at most {MOST_POINTS} combinations", code=2)
    return found


def split(text: str) -> list[str]:
    """At commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
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
    config, length = plan.model.config, plan.data.sequence_length
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
