"""A plan as text: what a person reads before a run. Every line is made of the plan's own figures."""

import textwrap
from collections.abc import Iterator

from bloomery.hardware.assume import fitting_build
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import MEMORY_SHARE, Profile, build_profile
from bloomery.model.counting import flops_per_token, parameter_count
from bloomery.plan.claims import span
from bloomery.plan.types import Estimate, Plan, Verdict
from bloomery.units import GIB, MIB, format_bytes, format_seconds

WIDTH = 100
LABEL = 10
REASON = 24  # where reasons begin
BAR = 16  # cells of the longest bar
SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "bfloat16-pure": "bf16"}
FAMILY_NAMES = {"gpt2": "GPT-2"}  # where a capital letter is not enough


def page(plan: Plan, machine: Machine, *, source: str, verbs: list[str]) -> list[str]:
    """The lines of `bloomery plan`. `source`: the recipe as it was named; `verbs`: those that may be suggested."""
    profile = build_profile(machine)
    lines = [f"{headline(plan):<{WIDTH - 15}}{'nothing was run':>15}", ""]
    lines += _block("gpu" if profile.accelerator else "cpu", [device_line(profile, machine)])
    lines += _block("model", [model_line(plan)])
    lines += [*_block("step", step_lines(plan)), ""]
    lines += _block("memory", list(memory_lines(plan, profile)))
    lines += _block("time", list(time_lines(plan, profile)))
    lines += [*_block("disk", list(disk_lines(plan))), ""]
    if plan.claims:
        lines += [*_claims(plan), ""]
    if plan.contradictions:
        lines += [*_block("beware", _all_wrapped(plan.contradictions)), ""]
    if plan.remedies:
        lines += [*_block("to fit", [f"{r.edit:<40}saves {r.saves}" for r in plan.remedies]), ""]
    lines += [*_block("chosen", list(chosen_lines(plan, profile, machine))), ""]
    lines += [*_wrapped(confidence(profile)), *_block("next", list(next_lines(plan, source, verbs)))]
    return [line.rstrip() for line in lines]


def headline(plan: Plan) -> str:
    """What decides: whether it fits, how long it takes, and the claim that matters most when it is wrong."""
    unit, size = _unit(plan.memory.total)
    fits = (
        "It fits"
        if plan.fits
        else f"It does not fit: {plan.memory.total / size:.1f} of {plan.memory.limit / size:.1f} {unit}"
    )
    seconds = plan.seconds
    takes = "" if seconds is None else f" and {'takes' if plan.fits else 'would take'} about {about(seconds.value)}"
    sentence = f"{fits}{takes}."
    if plan.total_tokens is not None and any(v.verdict == "wrong" and v.claim.endswith(" tokens") for v in plan.claims):
        claimed = next(v.claim for v in plan.claims if v.claim.endswith(" tokens")).removesuffix(" tokens")
        sentence += (
            f" It trains on {in_words(plan.total_tokens)} tokens, not {in_words_like(claimed, plan.total_tokens)}."
        )
    return sentence


def about(seconds: float) -> str:
    """ "6.0 days" -> "6 days": a headline has no decimals that mean nothing."""
    return format_seconds(seconds).replace(".0 ", " ")


def in_words(count: float) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,.0f}"


def in_words_like(claimed: str, count: float) -> str:
    """ "10 B" beside 3.19 billion is "10"; beside 3.19 million it is "10 billion"."""
    number, _, suffix = claimed.partition(" ")
    own = {"T": "trillion", "B": "billion", "M": "million", "": ""}.get(suffix, suffix)
    return number if own and in_words(count).endswith(own) else f"{number} {own}".rstrip()


def device_line(profile: Profile, machine: Machine) -> str:
    device, gpu, arch = profile.accelerator, profile.gpu, profile.arch
    if device is None:
        kind = profile.cpu.name if profile.cpu else "no vector instructions that the table knows"
        memory = f"{format_bytes(machine.host.memory_free_bytes)} of {format_bytes(machine.host.memory_bytes)} free"
        return f"{machine.host.cpu_cores} cores · {machine.host.cpu_name} · {kind} · {memory}"
    facts = [device.name, device.arch, f"{device.memory_bytes / GIB:.2f} GiB".replace(".00 ", " ")]
    if gpu is not None:
        dtype = profile.dtype.value
        peak = gpu.peak_flops(dtype)
        facts.append(f"{gpu.bandwidth_gbs:,.0f} GB/s")
        facts.append(f"{(peak or 0) / 1e12:,.1f} TFLOP/s {SHORT_NAMES[dtype]}")
    units = "" if arch is None else f", {arch.matrix_units}" if arch.matrix_units else ", no matrix units"
    return " · ".join(facts) + units


def model_line(plan: Plan) -> str:
    config = plan.model.config
    family = FAMILY_NAMES.get(config.family, config.family.capitalize())
    count = parameter_count(config)
    size = f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"
    origin = f" from {plan.model.source}" if plan.model.source else ""
    return f"{family} shape, {size} parameters, context {plan.data.sequence_length:,}{origin}"


def step_lines(plan: Plan) -> list[str]:
    train, length = plan.train, plan.data.sequence_length
    rows = train.tokens_per_step // length
    parts = "no accumulation" if train.accumulation == 1 else f"{train.accumulation} of them added up"
    step = f"{rows:,} x {length:,} = {train.tokens_per_step:,} tokens: micro-batch {train.micro_batch}, {parts}"
    return _joined([step, _total(plan)])


def _total(plan: Plan) -> str:
    if plan.train.seconds is not None:
        return f"as many as fit into {about(plan.train.seconds)}"
    if plan.train.steps is None:
        return "no text here to count steps"
    in_epochs = plan.lengths is not None and plan.lengths.train.unit == "epochs"
    if in_epochs and plan.corpus is not None and plan.corpus.spread > 0:
        return f"about {plan.train.steps:,} steps"
    length = next((choice for choice in plan.decisions if choice.key == "train.length"), None)
    return f"{plan.train.steps:,} steps" if length is None else f"{length.value}: {length.because}"


def memory_lines(plan: Plan, profile: Profile) -> Iterator[str]:
    """The three largest parts with bars, the rest in a line; beside them total, limit and range."""
    unit, size = _unit(plan.memory.total)
    digits = 1 if size == GIB else 0
    parts = sorted(
        ((_part_name(name, plan, profile), value) for name, value in plan.memory.parts.items()), key=lambda p: -p[1]
    )
    remarks = _memory_remarks(plan, profile, unit, size, digits)
    for (name, value), remark in zip(parts[:3], remarks, strict=False):
        drawn = bar(value, parts[0][1])
        yield f"{name:<15}{value / size:>4.{digits}f}  {drawn:<{BAR + 2}}{remark}"
    yield " · ".join(f"{name} {value / size:.{digits}f}" for name, value in parts[3:])


def _part_name(name: str, plan: Plan, profile: Profile) -> str:
    if name == "context":
        return profile.arch.context_name if profile.arch else "context"
    if name == "half-precision copies":
        return f"{SHORT_NAMES[plan.train.precision]} copies"
    return "Python, PyTorch" if name == "runtime" else name


def _memory_remarks(plan: Plan, profile: Profile, unit: str, size: float, digits: int) -> list[str]:
    memory = plan.memory
    verdict = "fits" if memory.fits else "too much"
    total = f"{memory.total / size:.{digits}f} of {memory.limit / size:,.{digits}f} {unit}: {verdict}"
    band = f"range {memory.low / size:.{digits}f} to {memory.high / size:.{digits}f} until one step is measured"
    if profile.accelerator is None:
        return [total, "(limit: the memory that is free now)", band]
    return [
        f"{total} (limit: {MEMORY_SHARE:.0%} of the card,",
        "so that PyTorch fails before the driver hangs)",
        band,
    ]


def bar(value: float, longest: float) -> str:
    """A bar of eighths of a cell, `BAR` cells for the longest."""
    eighths = round(value / longest * BAR * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _unit(value: float) -> tuple[str, float]:
    return ("GiB", GIB) if value >= GIB else ("MiB", MIB)


def time_lines(plan: Plan, profile: Profile) -> Iterator[str]:
    step = plan.step_seconds
    if step is None:
        yield "unknown: the table has no figure for this device, and no neighbour's is taken"
        return
    rate = step.inverse(plan.train.tokens_per_step)
    speed = f"{_two(rate.value)} tokens/s ({_two(rate.low)} to {_two(rate.high)}{_share(plan, profile, rate)})"
    facts = [speed]
    if plan.seconds is not None and plan.train.seconds is None:
        facts.append(f"{format_seconds(plan.seconds.value)} ({_inner_span(plan.seconds)})")
    elif plan.train.seconds is not None:
        facts.append(
            f"{format_seconds(plan.train.seconds)} as asked, about {round(plan.train.seconds / step.value):,} steps"
        )
    if plan.energy_kwh is not None and profile.gpu is not None:
        facts.append(f"{_energy(plan.energy_kwh)} at {profile.gpu.board_watts:.0f} W")
    yield from _joined(facts)


def _energy(kwh: float) -> str:
    return f"{float(f'{kwh:.2g}'):,g} kWh" if kwh >= 1 else f"{float(f'{1000 * kwh:.2g}'):g} Wh"


def _joined(facts: list[str]) -> list[str]:
    """Facts on one line, or on several where they are too long for it."""
    lines = facts[:1]
    for fact in facts[1:]:
        if len(lines[-1]) + len(fact) + 3 <= WIDTH - LABEL:
            lines[-1] += f" · {fact}"
        else:
            lines.append(fact)
    return lines


def _share(plan: Plan, profile: Profile, rate: Estimate) -> str:
    """How much of the device's peak the interval is; nothing on a processor, whose table holds reached rates."""
    dtype = "bfloat16" if plan.train.precision.startswith("bfloat16") else plan.train.precision
    peak = profile.gpu.peak_flops(dtype) if profile.gpu else None
    if peak is None:
        return ""
    per_token = flops_per_token(plan.model.config, plan.data.sequence_length)
    low, high = (tokens * per_token / peak for tokens in (rate.low, rate.high))
    return f" = {low * 100:.0f} to {high:.0%} of peak"


def _inner_span(seconds: Estimate) -> str:
    """ "4.0 to 8.0": the unit is said before."""
    text = span((seconds.low, seconds.high))
    unit = format_seconds(seconds.value).partition(" ")[2]
    return text.removesuffix(f" {unit}")


def _two(value: float) -> str:
    """Two digits that count: an estimate has no more."""
    return f"{float(f'{value:.2g}'):,.0f}"


def disk_lines(plan: Plan) -> Iterator[str]:
    disk, kept = plan.disk, plan.checkpoint.keep
    total, each = format_bytes(disk["checkpoints"]), format_bytes(disk["checkpoint"])
    number, _, unit = each.partition(" ")
    each = number if total.endswith(unit) else each
    facts = [f"{format_bytes(disk['shards'])} of shards"] if "shards" in disk else []
    yield from _joined([*facts, f"{total} of checkpoints ({each} each: {kept} kept, the best, one being written)"])


def _claims(plan: Plan) -> list[str]:
    rows: list[str] = []
    for verdict in _merged(plan.claims):
        head = f"{verdict.claim:<16}{verdict.verdict:<8}"
        room = WIDTH - LABEL - len(head)
        first, *rest = textwrap.wrap(verdict.because, room) or [""]
        rows += [head + first, *(" " * len(head) + line for line in rest)]
    labels = ["claims", "of the", "recipe"]
    return [f"{labels[i] if i < len(labels) else '':<{LABEL}}{row}" for i, row in enumerate(rows)]


def _merged(claims: tuple[Verdict, ...]) -> list[Verdict]:
    """Perplexities with one verdict and one reason share a line."""
    kept: list[Verdict] = []
    counts: dict[tuple[str, str], int] = {}
    for claim in claims:
        key = (claim.verdict, claim.because)
        if claim.claim.startswith("perplexity") and claim.verdict == "open":
            counts[key] = counts.get(key, 0) + 1
            if counts[key] > 1:
                continue
        kept.append(claim)
    return [_counted(claim, counts.get((claim.verdict, claim.because), 0)) for claim in kept]


def _counted(claim: Verdict, times: int) -> Verdict:
    if not claim.claim.startswith("perplexity") or claim.verdict != "open":
        return claim
    name = "perplexity" if times == 1 else f"{times} perplexities"
    return claim.model_copy(update={"claim": name})


def chosen_lines(plan: Plan, profile: Profile, machine: Machine) -> Iterator[str]:
    """What was decided by the machine, with the reason: the value, and the reason beside it."""
    decided = {decision.key: decision for decision in plan.decisions}
    attention = decided["train.attention"]
    rows = [
        (decided["train.precision"].value, decided["train.precision"].because),
        (f"{attention.value.replace('_', ' ')} attention", attention.because),
        (decided["train.compile"].value, decided["train.compile"].because),
    ]
    if plan.train.activation_checkpointing != "none":
        checkpointing = decided["train.activation_checkpointing"]
        rows.append((f"{checkpointing.value} checkpointing", checkpointing.because))
    if profile.accelerator is not None:
        build = fitting_build(profile.accelerator, machine.software.python)
        rows.append((build.requirement.split("==")[0], "; ".join((build.because, *_unset(build.never)))))
    for value, because in rows:
        first, *rest = textwrap.wrap(because, WIDTH - LABEL - REASON) or [""]
        yield f"{value:<{REASON - 1}} {first}"
        yield from (" " * REASON + line for line in rest)


def _unset(never: tuple[str, ...]) -> list[str]:
    return ["leave HSA_OVERRIDE_GFX_VERSION unset"] if any("HSA_OVERRIDE_GFX_VERSION" in text for text in never) else []


def confidence(profile: Profile) -> str:
    """Where the figures come from, said plainly."""
    if profile.accelerator is None:
        return "From the table: the first ten steps of a run measure this machine."
    if profile.gpu is None:
        return f"{profile.accelerator.name} ({profile.accelerator.arch}) is not in the table: its speed stays unknown."
    return "From the table: nobody has measured this card with Bloomery yet."


def next_lines(plan: Plan, source: str, verbs: list[str]) -> Iterator[str]:
    """Commands that exist and make sense after this plan."""
    if not plan.fits and plan.remedies:
        yield f"bloomery plan {source} {plan.remedies[0].edit}"
        return
    if "train" in verbs:
        yield f"bloomery train {source}"
    wrong = [v for v in plan.claims if v.verdict == "wrong" and v.claim.endswith(" tokens")]
    if wrong:
        amount = wrong[0].claim.removesuffix(" tokens").replace(" ", "")
        yield f'bloomery plan {source} train.length="{amount} tokens"'


def _block(label: str, lines: list[str]) -> list[str]:
    return [f"{label if i == 0 else '':<{LABEL}}{line}" for i, line in enumerate(lines)]


def _all_wrapped(texts: tuple[str, ...]) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, WIDTH - LABEL, subsequent_indent="  ")]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)
