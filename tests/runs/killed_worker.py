"""The training child of a run with rewards. SIGKILL ends it, or its launcher, as `kill.json` next to the run states.

{"moment": "rollout", "call": 7, "victim": "worker"}: at the 7th place of that kind that this process gets to. Places
are before each forward of sampling ("rollout"), while a reward is waited for and around the file of completions
("reward"), before each micro-batch and around the update of the weights ("update"), and around each file of a
checkpoint ("save").
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from bloomery.core.child import loading
from bloomery.launch import worker

places = Counter()


def arrive(moment, wanted):
    """Kills where this is the place."""
    places[moment] += 1
    if moment != wanted["moment"] or places[moment] != wanted["call"]:
        return
    victim = os.getpid() if wanted["victim"] == "worker" else os.getppid()
    os.kill(victim, signal.SIGKILL)
    time.sleep(60)  # a child ends with its launcher


def lay_places(wanted):
    from bloomery.train import step
    from bloomery.train.checkpoint import saver as checkpoint
    from bloomery.train.optim.build import OptimizersContainer
    from bloomery.train.rl import rewards, rollout_source, sampler

    def around(owner, name, moment, *, before=True, after=False):
        work = getattr(owner, name)

        def work_with_places(*arguments, **named):
            if before:
                arrive(moment, wanted)
            result = work(*arguments, **named)
            if after:
                arrive(moment, wanted)
            return result

        setattr(owner, name, work_with_places)

    around(sampler.Agreement, "before_forward", "rollout")
    # Every worker has been asked by then.
    around(rewards.Rewards, "_answer", "reward")
    around(rollout_source, "write_completions", "reward", after=True)
    around(step, "compute_losses", "update")
    around(OptimizersContainer, "step", "update", after=True)
    for name in ("save_file", "copy_tokenizer", "put_in_place", "note_best"):
        around(checkpoint, name, "save", after=True)
    for name in ("seal", "damage", "remove_folder"):
        around(checkpoint, name, "save")


if __name__ == "__main__":
    if sys.argv[1] == "train":
        with loading():
            from bloomery.train import loop  # noqa: F401
        lay_places(json.loads((Path(sys.argv[2]).parent / "kill.json").read_text()))
    code = worker.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
