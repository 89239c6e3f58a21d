"""The training child, on a machine whose kernels crash: it dies in a step as `deaths.json` next to the run states.

Each death is [condition on the plan, step, how]; how is a signal's number, a text that is raised, "memory" (each step's
forward then finds none), "NaN" (each loss is), "slow" (from that step on each takes longer) or "hold" (the rank does
not go on to the next collective).
"""

import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from bloomery.core.child import loading
from bloomery.launch import worker


def mortal(take_step, deaths):
    def step(job, stream):
        train, optimizer = job.plan.train, job.plan.optimizer
        facts = {
            "compile": train.compile,
            "attention": job.plan.model.attention,
            "precision": train.precision,
            "rows": train.micro_batch_size,
            "checkpointing": train.activation_checkpointing,
            "state_dtype": optimizer.state_dtype,
            "rate": optimizer.learning_rate,
            "rank": int(os.environ.get("RANK", "0")),
        }
        for condition, number, how in deaths:
            if job.step + 1 >= number and all(
                facts[name] == value for name, value in condition.items()
            ):
                if isinstance(how, int):
                    os.kill(os.getpid(), how)
                if how == "slow":
                    time.sleep(0.3)
                    continue
                if how == "hold":
                    time.sleep(600)
                if how not in ("memory", "NaN"):
                    raise RuntimeError(how)
                with failing(how):
                    return take_step(job, stream)
        return take_step(job, stream)

    return step


@contextmanager
def failing(how):
    """Of a step's losses: the real one of each micro-batch, times NaN, or no memory for it."""
    import torch

    from bloomery.train import step as steps

    real = steps.compute_losses

    def compute_losses(*args, **kwargs):
        if how == "memory":
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ..."
            )
        return [parts._replace(total=parts.total * float("nan")) for parts in real(*args, **kwargs)]

    steps.compute_losses = compute_losses
    try:
        yield
    finally:
        steps.compute_losses = real


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
