"""The life of a run: `start` prepares, plans and trains a recipe, `resume` trains on from a checkpoint.

Both prepare data and train in child processes (`runs.flow`). The parent never imports torch: it handles Ctrl+C at once,
and survives a crash of a driver in its child.

Under a launcher such as torchrun every rank runs this code. Rank 0 does all of it; the later ranks only `_follow`.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bloomery.core.errors import UserError, of_the_system
from bloomery.core.text import expanded
from bloomery.core.units import MIB, format_bytes
from bloomery.data.prepare.pipeline import streams
from bloomery.data.prepare.prepare import finished, prepared_folder
from bloomery.data.prepare.split import file_roles, size_warnings
from bloomery.data.shards import MANIFEST, read_manifest
from bloomery.hardware.cpu_check import with_check
from bloomery.hardware.detect import detect
from bloomery.hardware.doctor.software import torch_missing
from bloomery.hardware.machine import Machine, read_machine
from bloomery.hardware.profile import build_profile
from bloomery.monitor.events import Warned
from bloomery.monitor.sinks import LogFile, require
from bloomery.plan.advise import advise, checkpoint_bytes
from bloomery.plan.gather import counted, facts_of, fetch, gather, left_aside
from bloomery.plan.resolve import child_environment, resolve
from bloomery.plan.store import (
    read_plan,
    read_sealed,
    require_identity,
    write_sealed,
)
from bloomery.plan.types import RunPlan
from bloomery.plan.unsupported import AXES, refuse_recipe
from bloomery.recipe.load import LoadedRecipe, dump_recipe, load_recipe
from bloomery.recipe.schema import Recipe
from bloomery.runs.devices import chosen_devices, device_count, devices_of_ranks, same_devices
from bloomery.runs.event_hub import (
    EventHub,
    commands_of,
    event_hub,
    last_step,
    remember,
    remembered,
    reward_files,
)
from bloomery.runs.flow import (
    Edit,
    EndedRun,
    Flow,
    Watch,
    fall_back,
    prepare,
    run_to_end,
    train,
    write_plan_and_machine,
)
from bloomery.runs.folder import RunFolder, host_name, locked, new_run, refuse_little_disk
from bloomery.runs.launchers import Board, Launch, began_by, current_launch, new_folder
from bloomery.runs.resume_plan import (
    ROUNDING_WARNING,
    differences,
    moved,
    prolonged,
    refuse_other_recipe,
    refuse_overrides,
    take_fallback,
)
from bloomery.runs.signals import stop_requests
from bloomery.runs.supervisor import StageResult, existing, run_stage
from bloomery.runs.worker import DONE, FAILED, STOPPED
from bloomery.train.model_folder import (
    TOKENIZERS,
    best_weight_steps,
    damage,
    saved_steps,
    step_folder,
    weights_folder,
)
from bloomery.train.run import is_done, read_history

# A checkpoint on disk is larger than its planned tensors, by the headers of its files and by JSON.
CHECKPOINT_MARGIN = 1.05
CHECKPOINT_SLACK = MIB


def start(
    loaded_recipe: LoadedRecipe,
    *,
    run_dir: Path | None = None,
    devices: str | None = None,
    recover: bool = False,
    quiet: bool = False,
    edit: Edit | None = None,
    watch: Watch | None = None,
    planned: Callable[[RunPlan, Machine], None] | None = None,
) -> EndedRun:
    """Train a recipe in a new folder (`runs/<recipe>-<date>-<time>`). Raises UserError when it fails.

    A process that a launcher such as torchrun started is one rank: it joins the run of rank 0, whose folder has the
    name of the launcher's job. Started again by that job, it resumes.
    `planned` gets a first plan and may measure the machine for it; `edit` changes the run's own plan, made after that.
    `recover`: after a kernel or driver crash or out of memory, restart with safer settings, at most 3 times.
    An exception of `watch` kills the training child (SIGKILL) and passes through.
    """
    require(loaded_recipe.recipe.logging.libraries)
    launch = current_launch()
    path = new_folder(loaded_recipe.name) if run_dir is None else run_dir

    # A later rank trains only when rank 0 lets it. A job that began this run and was started again resumes.
    if launch is not None and launch.rank:
        return _follow(launch, path, devices)
    if launch is not None and began_by(earlier_run := RunFolder(expanded(path).absolute()), launch):
        refuse_other_recipe(
            earlier_run,
            load_recipe(earlier_run.recipe).recipe,
            loaded_recipe.recipe,
            job=launch.job,
        )
        return resume(path, devices=devices, recover=recover, quiet=quiet, watch=watch)

    # The model is downloaded before the first plan, which reads its config and tokenizer from this disk. The weights
    # come with it, although only training reads them: a model that cannot be downloaded or has damaged files is refused
    # now, and not after hours of preparing data.
    refuse_recipe(loaded_recipe.recipe)
    fetch(loaded_recipe.recipe, weights=True)
    machine, count, hosts = training_devices(loaded_recipe, devices)
    data = prepared_folder(loaded_recipe, _workspace(path))
    if machine.software.torch is None:
        raise torch_missing(machine)
    if finished(loaded_recipe, data) is None:
        streams(loaded_recipe.recipe)  # raises for missing files
    roles = file_roles(loaded_recipe.recipe.data, loaded_recipe.recipe.objective.spec.data_kind)
    if roles is not None and not quiet:
        print(f"files      {roles}", file=sys.stderr)

    # The first of two plans raises what `bloomery plan` would report, before anything is prepared or created. Its
    # dataset may be an estimate from files. The run trains by the second plan (`_prepare_plan_train`), which counts the
    # prepared dataset and uses what `planned` has measured of the machine.
    first_plan = resolve(
        loaded_recipe, gather(loaded_recipe, machine, prepared=data), gpus=count, nodes=hosts
    )
    if planned is not None:
        planned(first_plan, machine)

    with (
        stop_requests() as requests,
        _second_rank_0_explained(launch, path),
        new_run(loaded_recipe, path) as (folder, lock),
        event_hub(folder, quiet=quiet, lines=launch is not None) as hub,
    ):
        flow = Flow(
            folder,
            lock,
            hub,
            requests,
            loaded_recipe.name,
            recover,
            edit=edit,
            watch=watch,
            board=_board(folder, launch, hub),
        )
        # The user has just passed this recipe, and with it the hooks that it names.
        _allow_hooks(flow, loaded_recipe)
        return run_to_end(
            flow, lambda: _prepare_plan_train(flow, loaded_recipe, devices, resumed=False)
        )


def resume(
    path: Path,
    *,
    step: int | None = None,
    overrides: Sequence[str] = (),
    devices: str | None = None,
    recover: bool = False,
    quiet: bool = False,
    watch: Watch | None = None,
) -> EndedRun:
    """Resume the run in `path` from its newest valid checkpoint, or from that of `step`.

    `overrides`: the length, eval.*, sample.*, checkpoint.*, logging.* and sizes of parallel.*. `recover`: as in
    `start`; applies the fallback that the last crash stored. Raises UserError.
    """
    refuse_overrides(overrides)
    launch = current_launch()
    if launch is not None and launch.rank:
        return _follow(launch, path, devices)
    folder = existing(path)
    with (
        stop_requests() as requests,
        _second_rank_0_explained(launch, path),
        locked(folder) as lock,
    ):
        # The recipe must be the one that the run wrote: both raise where it was changed by hand.
        require_identity(folder.path)
        read_sealed(folder.recipe)
        loaded_recipe = load_recipe(folder.recipe, overrides)
        _refuse_foreign_rewards(folder.path, loaded_recipe.recipe)

        # A run that is done has nothing to resume, unless the user goes back or overrides something. The later ranks of
        # a launcher wait for the exit code then, too.
        history = read_history(folder.path)
        reported_done = history.end is not None and history.end.status == "done"
        is_finished = reported_done and is_done(folder.path)
        if step is None and not overrides and is_finished:
            if launch is not None:
                Board(folder, launch).conclude(DONE)
            return EndedRun(folder.path, DONE, again=True)

        require(loaded_recipe.recipe.logging.libraries)
        with event_hub(folder, quiet=quiet, lines=launch is not None) as hub:
            board = _board(folder, launch, hub)
            flow = Flow(
                folder, lock, hub, requests, loaded_recipe.name, recover, watch=watch, board=board
            )
            # The stored recipe may be somebody else's. An override is this user's.
            if any(override.startswith("logging.trackers") for override in overrides):
                _allow_hooks(flow, loaded_recipe)
            if step is None and reported_done and not is_finished:
                reason = "events.jsonl ends with status done, but the last checkpoint is missing: training continues"
                hub.emit(Warned(step=history.last_step, reason=reason))
            if history.problem is not None:
                hub.emit(Warned(step=history.last_step, reason=history.problem))
            return run_to_end(
                flow, lambda: _train_on(flow, loaded_recipe, step, overrides, devices)
            )


def _allow_hooks(flow: Flow, loaded_recipe: LoadedRecipe) -> None:
    """Lets the run start the hooks of the recipe (commands of `logging.trackers`), now and in later resumes.

    A run folder may come from somebody else, and its recipe.yaml would then start their commands on this machine. So a
    hook starts only where a recipe or an override of this user named it for this folder: that is noted in the user's
    home folder, outside the run. Other hooks are reported and not started.
    """
    flow.hub.hooks = commands_of(loaded_recipe.recipe)
    rewards = [_reward_note(file) for file in reward_files(loaded_recipe.recipe)]
    try:
        remember(flow.folder.path, [*flow.hub.hooks, *rewards])
    except OSError as error:
        reason = (
            f"the hooks of this run will not start after a resume: cannot write {error.filename}"
        )
        flow.hub.emit(Warned(reason=f"{reason}: {error.strerror}"))


def _reward_note(file: Path) -> str:
    return f"reward {file}"


def _refuse_foreign_rewards(run_dir: Path, recipe: Recipe) -> None:
    """Raises UserError for reward functions that this user has not started for this folder: they are code, too."""
    for file in reward_files(recipe):
        if not remembered(run_dir, [_reward_note(file)]):
            raise UserError(
                "the rewards of this run are Python code that was not started here by you",
                where=str(file),
                fix=f"read that file, then start a run of your own: bloomery train {run_dir / 'recipe.yaml'}",
            )


@contextmanager
def _second_rank_0_explained(launch: Launch | None, path: Path) -> Iterator[None]:
    """Replaces an error in the block by its cause, where this process is a second rank 0 of one launch.

    Where two processes of a launch have RANK=0, the first one locks the run folder and the second one fails: its error
    would be that the run is in use, but the mistake is the rank. Every other UserError passes unchanged.
    """
    try:
        yield
    except UserError:
        if launch is not None:
            Board(RunFolder(expanded(path).absolute()), launch).refuse_second_start()
        raise


def _board(folder: RunFolder, launch: Launch | None, hub: EventHub) -> Board | None:
    """The board on which this process, rank 0 of a launcher, writes to the later ranks; None without a launcher."""
    if launch is None:
        return None
    hub.line(f"started by {launch}")
    print(f"launcher   {launch}", file=sys.stderr)
    board = Board(folder, launch)
    board.open()
    return board


def _say_waiting(text: str) -> None:
    print(f"waiting    {text}", file=sys.stderr, flush=True)


def _follow(launch: Launch, path: Path, devices: str | None) -> EndedRun:
    """Trains as a later rank of a launcher, as often as rank 0 starts it. Ends with its exit code. Raises UserError.

    The processes of a launch may be on several hosts, so they talk through files in the run folder: the board. Rank 0
    writes its messages there, and each later rank waits for them here: "train now" for each attempt (another one after
    a crash that rank 0 recovers from), and at last the exit code of the run. A later rank leaves on the board how its
    attempt ended; rank 0 reads that while it supervises its own.
    """
    folder = RunFolder(expanded(path).absolute())
    board = Board(folder, launch)
    with stop_requests() as requests:
        while True:
            # A stop ends the wait for the first attempt. After it this rank waits for the exit code of rank 0: all
            # ranks of a run end with the same one.
            message = board.wait(
                lambda: requests.stop_requested and board.message is None, _say_waiting
            )
            if message is None or message.code is not None:
                break

            # Train by the plan that rank 0 has just written, with the variables that this host needs.
            try:
                plan = read_plan(folder.plan)
                machine = _rank_machine(launch, devices)
                plan = plan.model_copy(
                    update={"environment": build_profile(machine).environment.value}
                )
                # Rank 0 writes the events of the run; the output of this rank goes to a log of its own.
                with closing(LogFile(board.path / f"rank-{launch.rank}.log")) as log:
                    ending = run_stage(
                        "train",
                        folder,
                        arguments=("--resumed",) if message.resumed else (),
                        environment=child_environment(plan, os.environ),
                        inherited=(),
                        requests=requests,
                        on_event=lambda _: None,
                        on_line=log.text,
                        board=board,
                    )
            except (UserError, OSError) as failed:
                # This rank cannot even start: rank 0, which would wait for it, is told why.
                error = failed if isinstance(failed, UserError) else of_the_system(failed)
                report = {"problem": str(failed), "where": "", "fix": "", "code": FAILED}
                if error is not None:
                    report |= {"problem": error.problem, "where": error.where, "fix": error.fix}
                board.leave(launch.rank, StageResult("train", FAILED, report, ()))
                raise
            board.leave(launch.rank, ending)

    # The run has ended, this rank was stopped before it began, or rank 0 did not come or is gone.
    if message is not None and message.code is not None:
        if message.code == FAILED:
            print(
                f"ended      by rank 0, which failed: see its error, or {folder.log}",
                file=sys.stderr,
            )
        return EndedRun(folder.path, message.code, rank=launch.rank)
    if requests.stop_requested:
        board.leave(launch.rank, StageResult("train", STOPPED, None, ()))
        return EndedRun(folder.path, STOPPED, rank=launch.rank)
    if not board.met:
        raise UserError(
            f"rank 0 did not come to rank {launch.rank} on {host_name()}",
            where=str(folder.path),
            fix=f"start all {launch.world} ranks; --run-dir must be the same folder on all hosts",
        )
    raise UserError(
        f"rank 0 has ended without a word to rank {launch.rank} on {host_name()}",
        where=str(folder.path),
        fix="read the error of rank 0; --run-dir must be the same folder on all hosts",
    )


def _prepare_plan_train(
    flow: Flow,
    loaded_recipe: LoadedRecipe,
    devices: str | None,
    *,
    resumed: bool,
    step: int | None = None,
) -> int:
    """Prepares the dataset, plans the run with it and trains: a new run, or one whose plan is missing.

    `step`: as in `resume`. Raises UserError.
    """
    data = prepared_folder(loaded_recipe, _workspace(flow.folder.path))
    if finished(loaded_recipe, data) is None:
        prepare(flow, data)
    flow.check()

    # The plan that the run trains by. The machine is read again: `planned` may have measured it since the first plan.
    machine, count, hosts = training_devices(loaded_recipe, devices)
    facts = gather(loaded_recipe, machine, prepared=data)
    report = advise(loaded_recipe, resolve(loaded_recipe, facts, gpus=count, nodes=hosts), facts)
    plan = report.plan if flow.edit is None else flow.edit(report.plan)
    refuse_little_disk(
        flow.folder.path, round(checkpoint_bytes(plan) * CHECKPOINT_MARGIN) + CHECKPOINT_SLACK
    )

    # What the user should know and no refusal says.
    memory = plan.memory
    tight = f"may not fit: {format_bytes(memory.total)} estimated, {format_bytes(memory.limit)} available"
    size_reasons = size_warnings(
        read_manifest(data), sequence_length=loaded_recipe.recipe.data.sequence_length
    )
    for reason in (
        *report.warnings,
        *([] if memory.fits else [tight]),
        *left_aside(loaded_recipe.recipe),
        *size_reasons,
    ):
        flow.hub.emit(Warned(reason=reason))

    if step is not None:
        _go_back(flow, step)
    write_plan_and_machine(flow.folder, plan, machine)
    return train(flow, plan, machine, resumed=resumed)


def training_devices(loaded_recipe: LoadedRecipe, devices: str | None) -> tuple[Machine, int, int]:
    """This machine with the devices that the recipe trains on, their number, and the number of such hosts.

    Raises UserError.
    """
    if (launch := current_launch()) is not None:
        machine = _rank_machine(launch, devices)
        device_count(loaded_recipe.recipe, machine, launch.world, started_by=launch.launcher)
        hosts = launch.hosts if machine.accelerators else 1  # CPUs are planned as one
        return machine, launch.world // hosts, hosts
    machine, count = chosen_devices(detect(), devices)
    machine = with_check(machine)
    return *device_count(
        loaded_recipe.recipe, machine, count, user_named=devices not in (None, "auto")
    ), 1


def _rank_machine(launch: Launch, devices: str | None) -> Machine:
    """This machine with the devices of its ranks. Raises UserError."""
    machine, count = chosen_devices(detect(), devices)
    return devices_of_ranks(machine, count, launch.local_world, launch.launcher)


def _workspace(run: Path) -> Path:
    """The folder of `prepared/`: next to `runs/`; for a run in another place, the working folder."""
    return run.parent.parent if run.parent.name == "runs" else Path.cwd()


def _train_on(
    flow: Flow,
    loaded_recipe: LoadedRecipe,
    step: int | None,
    overrides: Sequence[str],
    devices: str | None,
) -> int:
    """Trains on from the newest checkpoint, or from that of `step`. The plan stays as far as this machine allows.

    Raises UserError. Until training starts, a refusal leaves the checkpoints after `step` in their place.
    """
    folder = flow.folder
    if step is not None:
        _refuse_unusable_checkpoint(folder, step)

    # Without its plan the run is planned again; its checkpoints stay.
    missing_files = [path.name for path in (folder.plan, folder.machine) if not path.exists()]
    if missing_files:
        if saved_steps(folder.checkpoints):
            reason = f"missing {' and '.join(missing_files)}: planned again from recipe.yaml"
            flow.hub.emit(Warned(reason=reason))
        write_sealed(folder.path, {folder.recipe.name: dump_recipe(loaded_recipe)})
        return _prepare_plan_train(flow, loaded_recipe, devices, resumed=True, step=step)

    # The stored plan; with --recover the fallback, a copy with safer settings that the last crash left. Without
    # --recover it is dropped all the same: it answers the crash before this resume, by the plan of that time. A
    # --recover after a later crash must not undo what has changed since, such as the length.
    fallback_after = take_fallback(folder)
    if fallback_after is not None and flow.recover:
        stored_plan = fall_back(flow, fallback_after)
    else:
        stored_plan = read_plan(folder.plan)

    # The dataset must be the one that the run has trained on so far.
    prepared = stored_plan.data.prepared
    if not (prepared / MANIFEST).is_file():
        flow.hub.emit(Warned(reason=f"prepared dataset missing: {prepared}; preparing it again"))
        prepare(flow, prepared)
    _refuse_other_dataset(folder, loaded_recipe, stored_plan)

    # What has changed since: the machine, its devices, and what the user overrides.
    read_sealed(folder.machine, fix="delete it; the run is then planned again for this machine")
    old_machine = read_machine(folder.machine)
    devices_now = _devices_now(flow, loaded_recipe, stored_plan, old_machine, overrides, devices)
    changes = differences(old_machine, devices_now.machine)
    if devices_now.count != stored_plan.train.ranks:
        changes.append(f"devices changed: {stored_plan.train.ranks} -> {devices_now.count}")
    sets_parallel = any(override.startswith("parallel.") for override in devices_now.overrides)
    if sets_parallel and not changes:
        # As many devices in another layout, which `_replanned` takes over only where something has changed.
        changes.append("parallel changed")
    plan = stored_plan
    if changes or devices_now.overrides:
        plan = _replanned(flow, stored_plan, devices_now, changes, step=step)

    # Nothing is refused any more. Checkpoints are moved before the plan is written: a kill in between must not leave a
    # plan that is shorter than the newest checkpoint.
    if step is not None:
        _go_back(flow, step)
    if changes or devices_now.overrides:
        write_plan_and_machine(
            folder,
            plan,
            devices_now.machine,
            {folder.recipe.name: dump_recipe(devices_now.loaded_recipe)},
        )
    return train(flow, plan, devices_now.machine, resumed=True)


@dataclass(frozen=True)
class _DevicesNow:
    """What a resumed run trains on: `count` devices on `hosts` hosts, and the recipe with `overrides` for them."""

    machine: Machine
    count: int
    hosts: int
    loaded_recipe: LoadedRecipe
    overrides: tuple[str, ...]


def _devices_now(
    flow: Flow,
    loaded_recipe: LoadedRecipe,
    plan: RunPlan,
    old_machine: Machine,
    overrides: Sequence[str],
    devices: str | None,
) -> _DevicesNow:
    """The devices of the launcher, those that the user names, else those of the run where they still exist.

    Raises UserError.
    """
    launch = current_launch()
    hosts = 1
    if launch is not None:
        machine = _rank_machine(launch, devices)
        count = launch.world
        hosts = launch.hosts if machine.accelerators else 1
    elif devices is None:
        machine = same_devices(detect(), old_machine)
        count = plan.train.ranks
        if machine.accelerators:
            count = min(count, len(machine.accelerators))
    else:
        machine, count = chosen_devices(detect(), devices)

    # The sizes of `parallel` in the recipe are those for the devices before, unless the user sets them now.
    sets_parallel = any(override.startswith("parallel.") for override in overrides)
    if count != plan.train.ranks and not sets_parallel:
        overrides = (*overrides, *(f"parallel.{axis}=auto" for axis in AXES))
        loaded_recipe = load_recipe(flow.folder.recipe, overrides)
    if launch is None:
        user_named = devices not in (None, "auto")
        machine, count = device_count(loaded_recipe.recipe, machine, count, user_named=user_named)
    return _DevicesNow(machine, count, hosts, loaded_recipe, tuple(overrides))


def _replanned(
    flow: Flow,
    stored_plan: RunPlan,
    devices_now: _DevicesNow,
    changes: Sequence[str],
    *,
    step: int | None,
) -> RunPlan:
    """The stored plan with what another machine changes (each with a warning) and what the user overrides.

    `step`: as in `resume`. Raises UserError for a length below the steps that are already trained.
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

    # `moved` ends its list with ROUNDING_WARNING where another choice rounds differently. Where all choices are the
    # same, another CPU, GPU or PyTorch may still sum in another order.
    plan = stored_plan
    if changes:
        plan, choices = moved(stored_plan, fresh_plan)
        reasons = [*changes, *choices]
        if ROUNDING_WARNING not in choices:
            reasons.append(f"rounding may differ on this machine: {ROUNDING_WARNING}")
        for reason in reasons:
            flow.hub.emit(Warned(step=last_step(flow.folder), reason=reason))
    if devices_now.overrides:
        plan = prolonged(plan, fresh_plan, devices_now.overrides)

    # Where the user goes back to `step`, the steps after it do not count.
    trained_steps = max(saved_steps(flow.folder.checkpoints), default=0) if step is None else step
    if plan.train.steps is not None and plan.train.steps < trained_steps:
        raise UserError(
            f"the new length of {plan.train.steps:,} steps is less than the {trained_steps:,} steps already trained",
            where=f"train.{devices_now.loaded_recipe.recipe.train.length_key}",
            fix="set a longer one, or resume from an earlier checkpoint with --from STEP",
        )
    return plan


def _refuse_other_dataset(folder: RunFolder, loaded_recipe: LoadedRecipe, plan: RunPlan) -> None:
    """Raises UserError when the prepared dataset or its tokenizer is not the one of the run."""
    data = plan.data.prepared
    checkpoints = folder.checkpoints
    same_text = counted(read_manifest(data), loaded_recipe.recipe, data) == plan.dataset

    # Equal tokens may come from a tokenizer that has changed since. Each checkpoint has a copy of the run's tokenizer;
    # one of them may be damaged, so that one equal copy is enough.
    copies = [
        step_folder(checkpoints, step) / name
        for step in saved_steps(checkpoints)
        for name in TOKENIZERS
    ]
    saved_tokenizers = [path for path in copies if path.is_file()]
    current_tokenizers = {
        name: (data / name).read_bytes() for name in TOKENIZERS if (data / name).is_file()
    }
    same_tokenizer = not saved_tokenizers or any(
        path.read_bytes() == current_tokenizers.get(path.name) for path in saved_tokenizers
    )
    if not (same_text and same_tokenizer):
        raise UserError(
            "the prepared dataset has changed since the run started",
            where=str(data),
            fix="restore that folder, or start a new run with `bloomery train`",
        )


def _refuse_unusable_checkpoint(folder: RunFolder, step: int) -> None:
    """Raises UserError when the checkpoint of `step` does not exist or is damaged."""
    checkpoints = folder.checkpoints
    steps = saved_steps(checkpoints)
    problem = damage(step_folder(checkpoints, step)) if step in steps else "it does not exist"
    if problem is not None:
        raise UserError(
            f"cannot use the checkpoint of step {step}: {problem}",
            where=str(checkpoints),
            fix=f"use one of these steps: {', '.join(map(str, steps)) or 'none'}",
        )


def _go_back(flow: Flow, step: int) -> None:
    """Moves newer checkpoints into a separate folder, so that the run continues from `step`.

    Call it after everything that may refuse the resume. A refused one must not move checkpoints: the next resume would
    continue from `step` without being asked.
    """
    # After a Ctrl+C nothing is moved, either.
    flow.check()

    checkpoints = flow.folder.checkpoints
    newer_folders = [
        step_folder(checkpoints, newer_step)
        for newer_step in saved_steps(checkpoints)
        if newer_step > step
    ]
    newer_folders += [
        weights_folder(checkpoints, newer_step)
        for newer_step in best_weight_steps(checkpoints)
        if newer_step > step
    ]
    if newer_folders:
        aside = checkpoints / f"before-{time.strftime('%Y%m%d-%H%M%S')}"
        aside.mkdir()
        for newer_folder in newer_folders:
            newer_folder.rename(aside / newer_folder.name)
        flow.hub.emit(Warned(step=step, reason=f"checkpoints after step {step} moved to {aside}"))
