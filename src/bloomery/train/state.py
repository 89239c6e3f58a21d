"""Training state: model, optimizer, position in the data and progress, in and out of checkpoints."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch

from bloomery.core.errors import UserError
from bloomery.data.order import Cursor
from bloomery.model.adapters.lora import adapt, init_adapters, note_base, trained_state
from bloomery.model.adapters.peft_files import read_trained, write_adapter, write_named
from bloomery.model.adapters.peft_methods import PeftAdapter, method_config
from bloomery.model.adapters.settings import Adaptation, Base, adaptation, base_of, digest
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import init_weights, quantize_model, read_model, write_model
from bloomery.parallel.apply import apply
from bloomery.parallel.fsdp import apply_fsdp
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.store import note_model
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Lora, NoAdapter, Peft
from bloomery.train.checkpoint import MODEL, Parts, Write, read_part, read_state
from bloomery.train.forward import prepare_weights
from bloomery.train.model_folder import MANIFEST, damage
from bloomery.train.optim.average import WeightAverage, average_of
from bloomery.train.optim.build import OptimizersContainer, build_optimizer
from bloomery.train.run import Diverged
from bloomery.train.step import LossScale, ModelAndOptimizer

TRAINED = "trained"  # the part with the trained weights, where the model is their average
Action = Literal["step", "skip", "rewind"]


@final
@dataclass(kw_only=True)
class NonFinite:
    """The policy for non-finite losses and gradients.

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
    ) -> Action:
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
        tried = f"skipping {self.skips} consecutive steps"
        tried += (
            " and lowering the loss scale to 1"
            if exhausted
            else f" and rewinding {self.rewinds} times"
        )
        raise Diverged(
            f"non-finite {what} at step {step}, sequences {sequences.start} to {sequences.stop - 1}; "
            f"{tried} did not help",
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


METHOD = "method"  # part and state key of what a PEFT method needs to resume


@dataclass(frozen=True)
class InitialWeights:
    """The weights before the first step: a folder's, with new embeddings for `new_ids`, or random ones."""

    source: Path | None
    seed: int
    new_ids: tuple[int, ...] = ()
    run_dir: Path | None = None

    def fill(self, model: Decoder) -> None:
        """Raises UserError when the folder is damaged or its weights changed since the run in `run_dir` started."""
        if self.source is not None:
            if (self.source / MANIFEST).is_file() and (wrong := damage(self.source)) is not None:
                fix = f"choose another checkpoint; delete {MANIFEST} where you changed the folder yourself"
                problem = f"damaged checkpoint in model.from: {wrong}"
                raise UserError(problem, where=str(self.source), fix=fix)
            if self.run_dir is not None:
                note_model(self.run_dir, "base", digest(self.source))
            read_model(model, self.source, seed=self.seed, new=self.new_ids)
        else:
            init_weights(model, self.seed)


@final
@dataclass(frozen=True)
class CheckpointedModel:
    """How a model is saved in checkpoints and read back.

    Without an adapter: every parameter. With `settings`: LoRA matrices and modules to save. With `method`: the
    parameters that a PEFT method added.
    """

    model: Decoder
    start: InitialWeights
    base: Base | None
    settings: Adaptation | None = None
    method: PeftAdapter | None = None

    def parts(self) -> Parts:
        """The live tensors by part; `writer` writes the part MODEL."""
        if self.method is not None:
            return {MODEL: self.method.file_tensors(), METHOD: self.method.resume_tensors()}
        return {
            MODEL: dict(self.model.named_parameters())
            if self.settings is None
            else trained_state(self.model)
        }

    def weights(self) -> Parts:
        """The live tensors of the part MODEL alone."""
        return {MODEL: self.parts()[MODEL]}

    def scalars(self) -> dict[str, Any]:
        """JSON of a PEFT method's schedule."""
        return {} if self.method is None else {METHOD: self.method.resume_scalars()}

    def writer(self) -> Write:
        """A function that writes the model as configured now; training continues while it runs."""
        config = self.model.config
        settings = self.settings
        if self.method is None and settings is None:
            return lambda tensors, folder: write_model(tensors, config, folder)
        assert self.base is not None, "a saved adapter names its base model"
        name = self.base.name
        if settings is not None:
            return lambda tensors, folder: write_adapter(
                tensors, settings, config, folder, base=name
            )
        assert self.method is not None
        config_now = self.method.file_settings(name)  # AdaLoRA's ranks change with every step
        return lambda tensors, folder: write_named(tensors, config_now, folder)

    def begin(self) -> None:
        """Set every weight as before the first step."""
        if self.method is not None:
            self.method.begin_again()
            return
        self.start.fill(self.model)
        if self.settings is not None:
            init_adapters(self.model, self.start.seed)

    def read_frozen(self) -> None:
        """Read the frozen base weights, once before the first `read`. A PEFT method has read its base already."""
        if self.settings is not None:
            self.start.fill(self.model)
            note_base(self.model)

    def read(self, folder: Path) -> None:
        """Read the trained weights of a checkpoint."""
        if self.method is not None:
            self.method.load(read_part(folder, METHOD), read_state(folder)[METHOD])
        elif self.settings is not None:
            read_trained(self.model, self.settings, self.model.config, folder)
        else:
            read_model(self.model, folder)


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
    def of(cls, stored: dict[str, Any]) -> "RunProgress":
        """From a checkpoint. Checkpoints of other versions may lack some of the counters, or have more."""
        return cls(
            **{name: value for name, value in stored.items() if name in cls.__dataclass_fields__}
        )

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

    `cursor`: the next sequence. `policy` decides about non-finite steps. `checkpointed` writes and reads the model.
    `base`: the model that an adapter adapts; None without an adapter.
    """

    model_and_optimizer: ModelAndOptimizer
    cursor: Cursor
    progress: RunProgress
    policy: NonFinite
    checkpointed: CheckpointedModel
    base: Base | None = None

    @property
    def model(self) -> Decoder:
        return self.model_and_optimizer.model

    @property
    def optimizer(self) -> OptimizersContainer:
        return self.model_and_optimizer.optimizer

    @property
    def average(self) -> WeightAverage | None:
        return self.model_and_optimizer.average

    def averaged(self) -> AbstractContextManager[None]:
        """Inside the block the model is the one to use: with averaged weights, if there are any."""
        return nullcontext() if self.average is None else self.average.swapped()

    def parts(self) -> Parts:
        """The live tensors of a checkpoint by part, inside `averaged`."""
        trained = {} if self.average is None else {TRAINED: self.average.tensors}
        return {**self.checkpointed.parts(), **trained, "optimizer": self.optimizer.named_tensors()}

    def scalars(self) -> dict[str, Any]:
        """Everything else, for `state.json`."""
        scale = self.model_and_optimizer.loss_scale
        return {
            "cursor": asdict(self.cursor),
            "progress": asdict(self.progress),
            "optimizer": self.optimizer.scalars(),
            "loss_scale": None if scale is None else asdict(scale),
            "policy": self.policy.state(),
            "averaged": 0 if self.average is None else self.average.updates,
            "torch": torch.__version__,
            "base": None if self.base is None else asdict(self.base),
            **self.checkpointed.scalars(),
        }


def build_state(
    plan: RunPlan,
    *,
    resume_from: Path | None = None,
    run_dir: Path | None = None,
    mesh: Mesh = SINGLE_RANK,
) -> TrainState:
    """The state before the first step, or of a checkpoint: built on the meta device, sharded there, filled in place.

    The optimizer is built before the first forward. Raises UserError for a checkpoint of another model, and for an
    adapter whose base model differs from the one it was trained on or the run in `run_dir` started with.
    """
    model = empty_model(plan)
    model.tie()
    if plan.train.neftune_alpha is not None:
        model.model.embedding_noise = plan.train.neftune_alpha
    if not isinstance(plan.adapter, Peft):  # PEFT replaces modules first
        apply(model, plan.train)
    if mesh.device_mesh is not None:
        apply_fsdp(model, plan.train, mesh.device_mesh, mesh.clock)
    model.to_empty(device=torch.device(plan.train.device))
    model.tie()
    # Whoever watches a gradient arrive (an optimizer inside backward, other ranks) must get it from autograd.
    alone = mesh.world == 1 and not plan.optimizer.fused_backward
    weight = model.model.embed_tokens.weight
    model.model.adds_rows = (
        alone
        and plan.model.scores == "compiled"
        and weight.requires_grad
        and weight.dtype == torch.float32
    )
    start = InitialWeights(plan.model.source, plan.train.seed, plan.model.new_ids, run_dir)
    adapter = plan.adapter
    base = None if start.source is None or isinstance(adapter, NoAdapter) else base_of(start.source)
    method = None
    settings = adaptation(plan.model.config, adapter) if isinstance(adapter, Lora) else None
    if isinstance(adapter, Peft):
        start.fill(model)  # PEFT initializes its parameters from the base weights
        config = method_config(adapter, plan.model.config, steps=plan.train.steps)
        method = PeftAdapter(model, config, seed=plan.train.seed)
        apply(model, plan.train)
    scale = LossScale() if plan.train.precision == "float16" else None
    model_and_optimizer = ModelAndOptimizer(
        model,
        build_optimizer(model, plan.optimizer, seed=plan.train.seed, mesh=mesh),
        scale,
        peft_adapter=method,
        mesh=mesh,
    )
    checkpointed = CheckpointedModel(model, start, base, settings, method)
    state = TrainState(
        model_and_optimizer,
        Cursor(plan.train.seed, 0),
        RunProgress(),
        NonFinite(),
        checkpointed,
        base,
    )
    model_and_optimizer.average = average_of(model, plan.train.ema_decay)
    if resume_from is not None:
        if base is not None and (noted := read_state(resume_from).get("base")) is not None:
            base.refuse_change(noted["digest"], where=str(resume_from))
        checkpointed.read_frozen()
    go_back(state, plan, resume_from, policy=True)
    return state


def empty_model(plan: RunPlan) -> Decoder:
    """The model to train, on the meta device: adapted, quantized and in its dtypes."""
    with torch.device("meta"):
        model = Decoder(plan.model.config, attention=plan.model.attention)
        if isinstance(plan.adapter, Lora):
            adapt(model, plan.adapter)
        if isinstance(plan.adapter, Peft):
            model.requires_grad_(False)  # PEFT adds its parameters once the base weights are read
    if plan.quantize.kind != "none":
        quantize_model(model, plan.quantize, reader=plan.quantized_by)
    prepare_weights(model, plan.train.precision)
    return model


def go_back(state: TrainState, plan: RunPlan, folder: Path | None, *, policy: bool = False) -> None:
    """Restore everything in place from the checkpoint in `folder`; None: the state before the first step.

    `policy`: restore the count of non-finite steps too. A rewind must not, or it would repeat forever.
    """
    state.model_and_optimizer.updating = False
    if policy:
        state.policy.load(NonFinite().state() if folder is None else read_state(folder)["policy"])
    if folder is None:
        state.checkpointed.begin()
        if state.average is not None:
            state.average.restore(None, 0)
        state.optimizer.load({}, {})
        state.cursor = Cursor(plan.train.seed, 0)
        state.progress = RunProgress()
        return
    stored = read_state(folder)
    if stored["cursor"]["seed"] != state.cursor.seed:
        problem = f"the checkpoint is of a run with train.seed={stored['cursor']['seed']}, not {state.cursor.seed}"
        raise UserError(
            problem, where=str(folder), fix="move it out of the run's checkpoints folder"
        )
    state.checkpointed.read(folder)
    if state.average is not None:
        state.average.restore(read_part(folder, TRAINED), stored["averaged"])
    state.optimizer.load(read_part(folder, "optimizer"), stored["optimizer"])
    if state.model_and_optimizer.loss_scale is not None and stored["loss_scale"] is not None:
        state.model_and_optimizer.loss_scale = LossScale(**stored["loss_scale"])
    state.cursor = Cursor(**stored["cursor"])
    state.progress = RunProgress.of(stored["progress"])
