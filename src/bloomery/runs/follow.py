"""The ranks that a launcher such as torchrun started: rank 0 opens a board of messages, each later rank follows it."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from bloomery.core.errors import UserError, of_the_system
from bloomery.core.run_folder import RunFolder
from bloomery.core.run_lock import host_name
from bloomery.core.signals import stop_requests
from bloomery.core.text import expanded
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.launch.exit_codes import FAILED, STOPPED
from bloomery.launch.launchers import Board, RankLaunch
from bloomery.launch.stage_ends import StageResult
from bloomery.launch.supervisor import run_stage
from bloomery.monitor.sinks import LogFile
from bloomery.plan.resolve import child_environment
from bloomery.plan.store import read_plan
from bloomery.runs.devices import chosen_devices, devices_of_ranks
from bloomery.runs.event_hub import EventHub
from bloomery.runs.flow import EndedRun


def rank_machine(launch: RankLaunch, devices: str | None, *, scoring: int) -> Machine:
    """This machine with the devices of its ranks, and of those that score. Raises UserError."""
    machine, count = chosen_devices(detect(), devices)
    return devices_of_ranks(machine, count, launch.local_world, launch.launcher, scoring=scoring)


def open_board(folder: RunFolder, launch: RankLaunch | None, hub: EventHub) -> Board | None:
    """The board on which this process, rank 0 of a launcher, writes to the later ranks; None without a launcher."""
    if launch is None:
        return None
    hub.line(f"started by {launch}")
    print(f"launcher   {launch}", file=sys.stderr)
    board = Board(folder, launch)
    board.open()
    return board


@contextmanager
def second_rank_0_explained(launch: RankLaunch | None, path: Path) -> Iterator[None]:
    """Around locking the run folder: replaces its error by the cause, where this is a second rank 0 of one launch.

    Where two processes of a launch have RANK=0, the first one locks the folder and the second one fails: its error
    would be that the run is in use, but the mistake is the rank. Other errors pass unchanged, three seconds later.
    """
    try:
        yield
    except UserError:
        if launch is not None:
            with closing(Board(RunFolder(expanded(path).absolute()), launch)) as board:
                board.refuse_second_start()
        raise


def follow_rank_0(launch: RankLaunch, path: Path, devices: str | None) -> EndedRun:
    """Trains as a later rank of a launcher, as often as rank 0 starts it. Ends with its exit code. Raises UserError.

    The processes of a launch talk through the board. Rank 0 gives its messages there, and each later rank waits for
    them here: "train now" for each attempt (another one after a crash that rank 0 recovers from), and at last the exit
    code of the run: only that message has a `code`. A later rank leaves on the board how its attempt ended; rank 0
    reads that while it supervises its own.
    """
    folder = RunFolder(expanded(path).absolute())
    with closing(Board(folder, launch)) as board:
        return _follow(board, folder, devices)


def _follow(board: Board, folder: RunFolder, devices: str | None) -> EndedRun:
    """`follow_rank_0` on an open board."""
    launch = board.launch
    with stop_requests() as requests:
        while True:
            # A stop ends the wait for the first attempt. After it this rank waits for the exit code of rank 0: all
            # ranks of a run end with the same one.
            message = board.wait(
                lambda: requests.stop_requested and board.message is None, _say_waiting
            )
            if message is None or message.code is not None:
                break

            # Train by the plan that rank 0 has just written. Its environment variables are those of rank 0's host: this
            # host may need others.
            try:
                plan = read_plan(folder.plan)
                host_environment = build_profile(
                    rank_machine(launch, devices, scoring=plan.train.scoring_devices)
                ).environment.value
                plan = plan.model_copy(update={"environment": host_environment})
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
            except (UserError, OSError) as start_error:
                # This rank cannot even start. The board gives the reason to rank 0, which would wait for this rank.
                error = (
                    start_error
                    if isinstance(start_error, UserError)
                    else of_the_system(start_error)
                )
                report = {"problem": str(start_error), "where": "", "fix": "", "code": FAILED}
                if error is not None:
                    report |= {"problem": error.problem, "where": error.where, "fix": error.fix}
                board.leave(launch.rank, StageResult("train", FAILED, report, ()))
                raise
            board.leave(launch.rank, ending)

    # The wait is over for one of four reasons. The run has ended: this rank ends with the same exit code.
    if message is not None and message.code is not None:
        if message.code == FAILED:
            print(
                f"ended      by rank 0, which failed: see its error, or {folder.log}",
                file=sys.stderr,
            )
        return EndedRun(folder.path, message.code, rank=launch.rank)

    # This rank was stopped before its first attempt.
    if requests.stop_requested:
        board.leave(launch.rank, StageResult("train", STOPPED, None, ()))
        return EndedRun(folder.path, STOPPED, rank=launch.rank)

    # Rank 0 was never seen at work, or it has gone without a last message.
    if not board.met_rank_0:
        raise UserError(
            f"rank 0 did not come to rank {launch.rank} on {host_name()}",
            where=str(folder.path),
            fix=f"start all {launch.world} ranks; --run-dir must be the same folder on all hosts",
        )
    raise UserError(
        f"rank 0 has ended without a message to rank {launch.rank} on {host_name()}",
        where=str(folder.path),
        fix="read the error of rank 0; --run-dir must be the same folder on all hosts",
    )


def _say_waiting(text: str) -> None:
    print(f"waiting    {text}", file=sys.stderr, flush=True)
