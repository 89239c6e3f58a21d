"""What `bloomery doctor` prints for people: the machine, the findings, and what training would do here. 100 columns."""

import textwrap
from collections.abc import Iterator, Sequence

from bloomery.hardware.doctor import ready
from bloomery.hardware.doctor_finding import Finding
from bloomery.hardware.machine import Machine
from bloomery.units import GIB, format_bytes

WIDTH, LABEL, BODY = 100, 10, 7
BUILDS = {"rocm": "ROCm", "cuda": "CUDA", "cpu": "CPU"}


def page(machine: Machine, findings: Sequence[Finding], *, seconds: float, then: Sequence[str]) -> list[str]:
    """The lines of the whole answer."""
    lines = [_ends(headline(findings), f"{seconds:.1f} s"), "", *machine_lines(machine), ""]
    for number, finding in enumerate(findings, start=1):
        lines += finding_lines(number, finding)
    if findings:
        lines.append("")
    rows = [*then, _last_line(machine, findings)]
    return [*lines, *_labelled("then", rows)]


def headline(findings: Sequence[Finding]) -> str:
    """Ready or not, the first reason, and how much there is to do."""
    stops = [finding for finding in findings if finding.level == "stops"]
    if stops:
        first = stops[0].what.partition(": ")
        reason = first[2].replace("it was", "this PyTorch was") if stops[0].id == "wrong-build" else first[0]
        commands = sum(not step.startswith("#") for finding in stops for step in finding.mend)
        return f"Not ready: {reason}. {_counted(commands, 'command')} {'mends' if commands == 1 else 'mend'} it."
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
    access = _access(machine)
    if access:
        yield from _labelled("access", [access])


def _gpu(machine: Machine, index: int) -> str:
    device = next(one for one in machine.accelerators if one.index == index)
    size = f"{device.usable_bytes / GIB:.2f} GiB".replace(".00 ", " ")
    if device.integrated:
        size += " shared with the processor"
    elif device.memory_used_bytes >= 0.05 * GIB:
        size += f", {device.memory_used_bytes / GIB:.2f} used by others"
    kernel = ".".join(machine.host.driver.kernel.split(".")[:2])
    driver = f"amdgpu of Linux {kernel}" if device.vendor == "amd" else f"driver {machine.host.driver.nvidia}"
    return " · ".join((device.name, device.arch, size, driver if kernel or device.vendor == "nvidia" else "amdgpu"))


def _access(machine: Machine) -> str:
    if not any(device.vendor == "amd" for device in machine.accelerators):
        return ""
    nodes = {device.node: device.access for device in machine.accelerators if device.node}
    places = {"/dev/kfd": machine.host.access.kfd, **nodes}
    opened = [name for name, state in places.items() if state == "open"]
    closed = [f"{name} {state}" for name, state in places.items() if state not in ("open", None)]
    shown = [f"{_few(opened)} open for you"] if opened else []
    return " · ".join([*shown, *([_few(closed)] if closed else [])])


def _few(names: Sequence[str]) -> str:
    if len(names) <= 3:
        return " and ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"


def finding_lines(number: int, finding: Finding) -> Iterator[str]:
    """The number, the level and what it is; then what was seen, what mends it and what proves it."""
    head = f"{number:<3}{finding.level:<7}"
    first, *rest = textwrap.wrap(finding.what, WIDTH - LABEL) or [""]
    yield head + first
    yield from (" " * LABEL + line for line in rest)
    if finding.evidence:
        yield from _inner("seen", textwrap.wrap(finding.evidence, WIDTH - LABEL))
    yield from _inner("mend", list(step_lines(finding.mend)))
    if finding.level == "stops" and finding.prove:
        yield from _inner("prove", [finding.prove])


def step_lines(steps: Sequence[str]) -> Iterator[str]:
    """Commands with their remarks in a column, long ones broken where a shell goes on."""
    for step in steps:
        command, _, remark = step.partition("  # ")
        if command.startswith("# "):
            yield from textwrap.wrap(command[2:], WIDTH - LABEL)
            continue
        *lines, last = _broken(command)
        yield from lines
        column = f"{last:<40}  "
        if remark and len(column + remark) <= WIDTH - LABEL:
            yield (column + remark).rstrip()
        else:
            yield last
            yield from (f"    {line}" for line in textwrap.wrap(remark, WIDTH - LABEL - 4))


def _broken(command: str) -> list[str]:
    """A command over several lines, each but the last ending in a backslash."""
    lines, width = [command], WIDTH - LABEL - 2
    while len(lines[-1]) > WIDTH - LABEL:
        at = lines[-1].rfind(" ", 0, width)
        if at <= 4:
            break
        lines[-1:] = [lines[-1][:at] + " \\", "    " + lines[-1][at + 1 :]]
    return lines


def _inner(label: str, lines: Sequence[str]) -> Iterator[str]:
    for position, line in enumerate(lines):
        yield (f"   {label:<{BODY}}" if position == 0 else " " * LABEL) + line


def _labelled(label: str, lines: Sequence[str]) -> Iterator[str]:
    wrapped = [part for line in lines for part in textwrap.wrap(line, WIDTH - LABEL) or [""]]
    for position, line in enumerate(wrapped):
        yield (f"{label if position == 0 else '':<{LABEL}}{line}").rstrip()


def _last_line(machine: Machine, findings: Sequence[Finding]) -> str:
    well = sum(probe.outcome == "ok" for probe in machine.probes)
    probed = "From the table, not yet probed here."
    if machine.probes:
        probed = f"Probed here: {well} of {len(machine.probes)} are well."
    code = 0 if ready(tuple(findings)) else 1
    return f"{probed}  Stuck? bloomery doctor --bundle report.json  exit {code}"


def _ends(left: str, right: str) -> str:
    """A headline with the time at the right edge; a long one is wrapped and keeps it on its first line."""
    first, *rest = textwrap.wrap(left, WIDTH - len(right) - 2)
    return "\n".join([f"{first:<{WIDTH - len(right)}}{right}", *rest])


def explained_lines(findings: Sequence[Finding], cites: Sequence[str]) -> Iterator[str]:
    """What `--explain` recognised, the best first, and who found out (`cites`: of the best)."""
    for number, finding in enumerate(findings, start=1):
        yield from finding_lines(number, finding)
    yield from _inner("read", textwrap.wrap(", ".join(cites), WIDTH - LABEL))
    if not findings:
        yield "unknown: bloomery doctor --bundle report.json collects what a maintainer needs"
