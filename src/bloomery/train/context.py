"""The state of a running training job, and its set-up before the first step."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.core import __version__
from bloomery.core.device import is_accelerator, memory_stats
from bloomery.data.loader import Loader
from bloomery.data.shards import SplitName, read_manifest
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.facts.counting import parameter_count
from bloomery.hub import local_model
from bloomery.infer.forward import eval_mode, matmul_dtype, precision_context
from bloomery.infer.model_folder import restore_best
from bloomery.model.adapters.lora import is_added
from bloomery.model.adapters.settings import digest
from bloomery.model.decoder import VALUE_HEAD, Decoder
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.model.transformers_checks import check_layers
from bloomery.monitor.events import SCHEMA, Emit, Phase, Resumed, RunStarted, StepDone, Warned
from bloomery.parallel.environment import node_name, without_host
from bloomery.parallel.gather import gather_by_name
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.lengths import in_epochs
from bloomery.plan.pipeline import stage_of
from bloomery.plan.store import note_model, read_identity
from bloomery.plan.types import RunPlan, TrainPlan
from bloomery.recipe.schema import Distill, NoAdapter
from bloomery.train.attention_tiles import settle_tiles
from bloomery.train.checkpoint import Saver, copy_tokenizer
from bloomery.train.diagnostics.profiler import Recorder
from bloomery.train.diagnostics.step_health import (
    HealthCheck,
    ParameterUpdate,
)
from bloomery.train.diagnostics.stragglers import Stragglers, worked_seconds
from bloomery.train.evaluation.answers import Prompts, open_prompts
from bloomery.train.length import Timer, fraction_done, is_time_up
from bloomery.train.objectives import Objective, build_objective
from bloomery.train.process import (
    allocator_sample,
    build_kernels,
    peak_memory_gib,
    set_up_process,
    training_device,
)
from bloomery.train.rank_writers import RankWriters
from bloomery.train.reference import reference_files
from bloomery.train.reference_model import build_reference_model
from bloomery.train.requests import StepRequests
from bloomery.train.source import BatchSource, SourceInputs, StepBatches, open_loader
from bloomery.train.sources import source_of
from bloomery.train.state import TrainState, build_state
from bloomery.train.step import StepResult


def with_base(plan: RunPlan, run_dir: Path, mesh: Mesh = SINGLE_RANK) -> RunPlan:
    """The plan with the folder of its adapter's base model: `run_dir/base` for a base with fresh weights."""
    if isinstance(plan.adapter, NoAdapter) or plan.model.source is not None:
        return plan
    folder = run_dir / "base"
    # The folder has its name once it is complete: a killed start begins again.
    if mesh.first_rank and not folder.exists():
        draft = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
        config = plan.model.config
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        write_model(model_state(fresh_decoder(config, seed=plan.train.seed)), config, draft)
        copy_tokenizer(plan.data.prepared, draft)
        draft.rename(folder)
    mesh.barrier()
    model = plan.model.model_copy(update={"source": folder.resolve()})
    return plan.model_copy(update={"model": model})


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
            updates = gather_by_name(
                {name: update._asdict() for name, update in health_check.take_updates().items()},
                self.mesh,
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


def open_context(
    plan: RunPlan,
    run_dir: Path,
    emit: Emit,
    resume_from: Path | None,
    stop: Callable[[], bool] = lambda: False,
    mesh: Mesh = SINGLE_RANK,
    *,
    timer: Timer,
    build_seconds: float = 0.0,
) -> RunContext:
    """Prepare everything that the first step needs. `timer`: the clock of the run, which reads the process's time yet.

    `build_seconds`: what compiling C++ took before this call.
    Raises Stopped when `stop` returns True before the first step.
    """
    # The process and the model. Rank 0 notes which base and teacher the run has: they may not change under it.
    set_up_process(plan)
    assert plan.data.layout != "packed" or plan.model.attention != "sdpa", (
        "plain sdpa does not keep documents apart"
    )
    plan = with_base(plan, run_dir, mesh)
    if isinstance(plan.objective, Distill) and mesh.first_rank:
        note_model(run_dir, "teacher", digest(local_model(plan.objective.teacher)))

    # The kernels. Whether they are right on this device was checked while its memory was still free.
    build_seconds += build_kernels(plan)
    settle_tiles(plan, run_dir, mesh, emit, resumes=resume_from is not None)
    emit(Phase(name="model"))
    state = build_state(
        plan, resume_from=resume_from, run_dir=run_dir if mesh.first_rank else None, mesh=mesh
    )
    if plan.model.config.transformers_backend is not None:
        with eval_mode(state.model), precision_context(plan.train.precision, plan.train.device):
            check_layers(
                state.model,
                matmul_dtype(plan.train.precision),
                packed=plan.data.layout == "packed",
            )
    reference_model = build_reference_model(plan, state.model, run_dir=run_dir, mesh=mesh)

    # The dataset, and what a reference model says about it; this may take minutes and can be stopped.
    prepared = plan.data.prepared
    has_validation = bool(read_manifest(prepared).validation.tokens)
    splits: tuple[SplitName, ...] = ("train", "validation") if has_validation else ("train",)
    tokenizer = load_tokenizer(prepared)
    prompts = open_prompts(plan, tokenizer)
    identity = read_identity(run_dir)
    run = "" if identity is None else identity.run  # a plan may be trained outside a run folder
    references = reference_files(plan, run_dir, run, splits, state, emit, resume_from, stop)
    validation = None
    if has_validation and plan.objective.spec.source == "dataset":
        validation = open_loader(plan, "validation", references.get("validation"), run, mesh)

    # Without an adapter every parameter should be trainable: a frozen one is reported. A tied matrix, which is on two
    # stages, counts on the first.
    adapts = not isinstance(plan.adapter, NoAdapter)
    checked_parameters = {
        name: parameter
        for name, parameter in state.model.named_parameters()
        if (parameter.requires_grad or not adapts)
        and state.is_owned(name)
        and name != VALUE_HEAD  # it starts at 0: its first updates are large next to it
    }
    context = RunContext(
        plan=plan,
        run_dir=run_dir,
        emit=emit,
        state=state,
        objective=build_objective(
            plan, mesh=mesh, value_head=state.model.value_head, reference=reference_model
        ),
        reference=reference_model,
        source=source_of(
            SourceInputs(
                plan=plan,
                state=state,
                tokenizer=tokenizer,
                run_dir=run_dir,
                emit=emit,
                stop=stop,
                time_is_up=lambda: is_time_up(plan.train, state.progress.step, timer),
                reference=references.get("train"),
                reference_model=reference_model,
                run=run,
            )
        ),
        validation=validation,
        tokenizer=tokenizer,
        prompts=prompts,
        saver=Saver(
            run_dir / "checkpoints",
            plan.checkpoint.keep,
            plan.checkpoint.async_save,
            writer=state.checkpointed_model.writer,
            stored_model=state.checkpointed_model.stored_model(),
            ranks=RankWriters(mesh, state.rows_on_ranks()) if mesh.world > 1 else None,
            tokenizer=prepared,
            emit=emit,
        ),
        health_check=HealthCheck(checked_parameters, is_adapter=adapts),
        recorder=Recorder(run_dir, state.model_and_optimizer, emit, writes=mesh.first_rank),
        device=training_device(run_dir / "machine.json"),
        # A checkpoint whose evaluation was interrupted is saved again with its result.
        saved_step=-1 if state.progress.eval_due else state.progress.step,
        stop=stop,
        stragglers=Stragglers(mesh.stages, mesh.hosts),
        timer=timer,
    )
    announce(context, build_seconds=build_seconds)
    follow(context, resume_from)
    if resume_from is not None:
        emit(
            Resumed(
                step=context.step, path=str(resume_from), seconds=time.perf_counter() - timer.began
            )
        )
    return context


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


def announce(context: RunContext, *, build_seconds: float) -> None:
    """Emit RunStarted."""
    plan = context.plan
    # Counts are those of full parameters, also where this rank holds a shard of each. A stage of a pipeline has some of
    # the model's: each counts what it owns, and every data-parallel rank of a stage counts the same.
    adapter_parameters, trained = (
        round(count / context.mesh.data_world)
        for count in context.mesh.all_reduce_sum(
            sum(
                parameter.numel()
                for name, parameter in context.model.named_parameters()
                if is_added(name)
            ),
            sum(
                parameter.numel()
                for name, parameter in context.state.optimizer.named_parameters.items()
                if context.state.is_owned(name)
            ),
        )
    )
    parameters = parameter_count(plan.model.config) + adapter_parameters
    context.emit(
        RunStarted(
            step=context.step,
            schema=SCHEMA,
            version=__version__,
            parameters=parameters,
            trainable=None if trained == parameters else trained,
            world_size=plan.train.ranks,
            mesh=axes(plan.train),
            steps=plan.train.steps or 0,
            attention=plan.model.attention,
            device=plan.train.device,
            loss_unit=context.objective.loss_unit,
            epochs=in_epochs(plan),
            build_seconds=build_seconds,
            steps_per_rollout=None if plan.rollout is None else plan.rollout.num_steps,
            reasons={
                decision.key: f"{decision.value}: {decision.reason}" for decision in plan.choices
            },
        )
    )
    # Compilation happens in the first step.
    name = "compile" if plan.train.compile else "first step"
    context.emit(Phase(step=context.step, name=name))


def axes(plan: TrainPlan) -> dict[str, int]:
    """The axes of the mesh with more than one device."""
    sizes = {
        "pipeline": plan.pipeline,
        "replicate": plan.replicate,
        "shard": plan.shard,
        "context": plan.context,
    }
    return {name: size for name, size in sizes.items() if size > 1}
