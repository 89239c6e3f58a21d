"""The figures of a plan as text: memory with bars, time by part, disk, the longest row."""

import textwrap
from collections.abc import Iterator

from bloomery.core.units import GIB, MIB, format_bytes, format_seconds, two_digits
from bloomery.hardware.profile import Profile
from bloomery.plan.advice.claims import span
from bloomery.plan.estimate.speed import useful_flops
from bloomery.plan.estimate.states import way_of
from bloomery.plan.types import Estimate, Plan

WIDTH = 100
LABEL = 10
BAR = 16  # cells of the longest bar
SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "bfloat16-pure": "bf16"}


def memory_lines(plan: Plan, profile: Profile) -> Iterator[str]:
    """The three largest parts with bars, the rest in a line; beside them total, limit and range."""
    unit, size = unit_of(plan.memory.total)
    digits = 1 if size == GIB else 0
    parts = sorted(
        ((_part_name(name, plan, profile), value) for name, value in plan.memory.parts.items()), key=lambda p: -p[1]
    )
    remarks = _memory_remarks(plan, profile, unit, size, digits)
    for (name, value), remark in zip(parts[:3], remarks, strict=False):
        drawn = bar(value, parts[0][1])
        yield f"{name:<15}{value / size:>4.{digits}f}  {drawn:<{BAR + 2}}{remark}"
    least = 0.5 / 10**digits  # what rounds to nothing is not a line
    rest = [f"{name} {value / size:.{digits}f}" for name, value in parts[3:] if value / size >= least]
    yield from joined(rest)


def _part_name(name: str, plan: Plan, profile: Profile) -> str:
    if name == "context":
        return profile.arch.context_name if profile.arch else "context"
    if name == "half-precision copies":
        return f"{SHORT_NAMES[plan.train.precision]} copies"
    said = {"runtime": "Python, PyTorch", "kernels": "CPU kernels", "unsharded layers": "gathered layers"}
    return said.get(name, name)


def _memory_remarks(plan: Plan, profile: Profile, unit: str, size: float, digits: int) -> list[str]:
    memory = plan.memory
    verdict = "fits" if memory.fits else "too much"
    above, large = unit_of(memory.limit)
    total = f"{memory.total / size:.{digits}f}" + ("" if above == unit else f" {unit}")
    total += f" of {memory.limit / large:,.{1 if large == GIB else 0}f} {above}: {verdict}"
    until = ", as measured" if memory.origin == "measured" else " until one step is measured"
    band = f"range {memory.low / size:.{digits}f} to {memory.high / size:.{digits}f}{until}"
    if profile.accelerator is None:
        return [total, "(limit: the memory that is free now)", band]
    return [
        f"{total} (limit: {profile.memory_share.value:.0%} of the card,",
        f"{profile.memory_share.because})",
        band,
    ]


def bar(value: float, longest: float) -> str:
    """A bar of eighths of a cell, `BAR` cells for the longest."""
    eighths = round(value / longest * BAR * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def unit_of(value: float) -> tuple[str, float]:
    return ("GiB", GIB) if value >= GIB else ("MiB", MIB)


def time_lines(plan: Plan, profile: Profile) -> Iterator[str]:
    step = plan.step_seconds
    if step is None:
        yield "unknown: the table has no figure for this device, and no neighbour's is taken"
        return
    rate = step.inverse(plan.train.tokens_per_step)
    ends = f"{two_digits(rate.low)} to {two_digits(rate.high)}{_share(plan, profile, rate)}"
    facts = [f"{two_digits(rate.value)} tokens/s ({ends})"]
    if plan.seconds is not None and plan.train.seconds is None:
        facts.append(f"{format_seconds(plan.seconds.value)} ({_inner_span(plan.seconds)})")
    elif plan.train.seconds is not None:
        facts.append(
            f"{format_seconds(plan.train.seconds)} as asked, about {two_digits(plan.train.seconds / step.value)} steps"
        )
    if plan.energy_kwh is not None and profile.gpu is not None:
        each = f"{plan.mesh.devices:,} x " if plan.mesh else ""
        facts.append(f"{_energy(plan.energy_kwh)} at {each}{profile.gpu.board_watts:.0f} W")
    yield from joined(facts)


def _energy(kwh: float) -> str:
    return f"{float(f'{kwh:.2g}'):,g} kWh" if kwh >= 1 else f"{float(f'{1000 * kwh:.2g}'):g} Wh"


def joined(facts: list[str]) -> list[str]:
    """Facts on one line, or on several where they are too long for it."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + len(fact) + 3 <= WIDTH - LABEL:
            lines[-1] += f" · {fact}"
        else:
            lines += textwrap.wrap(fact, WIDTH - LABEL, subsequent_indent="  ")
    return lines


def _share(plan: Plan, profile: Profile, rate: Estimate) -> str:
    """How much of the device's peak the interval is; nothing on a processor, whose table holds reached rates."""
    peak = profile.gpu.peak_flops(dtype_of(plan)) if profile.gpu else None
    if peak is None:
        return ""
    per_token = _per_token(plan)
    devices = plan.mesh.devices if plan.mesh else 1
    low, high = (tokens * per_token / peak / devices for tokens in (rate.low, rate.high))
    return f" = {low * 100:.0f} to {high:.0%} of peak"


def _inner_span(seconds: Estimate) -> str:
    """ "4.0 to 8.0": the unit is said before."""
    text = span((seconds.low, seconds.high))
    unit = format_seconds(seconds.value).partition(" ")[2]
    return text.removesuffix(f" {unit}")


def part_lines(plan: Plan, profile: Profile) -> Iterator[str]:
    """Where a step's time goes, and the share of the device's peak and of its best known product that it reaches."""
    step, parts = plan.step_seconds, plan.step_parts
    if step is None or profile.gpu is None:
        return
    shares = sorted(((part.value / step.value, name) for name, part in parts.items()), reverse=True)
    spent = [f"{name} {share:.0%}" for share, name in shares if share >= 0.005]
    yield from joined([f"of it {spent[0]}", *spent[1:]])
    yield from joined(utilisation(plan, profile))


def _formula(plan: Plan) -> str:
    weights = "6 a weight" if plan.adapter.kind == "none" else "4 a frozen weight, 6 another"
    return f"{weights} + 12 L d T a token"


def utilisation(plan: Plan, profile: Profile) -> list[str]:
    """MFU against both denominators, with its formula."""
    assert profile.gpu is not None
    reached, dtype = reached_flops(plan), dtype_of(plan)
    peak, best = profile.gpu.peak_flops(dtype), profile.gpu.achievable_flops(dtype)
    against = f"MFU {reached / peak:.0%} of {peak / 1e12:,.1f} TFLOP/s" if peak else "MFU unknown: no peak is known"
    of_best = f"{reached / best:.0%} of {best / 1e12:,.0f}, the best product published" if best else ""
    return [against, *([of_best] if of_best else []), _formula(plan)]


def _per_token(plan: Plan) -> float:
    return useful_flops(plan.model.config, way_of(plan, plan.model.config), plan.data.sequence_length)


def reached_flops(plan: Plan) -> float:
    """FLOP/s of one device by the usual count: products and all T x T scores, nothing that is computed again."""
    assert plan.step_seconds is not None
    counted = _per_token(plan) * plan.train.tokens_per_step
    return counted / plan.step_seconds.value / (plan.mesh.devices if plan.mesh else 1)


def dtype_of(plan: Plan) -> str:
    return "bfloat16" if plan.train.precision.startswith("bfloat16") else plan.train.precision


def longest_line(plan: Plan) -> str:
    longest = plan.longest
    assert longest is not None
    if longest.as_planned == longest.checkpointed == 0:
        return "not even a row of 256 tokens fits"
    if plan.train.activation_checkpointing == "full" or longest.as_planned == longest.checkpointed:
        return f"rows of {longest.checkpointed:,} tokens would fit, one at a time"
    line = f"rows of {longest.as_planned:,} tokens would fit, one at a time; {longest.checkpointed:,}"
    again = " with every layer computed again"
    return line + (again if LABEL + len(line + again) <= WIDTH else " with layers computed again")


def disk_lines(plan: Plan) -> Iterator[str]:
    disk, kept = plan.disk, plan.checkpoint.keep
    total, each = format_bytes(disk["checkpoints"]), format_bytes(disk["checkpoint"])
    number, _, unit = each.partition(" ")
    each = number if total.endswith(unit) else each
    facts = [f"{format_bytes(disk['shards'])} of shards"] if "shards" in disk else []
    facts += [f"{format_bytes(disk['reference'])} of reference scores"] if "reference" in disk else []
    yield from joined([*facts, f"{total} of checkpoints ({each} each: {kept} kept, the best, one being written)"])
