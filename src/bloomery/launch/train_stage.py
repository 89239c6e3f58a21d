"""Training in a child process: the ranks meet, agree on a checkpoint, and run the loop."""

import json
import os
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import final

from bloomery.check.products import product_problem
from bloomery.check.run_start import checked_plan
from bloomery.core.device import can, is_accelerator
from bloomery.core.errors import UserError
from bloomery.core.files import write_durably
from bloomery.core.run_folder import RunFolder
from bloomery.hardware.copy_rates import copy_rates
from bloomery.hardware.link_rates import store_host_link, store_links
from bloomery.hardware.machine import read_machine
from bloomery.infer.model_folder import clear_drafts
from bloomery.launch.deadline import Deadline
from bloomery.launch.exit_codes import DONE, STOPPED
from bloomery.launch.pausing import StepPauses
from bloomery.launch.stage_ends import HOSTS_FILE, STACKS
from bloomery.launch.stop_flag import StopFlag
from bloomery.monitor.events import Emit, Event, Phase, Resumed, Warned
from bloomery.parallel.environment import allow_descriptors, most_sockets, node_name
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.preflight import check_binding, check_ranks, links_of, meet
from bloomery.parallel.process_group import leave
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.train.loop import run
from bloomery.train.process import out_of_memory
from bloomery.train.recover import agreed_checkpoint
from bloomery.train.requests import Request, StepRequests
from bloomery.train.run_clock import Timer


def train_ranks(
    folder: RunFolder,
    emit: Emit,
    flag: StopFlag,
    *,
    resumed: bool,
    check_step: bool,
    notes: int | None,
    began: float,
) -> int:
    """The exit code of this rank: done, or stopped and saved. Raises UserError.

    `notes`: the descriptor where the parent reads the last collectives. `began`: when this process did.
    """
    # The ranks meet. From here on the first one alone writes events.
    plan = read_plan(folder.plan)
    rank = int(os.environ.get("RANK", "0"))
    deadline = Deadline(folder.path, rank) if plan.train.ranks > 1 else None
    mesh, slow_links = meet_ranks(plan, folder, rank, deadline, notes)
    emit = emit if mesh.first_rank else _no_event
    report_placement(mesh, emit)
    for slow_link in slow_links:
        emit(Warned(reason=slow_link))

    # They agree on the checkpoint that they begin with.
    if mesh.first_rank:
        clear_drafts(folder.checkpoints)
    checkpoint = agreed_checkpoint(
        mesh, folder.checkpoints, lambda reason: emit(Warned(reason=reason))
    )
    if resumed and checkpoint is None:
        emit(Resumed(path=""))

    # The device is checked while its memory is free; then the loop runs.
    surroundings = LoopSurroundings(folder.path, mesh, flag, deadline, emit)
    try:
        ready = checked_plan(
            plan,
            folder.path,
            surroundings.emit,
            mesh,
            resumes=checkpoint is not None,
            check_step=check_step,
        )
        outcome = run(
            ready.plan,
            run_dir=folder.path,
            emit=surroundings.emit,
            stop=surroundings.stop,
            requests=surroundings.requests,
            resume_from=checkpoint,
            timer=Timer(began),
            mesh=mesh,
            before_save=surroundings.before_save,
            build_seconds=ready.build_seconds,
        )
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        reason = str(error).partition(".")[0]  # a MemoryError of Python has none
        raise UserError(  # a smaller micro-batch does not help
            "out of memory outside a training step" + (f": {reason}" if reason else ""),
            where=f"model and data on {plan.train.device}",
            fix="close other programs that use its memory, or use a smaller model or optimizer.kind=adafactor",
        ) from error
    leave(mesh)
    return DONE if outcome == "done" else STOPPED


def meet_ranks(
    plan: RunPlan, folder: RunFolder, rank: int, deadline: Deadline | None, notes: int | None
) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh of all ranks, once they are connected and checked; and a sentence for each slow link."""
    if deadline is not None:
        deadline.meet()
        allow_descriptors(most_sockets(plan.train, rank), who=f"rank {rank} on {node_name()}")
    mesh = meet(plan.train)
    if notes is not None:
        mesh.clock.notes.write_to(notes)
    if deadline is not None:
        deadline.arm()

    if plan.train.stream != "off" and can(plan.train.device, "streams"):
        measure_host_link(plan, folder, mesh)
    preflight = check_ranks(mesh, plan, folder.path, product_problem=product_problem)
    if preflight is None:
        return mesh, ()
    mesh = replace(mesh, hosts=preflight.hosts)
    if preflight.link is not None:
        mesh = replace(mesh, sends_from_device=preflight.link.transport == "device")
    if mesh.first_rank:
        with suppress(OSError):  # the folder is missing without a deadline, or the disk is full
            write_durably(folder.path / STACKS / HOSTS_FILE, json.dumps(preflight.hosts))
        print(f"preflight: {preflight} ({preflight.seconds:.2f} s)", flush=True)
        if is_accelerator(plan.train.device) and folder.machine.is_file():
            # Later plans rank layouts by these rates.
            machine = read_machine(folder.machine)
            store_links(links_of(preflight, machine, day=date.today().isoformat()))
    return mesh, tuple(preflight.rates.slow_links())


def measure_host_link(plan: RunPlan, folder: RunFolder, mesh: Mesh) -> None:
    """Print how fast weights reach the device, beside what the plan assumes; later plans take the measured rates."""
    rates = copy_rates(plan.train.device)
    if not mesh.first_rank:
        return
    planned = f" (planned with {plan.stream.link})" if plan.stream and plan.stream.link else ""
    texts = [f"{name.replace('_', ' ')} {rate:.3g}" for name, rate in rates.items()]
    print(
        f"preflight: GB/s of copies from and to the host: {', '.join(texts)}{planned}", flush=True
    )
    if folder.machine.is_file():
        machine = read_machine(folder.machine)
        store_host_link(machine, rates, day=date.today().isoformat())


def report_placement(mesh: Mesh, emit: Emit) -> None:
    """Print which cores the ranks of this host are bound to, and warn where that slows them down."""
    binding = check_binding(mesh)
    if mesh.first_rank and binding is not None:
        for line in binding.lines:
            print(f"binding: {line}", flush=True)
        if binding.warning:
            emit(Warned(reason=binding.warning))


@final
class LoopSurroundings:
    """What the loop asks and tells between two steps: stop, pause and save requests, events, and its progress."""

    def __init__(
        self, run_dir: Path, mesh: Mesh, flag: StopFlag, deadline: Deadline | None, emit: Emit
    ) -> None:
        """`deadline`: of one of several ranks. `emit`: writes an event, on the first rank."""
        self._mesh = mesh
        self._flag = flag
        self._deadline = deadline
        self._emit = emit
        self._pause_file = RunFolder(run_dir).pause_request
        self.requests = StepRequests(self._own_request, mesh.all_reduce_max, flag.take_step)
        self._pauses = StepPauses(flag.watching(emit), self.requests.now)

    def _own_request(self) -> Request:
        # One rank looks for the file, as at many ranks all of them would ask one file server at each step.
        is_paused = self._mesh.first_rank and self._pause_file.exists()
        return Request(self._flag.stop_requested, is_paused, self._flag.take_save())

    def stop(self) -> bool:
        """Whether to stop, on all ranks alike; waits while a pause is asked."""
        should_stop = self._pauses.wait(self._progress)
        if should_stop and self._mesh.world > 1:
            # For the launcher, which ends ranks that never agree.
            self._emit(Phase(step=self._flag.step, name="saving"))
        return should_stop

    def emit(self, event: Event) -> None:
        if self._deadline is not None:
            self._deadline.note(event)
        self._pauses.emit(event)

    def before_save(self) -> None:
        """A save or a rewind may take longer than a step."""
        if self._deadline is not None:
            self._deadline.extend()

    def _progress(self) -> None:
        if self._deadline is not None:
            self._deadline.arm()


def _no_event(_event: Event) -> None:
    """One rank writes the events."""
