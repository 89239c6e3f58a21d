"""The stages of a run: one child from start to end, what a crash leads to, and the event at the end."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import final

from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder, exclude_hosts, resume_argument
from bloomery.core.signals import STOP_SIGNALS, StopRequests
from bloomery.core.units import GIB
from bloomery.hardware.machine import Machine, read_machine
from bloomery.hardware.profile import build_profile
from bloomery.infer.model_folder import (
    best_on_disk,
)
from bloomery.launch.exit_codes import DONE, FAILED, STOPPED
from bloomery.launch.launchers import Board
from bloomery.launch.stage_ends import Stage, StageResult, failure
from bloomery.launch.supervisor import run_stage
from bloomery.monitor.events import Event, Recovered, RunEnded, Warned
from bloomery.plan.advise import energy_kwh
from bloomery.plan.resolve import DETERMINISM, child_environment, plan_environment
from bloomery.plan.store import (
    dumped,
    read_plan,
    write_plan,
    write_sealed,
)
from bloomery.plan.types import RunPlan
from bloomery.runs.event_hub import EventHub, last_step
from bloomery.runs.resume_plan import (
    FallbackAfter,
    next_fallback,
    store_fallback,
)
from bloomery.runs.telemetry import sensing
from bloomery.view.metrics_json import write_metrics

INTERRUPTED = 130  # the exit code after a second Ctrl+C
MOST_RESTARTS = 3


@final
@dataclass(frozen=True)
class EndedRun:
    """A run that ended. `code`: 0 done, 75 stopped and resumable, 130 after a second Ctrl+C.

    `already_done`: nothing was left to do. `rank`: of this process, where a launcher started several.
    """

    folder: Path
    code: int
    already_done: bool = False
    rank: int = 0

    @property
    def name(self) -> str:
        """The argument for `bloomery resume`: a name under runs/, else a quoted path."""
        return resume_argument(self.folder)


class StopRequested(Exception):
    """A stop was requested, and everything is saved."""


Edit = Callable[[RunPlan], RunPlan]  # of a new plan
# Gets every event; may request a stop or a save, or raise.
Watch = Callable[[Event, StopRequests], None]


@final
@dataclass(frozen=True)
class Flow:
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
    check_step: bool = True  # compare a step on the GPU with the CPU before training
    stop_at: int | None = None  # save and stop after this step

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
            raise StopRequested

    def end(
        self, status: str, error: str = "", *, host: str = "", where: str = "", fix: str = ""
    ) -> None:
        """Write RunEnded, once, the hosts to leave out, and metrics.json.

        A failure of the latter is only logged: the events have it all.
        """
        if not self.hub.ended:
            self.hub.emit(
                RunEnded(
                    step=last_step(self.folder),
                    status=status,
                    error=error,
                    where=where,
                    fix=fix,
                    host=host,
                )
            )
            if host:
                exclude_hosts(self.folder, host.split(","))
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
            plan.step_seconds.inverse(plan.trained_tokens_per_step).value
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


def run_to_end(flow: Flow, work: Callable[[], int]) -> EndedRun:
    """Runs `work`; writes RunEnded in every case, and the exit code for the other ranks of a launcher."""
    code = FAILED
    try:
        run = _outcome(flow, work)
        code = run.code
        return run
    finally:
        if flow.board is not None:
            flow.board.conclude(code)
            flow.board.close()


def _outcome(flow: Flow, work: Callable[[], int]) -> EndedRun:
    try:
        if flow.board is not None:
            flow.board.refuse_taken_port()
        code = work()
    except StopRequested:
        code = STOPPED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except UserError as error:
        # After a usage error, the last RunEnded stays.
        if flow.hub.began or not flow.folder.events.exists():
            flow.end("failed", error.problem, host=error.host, where=error.where, fix=error.fix)
        raise
    except BaseException as error:
        flow.end("failed", type(error).__name__)
        raise
    flow.requests.over = True
    flow.end("stopped")
    return EndedRun(flow.folder.path, code)


def write_plan_and_machine(
    folder: RunFolder,
    plan: RunPlan,
    machine: Machine,
    other_files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes plan and machine, replaced together with `other_files`."""
    files = {folder.plan.name: dumped(plan), folder.machine.name: machine.model_dump_json(indent=1)}
    write_sealed(folder.path, {**other_files, **files})


def prepare_stage(flow: Flow, data: Path) -> None:
    ending = flow.stage("prepare", ("--data", str(data)), dict(os.environ), None)
    flow.check()
    if ending.code != DONE:
        raise failure(ending, flow.folder, step=0)


def train_stage(flow: Flow, plan: RunPlan, machine: Machine, *, resumed: bool) -> int:
    """Trains until the run ends. After a crash, restarts with a fallback: always where it only costs time, with
    `recover` also where it changes the training.
    """
    environment = training_environment(flow, plan, machine)
    bfloat16 = build_profile(machine).dtype.value == "bfloat16"
    restarts = 0
    while True:
        flow.folder.fallback.unlink(missing_ok=True)
        arguments = [
            *(("--resumed",) if resumed else ()),
            *(() if flow.check_step else ("--no-check",)),
            *(() if flow.stop_at is None else ("--stop-at", str(flow.stop_at))),
        ]
        ending = flow.stage("train", arguments, environment, plan)
        if ending.code in (DONE, STOPPED):
            return ending.code
        # The child ended before it handled signals, so there is nothing to save. Not only SIGTERM, which it is sent:
        # until it has a session of its own, a terminal's Ctrl+C and hangup reach it as well.
        if flow.requests.stop_requested and -ending.code in STOP_SIGNALS:
            raise StopRequested
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
        plan = fall_back(flow, fallback_after)
        resumed = True
    error = failure(ending, flow.folder, step=last_step(flow.folder))
    if fallback_after is None:
        raise error
    store_fallback(flow.folder, fallback_after)  # for the command in the last line
    restarts_text = f" (after {restarts} restarts)" if restarts else ""
    command = f"`bloomery resume {flow.folder.name} --recover` restarts with: {fallback_after.fallback.action}"
    fix = f"{error.fix}\n       {command}" if error.fix else command
    raise UserError(
        error.problem + restarts_text,
        where=error.where,
        fix=fix,
        code=error.code,
        host=error.host,
    )


def fall_back(flow: Flow, fallback_after: FallbackAfter) -> RunPlan:
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


def training_environment(flow: Flow, plan: RunPlan, machine: Machine) -> dict[str, str]:
    """Variables to set before torch is imported. The user's own values stay; warns where they differ."""
    profile = build_profile(machine)
    # The user's variables may have changed since the plan was made.
    plan = plan.model_copy(update={"environment": profile.environment.value})
    environment = child_environment(plan, os.environ)
    conflicts = {
        name: (planned, reason) for name, (_, planned, reason) in profile.overridden.items()
    }
    fixed = {name: value for name, value in plan_environment(plan).items() if name in DETERMINISM}
    conflicts |= {name: (value, "required by train.deterministic") for name, value in fixed.items()}
    flow.hub.line(
        f"training on the {'GPU' if profile.accelerator else 'CPU'}: {profile.device.reason}"
    )
    for name, (default, reason) in conflicts.items():
        if os.environ.get(name, default) != default:
            warning = f"{name}={os.environ[name]} is set; Bloomery would set {default}: {reason}"
            flow.hub.emit(Warned(step=last_step(flow.folder), reason=warning))
    return environment
