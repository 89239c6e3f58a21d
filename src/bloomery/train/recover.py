"""What happens when a loss or a gradient is not finite: skip, then rewind, then stop. It never reaches the weights."""

from typing import Any, Literal, final

from bloomery.train.run import Diverged

Action = Literal["step", "skip", "rewind"]


@final
class NonFinite:
    """Judges every step before its update.

    Up to `skips` bad steps in a row are skipped; the next one asks for a rewind: load the last good checkpoint, and go
    on with the data after the bad rows. After `rewinds` rewinds the run stops. (PaLM, arXiv:2204.02311 section 5.1,
    restarted before a spike and skipped its batches in the same way.) Loss scaling has bad steps of its own while it
    looks for its scale: give `skips` room for them.
    """

    def __init__(self, *, skips: int = 3, rewinds: int = 2) -> None:
        self.skips, self.rewinds = skips, rewinds
        self._skipped = 0
        self._rewound = 0

    def judge(
        self, finite: bool, *, step: int, rows: range, what: str = "loss", exhausted: bool = False
    ) -> Action:
        """What to do with the step that would be number `step` and has learned from `rows` of the shuffled data.

        `what` was not finite ("loss", "gradient"). `exhausted`: in float16, although nothing is scaled any more: other
        rows would not help. Raises Diverged, naming the batch, when skipping and rewinding have not helped.
        """
        if finite:
            self._skipped = 0
            return "step"
        if self._skipped < self.skips:
            self._skipped += 1
            return "skip"
        if self._rewound < self.rewinds and not exhausted:
            self._skipped = 0
            self._rewound += 1
            return "rewind"
        tried = f"skipping {self.skips} steps in a row"
        tried += " and lowering the loss scale to 1" if exhausted else f" and rewinding {self.rewinds} times"
        raise Diverged(
            f"the {what} is not a finite number at step {step}, rows {rows.start} to {rows.stop - 1} of the shuffled "
            f"data; {tried} did not help",
            where=f"step {step}",
            remedy="lower optimizer.learning_rate, set train.clip, or train in train.precision=float32 or bfloat16; "
            "the last good checkpoint is untouched",
        )

    def state(self) -> dict[str, int]:
        """JSON for a checkpoint, so that a resumed run judges as the undisturbed one."""
        return {"skipped": self._skipped, "rewound": self._rewound}

    def load(self, state: dict[str, Any]) -> None:
        """After a resume. A rewind keeps its own count: do not load then."""
        self._skipped, self._rewound = int(state["skipped"]), int(state["rewound"])
