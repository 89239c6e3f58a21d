"""All that a run must remember: model, optimizer, random numbers, where the data stands, progress."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.data.loading.loader import Cursor
from bloomery.model.adapters.base_model import Base, base_of, digest
from bloomery.model.adapters.lora import adapt, init_adapters, note_base, trained_state
from bloomery.model.adapters.peft_files import read_trained, write_adapter, write_named
from bloomery.model.adapters.peft_methods import PeftAdapter, method_config
from bloomery.model.adapters.targets import Adaptation, adaptation
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import init_weights, quantize_model, read_model, write_model
from bloomery.parallel.apply import apply
from bloomery.plan.store import note_model
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Lora, NoAdapter, Peft
from bloomery.train.checkpoint import MODEL, Parts, Write, read_part, read_state
from bloomery.train.forward import prepare_weights
from bloomery.train.optim.build import build_optimizer
from bloomery.train.run import Diverged
from bloomery.train.sealed import MANIFEST, damage
from bloomery.train.step import LossScale, ModelAndOptimizer

Action = Literal["step", "skip", "rewind"]


@final
class NonFinite:
    """Judges every step before its update.

    Up to `skips` bad steps in a row are skipped; the next one asks for a rewind: load the last good checkpoint, and go
    on with the data after the bad rows. After `rewinds` rewinds the run stops. (PaLM, arXiv:2204.02311 section 5.1,
    restarted before a spike and skipped its batches in the same way.) Loss scaling has bad steps of its own while it
    looks for its scale: give `skips` room for them.
    """

    def __init__(self, *, skips: int = 3, rewinds: int = 2) -> None:
        self.skips, self.rewinds = skips, rewinds
        self._skipped = 0
        self._rewound = 0

    def decide(
        self, finite: bool, *, step: int, sequences: range, what: str = "loss", exhausted: bool = False
    ) -> Action:
        """What to do with the step that would be number `step` and has learned from `rows` of the shuffled data.

        `what` was not finite ("loss", "gradient"). `exhausted`: in float16, although nothing is scaled any more: other
        rows would not help. Raises Diverged, naming the batch, when skipping and rewinding have not helped.
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
        tried = f"skipping {self.skips} steps in a row"
        tried += " and lowering the loss scale to 1" if exhausted else f" and rewinding {self.rewinds} times"
        raise Diverged(
            f"non-finite {what} at step {step}, sequences {sequences.start} to {sequences.stop - 1}; "
            f"{tried} did not help",
            where=f"step {step}",
            fix="lower optimizer.learning_rate, set train.max_grad_norm, or train in "
            "train.precision=float32 or bfloat16; the last good checkpoint is untouched",
        )

    def state(self) -> dict[str, int]:
        """JSON for a checkpoint, so that a resumed run judges as the undisturbed one."""
        return {"skipped": self._skipped, "rewound": self._rewound}

    def load(self, state: dict[str, Any]) -> None:
        """After a resume. A rewind keeps its own count: do not load then."""
        self._skipped, self._rewound = int(state["skipped"]), int(state["rewound"])


METHOD = "method"  # the part, and the key of the state, of what a method of PEFT needs to go on


@dataclass(frozen=True)
class InitialWeights:
    """The weights that training starts from: those of a folder, with rows of `new_ids` made anew, or fresh ones."""

    source: Path | None
    seed: int
    new_ids: tuple[int, ...] = ()
    run_dir: Path | None = None

    def fill(self, model: Decoder) -> None:
        """Raises UserError when the weights in the folder are no longer those that the run in `run_dir` began with."""
        if self.source is not None:
            if (self.source / MANIFEST).is_file() and (wrong := damage(self.source)) is not None:
                fix = f"choose another checkpoint; delete {MANIFEST} where you changed the folder yourself"
                problem = f"the checkpoint that training starts from is damaged: {wrong}"
                raise UserError(problem, where=str(self.source), fix=fix)
            if self.run_dir is not None:
                note_model(self.run_dir, "base", digest(self.source))
            read_model(model, self.source, seed=self.seed, new=self.new_ids)
        else:
            init_weights(model, self.seed)


@final
@dataclass(frozen=True)
class CheckpointedModel:
    """What training changes of one model: its way into checkpoints, and back out of them.

    Every parameter, as a model's folder; with `settings` the low-rank pairs and what is trained in full beside them;
    with `method` what a method of PEFT added to a base that was read before.
    """

    model: Decoder
    start: InitialWeights
    base: Base | None
    settings: Adaptation | None = None
    method: PeftAdapter | None = None

    def parts(self) -> Parts:
        """The live tensors; `writer` is for those of MODEL."""
        if self.method is not None:
            return {MODEL: self.method.file_tensors(), METHOD: self.method.resume_tensors()}
        return {MODEL: dict(self.model.named_parameters()) if self.settings is None else trained_state(self.model)}

    def scalars(self) -> dict[str, Any]:
        """What else must be remembered, for the state of a checkpoint."""
        return {} if self.method is None else {METHOD: self.method.resume_scalars()}

    def writer(self) -> Write:
        """For the model as it is now: training goes on while the result is called."""
        config, settings = self.model.config, self.settings
        if self.method is None and settings is None:
            return lambda tensors, folder: write_model(tensors, config, folder)
        assert self.base is not None, "an adapter that is saved names the model that it adapts"
        name = self.base.name
        if settings is not None:
            return lambda tensors, folder: write_adapter(tensors, settings, config, folder, base=name)
        assert self.method is not None
        said = self.method.file_settings(name)  # AdaLoRA's ranks change with every step
        return lambda tensors, folder: write_named(tensors, said, folder)

    def begin(self) -> None:
        """Everything as it is before the first step."""
        if self.method is not None:
            self.method.begin_again()
            return
        self.start.fill(self.model)
        if self.settings is not None:
            init_adapters(self.model, self.start.seed)

    def read_frozen(self) -> None:
        """What no checkpoint holds, before the first `read`; the base of a method is there already."""
        if self.settings is not None:
            self.start.fill(self.model)
            note_base(self.model)

    def read(self, folder: Path) -> None:
        """Everything else as the checkpoint in `folder` has it."""
        if self.method is not None:
            self.method.load(read_part(folder, METHOD), read_state(folder)[METHOD])
        elif self.settings is not None:
            read_trained(self.model, self.settings, self.model.config, folder)
        else:
            read_model(self.model, folder)


@dataclass
class RunProgress:
    """Counters of a run."""

    step: int = 0  # finished optimizer steps, skipped ones included
    tokens: int = 0  # positions of the layout
    seconds: float = 0.0  # from the start of training to the checkpoint, without what was done twice
    best_loss: float | None = None  # the lowest loss of an evaluation so far
    evaluations_since_best: int = 0
    best_saved: float | None = None  # the loss that the checkpoint marked best was evaluated at
    eval_due: bool = False  # a stop cut the evaluation of this step short

    def note_evaluation(self, loss: float) -> None:
        """A loss that is not finite is no improvement."""
        improved = math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss)
        self.best_loss = loss if improved else self.best_loss
        self.evaluations_since_best = 0 if improved else self.evaluations_since_best + 1

    def note_save(self, loss: float | None) -> bool:
        """Whether the checkpoint written now is the best so far; `loss` None: this step was not evaluated."""
        best = loss is not None and math.isfinite(loss) and (self.best_saved is None or loss < self.best_saved)
        self.best_saved = loss if best else self.best_saved
        return best


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

    def parts(self) -> Parts:
        """Tensors by part of a checkpoint; the live ones, not copies."""
        return {
            **self.checkpointed.parts(),
            "optimizer": self.model_and_optimizer.optimizer.named_tensors(),
            "rng": random_states(),
        }

    def scalars(self) -> dict[str, Any]:
        """Everything else, for `state.json`."""
        scale = self.model_and_optimizer.scale
        return {
            "cursor": asdict(self.cursor),
            "progress": asdict(self.progress),
            "optimizer": self.model_and_optimizer.optimizer.scalars(),
            "loss_scale": None if scale is None else asdict(scale),
            "policy": self.policy.state(),
            "torch": torch.__version__,
            "base": None if self.base is None else asdict(self.base),
            **self.checkpointed.scalars(),
        }


def build_state(plan: RunPlan, *, resume_from: Path | None = None, run_dir: Path | None = None) -> TrainState:
    """The state before the first step, or that of a checkpoint: built on the meta device, filled in place.

    The optimizer is built before the first forward. Raises UserError when the checkpoint is of another model, and when
    an adapter's base is not the one that it was trained on or the one that the run in `run_dir` began with.
    """
    model = empty_model(plan)
    model.to_empty(device=torch.device(plan.train.device))
    model.tie()
    start, adapter = InitialWeights(plan.model.source, plan.train.seed, plan.model.new_ids, run_dir), plan.adapter
    base = None if start.source is None or isinstance(adapter, NoAdapter) else base_of(start.source)
    method, settings = None, adaptation(plan.model.config, adapter) if isinstance(adapter, Lora) else None
    if isinstance(adapter, Peft):
        start.fill(model)  # PEFT adds to weights that are there
        config = method_config(adapter, plan.model.config, steps=plan.train.steps)
        method = PeftAdapter(model, config, seed=plan.train.seed)
    apply(model, plan.train)
    scale = LossScale() if plan.train.precision == "float16" else None
    model_and_optimizer = ModelAndOptimizer(
        model, build_optimizer(model, plan.optimizer, seed=plan.train.seed), scale, method=method
    )
    checkpointed = CheckpointedModel(model, start, base, settings, method)
    state = TrainState(model_and_optimizer, Cursor(plan.train.seed, 0), RunProgress(), NonFinite(), checkpointed, base)
    if resume_from is not None:
        if base is not None and (noted := read_state(resume_from).get("base")) is not None:
            base.refuse_change(noted["digest"], where=str(resume_from))
        checkpointed.read_frozen()
    go_back(state, plan, resume_from, policy=True)
    return state


def empty_model(plan: RunPlan) -> Decoder:
    """The model that is trained, on the meta device: adapted, and in the dtypes that its weights are kept in."""
    with torch.device("meta"):
        model = Decoder(plan.model.config, attention=plan.model.attention)
        if isinstance(plan.adapter, Lora):
            adapt(model, plan.adapter)
        if isinstance(plan.adapter, Peft):
            model.requires_grad_(False)  # PEFT adds to weights that are there, so its method comes when they are read
    if plan.quantize.kind != "none":
        quantize_model(model, plan.quantize, reader=plan.quantized_by)
    prepare_weights(model, plan.train.precision)
    return model


def go_back(state: TrainState, plan: RunPlan, folder: Path | None, *, policy: bool = False) -> None:
    """Replaces all in place: by what the checkpoint holds, or without one by how the run began.

    The policy's count is left alone, as a rewind would else go on for ever; `policy` takes that back too.
    """
    state.model_and_optimizer.updating = False
    if policy:
        state.policy.load(NonFinite().state() if folder is None else read_state(folder)["policy"])
    if folder is None:
        torch.manual_seed(plan.train.seed)
        state.checkpointed.begin()
        state.model_and_optimizer.optimizer.load({}, {})
        state.cursor, state.progress = Cursor(plan.train.seed, 0), RunProgress()
        return
    stored = read_state(folder)
    if stored["cursor"]["seed"] != state.cursor.seed:
        problem = f"the checkpoint is of a run with the seed {stored['cursor']['seed']}, not {state.cursor.seed}"
        raise UserError(problem, where=str(folder), fix="move it out of the run's checkpoints")
    state.checkpointed.read(folder)
    state.model_and_optimizer.optimizer.load(read_part(folder, "optimizer"), stored["optimizer"])
    set_random_states(read_part(folder, "rng"))
    if state.model_and_optimizer.scale is not None and stored["loss_scale"] is not None:
        state.model_and_optimizer.scale = LossScale(**stored["loss_scale"])
    state.cursor = Cursor(**stored["cursor"])
    state.progress = RunProgress(**stored["progress"])


def random_states() -> dict[str, Tensor]:
    """The states of torch's default generators, one per device: dropout draws from them, and nothing from any other."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Raises UserError when a state does not fit this torch. Devices that are not here any more are left out."""
    try:
        torch.set_rng_state(states["cpu"])
        for index in range(torch.cuda.device_count()):
            if f"cuda:{index}" in states:
                torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
    except RuntimeError as error:
        raise UserError(
            f"the random state of the checkpoint does not fit PyTorch {torch.__version__} ({error})",
            fix="resume with the PyTorch version that wrote the checkpoint",
        ) from error
