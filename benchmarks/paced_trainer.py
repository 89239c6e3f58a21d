"""transformers' Trainer, and every trainer made of it, taking its steps as `paced` says."""

import sys
from collections.abc import Callable

from paced import Ended, Pace
from transformers import Trainer, TrainerCallback

SEED = 0
# What every trainer is given. The learning rate is constant, so that a few steps lower the loss; the pace ends the run.
SETTINGS = {
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "max_steps": 100_000,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": SEED,
}


class Paced(TrainerCallback):
    """`learned`: how many labels the step before learned from, for who counts them; `generation_seconds`: of it.

    `played`: calls and turns of an episode, where it plays some.
    """

    def __init__(self) -> None:
        self.pace = Pace()
        self.learned: Callable[[], int | None] = lambda: None
        self.generation_seconds: Callable[[], float | None] = lambda: None
        self.played: Callable[[dict[str, float]], dict[str, float] | None] = lambda _logs: None

    def on_step_begin(self, *_args: object, **_kwargs: object) -> None:
        self.pace.begin()

    def on_step_end(self, *_args: object, **_kwargs: object) -> None:
        self.pace.stop()

    def on_log(self, *_args: object, logs: dict[str, float], **_kwargs: object) -> None:
        if "loss" in logs:
            self.pace.tell(
                float(logs["loss"]), self.learned(), self.generation_seconds(), self.played(logs)
            )


def train(trainer: Trainer) -> None:
    """Until no more steps are asked for."""
    try:
        trainer.train()
    except Ended:
        print("ended as asked", file=sys.stderr)
