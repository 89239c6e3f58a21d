"""What a resumed run continues from: a checkpoint, its dataset, the devices of today and the plan for them."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bloomery.core.errors import UserError
from bloomery.core.files import read_input, read_whole
from bloomery.core.held_files import claimed
from bloomery.core.run_folder import RunFolder
from bloomery.data.shards import read_manifest
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.infer.held_model import being_read
from bloomery.infer.model_folder import MANIFEST as CHECKPOINT_MANIFEST
from bloomery.infer.model_folder import (
    TOKENIZERS,
    best_weight_steps,
    damage,
    saved_steps,
    step_folder,
    weights_folder,
)
from bloomery.launch.launchers import current_launch
from bloomery.monitor.events import Warned
from bloomery.plan.gather import facts_of, prepared_facts
from bloomery.plan.resolve import resolve
from bloomery.plan.support_matrix import AXES
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import LoadedRecipe, load_recipe
from bloomery.runs.devices import chosen_devices, device_count, same_devices
from bloomery.runs.event_hub import last_step
from bloomery.runs.flow import Flow
from bloomery.runs.follow import rank_machine
from bloomery.runs.resume_plan import (
    DROPOUT_WARNING,
    ROUNDING_WARNING,
    rising_rate,
    with_machine_choices,
    with_overrides,
)


def refuse_unusable_checkpoint(folder: RunFolder, step: int) -> None:
    """Raises UserError when the checkpoint of `step` does not exist or is damaged, and while a later one is read."""
    checkpoints = folder.checkpoints
    steps = saved_steps(checkpoints)
    problem = damage(step_folder(checkpoints, step)) if step in steps else "it does not exist"
    if problem is not None:
        raise UserError(
            f"cannot use the checkpoint of step {step}: {problem}",
            where=str(checkpoints),
            fix=f"use one of these steps: {', '.join(map(str, steps)) or 'none'}",
        )
    with _unread(_newer_folders(checkpoints, step)):  # `go_back` would move them
        pass


def refuse_other_dataset(folder: RunFolder, loaded_recipe: LoadedRecipe, plan: RunPlan) -> None:
    """Raises UserError when the prepared dataset or its tokenizer is not the one of the run."""
    data = plan.data.prepared
    checkpoints = folder.checkpoints
    # The facts of a dataset have a digest of its tokens.
    same_tokens = prepared_facts(read_manifest(data), loaded_recipe.recipe, data) == plan.dataset

    # Equal tokens may come from a tokenizer that has changed since. Each checkpoint has a copy of the run's tokenizer;
    # one of them may be damaged, so that one equal copy is enough.
    copies = [
        step_folder(checkpoints, step) / name
        for step in saved_steps(checkpoints)
        for name in TOKENIZERS
    ]
    saved_tokenizers = [path for path in copies if path.is_file()]
    current_tokenizers = {
        name: read_input(data / name) for name in TOKENIZERS if (data / name).is_file()
    }
    same_tokenizer = not saved_tokenizers or any(
        read_input(path) == current_tokenizers.get(path.name) for path in saved_tokenizers
    )
    if not (same_tokens and same_tokenizer):
        raise UserError(
            "the prepared dataset has changed since the run started",
            where=str(data),
            fix="restore that folder, or start a new run with `bloomery train`",
        )


@dataclass(frozen=True)
class DevicesNow:
    """The devices that a resumed run trains on: `count` in all, on `hosts` hosts like `machine`.

    `loaded_recipe`: that of the run with `overrides`: those of the user, and sizes of `parallel` for these devices.
    """

    machine: Machine
    count: int
    hosts: int
    loaded_recipe: LoadedRecipe
    overrides: tuple[str, ...]


def find_devices_now(
    flow: Flow,
    loaded_recipe: LoadedRecipe,
    plan: RunPlan,
    old_machine: Machine,
    overrides: Sequence[str],
    devices: str | None,
) -> DevicesNow:
    """The devices of the launcher, those that the user names, else those of the run where they still exist.

    Raises UserError.
    """
    launch = current_launch()
    hosts = 1
    scoring = loaded_recipe.recipe.parallel.scoring_devices
    if launch is not None:
        machine = rank_machine(launch, devices, scoring=scoring)
        count = launch.world
        hosts = launch.hosts if machine.accelerators else 1  # CPUs are planned as one host
    elif devices is None:
        machine = same_devices(detect(), old_machine)
        count = plan.train.ranks
        if machine.accelerators:
            count = min(count + scoring, len(machine.accelerators))
    else:
        machine, count = chosen_devices(detect(), devices)

    # The sizes of `parallel` in the recipe were for the devices of before. For others they are chosen again, unless the
    # user sets them now.
    sets_parallel = any(override.startswith("parallel.") for override in overrides)
    beside = scoring if machine.accelerators and launch is None else 0
    if count - beside != plan.train.ranks and not sets_parallel:
        sizes = [f"parallel.{axis}=auto" for axis in AXES]
        for axis in ("context", "expert"):
            size = getattr(loaded_recipe.recipe.parallel, axis)
            if (count - beside) % size:
                sizes.append(f"parallel.{axis}={math.gcd(size, count - beside)}")
        overrides = (*overrides, *sizes)
        loaded_recipe = load_recipe(flow.folder.recipe, overrides)

    # A launcher has started one process per device already; otherwise the recipe may train on fewer than there are.
    if launch is None:
        user_named = devices not in (None, "auto")
        machine, count = device_count(loaded_recipe.recipe, machine, count, user_named=user_named)
    return DevicesNow(machine, count, hosts, loaded_recipe, tuple(overrides))


def replan(
    flow: Flow,
    stored_plan: RunPlan,
    devices_now: DevicesNow,
    changes: Sequence[str],
    *,
    step: int | None,
) -> RunPlan:
    """The stored plan with what another machine changes (each with a warning) and what the user overrides.

    `changes`: what is different about the machine and its devices. `step`: the checkpoint that the user goes back to.
    Raises UserError for a length below the steps that are already trained.
    """
    # The dataset is the prepared one of the run, whatever its files are now: it was compared with the plan before.
    facts = facts_of(
        devices_now.loaded_recipe,
        devices_now.machine,
        prepared=stored_plan.data.prepared,
        dataset=stored_plan.dataset,
    )
    fresh_plan = resolve(
        devices_now.loaded_recipe,
        facts,
        gpus=devices_now.count // devices_now.hosts,
        nodes=devices_now.hosts,
    )

    # The list of choices ends with a warning where another choice rounds or draws differently. Where all are the same,
    # another CPU, GPU or PyTorch may still sum in another order.
    plan = stored_plan
    if changes:
        plan, changed_choices = with_machine_choices(stored_plan, fresh_plan)
        reasons = [*changes, *changed_choices]
        if not {ROUNDING_WARNING, DROPOUT_WARNING} & set(changed_choices):
            reasons.append(f"rounding may differ on this machine: {ROUNDING_WARNING}")
        for reason in reasons:
            flow.hub.emit(Warned(step=last_step(flow.folder), reason=reason))
    if devices_now.overrides:
        plan = with_overrides(plan, fresh_plan, devices_now.overrides)

    # Where the user goes back to `step`, the steps after it do not count.
    trained_steps = max(saved_steps(flow.folder.checkpoints), default=0) if step is None else step
    if plan.train.steps is not None and plan.train.steps < trained_steps:
        raise UserError(
            f"the new length of {plan.train.steps:,} steps is less than the {trained_steps:,} steps already trained",
            where=f"train.{devices_now.loaded_recipe.recipe.train.length_key}",
            fix="set a longer one, or resume from an earlier checkpoint with --from STEP",
        )
    if trained_steps:
        seconds = _seconds_of(step_folder(flow.folder.checkpoints, trained_steps))
        rises = rising_rate(stored_plan, plan, step=trained_steps, seconds=seconds)
        if rises is not None:
            flow.hub.emit(Warned(step=trained_steps, reason=rises))
    return plan


def _seconds_of(checkpoint: Path) -> float:
    """Seconds of the run up to a checkpoint; 0 where it is damaged, which the resume reports."""
    try:
        state = json.loads(read_whole(checkpoint / "state.json"))
        return float(state["progress"]["seconds"])
    except (OSError, ValueError, LookupError, TypeError, UserError):
        return 0.0


def go_back(flow: Flow, step: int) -> None:
    """Moves newer checkpoints into a separate folder, so that the run continues from `step`.

    Call it after everything that may refuse the resume. A refused one must not move checkpoints: the next resume would
    continue from `step`, although the user did not ask for that again. Raises UserError while one is being read.
    """
    flow.check()  # after a Ctrl+C nothing is moved, either

    checkpoints = flow.folder.checkpoints
    newer_folders = _newer_folders(checkpoints, step)
    if not newer_folders:
        return

    # Whoever reads one of them would find its files gone.
    with _unread(newer_folders):
        aside = checkpoints / f"before-{time.strftime('%Y%m%d-%H%M%S')}"
        aside.mkdir()
        for newer_folder in newer_folders:
            newer_folder.rename(aside / newer_folder.name)
    flow.hub.emit(Warned(step=step, reason=f"checkpoints after step {step} moved to {aside}"))


def _newer_folders(checkpoints: Path, step: int) -> list[Path]:
    """Checkpoints and best weights of steps after `step`."""
    saved = saved_steps(checkpoints)
    best = best_weight_steps(checkpoints)
    return [
        *(step_folder(checkpoints, newer_step) for newer_step in saved if newer_step > step),
        *(weights_folder(checkpoints, newer_step) for newer_step in best if newer_step > step),
    ]


@contextmanager
def _unread(folders: Sequence[Path]) -> Iterator[None]:
    """Until the block ends nobody begins to read the folders. Raises UserError where somebody does."""
    with claimed(folder / CHECKPOINT_MANIFEST for folder in folders) as held_file:
        if held_file is not None:
            raise being_read(held_file)
        yield
