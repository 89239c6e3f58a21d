"""How much of the demo's training time passes outside the optimizer step itself.

    python benchmarks/loop_overhead.py [--steps 60] [--work FOLDER]

The demo's recipe in its own loop, journal and prefetching thread included; a clock around `train_step` is the only
thing added. Evaluations and checkpoints are left out: they are work that somebody asked for. The live view runs in the
parent process and is not part of the loop.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from bloomery.data.prepare.prepare import prepare
from bloomery.hardware.detect import detect
from bloomery.monitor.events import EventLog
from bloomery.plan.gather import gather
from bloomery.plan.resolve import resolve
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe

RESULTS = Path(__file__).parent / "results" / "loop_overhead.json"
SKIPPED = 5  # steps that warm up caches and allocators
BAR = 0.02


class Ended(Exception):
    """Enough steps were timed."""


def planned(folder: Path) -> RunPlan:
    """The demo's plan, with steps in place of its wall time."""
    loaded = load_recipe("demo", ["train.max_steps=100000", f"data.prepared={folder / 'prepared'}"])
    prepare(loaded, folder / "prepared")
    return resolve(loaded, gather(loaded, detect(), prepared=folder / "prepared"))


def timed(plan: RunPlan, folder: Path, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step from end to end, and of `train_step` alone."""
    from bloomery.train import loop

    inside, starts = list[float](), list[float]()
    take = loop.train_step

    def clocked(*args: object, **kwargs: object) -> object:
        begun = time.perf_counter()
        result = take(*args, **kwargs)
        inside.append(time.perf_counter() - begun)
        return result

    def stop() -> bool:
        starts.append(time.perf_counter())
        if len(inside) == steps + SKIPPED:
            raise Ended
        return False

    loop.train_step = clocked
    try:
        with EventLog(folder / "events.jsonl") as emit:
            loop.run(plan, run_dir=folder, emit=emit, stop=stop)
    except Ended:
        whole = [after - before for before, after in pairwise(starts)]
        return whole[SKIPPED:], inside[SKIPPED:]
    raise AssertionError("the plan has more steps than are timed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--work", type=Path, help="keeps the prepared text here")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = (asked.work or Path(place)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        whole, inside = timed(planned(folder), folder, asked.steps)
    outside = [total - step for total, step in zip(whole, inside, strict=True)]
    share = sum(outside) / sum(whole)
    report = {
        "steps": asked.steps,
        "step_ms": 1e3 * statistics.median(inside),
        "outside_ms": 1e3 * statistics.median(outside),
        "outside_share": share,
        "bar": BAR,
        "met": share <= BAR,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    asked.out.parent.mkdir(exist_ok=True)
    asked.out.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"{asked.steps} steps: {report['step_ms']:.1f} ms in the step, {report['outside_ms']:.2f} ms outside it:"
        f" {share:.2%} of the time (at most {BAR:.0%}: {'met' if share <= BAR else 'NOT MET'})"
    )


if __name__ == "__main__":
    main()
