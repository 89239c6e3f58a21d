"""The text of `bloomery doctor`: the machine, the findings, and the plan of a packaged recipe. 100 columns."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bloomery.cli.plan import brief_document
from bloomery.core.errors import UserError
from bloomery.core.text import broken
from bloomery.core.units import GIB, format_bytes, format_seconds
from bloomery.hardware.doctor.diagnose import ready
from bloomery.hardware.doctor.software import OVERRIDE
from bloomery.hardware.doctor.symptoms import PROBE, Finding
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import best_device, with_gpu
from bloomery.plan.resolve import local_plan
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe

WIDTH = 100
LABEL = 10
BODY = 7
ROOM = WIDTH - LABEL  # of a line after its label
ON_A_GPU = "go-coder-125m"
ON_A_CPU = "go-coder-tiny"
# the column of the remarks after commands, and their smallest distance
REMARKS = 39
GAP = 3
PROBING = "  # tests matmul, attention and compilation, about 1 min"
BUILDS = {"rocm": "ROCm", "cuda": "CUDA", "cpu": "CPU"}


@dataclass(frozen=True)
class RecipePreview:
    """The plan of a packaged recipe after the fixes. `waits`: the GPU is not accessible, it is planned for the CPU."""

    recipe: str
    plan: RunPlan | None
    problem: str  # why there is no plan
    waits: bool
    same_gpus: int


def preview(machine: Machine, findings: tuple[Finding, ...]) -> RecipePreview:
    """The plan of a packaged recipe: for the machine as it is if it is ready, otherwise as it is after the fixes."""
    device = best_device(machine)
    is_ready = ready(findings)
    recipe = ON_A_CPU if device is None else ON_A_GPU
    plan = None
    problem = ""
    try:
        plan = local_plan(load_recipe(recipe, ()), machine=machine if is_ready else fixed(machine))[
            0
        ]
    except UserError as error:
        problem = error.problem
    waits = device is None and not is_ready and all(finding.id != "no-gpu" for finding in findings)
    same = sum(device is not None and one.arch == device.arch for one in machine.accelerators)
    return RecipePreview(recipe, plan, problem, waits, same)


def then_lines(result: RecipePreview) -> list[str]:
    """One line, or two if one is too long."""
    if result.plan is None:
        return [f"{result.recipe} cannot be planned: {result.problem}"]
    waits = ["The GPU can be planned once it is accessible. On the CPU:"] if result.waits else []
    plan = result.plan
    values = {choice.key: str(choice.value) for choice in result.plan.choices}
    attention = values["train.attention"].replace("_", " ")
    choices = f"{values['train.precision']} · {attention} attention · {values['train.compile']}"
    one = f" on one of {result.same_gpus} GPUs" if result.same_gpus > 1 else ""
    total = plan.memory.total / GIB
    limit = plan.memory.limit / GIB
    size = f"{result.recipe} {'fits' if plan.fits else 'does not fit'}{one} ({total:.1f} of {limit:.1f} GiB)"
    if plan.seconds is not None and plan.fits:
        size += f" · about {format_seconds(plan.seconds.value)}"
    together = f"{choices} · {size}"
    return [*waits, *([together] if len(together) <= ROOM else [choices, size])]


def then_document(result: RecipePreview) -> dict[str, Any]:
    """Keys of `plan --json`, null without a plan."""
    planned = {} if result.plan is None else brief_document(result.plan)
    keys = ("fits", "memory", "seconds", "choices")
    document = {"recipe": result.recipe, "waits": result.waits, "problem": result.problem}
    return document | {key: planned.get(key) for key in keys}


def fixed(machine: Machine) -> Machine:
    """The machine with access to its best GPU, the PyTorch that fits it and no override."""
    device = best_device(machine)
    if device is None:
        return machine
    host = machine.host
    access = host.access.model_copy(update={"kfd": "open"})
    opened = machine.model_copy(update={"host": host.model_copy(update={"access": access})})
    planned = with_gpu(opened, device.model_copy(update={"access": "open"}))
    environment = {
        name: value for name, value in planned.software.environment.items() if name != OVERRIDE
    }
    return planned.model_copy(
        update={"software": planned.software.model_copy(update={"environment": environment})}
    )


def page(
    machine: Machine, findings: Sequence[Finding], *, seconds: float, then: Sequence[str]
) -> list[str]:
    """All lines; the first ends with the time that the checks took."""
    time = f"{seconds:.1f} s"
    first, *rest = textwrap.wrap(headline(findings), WIDTH - len(time) - 2)
    lines = [f"{first:<{WIDTH - len(time)}}{time}", *rest, "", *machine_lines(machine), ""]
    for number, finding in enumerate(findings, start=1):
        lines += finding_lines(number, finding)
    # The fixes that --fix applies, unless their own line already names it.
    automatic = [
        str(n) for n, one in enumerate(findings, 1) if one.run and "doctor --fix" not in one.fix[0]
    ]
    if automatic:
        which = f"fix {' or '.join(automatic)}"
        lines += _labelled(
            "fix", [f"bloomery doctor --fix {automatic[0]} applies {which} after asking"]
        )
    probes = [probe for probe in machine.probes if probe.outcome != "absent"]
    passed = sum(probe.outcome == "ok" for probe in probes)
    probed = (
        f"{passed} of {len(probes)} probes passed."
        if probes
        else "Estimated from specifications, not probed yet."
    )
    last = f"{probed}   Stuck? bloomery doctor --bundle FILE   exit {0 if ready(tuple(findings)) else 1}"
    return [*lines, *([""] if findings else []), *_labelled("then", [*then, last])]


def headline(findings: Sequence[Finding]) -> str:
    """Ready or not, the first reason, and the number of commands that fix it."""
    blocking = [finding for finding in findings if finding.level == "blocks"]
    if blocking:
        reason = blocking[0].headline or blocking[0].what.partition(": ")[0]
        steps = [step for finding in blocking for step in finding.fix]
        commands = sum(
            not step.startswith("#") and "  # or, " not in step and "  # or: " not in step
            for step in steps
        )
        count = _counted(commands, "command").capitalize()
        return f"Not ready: {reason}. {count} {'fixes' if commands == 1 else 'fix'} it."
    if any(finding.id == "no-gpu" for finding in findings):
        return "Ready, without a GPU: small models train on the CPU of this machine."
    slow = sum(finding.level == "slows" for finding in findings)
    return (
        "Ready."
        if not slow
        else f"Ready, but {_counted(slow, 'problem')} slow{'s' * (slow == 1)} training."
    )


def _counted(count: int, noun: str) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return f"{words[count] if count < len(words) else count} {noun}{'' if count == 1 else 's'}"


def machine_lines(machine: Machine) -> Iterator[str]:
    """The GPUs, the PyTorch and the access to the GPUs."""
    host = machine.host
    software = machine.software
    groups: dict[str, list[int]] = {}
    for device in machine.accelerators:
        size = (
            f"{device.usable_bytes / GIB:.2f} GiB".replace(".00 ", " ")
            if device.usable_bytes
            else "memory unknown"
        )
        if device.integrated:
            size += " of system memory"
        elif device.memory_used_bytes >= 0.05 * GIB:
            size += f", {device.memory_used_bytes / GIB:.2f} GiB in use"
        kernel = ".".join(host.driver.kernel.split(".")[:2])
        driver = host.driver.nvidia and f"driver {host.driver.nvidia}"
        if device.vendor == "amd":
            driver = f"amdgpu, Linux {kernel}" if kernel else "amdgpu"
        text = " · ".join(filter(None, (device.name, device.arch, size, driver)))
        groups.setdefault(text, []).append(device.index)
    for text, numbers in groups.items():
        name = f"GPU {numbers[0]}" + (f"-{numbers[-1]}" if len(numbers) > 1 else "")
        yield from _labelled(name, [text])
    if not machine.accelerators:
        memory = f"{format_bytes(host.memory_free_bytes)} of {format_bytes(host.memory_bytes)} free"
        yield from _labelled("CPU", [f"{host.cpu_name} · {host.cpu_cores} cores · {memory}"])
    installed = software.torch or "not installed"
    if software.torch and "+" not in software.torch and software.build:
        installed += f" ({BUILDS[software.build]} build)"
    yield from _labelled(
        "torch", [f"{installed} · Python {software.python} · {software.prefix}".rstrip(" ·")]
    )
    if not any(device.vendor == "amd" for device in machine.accelerators):
        return
    nodes = {device.node: device.access for device in machine.accelerators if device.node}
    places = {"/dev/kfd": host.access.kfd, **nodes}
    states = {
        "open": "read-write",
        "denied": "permission denied",
        "absent": "missing",
        "hung": "no response",
    }
    parts = []
    for state, words in states.items():
        names = [name for name, one in places.items() if one == state]
        if len(names) > 3:
            names = [names[0], f"{names[1]} and {len(names) - 2} more"]
            parts.append(f"{', '.join(names)}: {words}")
        elif names:
            parts.append(
                " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) + f": {words}"
            )
    if parts:
        yield from _labelled("access", [" · ".join(parts)])


def finding_lines(number: int, finding: Finding) -> Iterator[str]:
    """The number, the level and the problem; then the evidence, the fix and the command that verifies it."""
    head = f"{number:<3}{finding.level:<7}"
    first, *rest = textwrap.wrap(finding.what, ROOM) or [""]
    yield head + first
    yield from (" " * LABEL + line for line in rest)
    if finding.evidence:
        yield from _inner("found", textwrap.wrap(finding.evidence, ROOM))
    yield from _inner("fix", list(step_lines(finding.fix)))
    if finding.level == "blocks" and finding.verify:
        yield from _inner(
            "verify", list(step_lines([finding.verify + PROBING * (finding.verify == PROBE)]))
        )


def step_lines(steps: Sequence[str]) -> Iterator[str]:
    """Commands with their remarks in a column; long commands continue after a backslash."""
    width = ROOM
    column = REMARKS
    for command, _, remark in (step.partition("  # ") for step in steps):
        # the column starts after the longest command with room for its remark
        length = len(command) + GAP
        column = max(column, length) if remark and length + len(remark) <= width else column
    for step in steps:
        command, _, remark = step.partition("  # ")
        if command.startswith("# "):
            yield from textwrap.wrap(command[2:], width)
            continue
        *lines, last = broken(command, width)
        yield from lines
        if not remark or len(last) + GAP + len(remark) > width:
            yield last
            yield from (f"    {line}" for line in textwrap.wrap(remark, width - 4))
        else:
            start = min(max(column, len(last) + GAP), width - len(remark))
            yield f"{last:<{start}}{remark}"


def _inner(label: str, lines: Sequence[str]) -> Iterator[str]:
    for position, line in enumerate(lines):
        yield (f"   {label:<{BODY}}" if position == 0 else " " * LABEL) + line


def _labelled(label: str, lines: Sequence[str]) -> Iterator[str]:
    wrapped = [part for line in lines for part in _in_parts(line, ROOM)]
    for position, line in enumerate(wrapped):
        yield (f"{label if position == 0 else '':<{LABEL}}{line}").rstrip()


def _in_parts(line: str, width: int) -> list[str]:
    """`line`, broken between the parts of an enumeration if possible; the lines have equally many parts."""
    parts = line.split(" · ")
    for rows in range(1, len(parts) + 1):
        each = -(-len(parts) // rows)
        lines = [" · ".join(parts[at : at + each]) for at in range(0, len(parts), each)]
        if all(len(one) <= width for one in lines):
            return lines
    return textwrap.wrap(line, width)


def explained_lines(findings: Sequence[Finding], cites: Sequence[str]) -> Iterator[str]:
    """The matches of `--explain`, the best first, and the sources of the best (`cites`)."""
    for number, finding in enumerate(findings, start=1):
        yield from finding_lines(number, finding)
    yield from _inner("see", textwrap.wrap(", ".join(cites), ROOM))
    if not findings:
        yield "unknown message: bloomery doctor --bundle report.json collects what a bug report needs"
