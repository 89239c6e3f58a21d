"""A recipe and its facts as a plan without "auto".

`resolve` reads no file: `gather` does. Suggestions resolve an edited recipe with the same facts. `local_plan` gathers
and resolves a recipe for this machine, with the local dataset.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from bloomery.core import Choice
from bloomery.core.device import is_accelerator
from bloomery.core.errors import UserError
from bloomery.core.units import MIB, Duration
from bloomery.data.prepare.prepare import prepared_folder
from bloomery.facts.config import ModelConfig
from bloomery.facts.pictures import SEES_BOTH_WAYS
from bloomery.hardware.calibration import threads
from bloomery.hardware.dequantizers import dequantizer
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile, local_caches, with_gpus, with_host_memory
from bloomery.hardware.specs import find_gpus
from bloomery.plan import (
    batch,
    lengths,
    mesh,
    scoring,
    streaming,
    teachers,
    unsupported,
    unsupported_objectives,
)
from bloomery.plan.checkpoints import choose_checkpoints
from bloomery.plan.choices import (
    choose_attention,
    choose_compile,
    choose_deterministic,
    choose_fused,
    extra_forwards,
    reference_of,
    set_or,
    teacher_form,
    teacher_place,
    teacher_streams,
    teacher_tokens,
)
from bloomery.plan.decisions import decisions
from bloomery.plan.estimate import speed
from bloomery.plan.estimate.measured import StepEstimator, compile_gain
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import ReferencePlace, StepShape
from bloomery.plan.gather import Facts, fetch, gather, sees_pictures
from bloomery.plan.layout import LayoutChooser
from bloomery.plan.learning_rates import with_usual_values
from bloomery.plan.pictures import sees_both_ways, step_pictures
from bloomery.plan.routers import counts_first, router_plan
from bloomery.plan.step import Step
from bloomery.plan.types import (
    LAZY_CONNECTIONS,
    DataPlan,
    DatasetFacts,
    EpisodesPlan,
    EvalPlan,
    Lengths,
    LoggingPlan,
    ModelPlan,
    OptimizerPlan,
    ParallelPlan,
    RunPlan,
    SamplePlan,
    TrainPlan,
)
from bloomery.plan.unsupported_layouts import refuse_mesh
from bloomery.plan.vision import refuse_pictures, vision_plan
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.objectives import RewardedRollouts, Rollouts
from bloomery.recipe.schema import (
    IF_INSTALLED,
    Command,
    PipelineTransport,
    Recipe,
    Wsd,
)

# Libraries of matmuls sum in the same order in every run only with these variables.
DETERMINISM = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "ROCBLAS_DEFAULT_ATOMICS_MODE": "0"}

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
    # Some settings fit only so many steps. Epochs of a dataset that is not prepared yet are no number to refuse them
    # by; the second plan of a run has counted them.
    if not (scale.guessed and recipe.train.length.unit == "epochs"):
        unsupported.refuse_settings(recipe, config, steps=scale.steps)

    # A run of a wall time has no number of steps, whatever the estimate says.
    steps = None if recipe.train.length.unit == "seconds" else scale.steps
    eval_steps = _steps_between_evaluations(recipe, scale)
    layout = step.layout
    checkpoints = choose_checkpoints(
        recipe,
        facts.model,
        scale,
        precision=step.precision.value,
        layout=None if layout.parallel is None else layout.parallel.layout,
        nodes=nodes,
        eval_steps=eval_steps,
        pictures=step_pictures(recipe, facts.dataset),
    )
    plan = RunPlan(
        name=loaded_recipe.name,
        model=_model(recipe, facts, step),
        data=_data(recipe, facts),
        optimizer=_optimizer(recipe, scale, fused=choose_fused(recipe, profile, facts.model).value),
        train=_train(recipe, facts, step, steps=steps, gpus=gpus),
        checkpoint=checkpoints.value,
        eval=_evaluation(recipe, step, every_steps=eval_steps),
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
        step_seconds=layout.seconds,
        total_tokens=None if steps is None else round(steps * step.trained_tokens),
        choices=decisions(recipe, facts, step, optimizer_choices, checkpoints),
        lengths=_lengths(recipe),
        dataset=facts.dataset,
        environment=profile.environment.value,
        parallel=layout.parallel,
        rollout=layout.rollout,
        stream=layout.stream_plan,
        scoring=scoring.plan_scoring(
            recipe,
            StepEstimator.of(recipe, facts.machine, profile),
            layout.micro_batching.step,
            step.memory,
            reward_models=facts.reward_models,
            rank_sequences=step.computed_sequences,
            ranks=gpus,
        ),
    )
    if sees_pictures(facts.dataset):
        refuse_pictures(plan)
    return plan


def _choose_step_and_reference(recipe: Recipe, facts: Facts, *, gpus: int, nodes: int) -> Step:
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
    all_on_device = step.memory.fits and step.layout.stream_plan is None
    if objective.reference == "auto" and has_host and gpus * nodes == 1 and not all_on_device:
        on_host = _choose_step(recipe, facts, gpus=gpus, nodes=nodes, reference="host")
        # The reference on the host costs less than weights that stream.
        costs_less = on_host.layout.stream_plan is None or not step.memory.fits
        return on_host if on_host.memory.fits and costs_less else step
    return step


def _choose_step(
    recipe: Recipe, facts: Facts, *, gpus: int, nodes: int, reference: ReferencePlace
) -> Step:
    """Makes the choices about a step in the order in which they depend on each other. Raises UserError."""
    profile = facts.profile
    config = facts.config
    dataset = facts.dataset
    train = recipe.train
    length = recipe.data.sequence_length
    estimator = StepEstimator.of(recipe, facts.machine, profile)

    # What one step computes. Compilation needs the length of the run, which needs the batch.
    tokens = _tokens_per_step(recipe, facts)
    precision = set_or(profile.dtype, train.precision)
    attention = _attention(recipe, facts, precision=precision.value)
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

    # How it runs on its devices.
    chooser = LayoutChooser(
        recipe=recipe, facts=facts, estimator=estimator, shape=shape, gpus=gpus, nodes=nodes
    )
    layout = chooser.layout(scale.sequences_per_step)

    # An optimizer inside backward frees each gradient at once, so that micro-batches cannot accumulate. Where the
    # recipe leaves the batch open, it becomes the largest micro-batch that fits, and what follows is chosen again.
    open_batch = shape.mode.fused_backward and train.auto_batch
    if open_batch and layout.micro_batching.micro_batch_size.value < scale.sequences_per_step:
        reason = "optimizer.fused_backward: a step is one micro-batch, the largest that fits"
        tokens = Choice(layout.micro_batching.step.tokens_per_micro_batch, reason)
        scale = lengths.scale_of(train.length, length, dataset, tokens.value)
        layout = chooser.layout(scale.sequences_per_step)
    if layout.stream_plan is not None:
        compiled = Choice(False, streaming.UNCOMPILED)

    # A run of a wall time has about as many steps as the estimate says; without an estimate they stay unknown.
    step_seconds = layout.seconds.value if layout.seconds else None
    return Step(
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
        layout=layout,
        reference=reference,
        objective=recipe.objective
        if reference == "none"
        else recipe.objective.model_copy(update={"reference": reference}),
    )


def _tokens_per_step(recipe: Recipe, facts: Facts) -> Choice[int]:
    """The batch follows from the model and the dataset alone: it never depends on the machine."""
    dataset = facts.dataset
    length = recipe.data.sequence_length
    # Fine-tuning takes smaller ones than pretraining.
    tokens = batch.choose_tokens_per_step(
        recipe.tokens_per_step,
        facts.config,
        length,
        sequences_per_epoch=dataset.sequences_per_epoch if dataset else None,
        tuning=not recipe.objective.spec.reads_text or recipe.adapter.kind != "none",
    )
    if isinstance(recipe.objective, Rollouts):
        return batch.of_whole_groups(
            tokens, length, num_generations=recipe.objective.num_generations
        )
    return tokens


def _attention(recipe: Recipe, facts: Facts, *, precision: str) -> Choice[str]:
    torch = facts.machine.software.torch
    attention = choose_attention(
        recipe, facts.config, facts.profile, precision=precision, torch=torch
    )
    if sees_both_ways(facts.dataset) and attention.value not in SEES_BOTH_WAYS:
        return Choice("mask", "tokens of a picture attend to those after them, too")
    return attention


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


def _steps_between_evaluations(recipe: Recipe, scale: lengths.Scale) -> int | None:
    """Steps between evaluations; None where the recipe has none."""
    interval = recipe.eval.every
    return None if interval == "none" else lengths.steps_of(interval, scale, key="eval.every")


def _model(recipe: Recipe, facts: Facts, step: Step) -> ModelPlan:
    config = facts.config
    # Compiled with attention alone, so that one setting decides whether a run needs the machine's compiler. The
    # compiled code has neither a softcap nor a gradient of entropies.
    scores_compile = (
        step.attention.value == "compiled"
        and config.final_softcap is None
        and not getattr(recipe.objective, "entropy_coef", 0.0)
    )
    return ModelPlan(
        config=config,
        source=facts.source,
        attention=step.attention.value,
        attention_is_set=recipe.train.attention != "auto",
        score_chunk=step.layout.micro_batching.score_chunk.value,
        scores="compiled" if scores_compile else "torch",
        new_ids=facts.new_ids,
    )


def _data(recipe: Recipe, facts: Facts) -> DataPlan:
    profile = facts.profile
    return DataPlan(
        prepared=facts.prepared.absolute(),
        sequence_length=recipe.data.sequence_length,
        layout=recipe.data.layout,
        pin_memory=set_or(profile.pin_memory, recipe.data.pin_memory).value,
        prefetch=set_or(profile.prefetch, recipe.data.prefetch).value,
        on_error=recipe.data.on_error,
    )


def _train(recipe: Recipe, facts: Facts, step: Step, *, steps: int | None, gpus: int) -> TrainPlan:
    """`steps`: None for a run of a wall time, and where the size of a dataset is not known yet."""
    profile = facts.profile
    settings = recipe.train
    micro_batching = step.layout.micro_batching
    parallel = step.layout.parallel
    layout = None if parallel is None else parallel.layout  # None on one device
    return TrainPlan(
        steps=steps,
        seconds=settings.length.amount if settings.length.unit == "seconds" else None,
        min_steps=settings.min_steps,
        tokens_per_step=step.tokens.value,
        micro_batch_size=micro_batching.micro_batch_size.value,
        accumulation=step.accumulation,
        empty_sequences=layout.sequences - step.scale.sequences_per_step if layout else 0,
        precision=cast(Precision, step.precision.value),
        compile=step.compiled.value,
        activation_checkpointing=micro_batching.checkpointing.value,
        max_grad_norm=settings.max_grad_norm,
        neftune_alpha=settings.neftune_alpha,
        ema_decay=settings.ema_decay,
        router=router_plan(recipe, facts.config),
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
        pipeline_link=_pipeline_link(recipe, profile, parallel),
        device=profile.device.value,
        offload_activations=settings.offload_activations,
        stream=step.layout.stream.value,
        stream_micro_batches=micro_batching.step.stream_micro_batches,
        stream_host=micro_batching.step.stream_host,
        scoring_devices=recipe.parallel.scoring_devices,
    )


def _evaluation(recipe: Recipe, step: Step, *, every_steps: int | None) -> EvalPlan:
    return EvalPlan(
        every_steps=every_steps,
        on_start=recipe.eval.on_start,
        sequences=lengths.evaluation_sequences(
            every_steps, step.scale, tokens=_number(recipe.eval.tokens)
        ),
        early_stopping_patience=_number(recipe.eval.early_stopping_patience),
        micro_batch_size=step.layout.micro_batching.micro_batch_size.value,
    )


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
