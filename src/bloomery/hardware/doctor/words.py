"""The doctor's machine and verdict in words, for the command line and studio. Imports neither torch nor click."""

from collections.abc import Iterator, Sequence

from bloomery.core.units import GIB, format_bytes
from bloomery.hardware.doctor.symptoms import Finding
from bloomery.hardware.machine import Machine
from bloomery.hardware.vendors import BUILD_NAMES, VENDORS


def findings_headline(findings: Sequence[Finding]) -> str:
    """Ready or not, the first reason, and how many commands fix it; where a problem has none, how many problems."""
    blocking = [finding for finding in findings if finding.level == "blocks"]
    if blocking:
        # Of the steps of a fix, some are remarks, and some are alternatives to the command before them.
        reason = blocking[0].headline or blocking[0].what.partition(": ")[0]
        commands = [
            [
                step
                for step in finding.fix
                if not step.startswith("#") and "  # or, " not in step and "  # or: " not in step
            ]
            for finding in blocking
        ]
        if not all(commands):  # such as a driver that administrators have to install
            count = _counted(len(blocking), "problem").capitalize()
            return f"Not ready: {reason}. {count} {'blocks' if len(blocking) == 1 else 'block'} training."
        num_commands = sum(map(len, commands))
        count = _counted(num_commands, "command").capitalize()
        return f"Not ready: {reason}. {count} {'fixes' if num_commands == 1 else 'fix'} it."
    if any(finding.id == "no-gpu" for finding in findings):
        return "Ready, without a GPU: small models train on the CPU of this machine."
    num_slow = sum(finding.level == "slows" for finding in findings)
    if not num_slow:
        return "Ready."
    return f"Ready, but {_counted(num_slow, 'problem')} slow{'s' * (num_slow == 1)} training."


def _counted(count: int, noun: str) -> str:
    """A count in words up to nine: "no commands", "one command"."""
    numerals = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    numeral = numerals[count] if count < len(numerals) else str(count)
    return f"{numeral} {noun}{'' if count == 1 else 's'}"


def machine_facts(machine: Machine) -> Iterator[tuple[str, str]]:
    """Labels with a text each: the GPUs, the PyTorch and the access to the GPUs."""
    # GPUs that are described in the same words share a line: `GPU 0-7`.
    host = machine.host
    software = machine.software
    numbers_by_text: dict[str, list[int]] = {}
    for device in machine.accelerators:
        memory = "memory unknown"
        if device.usable_bytes:
            memory = f"{device.usable_bytes / GIB:.2f} GiB".replace(".00 ", " ")
        if device.integrated:
            memory += " of system memory"
        elif device.memory_used_bytes >= 0.05 * GIB:
            memory += f", {device.memory_used_bytes / GIB:.2f} GiB in use"
        kernel = ".".join(host.driver.kernel.split(".")[:2])
        driver = host.driver.nvidia and f"driver {host.driver.nvidia}"
        if device.vendor != "nvidia" and VENDORS[device.vendor].drivers:
            # The display of the GPU names the driver that has it.
            bound = {display.address: display.driver for display in host.displays}
            name = bound.get(device.pci_address) or VENDORS[device.vendor].drivers[0]
            driver = f"{name}, Linux {kernel}" if kernel else name
        text = " · ".join(filter(None, (device.name, device.arch, memory, driver)))
        numbers_by_text.setdefault(text, []).append(device.index)
    for text, numbers in numbers_by_text.items():
        name = f"GPU {numbers[0]}" + (f"-{numbers[-1]}" if len(numbers) > 1 else "")
        yield name, text
    if not machine.accelerators:
        memory = f"{format_bytes(host.memory_free_bytes)} of {format_bytes(host.memory_bytes)} free"
        yield "CPU", f"{host.cpu_name} · {host.cpu_cores} cores · {memory}"

    # A version without a suffix such as +rocm6.4 does not name its build.
    torch = software.torch or "not installed"
    if software.torch and "+" not in software.torch and software.build:
        torch += f" ({BUILD_NAMES[software.build]} build)"
    text = f"{torch} · Python {software.python} · {software.prefix}".rstrip(" ·")
    yield "torch", text

    # Device files with permissions of their own; those in the same state share a part. AMD's GPUs have one in common.
    if not any(VENDORS[device.vendor].opens_render_node for device in machine.accelerators):
        return
    has_kfd = any(device.vendor == "amd" for device in machine.accelerators)
    nodes = {device.node: device.access for device in machine.accelerators if device.node}
    state_by_file = {"/dev/kfd": host.access.kfd, **nodes} if has_kfd else nodes
    descriptions = {
        "open": "read-write",
        "denied": "permission denied",
        "absent": "missing",
        "hung": "no response",
    }
    parts = []
    for state, description in descriptions.items():
        files = [file for file, file_state in state_by_file.items() if file_state == state]
        if len(files) > 3:
            parts.append(f"{files[0]}, {files[1]} and {len(files) - 2} more: {description}")
        elif files:
            listing = " and ".join(filter(None, (", ".join(files[:-1]), files[-1])))
            parts.append(f"{listing}: {description}")
    if parts:
        yield "access", " · ".join(parts)
