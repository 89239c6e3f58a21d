"""Lines of a plan's page about memory of the device and of the host, the longest sequence, disk and saves."""

from collections.abc import Iterator

from bloomery.core.units import GIB, counted, format_bytes, format_seconds
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile
from bloomery.hardware.vendors import VENDORS
from bloomery.plan.advise import fit_of
from bloomery.plan.checkpoints import interval_text, uncounted_interval
from bloomery.plan.page_text import LABEL, SHORT_NAMES, WIDTH, about, joined, of_limit, unit_of
from bloomery.plan.types import PlanReport, RunPlan

BAR = 16  # cells of the longest bar
REMARK = WIDTH - LABEL - 15 - 4 - 2 - (BAR + 2)  # columns next to a part of the memory


def pinned_lines(report: PlanReport) -> list[str]:
    """Host memory of offloaded states and activations; none where nothing is offloaded."""
    pinned = sum(report.pinned.values())
    if not pinned:
        return []
    parallel = report.plan.parallel
    amounts = f"{format_bytes(pinned)} per device"
    if parallel is not None:
        amounts += f", {format_bytes(pinned * parallel.gpus)} per node"
    return joined([f"pinned host memory: {amounts}", " and ".join(report.pinned)])


def stream_lines(plan: RunPlan, machine: Machine) -> list[str]:
    """Weights that stream: what the host holds, what the link carries, and from which load on that costs no time."""
    stream = plan.stream
    if stream is None:
        return []
    host = machine.host
    origin = {"assumed": "assumed: --host-memory sets it", "set": "as set"}.get(host.memory_origin)
    total = sum(stream.host_bytes.values())
    limit = f"of {format_bytes(stream.host_limit)} free"
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in stream.host_bytes.items())
    facts = [
        f"{format_bytes(total)} of memory {limit}{'' if origin is None else f' ({origin})'}",
        parts,
        f"{format_bytes(stream.pinned_bytes)} pinned",
    ]
    copies = f"each step copies {format_bytes(stream.loaded_bytes)} to the GPU"
    if stream.sent_bytes:
        copies += f" and {format_bytes(stream.sent_bytes)} back"
    links = [copies] + ([f"link {stream.link}"] if stream.link else [])
    if stream.hidden_from is not None:
        waiting = stream.waiting_share or 0.0
        verdict = "hidden behind computing" if stream.hidden else f"waits {waiting:.0%} of the time"
        tokens = f"{stream.tokens_per_load:,} tokens per load, hidden from {stream.hidden_from:,}"
        links.append(f"{verdict}: {tokens}")
    return [*joined(facts), *joined(links)]


def scoring_lines(plan: RunPlan, profile: Profile) -> list[str]:
    """The devices that score and do not train: their memory, and how much of a step they compute."""
    scoring = plan.scoring
    if scoring is None:
        return []
    memory = scoring.memory
    devices = counted(scoring.devices, "processes")
    if profile.accelerator is not None:
        devices = f"{scoring.devices} x {profile.accelerator.name}"
        if plan.parallel is not None and plan.parallel.nodes > 1:
            devices += " of each node"
    verdict = "fits" if memory.fits else "too much"
    facts = [
        devices,
        f"{format_bytes(memory.total)} of {format_bytes(memory.limit)} each: {verdict}",
        ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.parts.items() if size),
    ]
    if scoring.seconds is not None and plan.step_seconds is not None:
        facts.append(
            f"computes {format_seconds(scoring.seconds)} of {format_seconds(plan.step_seconds.value)} per step"
        )
    return joined(facts)


def memory_lines(plan: RunPlan, profile: Profile) -> Iterator[str]:
    """The three largest parts with bars, the rest in a line; next to them total, limit and range."""
    memory = plan.memory
    (unit, size) = unit_of(plan.memory.total)
    digits = 1 if size == GIB else 0
    names = {
        "context": f"{VENDORS[profile.arch.vendor].runtime} context" if profile.arch else "context",
        "half-precision copies": f"{SHORT_NAMES[plan.train.precision]} copies",
        "runtime": "Python, PyTorch",
        "kernels": "CPU kernels",
    }
    parts = sorted(
        ((names.get(name, name), value) for name, value in memory.parts.items()),
        key=lambda p: -p[1],
    )
    total = of_limit(memory.total, plan)
    total += f": {fit_of(plan) if memory.fits else 'too much'}"
    limit = [
        f"{total} (limit: {profile.memory_share.value:.0%} of the GPU,",
        f"{profile.memory_share.reason})",
    ]
    if len(limit[0]) > REMARK:  # hundreds of GiB
        limit[0] = limit[0].replace("limit: ", "")
    if profile.accelerator is None:
        limit = [total, "(limit: the memory that is free now)"]
    until = ", as measured" if memory.origin == "measured" else " until one step is measured"
    band = f"range {memory.low / size:.{digits}f} to {memory.high / size:.{digits}f}{until}"
    for (name, value), remark in zip(parts[:3], (*limit, band), strict=False):
        amount_text = f"{value / size:.{digits if value < 100 * size else 0}f}"  # four columns
        yield f"{name:<15}{amount_text:>4}  {bar(value, parts[0][1]):<{BAR + 2}}{remark}"
    if plan.rollout is not None:
        sampling = plan.rollout.memory.total / size
        training = plan.rollout.training_memory.total / size
        parts_in_words = f"sampling completions {sampling:.{digits}f}, a step {training:.{digits}f}"
        yield from joined([f"the larger of two moments: {parts_in_words} {unit}"])
    smallest_part = 0.5 / 10**digits  # parts that round to 0 are left out
    yield from joined(
        [
            f"{name} {value / size:.{digits}f}"
            for name, value in parts[3:]
            if value / size >= smallest_part
        ]
    )


def bar(value: float, longest: float) -> str:
    """A bar of eighths of a cell, `BAR` cells for the longest."""
    eighths = round(value / longest * BAR * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def max_length_lines(report: PlanReport) -> list[str]:
    if report.max_length is None:
        return []
    planned = report.max_length.as_planned
    recomputed = report.max_length.checkpointed
    if recomputed == 0:
        return ["not even 256 tokens fit at micro-batch 1"]
    if report.plan.train.activation_checkpointing == "full" or planned == recomputed:
        return [f"up to {recomputed:,} tokens fit at micro-batch 1"]
    return [
        f"up to {planned:,} tokens fit at micro-batch 1; {recomputed:,} with full activation checkpointing"
    ]


def disk_lines(report: PlanReport) -> list[str]:
    disk = report.disk
    num_kept = report.plan.checkpoint.keep
    total = format_bytes(disk["checkpoints"])
    checkpoint_size = format_bytes(disk["checkpoint"])
    number, _, unit = checkpoint_size.partition(" ")
    checkpoint_size = number if total.endswith(unit) else checkpoint_size
    facts = [f"{format_bytes(disk['shards'])} dataset"] if "shards" in disk else []
    facts += (
        [f"{format_bytes(disk['reference'])} reference log-probabilities"]
        if "reference" in disk
        else []
    )
    copies = f"{num_kept} kept, the best, one being written"
    # At most as many best weights as checkpoints: as of each, another evaluation may be the best.
    if "best_weights" in disk:
        copies = f"{num_kept} kept, the best, one written; {num_kept} x weights"
    facts.append(f"{total} checkpoints ({checkpoint_size} each: {copies})")
    if report.plan.train.ranks == 1:
        return joined(facts)
    save = report.save
    stall_seconds = save.stall_seconds.value
    stall = format_seconds(stall_seconds) if stall_seconds >= 0.1 else "less than 0.1 s"
    facts_of_save = [
        f"a save takes {format_seconds(save.seconds.value)}, of which training waits {stall}",
        f"{format_bytes(save.host_bytes)} of host memory per device",
    ]
    return [*joined(facts), *joined(facts_of_save)]


def save_lines(report: PlanReport) -> list[str]:
    """When checkpoints are saved, and what a kill between two of them loses."""
    checkpoint = report.plan.checkpoint
    interval = interval_text(checkpoint, uncounted_interval(report.plan))
    kill = report.kill
    if kill.whole_run:
        length = "ends before" if kill.seconds is None else f"takes {about(kill.seconds)}"
        loss = "what follows the last save" if checkpoint.at_best else "all of it"
        cost = f"the run {length}: a kill loses {loss}"
    else:
        loss = interval if kill.steps is None else counted(kill.steps, "steps")
        loss = loss if kill.seconds is None else about(kill.seconds)
        cost = f"a kill loses at most {loss}"
    return joined([f"every {interval}", cost])
