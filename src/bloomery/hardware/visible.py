"""Which of a machine's accelerators a process sees, as the variables that mask them say."""

from collections.abc import Collection, Mapping

from bloomery.hardware.machine import Accelerator, Machine

# In the order in which they apply. Not GPU_DEVICE_ORDINAL, which Slurm sets, too: AMD's runtime asks it for OpenCL
# alone (CLR, rocdevice.cpp).
MASKS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
CUDA_ORDER = "CUDA_DEVICE_ORDER"  # PCI_BUS_ID: counted as nvidia-smi does; unset: the fastest card first


def visible_devices(machine: Machine) -> tuple[Accelerator, ...]:
    """In the order that PyTorch numbers them. ROCR's mask comes first, HIP's counts in what that leaves."""
    said = machine.software.environment
    amd = _numbered(machine, "amd")
    if "ROCR_VISIBLE_DEVICES" in said:
        amd = dict(enumerate(_masked(amd, said["ROCR_VISIBLE_DEVICES"])))
    hip = said.get("HIP_VISIBLE_DEVICES", said.get("CUDA_VISIBLE_DEVICES"))
    return (*_masked(amd, hip), *_masked(_numbered(machine, "nvidia"), said.get("CUDA_VISIBLE_DEVICES")))


def number_of(machine: Machine, device: Accelerator) -> int:
    """How the runtime of its vendor counts a device of this machine."""
    return next(number for number, each in _numbered(machine, device.vendor).items() if each == device)


def only(machine: Machine, indices: Collection[int]) -> Machine:
    """The machine without its other accelerators; those left keep their numbers."""
    left = [device for device in machine.accelerators if device.index in indices]
    if len(left) < len(machine.accelerators):
        left = [device.model_copy(update={"number": number_of(machine, device)}) for device in left]
    return machine.model_copy(update={"accelerators": tuple(left)})


def mask_of(machine: Machine, vendor: str) -> str:
    """The variable with which the user chooses among the devices of a vendor; empty when none is set."""
    names = MASKS if vendor == "amd" else MASKS[-1:]
    return next((name for name in names if name in machine.software.environment), "")


def hidden(machine: Machine) -> str:
    """The variable that masks every accelerator of this machine; empty when none does."""
    if not machine.accelerators or visible_devices(machine):
        return ""
    return next((name for name in MASKS if name in machine.software.environment), "")


def _numbered(machine: Machine, vendor: str) -> dict[int, Accelerator]:
    devices = [device for device in machine.accelerators if device.vendor == vendor]
    return {place if each.number is None else each.number: each for place, each in enumerate(devices)}


def _masked(devices: Mapping[int, Accelerator], mask: str | None) -> list[Accelerator]:
    """Those that a list of numbers or identities names, up to the first word that names none; None: all of them."""
    if mask is None:
        return list(devices.values())
    chosen: list[Accelerator] = []
    for word in (word.strip() for word in mask.split(",")):
        found = _named(devices, word)
        if found is None:
            break
        if found in chosen:  # named twice: the runtime then shows none at all
            return []
        chosen.append(found)
    return chosen


def _named(devices: Mapping[int, Accelerator], word: str) -> Accelerator | None:
    if word.isdigit():
        return devices.get(int(word))
    identity = word.lower().removeprefix("gpu-")
    known = (each for each in devices.values() if each.unique_id)
    return next((each for each in known if identity and each.unique_id.lower().removeprefix("0x") == identity), None)
