"""The state of a running training job."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.data.loader import Loader
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.infer.model_folder import restore_best
from bloomery.model.decoder import Decoder
from bloomery.monitor.events import Emit, Warned
from bloomery.parallel.mesh import Mesh
from bloomery.plan.types import RunPlan, TrainPlan
from bloomery.train.batch_source import BatchSource
from bloomery.train.checkpoint.saver import Saver
from bloomery.train.diagnostics.profiler import Recorder
from bloomery.train.diagnostics.step_health import (
    HealthCheck,
)
from bloomery.train.diagnostics.stragglers import Stragglers
from bloomery.train.evaluation.answers import SamplePrompts
from bloomery.train.objectives.objective import Objective
from bloomery.train.requests import StepRequests
from bloomery.train.run_clock import Timer, fraction_done
from bloomery.train.scorers.client import Scorers
from bloomery.train.state import TrainState


@dataclass
class RunContext:
    """Mutable state of a running training job. `replan` replaces `plan`."""

    plan: RunPlan
    run_dir: Path
    emit: Emit
    state: TrainState
    objective: Objective
    source: BatchSource
    validation: Loader | None
    tokenizer: Tokenizer
    prompts: SamplePrompts
    saver: Saver
    health_check: HealthCheck
    recorder: Recorder
    reference: Decoder | None = None  # a frozen copy of the start, where the objective needs one
    scorers: Scorers | None = None  # the processes that score for this rank
    device: tuple[int, str] = (0, "")  # index and name of the accelerator
    last_eval_step: int | None = None
    best_due: bool = False  # this step has the lowest validation loss so far, and is not saved
    saved_step: int = 0
    restored_step: int | None = None  # of the checkpoint that training continued from
    saving_due: bool = False
    # When training continued after the last save, on the run's clock, and the seconds since as of the last step: those
    # of the first rank, so that all ranks save after the same steps.
    saved_at_seconds: float = 0.0
    seconds_since_save: float = 0.0
    stop: Callable[[], bool] = lambda: False  # whether you asked the run to stop
    requests: StepRequests = field(default_factory=StepRequests)
    stragglers: Stragglers = field(default_factory=Stragglers)
    before_save: Callable[[], None] = lambda: None  # called before each save or rewind
    timer: Timer = field(default_factory=lambda: Timer(time.perf_counter()))
    # How much of a wall-time run is done: now, when evaluations and checkpoints were checked last, and when this
    # process took its first step, `first_step`.
    fraction: float = 0.0
    checked_fraction: float = 0.0
    first_fraction: float = 0.0
    first_step: int = 0

    @property
    def mesh(self) -> Mesh:
        return self.state.model_and_optimizer.mesh

    @property
    def step(self) -> int:
        return self.state.progress.step

    @property
    def model(self) -> Decoder:
        return self.state.model

    @property
    def finished(self) -> bool:
        """Whether the planned length is reached, or early stopping ends the run."""
        train = self.plan.train
        if train.seconds is not None:
            return self.stops_early or self.fraction >= 1.0
        return self.stops_early or (train.steps is not None and self.step >= train.steps)

    @property
    def stops_early(self) -> bool:
        patience = self.plan.eval.early_stopping_patience
        return patience is not None and self.state.progress.evaluations_since_best >= patience

    def read_clock(self) -> None:
        """Take `fraction` of a wall-time run from the clock of rank 0, so that all ranks take the same steps."""
        if self.plan.train.seconds is not None:
            self.fraction = self.mesh.broadcast_float(self.own_fraction())

    def own_fraction(self) -> float:
        """By the clock of this rank."""
        if self.plan.train.seconds is None:
            return self.fraction
        return fraction_done(self.plan.train, step=self.step, seconds=self.timer.elapsed)

    def note_save(self) -> None:
        """The interval of checkpoints by time begins: nothing of the run would be lost now."""
        self.saved_at_seconds = self.timer.elapsed
        self.seconds_since_save = 0.0


def follow_checkpoint(context: RunContext, checkpoint: Path | None) -> None:
    """The next checkpoint follows this one, and the best is the best as of it; None: the start of the run."""
    context.saver.follow(checkpoint)
    context.restored_step = None if checkpoint is None else context.step
    progress = context.state.progress
    best_is_missing = context.mesh.first_rank and not restore_best(
        context.saver.folder, step=context.step, best=progress.best_step
    )
    if context.mesh.any_rank(best_is_missing):
        problem = f"the best checkpoint, of step {progress.best_step}, is missing"
        context.emit(
            Warned(step=context.step, reason=f"{problem}: the next evaluation becomes the best")
        )
        progress.best_loss = None
        progress.best_step = None


def axes(plan: TrainPlan) -> dict[str, int]:
    """The axes of the mesh with more than one device."""
    sizes = {
        "pipeline": plan.pipeline,
        "replicate": plan.replicate,
        "shard": plan.shard,
        "context": plan.context,
        "expert": plan.expert,
    }
    return {name: size for name, size in sizes.items() if size > 1}
