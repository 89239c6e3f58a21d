"""A training child of several ranks without torch: it does what `acts.json` next to the run states for its rank.

An act is a list of words: "steps N" tells N steps (rank 0 only), "hang" sleeps outside every collective, "wait" sleeps
inside one, "notes N M NAME" has entered N collectives and finished M, "hosts A B" are those of all ranks, "stop" stops
the process as SIGSTOP does, "deaf", "exit CODE", "report TEXT CODE", "kill NUMBER", "save", "say TEXT". "late" never
begins; the others begin together.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from bloomery.core.run_folder import RunFolder
from bloomery.launch.deadline import Deadline
from bloomery.launch.stage_ends import HOSTS_FILE, STACKS
from bloomery.monitor.events import EventLog, Phase, StepDone
from bloomery.parallel.collective_notes import CollectiveNotes

INSIDE = "def all_reduce(worker):\n    worker()\n"  # with the file name of torch, as in a stack


def sleep() -> None:
    time.sleep(600)


def main() -> None:
    folder, rank = RunFolder(Path(sys.argv[2])), int(os.environ["RANK"])
    report = int(sys.argv[sys.argv.index("--report") + 1])
    notes = CollectiveNotes()
    notes.write_to(int(sys.argv[sys.argv.index("--notes") + 1]))
    acts_of_ranks = json.loads((folder.path.parent / "acts.json").read_text())
    acts = acts_of_ranks[str(rank)]
    if acts[0].startswith("late"):
        time.sleep(600)
    deadline = Deadline(folder.path, rank)
    awaited = [other for other, theirs in acts_of_ranks.items() if not theirs[0].startswith("late")]
    while not all((folder.path / STACKS / f"rank-{other}.txt").exists() for other in awaited):
        time.sleep(0.01)
    deadline.arm()
    with EventLog(folder.events) as emit:
        for act in acts:
            word, *rest = act.split(" ")
            if word == "steps":
                for step in range(1, int(rest[0]) + 1):
                    emit(
                        StepDone(
                            step=step,
                            loss=1.0,
                            learning_rate=1.0,
                            grad_norm=1.0,
                            tokens=step,
                            tokens_per_second=1.0,
                            sequences_per_second=1.0,
                            step_seconds=0.01,
                            data_wait_seconds=0.0,
                            memory_gib=0.0,
                        )
                    )
            elif word == "hang":
                sleep()
            elif word == "wait":
                scope: dict = {}
                exec(
                    compile(INSIDE, "/site-packages/torch/distributed/distributed_c10d.py", "exec"),
                    scope,
                )
                scope["all_reduce"](sleep)
            elif word == "notes":
                entered, finished, *name = rest
                for _ in range(int(entered)):
                    notes.enter(" ".join(name))
                for _ in range(int(finished)):
                    notes.finish(" ".join(name))
            elif word == "hosts":
                (folder.path / STACKS / HOSTS_FILE).write_text(json.dumps(rest))
            elif word == "deaf":  # as a rank inside a collective is
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                (folder.path / f"deaf-{rank}").touch()
            elif word == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif word == "nap":
                time.sleep(float(rest[0]))
            elif word == "say":
                print(" ".join(rest), flush=True)
            elif word == "save":
                emit(Phase(step=1, name="saving"))
            elif word == "kill":
                os.kill(os.getpid(), int(rest[0]))
            elif word == "exit":
                os._exit(int(rest[0]))
            elif word == "report":
                told = {"problem": rest[0], "where": "somewhere", "fix": "do it", "code": 1}
                os.write(report, json.dumps(told).encode())
                os._exit(int(rest[1]))
    os._exit(0)


if __name__ == "__main__":
    main()
