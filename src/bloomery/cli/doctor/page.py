"""What `bloomery doctor` prints for people: the machine, the findings, and what training would do here. 100 columns."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bloomery.cli.plan import brief_document
from bloomery.core.errors import UserError
from bloomery.core.text import broken
from bloomery.core.units import GIB, format_bytes, format_seconds
from bloomery.hardware.doctor.diagnose import ready
from bloomery.hardware.doctor.software import OVERRIDE
from bloomery.hardware.doctor.symptoms import PROBE, Finding
from bloomery.hardware.machine import Machine, Probe
from bloomery.hardware.profile import best_device, with_gpu
from bloomery.plan.local import local_plan
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe

ROOM = 90  # of a line, behind its label
ON_A_GPU, ON_A_CPU = "go-coder-125m", "go-coder-tiny"


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """A packaged recipe planned for a machine. `machine`: as it will be; `waits`: its GPU cannot be reached yet."""

    recipe: str
    machine: Machine
    plan: RunPlan | None
    problem: str = ""  # why there is no plan
    waits: bool = False
    alike: int = 0


def prospect(machine: Machine, findings: tuple[Finding, ...]) -> Prospect:
    """What training would choose, and whether a recipe fits: on the machine as it is when it is ready, else mended."""
    device, well = best_device(machine), ready(findings)
    known = device is not None or well or any(finding.id == "no-gpu" for finding in findings)
    recipe = ON_A_CPU if device is None else ON_A_GPU
    there = machine if well else mended(machine)
    alike = [one for one in machine.accelerators if device is not None and one.arch == device.arch]
    found = Prospect(recipe=recipe, machine=there, plan=None, waits=not known, alike=len(alike))
    try:
        return replace(found, plan=local_plan(load_recipe(recipe, ()), machine=there)[0])
    except UserError as error:
        return replace(found, problem=error.problem)


def then_lines(seen: Prospect) -> list[str]:
    """For people: one line, or two where one is too long."""
    if seen.plan is None:
        return [f"{seen.recipe} cannot be planned: {seen.problem}"]
    waits = ["what the GPU will do is said once it can be reached; the CPU could do this:"] if seen.waits else []
    plan, decided = seen.plan, {decision.key: str(decision.value) for decision in seen.plan.choices}
    attention = decided["train.attention"].replace("_", " ")
    choices = f"{decided['train.precision']} · {attention} attention · {decided['train.compile']}"
    one = f" on one of {seen.alike} GPUs" if seen.alike > 1 else ""
    total, limit = plan.memory.total / GIB, plan.memory.limit / GIB
    size = f"{seen.recipe} {'fits' if plan.fits else 'does not fit'}{one} ({total:.1f} of {limit:.1f} GiB)"
    if plan.seconds is not None and plan.fits:
        size += f" · about {format_seconds(plan.seconds.value)}"
    together = f"{choices} · {size}"
    return [*waits, *([together] if len(together) <= ROOM else [choices, size])]


def then_document(seen: Prospect) -> dict[str, Any]:
    """For programs: the keys of `plan --json`, null where nothing can be planned."""
    planned = {} if seen.plan is None else brief_document(seen.plan)
    keys = ("fits", "memory", "seconds", "choices")
    told = {"recipe": seen.recipe, "waits": seen.waits, "problem": seen.problem}
    return told | {key: planned.get(key) for key in keys}


def mended(machine: Machine) -> Machine:
    """The machine with its best card open, the PyTorch that fits it and no override."""
    device = best_device(machine)
    if device is None:
        return machine
    host = machine.host
    access = host.access.model_copy(update={"kfd": "open"})
    opened = machine.model_copy(update={"host": host.model_copy(update={"access": access})})
    planned = with_gpu(opened, device.model_copy(update={"access": "open"}))
    kept = {name: value for name, value in planned.software.environment.items() if name != OVERRIDE}
    return planned.model_copy(update={"software": planned.software.model_copy(update={"environment": kept})})


WIDTH, LABEL, BODY = 100, 10, 7
REMARKS, GAP = 39, 3  # the column of remarks behind commands, and what divides them at least
PROBING = "  # products, attention, compiling: about a minute"
BUILDS = {"rocm": "ROCm", "cuda": "CUDA", "cpu": "CPU"}


def page(machine: Machine, findings: Sequence[Finding], *, seconds: float, then: Sequence[str]) -> list[str]:
    """The lines of the whole answer, with the time at the right edge of the first."""
    time = f"{seconds:.1f} s"
    first, *rest = textwrap.wrap(headline(findings), WIDTH - len(time) - 2)
    lines = [f"{first:<{WIDTH - len(time)}}{time}", *rest, "", *machine_lines(machine), ""]
    for number, finding in enumerate(findings, start=1):
        lines += finding_lines(number, finding)
    # Those that need not be typed, as long as their own lines do not say it.
    own = [str(n) for n, one in enumerate(findings, 1) if one.run and "doctor --fix" not in one.fix[0]]
    if own:
        said = f"{' and '.join(own)} can be done for you, after asking: bloomery doctor --fix {own[0]}"
        lines += _labelled("fix", [said])
    code = 0 if ready(tuple(findings)) else 1
    last = f"{probed(machine.probes)}  Stuck? bloomery doctor --bundle report.json  exit {code}"
    return [*lines, *([""] if findings else []), *_labelled("then", [*then, last])]


def headline(findings: Sequence[Finding]) -> str:
    """Ready or not, the first reason, and how much there is to do."""
    stops = [finding for finding in findings if finding.level == "blocks"]
    if stops:
        first = stops[0].what.partition(": ")
        reason = first[2].replace("it was", "this PyTorch was") if stops[0].id == "wrong-build" else first[0]
        steps = [step for finding in stops for step in finding.fix]
        commands = sum(not step.startswith("#") and "  # or, " not in step for step in steps)
        return f"Not ready: {reason}. {_counted(commands, 'command')} {'mends' if commands == 1 else 'fix'} it."
    if any(finding.id == "no-gpu" for finding in findings):
        return "Ready, without a GPU: small models train on this machine's CPU."
    slow = sum(finding.level == "slows" for finding in findings)
    return "Ready." if not slow else f"Ready, but {_counted(slow, 'thing')} will slow it down."


def _counted(count: int, noun: str) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    number = words[count] if count < len(words) else str(count)
    return f"{number.capitalize() if noun == 'command' else number} {noun}{'' if count == 1 else 's'}"


def machine_lines(machine: Machine) -> Iterator[str]:
    """The GPUs, the PyTorch and the access, one line each."""
    host, software = machine.host, machine.software
    groups: dict[str, list[int]] = {}
    for device in machine.accelerators:
        groups.setdefault(_gpu(machine, device.index), []).append(device.index)
    for text, numbers in groups.items():
        name = f"gpu {numbers[0]}" + (f"-{numbers[-1]}" if len(numbers) > 1 else "")
        yield from _labelled(name, [text])
    if not machine.accelerators:
        memory = f"{format_bytes(host.memory_free_bytes)} of {format_bytes(host.memory_bytes)} free"
        yield from _labelled("cpu", [f"{host.cpu_name} · {host.cpu_cores} cores · {memory}"])
    installed = software.torch or "no PyTorch"
    if software.torch and "+" not in software.torch and software.build:
        installed += f" ({BUILDS[software.build]} build)"
    yield from _labelled("torch", [f"{installed} · Python {software.python} · {software.prefix}".rstrip(" ·")])
    if not any(device.vendor == "amd" for device in machine.accelerators):
        return
    nodes = {device.node: device.access for device in machine.accelerators if device.node}
    places = {"/dev/kfd": host.access.kfd, **nodes}
    told = {"open": "open for you", "denied": "closed to you", "absent": "not there", "hung": "without an answer"}
    rows = []
    for state, words in told.items():
        names = [name for name, one in places.items() if one == state]
        if len(names) > 3:
            rows.append(f"{names[0]}, {names[1]} and {len(names) - 2} more {words}")
        elif names:
            rows.append(" and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) + f" {words}")
    if rows:
        yield from _labelled("access", [" · ".join(rows)])


def _gpu(machine: Machine, index: int) -> str:
    device = next(one for one in machine.accelerators if one.index == index)
    size = f"{device.usable_bytes / GIB:.2f} GiB".replace(".00 ", " ") if device.usable_bytes else "memory unknown"
    if device.integrated:
        size += " shared with the processor"
    elif device.memory_used_bytes >= 0.05 * GIB:
        size += f", {device.memory_used_bytes / GIB:.2f} used by others"
    kernel = ".".join(machine.host.driver.kernel.split(".")[:2])
    linux = f"amdgpu of Linux {kernel}" if kernel else "amdgpu"
    nvidia = machine.host.driver.nvidia
    driver = linux if device.vendor == "amd" else nvidia and f"driver {nvidia}"
    return " · ".join(filter(None, (device.name, device.arch, size, driver)))


def finding_lines(number: int, finding: Finding) -> Iterator[str]:
    """The number, the level and what it is; then what was seen, what mends it and what proves it."""
    head = f"{number:<3}{finding.level:<7}"
    first, *rest = textwrap.wrap(finding.what, WIDTH - LABEL) or [""]
    yield head + first
    yield from (" " * LABEL + line for line in rest)
    if finding.evidence:
        yield from _inner("seen", textwrap.wrap(finding.evidence, WIDTH - LABEL))
    yield from _inner("fix", list(step_lines(finding.fix)))
    if finding.level == "blocks" and finding.verify:
        yield from _inner("verify", list(step_lines([finding.verify + PROBING * (finding.verify == PROBE)])))


def step_lines(steps: Sequence[str]) -> Iterator[str]:
    """Commands with their remarks in a column, long ones broken where a shell goes on."""
    width = WIDTH - LABEL
    column = _remark_column(steps, width)
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


def _remark_column(steps: Sequence[str], width: int) -> int:
    """Where remarks begin: behind the longest command that has room for its own."""
    parts = [step.partition("  # ") for step in steps]
    short = [len(c) + GAP for c, _, remark in parts if remark and len(c) + GAP + len(remark) <= width]
    return max([REMARKS, *short])


def _inner(label: str, lines: Sequence[str]) -> Iterator[str]:
    for position, line in enumerate(lines):
        yield (f"   {label:<{BODY}}" if position == 0 else " " * LABEL) + line


def _labelled(label: str, lines: Sequence[str]) -> Iterator[str]:
    wrapped = [part for line in lines for part in _in_parts(line, WIDTH - LABEL)]
    for position, line in enumerate(wrapped):
        yield (f"{label if position == 0 else '':<{LABEL}}{line}").rstrip()


def _in_parts(line: str, width: int) -> list[str]:
    """Wrapped between the parts of an enumeration where that is possible; no part stands alone."""
    parts = line.split(" · ")
    for rows in range(1, len(parts) + 1):
        each = -(-len(parts) // rows)
        lines = [" · ".join(parts[at : at + each]) for at in range(0, len(parts), each)]
        if all(len(one) <= width for one in lines):
            return lines
    return textwrap.wrap(line, width)


def probed(probes: Sequence[Probe]) -> str:
    """How much of this was tried: what is not installed was not."""
    tried = [probe for probe in probes if probe.outcome != "absent"]
    well = sum(probe.outcome == "ok" for probe in tried)
    if not tried:
        return "From the table, not yet probed here."
    return f"Probed here: all {well} work." if well == len(tried) else f"Probed here: {well} of {len(tried)} work."


def explained_lines(findings: Sequence[Finding], cites: Sequence[str]) -> Iterator[str]:
    """What `--explain` recognised, the best first, and who found out (`cites`: of the best)."""
    for number, finding in enumerate(findings, start=1):
        yield from finding_lines(number, finding)
    yield from _inner("read", textwrap.wrap(", ".join(cites), WIDTH - LABEL))
    if not findings:
        yield "unknown: bloomery doctor --bundle report.json collects what a maintainer needs"
