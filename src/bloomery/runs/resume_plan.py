"""The plan of a resumed run: overrides of the user, and choices that another machine changes. No torch."""

import re
from collections.abc import Sequence

from pydantic import BaseModel

from bloomery.core.errors import UserError
from bloomery.hardware.machine import Accelerator, Machine, mask_of, only, visible_devices
from bloomery.hardware.probes.run import with_cached_probes
from bloomery.plan.types import RunPlan
from bloomery.recipe.aliases import known_keys, look_up
from bloomery.recipe.schema import LENGTHS

ALLOWED = (*(f"train.{key}" for key in LENGTHS), "eval.", "sample.", "checkpoint.", "logging.")
MACHINE_DEPENDENT: dict[str, tuple[str, ...]] = {
    "model": ("attention", "score_chunk"),
    "data": ("pin_memory", "prefetch"),
    "optimizer": ("fused",),
    "train": (
        "micro_batch_size", "accumulation", "precision", "compile", "activation_checkpointing", "deterministic",
        "threads",
        "device",
    ),
    "checkpoint": ("async_save",),
    "eval": ("micro_batch_size",),
}  # fmt: skip
BITWISE = ("model", "optimizer", "train")  # sections in which another choice rounds differently
UP_TO_ROUNDING = "from this step on, losses are equal to an uninterrupted run up to rounding, not bitwise identical"


def refuse_overrides(words: Sequence[str]) -> None:
    """Raises UserError (code 2) for the first override that a resumed run does not accept."""
    for word in words:
        key, _, value = word.partition("=")
        if not any(key == allowed or (allowed.endswith(".") and key.startswith(allowed)) for allowed in ALLOWED):
            path = tuple(key.split("."))
            if path not in known_keys():
                alias = look_up(path, value, {})
                fix = str(alias) if alias else "`bloomery recipes show everything` shows every key"
                raise UserError(f"no such key: {key}", where="bloomery resume", fix=fix, code=2)
            raise UserError(
                f"cannot change {key} in a resumed run",
                where="bloomery resume",
                fix="change only the length (train.epochs, train.max_steps), eval.*, sample.*, checkpoint.* and "
                "logging.*, or start a new run with `bloomery train`",
                code=2,
            )


def narrowed(machine: Machine, devices: str | None) -> Machine:
    """The machine with only the given device: "cpu", a GPU number, or "cuda:" and that (AMD too). "auto": all devices.

    Raises UserError.
    """
    if devices is None or devices == "auto":
        return machine
    if devices == "cpu":
        return with_cached_probes(machine.model_copy(update={"accelerators": ()}))
    if "," in devices:
        raise UserError(
            f"not supported yet: {len(devices.split(','))} devices", where="--devices", code=2,
            fix="use one device, for example --devices " + devices.partition(",")[0],
        )  # fmt: skip
    number = re.sub(r"^(cuda|hip|rocm):", "", devices)
    chosen = next((device for device in machine.accelerators if str(device.index) == number), None)
    if chosen is None:
        known = ", ".join(f"{device.index} ({device.name})" for device in machine.accelerators) or "none"
        fix = f"use cpu or one of these GPUs: {known}"
        raise UserError(f"no such device: {devices!r}", where="--devices", fix=fix, code=2)
    return _alone(machine, chosen)


def _alone(machine: Machine, chosen: Accelerator) -> Machine:
    """The machine with one device. Raises UserError where the user's visibility mask selects another one."""
    mask = mask_of(machine, chosen.vendor)
    shown = [device for device in visible_devices(machine) if device.vendor == chosen.vendor]
    if mask and chosen not in shown[:1]:
        named = shown[0].name if shown else "no GPU"
        value = machine.software.environment[mask]
        raise UserError(
            f"cannot use device {chosen.index} ({chosen.name}): {mask}={value} selects {named}",
            where="--devices", fix=f"unset {mask}", code=2,
        )  # fmt: skip
    return with_cached_probes(only(machine, {chosen.index}))


def same_devices(machine: Machine, before: Machine) -> Machine:
    """The machine with only the devices of the run, where they still exist: `--devices` stays after a resume."""
    known = {(device.index, device.arch) for device in before.accelerators}
    kept = [device for device in machine.accelerators if (device.index, device.arch) in known]
    if len(kept) == 1 and len(machine.accelerators) > 1:
        return _alone(machine, kept[0])
    narrow = kept or not before.accelerators
    return with_cached_probes(only(machine, {device.index for device in kept})) if narrow else machine


def differences(before: Machine, now: Machine) -> list[str]:
    """Changes of the machine that can change a result, one short text each."""
    pairs = (
        ("devices", _devices(before), _devices(now)),
        ("CPU", before.host.cpu_name, now.host.cpu_name),
        ("CPU cores", before.host.cpu_cores, now.host.cpu_cores),
        ("C++ compiler", before.host.compiler or "none", now.host.compiler or "none"),
        ("PyTorch", before.software.torch, now.software.torch),
        ("PyTorch build", before.software.build, now.software.build),
    )
    return [f"{what} changed: {old} -> {new}" for what, old, new in pairs if old != new]


def _devices(machine: Machine) -> str:
    return ", ".join(f"{device.name} ({device.arch})" for device in machine.accelerators) or "no GPU"


def moved(stored: RunPlan, fresh: RunPlan) -> tuple[RunPlan, list[str]]:
    """The stored plan with the machine-dependent choices of `fresh`, and each choice that changed with its reason."""
    sections: dict[str, BaseModel] = {}
    changes: list[str] = []
    reasons = {decision.key: decision.reason for decision in fresh.choices}
    reasons["model.attention"] = reasons["train.attention"]  # the recipe's key for it
    exact = True
    for section, fields in MACHINE_DEPENDENT.items():
        old, new = getattr(stored, section), getattr(fresh, section)
        free = [field for field in fields if f"{section}.{field}" not in stored.recovered]  # a fallback's choice stays
        changed = {field: getattr(new, field) for field in free if getattr(old, field) != getattr(new, field)}
        sections[section] = old.model_copy(update=changed)
        for field, value in changed.items():
            key = f"{section}.{field}"
            reason = f": {reasons[key]}" if key in reasons else ""
            changes.append(f"{key}: {getattr(old, field)} -> {value}{reason}")
        exact = exact and not (changed and section in BITWISE)
    if not exact:
        changes.append(UP_TO_ROUNDING)
    facts = {name: getattr(fresh, name) for name in ("memory", "step_seconds", "torch", "choices")}
    return stored.model_copy(update=sections | facts), changes


def prolonged(stored: RunPlan, fresh: RunPlan, words: Sequence[str]) -> RunPlan:
    """The stored plan with what `words` override, as `fresh` resolved it: length, evaluation, checkpoints, logging."""
    named = {word.partition("=")[0].partition(".")[0] for word in words}
    update: dict[str, object] = {
        section: getattr(fresh, section) for section in ("eval", "sample", "checkpoint", "logging") if section in named
    }
    if "train" in named:
        fields = ("steps", "seconds", "min_steps", "blocks")
        length = {name: getattr(fresh.train, name) for name in fields}
        update["train"] = stored.train.model_copy(update=length)
        update["optimizer"] = stored.optimizer.model_copy(update={"decay_steps": fresh.optimizer.decay_steps})
        update["total_tokens"] = fresh.total_tokens
    if fresh.lengths is not None:
        update["lengths"] = fresh.lengths
    return stored.model_copy(update=update)
