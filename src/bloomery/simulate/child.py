"""The child that simulates: `python -m bloomery.simulate.child`. Torch is imported once it can be ended."""

import logging
import warnings

from bloomery.hardware.children import accept, tell


def main() -> None:
    """Tells what it is doing, and at the end the parts and the notes."""
    job = accept()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tell(job, {"doing": "PyTorch is starting"})

    from bloomery.plan.types import Plan
    from bloomery.simulate.notes import notes_of
    from bloomery.simulate.shards import Cut
    from bloomery.simulate.step import simulated_step

    plan = Plan.model_validate(job["plan"])
    cut, fused = Cut(*job["cut"]), job["fused"]
    parts = simulated_step(plan, fused=fused, cut=cut, say=lambda doing: tell(job, {"doing": doing}))
    tell(job, {"parts": parts, "notes": notes_of(plan, fused=fused, cut=cut)})


if __name__ == "__main__":
    main()
