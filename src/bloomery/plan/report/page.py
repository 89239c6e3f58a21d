"""A plan as text: what a person reads before a run. Every line is made of the plan's own figures."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from bloomery.core.text import broken
from bloomery.core.units import GIB, MIB, format_bytes, format_seconds, two_digits
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile, build_profile, fitting_builds
from bloomery.model.counting import parameter_count
from bloomery.model.families.registry import architecture_of
from bloomery.plan.advice.claims import span
from bloomery.plan.estimate.speed import useful_flops
from bloomery.plan.estimate.states import mode_of
from bloomery.plan.lengths import in_epochs
from bloomery.plan.types import Decision, Estimate, LayoutPlan, MaxLength, ParallelPlan, PlanReport, RunPlan, Verdict

WIDTH = 100
LABEL = 10
BAR = 16  # cells of the longest bar
SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "bfloat16-pure": "bf16"}


def memory_lines(plan: RunPlan, profile: Profile) -> Iterator[str]:
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


def _part_name(name: str, plan: RunPlan, profile: Profile) -> str:
    if name == "context":
        return profile.arch.context_name if profile.arch else "context"
    if name == "half-precision copies":
        return f"{SHORT_NAMES[plan.train.precision]} copies"
    said = {"runtime": "Python, PyTorch", "kernels": "CPU kernels", "unsharded layers": "gathered layers"}
    return said.get(name, name)


def _memory_remarks(plan: RunPlan, profile: Profile, unit: str, size: float, digits: int) -> list[str]:
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
        f"{profile.memory_share.reason})",
        band,
    ]


def bar(value: float, max_length: float) -> str:
    """A bar of eighths of a cell, `BAR` cells for the longest."""
    eighths = round(value / max_length * BAR * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def unit_of(value: float) -> tuple[str, float]:
    return ("GiB", GIB) if value >= GIB else ("MiB", MIB)


def time_lines(report: PlanReport, profile: Profile) -> Iterator[str]:
    plan = report.plan
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
    if report.energy_kwh is not None and profile.gpu is not None:
        each = f"{plan.parallel.devices:,} x " if plan.parallel else ""
        kwh = report.energy_kwh
        energy = f"{float(f'{kwh:.2g}'):,g} kWh" if kwh >= 1 else f"{float(f'{1000 * kwh:.2g}'):g} Wh"
        facts.append(f"{energy} at {each}{profile.gpu.board_watts:.0f} W")
    yield from joined(facts)


def joined(facts: list[str]) -> list[str]:
    """Facts on one line, or on several where they are too long for it."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + len(fact) + 3 <= WIDTH - LABEL:
            lines[-1] += f" · {fact}"
        else:
            lines += textwrap.wrap(fact, WIDTH - LABEL, subsequent_indent="  ")
    return lines


def _share(plan: RunPlan, profile: Profile, rate: Estimate) -> str:
    """How much of the device's peak the interval is; nothing on a processor, whose table holds reached rates."""
    peak = profile.gpu.peak_flops(dtype_of(plan)) if profile.gpu else None
    if peak is None:
        return ""
    per_token = _per_token(plan)
    devices = plan.parallel.devices if plan.parallel else 1
    low, high = (tokens * per_token / peak / devices for tokens in (rate.low, rate.high))
    return f" = {low * 100:.0f} to {high:.0%} of peak"


def _inner_span(seconds: Estimate) -> str:
    """ "4.0 to 8.0": the unit is said before."""
    text = span((seconds.low, seconds.high))
    unit = format_seconds(seconds.value).partition(" ")[2]
    return text.removesuffix(f" {unit}")


def part_lines(report: PlanReport, profile: Profile) -> Iterator[str]:
    """Where a step's time goes, and the share of the device's peak and of its best known product that it reaches."""
    plan, parts = report.plan, report.step_parts
    step = plan.step_seconds
    if step is None or profile.gpu is None:
        return
    shares = sorted(((part.value / step.value, name) for name, part in parts.items()), reverse=True)
    spent = [f"{name} {share:.0%}" for share, name in shares if share >= 0.005]
    yield from joined([f"of it {spent[0]}", *spent[1:]])
    yield from joined(utilization(plan, profile))


def utilization(plan: RunPlan, profile: Profile) -> list[str]:
    """MFU against both denominators, with its formula."""
    assert profile.gpu is not None
    reached, dtype = reached_flops(plan), dtype_of(plan)
    peak, best = profile.gpu.peak_flops(dtype), profile.gpu.achievable_flops(dtype)
    against = f"MFU {reached / peak:.0%} of {peak / 1e12:,.1f} TFLOP/s" if peak else "MFU unknown: no peak is known"
    of_best = f"{reached / best:.0%} of {best / 1e12:,.0f}, the best product published" if best else ""
    weights = "6 a weight" if plan.adapter.kind == "none" else "4 a frozen weight, 6 another"
    return [against, *([of_best] if of_best else []), f"{weights} + 12 L d T a token"]


def _per_token(plan: RunPlan) -> float:
    return useful_flops(plan.model.config, mode_of(plan, plan.model.config), plan.data.sequence_length)


def reached_flops(plan: RunPlan) -> float:
    """FLOP/s of one device by the usual count: products and all T x T scores, nothing that is computed again."""
    assert plan.step_seconds is not None
    counted = _per_token(plan) * plan.train.tokens_per_step
    return counted / plan.step_seconds.value / (plan.parallel.devices if plan.parallel else 1)


def dtype_of(plan: RunPlan) -> str:
    return "bfloat16" if plan.train.precision.startswith("bfloat16") else plan.train.precision


def max_length_line(plan: RunPlan, max_length: MaxLength) -> str:
    if max_length.as_planned == max_length.checkpointed == 0:
        return "not even a row of 256 tokens fits"
    if plan.train.activation_checkpointing == "full" or max_length.as_planned == max_length.checkpointed:
        return f"rows of {max_length.checkpointed:,} tokens would fit, one at a time"
    line = f"rows of {max_length.as_planned:,} tokens would fit, one at a time; {max_length.checkpointed:,}"
    again = " with every layer computed again"
    return line + (again if LABEL + len(line + again) <= WIDTH else " with layers computed again")


def disk_lines(report: PlanReport) -> Iterator[str]:
    disk, kept = report.disk, report.plan.checkpoint.keep
    total, each = format_bytes(disk["checkpoints"]), format_bytes(disk["checkpoint"])
    number, _, unit = each.partition(" ")
    each = number if total.endswith(unit) else each
    facts = [f"{format_bytes(disk['shards'])} of shards"] if "shards" in disk else []
    facts += [f"{format_bytes(disk['reference'])} of reference scores"] if "reference" in disk else []
    yield from joined([*facts, f"{total} of checkpoints ({each} each: {kept} kept, the best, one being written)"])


def mesh_lines(mesh: ParallelPlan, plan: RunPlan) -> Iterator[str]:
    """One line a layout: what it splits, memory of a device, speed of all, what waits; then the choice's reason."""
    yield f"{'':<41}{'micro-batch':>11}{'GiB each':>9}{'tokens/s':>12}{'exposed':>9}{'bubble':>7}"
    for index, layout in enumerate(mesh.layouts):
        yield ("> " if index == mesh.chosen else "  ") + _row(layout, plan)
    yield f"> {mesh.layouts[mesh.chosen].name}: {mesh.reason}"
    rows, length = plan.train.tokens_per_step // plan.data.sequence_length, plan.data.sequence_length
    if rows < mesh.devices:
        yield f"{rows} rows a step are too few for {mesh.devices:,} devices to read their own:"
        yield f"replicate and shard begin at train.tokens_per_step={mesh.devices * length}"


def _row(layout: LayoutPlan, plan: RunPlan) -> str:
    split = " x ".join(
        f"{count} {word}"
        for count, word in ((layout.replicate, "copies"), (layout.shard, "shards"), (layout.pipeline, "stages"))
        if count > 1
    )
    head = f"{f'{layout.name} ({split})':<39}{f'{layout.micro_batch_size} x {layout.accumulation}':>11}"
    head += f"{layout.memory.total / GIB:>9.1f}"
    step = layout.step_seconds
    if not layout.memory.fits:
        return f"{head}   does not fit"
    if step is None:
        return f"{head}   speed unknown"
    rate = float(f"{plan.train.tokens_per_step / step.value:.2g}")
    return f"{head}{rate:>12,.0f}{layout.exposed_seconds / step.value:>9.0%}{layout.bubble_seconds / step.value:>7.0%}"


EXTRA_SETTINGS = (
    "model.implementation",
    "objective.reference",
    "objective.teacher",
    "data.chat.train_on",
    "adapter.kind",
    "model.from",
    "model.load_with",
    "model.vocab_size",
    "quantize.kind",
    "optimizer.state_dtype",
    "optimizer.fused_backward",
    "optimizer.stochastic_rounding",
    "optimizer.offload",
    "train.offload_activations",
)
REASON = 24  # where reasons begin
FAMILY_NAMES = {"gpt2": "GPT-2"}  # where a capital letter is not enough


def page(
    report: PlanReport,
    machine: Machine,
    *,
    source: str,
    commands: list[str],
    devices: str = "",
    simulated: Sequence[str] = (),
) -> list[str]:
    """The lines of `bloomery plan`.

    `source`: the recipe and its overrides as typed; `devices`: the options that chose devices; `commands`: those that
    may be suggested; `simulated`: lines below memory's.
    """
    plan, profile = report.plan, build_profile(machine)
    sentence, remark = headline(report), "nothing was run"
    lines = [f"{sentence:<{WIDTH - len(remark)}}{remark}"]
    if len(sentence) + len(remark) >= WIDTH:  # its second sentence stands on a line of its own
        first, _, second = sentence.partition(". ")
        lines = [f"{first + '.':<{WIDTH - len(remark)}}{remark}", second]
    lines += ["Planned only: this version trains on one device.", ""] if plan.parallel else [""]
    lines += _block("gpu" if profile.accelerator else "cpu", device_lines(plan, profile, machine))
    lines += _block("model", [model_line(plan)])
    lines += [*_block("step", step_lines(plan)), ""]
    lines += _block("memory", list(memory_lines(plan, profile)))
    lines += _block("simulated", list(simulated))
    if report.max_length is not None:
        lines += _block("max_length", joined([max_length_line(plan, report.max_length)]))
    lines += _block("time", [*time_lines(report, profile), *part_lines(report, profile)])
    lines += [*_block("disk", list(disk_lines(report))), ""]
    if plan.parallel is not None:
        lines += [*_block("layouts", list(mesh_lines(plan.parallel, plan))), ""]
    if report.claims:
        lines += [*_claims(report), ""]
    told = [line for text in report.warnings for line in textwrap.wrap(text, WIDTH - LABEL, subsequent_indent="  ")]
    if told:
        lines += [*_block("beware", told), ""]
    if report.suggestions:
        lines += [*_block("faster" if plan.fits else "to fit", list(fix_lines(report))), ""]
    lines += [*_block("chosen", list(chosen_lines(plan, profile, machine))), ""]
    commands = [part for line in next_lines(report, source, commands, devices) for part in broken(line, WIDTH - LABEL)]
    lines += [*textwrap.wrap(confidence(plan, profile), WIDTH), *_block("next", commands)]
    return [line.rstrip() for line in lines]


def headline(report: PlanReport) -> str:
    """What decides: whether it fits, how long it takes, and the claim that matters most when it is wrong."""
    plan = report.plan
    unit, size = unit_of(plan.memory.total)
    fits = (
        "It fits"
        if plan.fits
        else f"It does not fit: {plan.memory.total / size:.1f} of {plan.memory.limit / size:.1f} {unit}"
    )
    seconds = plan.seconds
    verb = " and takes" if plan.fits else "; it would take"
    takes = "" if seconds is None else f"{verb} about {about(seconds.value)}"
    sentence = f"{fits}{takes}."
    if plan.total_tokens is not None and any(
        v.verdict == "wrong" and v.claim.endswith(" tokens") for v in report.claims
    ):
        claimed = next(v.claim for v in report.claims if v.claim.endswith(" tokens")).removesuffix(" tokens")
        sentence += (
            f" It trains on {spelled(plan.total_tokens)} tokens, not {spelled_like(claimed, plan.total_tokens)}."
        )
    return sentence


def about(seconds: float) -> str:
    """ "5.9 days" -> "6 days": a headline has no decimals that mean nothing."""
    number, _, unit = format_seconds(seconds).partition(" ")
    if unit == "years":
        return f"{number} {unit}".replace(".0 ", " ")
    return f"{float(number):.0f} {unit}" if float(number) >= 3 else f"{number} {unit}".replace(".0 ", " ")


def spelled(count: float) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,.0f}"


def spelled_like(claimed: str, count: float) -> str:
    """ "10 B" beside 3.19 billion is "10"; beside 3.19 million it is "10 billion"."""
    number, _, suffix = claimed.partition(" ")
    own = {"T": "trillion", "B": "billion", "M": "million", "": ""}.get(suffix, suffix)
    return number if own and spelled(count).endswith(own) else f"{number} {own}".rstrip()


def device_lines(plan: RunPlan, profile: Profile, machine: Machine) -> list[str]:
    """The device, how many of it, and with several what joins them."""
    line = device_line(profile, machine)
    if profile.accelerator is None:
        return [line]
    if plan.parallel is None:
        return joined(f"1 x {line}".split(" · "))
    count = f"{plan.parallel.nodes} nodes of " if plan.parallel.nodes > 1 else ""
    links = [
        f"joined by {plan.parallel.link}",
        *([f"nodes by {plan.parallel.network}"] if plan.parallel.network else []),
    ]
    facts = joined(f"{count}{plan.parallel.gpus} x {line}".split(" · "))
    return [*facts, *(wrapped for link in links for wrapped in joined([link]))]


def device_line(profile: Profile, machine: Machine) -> str:
    device, gpu, arch = profile.accelerator, profile.gpu, profile.arch
    if device is None:
        kind = profile.cpu.name if profile.cpu else "no vector instructions that the table knows"
        memory = f"{format_bytes(machine.host.memory_free_bytes)} of {format_bytes(machine.host.memory_bytes)} free"
        return f"{machine.host.cpu_cores} cores · {machine.host.cpu_name} · {kind} · {memory}"
    facts = [device.name, device.arch, f"{device.usable_bytes / GIB:.2f} GiB".replace(".00 ", " ")]
    if gpu is not None:
        dtype = profile.dtype.value
        peak = gpu.peak_flops(dtype)
        facts.append(f"{gpu.bandwidth_gbs:,.0f} GB/s")
        facts.append(f"{(peak or 0) / 1e12:,.1f} TFLOP/s {SHORT_NAMES[dtype]}")
    units = "" if arch is None else f", {arch.matrix_units}" if arch.matrix_units else ", no matrix units"
    return " · ".join(facts) + units


def model_line(plan: RunPlan) -> str:
    config = plan.model.config
    family = FAMILY_NAMES.get(config.family, config.family.capitalize())
    if config.transformers_backend is not None:
        family = architecture_of(config).removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    count = parameter_count(config)
    size = f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M" if count >= 1e5 else f"{count:,}"
    origin = f" from {plan.model.source}" if plan.model.source else ""
    return f"{family} shape, {size} parameters, context {plan.data.sequence_length:,}{origin}"


def step_lines(plan: RunPlan) -> list[str]:
    train, length = plan.train, plan.data.sequence_length
    rows = train.tokens_per_step // length
    parts = "no accumulation" if train.accumulation == 1 else f"{train.accumulation} of them added up"
    step = f"{rows:,} x {length:,} = {train.tokens_per_step:,} tokens: micro-batch {train.micro_batch_size}, {parts}"
    return joined([step, *filter(None, (_total(plan), in_epochs(plan)))])


def _total(plan: RunPlan) -> str:
    if plan.train.seconds is not None:
        least = "" if plan.train.min_steps is None else f", at least {plan.train.min_steps:,} steps"
        return f"as many as fit into {about(plan.train.seconds)}{least}"
    if plan.train.steps is None:
        return "no text here to count steps"
    in_epochs = plan.lengths is not None and plan.lengths.train.unit == "epochs"
    if in_epochs and plan.dataset is not None and plan.dataset.spread > 0:
        return f"about {two_digits(plan.train.steps)} steps"
    length = next((choice for choice in plan.choices if choice.key == "train.epochs"), None)
    return f"{plan.train.steps:,} steps" if length is None else f"{length.value}: {length.reason}"


def _claims(report: PlanReport) -> list[str]:
    rows: list[str] = []
    verdicts = _merged(report.claims)
    claim = max(16, *(len(verdict.claim) + 2 for verdict in verdicts))
    for verdict in verdicts:
        head = f"{verdict.claim:<{claim}}{verdict.verdict:<8}"
        room = WIDTH - LABEL - len(head)
        first, *rest = textwrap.wrap(verdict.reason, room) or [""]
        rows += [head + first, *(" " * len(head) + line for line in rest)]
    labels = ["claims", "of the", "recipe"]
    return [f"{labels[i] if i < len(labels) else '':<{LABEL}}{row}" for i, row in enumerate(rows)]


def _merged(claims: tuple[Verdict, ...]) -> list[Verdict]:
    """Perplexities with one verdict and one reason share a line."""
    kept: list[Verdict] = []
    counts: dict[tuple[str, str], int] = {}
    for claim in claims:
        key = (claim.verdict, claim.reason)
        if claim.claim.startswith("perplexity") and claim.verdict == "unknown":
            counts[key] = counts.get(key, 0) + 1
            if counts[key] > 1:
                continue
        kept.append(claim)
    return [_counted(claim, counts.get((claim.verdict, claim.reason), 0)) for claim in kept]


def _counted(claim: Verdict, times: int) -> Verdict:
    if not claim.claim.startswith("perplexity") or claim.verdict != "unknown":
        return claim
    name = "perplexity" if times == 1 else f"{times} perplexities"
    return claim.model_copy(update={"claim": name})


def chosen_lines(plan: RunPlan, profile: Profile, machine: Machine) -> Iterator[str]:
    """What was decided by the machine, with the reason: the value, and the reason beside it."""
    decided = {decision.key: decision for decision in plan.choices}
    attention = decided["train.attention"]
    rows = [
        *_where(profile, machine, plan),
        (decided["train.precision"].value, decided["train.precision"].reason),
        (f"{attention.value.replace('_', ' ')} attention", attention.reason),
        (decided["train.compile"].value, decided["train.compile"].reason),
    ]
    if plan.train.activation_checkpointing != "none":
        checkpointing = decided["train.activation_checkpointing"]
        rows.append((f"{checkpointing.value} checkpointing", checkpointing.reason))
    rows += [(decided[key].value, decided[key].reason) for key in EXTRA_SETTINGS if key in decided]
    if profile.accelerator is not None:
        build = fitting_builds(machine, profile.accelerator)[0]
        overridden = any("HSA_OVERRIDE_GFX_VERSION" in text for text in build.never)
        unset = ["leave HSA_OVERRIDE_GFX_VERSION unset"] if overridden else []
        rows.append((build.requirement.split("==")[0], "; ".join((build.reason, *unset))))
        rows += _quiet(decided)
    for value, reason in rows:
        first, *rest = textwrap.wrap(reason, WIDTH - LABEL - REASON) or [""]
        yield f"{value:<{REASON - 1}} {first}"
        yield from (" " * REASON + line for line in rest)


def _where(profile: Profile, machine: Machine, plan: RunPlan) -> list[tuple[str, str]]:
    """Which of several devices trains, and why a GPU that is here does not."""
    used, here = profile.accelerator, machine.accelerators
    if plan.parallel is not None or len(here) <= (used is not None):
        return []
    return [(f"GPU {used.index}" if used else "on the processor", profile.device.reason)]


def _quiet(decided: Mapping[str, Decision]) -> list[tuple[str, str]]:
    """What is set without being asked about: the environment of the run, and how batches reach the device."""
    pinned, fused = decided["data.pin_memory"], decided["optimizer.fused"]
    loader = f"{'pinned' if pinned.value == 'yes' else 'not pinned'}: {pinned.reason}"
    rows = [("batches", loader), ("fused optimizer" if fused.value == "yes" else "own optimizer", fused.reason)]
    environment = decided.get("environment")
    if environment is None:
        return rows
    names = ", ".join(word.partition("=")[0] for word in environment.value.split())
    return [*rows, ("set for the run", f"{names}: {environment.reason}")]


def fix_lines(report: PlanReport) -> Iterator[str]:
    """Edits, each planned again."""
    for fix in report.suggestions:
        rest = textwrap.wrap(f"saves {fix.saves}", WIDTH - LABEL - 40)
        if len(fix.edit) < 40:
            yield f"{fix.edit:<40}{rest.pop(0)}"
        else:
            yield from broken(fix.edit, WIDTH - LABEL)
        yield from (" " * 40 + line for line in rest)


def _measured(plan: RunPlan) -> bool:
    return plan.step_seconds is not None and plan.step_seconds.origin == "measured"


def confidence(plan: RunPlan, profile: Profile) -> str:
    """Where the figures come from, said plainly."""
    if plan.step_seconds is not None and _measured(plan):
        if plan.memory.origin == "measured":
            return f"Speed and memory: {plan.step_seconds.by}."
        return f"Speed: {plan.step_seconds.by}. Memory: from the table."
    if profile.accelerator is None:
        return "From the table: nobody has measured such a processor with Bloomery yet; `bloomery bench` does."
    if profile.gpu is None:
        return f"{profile.accelerator.name} ({profile.accelerator.arch}) is not in the table: its speed stays unknown."
    return "From the table: nobody has measured this card with Bloomery yet."


def next_lines(report: PlanReport, source: str, commands: list[str], devices: str) -> Iterator[str]:
    """Commands that exist and make sense after this plan."""
    plan = report.plan
    if not plan.fits:
        enough = [fix for fix in report.suggestions if ", fits; " in fix.saves]
        if enough:
            yield f"bloomery plan {source} {enough[0].edit}{devices}"
        yield _remarked(f"bloomery plan {source} --gpu all", "which cards of the table hold it")
        return
    if plan.parallel is None and "train" in commands:
        yield f"bloomery train {source}"
    if plan.parallel is None and "bench" in commands and not _measured(plan):
        yield _remarked(f"bloomery bench {source}", "on the machine itself, minutes: ranges become figures")
    wrong = [v for v in report.claims if v.verdict == "wrong" and v.claim.endswith(" tokens")]
    if wrong:
        amount = wrong[0].claim.removesuffix(" tokens").replace(" ", "")
        yield f"bloomery plan {source} train.max_tokens={amount}{devices}"


def _remarked(command: str, remark: str) -> str:
    """The remark where the line has room for it."""
    line = f"{command}      {remark}"
    return line if len(line) <= WIDTH - LABEL else command


def _block(label: str, lines: list[str]) -> list[str]:
    return [f"{label if i == 0 else '':<{LABEL}}{line}" for i, line in enumerate(lines)]
