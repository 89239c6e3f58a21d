"""A plan in the lines that decide: does it fit, how long, what it does, what is wrong, what to type next.

The page with every figure and the reason of each choice is `bloomery.plan.page`, `bloomery plan --verbose`.
"""

import textwrap
from collections.abc import Sequence

from bloomery.core.text import broken
from bloomery.core.units import GIB, two_digits
from bloomery.facts.rates import rate_text
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.plan.advise import fit_of
from bloomery.plan.page import (
    claim_lines,
    confidence,
    headline,
    next_lines,
    remarked,
    suggestion_lines,
)
from bloomery.plan.page_batch import batch_lines, model_line
from bloomery.plan.page_devices import device_lines
from bloomery.plan.page_memory import save_lines, scoring_lines, stream_lines
from bloomery.plan.page_text import LABEL, SHORT_NAMES, WIDTH, block, joined, of_limit, unit_of
from bloomery.plan.page_time import time_lines
from bloomery.plan.types import PlanReport, RunPlan

MANY_SUGGESTIONS = 3


def summary(
    report: PlanReport,
    machine: Machine,
    *,
    source: str,
    commands: list[str],
    devices: str = "",
    local_devices: str = "",
    simulated: Sequence[str] = (),
) -> list[str]:
    """The short lines of `bloomery plan`; arguments as of `page`. Warnings are never left out."""
    plan = report.plan
    profile = build_profile(machine)
    lines = _headline(report)
    lines += [plan.parallel.remark] if plan.parallel and plan.parallel.remark else []
    lines += block("GPU" if profile.accelerator else "CPU", device_lines(plan, profile, machine))
    lines += block("layout", _layout_lines(plan))
    lines += block("run", joined([_method(plan), model_line(plan)]))
    lines += block("batch", batch_lines(plan))

    # Where memory is short, or streams, its parts say what could be less.
    fits_surely = fit_of(plan) == "fits"
    if not fits_surely:
        lines += block("memory", _memory_lines(plan))
    lines += block("host", stream_lines(plan, machine))
    lines += block("scoring", scoring_lines(plan, profile))
    lines += block("simulated", simulated)
    lines += block("time", time_lines(report, profile))
    if report.kill.whole_run and not plan.checkpoint.at_best:
        lines += block("saves", save_lines(report))
    wrong_claims = [claim for claim in report.claims if claim.verdict == "wrong"]
    lines += block("claims", list(claim_lines(wrong_claims)))
    warnings = [
        line
        for text in report.warnings
        for line in textwrap.wrap(text, WIDTH - LABEL, subsequent_indent="  ")
    ]
    lines += block("warnings", warnings)
    if not fits_surely:
        fewer = report.model_copy(update={"suggestions": report.suggestions[:MANY_SUGGESTIONS]})
        lines += block("suggested", list(suggestion_lines(fewer)))

    origin = confidence(plan, profile, checked=machine.cpu_check is not None)
    details = f"bloomery plan {source}{devices} -v"
    following = [
        *next_lines(report, source, commands, devices, local_devices),
        remarked(details, "every figure, each choice and its reason"),
    ]
    lines += textwrap.wrap(origin, WIDTH)
    lines += block("next", [part for line in following for part in broken(line, WIDTH - LABEL)])
    return [line.rstrip() for line in lines]


def _headline(report: PlanReport) -> list[str]:
    """The verdict with its memory and time; nothing was run."""
    plan = report.plan
    memory = plan.memory
    sentence = headline(report)
    if sentence.startswith("Fits."):
        size = unit_of(memory.total)[1]
        digits = 1 if size == GIB else 0
        band = f"{memory.low / size:.{digits}f} to {memory.high / size:.{digits}f}"
        sentence = f"Fits: {of_limit(memory.total, plan)} ({band}).{sentence[5:]}"
    remark = "nothing was run"
    first_line, *rest = textwrap.wrap(sentence, WIDTH - len(remark) - 1, break_on_hyphens=False)
    return [f"{first_line:<{WIDTH - len(remark)}}{remark}", *rest]


def _method(plan: RunPlan) -> str:
    """ "sft with LoRA, rank 16, on nf4 weights, in bf16": what is trained, and how."""
    choices = {choice.key: choice.value for choice in plan.choices}
    method = choices.get("adapter.kind", "all weights")
    if plan.adapter.kind == "none":
        method = "all weights"
    elif plan.quantize.kind != "none":
        method += f", on {plan.quantize.kind} weights"
    rate = f"learning rate {rate_text(plan.optimizer.learning_rate)}"
    return f"{plan.objective.kind} with {method}, in {SHORT_NAMES[plan.train.precision]}, {rate}"


def _layout_lines(plan: RunPlan) -> list[str]:
    """Of several devices: how the model is divided, and what each holds and all reach."""
    mesh = plan.parallel
    if mesh is None:
        return []
    layout = mesh.layout
    sizes = (
        (layout.replicate, "copies"),
        (layout.shard, "shards"),
        (layout.pipeline, "stages"),
        (layout.context, "parts of a sequence"),
        (layout.expert, "groups of experts"),
    )
    split = " x ".join(f"{count} {words}" for count, words in sizes if count > 1)
    facts = [f"{layout.name} ({split})" if split else layout.name]
    facts.append(f"{layout.memory.total / GIB:.1f} GiB each")
    if layout.step_seconds is not None:
        rate = plan.trained_tokens_per_step / layout.step_seconds.value
        waiting = layout.exposed_seconds / layout.step_seconds.value
        facts += [f"{two_digits(rate)} tokens/s", f"{waiting:.0%} waits for links"]
    if len(mesh.layouts) > 1:
        facts.append(f"of {len(mesh.layouts)} layouts: {mesh.reason}")
    return joined(facts)


def _memory_lines(plan: RunPlan) -> list[str]:
    """The parts of the memory, the largest first."""
    unit, size = unit_of(plan.memory.total)
    digits = 1 if size == GIB else 0
    parts = sorted(plan.memory.parts.items(), key=lambda part: -part[1])
    least = 0.5 / 10**digits
    facts = [f"{name} {value / size:.{digits}f}" for name, value in parts if value / size >= least]
    facts[0] += f" {unit}"
    return joined(facts)
