"""The child of `simulate.run`: sends its progress, then memory and traffic of each stage.

Torch is imported after the parent can stop the child.
"""

import logging
import warnings

from bloomery.core.child import accept, loading, reply
from bloomery.plan.estimate.mesh import MeshSplit
from bloomery.plan.types import RunPlan


def main() -> None:
    # Warnings of torch about fake tensors would reach the parent's terminal.
    job = accept()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    reply(job, {"doing": "PyTorch is starting"})

    with loading():
        from bloomery.simulate.step import simulated_stage, simulated_step

    plan = RunPlan.model_validate(job["plan"])
    split = MeshSplit(**job["split"] | {"layers": tuple(job["split"]["layers"])})
    fused = job["fused"]

    def on_progress(doing: str) -> None:
        reply(job, {"doing": doing})

    # A step without stages counts as one stage.
    if split.pipeline > 1:
        stages = [
            (index + 1, simulated_stage(plan, split, index, fused=fused, on_progress=on_progress))
            for index in job["stages"]
        ]
    else:
        stages = [(1, simulated_step(plan, fused=fused, split=split, on_progress=on_progress))]
    reply(job, {"stages": stages})


if __name__ == "__main__":
    main()
