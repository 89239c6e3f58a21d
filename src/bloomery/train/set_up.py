"""The set-up of a training job before its first step: process and kernels, models, dataset, and what writes them."""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import final

from bloomery.core import __version__
from bloomery.core.files import digest_of, digests_of_file
from bloomery.data.loader import Loader
from bloomery.data.shards import SplitName, read_manifest
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.data.top_scores import scores_files
from bloomery.facts.counting import is_never_trained, parameter_count
from bloomery.facts.objectives import BatchOrigin
from bloomery.hub import local_model
from bloomery.infer.forward import eval_mode, matmul_dtype, precision_context
from bloomery.model.adapters.lora import is_added
from bloomery.model.adapters.settings import digest
from bloomery.model.decoder import VALUE_HEAD, Decoder, trained_parameters
from bloomery.model.document_rows import document_groups, padding_share
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.model.transformers_backend import TransformersBackbone
from bloomery.model.transformers_checks import check_layers
from bloomery.monitor.events import SCHEMA, Emit, Phase, Resumed, RunStarted, Warned
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.choices import reference_of
from bloomery.plan.lengths import in_epochs
from bloomery.plan.store import note_model, read_identity
from bloomery.plan.types import CheckpointPlan, RunPlan
from bloomery.recipe.schema import NoAdapter
from bloomery.train.batch_source import (
    BatchSource,
    DatasetSource,
    SourceInputs,
    open_loader,
)
from bloomery.train.checkpoint.rank_writers import RankWriters
from bloomery.train.checkpoint.saver import Saver, copy_tokenizer
from bloomery.train.context import RunContext, axes, follow_checkpoint
from bloomery.train.diagnostics.profiler import Recorder
from bloomery.train.diagnostics.step_health import (
    HealthCheck,
)
from bloomery.train.diagnostics.stragglers import Stragglers
from bloomery.train.evaluation.answers import SamplePrompts, open_prompts
from bloomery.train.kernels import build_kernels, settle_tiles
from bloomery.train.objectives.build import build_objective
from bloomery.train.objectives.reference_files import ReferenceScoring, reference_files
from bloomery.train.objectives.reference_model import build_reference_model
from bloomery.train.objectives.teacher import scored_teacher_of
from bloomery.train.process import (
    set_up_process,
    training_device,
)
from bloomery.train.rl.rollout_source import rollout_source
from bloomery.train.run_clock import Timer, is_time_up
from bloomery.train.scorers.client import Scorers
from bloomery.train.state import TrainState, build_state

NUM_MEASURED_ROWS = 64  # whose share of padding a line gives


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
    scorers: Scorers | None = None,
) -> RunContext:
    """Prepare everything that the first step needs. `timer`: the clock of the run, which reads the process's time yet.

    `build_seconds`: what compiling C++ took before this call. `scorers`: the processes that score for this rank.
    Raises Stopped when `stop` returns True before the first step.
    """
    set_up_process(plan.train, memory_limit=plan.memory_limit_of(mesh.rank))
    plan = fix_start(plan, run_dir, mesh)

    # The kernels. Whether they are right on this device was checked while its memory was still free.
    build_seconds += build_kernels(plan.model)
    resumes = resume_from is not None
    settle_tiles(plan.model, plan.train, plan.data, run_dir, mesh, emit, resumes=resumes)

    emit(Phase(name="model"))
    state, reference_model = build_models(plan, run_dir, resume_from, mesh)
    if (warning := rows_warning(plan, state.model, mesh)) is not None:
        emit(Warned(reason=warning))
    if state.model.weight_stream is not None and state.model.weight_stream.note is not None:
        emit(Warned(reason=state.model.weight_stream.note))
    dataset = open_run_dataset(plan, run_dir, state, emit, resume_from, stop)
    if scorers is not None:  # they have loaded their models meanwhile
        scorers.wait_until_loaded()
    context = RunContext(
        plan=plan,
        run_dir=run_dir,
        emit=emit,
        state=state,
        objective=build_objective(
            plan,
            mesh=mesh,
            value_head=state.model.value_head,
            reference=reference_model,
            scored_teacher=scored_teacher_of(plan, scorers),
        ),
        reference=reference_model,
        source=source_of(
            SourceInputs(
                plan=plan,
                state=state,
                tokenizer=dataset.tokenizer,
                run_dir=run_dir,
                emit=emit,
                stop=stop,
                time_is_up=lambda: is_time_up(plan.train, state.progress.step, timer),
                reference=dataset.reference_scores,
                reference_model=reference_model,
                run=dataset.run,
                scorers=scorers,
            )
        ),
        validation=dataset.validation,
        tokenizer=dataset.tokenizer,
        prompts=dataset.prompts,
        saver=open_saver(plan.checkpoint, plan.data.prepared, run_dir, state, emit),
        health_check=open_health_check(state, plan),
        recorder=Recorder(run_dir, state.model_and_optimizer, emit, writes=mesh.first_rank),
        device=training_device(run_dir / "machine.json"),
        # A checkpoint whose evaluation was interrupted is saved again with its result.
        saved_step=-1 if state.progress.eval_due else state.progress.step,
        stop=stop,
        stragglers=Stragglers(mesh.stages, mesh.hosts),
        timer=timer,
        scorers=scorers,
    )
    announce(context, build_seconds=build_seconds)
    follow_checkpoint(context, resume_from)
    if resume_from is not None:
        emit(
            Resumed(
                step=context.step, path=str(resume_from), seconds=time.perf_counter() - timer.began
            )
        )
    return context


def fix_start(plan: RunPlan, run_dir: Path, mesh: Mesh) -> RunPlan:
    """The plan with the folders that the run starts from. Its base and its teacher may not change from now on."""
    assert plan.data.layout != "packed" or plan.model.attention != "sdpa", (
        "plain sdpa does not keep documents apart"
    )
    plan = with_base(plan, run_dir, mesh)
    if (teacher := plan.objective.taught_by) is not None and mesh.first_rank:
        note_model(run_dir, "teacher", digest(local_model(teacher.model)))
    if (scores := plan.objective.stored_scores) is not None and mesh.first_rank:
        digests = [part for path in scores_files(scores) for part in digests_of_file(path)]
        changed = "are not those that the run began with: the file changed"
        note_model(
            run_dir, "teacher's scores", digest_of("".join(digests).encode()), changed=changed
        )
    return plan


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


def build_models(
    plan: RunPlan, run_dir: Path, resume_from: Path | None, mesh: Mesh
) -> tuple[TrainState, Decoder | None]:
    """The state to train, and the frozen copy of its start where the objective needs one."""
    state = build_state(
        plan, resume_from=resume_from, run_dir=run_dir if mesh.first_rank else None, mesh=mesh
    )
    reference_model = build_reference_model(plan, state.model, run_dir=run_dir, mesh=mesh)
    is_packed = plan.data.layout == "packed" or plan.objective.spec.data_kind in ("pairs", "kto")
    for model in (state.model, reference_model):
        if model is not None and isinstance(model.model, TransformersBackbone):
            with eval_mode(model), precision_context(plan.train.precision, plan.train.device):
                check_layers(model, matmul_dtype(plan.train.precision), packed=is_packed)
    return state, reference_model


def rows_warning(plan: RunPlan, model: Decoder, mesh: Mesh) -> str | None:
    """A line where documents that share a row are computed each by itself, with the share of padding in that."""
    backbone = model.model
    if not isinstance(backbone, TransformersBackbone) or backbone.documents != "rows":
        return None
    if plan.model.attention == "sdpa":  # each row is one document anyway
        return None
    line = f"each document is computed as a row of its own: {backbone.documents_reason}"
    if plan.objective.spec.source != "dataset":
        return line
    loader = open_loader(plan.data, "train", mesh=mesh, seed=plan.train.seed)
    batch = next(loader.validation_batches(NUM_MEASURED_ROWS, limit=1))
    groups = document_groups(batch.attended_documents, fixed=mesh.shard > 1)
    return f"{line}; {padding_share(groups):.0%} of what the first {len(batch.tokens)} sequences take is padding"


@final
@dataclass(frozen=True, kw_only=True)
class OpenedDataset:
    """The dataset of a run. `run`: its identity; "" for a plan that is trained outside a run folder.

    `reference_scores`: the file of the reference model's log-probabilities of the training split, if there is one.
    """

    tokenizer: Tokenizer
    prompts: SamplePrompts
    validation: Loader | None
    reference_scores: Path | None
    run: str


def open_run_dataset(
    plan: RunPlan,
    run_dir: Path,
    state: TrainState,
    emit: Emit,
    resume_from: Path | None,
    stop: Callable[[], bool],
) -> OpenedDataset:
    """The dataset, and what a reference model says about it: this may take minutes. Raises Stopped."""
    data = plan.data
    has_validation = bool(read_manifest(data.prepared).validation.tokens)
    splits: tuple[SplitName, ...] = ("train", "validation") if has_validation else ("train",)
    tokenizer = load_tokenizer(data.prepared)
    prompts = open_prompts(
        plan.sample.prompts,
        tokenizer,
        data.prepared,
        reads_text=plan.objective.spec.reads_text,
        run_dir=run_dir,
    )
    identity = read_identity(run_dir)
    run = "" if identity is None else identity.run
    files = dict[SplitName, Path]()
    if reference_of(plan.objective, plan.adapter, plan.vision.train).value == "precomputed":
        scoring = ReferenceScoring(
            data=data,
            seed=plan.train.seed,
            batch_size=plan.eval.micro_batch_size,
            score_chunk=plan.model.score_chunk,
            precision=plan.train.precision,
        )
        files = reference_files(scoring, run_dir, run, splits, state, emit, resume_from, stop)
    validation = None
    if has_validation and plan.objective.spec.source == "dataset":
        mesh = state.model_and_optimizer.mesh
        validation = open_loader(
            data,
            "validation",
            files.get("validation"),
            run,
            mesh,
            seed=plan.train.seed,
            top_scores=plan.objective.stored_scores,
        )
    return OpenedDataset(
        tokenizer=tokenizer,
        prompts=prompts,
        validation=validation,
        reference_scores=files.get("train"),
        run=run,
    )


def open_saver(
    checkpoint: CheckpointPlan, prepared: Path, run_dir: Path, state: TrainState, emit: Emit
) -> Saver:
    """What writes the checkpoints of the run, each with the tokenizer of the `prepared` dataset."""
    mesh = state.model_and_optimizer.mesh
    return Saver(
        run_dir / "checkpoints",
        checkpoint.keep,
        checkpoint.async_save,
        writer=state.checkpointed_model.writer,
        stored_model=state.checkpointed_model.stored_model(),
        ranks=RankWriters(mesh, state.rows_on_ranks()) if mesh.world > 1 else None,
        tokenizer=prepared,
        emit=emit,
    )


def open_health_check(state: TrainState, plan: RunPlan) -> HealthCheck:
    """The check of the parameters that this rank's updates should change.

    Where the base is not frozen, every parameter of it should be trainable: a frozen one is reported. A tied matrix,
    which is on two stages, counts on the first.
    """
    is_adapter = not isinstance(plan.adapter, NoAdapter)
    is_frozen = is_adapter or plan.vision.freeze_language_model
    checked_parameters = {
        name: parameter
        for name, parameter in (
            dict(state.model.named_parameters()) | trained_parameters(state.model)
        ).items()
        if (parameter.requires_grad or not is_frozen)
        and not is_never_trained(name)
        and state.is_owned(name)
        and name != VALUE_HEAD  # it starts at 0: its first updates are large next to it
    }
    return HealthCheck(checked_parameters, is_adapter=is_adapter)


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


SOURCES: Mapping[BatchOrigin, Callable[[SourceInputs], BatchSource]] = MappingProxyType(
    {"dataset": DatasetSource, "rollouts": rollout_source}
)


def source_of(inputs: SourceInputs) -> BatchSource:
    """The source that the plan's objective trains on."""
    return SOURCES[inputs.plan.objective.spec.source](inputs)
