"""The life of a run: `start` prepares, plans and trains a recipe, `resume` trains on from a checkpoint.

Both prepare data and train in child processes (`runs.flow`). The parent never imports torch: it handles Ctrl+C at once,
and survives a crash of a driver in its child.

Under a launcher such as torchrun every rank runs this code. Rank 0 does all of it; the later ranks only `follow`.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bloomery.core.run_folder import RunFolder, existing
from bloomery.core.run_lock import hold_run_lock
from bloomery.core.signals import stop_requests
from bloomery.core.text import expanded
from bloomery.core.units import MIB, format_bytes
from bloomery.data.prepare.pipeline import streams
from bloomery.data.prepare.prepare import changed_source, finished_manifest, prepared_folder
from bloomery.data.prepare.split import file_roles, size_warnings
from bloomery.data.shards import MANIFEST, read_manifest
from bloomery.hardware.cpu_check import with_cpu_check
from bloomery.hardware.detect import detect
from bloomery.hardware.doctor.software import torch_missing
from bloomery.hardware.machine import Machine, read_machine
from bloomery.infer.model_folder import saved_steps
from bloomery.launch.exit_codes import DONE
from bloomery.launch.launchers import Board, began_by_job, current_launch, new_folder
from bloomery.monitor.events import Warned
from bloomery.monitor.sinks import require_libraries
from bloomery.plan.advise import advise
from bloomery.plan.checkpoints import checkpoint_bytes
from bloomery.plan.gather import fetch, gather, left_out_parts, unread_columns, unread_data_notes
from bloomery.plan.resolve import resolve
from bloomery.plan.reward_code import refuse_missing_files
from bloomery.plan.store import read_plan, read_sealed, require_identity, write_sealed
from bloomery.plan.types import RunPlan
from bloomery.plan.unsupported import refuse_recipe
from bloomery.recipe.load import LoadedRecipe, dump_recipe, load_recipe
from bloomery.recipe.schema import Recipe
from bloomery.runs.consent import commands_of, note_code, refuse_foreign_rewards, reward_files
from bloomery.runs.devices import chosen_devices, device_count
from bloomery.runs.event_hub import event_hub
from bloomery.runs.flow import (
    Edit,
    EndedRun,
    Flow,
    Watch,
    fall_back,
    prepare_stage,
    run_to_end,
    train_stage,
    write_plan_and_machine,
)
from bloomery.runs.follow import follow_rank_0, open_board, rank_machine, second_rank_0_explained
from bloomery.runs.held_sources import held_sources
from bloomery.runs.new_run import new_run, refuse_little_disk
from bloomery.runs.resume_inputs import (
    find_devices_now,
    go_back,
    refuse_other_dataset,
    refuse_unusable_checkpoint,
    replan,
)
from bloomery.runs.resume_plan import (
    plan_differences,
    refuse_other_recipe,
    refuse_overrides,
    take_fallback,
)
from bloomery.train.rl.reward_functions import refuse_unsent_functions
from bloomery.view.recorded_run import is_done, read_log_check

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
    measure: Callable[[RunPlan, Machine], None] | None = None,
    check_step: bool = True,
    stop_at: int | None = None,
) -> EndedRun:
    """Train a recipe in a new folder (`runs/<recipe>-<date>-<time>`). Raises UserError when it fails.

    A process that a launcher such as torchrun started is one rank: it joins the run of rank 0, whose folder has the
    name of the launcher's job. Started again by that job, it resumes.
    `measure` gets a first plan and may measure the machine for it (`bloomery train` times compilation); `edit` changes
    the run's own plan, made after that (the smoke test shortens it).
    `recover`: after a kernel or driver crash or out of memory, restart with safer settings, at most 3 times.
    `check_step`: compare a step on a GPU with the CPU before training, once per GPU and settings.
    `stop_at`: after this step the run is saved and stopped (code 75), as after Ctrl+C; a resume goes on exactly.
    `watch` gets every event. An exception of it kills the training child (SIGKILL) and passes through.
    """
    require_libraries(loaded_recipe.recipe.logging.libraries)
    launch = current_launch()
    path = new_folder(loaded_recipe.name) if run_dir is None else run_dir

    # A later rank trains only when rank 0 lets it.
    if launch is not None and launch.rank > 0:
        return follow_rank_0(launch, path, devices)

    # A job that began this run and was started again resumes it.
    if launch is not None:
        earlier_run = RunFolder(expanded(path).absolute())
        if began_by_job(earlier_run, launch):
            refuse_other_recipe(earlier_run, loaded_recipe, job=launch.job)
            return resume(
                path,
                devices=devices,
                recover=recover,
                quiet=quiet,
                watch=watch,
                check_step=check_step,
                own_recipe=loaded_recipe.recipe,
            )

    with ExitStack() as stack:
        stack.enter_context(held_sources(loaded_recipe.recipe))

        # The model is downloaded before the first plan, which reads its config and tokenizer from this disk. The
        # weights come with it, although only training reads them: a model that cannot be downloaded or has damaged
        # files is refused now, and not after hours of preparing data.
        refuse_recipe(loaded_recipe.recipe)
        refuse_unsent_functions(loaded_recipe.recipe.rewards)
        refuse_missing_files(loaded_recipe.recipe)
        fetch(loaded_recipe.recipe, weights=True)
        machine, gpus_per_host, hosts = training_devices(loaded_recipe, devices)
        if machine.software.torch is None:
            raise torch_missing(machine)

        # Where the dataset is not prepared yet, its files are opened once, which raises for missing ones. The user
        # reads which of them are trained on and which validate.
        data = prepared_folder(loaded_recipe, _workspace(path))
        if finished_manifest(loaded_recipe, data) is None:
            streams(loaded_recipe.recipe)
        roles = file_roles(loaded_recipe.recipe.data, loaded_recipe.recipe.objective.spec.data_kind)
        if roles is not None and not quiet:
            print(f"files      {roles}", file=sys.stderr)

        # The first of two plans raises what `bloomery plan` would report, before anything is prepared or created. Its
        # dataset may be an estimate from files. The run trains by the second plan (`_prepare_plan_train`), which counts
        # the prepared dataset and uses what `measure` has measured of the machine.
        facts = gather(loaded_recipe, machine, prepared=data)
        first_plan = resolve(loaded_recipe, facts, gpus=gpus_per_host, nodes=hosts)
        if measure is not None:
            measure(first_plan, machine)

        requests = stack.enter_context(stop_requests())
        with second_rank_0_explained(launch, path):
            folder, lock = stack.enter_context(new_run(loaded_recipe, path))
        hub = stack.enter_context(event_hub(folder, quiet=quiet, lines=launch is not None))
        flow = Flow(
            folder,
            lock,
            hub,
            requests,
            loaded_recipe.name,
            recover,
            edit=edit,
            watch=watch,
            board=open_board(folder, launch, hub),
            check_step=check_step,
            stop_at=stop_at,
        )
        # The user has just passed this recipe, and with it the code that it names.
        _allow_code(flow, loaded_recipe.recipe)
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
    check_step: bool = True,
    trust_code: bool = False,
    own_recipe: Recipe | None = None,
    stop_at: int | None = None,
) -> EndedRun:
    """Resume the run in `path` from its newest valid checkpoint, or from that of `step`.

    `overrides`: the length, eval.*, sample.*, checkpoint.*, logging.* and sizes of parallel.*. `recover`, `check_step`
    and `stop_at`: as in `start`; `recover` applies the fallback that the last crash stored. `trust_code`: the user
    asks for the Python rewards and the hooks that the run's recipe names. `own_recipe`: the user's, with the same
    rewards, where a job that began the run, or a sweep, is started again with it. Raises UserError.
    """
    refuse_overrides(overrides)
    launch = current_launch()
    if launch is not None and launch.rank > 0:
        return follow_rank_0(launch, path, devices)
    folder = existing(path)
    with ExitStack() as stack:
        requests = stack.enter_context(stop_requests())
        with second_rank_0_explained(launch, path):
            lock = stack.enter_context(hold_run_lock(folder))
        # The recipe must be the one that the run wrote. The first call raises where the run's digests of its files are
        # missing, the second where the digest of recipe.yaml is another: it was changed by hand.
        require_identity(folder.path)
        read_sealed(folder.recipe)
        loaded_recipe = load_recipe(folder.recipe, overrides)
        # The stored recipe may be somebody else's. One that is passed again, and an override, are this user's.
        names_hooks = any(override.startswith("logging.trackers") for override in overrides)
        asked_recipe = loaded_recipe.recipe if trust_code or names_hooks else own_recipe
        if not trust_code and own_recipe is None:
            refuse_foreign_rewards(folder.path, loaded_recipe.recipe, command="resume")
        refuse_unsent_functions(loaded_recipe.recipe.rewards)
        stack.enter_context(held_sources(loaded_recipe.recipe))

        # A run that is done has nothing to resume, unless the user goes back or overrides something. Its events report
        # that it is done; it is finished where the last checkpoint is on disk, too.
        log_check = read_log_check(folder.path)
        reported_done = log_check.end is not None and log_check.end.status == "done"
        is_finished = reported_done and is_done(folder.path)
        if step is None and not overrides and is_finished:
            if launch is not None:
                Board(folder, launch).conclude(DONE)  # the exit code, for which later ranks wait
            return EndedRun(folder.path, DONE, already_done=True)

        require_libraries(loaded_recipe.recipe.logging.libraries)
        with event_hub(folder, quiet=quiet, lines=launch is not None) as hub:
            board = open_board(folder, launch, hub)
            flow = Flow(
                folder,
                lock,
                hub,
                requests,
                loaded_recipe.name,
                recover,
                watch=watch,
                board=board,
                check_step=check_step,
                stop_at=stop_at,
            )
            if asked_recipe is not None:
                _allow_code(flow, asked_recipe)
            if step is None and reported_done and not is_finished:
                reason = "events.jsonl ends with status done, but the last checkpoint is missing: training continues"
                hub.emit(Warned(step=log_check.last_step, reason=reason))
            if log_check.problem is not None:
                hub.emit(Warned(step=log_check.last_step, reason=log_check.problem))
            return run_to_end(
                flow, lambda: _continue_training(flow, loaded_recipe, step, overrides, devices)
            )


def _allow_code(flow: Flow, recipe: Recipe) -> None:
    """Lets the run start the hooks and the Python rewards of the recipe, now and in later resumes (`runs.consent`).

    The event hub reports other hooks and does not start them.
    """
    flow.hub.hooks = commands_of(recipe)
    files = reward_files(recipe)
    try:
        note_code(flow.folder.path, commands=flow.hub.hooks, files=files)
    except OSError as error:
        if not (files or flow.hub.hooks):
            return
        code = " and ".join(
            ["Python rewards and tools"] * bool(files) + ["hooks"] * bool(flow.hub.hooks)
        )
        reason = f"cannot note that you asked for the {code} of this run: {error.filename}: {error.strerror}"
        later = "resume it with --trust-code, or set XDG_STATE_HOME to a folder that you can write"
        flow.hub.emit(Warned(reason=f"{reason}; {later}"))


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
    if finished_manifest(loaded_recipe, data) is None:
        prepare_stage(flow, data)
    flow.check()

    # The plan that the run trains by. The machine is read again: `measure` may have measured it since the first plan.
    # The report is the plan with suggestions and warnings.
    machine, gpus_per_host, hosts = training_devices(loaded_recipe, devices)
    facts = gather(loaded_recipe, machine, prepared=data)
    resolved_plan = resolve(loaded_recipe, facts, gpus=gpus_per_host, nodes=hosts)
    report = advise(loaded_recipe, resolved_plan, facts)
    plan = report.plan if flow.edit is None else flow.edit(report.plan)
    refuse_little_disk(
        flow.folder.path, round(checkpoint_bytes(plan) * CHECKPOINT_MARGIN) + CHECKPOINT_SLACK
    )

    # Nothing is refused any more; what the user should know about this run is a warning: a plan that may not fit, data
    # files that are not read, a very small dataset.
    warnings = [*report.warnings]
    if not plan.memory.fits:
        estimated = format_bytes(plan.memory.total)
        warnings.append(
            f"may not fit: {estimated} estimated, {format_bytes(plan.memory.limit)} available"
        )
    if plan.scoring is not None and not plan.scoring.memory.fits:
        scoring_memory = plan.scoring.memory
        estimated = format_bytes(scoring_memory.total)
        limit = format_bytes(scoring_memory.limit)
        warnings.append(f"what scores may not fit: {estimated} estimated, {limit} available")
    manifest = read_manifest(data)
    warnings += unread_data_notes(loaded_recipe.recipe)
    warnings += [f"not read: {note}" for note in unread_columns(loaded_recipe.recipe, manifest)]
    warnings += [
        f"the chat template {note}" for note in left_out_parts(loaded_recipe.recipe, manifest)
    ]
    sequence_length = loaded_recipe.recipe.data.sequence_length
    warnings += size_warnings(manifest, sequence_length=sequence_length)
    for warning in warnings:
        flow.hub.emit(Warned(reason=warning))

    if step is not None:
        go_back(flow, step)
    write_plan_and_machine(flow.folder, plan, machine)
    return train_stage(flow, plan, machine, resumed=resumed)


def training_devices(loaded_recipe: LoadedRecipe, devices: str | None) -> tuple[Machine, int, int]:
    """This machine with the devices that the recipe trains on, their number per host, and the number of hosts.

    Raises UserError.
    """
    # A launcher has started one process per device: all of them train, or the recipe is refused.
    launch = current_launch()
    if launch is not None:
        scoring = loaded_recipe.recipe.parallel.scoring_devices
        machine = rank_machine(launch, devices, scoring=scoring)
        device_count(loaded_recipe.recipe, machine, launch.world, started_by=launch.launcher)
        hosts = launch.hosts if machine.accelerators else 1  # CPUs are planned as one host
        return machine, launch.world // hosts, hosts

    # Without one the recipe may train on fewer devices than there are, unless the user has named them.
    machine, count = chosen_devices(detect(), devices)
    user_named = devices not in (None, "auto")
    machine, count = device_count(
        loaded_recipe.recipe, with_cpu_check(machine), count, user_named=user_named
    )
    return machine, count, 1


def _workspace(run: Path) -> Path:
    """The folder that has `prepared/`: the one that has `runs/`; for a run in another place, the working folder."""
    return run.parent.parent if run.parent.name == "runs" else Path.cwd()


def _continue_training(
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
        refuse_unusable_checkpoint(folder, step)

    # Without its plan or machine file the run is planned again; its checkpoints stay.
    missing_files = [path.name for path in (folder.plan, folder.machine) if not path.exists()]
    if missing_files:
        if saved_steps(folder.checkpoints):
            reason = f"missing {' and '.join(missing_files)}: planned again from recipe.yaml"
            flow.hub.emit(Warned(reason=reason))
        write_sealed(folder.path, {folder.recipe.name: dump_recipe(loaded_recipe)})
        return _prepare_plan_train(flow, loaded_recipe, devices, resumed=True, step=step)

    # The stored plan; with --recover the fallback, a copy of it with safer settings that the last crash left.
    # `take_fallback` removes it from the folder without --recover, too: it copies the plan before this resume, and a
    # --recover after a later crash must not undo what this resume changes, such as the length.
    fallback_after = take_fallback(folder)
    if fallback_after is not None and flow.recover:
        stored_plan = fall_back(flow, fallback_after)
    else:
        stored_plan = read_plan(folder.plan)

    # The dataset must be the one that the run has trained on so far.
    prepared = stored_plan.data.prepared
    if not (prepared / MANIFEST).is_file():
        flow.hub.emit(Warned(reason=f"prepared dataset missing: {prepared}; preparing it again"))
        prepare_stage(flow, prepared)
    refuse_other_dataset(folder, loaded_recipe, stored_plan)
    if (changed_file := changed_source(loaded_recipe.recipe, prepared)) is not None:
        reason = f"the dataset changed after it was prepared: {changed_file}"
        flow.hub.emit(Warned(reason=f"{reason}; the run goes on with the tokens prepared then"))

    # What has changed since: the machine, its devices, and what the user overrides. The stored machine must be as the
    # run wrote it, or the comparison would be with anything.
    read_sealed(folder.machine, fix="delete it; the run is then planned again for this machine")
    old_machine = read_machine(folder.machine)
    devices_now = find_devices_now(
        flow, loaded_recipe, stored_plan, old_machine, overrides, devices
    )
    changes = plan_differences(old_machine, devices_now.machine)
    if devices_now.count != stored_plan.train.ranks:
        changes.append(f"devices changed: {stored_plan.train.ranks} -> {devices_now.count}")
    sets_parallel = any(override.startswith("parallel.") for override in devices_now.overrides)
    if sets_parallel and not changes:
        # As many devices in another layout, which `replan` takes over only where something has changed.
        changes.append("parallel changed")
    plan = stored_plan
    if changes or devices_now.overrides:
        plan = replan(flow, stored_plan, devices_now, changes, step=step)

    # Nothing is refused any more. Checkpoints are moved before the plan is written: a kill in between must not leave a
    # plan that is shorter than the newest checkpoint.
    if step is not None:
        go_back(flow, step)
    if changes or devices_now.overrides:
        write_plan_and_machine(
            folder,
            plan,
            devices_now.machine,
            {folder.recipe.name: dump_recipe(devices_now.loaded_recipe)},
        )
    return train_stage(flow, plan, devices_now.machine, resumed=True)
