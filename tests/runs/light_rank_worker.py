"""A training child that starts in a moment: neither torch nor Bloomery. Its rank steps until a stop, or until it dies.

A stop reaches one rank; the others learn of it at once, as ranks do, here from a file outside the run folder. A rank
leaves `began-N` there.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

STEP = {
    "kind": "StepDone",
    "loss": 1.0,
    "learning_rate": 1.0,
    "grad_norm": 1.0,
    "tokens": 1,
    "tokens_per_second": 1.0,
    "sequences_per_second": 1.0,
    "step_seconds": 0.2,
    "data_wait_seconds": 0.0,
    "memory_gib": 0.0,
}


def main() -> None:
    """Ends with its parent, as a real rank does."""
    run, rank, parent = Path(sys.argv[2]), int(os.environ["RANK"]), os.getppid()
    agreed = run.parent / "agreed"
    signal.signal(signal.SIGTERM, lambda *_: agreed.touch())
    (run.parent / f"began-{rank}").touch()
    events = (run / "events.jsonl").open("a") if rank == 0 else None

    def tell(event: dict) -> None:
        if events is not None:
            events.write(json.dumps(event) + "\n")
            events.flush()

    step = 0
    while not agreed.exists():
        time.sleep(STEP["step_seconds"])
        if os.getppid() != parent:
            os._exit(1)
        step += 1
        tell(STEP | {"step": step})
    tell({"kind": "Phase", "step": step, "name": "saving"})
    time.sleep(1.0)  # the save
    os._exit(75)


if __name__ == "__main__":
    main()
