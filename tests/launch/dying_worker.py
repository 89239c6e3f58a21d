"""The training child, on a machine whose kernels crash: it dies in a step as `deaths.json` beside the run says.

Each death is [condition on the plan, step, how]; how is a signal's number or a text that is raised.
"""

import json
import os
import sys
from pathlib import Path

from bloomery.hardware.children import loading
from bloomery.launch import worker


def mortal(take_step, deaths):
    def step(job, stream):
        facts = {"compile": job.plan.train.compile, "attention": job.plan.model.attention,
                 "precision": job.plan.train.precision, "rows": job.plan.train.micro_batch}  # fmt: skip
        for condition, number, how in deaths:
            if job.step + 1 >= number and all(facts[name] == value for name, value in condition.items()):
                if isinstance(how, int):
                    os.kill(os.getpid(), how)
                raise RuntimeError(how)
        return take_step(job, stream)

    return step


if __name__ == "__main__":
    if sys.argv[1] == "train":
        with loading():
            import torch._dynamo  # noqa: F401

            from bloomery.train import loop

        deaths = json.loads((Path(sys.argv[2]).parent / "deaths.json").read_text())
        loop.take_step = mortal(loop.take_step, deaths)
    ended = worker.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
