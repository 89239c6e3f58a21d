"""A plan as text: the page with every figure, its verdict, settings, confidence and next commands.

Every line is made of the plan's own figures. The parts that have files of their own: `bloomery.plan.page_devices`,
`bloomery.plan.page_batch`, `bloomery.plan.page_memory` and `bloomery.plan.page_time`.
"""

import textwrap
from collections.abc import Iterator, Sequence

from bloomery.core.text import broken
from bloomery.core.units import format_bytes, format_count
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile, build_profile, fitting_builds, hidden_integrated
from bloomery.plan.advise import fit_of
from bloomery.plan.page_batch import batch_lines, model_line, picture_lines
from bloomery.plan.page_devices import device_lines, link_lines, mesh_lines
from bloomery.plan.page_memory import (
    disk_lines,
    max_length_lines,
    memory_lines,
    pinned_lines,
    save_lines,
    scoring_lines,
    stream_lines,
)
from bloomery.plan.page_text import LABEL, WIDTH, about, block, columns, joined, of_limit
from bloomery.plan.page_time import part_lines, time_lines
from bloomery.plan.types import PlanReport, RunPlan, Verdict

REASON = 24  # the column of a setting's reason
EDIT = 40  # columns of a suggestion
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
    lines += block("memory", [*memory_lines(plan, profile), *pinned_lines(report)])
    lines += block("host", stream_lines(plan, machine))
    lines += block("scoring", scoring_lines(plan, profile))
    lines += block("simulated", simulated)
    lines += block("sequence", joined(max_length_lines(report)))
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
