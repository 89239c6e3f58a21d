"""The child that simulates: `python -m bloomery.simulate.child`. Torch is imported once it can be ended."""

import logging
import warnings

from bloomery.core.child import accept, loading, tell


def main() -> None:
    """Tells what it is doing, and at the end the parts, of each stage if there are several, and the notes."""
    job = accept()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tell(job, {"doing": "PyTorch is starting"})

    with loading():
        from bloomery.plan.types import Plan
        from bloomery.simulate.notes import notes_of
        from bloomery.simulate.shards import Cut
        from bloomery.simulate.stages import simulated_stages
        from bloomery.simulate.step import simulated_step

    plan = Plan.model_validate(job["plan"])
    cut, fused = Cut(*job["cut"]), job["fused"]

    def say(doing: str) -> None:
        tell(job, {"doing": doing})

    if cut.pipeline > 1:
        found: dict[str, object] = {"stages": simulated_stages(plan, cut.pipeline, fused=fused, say=say)}
    else:
        found = {"parts": simulated_step(plan, fused=fused, cut=cut, say=say)}
    tell(job, {**found, "notes": notes_of(plan, fused=fused, cut=cut)})


if __name__ == "__main__":
    main()
