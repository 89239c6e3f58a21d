"""Which of a machine's accelerators a process sees, as the variables that mask them say."""

from collections.abc import Sequence

from bloomery.hardware.machine import Accelerator, Machine

MASKS = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def visible_devices(machine: Machine) -> tuple[Accelerator, ...]:
    """In the order that PyTorch numbers them. ROCR's mask comes first, HIP's counts in what that leaves."""
    said = machine.software.environment
    amd = [device for device in machine.accelerators if device.vendor == "amd"]
    nvidia = [device for device in machine.accelerators if device.vendor == "nvidia"]
    left = _masked(amd, said.get("ROCR_VISIBLE_DEVICES"))
    hip = said.get("HIP_VISIBLE_DEVICES", said.get("CUDA_VISIBLE_DEVICES"))
    return (*_masked(left, hip), *_masked(nvidia, said.get("CUDA_VISIBLE_DEVICES")))


def hidden(machine: Machine) -> str:
    """The variable that masks every accelerator of this machine; empty when none does."""
    if not machine.accelerators or visible_devices(machine):
        return ""
    return next((name for name in MASKS if name in machine.software.environment), "")


def _masked(devices: Sequence[Accelerator], mask: str | None) -> list[Accelerator]:
    """Those that a list of numbers or identities names, up to the first word that names none; None: all of them."""
    if mask is None:
        return list(devices)
    chosen: list[Accelerator] = []
    for word in (word.strip() for word in mask.split(",")):
        found = _named(devices, word)
        if found is None:
            break
        if found in chosen:  # named twice: the runtime then shows none at all
            return []
        chosen.append(found)
    return chosen


def _named(devices: Sequence[Accelerator], word: str) -> Accelerator | None:
    if word.isdigit():
        return devices[int(word)] if int(word) < len(devices) else None
    identity = word.lower().removeprefix("gpu-")
    return next((each for each in devices if identity and each.unique_id.lower().removeprefix("0x") == identity), None)
