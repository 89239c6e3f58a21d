"""What torch and the devices really do, found out in child processes: a crash or a hang is a finding. No torch here."""

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

from bloomery.core.child import LONGEST, Child
from bloomery.core.files import cache_folder, write_json
from bloomery.hardware.machine import MASKS, Machine, Probe, visible_devices
from bloomery.hardware.profile import Profile, build_profile, private_caches

VERSION = 1  # of the probes: a changed probe makes older answers worthless
START_SECONDS = 90.0  # importing torch and waking a driver, on a slow disk
KEPT = 20  # machines, or states of one, in the cache

Progress = Callable[[str, int, int], None]  # the probe that begins, how many are done, how many there are

TORCH_PROBES = "bloomery.hardware.probes.worker"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A probe: its name, the module whose child runs it, the seconds it may take, what its environment must say.

    `every_device`: it sees all that the user lets it see; others see the one that training would.
    """

    name: str
    module: str = TORCH_PROBES
    seconds: float = 40.0
    environment: dict[str, str] = field(default_factory=dict)
    every_device: bool = False


def run_probes(
    machine: Machine,
    *,
    extra: Sequence[Spec] = (),
    only: Collection[str] | None = None,
    on_progress: Progress | None = None,
) -> tuple[Probe, ...]:
    """Every probe that makes sense here, or those named in `only` (a name, or its first word: "matmul"). Cached.

    `extra`: the caller's own, such as `bench.attention_probes.specs`; they follow the others.
    Empty without an installed torch. Nothing that a probe does can harm or hold up the caller.
    """
    if machine.software.torch is None:
        return ()
    profile = build_profile(machine)
    wanted = [spec for spec in (*specs(machine, profile), *extra) if only is None or _named(spec.name, only)]
    arch = profile.accelerator.arch if profile.accelerator else ""
    job = {"device": profile.device.value, "dtype": profile.dtype.value, "arch": arch}
    ours = private_caches(profile.environment.value)
    found = probe(wanted, job, environment=dict(os.environ), ours=ours, on_progress=on_progress)
    _remember(machine, found)
    return found


def cached_probes(machine: Machine) -> tuple[Probe, ...]:
    """What earlier probes of this device with this torch and driver found; empty: nothing."""
    return _read_cache().get(cache_key(machine), ())


def remembering(machine: Machine) -> Machine:
    """The machine with what earlier probes of exactly these devices found, and nothing of others."""
    return machine.model_copy(update={"probes": cached_probes(machine)})


def specs(machine: Machine, profile: Profile) -> tuple[Spec, ...]:
    """The probes of a machine, cheapest first."""
    return tuple(_specs(machine, profile))


def _specs(machine: Machine, profile: Profile) -> Iterator[Spec]:
    chosen = profile.accelerator
    peers = [device for device in visible_devices(machine) if chosen is not None and device.vendor == chosen.vendor]
    yield Spec(name="device")
    for number, peer in enumerate(peers):
        if peer is not chosen and not peer.integrated:
            yield Spec(name=f"device-{number}", every_device=True)
    yield from (Spec(name=f"matmul-{dtype}") for dtype in ("float32", "float16", "bfloat16"))
    yield Spec(name="bandwidth")
    kernels = ["flash", "math"] if chosen is None else ["flash", "efficient", "math"]
    if chosen is not None and chosen.vendor == "nvidia":
        kernels.append("cudnn")
    yield from (Spec(name=f"attention-{kernel}") for kernel in kernels)
    yield Spec(name="bitsandbytes")
    yield Spec(name="flash-attn")
    if machine.software.build == "rocm" and chosen is not None:
        yield Spec(name="blas-hipblaslt", environment={"TORCH_BLAS_PREFER_HIPBLASLT": "1"})
        yield Spec(name="blas-rocblas", environment={"TORCH_BLAS_PREFER_HIPBLASLT": "0"})
    if chosen is None or len(peers) > 1:
        yield Spec(name="all-reduce", seconds=90, every_device=chosen is not None)
    if len(peers) > 1:
        yield Spec(name="p2p", seconds=90, every_device=True)
    if chosen is not None or machine.host.compiler is not None:
        # A cached result would hide that the compiler is gone.
        yield Spec(name="compile", seconds=120, environment={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"})


def _named(name: str, only: Collection[str]) -> bool:
    return name in only or name.partition("-")[0] in only


def probe(
    wanted: Sequence[Spec],
    job: dict[str, Any],
    *,
    environment: dict[str, str],
    ours: Mapping[str, str] = MappingProxyType({}),
    on_progress: Progress | None = None,
) -> tuple[Probe, ...]:
    """The probes in order. Those that share a module and an environment share a child for as long as all is well.

    `environment` is the user's; `ours` is set where that has nothing.
    """
    found: list[Probe] = []

    def begins(name: str) -> None:
        if on_progress is not None:
            on_progress(name, len(found), len(wanted))

    everywhere = {name: value for name, value in ours.items() if name not in MASKS}
    for _, group in groupby(wanted, key=_shared):
        left = list(group)
        while left:
            before = len(found)
            below = everywhere if left[0].every_device else ours
            _one_child(left, job, {**below, **environment}, found, begins)
            left = left[len(found) - before :]
    return tuple(found)


def _shared(spec: Spec) -> tuple[object, ...]:
    return spec.module, spec.every_device, sorted(spec.environment.items())


def _one_child(
    wanted: Sequence[Spec],
    job: dict[str, Any],
    environment: dict[str, str],
    found: list[Probe],
    begins: Callable[[str], None],
) -> None:
    """Adds what one child answers, until it ends, crashes or hangs: at least one answer."""
    module, changed = wanted[0].module, environment | wanted[0].environment
    waking = START_SECONDS  # the first probe of a child pays for importing torch and waking the driver
    begins(wanted[0].name)
    with Child(module, job | {"names": [spec.name for spec in wanted]}, environment=changed) as child:
        for spec in wanted:
            told = _answer(child, spec.seconds + waking, lambda name=spec.name: begins(name))  # type: ignore[misc]  # mypy infers no lambda with defaults
            if isinstance(told, dict):
                found.append(Probe.model_validate(told))
            elif told == "silent":
                found.append(Probe(name=spec.name, outcome="hung", said=f"no answer within {spec.seconds:.0f} s"))
                return
            else:
                if told == "crashed" or spec is wanted[0]:
                    found.append(_crashed(spec.name, child))
                return
            waking = 0.0


def _answer(child: Child, seconds: float, begins: Callable[[], None]) -> dict[str, Any] | str:
    """What a probe found, "silent", "crashed" in it, or "left": the child ended before it, as after a bad one."""
    told = child.next(seconds)
    if isinstance(told, dict):
        begins()
        told = child.next(seconds)
        return "crashed" if told == "ended" else told
    if told == "ended":
        return "left" if child.code == 0 else "crashed"
    return told


def _crashed(name: str, child: Child) -> Probe:
    return Probe(name=name, outcome="crashed", said=child.ending().replace(str(Path.home()), "~")[:LONGEST])


# The cache


def cache_key(machine: Machine) -> str:
    """Names the devices, torch, the driver and the variables that decide what torch does."""
    host, software = machine.host, machine.software
    devices = [(device.name, device.arch, device.memory_bytes) for device in machine.accelerators]
    facts = [
        VERSION, devices, host.cpu_name, host.cpu_flags, host.cpu_cores, host.compiler, host.driver.model_dump(),
        software.torch, software.build, software.hip, software.cuda, software.triton, software.python,
        sorted(software.environment.items()),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _cache_file() -> Path:
    return cache_folder() / "probes.json"


def _stored() -> dict[str, Any]:
    """The file as it is; a damaged or foreign one counts as empty."""
    try:
        stored = json.loads(_cache_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _read_cache() -> dict[str, tuple[Probe, ...]]:
    return {key: probes for key, entry in _stored().items() if (probes := _probes_of(entry))}


def _probes_of(entry: Any) -> tuple[Probe, ...]:
    try:
        return tuple(Probe.model_validate(each) for each in entry["probes"])
    except (ValidationError, KeyError, TypeError):
        return ()


def _remember(machine: Machine, found: Sequence[Probe]) -> None:
    """Adds to what is known of this machine. A cache that cannot be written is only a slower next time."""
    key, stored = cache_key(machine), _stored()
    known = {each.name: each for each in (*_probes_of(stored.get(key, {})), *found)}
    stored[key] = {"at": time.time(), "probes": [each.model_dump(mode="json") for each in known.values()]}
    stored = {name: entry for name, entry in stored.items() if isinstance(entry, dict)}
    newest = sorted(stored, key=lambda name: -float(stored[name].get("at", 0)))[:KEPT]
    write_json(_cache_file(), {name: stored[name] for name in newest})
