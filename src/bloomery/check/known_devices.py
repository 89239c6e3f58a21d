"""Answers of earlier checks: a device that was right with its driver, PyTorch and settings is not checked again."""

import hashlib
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from typing import Any, final

import torch

from bloomery.check.examination import Examination
from bloomery.check.small_model import small_plan
from bloomery.core import __version__
from bloomery.core.device import is_accelerator, properties_of, runtime_version
from bloomery.core.files import cache_folder, write_json
from bloomery.hardware.machine import Machine
from bloomery.hardware.vendors import KERNEL_VARIABLES
from bloomery.model.attention.triton_attention import arch_of
from bloomery.plan.types import RunPlan

VERSION = 1  # of the check: a changed one does not believe what an earlier one found
FILE = "checked-steps.json"
KEPT = 1000  # answers
# Settings of the optimizer that its arithmetic does not depend on.
RATES = ("learning_rate", "muon_learning_rate", "schedule", "min_lr_ratio", "warmup_steps")


@final
@dataclass(frozen=True)
class DeviceIdentity:
    """What an answer holds for: the device, and what runs on it."""

    device: str
    arch: str  # such as gfx1030 or sm_90
    torch: str
    runtime: str  # HIP or CUDA
    driver: str
    unit: str  # its UUID: one of several equal cards may be faulty


def identity_of(device_type: str, machine: Machine | None) -> DeviceIdentity:
    device = torch.device(device_type)
    name = platform.processor() or platform.machine()
    unit = ""
    if is_accelerator(device):
        properties = properties_of(device)
        name = properties.name
        unit = properties.unit_id
    return DeviceIdentity(
        device=name,
        arch=arch_of(device),
        torch=torch.__version__,
        runtime=runtime_version(),
        driver="" if machine is None else machine.host.driver.versions,
        unit=unit,
    )


def key_of(plan: RunPlan, identity: DeviceIdentity) -> str:
    """A hash of the device and of every setting that chooses what it computes, not of rates and lengths."""
    small = small_plan(plan)
    settings = {
        "model": small.model.model_dump(mode="json"),
        "train": small.train.model_dump(
            mode="json", exclude={"steps", "seconds", "min_steps", "max_grad_norm", "threads"}
        ),
        "optimizer": small.optimizer.model_dump(mode="json", exclude={*RATES, "decay_steps"}),
        "adapter": small.adapter.model_dump(mode="json"),
        "quantize": [small.quantize.model_dump(mode="json"), small.quantized_by],
        "layout": small.data.layout,
        "environment": {name: os.environ.get(name) for name in KERNEL_VARIABLES},
    }
    content = [VERSION, __version__, asdict(identity), settings]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def known_answer(key: str) -> Examination | None:
    """That of a check that found nothing; None without one."""
    entry = _answers().get(key)
    if not isinstance(entry, dict) or entry.get("findings") != []:
        return None
    unrepeatable = entry.get("unrepeatable", [])
    return Examination((), tuple(map(str, unrepeatable)), 0.0)


def keep_answer(key: str, identity: DeviceIdentity, examination: Examination) -> None:
    """In the cache folder, with the device, PyTorch and driver. One with findings is there to be read, not used."""
    answers = _answers()
    answers.pop(key, None)
    answers[key] = {
        **asdict(identity),
        "at": time.time(),
        "seconds": round(examination.seconds, 2),
        "findings": [f"{fault.text} ({fault.detail})" for fault in examination.faults],
        "unrepeatable": list(examination.unrepeatable),
    }
    write_json(cache_folder() / FILE, dict(list(answers.items())[-KEPT:]))


def _answers() -> dict[str, Any]:
    """By key. A damaged file counts as empty."""
    try:
        content = json.loads((cache_folder() / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
