"""The plan of a run: every "auto" decided. Stored as `plan.json`, replayed by `resume`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, PositiveInt

from bloomery.core.units import Duration
from bloomery.data.shards.format import Texts
from bloomery.model.config import ModelConfig
from bloomery.model.quantization.sizes import Dequantizer
from bloomery.recipe.schema import Adapter, NoAdapter, Objective, Pretrain, Quantize, Wsd

Origin = Literal["table", "probe", "measured"]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PlanPart(BaseModel, frozen=True, extra="forbid"):
    """A part of the plan; holds no "auto"."""


class Estimate(PlanPart):
    """An interval that should hold four of five outcomes, and where its figures come from."""

    value: float
    low: float
    high: float
    origin: Origin
    by: str = ""  # of a measurement: by whom, when, with what

    def scaled(self, factor: float) -> "Estimate":
        ends = {"value": self.value * factor, "low": self.low * factor, "high": self.high * factor}
        return self.model_copy(update=ends)

    def inverse(self, numerator: float = 1.0) -> "Estimate":
        """numerator / this: a time from a rate and the other way round."""
        ends = {"value": numerator / self.value, "low": numerator / self.high, "high": numerator / self.low}
        return self.model_copy(update=ends)


NOT_TENSORS = ("fragmentation", "context", "runtime", "kernels", "collectives")  # parts of memory that no tensor holds


class MemoryEstimate(PlanPart):
    """Bytes on one device at the peak of a training step, by what holds them."""

    parts: dict[str, float]
    low: float
    high: float
    limit: float
    origin: Origin

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.limit

    @property
    def allocated(self) -> float:
        """Live tensors alone: what torch.cuda.max_memory_allocated counts."""
        return self.total - sum(self.parts.get(part, 0.0) for part in NOT_TENSORS)


class DatasetFacts(PlanPart):
    """What the prepared text is like, as far as a plan needs it. Ids are those of the tokenizer, None when absent.

    `sequences_per_epoch`: those of the training split. `spread`: the relative half-width of an estimate from the
    size of files that are not tokenized yet; 0 once they are. `left_out` and `cut_short`: conversations and
    pairs of which no sequence holds a token to train on, or the end.
    """

    sequences_per_epoch: int
    tokens: int
    vocab_size: int | None  # None: of a tokenizer that nobody has read yet
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    spread: float = 0.0
    loss_share: float = 1.0  # the share of the tokens that an objective learns from
    left_out: int = 0
    cut_short: int = 0
    template: str = ""  # the chat template that formats its rows, in words
    texts: Texts = "none"
    digest: str = ""  # of the prepared text; empty before it is prepared


class Decision(PlanPart):
    """One choice of the plan as a person sees it: the recipe key, the value, the reason."""

    key: str
    value: str
    reason: str


class Verdict(PlanPart):
    """A claim of the recipe, judged with arithmetic."""

    claim: str
    verdict: Literal["ok", "wrong", "unknown", "high", "low"]
    reason: str


class ModelPlan(PlanPart):
    config: ModelConfig
    source: Path | None  # a folder of pretrained weights; None: fresh weights
    attention: str  # a backend of model.attention
    score_chunk: int  # rows whose logits exist at once
    new_ids: tuple[int, ...] = ()  # of added tokens: their rows begin as the mean of those before, whatever they held


class DataPlan(PlanPart):
    prepared: Path
    sequence_length: int
    layout: Literal["packed", "padded", "fixed"]
    pin_memory: bool
    prefetch: int


class OptimizerPlan(PlanPart):
    kind: Literal["adamw", "muon", "adafactor"]
    learning_rate: NotNegative
    muon_learning_rate: NotNegative
    momentum: float
    betas: tuple[float, float]
    eps: NotNegative
    weight_decay: NotNegative
    fused: bool
    schedule: Literal["cosine", "linear", "constant"] | Wsd
    min_lr_ratio: float
    warmup_steps: int
    decay_steps: int  # of wsd; 0 otherwise
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    paged: bool = False
    offload: bool = False
    fused_backward: bool = False
    stochastic_rounding: bool = False


class ScheduleBlock(PlanPart):
    """Steps of a wall-time run whose learning rates are fixed, and written to plan.json, before the first of them.

    `fraction` of the run is done after `step` steps; from there to step `until` it grows as if the run had
    `steps` steps. `step_seconds` is what a step was measured to take; None: not measured yet.
    """

    step: int
    until: int
    fraction: float
    steps: int
    step_seconds: float | None = None


class TrainPlan(PlanPart):
    """`steps` is None while a wall-time length waits for its first measured steps; then `seconds` is set.

    Later it is the newest estimate. `blocks`: what was decided of a wall-time run so far, for a resumed run to repeat.
    """

    steps: int | None
    seconds: float | None
    min_steps: int | None = None  # of a wall-time run, which then takes longer where it must
    blocks: tuple[ScheduleBlock, ...] = ()
    tokens_per_step: PositiveInt
    micro_batch_size: PositiveInt  # rows
    accumulation: PositiveInt  # micro-batches per step
    precision: Literal["float32", "bfloat16", "float16", "bfloat16-pure"]
    compile: bool
    activation_checkpointing: str
    max_grad_norm: float | None
    seed: int
    deterministic: bool
    threads: int
    device: str  # cpu, cuda
    offload_activations: bool = False


class CheckpointPlan(PlanPart):
    every_steps: PositiveInt
    keep: int
    async_save: bool


class EvalPlan(PlanPart):
    """`every_steps`: None turns evaluation off. `sequences`: of the validation set, at most."""

    every_steps: PositiveInt | None
    sequences: int | None = None
    early_stopping_patience: int | None
    micro_batch_size: PositiveInt


class SamplePlan(PlanPart):
    prompts: tuple[str, ...]
    max_new_tokens: int
    temperature: float
    top_p: float


class LoggingPlan(PlanPart):
    every_steps: PositiveInt
    trackers: tuple[str, ...]
    commands: tuple[str, ...]
    max_gpu_temperature: float | Literal["auto"] | None = "auto"  # degrees Celsius; auto: what each GPU says of itself
    memory: bool = False
    profile_steps: tuple[int, int] | None = None  # the first and the last


class Lengths(PlanPart):
    """The recipe's own lengths, kept because shares of a run wait for its number of steps (`plan.lengths.complete`)."""

    train: Duration
    warmup: Duration
    decay: Duration | None  # of wsd
    checkpoint: Duration
    evaluation: Duration | None  # None: off
    evaluation_tokens: int | None = None  # None: auto
    logging: Duration
    sequences_per_epoch: int | None


class LayoutPlan(PlanPart):
    """One way to lay a step over several devices. Memory is that of the device that needs most."""

    name: str  # replicate, shard, shard in nodes, pipeline
    replicate: int
    shard: int
    pipeline: int
    micro_batch_size: int
    accumulation: int
    activation_checkpointing: str
    memory: MemoryEstimate
    step_seconds: Estimate | None
    exposed_seconds: float = 0.0
    bubble_seconds: float = 0.0


class ParallelPlan(PlanPart):
    """Several devices: what joins them, every layout, and the one that the plan's other figures are of."""

    gpus: int  # of a node
    nodes: int
    link: str
    network: str  # empty: one node
    layouts: tuple[LayoutPlan, ...]
    chosen: int
    reason: str

    @property
    def devices(self) -> int:
        return self.gpus * self.nodes

    @property
    def layout(self) -> LayoutPlan:
        return self.layouts[self.chosen]


class RunPlan(PlanPart):
    """What a run executes. Stored as `plan.json`; what only a page shows of it is in `PlanReport`."""

    name: str
    model: ModelPlan
    data: DataPlan
    optimizer: OptimizerPlan
    train: TrainPlan
    checkpoint: CheckpointPlan
    eval: EvalPlan
    sample: SamplePlan
    logging: LoggingPlan
    objective: Objective = Pretrain()
    adapter: Adapter = NoAdapter()
    quantize: Quantize = Quantize()
    quantized_by: Dequantizer = "torch"  # whose code reads a quantised base
    torch: str  # the version that the plan was made for
    memory: MemoryEstimate
    step_seconds: Estimate | None  # None: nothing is known of this device
    total_tokens: int | None
    choices: tuple[Decision, ...]
    suggestions: tuple[str, ...] = ()  # edits of the recipe that make it fit where it may not, cheapest first
    lengths: Lengths | None = None
    dataset: DatasetFacts | None = None  # None: neither counted nor guessed
    environment: dict[str, str] = {}  # to set before torch is imported, where the user set nothing
    recovered: tuple[str, ...] = ()  # keys that a fallback has changed so that numbers differ, once for each time
    parallel: ParallelPlan | None = None  # None: one device

    @property
    def seconds(self) -> Estimate | None:
        """How long the whole run trains; None when the device or the length is unknown."""
        if self.train.seconds is not None:
            known = self.train.seconds
            return Estimate(value=known, low=known, high=known, origin="table")
        if self.step_seconds is None or self.train.steps is None:
            return None
        return self.step_seconds.scaled(self.train.steps)

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def epochs(self) -> float | None:
        """How often the run trains on its dataset; an estimate where `epochs_about`. None where nothing can tell."""
        asked = None if self.lengths is None else self.lengths.train
        if self.dataset is None or not self.dataset.sequences_per_epoch:
            return asked.amount if asked is not None and asked.unit == "epochs" else None
        steps: float | None = self.train.steps
        if steps is None and self.train.seconds is not None and self.step_seconds is not None:
            steps = max(self.train.seconds / self.step_seconds.value, self.train.min_steps or 1)
        sequences = self.train.tokens_per_step // self.data.sequence_length
        return None if steps is None else steps * sequences / self.dataset.sequences_per_epoch

    @property
    def epochs_about(self) -> bool:
        """Whether the dataset is not counted yet, or the steps are not."""
        return self.train.seconds is not None or (self.dataset is not None and self.dataset.spread > 0)


class Suggestion(PlanPart):
    """Recipe overrides ("train.micro_batch=8") and in words what they save."""

    edit: str
    saves: str


class MaxLength(PlanPart):
    """The longest row that fits, one at a time: as planned, and with every layer computed again."""

    as_planned: int
    checkpointed: int


class PlanReport(PlanPart):
    """A plan with what a page shows beside it; nothing that trains reads it.

    `step_parts`: seconds of a step by operation, empty where unknown; `disk`: bytes of shards and checkpoints;
    `energy_kwh`: None where the board's power is unknown; `max_length`: on one device of the chosen layout, None: CPU.
    """

    plan: RunPlan
    claims: tuple[Verdict, ...]
    warnings: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]
    max_length: MaxLength | None
    step_parts: dict[str, Estimate]
    disk: dict[str, float]
    energy_kwh: float | None
