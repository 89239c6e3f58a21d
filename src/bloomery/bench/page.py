"""The output of `bloomery bench`: a table of measured and planned figures, and a verdict."""

import re
import textwrap
import time
from collections.abc import Iterator, Sequence

from bloomery.bench.measuring import BenchResult, Largest
from bloomery.core import __version__
from bloomery.core.errors import UserError
from bloomery.core.text import labelled
from bloomery.core.units import GIB, format_count, format_seconds
from bloomery.hardware.calibration import Calibration, Point, device_of
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.model.counting import parameter_count
from bloomery.plan.rules.choices import setting
from bloomery.plan.types import Estimate, MemoryEstimate, RunPlan

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
    plan, profile = measured[0].plan, build_profile(machine)
    device = device_of(machine)
    software, accelerator = machine.software, profile.accelerator
    memory = accelerator.usable_bytes if accelerator else machine.host.memory_bytes
    return Calibration(
        device=device.name,
        arch=device.arch,
        cores=device.cores,
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
            if (each := row.plan) and each.model.config == plan.model.config and row.tokens_per_second and row.peak_gib
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
WORDS = {"memory": "out of memory", "crashed": "crashed", "hung": "hung", "failed": "failed", "refused": "refused"}


def opening(plan: RunPlan, *, recipe: str, device: str, prepared: bool) -> Iterator[str]:
    """The recipe, the device and the dataset of the measurements."""
    train = plan.train
    kind = "compiled" if train.compile else "uncompiled"
    yield _line("bench", f"{recipe} on {device} · {train.precision} · {kind} · {plan.model.attention} attention")
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


def _compared(measured: float | None, planned: float | None, form: str, widths: tuple[int, int]) -> str:
    left = "" if measured is None else form.format(measured)
    right = "unknown" if planned is None else form.format(planned)
    ratio = "" if measured is None or not planned else f"{measured / planned:.2f}"
    return f"{left:>{widths[0]}}{right:>{widths[1]}}{ratio:>7}"


def planned_rate(plan: RunPlan) -> Estimate | None:
    """Tokens per second."""
    return None if plan.step_seconds is None else plan.step_seconds.inverse(plan.train.tokens_per_step)


def largest_lines(largest: Largest, plan: RunPlan) -> Iterator[str]:
    """The largest micro-batch, and what bounds it."""
    bounds = {"memory": "out of memory", "step": "bounded by the step", "time": "not tried further", "crash": "crash"}
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
        "speed": "unknown" if rate is None else _placed(row.tokens_per_second or 0.0, rate.low, rate.high),
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
        yield _line("verdict", f"the recipe as planned could not be measured: {WORDS[row.outcome]}, {row.message}")
        return
    assert row.plan is not None and row.tokens_per_second is not None and row.peak_gib is not None
    rate, memory = planned_rate(row.plan), row.plan.memory
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
        yield _line("", f"the allocator reserved {row.reserved_gib:.2f} GiB of {memory.limit / GIB:.2f}")


def noise_line(rows: Sequence[BenchResult]) -> Iterator[str]:
    """A warning when other programs used the CPU, or equal steps took unequal times."""
    disturbed = [row.core_wait for row in rows if row.disturbed and row.core_wait is not None]
    if disturbed:
        text = f"other programs used the CPU for {max(disturbed):.0%} of a measurement: not comparable"
        yield _line("warning", text)
        return
    times = [(row.fastest_seconds, row.step_seconds) for row in rows if row.fastest_seconds and row.step_seconds]
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
