"""Why a run is slow: data, full memory, attention, heat, other programs, compiling, looking, saving, recomputing."""

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from bloomery.monitor.diagnose.history import FEW, Facts, Finding, Seen, total
from bloomery.monitor.events import GpuSampled

SECONDS = 30.0  # of steps before a speed is judged: less is noise, and nobody waits for it

# Each threshold is a share of the time that a person would want back: what is below is not worth an edit.
DATA = 0.1  # the loader reads memory-mapped shards ahead of the step; in sound runs it is below 1%
RETRIES = 0.1  # of the steps: each stops the device and gives all that is cached back to the driver
CORES = 0.15  # of the wall clock; the training thread feeds a GPU, too
BETWEEN = 0.2  # of the run: evaluations and saves are the price of knowing and of not losing
COMPILING = 0.1
LATE = 1.25  # times the upper end of the plan's range, which holds four of five runs

QUADRATIC = ("math", "mask")
LONG_ROWS = 512  # below, all scores of a row fit in a cache
HOT = 80.0  # degrees Celsius
COOLED = 0.85  # of the clock that this device has shown it can keep


def slow(seen: Seen, facts: Facts) -> list[Finding]:
    """What takes time that could be had back, and when the plan's range is missed by how much."""
    if sum(step.step_seconds for step in seen.recent) < SECONDS or len(seen.recent) < FEW:
        return [*_attention(seen, facts)]
    found = [
        *_data(seen),
        *_attention(seen, facts),
        *_heat(seen),
        *_cores(seen),
        *_compiling(seen, facts),
        *_graphs(seen),
        *_crowded(seen),
        *_between(seen, facts),
        *_recomputing(seen, facts),
    ]
    return [*found, *_late(seen, facts, bool(found))]


def _data(seen: Seen) -> Iterator[Finding]:
    share = _share(seen, [step.data_wait_seconds for step in seen.recent])
    if share > DATA:
        yield Finding(
            "data",
            "the steps wait for data",
            f"{share:.0%} of their time, {_median_wait(seen) * 1000:,.0f} ms a step",
            "put the prepared text on a local disk (data.prepared=/a/local/folder) and read further ahead "
            "(data.prefetch=16)",
        )


def _median_wait(seen: Seen) -> float:
    return median(step.data_wait_seconds for step in seen.recent)


def _share(seen: Seen, parts: list[float | None]) -> float:
    return total(parts) / max(1e-9, sum(step.step_seconds for step in seen.recent))


def _attention(seen: Seen, facts: Facts) -> Iterator[Finding]:
    """On a CPU a mask is right for short rows; plain sdpa is quadratic where no fused kernel exists."""
    quadratic = seen.attention in QUADRATIC if facts.device != "cpu" else seen.attention == "math"
    fallen = seen.attention == "sdpa" and facts.fused_attention is False and facts.device != "cpu"
    if (quadratic or fallen) and facts.sequence_length >= LONG_ROWS:
        length, kernel = facts.sequence_length, "PyTorch's math kernel" if fallen else f"the kernel {seen.attention}"
        yield Finding(
            "attention",
            "attention writes every score to memory",
            f"{kernel} runs, which holds {length:,} x {length:,} scores a head",
            "set train.attention=blockwise" if fallen else "set train.attention=auto",
        )


def _heat(seen: Seen) -> Iterator[Finding]:
    for device in sorted({sample.device for sample in seen.gpus}):
        samples = [sample for sample in seen.gpus if sample.device == device]
        told = [sample.throttled for sample in samples if sample.throttled]
        hottest = max((sample.temperature or 0.0 for sample in samples), default=0.0)
        if len(told) > 0.1 * len(samples):
            why = f"it says so in {len(told) / len(samples):.0%} of the samples ({told[-1]}), at up to {hottest:.0f} °C"
            yield _throttled(device, why)
        elif not told and _clock_fell(samples):
            clocks = [sample.clock_mhz for sample in samples if sample.clock_mhz]
            fell = f"its clock fell from {max(clocks):,.0f} to {median(clocks[-FEW:]):,.0f} MHz at {hottest:.0f} °C"
            yield _throttled(device, fell)


def _clock_fell(samples: list[GpuSampled]) -> bool:
    """Slower than it was, while hot and at work: a device without work lowers its clock, too."""
    busy = [s for s in samples if s.clock_mhz and (s.utilisation is None or s.utilisation > 50)]
    now = busy[-FEW:]
    if len(now) < FEW or any(s.throttled == "" for s in now):
        return False
    hot = median(s.temperature or 0.0 for s in now) >= HOT
    return hot and median(s.clock_mhz or 0.0 for s in now) < COOLED * max(s.clock_mhz or 0.0 for s in busy)


def _throttled(device: int, evidence: str) -> Finding:
    mend = "give it air, or lower its power limit so that it keeps one speed (`rocm-smi --setpoweroverdrive`)"
    return Finding(f"heat-{device}", f"GPU {device} slows itself down", evidence, mend)


def _cores(seen: Seen) -> Iterator[Finding]:
    vitals = [v for v in seen.vitals if v.core_wait_seconds is not None and v.seconds > 0][-FEW:]
    seconds = sum(v.seconds for v in vitals)
    waited = total([v.core_wait_seconds for v in vitals])
    if seconds >= SECONDS / 3 and waited > CORES * seconds:
        yield Finding(
            "cores",
            "other programs, or too many threads, hold the processor's cores",
            f"the training thread was ready to run and had no core for {waited / seconds:.0%} of {seconds:,.0f} s",
            "end what else runs here, or train on fewer threads: OMP_NUM_THREADS=1 before the command",
        )


def _compiling(seen: Seen, facts: Facts) -> Iterator[Finding]:
    if not facts.compiled or not facts.steps or seen.began is None:
        return
    typical = median(step.step_seconds for step in seen.recent)
    took, whole = seen.began.step_seconds - typical, facts.steps * typical
    if took > SECONDS and took > COMPILING * (whole + took):
        yield Finding(
            "compile",
            "compiling takes longer than it can win back",
            f"the first step took {seen.began.step_seconds:,.0f} s and all {facts.steps:,} take {whole:,.0f} s",
            "set train.compile=false",
        )


def _graphs(seen: Seen) -> Iterator[Finding]:
    """Shapes are fixed in training and in evaluation, so that nothing is left to compile after the first exam."""
    early, last = seen.compiled_graphs, seen.vitals[-1].graphs if seen.vitals else None
    if early is not None and last is not None and last > 2 * early + 4:
        yield Finding(
            "recompiled",
            "torch.compile keeps compiling",
            f"{early} graphs at the start, {last} at step {seen.vitals[-1].step:,}",
            "set train.compile=false, and report the shape that changes",
        )


def _crowded(seen: Seen) -> Iterator[Finding]:
    """A process that resumes counts from zero again."""
    told = [(sample, sample.alloc_retries) for sample in seen.allocator if sample.alloc_retries is not None]
    if len(told) < 2:
        return
    retries = sum(max(0, after - before) for (_, before), (_, after) in pairwise(told))
    steps, last = told[-1][0].step - told[0][0].step, told[-1][0]
    if retries > RETRIES * max(steps, FEW):
        yield Finding(
            "crowded",
            "memory is so full that PyTorch gives its cache back and asks the driver again and again",
            f"{retries:,} times in {steps:,} steps; {last.fragmentation or 0:.0%} of {last.reserved_gib or 0:.1f} GiB"
            f" lies free in pieces",
            "set a smaller train.micro_batch: it is accumulated to the same tokens a step",
        )


def _between(seen: Seen, facts: Facts) -> Iterator[Finding]:
    saving = 0.0 if facts.saves_in_background else seen.saving_seconds
    for cause, name, seconds, mend in (
        (
            "evaluation",
            "evaluations take",
            seen.evaluation_seconds,
            "evaluate less often or less: eval.every, eval.tokens",
        ),
        ("saving", "writing checkpoints takes", saving, "save less often: checkpoint.every"),
    ):
        whole = seen.steps_seconds + seen.evaluation_seconds + saving
        if seconds > BETWEEN * whole:
            yield Finding(cause, f"{name} a good part of the run", f"{seconds:,.0f} of {whole:,.0f} s", mend)


def _recomputing(seen: Seen, facts: Facts) -> Iterator[Finding]:
    """A forward more is a third of a step (forward 1, backward 2: Chen et al., arXiv:1604.06174)."""
    limit = facts.memory_limit_gib
    if facts.checkpointing != "none" and limit and 0 < seen.peak_gib < 0.5 * limit:
        yield Finding(
            "recomputing",
            "activations are computed twice although memory is free",
            f"activation checkpointing is {facts.checkpointing}, and {seen.peak_gib:.1f} of {limit:.1f} GiB are used",
            "see whether it fits: `bloomery plan RECIPE train.activation_checkpointing=none`",
        )


def _late(seen: Seen, facts: Facts, explained: bool) -> Iterator[Finding]:
    if facts.step_seconds is None:
        return
    high, took = facts.step_seconds[1], median(step.step_seconds for step in seen.recent)
    if took > LATE * high:
        why = "" if explained else ", and nothing that is measured says why"
        yield Finding(
            "late",
            f"the steps take longer than the plan's range{why}",
            f"{took:.3g} s each, where the plan's range ends at {high:.3g} s: {took / high:.1f} times as long",
            "measure this machine with `bloomery bench RECIPE`, and plan again",
        )
