"""Bloomery's own loop, paced: `side_bloomery.py FOLDER OVERRIDE...`; everything else is as the plan decides."""

import sys
import tempfile
from pathlib import Path

from paced import Ended, Pace

from bloomery.hardware.detect import detect
from bloomery.monitor.events import Event, StepDone
from bloomery.plan.gather import gather
from bloomery.plan.resolve import resolve
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe

RECIPE = "bench.yaml"


def planned(folder: Path, overrides: list[str]) -> RunPlan:
    """The plan of the folder's recipe for this machine, as `bloomery train` would make it."""
    loaded = load_recipe(folder / RECIPE, overrides)
    prepared = folder / "prepared"
    return resolve(loaded, gather(loaded, detect(), prepared=prepared))


def played(metrics: dict[str, float]) -> dict[str, float] | None:
    """Calls and turns of an episode, where the step plays some."""
    if "tools/turns" not in metrics:
        return None
    return {"calls": metrics["tools/call_frequency"], "turns": metrics["tools/turns"]}


def main() -> None:
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]
    pace, plan = Pace(), planned(folder, overrides)
    from bloomery.train.loop import run

    in_step = False  # a rollout asks between its forwards, too, whether it shall stop

    def emit(event: Event) -> None:
        nonlocal in_step
        if isinstance(event, StepDone):
            pace.stop()
            pace.tell(event.loss, event.loss_tokens, event.rollout_seconds, played(event.metrics))
            in_step = False

    def stop() -> bool:
        nonlocal in_step
        if not in_step:
            pace.begin()
            in_step = True
        return False

    with tempfile.TemporaryDirectory() as place:
        try:
            run(plan, run_dir=Path(place), emit=emit, stop=stop)
        except Ended:
            print("ended as asked", file=sys.stderr)


if __name__ == "__main__":
    main()
