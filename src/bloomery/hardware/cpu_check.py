"""A check of this CPU, two seconds of work kept per boot: products and copies of one core. Does not import torch.

Many virtual machines share a CPU's name and differ in speed, so a name says little about either. It measures speed
alone: whether a device computes right is the question of `probe_worker` and of `bloomery.check`.
"""

import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bloomery.core.files import cache_folder, write_json
from bloomery.hardware.machine import CpuCheck, Machine
from bloomery.hardware.probes import ProbeSpec, probe
from bloomery.hardware.profile import build_profile, choose_device

FILE = "cpu-check.json"
SPEC = ProbeSpec(name="cpu-check", seconds=30.0)
VERSION = "products"  # of what is measured
KEPT = 20  # results, of other boots, instruction sets and versions of torch
# Variables that take instructions away, or name the library of products.
VARIABLES = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
)


def with_known_check(machine: Machine) -> Machine:
    """The machine with the check of this boot, where there was one."""
    try:
        check = CpuCheck.model_validate(_results()[_key(machine)])
    except (KeyError, ValidationError):
        return machine
    return machine.model_copy(update={"cpu_check": check})


def with_cpu_check(machine: Machine) -> Machine:
    """The machine with the check of this boot, made now where there was none; unchanged where a GPU would train.

    A check that fails is not made again in this boot. BLOOMERY_CPU_CHECK=off: plans follow the tables.
    """
    if os.environ.get("BLOOMERY_CPU_CHECK") == "off":
        return machine
    if (
        machine.software.torch is None
        or choose_device(machine)[0] is not None
        or machine.cpu_check is not None
    ):
        return machine
    key = _key(machine)
    results = _results()
    if key in results:
        return with_known_check(machine)
    job = {"device": "cpu", "dtype": build_profile(machine).dtype.value, "arch": ""}
    (result,) = probe([SPEC], job, environment=dict(os.environ))
    if result.outcome == "ok":
        facts = dict(result.facts)
        products = json.loads(facts.pop("products"))
        rates = {name: float(value) for name, value in facts.items()}
        gflops = {dtype: rates[dtype] for dtype in ("float32", "bfloat16") if dtype in rates}
        check = CpuCheck(
            gflops=gflops,
            copy_gbs=rates["copy_gbs"],
            python_seconds=rates["python_seconds"],
            products=products,
        )
        results[key] = check.model_dump(mode="json")
    else:
        results[key] = None
    write_json(cache_folder() / FILE, dict(list(results.items())[-KEPT:]))
    return with_known_check(machine)


def _key(machine: Machine) -> str:
    """This boot, the CPU as far as torch may use it, and torch."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    since = boot.read_text(encoding="utf-8").strip() if boot.is_file() else ""
    host = machine.host
    user = machine.software.environment
    limits = [f"{name}={os.environ.get(name) or user.get(name, '')}" for name in VARIABLES]
    return " ".join(
        (since, host.cpu_name, *host.cpu_flags, machine.software.torch or "", VERSION, *limits)
    )


def _results() -> dict[str, Any]:
    """By key; None where a check failed. A damaged file counts as empty."""
    try:
        content = json.loads((cache_folder() / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
