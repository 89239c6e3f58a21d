"""Tests of torch and the devices in child processes: a crash or a hang is a result. Does not import torch."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from bloomery.core.child import LONGEST_REASON, Child
from bloomery.core.files import cache_folder, write_json
from bloomery.hardware.machine import MASKS, Machine, Probe
from bloomery.hardware.profile import (
    Profile,
    build_profile,
    local_caches,
    mask_without_integrated,
    training_peers,
)

VERSION = 4  # of the probes: a changed probe invalidates cached results
START_SECONDS = 90.0  # importing torch and starting a driver, on a slow disk
CACHE = "probes.json"
CACHED = 20  # machines, or states of one, in the cache

# Called with the name of the probe that starts, the probes done, and all probes.
Progress = Callable[[str, int, int], None]

TORCH_PROBES = "bloomery.hardware.probe_worker"


@dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """A probe: its name, the module of its child process, its time limit, variables of its environment.

    `every_device`: all devices that the user makes visible, without an integrated GPU next to discrete ones; other
    probes see only the device that training uses.
    """

    name: str
    module: str = TORCH_PROBES
    seconds: float = 40.0
    environment: dict[str, str] = field(default_factory=dict)
    every_device: bool = False


def run_probes(
    machine: Machine,
    *,
    extra: Sequence[ProbeSpec] = (),
    only: Collection[str] | None = None,
    on_progress: Progress | None = None,
) -> tuple[Probe, ...]:
    """All probes of this machine, or those in `only` (a name, or its first part: "matmul"). Results are cached.

    `extra`: probes of the caller, such as `check.attention_probes.attention_probe_specs`; they run last.
    Empty without an installed torch. A crash or hang of a probe does not affect the caller.
    """
    return tuple(each_probe(machine, extra=extra, only=only, on_progress=on_progress))


def each_probe(
    machine: Machine,
    *,
    extra: Sequence[ProbeSpec] = (),
    only: Collection[str] | None = None,
    on_progress: Progress | None = None,
    other_devices: bool = True,
) -> Iterator[Probe]:
    """As `run_probes`, each result when it is there. They are cached after the last.

    `other_devices`: also the probes that see the devices that training does not use.
    """
    if machine.software.torch is None:
        return
    profile = build_profile(machine)
    selected = [
        spec
        for spec in (*machine_probe_specs(machine, profile), *extra)
        if only is None or spec.name in only or spec.name.partition("-")[0] in only
        if other_devices or not spec.every_device
    ]
    arch = profile.accelerator.arch if profile.accelerator else ""
    job = {"device": profile.device.value, "dtype": profile.dtype.value, "arch": arch}
    defaults = local_caches(profile.environment.value)
    results: list[Probe] = []
    for result in _each_result(
        selected, job, environment=dict(os.environ), defaults=defaults, on_progress=on_progress
    ):
        results.append(result)
        yield result
    _store(machine, results)


def with_cached_probes(machine: Machine) -> Machine:
    """The machine with the cached results for exactly these devices with this torch and driver."""
    return machine.model_copy(update={"probes": _probes_of(_cache().get(cache_key(machine)))})


def machine_probe_specs(machine: Machine, profile: Profile) -> tuple[ProbeSpec, ...]:
    """The probes of a machine, the fastest first."""
    accelerator = profile.accelerator
    peers = training_peers(machine, accelerator) if accelerator is not None else []
    other_numbers = [
        number
        for number, peer in enumerate(peers)
        if peer is not accelerator and not peer.integrated
    ]
    # Collectives of an integrated and a discrete GPU can hang, and no training has them.
    joint_variables = mask_without_integrated(machine, accelerator) if accelerator else {}
    kernels = ["flash", "math"] if accelerator is None else ["flash", "efficient", "math"]
    kernels += ["cudnn"] if accelerator is not None and accelerator.vendor == "nvidia" else []
    probes = [
        ProbeSpec(name="device"),
        *(
            ProbeSpec(name=f"device-{number}", every_device=True, environment=joint_variables)
            for number in other_numbers
        ),
        *(ProbeSpec(name=f"matmul-{dtype}") for dtype in ("float32", "float16", "bfloat16")),
        ProbeSpec(name="bandwidth"),
        *([] if accelerator is None or accelerator.integrated else [ProbeSpec(name="host-copies")]),
        *(ProbeSpec(name=f"attention-{kernel}") for kernel in kernels),
        ProbeSpec(name="bitsandbytes"),
        ProbeSpec(name="flash-attn"),
    ]
    if machine.software.build == "rocm" and accelerator is not None:
        for name, value in (("blas-hipblaslt", "1"), ("blas-rocblas", "0")):
            probes.append(ProbeSpec(name=name, environment={"TORCH_BLAS_PREFER_HIPBLASLT": value}))
    if accelerator is None or len(peers) > 1:
        probes.append(
            ProbeSpec(
                name="all-reduce",
                seconds=90,
                every_device=accelerator is not None,
                environment=joint_variables,
            )
        )
    if len(peers) > 1:
        probes.append(
            ProbeSpec(name="p2p", seconds=90, every_device=True, environment=joint_variables)
        )
    if accelerator is not None or machine.host.compiler is not None:
        # A cached kernel would hide a missing compiler.
        uncached = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        probes.append(ProbeSpec(name="compile", seconds=120, environment=uncached))
    return tuple(probes)


def probe(
    selected: Sequence[ProbeSpec],
    job: dict[str, Any],
    *,
    environment: dict[str, str],
    defaults: Mapping[str, str] = MappingProxyType({}),
    on_progress: Progress | None = None,
) -> tuple[Probe, ...]:
    """The results in order. Probes with the same module and environment share a child process until one fails.

    `environment`: the user's variables; `defaults` are set if the user has not set them.
    """
    return tuple(
        _each_result(
            selected, job, environment=environment, defaults=defaults, on_progress=on_progress
        )
    )


def _each_result(
    selected: Sequence[ProbeSpec],
    job: dict[str, Any],
    *,
    environment: dict[str, str],
    defaults: Mapping[str, str],
    on_progress: Progress | None,
) -> Iterator[Probe]:
    num_results = 0

    def begins(name: str) -> None:
        if on_progress is not None:
            on_progress(name, num_results, len(selected))

    unmasked = {name: value for name, value in defaults.items() if name not in MASKS}
    shared = groupby(
        selected,
        key=lambda spec: (spec.module, spec.every_device, sorted(spec.environment.items())),
    )
    for _, group in shared:
        remaining = list(group)
        while remaining:
            default_variables = unmasked if remaining[0].every_device else defaults
            variables = {**default_variables, **environment}
            num_before = num_results
            for result in _results_of_child(remaining, job, variables, begins):
                num_results += 1
                yield result
            remaining = remaining[num_results - num_before :]


def _results_of_child(
    specs: Sequence[ProbeSpec],
    job: dict[str, Any],
    environment: dict[str, str],
    begins: Callable[[str], None],
) -> Iterator[Probe]:
    """The results of one child until it ends, crashes or hangs: at least one result."""
    startup = START_SECONDS  # the first probe of a child also imports torch and starts the driver
    begins(specs[0].name)
    job = job | {"names": [spec.name for spec in specs]}
    with Child(specs[0].module, job, environment=environment | specs[0].environment) as child:
        for spec in specs:
            limit = spec.seconds + startup
            answer = child.next(limit)  # {"outcome": "started"}
            started = isinstance(answer, dict)
            if started:
                begins(spec.name)
                answer = child.next(limit)
            if isinstance(answer, dict):
                yield Probe.model_validate(answer)
            elif answer == "silent":
                message = f"no answer within {spec.seconds:.0f} s"
                yield Probe(name=spec.name, outcome="hung", message=message)
                return
            else:  # it ended; before this probe it may do so on purpose, after one that failed
                if started or child.code != 0 or spec is specs[0]:
                    message = child.ending().replace(str(Path.home()), "~")[:LONGEST_REASON]
                    yield Probe(name=spec.name, outcome="crashed", message=message)
                return
            startup = 0.0


# The cache


def cache_key(machine: Machine) -> str:
    """A hash of the devices, torch, the driver and the variables that affect torch."""
    host = machine.host
    software = machine.software
    devices = [(device.name, device.arch, device.memory_bytes) for device in machine.accelerators]
    facts = [
        VERSION,
        devices,
        host.cpu_name,
        host.cpu_flags,
        host.cpu_cores,
        host.compiler,
        host.driver.model_dump(),
        software.torch,
        software.build,
        software.hip,
        software.cuda,
        software.triton,
        software.python,
        sorted(software.environment.items()),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _cache() -> dict[str, Any]:
    """The content of the cache; a damaged file counts as empty."""
    try:
        content = json.loads((cache_folder() / CACHE).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _probes_of(entry: Any) -> tuple[Probe, ...]:
    try:
        return tuple(Probe.model_validate(cached_probe) for cached_probe in entry["probes"])
    except (ValidationError, KeyError, TypeError):
        return ()


def _store(machine: Machine, results: Sequence[Probe]) -> None:
    """Adds to the cached results of this machine."""
    key = cache_key(machine)
    cache = _cache()
    probes = {probe.name: probe for probe in (*_probes_of(cache.get(key)), *results)}
    cache[key] = {
        "at": time.time(),
        "probes": [probe.model_dump(mode="json") for probe in probes.values()],
    }
    entries = {name: entry for name, entry in cache.items() if isinstance(entry, dict)}
    newest = sorted(entries, key=lambda name: -float(entries[name].get("at", 0)))[:CACHED]
    write_json(cache_folder() / CACHE, {name: entries[name] for name in newest})
