"""The devices that a run trains on, one process each. No torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bloomery.core.device import KINDS
from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.hardware.machine import (
    Accelerator,
    Machine,
    mask_of,
    runtime_number,
    visible_devices,
    with_devices,
)
from bloomery.hardware.probes import with_cached_probes
from bloomery.hardware.profile import choose_device, hidden_integrated
from bloomery.hardware.specs import two_vendors
from bloomery.hardware.vendors import VENDORS
from bloomery.plan.mesh import fewest_devices, sizes_of, training_devices_of
from bloomery.plan.support_matrix import AXES, refusals
from bloomery.recipe.schema import Recipe

if TYPE_CHECKING:
    from bloomery.plan.types import PlanReport
    from bloomery.recipe.load import LoadedRecipe

MOST_CPU_RANKS = 64  # each holds a copy of PyTorch, and they share the cores


def chosen_devices(machine: Machine, devices: str | None) -> tuple[Machine, int]:
    """The machine with only the given devices, and their number: "0,1", "cuda:0" (AMD too), "xpu:0", "mps",
    "cpu", "cpu,cpu". Unequal GPUs of one vendor train together, in the order of their numbers.

    None or "auto": every GPU like the best one, or the CPU as one device. Raises UserError.
    """
    if devices is None or devices == "auto":
        alike = _alike(machine)
        if len(alike) < len(machine.accelerators) and len(alike) > 1:
            machine = with_cached_probes(_chosen_alone(machine, alike))
        return machine, max(1, len(alike))
    device_names = [word.strip() for word in devices.split(",")]
    if set(device_names) == {"cpu"}:
        if len(device_names) > MOST_CPU_RANKS:
            problem = f"{len(device_names):,} processes on one CPU: at most {MOST_CPU_RANKS} train together"
            raise UserError(
                problem, where="--devices", fix="use -d cpu, which takes every core", code=2
            )
        return with_cached_probes(machine.model_copy(update={"accelerators": ()})), len(
            device_names
        )
    selected = [_named(machine, word) for word in device_names]
    if len({device.index for device in selected}) < len(selected):
        problem = f"a device is named twice: {devices!r}"
        raise UserError(problem, where="--devices", fix="name each device once", code=2)
    if len({device.vendor for device in selected}) > 1:
        names = ", ".join(f"{device.index} ({device.name})" for device in selected)
        raise two_vendors(names, where="--devices")
    models = {(device.arch, device.name, device.memory_bytes) for device in selected}
    chosen = _only_these(machine, selected)
    return chosen.model_copy(update={"together": len(models) > 1}), len(selected)


def narrowed(machine: Machine, devices: str | None) -> Machine:
    """The machine with only the given devices, for work of one process: on the best of them. Raises UserError."""
    if devices is None or devices == "auto":
        return machine
    narrow, _ = chosen_devices(machine, devices)
    return narrow.model_copy(update={"together": False})


def devices_of_ranks(
    machine: Machine, count: int, ranks: int, launcher: str, *, scoring: int = 0
) -> Machine:
    """The machine with the devices of the `ranks` that `launcher` started here, and of those behind them that score.
    `count`: the devices that may train.

    Where this process sees one device, each of the others may see its own. Raises UserError for too few.
    """
    needed = ranks + scoring
    if not machine.accelerators or count == 1 or count == needed:
        return machine
    if count < needed:
        problem = (
            f"{launcher} starts {ranks} ranks on this host, which has {count} GPUs of one model"
        )
        fix = "start one process per GPU"
        if scoring:
            problem += f": too few for {counted(scoring, 'devices')} that score"
            fix = f"start {max(1, count - scoring)} on each host, or set parallel.scoring_devices=0"
        raise UserError(problem, where="the launcher", fix=fix, code=2)
    return _chosen_alone(machine, _alike(machine)[:needed])


def device_count(
    recipe: Recipe, machine: Machine, count: int, *, user_named: bool = True, started_by: str = ""
) -> tuple[Machine, int]:
    """The machine and how many of its `count` devices the recipe trains on. `user_named`: the user chose them.
    `started_by`: the launcher that started one process for each that trains.

    Fewer where `parallel` asks for fewer, also to score; one where a setting of the recipe trains on one device only.
    Raises UserError where `parallel` asks for more, or for another number than was chosen.
    """
    scoring = recipe.parallel.scoring_devices if machine.accelerators else 0
    if scoring and not started_by:
        if count <= scoring:
            raise UserError(
                f"{counted(scoring, 'devices')} that score leave none of {count:,} to train",
                where=f"parallel.scoring_devices={scoring}",
                fix=f"set parallel.scoring_devices={count - 1}, or train on more devices",
                code=2,
            )
        count -= scoring
    product = fewest_devices(recipe.parallel)
    exact = "auto" not in sizes_of(recipe.parallel)
    if product > count or count % product or (user_named and exact and product != count):
        problem = f"parallel asks for {product:,} devices, and there are {count:,}"
        problem += " besides those that score" if scoring else ""
        fix = "change the sizes of parallel, or start as many processes with a launcher"
        if product <= MOST_CPU_RANKS:  # more are on several machines
            names = ["cpu"] * product
            if machine.accelerators:
                names = list(map(str, range(product + scoring)))
            fix = f"pass --devices {','.join(names)}, or change the sizes of parallel"
        if started_by:
            fix = f"start {product} processes with {started_by}, or change the sizes of parallel"
        raise UserError(problem, where="parallel", fix=fix, code=2)
    if exact:
        count = product
    elif count > 1 and not user_named and all(refusals(recipe, axis) for axis in AXES):
        count = 1
    if count + scoring < len(machine.accelerators):
        machine = _chosen_alone(machine, _alike(machine)[: count + scoring])
    return machine, count


def planned_devices(recipe: Recipe, machine: Machine, devices: str | None) -> tuple[Machine, int]:
    """The devices that training would use; 1 where `parallel` asks for more than exist: the plan is then for those."""
    narrow, count = chosen_devices(machine, devices)
    scoring = recipe.parallel.scoring_devices if narrow.accelerators else 0
    sizes = [size for size in sizes_of(recipe.parallel) if size != "auto"]
    if max([1, recipe.parallel.context, recipe.parallel.expert, *sizes]) > count - scoring:
        return narrow, 1
    return device_count(recipe, narrow, count, user_named=devices not in (None, "auto"))


def planned_report(
    loaded_recipe: "LoadedRecipe",
    *,
    gpu: str | None = None,
    devices: str | None = None,
    gpus: int = 1,
    nodes: int = 1,
    host_memory: int | None = None,
) -> "tuple[PlanReport, Machine]":
    """The plan of a recipe and its machine: this one with the devices that training would choose, or that of `gpu`.

    `host_memory`: bytes of a node, where they are not those of this machine.

    Raises UserError where no GPU is here of which several are to be planned, and as `local_plan` does.
    """
    from bloomery.hardware.cpu_check import with_cpu_check
    from bloomery.hardware.detect import detect
    from bloomery.plan.advise import advise
    from bloomery.plan.resolve import local_plan

    detected = detect()
    num_gpus = training_devices_of(loaded_recipe.recipe.parallel, gpus=gpus, nodes=nodes)
    if gpu is None and gpus * nodes > 1 and not detected.accelerators:
        counts = (("--gpus", gpus), ("--nodes", nodes))
        where = " ".join(f"{flag} {count}" for flag, count in counts if count > 1)
        fix = f'name a GPU: --gpu "MI300X" {where}'
        problem = "this machine has no GPU of which to plan several"
        raise UserError(problem, where=where, fix=fix, code=2)
    if gpu is None and gpus * nodes == 1:
        selected, num_gpus = planned_devices(loaded_recipe.recipe, detected, devices)
        detected = with_cpu_check(selected)

    # The plan's machine has the GPU of --gpu, where that is named.
    plan, facts = local_plan(
        loaded_recipe,
        gpu=gpu,
        machine=detected,
        gpus=num_gpus,
        nodes=nodes,
        host_memory=host_memory,
    )
    return advise(loaded_recipe, plan, facts), facts.machine


def _alike(machine: Machine) -> list[Accelerator]:
    """The GPU that training on one device would use, and the visible ones of the same model."""
    best, _ = choose_device(machine)
    if best is None:
        return []
    if best.integrated:
        return [best]
    model_key = (best.vendor, best.arch, best.name, best.memory_bytes)
    return [
        device
        for device in visible_devices(machine)
        if (device.vendor, device.arch, device.name, device.memory_bytes) == model_key
    ]


def _chosen_alone(machine: Machine, devices: Sequence[Accelerator]) -> Machine:
    """The machine with only `devices`, which the user did not name, and the integrated GPUs that they hide."""
    narrow = with_devices(machine, {device.index for device in devices})
    return narrow.model_copy(update={"hidden_integrated": _hidden_by(machine, devices)})


def _hidden_by(machine: Machine, devices: Sequence[Accelerator]) -> tuple[Accelerator, ...]:
    """The integrated GPUs that training on `devices` hides, with their numbers in this machine."""
    return tuple(
        device.model_copy(update={"number": runtime_number(machine, device)})
        for device in (hidden_integrated(machine, devices[0]) if devices else ())
    )


def _named(machine: Machine, name: str) -> Accelerator:
    """The device of a number alone, of a kind and a number, or the first one of a kind: "1", "xpu:0", "mps"."""
    prefix, colon, number = name.rpartition(":")
    kind = next((kind for kind in KINDS if (prefix if colon else name) in kind.prefixes), None)
    if kind is None:
        matching = [device for device in machine.accelerators if str(device.index) == name]
    else:
        matching = [
            device
            for device in machine.accelerators
            if VENDORS[device.vendor].device_type == kind.type
            and (not colon or str(device.index) == number)
        ]
    makers = [vendor for vendor in VENDORS.values() if kind and vendor.device_type == kind.type]
    untrained = next((vendor for vendor in makers if vendor.missing), None)
    if matching and untrained is None:
        return matching[0]

    problem = f"no such device: {name!r}"
    if untrained is not None:
        problem = f"Bloomery does not train on GPUs of {untrained.name}: {untrained.missing}"
    known_devices = (
        ", ".join(f"{device.index} ({device.name})" for device in machine.accelerators) or "none"
    )
    fix = f"use cpu or one of these GPUs: {known_devices}"
    raise UserError(problem, where="--devices", fix=fix, code=2)


def _only_these(machine: Machine, selected: list[Accelerator]) -> Machine:
    """Raises UserError where the user's visibility mask selects others."""
    mask = mask_of(machine, selected[0].vendor)
    shown_devices = [
        device for device in visible_devices(machine) if device.vendor == selected[0].vendor
    ]
    if mask and any(device not in shown_devices[: len(selected)] for device in selected):
        shown_names = (
            ", ".join(device.name for device in shown_devices) if shown_devices else "no GPU"
        )
        value = machine.software.environment[mask]
        hidden = next(device for device in selected if device not in shown_devices[: len(selected)])
        raise UserError(
            f"cannot use device {hidden.index} ({hidden.name}): {mask}={value} selects {shown_names}",
            where="--devices",
            fix=f"unset {mask}",
            code=2,
        )
    return with_cached_probes(with_devices(machine, {device.index for device in selected}))


def same_devices(machine: Machine, old_machine: Machine) -> Machine:
    """The machine with only the devices of the run, where they still exist: `--devices` stays after a resume.

    An integrated GPU that the run has hidden without the user is hidden again.
    """
    devices_left = _those_of(old_machine.accelerators, machine)
    if not devices_left and old_machine.accelerators:
        return machine
    if len(devices_left) == 1 and len(machine.accelerators) > 1:
        narrow = _only_these(machine, devices_left)
    else:
        narrow = with_cached_probes(
            with_devices(machine, {device.index for device in devices_left})
        )
        narrow = narrow.model_copy(
            update={"together": old_machine.together and len(devices_left) > 1}
        )
    if not _those_of(old_machine.hidden_integrated, machine):
        return narrow
    return narrow.model_copy(update={"hidden_integrated": _hidden_by(machine, devices_left)})


def _those_of(old_devices: Sequence[Accelerator], machine: Machine) -> list[Accelerator]:
    """The devices of the machine that are among `old_devices`, those of a run."""
    old_keys = {(device.index, device.arch) for device in old_devices}
    return [device for device in machine.accelerators if (device.index, device.arch) in old_keys]
