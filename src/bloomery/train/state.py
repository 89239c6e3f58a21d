"""Training state: model, optimizer, position in the data and progress, in and out of checkpoints."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bloomery.core.errors import UserError
from bloomery.data.order import Cursor
from bloomery.data.pictures.encoder import saved_vision
from bloomery.facts.config import whole_model
from bloomery.facts.pictures import is_projector
from bloomery.infer.forward import matmul_dtype, prepare_weights
from bloomery.model.adapters.lora import adapt, adapt_tower, tower_pairs
from bloomery.model.adapters.peft_methods import PeftAdapter, method_config
from bloomery.model.adapters.settings import Base, adaptation, base_of
from bloomery.model.adapters.tower import read_tower_adapter
from bloomery.model.decoder import VALUE_HEAD, Backbone, Decoder
from bloomery.model.io.weights import init_weights, quantize_model
from bloomery.model.vision import load_tower, read_trained_tower
from bloomery.parallel.apply import apply, checkpoint_block
from bloomery.parallel.context import HeadExchange
from bloomery.parallel.experts import RowExchange, divide_experts
from bloomery.parallel.fsdp import apply_fsdp
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.parallel.pipeline import PipelineLink, StageParameters, transport_of
from bloomery.parallel.stage import keep_stage
from bloomery.plan.pipeline import stage_of
from bloomery.plan.types import RunPlan, TrainPlan
from bloomery.plan.vision import refuse_pictures
from bloomery.recipe.schema import Lora, NoAdapter, Peft
from bloomery.train.checkpoint.checkpointed_model import (
    CheckpointedModel,
    DrawWeights,
    FullWeights,
    InitialWeights,
    LoraWeights,
    PeftWeights,
)
from bloomery.train.checkpoint.rank_writers import RowsOnRanks
from bloomery.train.checkpoint.saver import MODEL, Parts, read_part, read_state, stored_part
from bloomery.train.nonfinite import NonFinite
from bloomery.train.optim.average import WeightAverage, average_of
from bloomery.train.optim.build import OptimizersContainer, build_optimizer
from bloomery.train.rl.prompt_history import PromptHistory
from bloomery.train.rl.rollout import Rollout
from bloomery.train.step import LossScale, ModelAndOptimizer

OPTIMIZER = "optimizer"
VALUES = "value_head"  # the part with PPO's value head, which no exported model has
PROMPTS = "prompts"  # the part with the prompts that are left out
ROLLOUT = "rollout"  # the part with completions that are still to be trained on
TRAINED = "trained"  # the part with the trained weights, where the model is their average


@dataclass
class RunProgress:
    """Counters of a run."""

    step: int = 0  # optimizer steps, including skipped ones
    tokens: int = 0  # positions, including padding
    seconds: float = 0.0  # training time up to the checkpoint, without repeated steps
    best_loss: float | None = None  # lowest validation loss
    best_step: int | None = None  # the first with that loss
    evaluations_since_best: int = 0
    eval_due: bool = False  # a stop interrupted the evaluation of this step

    @classmethod
    def of(cls, counters: dict[str, Any]) -> "RunProgress":
        """From a checkpoint. Checkpoints of other versions may lack some of the counters, or have more."""
        known_names = cls.__dataclass_fields__
        return cls(**{name: value for name, value in counters.items() if name in known_names})

    def note_evaluation(self, loss: float) -> bool:
        """Whether the evaluation of this step is the best so far. A non-finite loss is no improvement."""
        improved = math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss)
        if improved:
            self.best_loss = loss
            self.best_step = self.step
        self.evaluations_since_best = 0 if improved else self.evaluations_since_best + 1
        return improved


@dataclass
class TrainState:
    """Everything that a checkpoint restores.

    `cursor`: the next sequence. `non_finite` counts non-finite steps and decides how training continues after one.
    `checkpointed_model` writes and reads the model's weights. `base`: the model that an adapter adapts; None without an
    adapter. `rollout`: the completions that the next steps train on; None where none are sampled. `prompt_history`:
    what the run knows of its prompts, if it samples completions.
    """

    model_and_optimizer: ModelAndOptimizer
    cursor: Cursor
    progress: RunProgress
    non_finite: NonFinite
    checkpointed_model: CheckpointedModel
    base: Base | None = None
    rollout: Rollout | None = None
    prompt_history: PromptHistory = field(default_factory=PromptHistory)

    @property
    def model(self) -> Decoder:
        return self.model_and_optimizer.model

    @property
    def optimizer(self) -> OptimizersContainer:
        return self.model_and_optimizer.optimizer

    @property
    def average(self) -> WeightAverage | None:
        return self.model_and_optimizer.average

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the block the model is the one to evaluate and to save: with averaged weights, if there are any."""
        if self.average is None:
            yield
            return
        stream = self.model.weight_stream
        with self.average.swapped():
            if stream is not None:
                stream.weights_changed()
            yield
        if stream is not None:
            stream.weights_changed()

    def model_parts(self) -> Parts:
        """The live tensors of a checkpoint that is used but not resumed from. Call it inside `averaged`."""
        return {MODEL: self.checkpointed_model.weights()}

    def parts(self) -> Parts:
        """The live tensors of a checkpoint to resume from, by part. Call it inside `averaged`."""
        # Inside `averaged` the model and its average have changed places: the average holds the trained weights.
        trained = {} if self.average is None else {TRAINED: self.average.tensors}
        return {
            **self.model_parts(),
            **self.checkpointed_model.resume_parts(),
            **trained,
            **self._rollout_parts,
            **self._value_head_part,
            OPTIMIZER: self.optimizer.named_tensors(),
        }

    @property
    def _rollout_parts(self) -> Parts:
        """Every rank has the same: of a pipeline the first stage hands them in."""
        if self.model_and_optimizer.mesh.stage > 0:
            return {}
        rollout = self._unfinished_rollout
        prompts = self.prompt_history.tensors()
        return {
            **({} if rollout is None else {ROLLOUT: rollout.tensors()}),
            **({PROMPTS: prompts} if prompts else {}),
        }

    @property
    def _value_head_part(self) -> Parts:
        value_head = self.model.value_head
        return {} if value_head is None else {VALUES: {VALUE_HEAD: value_head.weight.detach()}}

    @property
    def _unfinished_rollout(self) -> Rollout | None:
        """The rollout, where steps are still to train on it."""
        if self.rollout is None or self.rollout.is_over(self.progress.step):
            return None
        return self.rollout

    def is_owned(self, name: str) -> bool:
        """Whether this rank's tensor of that name goes into a checkpoint.

        A tied embedding is on the first and the last stage of a pipeline: the first one saves it.
        """
        stage_parameters = self.model_and_optimizer.stage_parameters
        return stage_parameters is None or stage_parameters.owns(
            name, self.model_and_optimizer.mesh
        )

    def rows_on_ranks(self) -> RowsOnRanks:
        """What a rank holds of the tensors of `parts`."""
        return RowsOnRanks(self.optimizer.is_split, self.is_owned, (MODEL, TRAINED, OPTIMIZER))

    def scalars(self) -> dict[str, Any]:
        """Everything but tensors, for `state.json` on rank 0.

        All ranks call it: the optimizer's step counts of a stage's parameters are on that stage alone.
        """
        rollout = self._unfinished_rollout
        loss_scale = self.model_and_optimizer.loss_scale
        return {
            "cursor": asdict(self.cursor),
            "progress": asdict(self.progress),
            "optimizer": self.model_and_optimizer.mesh.gather_by_name(self.optimizer.scalars()),
            "loss_scale": None if loss_scale is None else asdict(loss_scale),
            "policy": self.non_finite.state(),
            "averaged": 0 if self.average is None else self.average.updates,
            "torch": torch.__version__,
            "base": None if self.base is None else asdict(self.base),
            "rollout": None if rollout is None else rollout.scalars(),
            "prompts": {
                **self.prompt_history.scalars(),
                "num_left_out": len(self.prompt_history.left_out),
            },
            **self.checkpointed_model.resume_scalars(),
        }


def build_state(
    plan: RunPlan,
    *,
    resume_from: Path | None = None,
    run_dir: Path | None = None,
    mesh: Mesh = SINGLE_RANK,
    draw: DrawWeights = init_weights,
) -> TrainState:
    """The state before the first step, or of a checkpoint: built on the meta device, sharded there, filled in place.

    `draw` makes random weights. Raises UserError for a checkpoint of another model, and for an adapter whose base model
    differs from the one it was trained on or the run in `run_dir` started with.
    """
    train = plan.train
    model = empty_model(plan)

    # A stage of a pipeline knows the parameters of the whole model and keeps its own layers.
    stage_parameters = None
    if mesh.stages > 1:
        stage_parameters = StageParameters.of(model)
        become_stage(model, train, mesh)
    model.tie()
    if mesh.context > 1:
        model.share_sequences(HeadExchange(mesh))
    if train.neftune_alpha is not None:
        model.model.embedding_noise = train.neftune_alpha

    # Parallelism and compilation are put onto the model while it has no weights. PEFT replaces modules first, and needs
    # their weights for that: `build_checkpointed_model` compiles then.
    if not isinstance(plan.adapter, Peft):
        apply(model, train, mesh)
    if mesh.expert_mesh is not None:
        divide_experts(model, mesh.expert_mesh, RowExchange(mesh))
    if mesh.device_mesh is not None:
        apply_fsdp(model, train, mesh.device_mesh, mesh.clock)
    if model.weight_stream is not None:
        model.weight_stream.allocate(plan.model.source, run_dir)
    else:
        model.to_empty(device=torch.device(train.device))
    model.tie()  # again: the head has been given a tensor of its own

    # Compiled code adds the few rows of an embedding's gradient that a batch has into `.grad`, and autograd never sees
    # them. An optimizer inside backward and FSDP2 wait for autograd, so they exclude it.
    gradients_are_watched = mesh.shard > 1 or plan.optimizer.fused_backward
    if plan.model.scores == "compiled" and model.stage.embeds and not gradients_are_watched:
        embedding = model.model.embed_tokens.weight
        model.model.adds_rows = embedding.requires_grad and embedding.dtype == torch.float32

    # An adapter names its base model, and a resumed run refuses another one.
    initial = InitialWeights(plan.model.source, train.seed, plan.model.new_ids, run_dir, mesh, draw)
    adapts = not isinstance(plan.adapter, NoAdapter)
    base = None
    if adapts and initial.source is not None:
        # The first rank hashes the base for all: each byte is read from a shared disk once.
        fields_of_base = asdict(base_of(initial.source)) if mesh.first_rank else None
        base = Base(**mesh.broadcast_json(fields_of_base))
    checkpointed_model = build_checkpointed_model(model, plan, initial, base)

    rates = add_vision(model, plan)

    # Completions are sampled without dropout, and their probabilities must be the same in training.
    if plan.objective.spec.samples:
        model.eval()

    # The optimizer is built before the first forward: FSDP2 leaves the root unsharded after it.
    state = TrainState(
        ModelAndOptimizer(
            model,
            build_optimizer(model, plan.optimizer, seed=train.seed, mesh=mesh, rates=rates),
            loss_scale=LossScale() if train.precision == "float16" else None,
            peft_adapter=(
                checkpointed_model.peft_adapter
                if isinstance(checkpointed_model, PeftWeights)
                else None
            ),
            mesh=mesh,
            stage_parameters=stage_parameters,
        ),
        cursor=Cursor(train.seed, 0),
        progress=RunProgress(),
        non_finite=NonFinite(),
        checkpointed_model=checkpointed_model,
        base=base,
    )
    state.model_and_optimizer.average = average_of(model, train.ema_decay)

    if resume_from is not None:
        noted_base = read_state(resume_from).get("base")
        if base is not None and noted_base is not None:
            base.refuse_change(noted_base["digest"], where=str(resume_from))
        checkpointed_model.read_frozen()
    restore(state, resume_from, non_finite_counts=True)
    return state


def empty_model(plan: RunPlan) -> Decoder:
    """The model to train, on the meta device: with LoRA matrices, quantized and in its dtypes."""
    with torch.device("meta"):
        model = Decoder(
            plan.model.config,
            attention=plan.model.attention,
            value_head=plan.objective.spec.value_head,
        )
        if isinstance(plan.adapter, Lora):
            adapt(model, plan.adapter)
        if plan.vision.freeze_language_model:
            model.requires_grad_(False)
        if isinstance(plan.adapter, Peft):
            model.requires_grad_(False)  # PEFT adds its parameters once the base weights are read
        if model.value_head is not None:
            model.value_head.requires_grad_()
    if plan.quantize.kind != "none":
        quantize_model(model, plan.quantize, reader=plan.quantized_by)
    prepare_weights(model, plan.train.precision)
    return model


def add_vision(model: Decoder, plan: RunPlan) -> dict[str, float]:
    """The tower of the model that the run starts from, where its dataset has pictures, with LoRA where the plan has it.

    Returns the learning rates of what is trained of it, by name. Raises UserError.
    """
    source = saved_vision(plan.data.prepared)
    if source is None:
        return {}
    if plan.model.source is None:
        raise UserError(
            "a new model sees no pictures",
            where="model.from",
            fix="name the vision-language model that the dataset was prepared for",
        )
    refuse_pictures(plan)
    # float16 overflows in some towers, as in residual streams of language models.
    precision = plan.train.precision
    tower = load_tower(
        source.vision,
        plan.model.source,
        dtype=torch.float32 if precision == "float16" else matmul_dtype(precision),
        device=model.device,
        train=plan.vision.train,
        trained_dtype=torch.bfloat16 if precision == "bfloat16-pure" else torch.float32,
    )
    if isinstance(plan.adapter, Lora):
        pairs = tower_pairs(tower, plan.adapter)
        adapt_tower(tower, pairs, adaptation(plan.model.config, plan.adapter))
    for index, block in enumerate(tower.blocks if tower.trained else ()):
        checkpoint_block(block, plan.train.activation_checkpointing, index=index)
    model.see(tower)
    if tower.trained and plan.train.shard > 1:
        assert isinstance(model.model, Backbone)
        model.model.backward_in_full = True
    return {
        name: plan.vision.projector_learning_rate
        if is_projector(source.vision.kind, name)
        else plan.vision.learning_rate
        for name in tower.trained
    }


def add_tuned_vision(model: Decoder, plan: RunPlan, folder: Path) -> None:
    """`add_vision` of a finished run, as a checkpoint or an export of its adapter or whole model has it."""
    add_vision(model, plan)
    if model.vision is None:
        return
    if isinstance(plan.adapter, NoAdapter):
        read_trained_tower(model.vision, folder)
    else:
        read_tower_adapter(model.vision, folder)


def become_stage(model: Decoder, train: TrainPlan, mesh: Mesh) -> None:
    """Keep the layers of this rank's stage, in place, with links to the other stages. On the meta device."""
    # The residual stream has the dtype of the embedding, which only some stages keep.
    stream_dtype = model.model.embed_tokens.weight.dtype
    keep_stage(model, stage_of(model.config, mesh.stage, mesh.stages, train.pipeline_layers))
    # Before a send waits for an earlier one, each edge of the pipeline may have one under way in both directions.
    model.model.link = PipelineLink(
        mesh,
        transport_of(mesh, under_way=2 * mesh.stages * train.pipeline_chunks),
        num_groups=train.pipeline_chunks,
        width=model.config.hidden_size,
        dtype=stream_dtype,
    )


def build_checkpointed_model(
    model: Decoder, plan: RunPlan, initial: InitialWeights, base: Base | None
) -> CheckpointedModel:
    """The class that saves the weights of the plan's adapter. An adapter of PEFT is put into the model here.

    PEFT initializes its parameters from the base weights, so that the model has to have them.
    """
    adapter = plan.adapter
    if isinstance(adapter, Lora):
        return LoraWeights(model, initial, adaptation(plan.model.config, adapter), base)
    if isinstance(adapter, Peft):
        initial.fill(model)
        config = method_config(adapter, plan.model.config, steps=plan.train.steps)
        peft_adapter = PeftAdapter(model, config, seed=plan.train.seed)
        if model.value_head is not None:
            model.value_head.requires_grad_()  # PEFT freezes what is not its own
        apply(model, plan.train)
        return PeftWeights(peft_adapter, base)
    return FullWeights(model, initial, trains_text=not plan.vision.freeze_language_model)


def restore(state: TrainState, folder: Path | None, *, non_finite_counts: bool = False) -> None:
    """Restore everything in place from the checkpoint in `folder`; None: the state before the first step.

    `non_finite_counts`: restore the counts of non-finite steps too. A rewind must not, or it would repeat forever.
    """
    state.model_and_optimizer.updating = False  # an interrupted update is undone by this
    if folder is None:
        _restore_start(state, non_finite_counts=non_finite_counts)
    else:
        _restore_checkpoint(state, folder, non_finite_counts=non_finite_counts)
    if state.model.weight_stream is not None:
        state.model.weight_stream.weights_changed()


def _restore_start(state: TrainState, *, non_finite_counts: bool) -> None:
    if non_finite_counts:
        state.non_finite.load(NonFinite().state())
    state.checkpointed_model.initialize()
    if state.model.value_head is not None:
        # The first rollout has no baseline: its values are 0, as far from any reward as from its opposite.
        state.model.value_head.weight.data.zero_()
    if state.average is not None:
        state.average.restore(None, 0)
    state.optimizer.load({}, {})
    state.cursor = Cursor(state.cursor.seed, 0)
    state.progress = RunProgress()
    state.rollout = None
    state.prompt_history = PromptHistory()


def _restore_checkpoint(state: TrainState, folder: Path, *, non_finite_counts: bool) -> None:
    saved_state = read_state(folder)
    if non_finite_counts:
        state.non_finite.load(saved_state["policy"])
    seed = saved_state["cursor"]["seed"]
    if seed != state.cursor.seed:
        raise UserError(
            f"the checkpoint is of a run with train.seed={seed}, not {state.cursor.seed}",
            where=str(folder),
            fix="move it out of the run's checkpoints folder",
        )

    # Where there is an average, the model's part holds the averaged weights, and TRAINED the trained ones. Every stage
    # of a pipeline reads the whole part and takes the tensors of its own layers.
    state.checkpointed_model.read(folder)
    if state.model.value_head is not None:
        state.model.value_head.weight.data.copy_(read_part(folder, VALUES)[VALUE_HEAD])
    if state.average is not None:
        trained = read_part(folder, TRAINED)
        if state.model.stage != whole_model(state.model.config):
            trained = {name: t for name, t in trained.items() if state.model.stage.has(name)}
        state.average.restore(trained, saved_state["averaged"])

    # The optimizer's part has the states of all stages; `load` skips those of other stages by name, and reads the rows
    # of this rank.
    stage_parameters = state.model_and_optimizer.stage_parameters
    with stored_part(folder, OPTIMIZER) as states:
        state.optimizer.load(
            states,
            saved_state["optimizer"],
            other_stages=() if stage_parameters is None else stage_parameters.names,
        )

    # Counters and positions. A rollout is in the checkpoint where steps were still to train on it.
    if state.model_and_optimizer.loss_scale is not None and saved_state["loss_scale"] is not None:
        state.model_and_optimizer.loss_scale = LossScale(**saved_state["loss_scale"])
    state.cursor = Cursor(**saved_state["cursor"])
    state.progress = RunProgress.of(saved_state["progress"])
    prompt_scalars = saved_state.get("prompts")
    has_left_out = prompt_scalars is not None and prompt_scalars.get("num_left_out", 0) > 0
    state.prompt_history = PromptHistory.of(
        read_part(folder, PROMPTS) if has_left_out else {}, prompt_scalars
    )
    state.rollout = None
    if (rollout_scalars := saved_state.get("rollout")) is not None:
        state.rollout = Rollout.of(read_part(folder, ROLLOUT), rollout_scalars)
