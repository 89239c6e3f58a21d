"""The state of a running training job, and what it emits after each step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.core.device import is_accelerator, memory_stats
from bloomery.data.loader import Loader
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.infer.model_folder import restore_best
from bloomery.model.decoder import Decoder
from bloomery.monitor.events import Emit, StepDone, Warned
from bloomery.parallel.environment import node_name, without_host
from bloomery.parallel.mesh import Mesh
from bloomery.plan.pipeline import stage_of
from bloomery.plan.types import RunPlan, TrainPlan
from bloomery.train.batch_source import BatchSource, StepBatches
from bloomery.train.checkpoint.saver import Saver
from bloomery.train.diagnostics.profiler import Recorder
from bloomery.train.diagnostics.step_health import (
    HealthCheck,
    ParameterUpdate,
)
from bloomery.train.diagnostics.stragglers import Stragglers, worked_seconds
from bloomery.train.evaluation.answers import Prompts
from bloomery.train.objectives.build import Objective
from bloomery.train.process import (
    allocator_sample,
    peak_memory_gib,
)
from bloomery.train.requests import StepRequests
from bloomery.train.run_clock import Timer, fraction_done
from bloomery.train.state import TrainState
from bloomery.train.step import StepResult


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
    prompts: Prompts
    saver: Saver
    health_check: HealthCheck
    recorder: Recorder
    reference: Decoder | None = None  # a frozen copy of the start, where the objective needs one
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
            self.fraction = self.mesh.broadcast_float(self._own_fraction())

    def _own_fraction(self) -> float:
        """By the clock of this rank."""
        if self.plan.train.seconds is None:
            return self.fraction
        return fraction_done(self.plan.train, step=self.step, seconds=self.timer.elapsed)

    def note_save(self) -> None:
        """The interval of checkpoints by time begins: nothing of the run would be lost now."""
        self.saved_at_seconds = self.timer.elapsed
        self.seconds_since_save = 0.0

    def emit_step(
        self,
        result: StepResult,
        step_batches: StepBatches,
        *,
        lr_scale: float,
        seconds: float,
        data_wait_seconds: float,
    ) -> None:
        """Emit StepDone, and the health of the step where it was measured. Takes `fraction` as `read_clock`, and
        `seconds_since_save`.
        """
        plan = self.plan.train
        clock = self.mesh.clock
        tokens = plan.tokens_per_step if step_batches.tokens is None else step_batches.tokens
        axis_names = list(axes(plan))

        # A rank that waits for others has computed less: stragglers are found by compute time alone. Between GPUs a
        # stage waits for its neighbors on the device, and so does a replica or a shard.
        axis_seconds = {axis: clock.seconds_by_axis().get(axis, 0.0) for axis in axis_names}
        waited_seconds = clock.waited_seconds
        if is_accelerator(plan.device):
            waited_seconds += axis_seconds.get("pipeline", 0.0)
        compute_seconds = max(0.0, seconds - waited_seconds)
        device_wait_seconds = 0.0
        if is_accelerator(plan.device):
            device_wait_seconds = sum(axis_seconds.values()) - axis_seconds.get("pipeline", 0.0)
        # One collective for all that ranks tell each other after a step: at many ranks each takes its time.
        own_request = self.requests.after_step(self.step) if self.mesh.world > 1 else ()
        gathered = self.mesh.all_gather_floats(
            *own_request,
            self._own_fraction(),
            self.timer.elapsed - self.saved_at_seconds,
            peak_memory_gib(plan.device),
            compute_seconds,
            device_wait_seconds,
            *axis_seconds.values(),
        )
        if self.mesh.world > 1:
            self.requests.note([numbers[: len(own_request)] for numbers in gathered])
        (
            (self.fraction, *_),
            (self.seconds_since_save, *_),
            memory_by_rank,
            compute_seconds_by_rank,
            device_wait_seconds_by_rank,
            *axis_seconds_by_rank,
        ) = zip(*(numbers[len(own_request) :] for numbers in gathered), strict=True)
        # Communication of the rank that waited least: the others waited for slower ones, too.
        least_axis_seconds = [min(seconds_by_rank) for seconds_by_rank in axis_seconds_by_rank]
        self.emit(
            StepDone(
                step=self.step,
                loss=result.loss if result.taken else None,
                learning_rate=self.plan.optimizer.learning_rate * lr_scale,
                grad_norm=result.grad_norm if result.taken else None,
                tokens=self.state.progress.tokens,
                tokens_per_second=tokens / seconds,
                sequences_per_second=plan.sequences_per_step / seconds,
                step_seconds=seconds,
                data_wait_seconds=max(0.0, data_wait_seconds - sum(step_batches.seconds.values())),
                memory_gib=max(memory_by_rank),
                loss_tokens=result.loss_tokens,
                metrics={**step_batches.metrics, **result.metrics},
                communication_seconds=dict(zip(axis_names, least_axis_seconds, strict=True)),
                rollout_seconds=step_batches.seconds.get("rollout"),
                reward_seconds=step_batches.seconds.get("reward"),
            )
        )
        if self.mesh.world > 1:
            self.warn_of_slow_ranks(
                worked_seconds(compute_seconds_by_rank, device_wait_seconds_by_rank)
            )

        # Each stage of a pipeline has measured its own parameters.
        health_check = self.state.model_and_optimizer.health_check
        if health_check is not None:
            updates = self.mesh.gather_by_name(
                {name: update._asdict() for name, update in health_check.take_updates().items()}
            )
            if self.mesh.first_rank:
                self.emit(
                    health_check.report(
                        self.step,
                        step_batches.batches,
                        self.objective,
                        updates={
                            name: ParameterUpdate(**figures) for name, figures in updates.items()
                        },
                        compiled=plan.compile,
                    )
                )
            allocator_stats = memory_stats(plan.device)
            if allocator_stats:
                self.emit(allocator_sample(allocator_stats, step=self.step, device=self.device))

    def warn_of_slow_ranks(self, compute_seconds_by_rank: Sequence[float]) -> None:
        """Name, once, each rank that is slower than others with the same layers, and an uneven cut into stages."""
        for straggler in self.stragglers.note(compute_seconds_by_rank):
            first_rank, *_, last_rank = (*straggler.ranks, straggler.ranks[-1])
            host = self.mesh.hosts[first_rank] if self.mesh.hosts else node_name()
            name = f"rank {first_rank} on {host}"
            if straggler.host:
                name = f"host {host}, with {len(straggler.ranks)} ranks from {first_rank} to {last_rank},"
            reason = f"{name} takes {straggler.times:.1f} times as long for a step as most: the others wait"
            if len(set(self.mesh.hosts)) > 1:
                reason += f"; to leave it out: {without_host(host)}"
            self.emit(Warned(step=self.step, reason=reason))
        slowest = self.stragglers.slowest_stage()
        if slowest is not None:
            index, ratio = slowest
            train = self.plan.train
            stage = stage_of(self.plan.model.config, index, train.pipeline, train.pipeline_layers)
            groups = ", ".join(f"{group.start} to {group.stop - 1}" for group in stage.groups)
            reason = (
                f"the cut into stages is uneven: stage {index + 1} of {train.pipeline} (layers {groups}) computes"
                f" {ratio:.1f} times as long as the fastest stage: the others wait"
            )
            self.emit(Warned(step=self.step, reason=reason))


def follow(context: RunContext, checkpoint: Path | None) -> None:
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
    }
    return {name: size for name, size in sizes.items() if size > 1}
