"""A plan as text. Every line is made of the plan's own figures.

One plan is a page; several `--gpu`, or `--gpu all`, are a table of plans.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.text import broken, labelled
from bloomery.core.units import (
    GIB,
    MIB,
    counted,
    format_bytes,
    format_count,
    format_seconds,
    two_digits,
)
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import active_parameter_count, layers, parameter_count
from bloomery.facts.families import family_label
from bloomery.hardware.machine import Accelerator, Machine
from bloomery.hardware.profile import (
    Profile,
    build_profile,
    fitting_builds,
    hidden_integrated,
    with_gpu,
    with_host_memory,
)
from bloomery.hardware.specs import GpuSpec, arch_spec, gpu_spec, gpu_table
from bloomery.hardware.vendors import VENDORS
from bloomery.plan.advise import energy_kwh, fit_of, span
from bloomery.plan.checkpoints import interval_text, uncounted_interval
from bloomery.plan.estimate.speed import useful_flops
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.gather import facts_of
from bloomery.plan.lengths import in_epochs
from bloomery.plan.mesh import undivided
from bloomery.plan.pictures import tokens_of_sizes, tower_in
from bloomery.plan.price import cost_text
from bloomery.plan.resolve import resolve
from bloomery.plan.types import (
    LayoutPlan,
    ParallelPlan,
    PlanReport,
    RolloutPlan,
    RunPlan,
    Verdict,
)
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.objectives import Rollouts
from bloomery.recipe.schema import Lora

WIDTH = 100
LABEL = 10
BAR = 16  # cells of the longest bar
REMARK = WIDTH - LABEL - 15 - 4 - 2 - (BAR + 2)  # columns next to a part of the memory
REASON = 24  # the column of a setting's reason
EDIT = 40  # columns of a suggestion
SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "bfloat16-pure": "bf16"}
SETTINGS = (  # shown where a plan has them
    "model.implementation",
    "objective.reference",
    "objective.teacher",
    "objective.teacher_stream",
    "data.chat.train_on",
    "adapter.kind",
    "adapter.target_modules",
    "adapter.vision",
    "vision.train",
    "model.from",
    "model.load_with",
    "model.vocab_size",
    "quantize.kind",
    "router.loss",
    "router.z_loss",
    "router.bias_update",
    "optimizer.state_dtype",
    "optimizer.fused_backward",
    "optimizer.stochastic_rounding",
    "optimizer.offload",
    "train.offload_activations",
)
USUAL_SIZES = ((640, 480), (1280, 720), (1920, 1080))  # pictures
WIDE_SPREAD = 0.1  # from which on a number of steps is printed with its range
USUAL_VALUES = {  # of the method, where the recipe sets none
    "optimizer.learning_rate": "learning rate",
    "optimizer.weight_decay": "weight decay",
    "optimizer.warmup": "warmup",
}


def page(
    report: PlanReport,
    machine: Machine,
    *,
    source: str,
    commands: list[str],
    devices: str = "",
    local_devices: str = "",
    simulated: Sequence[str] = (),
) -> list[str]:
    """The lines of `bloomery plan --verbose`; the short ones are those of bloomery.plan.summary.

    `source`: the recipe and its overrides as typed; `devices`: the options that chose devices to plan for;
    `local_devices`: those that chose devices of this machine; `commands`: those that may be suggested; `simulated`:
    lines below memory's.
    """
    plan = report.plan
    profile = build_profile(machine)
    sentence = headline(report)
    remark = "nothing was run"
    lines = [f"{sentence:<{WIDTH - len(remark)}}{remark}"]
    if len(sentence) + len(remark) >= WIDTH:  # the last sentence gets a line of its own
        first_sentences, _, last_sentence = sentence.rpartition(". ")
        lines = [f"{first_sentences + '.':<{WIDTH - len(remark)}}{remark}", last_sentence]
    lines += [plan.parallel.remark] if plan.parallel and plan.parallel.remark else []
    lines.append("")
    hardware = [*device_lines(plan, profile, machine), *link_lines(plan, profile)]
    lines += block("GPU" if profile.accelerator else "CPU", hardware)
    lines += block("model", joined([model_line(plan)]))
    lines += block("batch", batch_lines(plan))
    lines += [*block("pictures", picture_lines(plan)), ""]
    lines += block("memory", [*memory_lines(plan, profile), *_pinned_lines(report)])
    lines += block("host", stream_lines(plan, machine))
    lines += block("scoring", scoring_lines(plan, profile))
    lines += block("simulated", simulated)
    lines += block("sequence", joined(_max_length(report)))
    lines += block("time", [*time_lines(report, profile), *part_lines(report, profile)])
    lines += [*block("disk", disk_lines(report)), *block("saves", save_lines(report)), ""]
    warnings = [
        line
        for text in report.warnings
        for line in textwrap.wrap(text, WIDTH - LABEL, subsequent_indent="  ")
    ]
    for label, content_lines in (
        ("layouts", mesh_lines(plan.parallel, plan) if plan.parallel else ()),
        ("claims", claim_lines(report.claims)),
        ("warnings", warnings),
        ("suggested", suggestion_lines(report)),
        ("settings", setting_lines(plan, profile, machine)),
    ):
        rows = block(label, content_lines)
        lines += [*rows, ""] if rows else []
    following = [
        part
        for line in next_lines(report, source, commands, devices, local_devices)
        for part in broken(line, WIDTH - LABEL)
    ]
    lines += [
        *textwrap.wrap(confidence(plan, profile, checked=machine.cpu_check is not None), WIDTH),
        *block("next", following),
    ]
    return [line.rstrip() for line in lines]


def block(label: str, lines: Iterator[str] | Sequence[str]) -> list[str]:
    """Lines behind their label, which stands in the first."""
    return [f"{'' if i else label:<{LABEL}}{line}" for i, line in enumerate(lines)]


def joined(facts: Sequence[str]) -> list[str]:
    """Facts on one line, or on several where they are too long for it."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + len(fact) + 3 <= WIDTH - LABEL:
            lines[-1] += f" · {fact}"
        else:
            lines += textwrap.wrap(
                fact, WIDTH - LABEL, subsequent_indent="  ", break_on_hyphens=False
            )
    return lines


def columns(head: str, text: str) -> Iterator[str]:
    """`head` and the text next to it, wrapped in the rest of the line."""
    first_line, *rest = textwrap.wrap(text, WIDTH - LABEL - len(head)) or [""]
    yield head + first_line
    yield from (" " * len(head) + line for line in rest)


def headline(report: PlanReport) -> str:
    """Whether the run fits, how long it takes, and the claimed number of tokens where that is wrong."""
    plan = report.plan
    high = of_limit(plan.memory.high, plan)
    fit = fit_of(plan)
    text = f"{fit.capitalize()}: up to {high}." if fit != "fits" else "Fits."
    text = text if plan.memory.fits else f"Does not fit: {of_limit(plan.memory.total, plan)}."
    if plan.memory.fits and plan.scoring is not None and not plan.scoring.memory.fits:
        too_much = plan.scoring.memory
        text = (
            f"Does not fit on the devices that score: {format_bytes(too_much.total)} of"
            f" {format_bytes(too_much.limit)}."
        )
    if plan.seconds is not None:
        text += f" {'About' if plan.fits else 'Would take about'} {about(plan.seconds.value)}."
    if plan.total_tokens is not None and (claimed := _wrong_tokens(report)):
        text += f" Trains on {format_count(plan.total_tokens)} tokens, not the claimed {claimed}."
    return text


def _wrong_tokens(report: PlanReport) -> str | None:
    for verdict in report.claims:
        if verdict.verdict == "wrong" and verdict.claim.endswith(" tokens"):
            return verdict.claim.removesuffix(" tokens")
    return None


def about(seconds: float) -> str:
    """ "5.9 days" -> "6 days": a headline has no decimals that mean nothing."""
    number, _, unit = format_seconds(seconds).partition(" ")
    if unit != "years" and float(number) >= 3:
        return f"{float(number):.0f} {unit}"
    return f"{number} {unit}".replace(".0 ", " ")


def device_lines(plan: RunPlan, profile: Profile, machine: Machine) -> list[str]:
    """The device, and how many of it; of unequal GPUs a line or more each, in the order of ranks."""
    mesh = plan.parallel
    if profile.accelerator is None:
        host = machine.host
        kind = profile.cpu.name if profile.cpu else "no vector instructions of the table"
        memory = f"{format_bytes(host.memory_free_bytes)} of {format_bytes(host.memory_bytes)} free"
        return [f"{host.cpu_cores} cores · {host.cpu_name} · {kind} · {memory}"]
    count = (
        "1"
        if mesh is None
        else f"{mesh.nodes} nodes of {mesh.gpus}"
        if mesh.nodes > 1
        else str(mesh.gpus)
    )
    dtype = profile.dtype.value
    if profile.peers:
        return [line for peer in profile.peers for line in _gpu_lines(peer, dtype, "1")]
    return _gpu_lines(profile, dtype, count)


def link_lines(plan: RunPlan, profile: Profile) -> list[str]:
    """What joins several GPUs, and their nodes."""
    mesh = plan.parallel
    if mesh is None or profile.accelerator is None:
        return []
    network = joined([f"nodes by {mesh.network}"]) if mesh.network else []
    return [*joined([f"joined by {mesh.link}"]), *network]


def _gpu_lines(profile: Profile, dtype: str, count: str) -> list[str]:
    """So many GPUs of one model. `dtype`: of the plan's matmuls."""
    device = profile.accelerator
    gpu = profile.gpu
    arch = profile.arch
    assert device is not None, "a GPU"
    facts = [
        f"{count} x {device.name}",
        device.arch,
        f"{device.usable_bytes / GIB:.2f} GiB".replace(".00 ", " "),
    ]
    if gpu is not None:
        peak = gpu.peak_flops(dtype)
        facts.append(f"{gpu.bandwidth_gbs:,.0f} GB/s")
        rate = "no rate published" if peak is None else f"{peak / 1e12:,.1f} TFLOP/s"
        facts.append(f"{rate} {SHORT_NAMES[dtype]}" if peak is not None else rate)
    facts[-1] += "" if arch is None else f", {arch.matrix_units or 'no matrix units'}"
    return joined(facts)


def model_line(plan: RunPlan) -> str:
    config = plan.model.config
    family = family_label(config)

    def shown(count: int) -> str:
        return (
            f"{count / 1e9:,.2f} B"
            if count >= 1e9
            else f"{count / 1e6:,.1f} M"
            if count >= 1e5
            else f"{count:,}"
        )

    size = shown(parameter_count(config))
    origin = f", from {plan.model.source}" if plan.model.source else ""
    met = [layer.experts_met for layer in layers(config) if layer.stack_shapes]
    if met:
        count, per_token = met[0]
        active = f"{shown(active_parameter_count(config))} active per token"
        experts = f"{per_token} of {count} experts"
        size = f"{size} parameters, {active} ({experts})"
        return f"{family} architecture, {size}, context {config.max_positions:,}{origin}"
    return f"{family} architecture, {size} parameters, context {config.max_positions:,}{origin}"


def batch_lines(plan: RunPlan) -> list[str]:
    train = plan.train
    length = plan.data.sequence_length
    if plan.rollout is not None:
        return rollout_lines(plan, plan.rollout)
    cut = f"micro-batch {train.micro_batch_size}, "
    cut += (
        f"gradient accumulation {train.accumulation}"
        if train.accumulation > 1
        else "no gradient accumulation"
    )
    sequences = train.tokens_per_step // length
    plural = "s" if sequences > 1 else ""
    step = f"{train.tokens_per_step:,} tokens = {sequences:,} sequence{plural} x {length:,} ({cut})"
    return joined([step, *filter(None, (_steps(plan), in_epochs(plan)))])


def picture_lines(plan: RunPlan) -> list[str]:
    """What pictures cost: those of the dataset, or of a dataset without them what usual sizes would be."""
    facts = None if plan.dataset is None else plan.dataset.pictures
    if facts is None:
        usual = tokens_of_sizes(plan.model.source, USUAL_SIZES)
        if not usual:
            return []
        in_words = ", ".join(f"{size.width}x{size.height} {size.tokens:,}" for size in usual)
        return joined([f"none in the dataset; as tokens, one would be: {in_words}"])

    # The dataset's own sizes.
    first, *others = facts.sizes
    one_size = f"a {first.width}x{first.height} picture is {counted(first.tokens, 'tokens')}"
    shares = [one_size if not others else f"{one_size} ({first.share:.0%} are of this size)"]
    shares += [f"{size.width}x{size.height} {size.tokens:,}" for size in others]
    is_whole = facts.looked_at >= facts.pictures_per_epoch
    number = counted(facts.pictures_per_epoch, "pictures")
    number += "" if is_whole else f" by the sizes of {facts.looked_at:,}"
    per_sequence = (
        f"{facts.mean.pictures:.2g} a sequence, {facts.fullest.pictures:,.0f} in the fullest"
    )

    # What the tower does with them.
    tower = tower_in(facts.raw_config)
    assert tower is not None, "facts are made with a tower"
    parts = plan.vision.train
    adapted = plan.adapter.vision if isinstance(plan.adapter, Lora) else "none"
    how = "frozen"
    if parts != "none" or adapted != "none":
        how = "; ".join(
            f"{'tower and projector' if part == 'all' else part} {way}"
            for part, way in ((parts, "trained in full"), (adapted, "with LoRA"))
            if part != "none"
        )
    tower_text = f"tower of {format_count(tower.parameters)} parameters, {how}"
    gflops = facts.of_picture.flops / 1e9
    work = f"{facts.of_picture.patches:,.0f} patches and {gflops:,.3g} GFLOP forward for a picture"
    return joined([number, *shares, per_sequence, tower_text, work])


def rollout_lines(plan: RunPlan, rollout: RolloutPlan) -> list[str]:
    """The completions of a step, how they are packed, and the rollout that they come from."""
    train = plan.train
    objective = plan.objective
    assert isinstance(objective, Rollouts)
    completions = train.tokens_per_step // plan.data.sequence_length
    step = f"{completions:,} completions of at most {objective.max_completion_length:,} tokens"
    packed = f"packed into about {counted(rollout.micro_batches, 'micro-batches')}"
    packed += f" of {train.micro_batch_size} x {plan.data.sequence_length:,}"
    rollout_text = (
        f"{counted(rollout.num_prompts, 'prompts')} x {objective.num_generations} per rollout"
    )
    rollout_text += f", {rollout.slots} at once"
    if len(set(rollout.sampled_prompts)) > 1:
        fewest, usual, most = rollout.sampled_prompts
        rollout_text += f", {fewest:,} to {most:,} prompts sampled for them"
        rollout_text += f" ({usual:,} if half of them have completions of one reward)"
    if rollout.num_steps > 1:
        rollout_text += f", trained on for {rollout.num_steps} steps"
    facts = joined([step, packed])
    facts += joined([rollout_text, *filter(None, (_steps(plan), in_epochs(plan)))])
    return facts


def _steps(plan: RunPlan) -> str:
    if plan.train.seconds is not None:
        minimum = (
            "" if plan.train.min_steps is None else f", at least {plan.train.min_steps:,} steps"
        )
        return f"as many steps as fit into {about(plan.train.seconds)}{minimum}"
    if plan.train.steps is None:
        return "steps unknown until a dataset is here"
    in_epochs = plan.lengths is not None and plan.lengths.train.unit == "epochs"
    if in_epochs and plan.dataset is not None and plan.dataset.spread > 0:
        steps = f"about {two_digits(plan.train.steps)} step{'s' if plan.train.steps > 1 else ''}"
        spread = plan.dataset.spread
        if spread < WIDE_SPREAD:
            return steps
        low, high = (plan.train.steps * factor for factor in (1 - spread, 1 + spread))
        return f"{steps} ({two_digits(low)} to {two_digits(high)})"
    length = next((choice for choice in plan.choices if choice.key == "train.epochs"), None)
    return f"{plan.train.steps:,} steps" if length is None else f"{length.value}: {length.reason}"


def unit_of(value: float) -> tuple[str, float]:
    return ("GiB", GIB) if value >= GIB else ("MiB", MIB)


def of_limit(value: float, plan: RunPlan) -> str:
    """ "9.0 of 11.0 GiB", with the value in the unit of the total, or "35.2 GiB of 46 MiB"."""
    (unit, size) = unit_of(plan.memory.total)
    (limit_unit, limit_size) = unit_of(plan.memory.limit)
    text = f"{value / size:.{1 if size == GIB else 0}f}" + (
        "" if limit_unit == unit else f" {unit}"
    )
    limit = f"{plan.memory.limit / limit_size:,.{1 if limit_size == GIB else 0}f}"
    return f"{text} of {limit} {limit_unit}"


def _pinned_lines(report: PlanReport) -> list[str]:
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


def _max_length(report: PlanReport) -> list[str]:
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


def time_lines(report: PlanReport, profile: Profile) -> list[str]:
    plan = report.plan
    step = report.plan.step_seconds
    gpu = profile.gpu
    if step is None:
        return [
            "unknown: the table has no rate of this device, and no similar device's figures are used"
        ]
    rate = step.inverse(plan.trained_tokens_per_step)
    ends = f"{two_digits(rate.low)} to {two_digits(rate.high)}"
    # Only a GPU has a peak to compare with: a CPU's table holds measured rates.
    is_of_one_model = gpu is not None and not profile.peers
    if gpu is not None and is_of_one_model and (peak := gpu.peak_flops(dtype_of(plan))):
        low, high = (reached_flops(plan, seconds) / peak for seconds in (step.high, step.low))
        ends += f" = {low * 100:.0f} to {high:.0%} of peak"
    facts = [f"{two_digits(rate.value)} tokens/s ({ends})"]
    run_seconds = plan.seconds
    max_seconds = plan.train.seconds
    if run_seconds is not None and max_seconds is None:
        unit = format_seconds(run_seconds.value).partition(" ")[2]
        time_range = span((run_seconds.low, run_seconds.high)).removesuffix(f" {unit}")
        facts.append(f"{format_seconds(run_seconds.value)} ({time_range})")
    elif run_seconds is not None and max_seconds is not None:
        steps = max(max_seconds / step.value, plan.train.min_steps or 1)
        overrun = (
            ""
            if run_seconds.value <= max_seconds
            else f", and takes {format_seconds(run_seconds.value)}"
        )
        facts.append(
            f"{format_seconds(max_seconds)} as set: about {two_digits(steps)} steps{overrun}"
        )
    else:  # its length depends on a dataset that is not here
        facts.append(f"{format_seconds(1e6 / rate.value)} per million tokens")
    if report.energy_kwh is not None and gpu is not None:
        watts = f"{gpu.board_watts:.0f} W"
        if plan.parallel is not None:
            watts = f"{plan.num_gpus:,} x {watts}"
        if profile.peers:
            peer_watts = [peer.gpu.board_watts or 0 for peer in profile.peers if peer.gpu]
            watts = f"{' + '.join(f'{watt:.0f}' for watt in peer_watts)} W"
        kwh = report.energy_kwh
        energy = (
            f"{float(f'{kwh:.2g}'):,g} kWh" if kwh >= 1 else f"{float(f'{1000 * kwh:.2g}'):g} Wh"
        )
        facts.append(f"{energy} at {watts}")
    if report.cost is not None:
        facts.append(cost_text(report.cost))
    return joined(facts)


def part_lines(report: PlanReport, profile: Profile) -> list[str]:
    """Where a step's time goes, and MFU against the device's peak and the best matmul published, with its formula."""
    plan = report.plan
    step = report.plan.step_seconds
    gpu = profile.gpu
    if step is not None and plan.rollout is not None:
        return rollout_part_lines(plan.rollout, step.value)
    if step is None or gpu is None or profile.peers:
        return []
    shares = sorted(
        ((part.value / step.value, name) for name, part in report.step_parts.items()), reverse=True
    )
    spent = [f"{name} {share:.0%}" for share, name in shares if share >= 0.005]
    reached = reached_flops(plan)
    peak = gpu.peak_flops(dtype_of(plan))
    best = gpu.achievable_flops(dtype_of(plan))
    mfu = [
        f"MFU {reached / peak:.0%} of {peak / 1e12:,.1f} TFLOP/s"
        if peak
        else "MFU unknown: no peak is known"
    ]
    mfu += (
        [f"{reached / best:.0%} of {best / 1e12:,.0f}, the best matmul published"] if best else []
    )
    weights = (
        "6 per weight"
        if plan.adapter.kind == "none"
        else "4 per frozen weight, 6 per trainable weight"
    )
    mfu.append(f"FLOPs per token: {weights} + {mixer_flops(plan.model.config)}")
    return [*joined([f"of which {spent[0]}", *spent[1:]]), *joined(mfu)]


def mixer_flops(config: ModelConfig) -> str:
    """What layers compute beside their matrices, in words: L layers of width d, on T tokens."""
    if all(layer.mixer == "attention" for layer in layers(config)):
        return "12 L d T"
    has_rules = any(layer.delta_net is not None for layer in layers(config))
    return "12 L d T of the layers with attention" + (" + delta rules" if has_rules else "")


def rollout_part_lines(rollout: RolloutPlan, step_seconds: float) -> list[str]:
    """The parts of a step with its share of a rollout, and what they depend on."""
    spent = [
        f"{name} {part.value / step_seconds:.0%}"
        for name, part in sorted(rollout.seconds.items(), key=lambda item: -item[1].value)
        if part.value >= 0.005 * step_seconds
    ]
    tokens = rollout.completion_tokens
    assumed = f"assumes completions of {tokens.value:,.0f} tokens ({tokens.low:,.0f} to {tokens.high:,.0f})"
    return [
        *joined([f"of which {spent[0]}", *spent[1:]]),
        *joined([assumed, "the run corrects its ETA after its first rollout"]),
    ]


def reached_flops(plan: RunPlan, step_seconds: float | None = None) -> float:
    """FLOP/s of one device by the usual count: matmuls and all T x T scores, without recomputation."""
    assert plan.step_seconds is not None
    config = plan.model.config
    counted = (
        useful_flops(TrainedModel.of(plan, config), plan.data.sequence_length)
        * plan.trained_tokens_per_step
    )
    return (
        counted
        / (step_seconds or plan.step_seconds.value)
        / (plan.parallel.devices if plan.parallel else 1)
    )


def dtype_of(plan: RunPlan) -> str:
    return "bfloat16" if plan.train.precision.startswith("bfloat16") else plan.train.precision


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


def mesh_lines(mesh: ParallelPlan, plan: RunPlan) -> Iterator[str]:
    """A line for each layout: split, memory of a device, speed of all, exposed communication; then the reason."""
    yield f"{'':<41}{'micro-batch':>11}{'GiB each':>9}{'tokens/s':>12}{'exposed':>9}{'bubble':>7}"
    for index, layout in enumerate(mesh.layouts):
        yield ("> " if index == mesh.chosen else "  ") + _layout(layout, plan)
    yield f"> {mesh.layouts[mesh.chosen].name}: {mesh.reason}"
    yield from _stage_lines(mesh.layout)
    padding = plan.train.empty_sequences
    sequences = plan.train.sequences_per_step
    if padding:
        yield f"{undivided(sequences, plan.train.readers)}:"
        yield f"{padding:,} of {sequences + padding:,} that they compute are padding, of zero weight"


def _stage_lines(layout: LayoutPlan) -> Iterator[str]:
    """Of a pipeline: the layers of each stage, the micro-batches that go through them, and why layers are uneven."""
    if layout.pipeline == 1:
        return
    by_stage = layout.stage_layers
    groups = f" in {layout.pipeline_chunks} groups each" if layout.pipeline_chunks > 1 else ""
    micro_batches = counted(layout.accumulation, "micro-batches")
    yield from joined(
        [
            f"{layout.pipeline_schedule}: {micro_batches} per step",
            f"stages of {', '.join(map(str, by_stage))} layers{groups}",
            f"stage {layout.fullest_stage + 1} needs most memory",
        ]
    )
    if layout.stage_devices:
        stages = enumerate(layout.stage_devices, start=1)
        yield from joined([f"stage {number} on {name}" for number, name in stages])
        yield "cut by the speed and the memory of each GPU; not run on such hardware"
        return
    if max(by_stage) - min(by_stage) > 1:
        reason = "the first stages hold more micro-batches"
        if by_stage[-1] == min(by_stage):
            reason = "the last stage has the head, too"
        yield f"an uneven cut: {reason}"


def _layout(layout: LayoutPlan, plan: RunPlan) -> str:
    sizes = ((layout.replicate, "copies"), (layout.shard, "shards"), (layout.pipeline, "stages"))
    split = " x ".join(f"{count} {word}" for count, word in sizes if count > 1)
    if min(layout.replicate, layout.shard, layout.pipeline) > 1:
        split = f"{layout.replicate} x {layout.shard} shards x {layout.pipeline} stages"
    if layout.context > 1:
        split += f", context {layout.context}"
    if layout.expert > 1:
        split += f", experts over {layout.expert}"
    head = f"{f'{layout.name} ({split})':<39}{f'{layout.micro_batch_size} x {layout.accumulation}':>11}"
    head += f"{layout.memory.total / GIB:>9.1f}"
    step = layout.step_seconds
    if not layout.memory.fits:
        return f"{head}   does not fit"
    if step is None:
        return f"{head}   speed unknown"
    rate = two_digits(plan.trained_tokens_per_step / step.value)
    return f"{head}{rate:>12}{layout.exposed_seconds / step.value:>9.0%}{layout.bubble_seconds / step.value:>7.0%}"


def claim_lines(claims: Sequence[Verdict]) -> Iterator[str]:
    """A line for each claim; unknown perplexities with one reason share a line."""
    groups: dict[tuple[str, ...], list[Verdict]] = {}
    for claim in claims:
        unknown = claim.verdict == "unknown" and claim.claim.startswith("perplexity")
        groups.setdefault(("perplexity", claim.reason) if unknown else (claim.claim,), []).append(
            claim
        )
    names = [
        (key[0] if len(group) == 1 else f"{len(group)} perplexities", group[0])
        for key, group in groups.items()
    ]
    width = max((16, *(len(name) + 2 for name, _ in names)))
    for name, claim in names:
        yield from columns(f"{name:<{width}}{claim.verdict:<9}", claim.reason)


def suggestion_lines(report: PlanReport) -> Iterator[str]:
    """Edits, each planned again."""
    for suggestion in report.suggestions:
        rest = textwrap.wrap(f"saves {suggestion.saves}", WIDTH - LABEL - EDIT)
        if len(suggestion.edit) < EDIT:
            yield f"{suggestion.edit:<{EDIT}}{rest.pop(0)}"
        else:
            yield from broken(suggestion.edit, WIDTH - LABEL)
        yield from (" " * EDIT + line for line in rest)


def setting_lines(plan: RunPlan, profile: Profile, machine: Machine) -> Iterator[str]:
    """The choices that depend on the machine, and their reasons."""
    choices = {choice.key: (choice.value, choice.reason) for choice in plan.choices}
    accelerator = profile.accelerator
    rows = []
    # Which of several devices trains.
    are_several = len(machine.accelerators) > (accelerator is not None)
    hides = accelerator is not None and bool(hidden_integrated(machine, accelerator))
    if (are_several and plan.parallel is None) or hides:
        rows.append(
            (f"GPU {accelerator.index}" if accelerator else "on the CPU", profile.device.reason)
        )
    backend, attention_reason = choices["train.attention"]
    rows += [
        choices["train.precision"],
        (f"{backend.replace('_', ' ')} attention", attention_reason),
        choices["train.compile"],
    ]
    if plan.stream is not None:
        value, stream_reason = choices["parallel.stream"]
        rows.append((f"{value} stream", stream_reason.partition("; ")[0]))  # its figures are above
    if plan.train.activation_checkpointing != "none":
        value, attention_reason = choices["train.activation_checkpointing"]
        rows.append((f"{value} checkpointing", attention_reason))
    if "data.chat.template" in choices:
        template, template_reason = choices["data.chat.template"]
        rows.append(("chat template", f"{template}; {template_reason}"))
    rows += [choices[key] for key in SETTINGS if key in choices]
    # The method's usual values share a line and a reason.
    usual_values = [
        f"{label} {choices[key][0]}" for key, label in USUAL_VALUES.items() if key in choices
    ]
    if usual_values:
        reason = next(choices[key][1] for key in USUAL_VALUES if key in choices)
        rows.append((usual_values[0], "; ".join([reason, *usual_values[1:]])))
    if accelerator is not None:
        build = fitting_builds(machine, accelerator)[0]
        overridden = any("HSA_OVERRIDE_GFX_VERSION" in text for text in build.never)
        unset = ["leave HSA_OVERRIDE_GFX_VERSION unset"] if overridden else []
        rows.append((build.requirement.split("==")[0], "; ".join((build.reason, *unset))))
        pinned, pin_reason = choices["data.pin_memory"]
        rows.append(("pinned memory" if pinned == "yes" else "pageable memory", pin_reason))
        fused, fused_reason = choices["optimizer.fused"]
        rows.append(("fused optimizer" if fused == "yes" else "own optimizer", fused_reason))
        if "environment" in choices:
            variables, attention_reason = choices["environment"]
            names = ", ".join(word.partition("=")[0] for word in variables.split())
            rows.append(("environment", f"{names}: {attention_reason}"))
    for value, reason in rows:
        yield from columns(f"{value:<{REASON - 1}} ", reason)


def _measured(plan: RunPlan) -> bool:
    return plan.step_seconds is not None and plan.step_seconds.origin == "measured"


def confidence(plan: RunPlan, profile: Profile, *, checked: bool = False) -> str:
    """Where the figures come from. `checked`: the speed of a CPU, by the check of this boot."""
    if plan.step_seconds is not None and _measured(plan):
        if plan.memory.origin == "measured":
            return f"Speed and memory: {plan.step_seconds.by}."
        return f"Speed: {plan.step_seconds.by}. Memory: estimated from shapes."
    if profile.accelerator is None and checked:
        return "Estimated from a check of this CPU, not measured: `bloomery bench` measures this model."
    if profile.accelerator is None:
        return (
            "Estimated from CPU specifications, not measured: `bloomery bench` measures this CPU."
        )
    if profile.gpu is None:
        name = f"{profile.accelerator.name} ({profile.accelerator.arch})"
        return f"{name} is not in the GPU table: its speed is unknown until `bloomery bench` measures it."
    return "Estimated from GPU specifications; nobody has measured this GPU with Bloomery yet."


def next_lines(
    report: PlanReport, source: str, commands: list[str], devices: str, local_devices: str = ""
) -> Iterator[str]:
    """Commands that exist and make sense after this plan."""
    plan = report.plan
    if not plan.fits:
        sufficient = [each for each in report.suggestions if each.fit != "does not fit"]
        # The first that surely fits, else the first that may.
        sufficient.sort(key=lambda suggestion: suggestion.fit != "fits")
        if sufficient:
            yield f"bloomery plan {source} {sufficient[0].edit}{devices}"
        yield remarked(f"bloomery plan {source} --gpu all", "which GPUs of the table fit it")
        return
    if "train" in commands and (plan.parallel is None or plan.parallel.nodes == 1):
        yield f"bloomery train {source}{local_devices}"
    can_measure = plan.parallel is None and plan.rollout is None
    if can_measure and "bench" in commands and not _measured(plan):
        device = (
            "this CPU"
            if plan.train.device == "cpu"
            else "this GPU"
            if local_devices or not devices
            else "it where that GPU is"
        )
        yield remarked(
            f"bloomery bench {source}{local_devices}", f"measure {device}; ranges become figures"
        )
    if claimed := _wrong_tokens(report):
        yield f"bloomery plan {source} train.max_tokens={claimed.replace(' ', '')}{devices}"


def remarked(command: str, remark: str) -> str:
    """The remark where the line has room for it."""
    line = f"{command}      {remark}"
    return line if len(line) <= WIDTH - LABEL else command


HEAD = f"{'GPU':<26}{'GiB':>5}  {'needs':>6}  {'dtype':<5}{'tokens/s':>11}  {'low to high':<22}{'takes':>10}{'kWh':>8}"


@dataclass(frozen=True)
class GpuPlan:
    """One GPU, and the plan for so many of it; `refused`: the reason where there is none."""

    spec: GpuSpec
    memory_gib: float
    plan: RunPlan | None
    energy_kwh: float | None = None
    refused: str = ""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits

    @property
    def rate(self) -> tuple[float, float, float] | None:
        """Tokens/s: typical, low, high."""
        if self.plan is None or self.plan.step_seconds is None:
            return None
        rate = self.plan.step_seconds.inverse(self.plan.trained_tokens_per_step)
        return rate.value, rate.low, rate.high

    def document(self) -> dict[str, Any]:
        """Of `--json`."""
        plan = self.plan
        rate = self.rate
        seconds = plan.seconds if plan else None
        origin = plan.step_seconds.origin if plan and plan.step_seconds else None
        return {
            "gpu": self.name,
            "arch": self.spec.arch,
            "memory_gib": self.memory_gib,
            "peak_tflops": self.spec.peak_tflops,
            "peaks": "estimated" if self.spec.peaks_estimated else "published",
            "fits": self.fits,
            "needs_gib": plan.memory.total / GIB if plan else None,
            "precision": plan.train.precision if plan else None,
            "stream": plan.train.stream if plan else None,
            "micro_batch_size": plan.train.micro_batch_size if plan else None,
            "tokens_per_second": rate
            and {"value": rate[0], "low": rate[1], "high": rate[2], "from": origin},
            "days": seconds.value / 86400 if seconds else None,
            "energy_kwh": self.energy_kwh,
            "refused": self.refused,
        }


def compare_gpus(
    loaded_recipe: LoadedRecipe,
    machine: Machine,
    *,
    gpu_models: Sequence[Accelerator] = (),
    gpus: int = 1,
    nodes: int = 1,
    host_memory: int | None = None,
) -> list[GpuPlan]:
    """The plans on `gpu_models`, or on every GPU of the table with each of its memory sizes: the fastest that fits
    first, those that do not fit last. `host_memory`: bytes of each node; None: what such machines usually have.

    Raises UserError when the recipe itself is wrong.
    """
    compared = gpu_models or list(devices())
    facts = facts_of(loaded_recipe, machine)
    results = []
    for device in compared:
        memory = device.usable_bytes / GIB
        spec = gpu_spec(device)
        assert spec is not None, f"gpus.toml has no {device.name}"
        there = with_host_memory(with_gpu(machine, device), host_memory, gpus=gpus)
        facts_there = facts.on(there)
        try:
            plan = resolve(loaded_recipe, facts_there, gpus=gpus, nodes=nodes)
            results.append(GpuPlan(spec, memory, plan, energy_kwh(plan, facts_there.profile)))
        except UserError as refused:
            results.append(GpuPlan(spec, memory, None, refused=refused.problem))
    if all(gpu.plan is None for gpu in results):
        first = with_host_memory(with_gpu(machine, compared[0]), host_memory, gpus=gpus)
        resolve(loaded_recipe, facts.on(first), gpus=gpus, nodes=nodes)

    def order(gpu: GpuPlan) -> tuple[int, float]:
        if gpu.plan is None:
            return 3, 0.0
        if not gpu.fits:
            return 2, gpu.plan.memory.total
        return (0, -gpu.rate[0]) if gpu.rate else (1, 0.0)

    return sorted(results, key=order)


def devices() -> Iterator[Accelerator]:
    """Every GPU of the table, once for each of its memory sizes."""
    for spec in gpu_table().gpu:
        facts = arch_spec(spec.arch)
        assert facts is not None, f"gpus.toml has no [[arch]] for {spec.arch}"
        for size in spec.memory_gib:
            memory = size * GIB if len(spec.memory_gib) > 1 else spec.memory_bytes()
            yield Accelerator(
                index=0, vendor=facts.vendor, name=spec.name, arch=spec.arch, memory_bytes=memory
            )


def gpus_page(
    results: list[GpuPlan], loaded_recipe: LoadedRecipe, *, gpus: int, nodes: int, source: str
) -> list[str]:
    """The table that compares GPUs."""
    count = (
        ""
        if gpus * nodes == 1
        else f" on {gpus} of each"
        if nodes == 1
        else f" on {nodes} nodes of {gpus} of each"
    )
    device_options = (f" --gpus {gpus}" if gpus > 1 else "") + (
        f" --nodes {nodes}" if nodes > 1 else ""
    )
    fitting = [gpu for gpu in results if gpu.fits]
    speeds = [gpu.plan.step_seconds for gpu in results if gpu.plan and gpu.plan.step_seconds]
    measured = sum(speed.origin == "measured" for speed in speeds)
    origin = f"Estimated, {measured} from measurements" if measured else "Estimated"
    lines = [
        f"{loaded_recipe.name}{count}: fits {len(fitting)} of {len(results)} GPUs. "
        f"{origin}, fastest first; nothing was run.",
        "",
        HEAD,
        *(_line(gpu) for gpu in results),
        "",
    ]
    if any(gpu.plan is not None and gpu.plan.stream for gpu in results):
        lines[-1:] = [
            "* weights stream from the host's memory; parallel.stream=off plans without",
            "",
        ]
    best = (fitting or results)[0]
    if best.plan is not None and best.plan.parallel is not None and best.plan.parallel.remark:
        lines.append(best.plan.parallel.remark)
    size = f" {best.memory_gib:.0f}GB" if len(best.spec.memory_gib) > 1 else ""
    name = best.name + size
    if not best.spec.memory_gib:  # integrated GPU: its name has the machine's memory
        facts = arch_spec(best.spec.arch)
        assert facts is not None
        machine_gib = best.memory_gib / VENDORS[facts.vendor].shared_part
        name = f"{best.spec.short_name} {machine_gib:.0f}GB"
    command = f'bloomery plan {source} --gpu "{name}"{device_options}'
    return [*lines, *labelled("next", command, indent=LABEL, width=WIDTH)]


def _line(gpu: GpuPlan) -> str:
    head = f"{gpu.spec.short_name:<26}{gpu.memory_gib:>5.0f}  "
    if gpu.plan is None:
        return f"{head}{gpu.refused}"[:100]
    needs = f"{gpu.plan.memory.total / GIB:>6.1f}  "
    if not gpu.fits:
        return f"{head}{needs}does not fit"
    dtype = SHORT_NAMES[gpu.plan.train.precision] + ("*" if gpu.plan.stream else "")
    if gpu.rate is None:
        return f"{head}{needs}{dtype:<5}speed unknown"
    value, low, high = (two_digits(rate) for rate in gpu.rate)
    seconds = gpu.plan.seconds
    energy = gpu.energy_kwh
    takes = format_seconds(seconds.value) if seconds else "?"
    kwh = "?" if energy is None else f"{energy:.1f}" if energy < 9.95 else two_digits(energy)
    ends = f"{low} to {high}"
    return f"{head}{needs}{dtype:<5}{value:>11}  {ends}{takes:>{32 - len(ends)}}{kwh:>8}"
