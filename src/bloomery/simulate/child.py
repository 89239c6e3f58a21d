"""The child of `simulate.run`: sends its progress, then the parts of each stage. Torch is imported after the parent
can stop it.
"""

import logging
import warnings

from bloomery.core.child import accept, loading, reply
from bloomery.plan.estimate.mesh import MeshSplit
from bloomery.plan.types import RunPlan


def main() -> None:
    """A step without stages counts as one stage."""
    job = accept()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    reply(job, {"doing": "PyTorch is starting"})

    with loading():
        from bloomery.simulate.step import simulated_stage, simulated_step, stage_positions

    plan = RunPlan.model_validate(job["plan"])
    split = MeshSplit(**job["split"])
    fused = job["fused"]

    def on_progress(doing: str) -> None:
        reply(job, {"doing": doing})

    if split.pipeline > 1:
        stages = [
            (
                position.index + 1,
                position.under_way(plan),
                simulated_stage(plan, position, fused=fused, on_progress=on_progress),
            )
            for position in stage_positions(split.pipeline)
        ]
    else:
        stages = [(1, 1, simulated_step(plan, fused=fused, split=split, on_progress=on_progress))]
    reply(job, {"stages": stages})


if __name__ == "__main__":
    main()
