"""The life of a run: prepare, plan, train in a child, end with an event. The entry points are `start` and `resume`.

The parent never imports torch: it handles Ctrl+C at once, and survives a crash of a driver in its child.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import final

from bloomery.core.errors import UserError, of_the_system
from bloomery.core.text import expanded
from bloomery.core.units import GIB, MIB, format_bytes
from bloomery.data.prepare.pipeline import streams
from bloomery.data.prepare.prepare import finished, prepared_folder
from bloomery.data.prepare.split import file_roles, size_warnings
from bloomery.data.shards import MANIFEST, read_manifest
from bloomery.hardware.cpu_check import with_check
from bloomery.hardware.detect import detect
from bloomery.hardware.doctor.software import torch_missing
from bloomery.hardware.machine import Machine, read_machine
from bloomery.hardware.profile import build_profile
from bloomery.monitor.events import Event, Recovered, RunEnded, Warned
from bloomery.monitor.sinks import LogFile, require, write_metrics
from bloomery.plan.advise import advise, checkpoint_bytes, energy_kwh
from bloomery.plan.gather import counted, facts_of, fetch, gather, left_aside
from bloomery.plan.resolve import DETERMINISM, child_environment, resolve, wanted
from bloomery.plan.store import (
    dumped,
    read_plan,
    read_sealed,
    require_identity,
    write_plan,
    write_sealed,
)
from bloomery.plan.types import RunPlan
from bloomery.plan.unsupported import refuse_pipeline, refuse_recipe
from bloomery.recipe.load import LoadedRecipe, dump_recipe, load_recipe
from bloomery.runs.devices import chosen_devices, device_count, devices_of_ranks, same_devices
from bloomery.runs.event_hub import EventHub, commands_of, event_hub, last_step, remember
from bloomery.runs.folder import RunFolder, host_name, locked, new_run, refuse_little_disk
from bloomery.runs.launchers import Board, Launch, began_by, current_launch, new_folder
from bloomery.runs.resume_plan import (
    UP_TO_ROUNDING,
    FallbackAfter,
    differences,
    moved,
    next_fallback,
    prolonged,
    refuse_other_recipe,
    refuse_overrides,
    store_fallback,
    take_fallback,
)
from bloomery.runs.signals import STOP_SIGNALS, StopRequests, stop_requests
from bloomery.runs.supervisor import Stage, StageResult, existing, failure, run_stage
from bloomery.runs.telemetry import sensing
from bloomery.runs.worker import DONE, FAILED, STOPPED
from bloomery.train.model_folder import (
    best_on_disk,
    best_weight_steps,
    damage,
    saved_steps,
    step_folder,
    weights_folder,
)
from bloomery.train.run import is_done, name_of, read_history

INTERRUPTED = 130
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
MOST_RESTARTS = 3
# Over the planned tensors: headers and JSON.
CHECKPOINT_MARGIN = 1.05
CHECKPOINT_SLACK = MIB


@final
@dataclass(frozen=True)
class EndedRun:
    """A run that ended. `code`: 0 done, 75 stopped and resumable, 130 after a second Ctrl+C.

    `again`: it was done before, and nothing was left to do. `rank`: of this process, where a launcher started several.
    """

    folder: Path
    code: int
    again: bool = False
    rank: int = 0

    @property
    def name(self) -> str:
        """The argument for `bloomery resume`: a name under runs/, else a quoted path."""
        return name_of(self.folder)


class _StopRequested(Exception):
    """A stop was requested, and everything is saved."""


Edit = Callable[[RunPlan], RunPlan]  # of a new plan
# Gets every event; may request a stop or a save, or raise.
Watch = Callable[[Event, StopRequests], None]


@final
@dataclass(frozen=True)
class _Flow:
    """State that the stages share."""

    folder: RunFolder
    lock: tuple[int, ...]
    hub: EventHub
    requests: StopRequests
    name: str
    recover: bool = False
    edit: Edit | None = None
    watch: Watch | None = None
    board: Board | None = None  # of the launcher that started this process as rank 0

    def stage(
        self,
        stage: Stage,
        arguments: Sequence[str],
        environment: dict[str, str],
        plan: RunPlan | None,
    ) -> StageResult:
        """One child from start to end. The final events are shown before the view closes."""
        self.check()
        if self.board is not None and plan is not None:
            if plan.train.ranks != self.board.launch.world:
                launch = self.board.launch
                problem = f"{launch.launcher} started {launch.world} ranks, and the plan has {plan.train.ranks}"
                raise UserError(
                    problem, where="parallel", fix=f"start {plan.train.ranks} processes", code=2
                )
            self.board.begin(resumed="--resumed" in arguments)
        with self.hub.shown(plan, self.name):
            with sensing(self.folder, plan) if plan else nullcontext() as sense:

                def on_event(event: Event) -> None:
                    self.hub.show(event)
                    if sense is not None:
                        sense(event)
                    if self.watch is not None:
                        self.watch(event, self.requests)

                ending = run_stage(
                    stage,
                    self.folder,
                    arguments=arguments,
                    environment=environment,
                    inherited=self.lock,
                    requests=self.requests,
                    on_event=on_event,
                    on_line=self.hub.line,
                    ranks=1 if plan is None else plan.train.ranks,
                    board=self.board,
                )
            if stage == "train" and ending.code in (DONE, STOPPED):
                self.requests.over = True
                self.end("done" if ending.code == DONE else "stopped")
            return ending

    def check(self) -> None:
        if self.requests.stop_requested:
            raise _StopRequested

    def end(self, status: str, error: str = "") -> None:
        """Write RunEnded, once, and metrics.json. A failure of the latter is only logged: the events have it all."""
        if not self.hub.ended:
            self.hub.emit(RunEnded(step=last_step(self.folder), status=status, error=error))
            try:
                write_metrics(
                    self.folder.path,
                    self._planned(),
                    best_saved=best_on_disk(self.folder.checkpoints),
                )
            except OSError as error:
                self.hub.line(f"cannot write metrics.json: {error.strerror}")

    def _planned(self) -> dict[str, float | None]:
        """The plan's figures by the keys of metrics.json."""
        if not self.folder.plan.exists():
            return {}
        plan = read_plan(self.folder.plan)
        rate = (
            plan.step_seconds.inverse(plan.train.tokens_per_step).value
            if plan.step_seconds is not None
            else None
        )
        return {
            "max_steps": plan.train.steps,
            "tokens_per_second": rate,
            "seconds": plan.seconds.value if plan.seconds is not None else None,
            "peak_memory_gib": plan.memory.total / GIB,
            "energy_kwh": energy_kwh(plan, build_profile(read_machine(self.folder.machine))),
        }


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
    `planned` gets a first plan and may measure the machine for it; the run's own plan comes after that.
    `recover`: after a kernel or driver crash or out of memory, restart with safer settings, at most 3 times.
    An exception of `watch` kills the training child (SIGKILL) and passes through.
    """
    require(loaded_recipe.recipe.logging.libraries)
    launch = current_launch()
    path = new_folder(loaded_recipe.name) if run_dir is None else run_dir
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
    refuse_recipe(loaded_recipe.recipe)
    refuse_pipeline(loaded_recipe.recipe)
    fetch(loaded_recipe.recipe, weights=True)
    # Before anything is prepared or created: errors that `bloomery plan` reports, and missing data.
    machine, count, hosts = training_devices(loaded_recipe, devices)
    data = prepared_folder(loaded_recipe, _workspace(path))
    if machine.software.torch is None:
        raise torch_missing(machine)
    if finished(loaded_recipe, data) is None:
        streams(loaded_recipe.recipe)  # raises for missing files
    roles = file_roles(loaded_recipe.recipe.data, loaded_recipe.recipe.objective.spec.data_kind)
    if roles is not None and not quiet:
        print(f"files      {roles}", file=sys.stderr)
    plan = resolve(
        loaded_recipe, gather(loaded_recipe, machine, prepared=data), gpus=count, nodes=hosts
    )
    if planned is not None:
        planned(plan, machine)
    with (
        stop_requests() as requests,
        _alone_at_rank_0(launch, path),
        new_run(loaded_recipe, path) as (folder, lock),
        event_hub(folder, quiet=quiet, lines=launch is not None) as hub,
    ):
        flow = _Flow(
            folder,
            lock,
            hub,
            requests,
            loaded_recipe.name,
            recover,
            edit,
            watch,
            _board(folder, launch, hub),
        )
        _allow_hooks(flow, loaded_recipe)
        return _ended(flow, lambda: _started(flow, loaded_recipe, devices, resumed=False))


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

    `overrides`: the length, eval.*, sample.*, checkpoint.* and logging.*. `recover`: as in `start`; applies the
    fallback that the last crash stored. Raises UserError.
    """
    refuse_overrides(overrides)
    launch = current_launch()
    if launch is not None and launch.rank:
        return _follow(launch, path, devices)
    folder = existing(path)
    with stop_requests() as requests, _alone_at_rank_0(launch, path), locked(folder) as lock:
        require_identity(folder.path)
        read_sealed(folder.recipe)
        loaded_recipe = load_recipe(folder.recipe, overrides)
        history = read_history(folder.path)
        reported_done = history.ended is not None and history.ended.status == "done"
        is_finished = reported_done and is_done(folder.path)
        if step is None and not overrides and is_finished:
            if launch is not None:
                Board(folder, launch).conclude(DONE)
            return EndedRun(folder.path, DONE, again=True)
        require(loaded_recipe.recipe.logging.libraries)
        with event_hub(folder, quiet=quiet, lines=launch is not None) as hub:
            board = _board(folder, launch, hub)
            flow = _Flow(
                folder, lock, hub, requests, loaded_recipe.name, recover, watch=watch, board=board
            )
            if any(word.startswith("logging.trackers") for word in overrides):
                _allow_hooks(flow, loaded_recipe)
            if step is None and reported_done and not is_finished:
                reason = "events.jsonl ends with status done, but the last checkpoint is missing: training continues"
                hub.emit(Warned(step=history.last_step, reason=reason))
            if history.problem is not None:
                hub.emit(Warned(step=history.last_step, reason=history.problem))
            return _ended(flow, lambda: _resumed(flow, loaded_recipe, step, overrides, devices))


def _allow_hooks(flow: _Flow, loaded_recipe: LoadedRecipe) -> None:
    """Allows the hooks of the recipe that the user named, now and in later resumes."""
    flow.hub.hooks = commands_of(loaded_recipe.recipe)
    try:
        remember(flow.folder.path, flow.hub.hooks)
    except OSError as error:
        reason = (
            f"the hooks of this run will not start after a resume: cannot write {error.filename}"
        )
        flow.hub.emit(Warned(reason=f"{reason}: {error.strerror}"))


@contextmanager
def _alone_at_rank_0(launch: Launch | None, path: Path) -> Iterator[None]:
    """Where an error in the block comes from another rank 0 of this launch, which has the run folder, that is said."""
    try:
        yield
    except UserError:
        if launch is not None:
            Board(RunFolder(expanded(path).absolute()), launch).refuse_second_start()
        raise


def _board(folder: RunFolder, launch: Launch | None, hub: EventHub) -> Board | None:
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
    """Trains as a later rank of a launcher, as often as rank 0 starts it. Ends with its exit code. Raises UserError."""
    folder = RunFolder(expanded(path).absolute())
    board = Board(folder, launch)
    with stop_requests() as requests:
        # After training, the exit code of the run is that of rank 0.
        while True:
            word = board.wait(lambda: requests.stop_requested and board.word is None, _say_waiting)
            if word is None or word.code is not None:
                break
            try:
                plan = read_plan(folder.plan)
                machine = _rank_machine(launch, devices)
                plan = plan.model_copy(
                    update={"environment": build_profile(machine).environment.value}
                )
                with closing(LogFile(board.path / f"rank-{launch.rank}.log")) as log:
                    ending = run_stage(
                        "train",
                        folder,
                        arguments=("--resumed",) if word.resumed else (),
                        environment=child_environment(plan, os.environ),
                        inherited=(),
                        requests=requests,
                        on_event=lambda _: None,
                        on_line=log.text,
                        board=board,
                    )
            except (UserError, OSError) as failed:  # rank 0 would wait for this one
                error = failed if isinstance(failed, UserError) else of_the_system(failed)
                report = {"problem": str(failed), "where": "", "fix": "", "code": FAILED}
                if error is not None:
                    report |= {"problem": error.problem, "where": error.where, "fix": error.fix}
                board.leave(launch.rank, StageResult("train", FAILED, report, ()))
                raise
            board.leave(launch.rank, ending)
    if word is not None and word.code is not None:
        if word.code == FAILED:
            print(
                f"ended      by rank 0, which failed: see its error, or {folder.log}",
                file=sys.stderr,
            )
        return EndedRun(folder.path, word.code, rank=launch.rank)
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


def _ended(flow: _Flow, work: Callable[[], int]) -> EndedRun:
    """Runs `work`; writes RunEnded in every case, and the exit code for the other ranks of a launcher."""
    code = FAILED
    try:
        run = _outcome(flow, work)
        code = run.code
        return run
    finally:
        if flow.board is not None:
            flow.board.conclude(code)
            flow.board.assembly.end()


def _outcome(flow: _Flow, work: Callable[[], int]) -> EndedRun:
    try:
        if flow.board is not None:
            flow.board.refuse_taken_port()
        code = work()
    except _StopRequested:
        code = STOPPED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except UserError as error:
        # After a usage error, the last RunEnded stays.
        if flow.hub.began or not flow.folder.events.exists():
            flow.end("failed", error.problem)
        raise
    except BaseException as error:
        flow.end("failed", type(error).__name__)
        raise
    flow.requests.over = True
    flow.end("stopped")
    return EndedRun(flow.folder.path, code)


def _started(
    flow: _Flow, loaded_recipe: LoadedRecipe, devices: str | None, *, resumed: bool
) -> int:
    data = prepared_folder(loaded_recipe, _workspace(flow.folder.path))
    if finished(loaded_recipe, data) is None:
        _prepare(flow, data)
    flow.check()
    machine, count, hosts = training_devices(loaded_recipe, devices)
    facts = gather(loaded_recipe, machine, prepared=data)
    report = advise(loaded_recipe, resolve(loaded_recipe, facts, gpus=count, nodes=hosts), facts)
    plan = report.plan if flow.edit is None else flow.edit(report.plan)
    refuse_little_disk(
        flow.folder.path, round(checkpoint_bytes(plan) * CHECKPOINT_MARGIN) + CHECKPOINT_SLACK
    )
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
    _write(flow.folder, plan, machine)
    return _train(flow, plan, machine, resumed=resumed)


def _write(
    folder: RunFolder,
    plan: RunPlan,
    machine: Machine,
    other_files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes plan and machine, replaced together with `others`."""
    files = {folder.plan.name: dumped(plan), folder.machine.name: machine.model_dump_json(indent=1)}
    write_sealed(folder.path, {**other_files, **files})


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


def _prepare(flow: _Flow, data: Path) -> None:
    ending = flow.stage("prepare", ("--data", str(data)), dict(os.environ), None)
    flow.check()
    if ending.code != DONE:
        raise failure(ending, flow.folder, step=0)


def _resumed(
    flow: _Flow,
    loaded_recipe: LoadedRecipe,
    step: int | None,
    overrides: Sequence[str],
    devices: str | None,
) -> int:
    """Trains on from the newest checkpoint, or from that of `step`. The plan stays as far as this machine allows."""
    folder = flow.folder
    if step is not None:
        _go_back(flow, step)

    # Without its plan the run is planned again; what stands in the checkpoints stays.
    missing_files = [path.name for path in (folder.plan, folder.machine) if not path.exists()]
    if missing_files:
        if saved_steps(folder.checkpoints):
            reason = f"missing {' and '.join(missing_files)}: planned again from recipe.yaml"
            flow.hub.emit(Warned(reason=reason))
        write_sealed(folder.path, {folder.recipe.name: dump_recipe(loaded_recipe)})
        return _started(flow, loaded_recipe, devices, resumed=True)

    # The stored plan, or the safer one that the last crash left for --recover.
    fallback_after = take_fallback(folder)
    if fallback_after is not None and flow.recover:
        stored_plan = _fall_back(flow, fallback_after)
    else:
        stored_plan = read_plan(folder.plan)

    # The dataset must be the one that the run has trained on so far.
    prepared = stored_plan.data.prepared
    if not (prepared / MANIFEST).is_file():
        flow.hub.emit(Warned(reason=f"prepared dataset missing: {prepared}; preparing it again"))
        _prepare(flow, prepared)
    _refuse_other_dataset(flow, loaded_recipe, stored_plan)

    # What has changed since: the machine, its devices, and what the user overrides.
    read_sealed(folder.machine, fix="delete it; the run is then planned again for this machine")
    old_machine = read_machine(folder.machine)
    devices_now = _devices_now(flow, loaded_recipe, stored_plan, old_machine, overrides, devices)
    changes = differences(old_machine, devices_now.machine)
    if devices_now.count != stored_plan.train.ranks:
        changes.append(f"devices changed: {stored_plan.train.ranks} -> {devices_now.count}")
    elif any(word.startswith("parallel.") for word in devices_now.overrides) and not changes:
        changes.append("parallel changed")
    plan = stored_plan
    if changes or devices_now.overrides:
        plan = _replanned(flow, stored_plan, devices_now, changes)
        _write(
            folder,
            plan,
            devices_now.machine,
            {folder.recipe.name: dump_recipe(devices_now.loaded_recipe)},
        )
    return _train(flow, plan, devices_now.machine, resumed=True)


@dataclass(frozen=True)
class _DevicesNow:
    """What a resumed run trains on: `count` devices on `hosts` hosts, and the recipe with `overrides` for them."""

    machine: Machine
    count: int
    hosts: int
    loaded_recipe: LoadedRecipe
    overrides: tuple[str, ...]


def _devices_now(
    flow: _Flow,
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

    # Sizes of `parallel` in the recipe were those of the devices before.
    if count != plan.train.ranks and not any(word.startswith("parallel.") for word in overrides):
        overrides = (*overrides, "parallel.replicate=auto", "parallel.shard=auto")
        loaded_recipe = load_recipe(flow.folder.recipe, overrides)
    if launch is None:
        user_named = devices not in (None, "auto")
        machine, count = device_count(loaded_recipe.recipe, machine, count, user_named=user_named)
    return _DevicesNow(machine, count, hosts, loaded_recipe, tuple(overrides))


def _replanned(
    flow: _Flow, stored_plan: RunPlan, devices_now: _DevicesNow, changes: Sequence[str]
) -> RunPlan:
    """The stored plan with what another machine changes (each with a warning) and what the user overrides.

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
    plan = stored_plan
    if changes:
        plan, choices = moved(stored_plan, fresh_plan)
        reasons = [*changes, *choices]
        if UP_TO_ROUNDING not in choices:
            reasons.append(f"rounding may differ on this machine: {UP_TO_ROUNDING}")
        for reason in reasons:
            flow.hub.emit(Warned(step=last_step(flow.folder), reason=reason))
    if devices_now.overrides:
        plan = prolonged(plan, fresh_plan, devices_now.overrides)

    steps = saved_steps(flow.folder.checkpoints)
    if steps and plan.train.steps is not None and plan.train.steps < steps[-1]:
        raise UserError(
            f"the new length of {plan.train.steps:,} steps is less than the {steps[-1]:,} steps already trained",
            where=f"train.{devices_now.loaded_recipe.recipe.train.length_key}",
            fix="set a longer one, or resume from an earlier checkpoint with --from STEP",
        )
    return plan


def _refuse_other_dataset(flow: _Flow, loaded_recipe: LoadedRecipe, plan: RunPlan) -> None:
    """Raises UserError when the prepared dataset or its tokenizer is not the one of the run."""
    data = plan.data.prepared
    checkpoints = flow.folder.checkpoints
    same_text = counted(read_manifest(data), loaded_recipe.recipe.data, data) == plan.dataset
    saved = [
        step_folder(checkpoints, step) / name
        for step in saved_steps(checkpoints)
        for name in TOKENIZERS
    ]
    # One copy may be damaged; all are copies of the same tokenizer.
    saved_tokenizers = [path for path in saved if path.is_file()]
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


def _train(flow: _Flow, plan: RunPlan, machine: Machine, *, resumed: bool) -> int:
    """Trains until the run ends. After a crash, restarts with a fallback: always where it only costs time, with
    `recover` also where it changes the training.
    """
    environment = _environment(flow, plan, machine)
    bfloat16 = build_profile(machine).dtype.value == "bfloat16"
    restarts = 0
    while True:
        flow.folder.fallback.unlink(missing_ok=True)
        ending = flow.stage("train", ("--resumed",) if resumed else (), environment, plan)
        if ending.code in (DONE, STOPPED):
            return ending.code
        # The child ended before it handled signals, so there is nothing to save. Not only SIGTERM, which it is sent:
        # until it has a session of its own, a terminal's Ctrl+C and hangup reach it as well.
        if flow.requests.stop_requested and -ending.code in STOP_SIGNALS:
            raise _StopRequested
        # Read again: training may have changed its plan.
        fallback_after = next_fallback(read_plan(flow.folder.plan), ending, bfloat16=bfloat16)
        if fallback_after is None or flow.requests.stop_requested:
            break
        # One rank alone also recovers by itself, without a restart: that is not counted.
        is_counted = not fallback_after.unasked or plan.train.ranks > 1
        if (is_counted and restarts == MOST_RESTARTS) or (
            not fallback_after.unasked and not flow.recover
        ):
            break
        restarts += is_counted
        plan = _fall_back(flow, fallback_after)
        resumed = True
    error = failure(ending, flow.folder, step=last_step(flow.folder))
    if fallback_after is None:
        raise error
    store_fallback(flow.folder, fallback_after)  # for the command in the last line
    restarts_text = f" (after {restarts} restarts)" if restarts else ""
    command = f"`bloomery resume {flow.folder.name} --recover` restarts with: {fallback_after.fallback.action}"
    fix = f"{error.fix}\n       {command}" if error.fix else command
    raise UserError(error.problem + restarts_text, where=error.where, fix=fix, code=error.code)


def _fall_back(flow: _Flow, fallback_after: FallbackAfter) -> RunPlan:
    """The plan with safer settings becomes plan.json, which the next child trains by."""
    write_plan(fallback_after.fallback.plan, flow.folder.plan)
    step = last_step(flow.folder)
    flow.hub.emit(
        Recovered(
            step=step,
            reason=fallback_after.reason,
            action=f"restarted: {fallback_after.fallback.action}",
        )
    )
    return fallback_after.fallback.plan


def _environment(flow: _Flow, plan: RunPlan, machine: Machine) -> dict[str, str]:
    """Variables to set before torch is imported. The user's own values stay; warns where they differ."""
    profile = build_profile(machine)
    # The user's variables may have changed since the plan was made.
    plan = plan.model_copy(update={"environment": profile.environment.value})
    environment = child_environment(plan, os.environ)
    conflicts = {
        name: (planned, reason) for name, (_, planned, reason) in profile.overridden.items()
    }
    fixed = {name: value for name, value in wanted(plan).items() if name in DETERMINISM}
    conflicts |= {name: (value, "required by train.deterministic") for name, value in fixed.items()}
    flow.hub.line(
        f"training on the {'GPU' if profile.accelerator else 'CPU'}: {profile.device.reason}"
    )
    for name, (default, reason) in conflicts.items():
        if os.environ.get(name, default) != default:
            warning = f"{name}={os.environ[name]} is set; Bloomery would set {default}: {reason}"
            flow.hub.emit(Warned(step=last_step(flow.folder), reason=warning))
    return environment


def _go_back(flow: _Flow, step: int) -> None:
    """Moves newer checkpoints into a separate folder, so that the run continues from `step`."""
    folder = flow.folder.checkpoints
    steps = saved_steps(folder)
    problem = damage(step_folder(folder, step)) if step in steps else "it does not exist"
    if problem is not None:
        fix = f"use one of these steps: {', '.join(map(str, steps)) or 'none'}"
        raise UserError(
            f"cannot use the checkpoint of step {step}: {problem}", where=str(folder), fix=fix
        )
    newer = [step_folder(folder, newer_step) for newer_step in steps if newer_step > step]
    newer += [
        weights_folder(folder, newer_step)
        for newer_step in best_weight_steps(folder)
        if newer_step > step
    ]
    if newer:
        aside = folder / f"before-{time.strftime('%Y%m%d-%H%M%S')}"
        aside.mkdir()
        for newer_step in newer:
            newer_step.rename(aside / newer_step.name)
        flow.hub.emit(Warned(step=step, reason=f"checkpoints after step {step} moved to {aside}"))
