"""The policy for non-finite losses and gradients: skip, rewind, stop."""

from dataclasses import dataclass
from typing import Any, Literal, final

from bloomery.train.failures import Diverged

Reaction = Literal["step", "skip", "rewind"]


@final
@dataclass(kw_only=True)
class NonFinite:
    """Decides after each step how training continues.

    Skips up to `skips` consecutive bad steps, then rewinds: loads the last good checkpoint and continues after the bad
    sequences, as PaLM did around loss spikes (arXiv:2204.02311, section 5.1). Stops after `rewinds` rewinds. Loss
    scaling causes bad steps of its own while it finds its scale: `skips` must leave room for them.
    """

    skips: int = 3
    rewinds: int = 2
    _skipped: int = 0
    _rewound: int = 0

    def decide(
        self,
        finite: bool,
        *,
        step: int,
        sequences: range,
        what: str = "loss",
        exhausted: bool = False,
    ) -> Reaction:
        """How to continue after step `step`, which trained on `sequences`.

        `what` was non-finite ("loss", "gradient"). `exhausted`: in float16 at loss scale 1, where other data would not
        help. Raises Diverged, naming the sequences, when skipping and rewinding have not helped.
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
        last_attempt = (
            "lowering the loss scale to 1" if exhausted else f"rewinding {self.rewinds} times"
        )
        raise Diverged(
            f"non-finite {what} at step {step}, sequences {sequences.start} to {sequences.stop - 1}; "
            f"skipping {self.skips} consecutive steps and {last_attempt} did not help",
            where=f"step {step}",
            fix="lower optimizer.learning_rate, set train.max_grad_norm, or train in "
            "train.precision=float32 or bfloat16; the last good checkpoint is untouched",
        )

    def state(self) -> dict[str, int]:
        """JSON for a checkpoint: a resumed run decides as the uninterrupted one."""
        return {"skipped": self._skipped, "rewound": self._rewound}

    def load(self, state: dict[str, Any]) -> None:
        """Load after a resume, not after a rewind, which keeps its count."""
        self._skipped = int(state["skipped"])
        self._rewound = int(state["rewound"])
