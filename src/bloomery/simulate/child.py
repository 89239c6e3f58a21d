"""The process that simulates: an order in a file, JSON lines on stdout, an end by the alarm clock."""

import json
import logging
import signal
import sys
import warnings
from pathlib import Path
from typing import Any


def main(order: Path, seconds: float) -> None:
    """Simulates what the file asks for; the last line holds the parts and the notes."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    asked = json.loads(order.read_text(encoding="utf-8"))
    say({"doing": "PyTorch is starting"})

    from bloomery.plan.types import Plan
    from bloomery.simulate.notes import notes_of
    from bloomery.simulate.shards import Cut
    from bloomery.simulate.step import simulated_step

    plan = Plan.model_validate(asked["plan"])
    cut, fused = Cut(*asked["cut"]), asked["fused"]
    parts = simulated_step(plan, fused=fused, cut=cut, say=lambda doing: say({"doing": doing}))
    say({"parts": parts, "notes": notes_of(plan, fused=fused, cut=cut)})


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
