"""The text of `bloomery doctor`: the machine, the findings, and the plan of a packaged recipe. 100 columns."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bloomery.cli.plan import brief_document
from bloomery.cli.plugins import plugin_lines
from bloomery.core.errors import UserError
from bloomery.core.text import broken
from bloomery.core.units import GIB, format_seconds
from bloomery.hardware.doctor.diagnose import ready
from bloomery.hardware.doctor.software import OVERRIDE
from bloomery.hardware.doctor.symptoms import PROBE, Finding
from bloomery.hardware.doctor.words import findings_headline, machine_facts
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import best_device, with_gpu
from bloomery.plan.resolve import local_plan
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe

WIDTH = 100
LABEL_WIDTH = 10
INNER_LABEL_WIDTH = 7
TEXT_WIDTH = WIDTH - LABEL_WIDTH  # of a line after its label
GPU_RECIPE = "go-coder-125m"
CPU_RECIPE = "go-coder-tiny"
# Remarks after commands begin in this column, and at least so far behind the command.
REMARK_COLUMN = 39
REMARK_GAP = 3
PROBE_REMARK = "  # tests matmul, attention and compilation, about 1 min"


@dataclass(frozen=True)
class RecipePreview:
    """The plan of a packaged recipe after the fixes. `waits`: the GPU is not accessible, it is planned for the CPU."""

    recipe: str
    plan: RunPlan | None
    problem: str  # why there is no plan
    waits: bool
    num_gpus: int  # of the planned one's architecture


def preview(machine: Machine, findings: tuple[Finding, ...]) -> RecipePreview:
    """The plan of a packaged recipe: for the machine as it is if it is ready, otherwise as it is after the fixes."""
    device = best_device(machine)
    is_ready = ready(findings)
    recipe = CPU_RECIPE if device is None else GPU_RECIPE
    planned_machine = machine if is_ready else fixed(machine)
    plan = None
    problem = ""
    try:
        plan, _ = local_plan(load_recipe(recipe, ()), machine=planned_machine)
    except UserError as error:
        problem = error.problem

    # No usable device although one exists: it waits for its fix.
    waits = device is None and not is_ready and all(finding.id != "no-gpu" for finding in findings)
    num_gpus = 0
    if device is not None:
        num_gpus = sum(gpu.arch == device.arch for gpu in machine.accelerators)
    return RecipePreview(recipe, plan, problem, waits, num_gpus)


def then_lines(result: RecipePreview) -> list[str]:
    """The choices of the plan, and whether it fits: one line, or two if one is too long."""
    plan = result.plan
    if plan is None:
        return [f"{result.recipe} cannot be planned: {result.problem}"]
    values = {choice.key: str(choice.value) for choice in plan.choices}
    attention = values["train.attention"].replace("_", " ")
    choices = f"{values['train.precision']} · {attention} attention · {values['train.compile']}"

    verdict = f"{result.recipe} {'fits' if plan.fits else 'does not fit'}"
    if result.num_gpus > 1:
        verdict += f" on one of {result.num_gpus} GPUs"
    verdict += f" ({plan.memory.total / GIB:.1f} of {plan.memory.limit / GIB:.1f} GiB)"
    if plan.seconds is not None and plan.fits:
        verdict += f" · about {format_seconds(plan.seconds.value)}"

    lines = ["The GPU can be planned once it is accessible. On the CPU:"] if result.waits else []
    joined_line = f"{choices} · {verdict}"
    lines += [joined_line] if len(joined_line) <= TEXT_WIDTH else [choices, verdict]
    return lines


def then_document(result: RecipePreview) -> dict[str, Any]:
    """The JSON of the preview: keys of `plan --json`, null without a plan."""
    plan_fields = {} if result.plan is None else brief_document(result.plan)
    keys = ("fits", "memory", "seconds", "choices")
    document = {"recipe": result.recipe, "waits": result.waits, "problem": result.problem}
    return document | {key: plan_fields.get(key) for key in keys}


def fixed(machine: Machine) -> Machine:
    """The machine with access to its best GPU, the PyTorch that fits it and no override."""
    device = best_device(machine)
    if device is None:
        return machine
    host = machine.host
    access = host.access.model_copy(update={"kfd": "open"})
    accessible = machine.model_copy(update={"host": host.model_copy(update={"access": access})})
    with_device = with_gpu(accessible, device.model_copy(update={"access": "open"}))
    environment = dict(with_device.software.environment)
    environment.pop(OVERRIDE, None)
    software = with_device.software.model_copy(update={"environment": environment})
    return with_device.model_copy(update={"software": software})


def page(
    machine: Machine, findings: Sequence[Finding], *, seconds: float, plan_lines: Sequence[str]
) -> list[str]:
    """All lines of the page; the first ends with the time that the checks took."""
    time = f"{seconds:.1f} s"
    first_line, *more_lines = textwrap.wrap(findings_headline(findings), WIDTH - len(time) - 2)
    lines = [f"{first_line:<{WIDTH - len(time)}}{time}", *more_lines]
    lines.append("")
    for label, text in machine_facts(machine):
        lines += _labelled(label, [text])
    lines += _labelled("plug-ins", plugin_lines())
    lines.append("")
    for number, finding in enumerate(findings, start=1):
        lines += finding_lines(number, finding)

    # The fixes that --fix applies, unless their own line already names it.
    automatic_fixes = [
        str(number)
        for number, finding in enumerate(findings, start=1)
        if finding.run and "doctor --fix" not in finding.fix[0]
    ]
    if automatic_fixes:
        command = f"bloomery doctor --fix {automatic_fixes[0]}"
        remark = f"{command} applies fix {' or '.join(automatic_fixes)} after asking"
        lines += _labelled("fix", [remark])

    # The end: what training would do next, how far the page can be trusted, and the exit code.
    probes = [probe for probe in machine.probes if probe.outcome != "absent"]
    num_passed = sum(probe.outcome == "ok" for probe in probes)
    confidence = "Estimated from specifications, not probed yet."
    if probes:
        confidence = f"{num_passed} of {len(probes)} probes passed."
    exit_code = 0 if ready(tuple(findings)) else 1
    end = f"{confidence}   Stuck? bloomery doctor --bundle FILE   exit {exit_code}"
    if findings:
        lines.append("")
    return [*lines, *_labelled("then", [*plan_lines, end])]


def finding_lines(number: int, finding: Finding) -> Iterator[str]:
    """The number, the level and the problem; then the evidence, the fix and the command that verifies it."""
    heading = f"{number:<3}{finding.level:<7}"
    first_line, *more_lines = textwrap.wrap(finding.what, TEXT_WIDTH) or [""]
    yield heading + first_line
    yield from (" " * LABEL_WIDTH + line for line in more_lines)
    if finding.evidence:
        yield from _inner("found", textwrap.wrap(finding.evidence, TEXT_WIDTH))
    yield from _inner("fix", list(step_lines(finding.fix)))
    if finding.level == "blocks" and finding.verify:
        step = finding.verify + PROBE_REMARK * (finding.verify == PROBE)
        yield from _inner("verify", list(step_lines([step])))


def step_lines(steps: Sequence[str]) -> Iterator[str]:
    """Commands with their remarks in a column; long commands continue after a backslash."""
    # The column starts after the longest command that shares a line with its remark.
    column = REMARK_COLUMN
    for step in steps:
        command, _, remark = step.partition("  # ")
        remark_start = len(command) + REMARK_GAP
        if remark and remark_start + len(remark) <= TEXT_WIDTH:
            column = max(column, remark_start)

    for step in steps:
        command, _, remark = step.partition("  # ")
        if command.startswith("# "):
            yield from textwrap.wrap(command[2:], TEXT_WIDTH)
            continue
        *lines, last_line = broken(command, TEXT_WIDTH)
        yield from lines
        remark_start = len(last_line) + REMARK_GAP
        if not remark or remark_start + len(remark) > TEXT_WIDTH:
            yield last_line
            yield from (f"    {line}" for line in textwrap.wrap(remark, TEXT_WIDTH - 4))
        else:
            start = min(max(column, remark_start), TEXT_WIDTH - len(remark))
            yield f"{last_line:<{start}}{remark}"


def _inner(label: str, lines: Sequence[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        yield (f"   {label:<{INNER_LABEL_WIDTH}}" if index == 0 else " " * LABEL_WIDTH) + line


def _labelled(label: str, lines: Sequence[str]) -> Iterator[str]:
    wrapped_lines = [part for line in lines for part in _in_parts(line, TEXT_WIDTH)]
    for index, line in enumerate(wrapped_lines):
        yield f"{label if index == 0 else '':<{LABEL_WIDTH}}{line}".rstrip()


def _in_parts(line: str, width: int) -> list[str]:
    """The line broken between the parts of an enumeration, equally many in each, or else between words."""
    parts = line.split(" · ")
    for num_lines in range(1, len(parts) + 1):
        size = -(-len(parts) // num_lines)
        lines = [" · ".join(parts[start : start + size]) for start in range(0, len(parts), size)]
        if all(len(candidate) <= width for candidate in lines):
            return lines
    return textwrap.wrap(line, width)


def explained_lines(findings: Sequence[Finding], cites: Sequence[str]) -> Iterator[str]:
    """The matches of `--explain`, the best first, and the sources of the best (`cites`)."""
    for number, finding in enumerate(findings, start=1):
        yield from finding_lines(number, finding)
    yield from _inner("see", textwrap.wrap(", ".join(cites), TEXT_WIDTH))
    if not findings:
        yield "unknown message: bloomery doctor --bundle report.json collects what a bug report needs"
