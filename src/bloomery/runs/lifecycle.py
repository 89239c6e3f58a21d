"""A run on this machine: prepare, plan, train in a child, end in a sentence. `start` and `resume` are all there is.

This process never imports torch: it stays quick to answer Ctrl+C, and survives whatever a driver does to its child.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

from pydantic import ValidationError

from bloomery.core.errors import UserError
from bloomery.core.units import GIB, format_bytes
from bloomery.data.prepare.pipeline import streams
from bloomery.data.prepare.prepare import finished, prepared_folder
from bloomery.data.shards.format import MANIFEST, read_manifest
from bloomery.hardware.detect.detect import detect
from bloomery.hardware.doctor.software import torch_missing
from bloomery.hardware.machine import Machine, read_machine
from bloomery.hardware.profile import build_profile
from bloomery.monitor.events import Event, Recovered, RunEnded, Warned, read_events
from bloomery.monitor.sinks import write_metrics
from bloomery.monitor.trackers import require
from bloomery.plan.advice.advise import advise, energy_kwh
from bloomery.plan.fallback import Fallback, blockwise, plainer, roomier, steadier
from bloomery.plan.gather import counted, fetch, gather, left_aside
from bloomery.plan.local import DETERMINISM, child_environment, wanted
from bloomery.plan.resolve import resolve
from bloomery.plan.rules.unsupported import refuse_several_devices
from bloomery.plan.store import dumped, read_plan, read_sealed, require_identity, write_plan, write_sealed
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import LoadedRecipe, dump_recipe, load_recipe
from bloomery.runs.event_hub import EventHub, commands_of, event_hub, last_step, remember
from bloomery.runs.folder import RunFolder, locked, new_run, propose_folder
from bloomery.runs.resume_plan import (
    UP_TO_ROUNDING,
    differences,
    moved,
    narrowed,
    prolonged,
    refuse_overrides,
    same_devices,
)
from bloomery.runs.signals import StopRequests, stop_requests
from bloomery.runs.supervisor import Ending, Stage, existing, failure, run_stage
from bloomery.runs.telemetry import sensing
from bloomery.runs.worker import DIVERGED, DONE, FAILED, MEMORY_FULL, STOPPED, UNSOUND
from bloomery.train.run import is_done, name_of, read_history
from bloomery.train.sealed import damage, saved_steps, step_folder

if TYPE_CHECKING:
    from bloomery.runs.generate import Model

INTERRUPTED = 130
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
MOST_RESTARTS = 3
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
# What a GPU's runtime, its libraries or the compiler say when a kernel fails, as opposed to a mistake of ours.
KERNEL = re.compile(
    r"(HIP|CUDA) error|\b(hip|cuda)Error\w+|HSA_STATUS_ERROR|Memory access fault|no kernel image|"
    r"\b(CUBLAS|HIPBLAS|ROCBLAS|CUDNN|MIOPEN)_STATUS_(?!ALLOC)|miopenStatus|"
    r"InductorError|BackendCompilerFailed|triton\.\w*[Cc]ompil\w*|PassManager::run failed|AcceleratorError"
)


@final
@dataclass(frozen=True)
class FallbackAfter:
    """A rung and why it is taken. `unasked`: training found its own memory full, and the rung costs only time."""

    fallback: Fallback
    reason: str
    unasked: bool = False


def next_fallback(plan: RunPlan, ending: Ending, *, bfloat16: bool = False) -> FallbackAfter | None:
    """None where a safer plan would not help: a mistake in the recipe, a full disk, text that is gone.

    `bfloat16`: whether the device multiplies it.
    """
    if ending.stage != "train":
        return None
    reason = None
    if ending.code == -signal.SIGKILL:
        reason = "the system killed the training process (SIGKILL), as it does when memory runs out"
    elif -ending.code in CRASHES:
        reason = f"the training process died of {signal.Signals(-ending.code).name}"
    elif ending.report is not None and ending.code in (MEMORY_FULL, UNSOUND, DIVERGED):
        reason = str(ending.report["problem"])
    elif ending.report is None and ending.code == FAILED:
        reason = next((line.strip()[:200] for line in reversed(ending.tail) if KERNEL.search(line)), None)
    if reason is None:
        return None
    if ending.code in (-signal.SIGKILL, MEMORY_FULL):
        fallback = roomier(plan, reason)
    elif ending.code == DIVERGED:
        fallback = steadier(plan, reason, bfloat16=bfloat16)
    else:
        fallback = (blockwise(plan, reason) if ending.code == UNSOUND else None) or plainer(plan, reason)
    return (
        None
        if fallback is None
        else FallbackAfter(fallback, reason, unasked=ending.code == MEMORY_FULL and fallback.only_time)
    )


def keep(folder: RunFolder, fallback_after: FallbackAfter) -> None:
    """For `bloomery resume RUN --recover`, which takes this rung before its first step."""
    kept = {
        "reason": fallback_after.reason,
        "action": fallback_after.fallback.action,
        "plan": fallback_after.fallback.plan.model_dump_json(),
    }
    write_sealed(folder.path, {folder.fallback.name: json.dumps(kept)})


def take_kept(folder: RunFolder) -> FallbackAfter | None:
    """The rung that the last attempt left, once; None when there is none, or it is not one of this version."""
    try:
        kept = json.loads(read_sealed(folder.fallback, fix="delete it, and resume without --recover"))
        found = FallbackAfter(Fallback(RunPlan.model_validate_json(kept["plan"]), kept["action"]), kept["reason"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError, ValidationError):
        found = None
    folder.fallback.unlink(missing_ok=True)
    return found


@final
@dataclass(frozen=True)
class Run:
    """A run that ended. `code`: 0 done, 75 stopped and resumable, 130 after a second Ctrl+C.

    `again`: it was done before, and nothing was left to do.
    """

    folder: Path
    code: int
    again: bool = False

    @property
    def name(self) -> str:
        """The argument for `bloomery resume`: a name under runs/, else a quoted path."""
        return name_of(self.folder)

    def events(self) -> list[Event]:
        """All events of events.jsonl. Raises UserError."""
        return list(read_events(self.folder / "events.jsonl"))

    def metrics(self) -> dict[str, Any]:
        """The summary in metrics.json. Raises UserError."""
        path = self.folder / "metrics.json"
        if not path.is_file():
            raise UserError("the run has no metrics.json", where=str(self.folder), fix=f"bloomery resume {self.name}")
        metrics: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return metrics

    def model(self, step: str = "best") -> "Model":
        """The trained model with its tokenizer. Raises UserError."""
        from bloomery.runs.generate import Model

        return Model.load(self.folder, step=step)

    def resume(self, *overrides: str, step: int | None = None, quiet: bool = False) -> "Run":
        """Resume, with overrides of the length, eval, sample, checkpoint and logging. Raises UserError."""
        return resume(self.folder, step=step, overrides=overrides, quiet=quiet)


class _Stopped(Exception):
    """Somebody asked to stop, and everything worth keeping is kept."""


Edit = Callable[[RunPlan], RunPlan]  # of a plan that was just made
Watch = Callable[[Event, StopRequests], None]  # hears every event; may ask to stop or to save, or raise


@final
@dataclass(frozen=True)
class _Flow:
    """What every stage needs."""

    folder: RunFolder
    lock: tuple[int, ...]
    hub: EventHub
    requests: StopRequests
    name: str
    recover: bool = False
    edit: Edit | None = None
    watch: Watch | None = None

    def stage(self, stage: Stage, words: Sequence[str], environment: dict[str, str], plan: RunPlan | None) -> Ending:
        """One child from start to end. What follows training is told while its view still stands."""
        self.check()
        with self.hub.shown(plan, self.name):
            with sensing(self.folder, plan) if plan else nullcontext() as saw:

                def told(event: Event) -> None:
                    self.hub.tell(event)
                    if saw is not None:
                        saw(event)
                    if self.watch is not None:
                        self.watch(event, self.requests)

                ending = run_stage(
                    stage,
                    self.folder,
                    words=words,
                    environment=environment,
                    inherited=self.lock,
                    requests=self.requests,
                    on_event=told,
                    on_line=self.hub.line,
                )
            if stage == "train" and ending.code in (DONE, STOPPED):
                self.requests.over = True
                self.end("done" if ending.code == DONE else "stopped")
            return ending

    def check(self) -> None:
        if self.requests.asked:
            raise _Stopped

    def end(self, status: str, error: str = "") -> None:
        """Write RunEnded, once, and metrics.json, which can be had from the events again and is not worth a failure."""
        if not self.hub.ended:
            self.hub.emit(RunEnded(step=last_step(self.folder), status=status, error=error))
            try:
                write_metrics(self.folder.path, self._planned())
            except OSError as error:
                self.hub.line(f"metrics.json could not be written: {error.strerror}")

    def _planned(self) -> dict[str, float | None]:
        """The plan's figures by the keys of metrics.json."""
        if not self.folder.plan.exists():
            return {}
        plan = read_plan(self.folder.plan)
        rate = plan.step_seconds.inverse(plan.train.tokens_per_step).value if plan.step_seconds is not None else None
        return {
            "max_steps": plan.train.steps,
            "tokens_per_second": rate,
            "seconds": plan.seconds.value if plan.seconds is not None else None,
            "peak_memory_gib": plan.memory.total / GIB,
            "energy_kwh": energy_kwh(plan, build_profile(read_machine(self.folder.machine))),
        }


def start(
    loaded: LoadedRecipe,
    *,
    run_dir: Path | None = None,
    devices: str | None = None,
    recover: bool = False,
    quiet: bool = False,
    edit: Edit | None = None,
    watch: Watch | None = None,
    planned: Callable[[RunPlan, Machine], None] | None = None,
) -> Run:
    """Train a recipe in a new folder (`runs/<recipe>-<date>-<time>`). Raises UserError when it fails.

    `planned` gets a first plan and may measure the machine for it: the run's own plan is made after it.
    `recover`: after a crash of a kernel, a driver or for want of memory, restart one rung safer, three times at most.
    What `watch` raises ends the training child by SIGKILL and passes through.
    """
    require(loaded.recipe.logging.libraries)
    path = propose_folder(loaded.name) if run_dir is None else run_dir
    fetch(loaded.recipe, weights=True)
    # What `bloomery plan` would refuse, and text that is not here: for such a run none is prepared, and no folder made.
    machine, data = narrowed(detect(), devices), prepared_folder(loaded, _workshop(path))
    if machine.software.torch is None:
        raise torch_missing(machine)
    if finished(loaded, data) is None:
        streams(loaded.recipe)  # the files are there
    refuse_several_devices(loaded.recipe)
    plan = resolve(loaded, gather(loaded, machine, prepared=data))
    if planned is not None:
        planned(plan, machine)
    with (
        stop_requests() as requests,
        new_run(loaded, path) as (folder, lock),
        event_hub(folder, quiet=quiet) as hub,
    ):
        flow = _Flow(folder, lock, hub, requests, loaded.name, recover, edit, watch)
        _allow_hooks(flow, loaded)
        return _concluded(flow, lambda: _from_the_beginning(flow, loaded, devices, resumed=False))


def resume(
    path: Path,
    *,
    step: int | None = None,
    overrides: Sequence[str] = (),
    devices: str | None = None,
    recover: bool = False,
    quiet: bool = False,
    watch: Watch | None = None,
) -> Run:
    """Go on with the run in `path` from its newest undamaged checkpoint, or from that of `step`.

    `overrides` may name the length, eval.*, sample.*, checkpoint.* and logging.*; `recover` is `start`'s, and begins
    one rung safer when the run died of what that may prevent. Raises UserError.
    """
    refuse_overrides(overrides)
    folder = existing(path)
    with stop_requests() as requests, locked(folder) as lock:
        require_identity(folder.path)
        read_sealed(folder.recipe)
        loaded = load_recipe(folder.recipe, overrides)
        history = read_history(folder.path)
        told_done = history.ended is not None and history.ended.status == "done"
        done = told_done and is_done(folder.path)
        if step is None and not overrides and done:
            return Run(folder.path, DONE, again=True)
        require(loaded.recipe.logging.libraries)
        with event_hub(folder, quiet=quiet) as hub:
            flow = _Flow(folder, lock, hub, requests, loaded.name, recover, watch=watch)
            if any(word.startswith("logging.trackers") for word in overrides):
                _allow_hooks(flow, loaded)
            if step is None and told_done and not done:
                reason = "events.jsonl says that this run is done, and its checkpoints do not: training continues"
                hub.emit(Warned(step=history.last_step, reason=reason))
            if history.problem is not None:
                hub.emit(Warned(step=history.last_step, reason=history.problem))
            return _concluded(flow, lambda: _onward(flow, loaded, step, overrides, devices))


def _allow_hooks(flow: _Flow, loaded: LoadedRecipe) -> None:
    """Those of a recipe that was just named, now and whenever the run resumes."""
    flow.hub.hooks = commands_of(loaded.recipe)
    try:
        remember(flow.folder.path, flow.hub.hooks)
    except OSError as error:
        reason = f"the hooks of this run will not start when it resumes: they cannot be noted in {error.filename}"
        flow.hub.emit(Warned(reason=f"{reason}: {error.strerror}"))


def _concluded(flow: _Flow, work: Callable[[], int]) -> Run:
    """Every way out ends in RunEnded."""
    try:
        code = work()
    except _Stopped:
        code = STOPPED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except UserError as error:
        if flow.hub.began or not flow.folder.events.exists():  # a refused word leaves a run as it ended
            flow.end("failed", error.problem)
        raise
    except BaseException as error:
        flow.end("failed", type(error).__name__)
        raise
    flow.requests.over = True
    flow.end("stopped")
    return Run(flow.folder.path, code)


def _from_the_beginning(flow: _Flow, loaded: LoadedRecipe, devices: str | None, *, resumed: bool) -> int:
    data = prepared_folder(loaded, _workshop(flow.folder.path))
    if finished(loaded, data) is None:
        _prepare(flow, data)
    flow.check()
    machine = narrowed(detect(), devices)
    facts = gather(loaded, machine, prepared=data)
    report = advise(loaded, resolve(loaded, facts), facts)
    plan = report.plan if flow.edit is None else flow.edit(report.plan)
    memory = plan.memory
    tight = f"the plan needs {format_bytes(memory.total)} of {format_bytes(memory.limit)} memory: it may not fit"
    for reason in (*report.warnings, *([] if memory.fits else [tight]), *left_aside(loaded.recipe)):
        flow.hub.emit(Warned(reason=reason))
    _write(flow.folder, plan, machine)
    return _train(flow, plan, machine, resumed=resumed)


def _write(
    folder: RunFolder, plan: RunPlan, machine: Machine, others: Mapping[str, str] = MappingProxyType({})
) -> None:
    """What a run is trained by, in files that are replaced together."""
    files = {folder.plan.name: dumped(plan), folder.machine.name: machine.model_dump_json(indent=1)}
    write_sealed(folder.path, {**others, **files})


def _workshop(run: Path) -> Path:
    """Where `prepared/` lies: beside `runs/`; for a run that lies elsewhere, in the working folder."""
    return run.parent.parent if run.parent.name == "runs" else Path.cwd()


def _prepare(flow: _Flow, data: Path) -> None:
    ending = flow.stage("prepare", ("--data", str(data)), dict(os.environ), None)
    flow.check()
    if ending.code != DONE:
        raise failure(ending, flow.folder, step=0)


def _onward(flow: _Flow, loaded: LoadedRecipe, step: int | None, overrides: Sequence[str], devices: str | None) -> int:
    folder = flow.folder
    if step is not None:
        _go_back(flow, step)
    gone = [path.name for path in (folder.plan, folder.machine) if not path.exists()]
    if gone:
        if saved_steps(folder.checkpoints):
            flow.hub.emit(Warned(reason=f"{' and '.join(gone)} missing: planned again from recipe.yaml"))
        write_sealed(folder.path, {folder.recipe.name: dump_recipe(loaded)})
        return _from_the_beginning(flow, loaded, devices, resumed=True)
    fallback_after = take_kept(folder)
    plan = _descend(flow, fallback_after) if fallback_after is not None and flow.recover else read_plan(folder.plan)
    if not (plan.data.prepared / MANIFEST).is_file():
        flow.hub.emit(Warned(reason=f"the prepared text is gone from {plan.data.prepared}: it is made again"))
        _prepare(flow, plan.data.prepared)
    _refuse_other_text(flow, loaded, plan)
    read_sealed(folder.machine, fix="delete it: resuming then plans again for the machine at hand")
    before = read_machine(folder.machine)
    machine = same_devices(detect(), before) if devices is None else narrowed(detect(), devices)
    changes = differences(before, machine)
    if changes or overrides:
        fresh = resolve(loaded, gather(loaded, machine, prepared=plan.data.prepared))
        if changes:
            plan, told = moved(plan, fresh)
            rounding = () if UP_TO_ROUNDING in told else (f"another machine may round differently: {UP_TO_ROUNDING}",)
            for reason in (*changes, *told, *rounding):
                flow.hub.emit(Warned(step=last_step(folder), reason=reason))
        plan = prolonged(plan, fresh, overrides) if overrides else plan
        steps = saved_steps(folder.checkpoints)
        if steps and plan.train.steps is not None and plan.train.steps < steps[-1]:
            raise UserError(
                f"the new length is {plan.train.steps:,} steps, and the run has already taken {steps[-1]:,}",
                where=f"train.{loaded.recipe.train.length_key}",
                fix="give a longer one, or go back first with --from STEP",
            )
        _write(folder, plan, machine, {folder.recipe.name: dump_recipe(loaded)})
    return _train(flow, plan, machine, resumed=True)


def _refuse_other_text(flow: _Flow, loaded: LoadedRecipe, plan: RunPlan) -> None:
    """Raises UserError when the prepared text is not what the run has learned from, or has another tokenizer."""
    data, checkpoints = plan.data.prepared, flow.folder.checkpoints
    same_text = counted(read_manifest(data), loaded.recipe.data, data) == plan.dataset
    saved = [step_folder(checkpoints, step) / name for step in saved_steps(checkpoints) for name in TOKENIZERS]
    used = [path for path in saved if path.is_file()]  # one may be damaged, all are copies of the same
    here = {name: (data / name).read_bytes() for name in TOKENIZERS if (data / name).is_file()}
    same_tokenizer = not used or any(path.read_bytes() == here.get(path.name) for path in used)
    if not (same_text and same_tokenizer):
        raise UserError(
            "the prepared text is not the one that the run has learned from: it was made again from other sources",
            where=str(data),
            fix="bring that folder back, or start a new run with `bloomery train`",
        )


def _train(flow: _Flow, plan: RunPlan, machine: Machine, *, resumed: bool) -> int:
    """Trains until the run ends; on a safer rung after each death that one may prevent, where it only costs time, and
    with `recover` where it changes numbers.
    """
    environment = _environment(flow, plan, machine)
    bfloat16, restarts = build_profile(machine).dtype.value == "bfloat16", 0
    while True:
        flow.folder.fallback.unlink(missing_ok=True)
        ending = flow.stage("train", ("--resumed",) if resumed else (), environment, plan)
        if ending.code in (DONE, STOPPED):
            return ending.code
        if flow.requests.asked and ending.code == -signal.SIGTERM:  # before it could listen: nothing was to save
            raise _Stopped
        # Training may have changed its plan.
        fallback_after = next_fallback(read_plan(flow.folder.plan), ending, bfloat16=bfloat16)
        if fallback_after is None or flow.requests.asked:
            break
        if not fallback_after.unasked and (not flow.recover or restarts == MOST_RESTARTS):
            break
        restarts += not fallback_after.unasked
        plan, resumed = _descend(flow, fallback_after), True
    died = failure(ending, flow.folder, step=last_step(flow.folder))
    if fallback_after is None:
        raise died
    keep(flow.folder, fallback_after)  # the last line is the command that goes on one rung safer
    tried = f" ({restarts} restarts did not help)" if restarts else ""
    command = f"`bloomery resume {flow.folder.name} --recover` goes on: {fallback_after.fallback.action}"
    fix = f"{died.fix}\n       {command}" if died.fix else command
    raise UserError(died.problem + tried, where=died.where, fix=fix, code=died.code)


def _descend(flow: _Flow, fallback_after: FallbackAfter) -> RunPlan:
    write_plan(fallback_after.fallback.plan, flow.folder.plan)
    step = last_step(flow.folder)
    flow.hub.emit(
        Recovered(step=step, reason=fallback_after.reason, action=f"restarted: {fallback_after.fallback.action}")
    )
    return fallback_after.fallback.plan


def _environment(flow: _Flow, plan: RunPlan, machine: Machine) -> dict[str, str]:
    """What must be set before torch is imported. What the user has set stays, and another value is warned of."""
    profile = build_profile(machine)
    plan = plan.model_copy(update={"environment": profile.environment.value})  # of what the user has set today
    environment = child_environment(plan, os.environ)
    conflicts = {name: (ours, reason) for name, (_, ours, reason) in profile.overridden.items()}
    fixed = {name: value for name, value in wanted(plan).items() if name in DETERMINISM}
    conflicts |= {name: (value, "train.deterministic needs it") for name, value in fixed.items()}
    place = "GPU" if profile.accelerator else "processor"
    flow.hub.line(f"training runs on the {place}: {profile.device.reason}")
    for name, (ours, reason) in conflicts.items():
        if os.environ.get(name, ours) != ours:
            said = f"your setting {name}={os.environ[name]} stays; this machine would get {ours}: {reason}"
            flow.hub.emit(Warned(step=last_step(flow.folder), reason=said))
    return environment


def _go_back(flow: _Flow, step: int) -> None:
    """Newer checkpoints move into a folder of their own, so that the run cannot fall into its former future."""
    folder = flow.folder.checkpoints
    steps = saved_steps(folder)
    wrong = damage(step_folder(folder, step)) if step in steps else "there is none"
    if wrong is not None:
        kept = ", ".join(map(str, steps)) or "none"
        raise UserError(
            f"the checkpoint of step {step} cannot be used: {wrong}", where=str(folder), fix=f"checkpoints: {kept}"
        )
    newer = [later for later in steps if later > step]
    if newer:
        aside = folder / f"before-{time.strftime('%Y%m%d-%H%M%S')}"
        aside.mkdir()
        for later in newer:
            step_folder(folder, later).rename(step_folder(aside, later))
        (folder / "best.json").unlink(missing_ok=True)
        flow.hub.emit(Warned(step=step, reason=f"the checkpoints after step {step} were moved to {aside}"))
