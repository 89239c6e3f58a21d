"""A recipe and its facts as a plan without "auto".

`resolve` reads no file: `gather` does. Suggestions resolve an edited recipe with the same facts. `local_plan` gathers
and resolves a recipe for this machine, with the local dataset.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

from bloomery.core import Choice
from bloomery.core.device import is_accelerator
from bloomery.core.errors import UserError
from bloomery.core.units import GIB, MIB, Duration
from bloomery.data.prepare.prepare import prepared_folder
from bloomery.facts.config import ModelConfig
from bloomery.facts.limits import Dequantizer
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.facts.pictures import SEES_BOTH_WAYS
from bloomery.hardware.calibration import threads
from bloomery.hardware.dequantizers import dequantizer
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile, local_caches, with_gpus, with_host_memory
from bloomery.hardware.specs import find_gpus
from bloomery.plan import (
    adapters,
    batch,
    lengths,
    mesh,
    rollouts,
    scoring,
    streaming,
    support_matrix,
    teachers,
    unsupported,
    unsupported_layouts,
    unsupported_objectives,
)
from bloomery.plan.checkpoints import choose_checkpoints, interval_text
from bloomery.plan.choices import (
    ASKED,
    arithmetic_choices,
    choose_attention,
    choose_compile,
    choose_deterministic,
    extra_forwards,
    most_loss_tokens,
    objective_choices,
    optimizer_memory_choices,
    reference_of,
    teacher_form,
    teacher_place,
    teacher_streams,
    teacher_tokens,
    transformers_choices,
)
from bloomery.plan.estimate import speed
from bloomery.plan.estimate.activations import gpu_fallback_bytes, keeps_scores
from bloomery.plan.estimate.measured import StepEstimator, compile_gain
from bloomery.plan.estimate.mesh import ONE_DEVICE, MeshSplit
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import ReferencePlace, StepShape, Stream
from bloomery.plan.gather import Facts, fetch, gather, sees_pictures
from bloomery.plan.learning_rates import with_usual_values
from bloomery.plan.pictures import sees_both_ways, step_pictures
from bloomery.plan.routers import counts_first, router_choices, router_plan
from bloomery.plan.types import (
    LAZY_CONNECTIONS,
    CheckpointPlan,
    DataPlan,
    DatasetFacts,
    Decision,
    EpisodesPlan,
    Estimate,
    EvalPlan,
    Lengths,
    LoggingPlan,
    MemoryEstimate,
    ModelPlan,
    OptimizerPlan,
    ParallelPlan,
    RolloutPlan,
    RunPlan,
    SamplePlan,
    StreamPlan,
    TrainPlan,
)
from bloomery.plan.unsupported_layouts import refuse_mesh
from bloomery.plan.vision import refuse_pictures, vision_choices, vision_plan
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.objectives import RewardedRollouts, Rollouts
from bloomery.recipe.schema import (
    IF_INSTALLED,
    AnyObjective,
    Command,
    PipelineTransport,
    Recipe,
    Wsd,
)

# Libraries of matmuls sum in the same order in every run only with these variables.
DETERMINISM = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "ROCBLAS_DEFAULT_ATOMICS_MODE": "0"}

T = TypeVar("T")
Precision = Literal["float32", "bfloat16", "float16", "bfloat16-pure"]


def resolve(loaded_recipe: LoadedRecipe, facts: Facts, *, gpus: int = 1, nodes: int = 1) -> RunPlan:
    """The plan of a training run on the facts' machine, or on `nodes` nodes with `gpus` devices like its own each.

    Raises UserError for settings that the machine does not support; a run that does not fit is planned.
    """
    profile = facts.profile
    config = facts.config
    recipe, optimizer_choices = with_usual_values(loaded_recipe.recipe, config)

    # Without a number of devices from the caller the recipe's sizes of `parallel` count.
    gpus, nodes = mesh.assumed_devices(recipe.parallel, gpus=gpus, nodes=nodes)
    refuse_mesh(profile, gpus=gpus, nodes=nodes)
    scoring.refuse_scoring(recipe, facts.teacher, are_unequal=facts.machine.together)

    # How a step computes comes first: the length of the run in steps follows from its batch.
    step = _choose_step_and_reference(recipe, facts, gpus=gpus, nodes=nodes)
    scale = step.scale
    micro_batching = step.micro_batching
    # Some settings fit only so many steps. Epochs of a dataset that is not prepared yet are no number to refuse them
    # by; the second plan of a run has counted them.
    if not (scale.guessed and recipe.train.length.unit == "epochs"):
        unsupported.refuse_settings(recipe, config, steps=scale.steps)

    # A run of a wall time has no number of steps, whatever the estimate says.
    settings = recipe.train
    eval_steps = _steps_between_evaluations(recipe, scale)
    timed = settings.length.unit == "seconds"
    steps = None if timed else scale.steps
    layout = None if step.parallel is None else step.parallel.layout  # None on one device
    checkpoints = choose_checkpoints(
        recipe,
        facts.model,
        scale,
        precision=step.precision.value,
        layout=layout,
        nodes=nodes,
        eval_steps=eval_steps,
        pictures=step_pictures(recipe, facts.dataset),
    )
    plan = RunPlan(
        name=loaded_recipe.name,
        model=ModelPlan(
            config=config,
            source=facts.source,
            attention=step.attention.value,
            attention_is_set=recipe.train.attention != "auto",
            score_chunk=micro_batching.score_chunk.value,
            # Compiled with attention alone, so that one setting decides whether a run needs the machine's compiler. The
            # compiled code has neither a softcap nor a gradient of entropies.
            scores="compiled"
            if step.attention.value == "compiled"
            and config.final_softcap is None
            and not getattr(recipe.objective, "entropy_coef", 0.0)
            else "torch",
            new_ids=facts.new_ids,
        ),
        data=DataPlan(
            prepared=facts.prepared.absolute(),
            sequence_length=recipe.data.sequence_length,
            layout=recipe.data.layout,
            pin_memory=set_or(profile.pin_memory, recipe.data.pin_memory).value,
            prefetch=set_or(profile.prefetch, recipe.data.prefetch).value,
            on_error=recipe.data.on_error,
        ),
        optimizer=_optimizer(recipe, scale, fused=_fused(recipe, facts).value),
        train=TrainPlan(
            steps=steps,
            seconds=settings.length.amount if timed else None,
            min_steps=settings.min_steps,
            tokens_per_step=step.tokens.value,
            micro_batch_size=micro_batching.micro_batch_size.value,
            accumulation=step.accumulation,
            empty_sequences=layout.sequences - scale.sequences_per_step if layout else 0,
            precision=cast(Precision, step.precision.value),
            compile=step.compiled.value,
            activation_checkpointing=micro_batching.checkpointing.value,
            max_grad_norm=settings.max_grad_norm,
            neftune_alpha=settings.neftune_alpha,
            ema_decay=settings.ema_decay,
            router=router_plan(recipe, config),
            seed=settings.seed,
            deterministic=choose_deterministic(recipe, profile).value,
            threads=max(1, threads(facts.machine) // gpus),  # the ranks of a host share its cores
            replicate=layout.replicate if layout else 1,
            shard=layout.shard if layout else 1,
            pipeline=layout.pipeline if layout else 1,
            context=layout.context if layout else 1,
            expert=layout.expert if layout else 1,
            pipeline_schedule=layout.pipeline_schedule if layout else "1f1b",
            pipeline_layers=layout.pipeline_layers if layout else (),
            pipeline_link=_pipeline_link(recipe, profile, step.parallel),
            device=profile.device.value,
            offload_activations=settings.offload_activations,
            stream=step.stream.value,
            stream_micro_batches=step.micro_batching.step.stream_micro_batches,
            stream_host=step.micro_batching.step.stream_host,
            scoring_devices=recipe.parallel.scoring_devices,
        ),
        checkpoint=checkpoints.value,
        eval=EvalPlan(
            every_steps=eval_steps,
            on_start=recipe.eval.on_start,
            sequences=lengths.evaluation_sequences(
                eval_steps, scale, tokens=_number(recipe.eval.tokens)
            ),
            early_stopping_patience=_number(recipe.eval.early_stopping_patience),
            micro_batch_size=micro_batching.micro_batch_size.value,
        ),
        sample=SamplePlan(**recipe.sample.model_dump()),
        logging=_logging(recipe, scale),
        objective=step.objective,
        rewards=tuple(recipe.rewards),
        episodes=EpisodesPlan.of(recipe),
        adapter=recipe.adapter,
        vision=vision_plan(recipe),
        quantize=recipe.quantize,
        quantized_by=step.dequantizer.value,
        torch=facts.machine.software.torch or "",
        memory=step.memory,
        step_seconds=step.seconds,
        total_tokens=None if steps is None else round(steps * step.trained_tokens),
        choices=_decisions(recipe, facts, step, optimizer_choices, checkpoints),
        lengths=_lengths(recipe),
        dataset=facts.dataset,
        environment=profile.environment.value,
        parallel=step.parallel,
        rollout=step.rollout,
        stream=step.stream_plan,
        scoring=scoring.plan_scoring(
            recipe,
            StepEstimator.of(recipe, facts.machine, profile),
            micro_batching.step,
            step.memory,
            reward_models=facts.reward_models,
            rank_sequences=step.computed_sequences,
            ranks=gpus,
        ),
    )
    if sees_pictures(facts.dataset):
        refuse_pictures(plan)
    return plan


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The choices about a step that depend on each other.

    `scale`: the step in sequences, tokens and epochs. `seconds`: of the step, None where the device's speed is unknown.
    `parallel`: every layout over several devices, None on one. `stream_plan`: None where all weights are on the device.
    """

    tokens: Choice[int]
    precision: Choice[str]
    attention: Choice[str]
    compiled: Choice[bool]
    dequantizer: Choice[Dequantizer]
    scale: lengths.Scale
    micro_batching: batch.MicroBatching
    seconds: Estimate | None
    parallel: ParallelPlan | None
    rollout: RolloutPlan | None
    reference: ReferencePlace
    objective: AnyObjective
    stream: Choice[Stream]
    stream_plan: StreamPlan | None
    teacher_forms: tuple[teachers.TeacherForm, ...]

    @property
    def computed_sequences(self) -> int:
        """Of a step, on each device: completions are packed."""
        if self.rollout is not None:
            return self.rollout.micro_batches * self.micro_batching.micro_batch_size.value
        return self.accumulation * self.micro_batching.micro_batch_size.value

    @property
    def memory(self) -> MemoryEstimate:
        """Of the moment that needs most: a step, or the sampling of completions."""
        return self.micro_batching.memory

    @property
    def accumulation(self) -> int:
        """Micro-batches per step and device."""
        if self.parallel is not None:
            return self.parallel.layout.accumulation
        return self.scale.sequences_per_step // self.micro_batching.micro_batch_size.value

    @property
    def trained_tokens(self) -> float:
        return self.tokens.value if self.rollout is None else self.rollout.tokens_per_step


class _Layout(NamedTuple):
    """How a step runs on its devices."""

    micro_batching: batch.MicroBatching
    seconds: Estimate | None
    parallel: ParallelPlan | None
    rollout: RolloutPlan | None
    stream: Choice[Stream]
    stream_plan: StreamPlan | None
    teacher_forms: tuple[teachers.TeacherForm, ...]


def _choose_step_and_reference(recipe: Recipe, facts: Facts, *, gpus: int, nodes: int) -> _Step:
    """The step, with the place of a frozen copy of the start where the objective needs one: on the device where that
    fits, else on the host. Raises UserError.
    """
    if reference_of(recipe.objective, recipe.adapter, recipe.vision.train).value != "copy":
        return _choose_step(recipe, facts, gpus=gpus, nodes=nodes, reference="none")
    objective = recipe.objective
    assert isinstance(objective, RewardedRollouts)
    has_host = facts.profile.accelerator is not None
    unsupported_objectives.refuse_reference(recipe, facts.config, devices=gpus * nodes)
    place: ReferencePlace = "device" if objective.reference == "auto" else objective.reference
    if place == "host" and not has_host:
        place = "device"
    step = _choose_step(recipe, facts, gpus=gpus, nodes=nodes, reference=place)
    all_on_device = step.memory.fits and step.stream_plan is None
    if objective.reference == "auto" and has_host and gpus * nodes == 1 and not all_on_device:
        on_host = _choose_step(recipe, facts, gpus=gpus, nodes=nodes, reference="host")
        # The reference on the host costs less than weights that stream.
        costs_less = on_host.stream_plan is None or not step.memory.fits
        return on_host if on_host.memory.fits and costs_less else step
    return step


def _choose_step(
    recipe: Recipe, facts: Facts, *, gpus: int, nodes: int, reference: ReferencePlace
) -> _Step:
    """Makes the choices about a step in the order in which they depend on each other. Raises UserError."""
    profile = facts.profile
    config = facts.config
    dataset = facts.dataset
    torch = facts.machine.software.torch
    train = recipe.train
    length = recipe.data.sequence_length
    estimator = StepEstimator.of(recipe, facts.machine, profile)

    # The batch follows from the model and the dataset alone: it never depends on the machine. Fine-tuning takes smaller
    # ones than pretraining.
    tokens = batch.choose_tokens_per_step(
        recipe.tokens_per_step,
        config,
        length,
        sequences_per_epoch=dataset.sequences_per_epoch if dataset else None,
        tuning=not recipe.objective.spec.reads_text or recipe.adapter.kind != "none",
    )
    if isinstance(recipe.objective, Rollouts):
        tokens = batch.of_whole_groups(
            tokens, length, num_generations=recipe.objective.num_generations
        )

    # What one step computes. Compilation needs the length of the run, which needs the batch.
    precision = set_or(profile.dtype, train.precision)
    attention = choose_attention(recipe, config, profile, precision=precision.value, torch=torch)
    if sees_both_ways(dataset) and attention.value not in SEES_BOTH_WAYS:
        attention = Choice("mask", "tokens of a picture attend to those after them, too")
    shape = step_shape(
        recipe,
        facts.model,
        profile,
        dataset,
        facts.teacher,
        precision=precision.value,
        attention=attention.value,
    )
    teachers.refuse_small_host(shape, estimator)
    scale = lengths.scale_of(train.length, length, dataset, tokens.value)
    compiled = _compiled(recipe, facts, estimator, shape, scale)
    shape = replace(
        shape,
        compiled=compiled.value,
        reference=reference,
        ranks_per_scorer=gpus / max(1, recipe.parallel.scoring_devices),
        counts_first=counts_first(recipe, config),
    )
    if shape.pictures is not None:
        read_ahead = set_or(profile.prefetch, recipe.data.prefetch).value
        waiting = scale.sequences_per_step + read_ahead
        shape = replace(shape, pictures=replace(shape.pictures, waiting_sequences=waiting))

    def forms_of(
        step: StepShape,
        measure: batch.Measure,
        seconds: Callable[[StepShape], float | None],
        split: MeshSplit,
    ) -> tuple[teachers.TeacherForm, ...]:
        """Those of the teacher in this layout, on GPUs: the memory of a CPU is the host's."""
        if step.teacher is None or profile.accelerator is None:
            return ()
        scored_apart = recipe.model_copy(
            update={"parallel": recipe.parallel.model_copy(update={"scoring_devices": 1})}
        )
        may_score_apart = not any(
            support_matrix.refusals(scored_apart, axis, config)
            for axis in support_matrix.ALL_AXES
            if getattr(split, axis) > 1
        )
        return teachers.teacher_forms(
            step,
            measure=measure,
            seconds=lambda form: (
                None if form.teacher_stream and estimator.host_link is None else seconds(form)
            ),
            devices=split.replicate * split.shard,
            host_devices=gpus + recipe.parallel.scoring_devices if may_score_apart else 1,
            states_tokens=most_loss_tokens(recipe),
        )

    def choose_layout(sequences: int) -> _Layout:
        """Micro-batches, seconds and layouts of a step, with its rollout: on one device, or the best of those over
        several.
        """
        moments = rollouts.RolloutMoments.of(recipe, facts, sequences)
        if gpus * nodes > 1:
            streaming.refuse_stream(recipe, config, profile, devices=gpus * nodes)
            of_device = replace(
                streaming.shape_on_replicas(recipe, shape, facts.machine),
                context=recipe.parallel.context,
                expert=recipe.parallel.expert,
            )
            workload = mesh.MeshWorkload.of(
                facts.machine,
                profile,
                of_device,
                estimator,
                sequences_per_step=sequences,
                gpus=gpus,
                nodes=nodes,
                assumed_network=recipe.parallel.network,
                rollout_moments=moments,
            )
            best, plan = mesh.plan_mesh(workload, recipe)
            best_step = best.micro_batching.step
            rollout = None
            if moments is not None:
                rollout = rollouts.plan_rollout(
                    moments,
                    estimator,
                    best_step,
                    workload.step_memory(best.split, best_step),
                    split=best.split,
                    step_seconds=best.seconds,
                    fabric=workload.fabric,
                )
            choice, stream_plan = streaming.on_replicas(
                recipe, estimator, best_step, step_tokens=best.sequences * length, per_node=gpus
            )
            # Ranks of a host have one copy; those of a pipeline's last stage one each.
            sharing = best.split.replicate * best.split.shard
            copies = min(gpus, sharing) if best.split.pipeline > 1 else 1
            teachers.refuse_small_host(best_step, estimator, copies=copies)
            forms = forms_of(
                best_step,
                workload.memory(best.split),
                partial(mesh.step_seconds, workload, best.split, best.sequences),
                best.split,
            )
            return _Layout(
                best.micro_batching, best.seconds, plan, rollout, choice, stream_plan, forms
            )
        unsupported_layouts.refuse_context(recipe, config, 1)

        def estimated(step: StepShape) -> Estimate | None:
            computed = sequences if moments is None else moments.packed_sequences(step)
            parts = estimator.step_parts(step, computed * length)
            return speed.total(parts) if parts else None

        def peak(step: StepShape) -> MemoryEstimate:
            step_memory = estimator.memory(step)
            return step_memory if moments is None else moments.peak(step, step_memory)

        def seconds_of(step: StepShape) -> float | None:
            estimate = estimated(step)
            return None if estimate is None else estimate.value

        def choose(of_step: StepShape) -> batch.MicroBatching:
            return batch.choose_micro_batching(
                streaming.settings_of(train, of_step),
                of_step,
                sequences_per_step=sequences,
                measure=peak,
                seconds=seconds_of,
                together=partial(
                    streaming.together,
                    recipe,
                    sequences=sequences,
                    measure=peak,
                    seconds=seconds_of,
                ),
            )

        stream, micro_batching, stream_plan = streaming.choose_stream(
            recipe,
            config,
            estimator,
            shape,
            step_tokens=sequences * length,
            choose=choose,
            seconds=seconds_of,
        )
        step = micro_batching.step
        seconds = estimated(step)
        rollout = None
        if moments is not None:
            rollout = rollouts.plan_rollout(
                moments,
                estimator,
                step,
                estimator.memory(step),
                split=ONE_DEVICE,
                step_seconds=seconds,
            )
        forms = forms_of(step, peak, seconds_of, ONE_DEVICE)
        return _Layout(micro_batching, seconds, None, rollout, stream, stream_plan, forms)

    layout = choose_layout(scale.sequences_per_step)

    # An optimizer inside backward frees each gradient at once, so that micro-batches cannot accumulate. Where the
    # recipe leaves the batch open, it becomes the largest micro-batch that fits, and what follows is chosen again.
    open_batch = shape.mode.fused_backward and train.auto_batch
    if open_batch and layout.micro_batching.micro_batch_size.value < scale.sequences_per_step:
        reason = "optimizer.fused_backward: a step is one micro-batch, the largest that fits"
        tokens = Choice(layout.micro_batching.step.tokens_per_micro_batch, reason)
        scale = lengths.scale_of(train.length, length, dataset, tokens.value)
        layout = choose_layout(scale.sequences_per_step)
    micro_batching, seconds, parallel, rollout, stream, stream_plan, teacher_forms = layout
    if rollout is not None:
        seconds = speed.total(rollout.seconds) if rollout.seconds else None
    if stream_plan is not None:
        compiled = Choice(False, streaming.UNCOMPILED)

    # A run of a wall time has about as many steps as the estimate says; without an estimate they stay unknown.
    step_seconds = seconds.value if seconds else None
    return _Step(
        tokens=tokens,
        precision=precision,
        attention=attention,
        compiled=compiled,
        dequantizer=dequantizer(
            facts.machine,
            recipe.quantize.kind,
            device=profile.device.value,
            compiled=compiled.value,
        ),
        scale=replace(
            scale,
            steps=scale.steps or lengths.provisional_steps(train.length, step_seconds),
            step_seconds=step_seconds,
        ),
        micro_batching=micro_batching,
        seconds=seconds,
        parallel=parallel,
        rollout=rollout,
        reference=reference,
        objective=recipe.objective
        if reference == "none"
        else recipe.objective.model_copy(update={"reference": reference}),
        stream=stream,
        stream_plan=stream_plan,
        teacher_forms=teacher_forms,
    )


def step_shape(
    recipe: Recipe | RunPlan,
    model: TrainedModel,
    profile: Profile,
    dataset: DatasetFacts | None,
    teacher: ModelConfig | None,
    *,
    precision: str,
    attention: str,
) -> StepShape:
    """A step with micro-batch size 1, uncompiled, that keeps all activations: choices start from it.

    `recipe`: or the finished plan, whose sections have the same keys, to estimate its step again.
    """
    arch = profile.arch
    environment = profile.environment.value
    return StepShape(
        model=model,
        sequence_length=recipe.data.sequence_length,
        micro_batch_size=1,
        precision=precision,
        optimizer=recipe.optimizer.kind,
        attention=attention,
        checkpointing="none",
        compiled=False,
        score_chunk=batch.LARGEST_CHUNK,
        context_bytes=arch.context_mib * MIB if arch else 0.0,
        on_gpu=profile.accelerator is not None,
        expandable=any("expandable_segments:True" in value for value in environment.values()),
        fills_freed=profile.native.value,
        offload_activations=recipe.train.offload_activations,
        teacher=teacher,
        teacher_quantize=teacher_form(recipe),
        is_own_teacher=recipe.objective.own_teacher is not None,
        teacher_stream=teacher_streams(recipe),
        teacher_place=teacher_place(
            recipe, aligns_texts=dataset is not None and dataset.alignment is not None
        ),
        scored_ahead=not isinstance(recipe.objective, Rollouts),
        teacher_tokens=teacher_tokens(recipe),
        extra_forwards=extra_forwards(recipe),
        loss_share=1.0 if dataset is None else dataset.loss_share,
        pictures=step_pictures(recipe, dataset),
    )


def _compiled(
    recipe: Recipe, facts: Facts, estimator: StepEstimator, eager: StepShape, scale: lengths.Scale
) -> Choice[bool]:
    """Whether a step is compiled: by the seconds of the run without it, and by this machine's measurements of both.

    `eager`: the uncompiled step.
    """
    if facts.config.transformers_backend is not None:
        return Choice(False, "compilation is not supported for the transformers implementation")
    gain = compile_gain(
        estimator.measurements, model=facts.config, precision=eager.precision, setting=eager.setting
    )
    seconds = None
    length = recipe.train.length
    if length.unit == "seconds":
        seconds = length.amount
    elif scale.steps is not None and (parts := estimator.step_parts(eager, scale.tokens_per_step)):
        seconds = speed.total(parts).value * scale.steps
    return choose_compile(
        recipe,
        facts.profile,
        seconds,
        gain=gain,
        check=facts.machine.cpu_check,
        config=facts.config,
    )


def _decisions(
    recipe: Recipe,
    facts: Facts,
    step: _Step,
    optimizer_choices: Mapping[str, Choice[float | str]],
    checkpoints: Choice[CheckpointPlan],
) -> tuple[Decision, ...]:
    """Every choice with its reason, in the order in which `bloomery plan` prints them."""
    profile = facts.profile
    config = facts.config
    micro_batching = step.micro_batching

    # How a step computes.
    precision = step.precision
    attention = step.attention
    if precision.value == "float16":  # always with loss scaling
        precision = Choice("float16 + loss scaling", precision.reason)
    # A GPU for which no fused kernel is known may take PyTorch's fallback, which keeps scores that the estimate does
    # not have: the user reads how many bytes. Half a tenth is rounded up.
    if profile.attention.value == "plain" and not keeps_scores(micro_batching.step):
        fallback_gib = gpu_fallback_bytes(micro_batching.step) / GIB
        more_memory = f"PyTorch's fallback needs {int(fallback_gib * 10 + 0.5) / 10:.1f} GiB more"
        attention = Choice(attention.value, f"{attention.reason}; {more_memory}")
    choices: dict[str, Choice[Any]] = {
        "train.precision": precision,
        "train.attention": attention,
        "train.compile": Choice(
            "compiled" if step.compiled.value else "uncompiled", step.compiled.reason
        ),
        "train.tokens_per_step": step.tokens,
    }

    # What lengths become in steps, where that is not what the recipe says.
    partial_step = lengths.left_out(recipe.train.length, step.scale)
    if partial_step and step.scale.steps is not None:
        reason = f"the last {partial_step:,} sequences of {recipe.train.length} fill no step and are left out"
        choices[f"train.{recipe.train.length_key}"] = Choice(f"{step.scale.steps:,} steps", reason)
    if checkpoints.reason != ASKED:
        choices["checkpoint.every"] = Choice(interval_text(checkpoints.value), checkpoints.reason)

    # What the machine decides.
    workers = recipe.data.num_proc
    loader_reason = profile.workers.reason
    workers_choice = Choice(str(workers), f"{ASKED}: processes of `prepare`; {loader_reason}")
    if workers == "auto":
        reason = f"one process for small datasets, every core for large ones; {loader_reason}"
        workers_choice = Choice("by size", reason)
    choices |= {
        "train.micro_batch_size": micro_batching.micro_batch_size,
        "train.activation_checkpointing": micro_batching.checkpointing,
        "parallel.stream": step.stream,
        **({} if step.stream_plan is None else streaming.host_choices(step.stream_plan)),
        "train.deterministic": choose_deterministic(recipe, profile),
        "train.device": profile.device,
        "model.score_chunk": micro_batching.score_chunk,
        "data.num_proc": workers_choice,
        "data.pin_memory": set_or(profile.pin_memory, recipe.data.pin_memory),
        "data.prefetch": set_or(profile.prefetch, recipe.data.prefetch),
        "optimizer.fused": _fused(recipe, facts),
    }
    if variables := " ".join(f"{key}={value}" for key, value in profile.environment.value.items()):
        choices["environment"] = Choice(variables, profile.environment.reason)

    # What model, adapter, objective and optimizer decide.
    on_gpu = profile.accelerator is not None
    more_choices: tuple[tuple[str, Choice[Any]], ...] = (
        *adapters.quantized_choices(recipe, facts.model, step.dequantizer),
        *transformers_choices(recipe, config),
        *adapters.adapter_choices(
            recipe, facts.model, known_vocabulary=facts.known_vocabulary, added=facts.new_tokens
        ),
        *objective_choices(recipe, facts.dataset, facts.teacher, step.reference),
        *teachers.teacher_form_choice(micro_batching.step, step.teacher_forms),
        *vision_choices(recipe),
        *router_choices(recipe, config, accumulation=step.accumulation),
        *optimizer_choices.items(),
        *arithmetic_choices(
            recipe,
            facts.model,
            precision=step.precision.value,
            pictures=step_pictures(recipe, facts.dataset),
        ),
        *optimizer_memory_choices(recipe, accelerator=on_gpu, precision=step.precision.value),
    )

    decisions = []
    for key, choice in (*choices.items(), *more_choices):
        value = str(choice.value)
        if isinstance(choice.value, bool):
            value = "yes" if choice.value else "no"
        decisions.append(Decision(key=key, value=value, reason=choice.reason))
    return tuple(decisions)


def _steps_between_evaluations(recipe: Recipe, scale: lengths.Scale) -> int | None:
    """Steps between evaluations; None where the recipe has none."""
    interval = recipe.eval.every
    return None if interval == "none" else lengths.steps_of(interval, scale, key="eval.every")


def _optimizer(recipe: Recipe, scale: lengths.Scale, *, fused: bool) -> OptimizerPlan:
    section = recipe.optimizer
    assert section.warmup != "auto", "with_usual_values was not called"
    decay = _decay(section.schedule)
    by_time = recipe.train.length.unit == "seconds"
    if by_time and decay is not None and decay.unit not in ("percent", "seconds"):
        raise UserError(
            f"a decay in {decay.unit} needs a number of steps, which train.max_time does not set",
            where="optimizer.schedule.decay",
            fix="write it in % or as a time, such as 20%",
            code=2,
        )
    shared = type(section).model_fields.keys() & OptimizerPlan.model_fields.keys()
    values = {name: getattr(section, name) for name in shared} | {
        "muon_learning_rate": section.muon_learning_rate or section.learning_rate,
        "fused": fused,
        "schedule": Wsd() if section.schedule == "wsd" else section.schedule,
        "warmup_steps": lengths.steps_of(section.warmup, scale, key="optimizer.warmup"),
        "decay_steps": 0
        if decay is None
        else lengths.steps_of(decay, scale, key="optimizer.schedule.decay"),
    }
    return OptimizerPlan(**values)


def _logging(recipe: Recipe, scale: lengths.Scale) -> LoggingPlan:
    section = recipe.logging
    default = "trackers" not in section.model_fields_set  # then TensorBoard where it is installed
    return LoggingPlan(
        every_steps=lengths.steps_of(section.every, scale, key="logging.every"),
        trackers=(IF_INSTALLED,)
        if default
        else tuple(tracker for tracker in section.trackers if not isinstance(tracker, Command)),
        commands=tuple(
            tracker.command for tracker in section.trackers if isinstance(tracker, Command)
        ),
        max_gpu_temperature=None
        if section.max_gpu_temperature == "none"
        else section.max_gpu_temperature,
        memory=section.memory,
        completions=section.completions,
        profile_steps=None
        if section.profile_steps == "none"
        else (section.profile_steps[0], section.profile_steps[1]),
    )


def _lengths(recipe: Recipe) -> Lengths:
    assert recipe.optimizer.warmup != "auto", "with_usual_values was not called"
    return Lengths(
        train=recipe.train.length,
        warmup=recipe.optimizer.warmup,
        decay=_decay(recipe.optimizer.schedule),
        checkpoint=recipe.checkpoint.every,
        evaluation=None if recipe.eval.every == "none" else recipe.eval.every,
    )


def _fused(recipe: Recipe, facts: Facts) -> Choice[bool]:
    """Whether torch's fused AdamW does the update; memory-saving states need Bloomery's own."""
    spec = OPTIMIZERS[recipe.optimizer.kind]
    if spec.always_native or facts.model.mode.saves_optimizer_memory:
        return Choice(False, f"Bloomery's {spec.name}, in float32 pieces of bounded size")
    return facts.profile.fused_optimizer


def set_or(planned: Choice[T], recipe_value: T | Literal["auto"]) -> Choice[T]:
    """The recipe's own value, else the planned one."""
    return planned if recipe_value == "auto" else Choice(recipe_value, ASKED)


def _decay(schedule: str | Wsd) -> Duration | None:
    """The decay of a warmup-stable-decay schedule; None for any other."""
    if schedule == "wsd":
        return Wsd().decay
    return schedule.decay if isinstance(schedule, Wsd) else None


def _pipeline_link(
    recipe: Recipe, profile: Profile, parallel: ParallelPlan | None
) -> Literal["auto"] | PipelineTransport:
    """How stages send to each other: between CPUs there is one way, between GPUs the preflight measures which.

    Raises UserError.
    """
    link = recipe.parallel.pipeline_link
    if profile.accelerator is not None:
        return link
    if link == "device" and parallel is not None and parallel.layout.pipeline > 1:
        raise UserError(
            "the stages of this pipeline are on CPUs, which have no device link",
            where="parallel.pipeline_link",
            fix="set parallel.pipeline_link=auto",
            code=2,
        )
    return "host"


def _number(value: int | str) -> int | None:
    """The number of a recipe's value; None for "auto"."""
    return value if isinstance(value, int) else None


def plan_environment(plan: RunPlan) -> dict[str, str]:
    """Environment variables that the plan needs before torch is imported; the user's own are not looked at."""
    fixed = DETERMINISM if plan.train.deterministic and is_accelerator(plan.train.device) else {}
    lazy = {LAZY_CONNECTIONS: "1"} if plan.train.connects_lazily else {}
    return {**plan.environment, "OMP_NUM_THREADS": str(plan.train.threads), **fixed, **lazy}


def child_environment(plan: RunPlan, user_environment: Mapping[str, str]) -> dict[str, str]:
    """The user's variables, with those of the plan that the user does not set. Creates the folder of local caches."""
    return local_caches(plan_environment(plan)) | dict(user_environment)


def local_facts(loaded_recipe: LoadedRecipe, machine: Machine | None = None) -> Facts:
    """The facts for `machine` (default: this one), with the dataset as far as it is on this disk.

    Downloads the model's config and tokenizer. Raises UserError for all that `bloomery train` refuses on any machine
    before its first step: it reads the recipe, the headers of the model's files and the first rows of the data.
    """
    fetch(loaded_recipe.recipe, weights=False)
    return gather(
        loaded_recipe, machine or detect(), prepared=prepared_folder(loaded_recipe, Path.cwd())
    )


def local_plan(
    loaded_recipe: LoadedRecipe,
    *,
    gpu: str | None = None,
    machine: Machine | None = None,
    gpus: int = 1,
    nodes: int = 1,
    host_memory: int | None = None,
) -> tuple[RunPlan, Facts]:
    """The plan and its facts, for `machine` (default: this one), or for that with the named GPU of the table.

    `host_memory`: bytes of a node; None: that of the machine, or of one that usually has such GPUs. Raises
    UserError as `local_facts` does, and for settings that this machine does not support.
    """
    facts = local_facts(loaded_recipe, machine)
    if gpu is not None:
        named = with_gpus(facts.machine, find_gpus(gpu))
        facts = facts.on(with_host_memory(named, host_memory, gpus=gpus))
    elif host_memory is not None:
        facts = facts.on(with_host_memory(facts.machine, host_memory))
    return resolve(loaded_recipe, facts, gpus=gpus, nodes=nodes), facts
