"""`python many_ranks.py RUN_DIR RANKS`: a launch of many ranks on this machine, one process of Bloomery for each.

A launcher starts each process from nothing; here they are forked by one that has imported what they use, without torch.
Prints, as JSON, the exit code and the seconds at the end of every process.
"""

import json
import os
import sys
import time
from pathlib import Path

from bloomery.core.child import die_with_parent
from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder
from bloomery.core.run_lock import hold_run_lock
from bloomery.core.signals import stop_requests
from bloomery.launch import supervisor
from bloomery.launch.launchers import Board, RankLaunch, current_launch
from bloomery.launch.stage_ends import failure
from bloomery.launch.supervisor import run_stage
from bloomery.runs.follow import follow_rank_0


def lead(launch: RankLaunch, folder: RunFolder) -> int:
    """As rank 0: what `runs.flow` does between the plan and the end of the run."""
    board = Board(folder, launch)
    with stop_requests() as requests, hold_run_lock(folder) as lock:
        board.open()
        board.begin(resumed=False)
        ending = run_stage(
            "train",
            folder,
            environment=dict(os.environ),
            inherited=lock,
            requests=requests,
            on_event=lambda _: None,
            on_line=lambda _: None,
            board=board,
        )
        code = ending.code
        if code not in (0, 75):
            code = 1
            (folder.path.parent / "error.txt").write_text(str(failure(ending, folder, step=0)))
        board.conclude(code)
        board.close()
    return code


def main() -> None:
    folder, ranks = RunFolder(Path(sys.argv[1])), int(sys.argv[2])
    supervisor.WORKER = "light_rank_worker"
    launcher = os.getpid()
    processes = dict[int, int]()
    for rank in range(ranks):
        process = os.fork()
        if process:
            processes[process] = rank
            continue
        die_with_parent(launcher)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "TORCHELASTIC_RUN_ID": "many",
        }
        (folder.path.parent / f"parent-{rank}").write_text(str(os.getpid()))
        launch = current_launch()
        assert launch is not None
        code = 99
        try:
            code = (
                follow_rank_0(launch, folder.path, ",".join(["cpu"] * ranks)).code
                if rank
                else lead(launch, folder)
            )
        except UserError as error:
            (folder.path.parent / f"error-{rank}.txt").write_text(str(error))
            code = 2
        finally:
            os._exit(code)
    ends = {}
    while processes:
        process, status = os.wait()
        ends[processes.pop(process)] = (os.waitstatus_to_exitcode(status), time.time())
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
