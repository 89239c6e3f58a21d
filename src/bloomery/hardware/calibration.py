"""Measured training speed and memory: results of this user's runs and of contributors. Does not import torch."""

import json
import math
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from bloomery.core.errors import UserError
from bloomery.core.files import cache_folder, write_json
from bloomery.hardware.machine import CpuCheck, Frozen, Machine, visible_devices
from bloomery.hardware.profile import choose_device
from bloomery.hardware.specs import cpu_spec, gpu_spec

OWN = "this machine"  # as the contributor of local results
STORED = 50  # local results
CHECK_NOISE = 1.2  # two checks of one machine differ by up to this factor
FILE = "measured.json"  # of local results
Entry = TypeVar("Entry", bound=Frozen)


class Point(Frozen):
    """A measured configuration of a training step on one device."""

    sequence_length: int
    micro_batch_size: int  # sequences
    accumulation: int
    precision: str
    attention: str
    compiled: bool
    activation_checkpointing: str
    optimizer: str
    tokens_per_second: float  # of whole optimizer steps
    # Adapter, quantized base, optimizer states in low precision; empty: none of them.
    setting: str = ""
    peak_gib: float  # a GPU: allocated by tensors; a CPU: resident memory of the process


class Calibration(Frozen):
    """Measured speed and memory of a model on a device. Contains no host name; a user name only on request."""

    device: str  # the product name
    arch: str  # gfx1031, sm_90; of a CPU its fastest instruction set
    cores: int = 0  # in use; 0: a GPU
    # The check of the CPU that was measured: another machine of its name is compared by it.
    cpu_check: CpuCheck | None = None
    memory_gib: float
    torch: str
    rocm: str = ""
    cuda: str = ""
    bloomery: str
    model: dict[str, Any]  # its ModelConfig
    parameters: int
    text: str  # prepared, or random: random tokens, one document per sequence
    contributor: str
    day: str  # 2026-11-21
    points: tuple[Point, ...]


class DeviceKey(NamedTuple):
    """The device of a calibration. `cores`: CPU cores in use; 0: a GPU."""

    name: str
    arch: str
    cores: int


def calibrations(machine: Machine) -> tuple[Calibration, ...]:
    """Results for the device that training would use: local ones, newest first, then contributed ones.

    Many virtual machines share a CPU's name. Results of a CPU are scaled by the checks of both machines, and those of
    other machines do not count without them.
    """
    device = device_of(machine)
    results = (*reversed(stored_entries(FILE, Calibration)), *contributed())
    same_name = (
        result
        for result in results
        if DeviceKey(result.device, result.arch, result.cores) == device
    )
    return tuple(scaled for result in same_name if (scaled := _on(machine, result)) is not None)


def _on(machine: Machine, result: Calibration) -> Calibration | None:
    """The result as this machine would measure it; None where that is unknown."""
    measured_check = result.cpu_check
    check_here = machine.cpu_check
    if not result.cores:  # GPUs of one name are alike
        return result
    if measured_check is None or check_here is None:
        return result if result.contributor == OWN else None
    points = []
    for point in result.points:
        dtype = "bfloat16" if point.precision.startswith("bfloat16") else point.precision
        if dtype in measured_check.gflops and dtype in check_here.gflops:
            # Part of a step is matmuls, part of it passes over memory: half of each, in logarithms.
            ratio = math.sqrt(
                check_here.gflops[dtype]
                / measured_check.gflops[dtype]
                * check_here.copy_gbs
                / measured_check.copy_gbs
            )
            speedup = ratio if abs(math.log(ratio)) > math.log(CHECK_NOISE) else 1.0
            points.append(
                point.model_copy(update={"tokens_per_second": point.tokens_per_second * speedup})
            )
    return result.model_copy(update={"points": tuple(points)}) if points else None


def device_of(machine: Machine) -> DeviceKey:
    """The device that training would use: a GPU by its name in gpus.toml, a CPU by its fastest instruction set."""
    accelerator, _ = choose_device(machine)
    if accelerator is not None and machine.together:
        devices = visible_devices(machine)
        names = (device.name for device in devices)
        return DeviceKey(" + ".join(names), " + ".join(device.arch for device in devices), 0)
    if accelerator is not None:
        spec = gpu_spec(accelerator)
        return DeviceKey(spec.name if spec else accelerator.name, accelerator.arch, 0)
    cpu = cpu_spec(machine.host)
    return DeviceKey(machine.host.cpu_name, cpu.flag if cpu else "", threads(machine))


def threads(machine: Machine) -> int:
    """CPU threads: all cores, unless OMP_NUM_THREADS is set."""
    limit = machine.software.environment.get("OMP_NUM_THREADS", "")
    return int(limit) if limit.isdigit() and int(limit) > 0 else machine.host.cpu_cores


def store(result: Calibration) -> bool:
    """Stores a local result; it replaces an older one of the same device, torch and model. False: not writable."""

    def key(calibration: Calibration) -> tuple[object, ...]:
        return (
            calibration.device,
            calibration.arch,
            calibration.cores,
            calibration.torch,
            json.dumps(calibration.model, sort_keys=True),
        )

    results = [
        earlier for earlier in stored_entries(FILE, Calibration) if key(earlier) != key(result)
    ]
    results.append(result.model_copy(update={"contributor": OWN}))
    return write_json(
        cache_folder() / FILE, [earlier.model_dump(mode="json") for earlier in results[-STORED:]]
    )


def write_calibration(result: Calibration, path: Path) -> None:
    """Raises UserError if the file cannot be written."""
    try:
        path.write_text(
            json.dumps(result.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8"
        )
    except OSError as error:
        problem = f"cannot write the calibration: {error.strerror}"
        raise UserError(problem, where=str(path), fix="pass a file in a writable folder") from error


@cache
def contributed() -> tuple[Calibration, ...]:
    """The results that come with Bloomery, without those of newer versions that this one cannot read."""
    results = []
    for path in sorted(contributed_folder().glob("*.json")):
        with suppress(OSError, ValidationError):
            results.append(Calibration.model_validate_json(path.read_bytes()))
    return tuple(results)


def contributed_folder() -> Path:
    """`benchmarks/calibration` of a checkout; an installed package has a copy next to this file."""
    packaged = Path(__file__).with_name("calibration")
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "benchmarks/calibration"


def stored_entries(file: str, kind: type[Entry]) -> list[Entry]:
    """The entries of a JSON list in the cache folder. Damaged files and entries are skipped."""
    try:
        content = json.loads((cache_folder() / file).read_bytes())
    except (OSError, ValueError):
        return []
    results = []
    for entry in content if isinstance(content, list) else ():
        with suppress(ValidationError):
            results.append(kind.model_validate(entry))
    return results
