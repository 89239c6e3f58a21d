"""The plan of a run, without "auto". Stored as `plan.json`, replayed by `resume`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_serializer,
)

from bloomery.core.errors import UserError
from bloomery.core.units import Duration, counted
from bloomery.data.shards import Texts
from bloomery.facts.config import ModelConfig
from bloomery.facts.limits import Dequantizer
from bloomery.recipe.episodes import EnvironmentSection, Tool
from bloomery.recipe.objectives import Pretrain, Rollouts
from bloomery.recipe.rewards import AnyReward
from bloomery.recipe.schema import (
    Adapter,
    AnyObjective,
    AssumedNetwork,
    ImagePrompt,
    NoAdapter,
    OptimizerKind,
    PipelineSchedule,
    PipelineTransport,
    Quantize,
    Recipe,
    VisionParts,
    Wsd,
)

Origin = Literal["table", "probe", "measured"]
# Where weights that stream wait in the host's memory. pinned: a device copies them from there. staged: in pageable
# memory, and a thread copies them through a few pinned buffers; so are the sums of their gradients. mapped: frozen ones
# stay in files, which are read through those buffers.
HostPlacement = Literal["pinned", "staged", "mapped"]
# Whether a plan's memory fits, as estimated and at the upper end of its range.
Fit = Literal["fits", "fits, barely", "may not fit", "does not fit"]
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
        ends = {
            "value": numerator / self.value,
            "low": numerator / self.high,
            "high": numerator / self.low,
        }
        return self.model_copy(update=ends)


# The parts of memory that no tensor holds.
NOT_TENSORS = ("fragmentation", "context", "runtime", "kernels", "collectives")


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
        """Live tensors alone: what the allocator of a GPU counts."""
        return self.total - sum(self.parts.get(part, 0.0) for part in NOT_TENSORS)


class PictureLoad(PlanPart):
    """What the tower is given of the pictures of a sequence, and what it makes of them.

    `patches`: padding included. `longest`: of one piece that it computes alone. `features`: tokens whose embeddings its
    output replaces. `input_bytes`: of what the image processor makes. `flops`: of the tower in forward.
    """

    pictures: float = 0.0
    patches: float = 0.0
    longest: int = 0
    features: float = 0.0
    input_bytes: float = 0.0
    flops: float = 0.0

    def times(self, factor: float) -> "PictureLoad":
        return PictureLoad(
            pictures=self.pictures * factor,
            patches=self.patches * factor,
            longest=self.longest,
            features=self.features * factor,
            input_bytes=self.input_bytes * factor,
            flops=self.flops * factor,
        )

    def read_once_for(self, answers: int) -> "PictureLoad":
        """With pictures that so many documents have in common, of which the tower reads each once."""
        return self.model_copy(
            update={
                "patches": self.patches / answers,
                "input_bytes": self.input_bytes / answers,
                "flops": self.flops / answers,
            }
        )


class PictureSize(PlanPart):
    """A picture's sides in pixels, and the tokens whose embeddings the tower's output replaces.

    `share`: how many of the pictures have these sides.
    """

    width: int
    height: int
    tokens: int
    share: float


class PictureFacts(PlanPart):
    """The pictures of a dataset. `raw_config`: the config.json of the model that they are for, as JSON.

    `looked_at`: those whose sizes were read, spread over the dataset; the others are taken to be like them. `sizes`:
    the most frequent, that first. `of_picture`: of one, on average. `mean`: of a sequence; `fullest`: of one that is
    filled with the document that has most patches for its length.
    """

    raw_config: str
    pictures_per_epoch: int
    looked_at: int
    sizes: tuple[PictureSize, ...]
    of_picture: PictureLoad
    mean: PictureLoad
    fullest: PictureLoad


class TextAlignment(PlanPart):
    """A sample of texts under the tokenizers of the model and of its teacher, where these differ.

    `tokens`: of the model's; `aligned`: those in spans that have the same bytes under both; `alone`: those that are
    such a span, with one token of the teacher.
    """

    tokens: int
    aligned: int
    alone: int


class StoredScores(PlanPart):
    """The files of a teacher's `top` likeliest tokens: `token_bytes` for each token of an answer, `bytes` in all."""

    top: int
    token_bytes: int
    bytes: int


class DatasetFacts(PlanPart):
    """Facts of a dataset for a plan. Ids are those of the tokenizer, None when absent.

    `sequences_per_epoch`: those of the training split. `spread`: the relative half-width of an estimate from the
    size of files that are not tokenized yet; 0 once they are. `left_out`, `cut_short`: conversations and
    pairs that are dropped because all their labels are masked, or truncated.
    """

    sequences_per_epoch: int
    tokens: int
    vocab_size: int | None  # None: the tokenizer is not on this disk
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    spread: float = 0.0
    loss_share: float = 1.0  # loss tokens over all tokens
    prompts: int = 0  # of an epoch, where the dataset has prompts
    longest_prompt: int = 0  # in tokens
    left_out: int = 0
    unreadable: str = ""  # rows that data.on_error=skip leaves out, as a sentence
    cut_short: int = 0
    template: str = ""  # a description of the chat template
    texts: Texts = "none"
    digest: str = ""  # of the prepared dataset; empty before
    tower_weights: int = 0  # numbers of vision tower and projector, where rows have pictures
    projector_weights: int = 0  # of them, of the projector
    teacher_tower_weights: int = 0  # numbers of a teacher's tower and projector
    pictures: PictureFacts | None = (
        None  # None also where the model's tower or its sizes are not known
    )
    teacher_scores: StoredScores | None = None  # in place of a teacher
    alignment: TextAlignment | None = (
        None  # None: a teacher has this tokenizer, or is not on this disk
    )


class Decision(PlanPart):
    """One choice of the plan: the recipe key, the value, the reason."""

    key: str
    value: str
    reason: str


class Verdict(PlanPart):
    """A claim of the recipe, checked with arithmetic."""

    claim: str
    verdict: Literal["ok", "wrong", "unknown", "high", "low"]
    reason: str


class ModelPlan(PlanPart):
    config: ModelConfig
    source: Path | None  # a folder of pretrained weights; None: fresh weights
    attention: str  # a backend of model.attention
    # The recipe names it: where its kernel fails the run stops, and does not take another one.
    attention_is_set: bool = False
    score_chunk: int  # tokens whose logits exist together
    scores: Literal["torch", "compiled"] = "torch"  # who computes log-probabilities from logits
    # The ids of added tokens, whose embeddings start as the mean of the others.
    new_ids: tuple[int, ...] = ()

    @field_serializer("config", mode="wrap")
    def _stored_config(
        self, config: ModelConfig, dumped: SerializerFunctionWrapHandler
    ) -> dict[str, Any]:
        """A plan of layers of one size is stored without the field, as it was before there was one."""
        facts: dict[str, Any] = dumped(config)
        if not config.layer_sizes:
            facts.pop("layer_sizes", None)
        return facts


class DataPlan(PlanPart):
    prepared: Path
    sequence_length: int
    layout: Literal["packed", "padded", "fixed"]
    pin_memory: bool
    prefetch: int
    on_error: Literal["stop", "skip"] = "stop"  # at a row that rewards cannot score


class VisionPlan(PlanPart):
    """How the parts that read pictures are trained; LoRA on them is `adapter.vision`.

    `train`: those trained in full. `learning_rate`: of the tower. Both rates hold for LoRA, too.
    """

    train: VisionParts = "none"
    learning_rate: NotNegative = 0.0
    projector_learning_rate: NotNegative = 0.0
    freeze_language_model: bool = False


class OptimizerPlan(PlanPart):
    kind: OptimizerKind
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
    offload: bool = False
    fused_backward: bool = False
    stochastic_rounding: bool = False


# The variable of torch with which gloo connects two ranks when they first send to each other.
LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"
# From so many ranks on. Fewer are connected in a tenth of a second (measured: 0.05, 0.2, 0.4 s for 16, 32, 64).
LAZY_RANKS = 64


class RouterPlan(PlanPart):
    """How the experts of a mixture are balanced; 0: not in that way.

    `loss`: the coefficient of the loss that evens the load of experts, whose counts are of the whole step, or of each
    micro-batch. `z_loss`: that of the squared logsumexp of the router's logits. `bias_update`: by how much the bias
    of an expert's choice moves after each step.
    """

    loss: NotNegative = 0.0
    z_loss: NotNegative = 0.0
    bias_update: NotNegative = 0.0
    counts: Literal["step", "micro_batch"] = "step"
    pooled: bool = True  # the loss is of all layers together, and not the mean of theirs


class TrainPlan(PlanPart):
    """`steps` is None for a wall-time length, which sets `seconds`, and while the dataset is not counted."""

    steps: int | None
    seconds: float | None
    min_steps: int | None = None  # of a wall-time run, which may then exceed `seconds`
    tokens_per_step: PositiveInt
    micro_batch_size: PositiveInt
    accumulation: PositiveInt  # micro-batches per step
    # Sequences of padding per step, of zero weight: every rank computes one, also where the dataset has none for it.
    empty_sequences: NonNegativeInt = 0
    precision: Literal["float32", "bfloat16", "float16", "bfloat16-pure"]
    compile: bool
    activation_checkpointing: str
    max_grad_norm: float | None
    seed: int
    deterministic: bool
    threads: int
    device: str  # cpu, cuda
    offload_activations: bool = False
    # Weights that live in the host's memory and stream through the device: those of layers, or of experts alone.
    stream: Literal["off", "layers", "experts"] = "off"
    stream_host: HostPlacement = "pinned"
    stream_micro_batches: PositiveInt = 1  # that pass through a layer for each load of it, at most
    neftune_alpha: float | None = None
    ema_decay: float | None = None
    router: RouterPlan | None = None  # of a mixture of experts
    replicate: PositiveInt = 1  # copies of the model, each on `shard` ranks
    shard: PositiveInt = 1  # ranks that share one copy of weights, gradients and states (FSDP2)
    pipeline: PositiveInt = 1  # stages of a pipeline, each of `replicate` x `shard` ranks
    context: PositiveInt = 1  # neighbors of those ranks that share each sequence
    expert: PositiveInt = 1  # neighbors of those ranks that divide the experts of each layer
    # Of each host, beside the ranks: processes that hold the teacher and the reward models.
    scoring_devices: NonNegativeInt = 0
    pipeline_schedule: PipelineSchedule = "1f1b"
    # Of a pipeline: the number of layers of each group, in the model's order; group g is on stage g % pipeline.
    pipeline_layers: tuple[PositiveInt, ...] = ()
    # auto: each start measures both and takes the faster one that works (`parallel.preflight`).
    pipeline_link: Literal["auto"] | PipelineTransport = "auto"

    @property
    def ranks(self) -> int:
        """Processes, one per device."""
        return self.pipeline * self.ranks_per_stage

    @property
    def ranks_per_stage(self) -> int:
        """Ranks with the same layers, whose gradients are summed."""
        return self.replicate * self.shard

    @property
    def connects_lazily(self) -> bool:
        """Whether ranks connect when they first send to each other.

        Not in a pipeline: the first message then waits until the other rank uses the connection as well, and stages
        that send before they receive would wait for each other in a circle.
        """
        return self.ranks >= LAZY_RANKS and self.pipeline == 1

    @property
    def data_parallel(self) -> int:
        """Ranks with sequences of their own, or groups of `context` ranks that share them; each takes `accumulation`
        micro-batches of a step.
        """
        return self.ranks_per_stage // self.context

    @property
    def readers(self) -> str:
        """Those that share out the sequences of a step, such as "4 devices" or "2 groups of 4 devices"."""
        if self.context == 1:
            return f"{self.data_parallel:,} devices"
        return f"{counted(self.data_parallel, 'groups')} of {self.context:,} devices"

    @property
    def pipeline_chunks(self) -> int:
        """Groups of layers of each stage."""
        return max(1, len(self.pipeline_layers) // self.pipeline)

    @property
    def sequences_per_step(self) -> int:
        """Sequences of the dataset per step, over all ranks."""
        sequences = self.accumulation * self.micro_batch_size * self.data_parallel
        return sequences - self.empty_sequences


class CheckpointPlan(PlanPart):
    """Between two checkpoints are `every_steps` steps, or `every_seconds` seconds of the run; the other is None.

    `at_best`: an evaluation that is the best so far saves a checkpoint to resume from, not its weights alone.
    """

    every_steps: PositiveInt | None
    every_seconds: float | None = None
    at_best: bool = False
    keep: int
    async_save: bool


class EvalPlan(PlanPart):
    """`every_steps`: None turns evaluation off. `sequences`: of the validation set, at most."""

    every_steps: PositiveInt | None
    on_start: bool = False
    sequences: int | None = None
    early_stopping_patience: int | None
    micro_batch_size: PositiveInt


class SamplePlan(PlanPart):
    prompts: tuple[str | ImagePrompt, ...]
    max_new_tokens: int
    temperature: float
    top_p: float


class LoggingPlan(PlanPart):
    every_steps: PositiveInt
    trackers: tuple[str, ...]
    commands: tuple[str, ...]
    # The run pauses above so many degrees Celsius; auto: each GPU's own limit.
    max_gpu_temperature: float | Literal["auto"] | None = "auto"
    memory: bool = False
    completions: Literal["none", "shown", "all"] = "shown"
    profile_steps: tuple[int, int] | None = None  # the first and the last


class Lengths(PlanPart):
    """The recipe's own lengths: a wall-time run takes its shares by the clock, and has no number of steps."""

    train: Duration
    warmup: Duration
    decay: Duration | None  # of wsd
    checkpoint: Duration
    evaluation: Duration | None  # None: off


class LayoutPlan(PlanPart):
    """One layout of a step over several devices. Memory: of the device that needs most."""

    name: str  # replicate, shard, shard in nodes, pipeline
    replicate: int
    shard: int
    pipeline: int
    context: int = 1
    expert: int = 1
    micro_batch_size: int
    accumulation: int
    activation_checkpointing: str
    memory: MemoryEstimate  # of a pipeline: of its fullest stage
    step_seconds: Estimate | None
    communication_seconds: dict[str, float] = {}  # by axis, hidden or not
    exposed_seconds: float = 0.0
    bubble_seconds: float = 0.0
    pipeline_schedule: PipelineSchedule = "1f1b"
    pipeline_layers: tuple[int, ...] = ()  # as in TrainPlan
    fullest_stage: int = 0  # counted from 0: the one whose memory is `memory`
    # Seconds of a step in which each stage computes, without waiting; empty where the speed is unknown.
    stage_seconds: tuple[float, ...] = ()
    # Of unequal GPUs: the name of each stage's, and the bytes of it that a plan may use.
    stage_devices: tuple[str, ...] = ()
    stage_limits: tuple[float, ...] = ()

    @property
    def pipeline_chunks(self) -> int:
        """Groups of layers of each stage."""
        return max(1, len(self.pipeline_layers) // self.pipeline)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(
            sum(self.pipeline_layers[stage :: self.pipeline]) for stage in range(self.pipeline)
        )

    @property
    def sequences(self) -> int:
        """Sequences of a step over all ranks, with the empty ones that give each rank as many."""
        copies = self.replicate * self.shard // self.context
        return self.accumulation * self.micro_batch_size * copies


class ParallelPlan(PlanPart):
    """Several devices: links, every layout, and the chosen one, which the plan's other figures describe."""

    gpus: int  # of a node
    nodes: int
    link: str
    network: str  # empty: one node
    assumed_network: AssumedNetwork = "auto"  # parallel.network
    # GB/s of a large all-reduce over all devices, per device and direction, as nccl-tests prints it.
    bus_gbs: float | None = None
    layouts: tuple[LayoutPlan, ...]
    chosen: int
    reason: str

    @property
    def devices(self) -> int:
        return self.gpus * self.nodes

    @property
    def layout(self) -> LayoutPlan:
        return self.layouts[self.chosen]

    @property
    def remark(self) -> str:
        """What to know before training; "" where `bloomery train` alone does it."""
        if self.nodes > 1:
            return "Several nodes: start the ranks with srun, torchrun or mpirun."
        return ""


class RolloutPlan(PlanPart):
    """How the completions of a rollout are sampled, with what that needs in addition to the steps that train on them.

    `slots`, `memory` and `micro_batches`, those of a step as packed, are of one rank. `seconds`: of one step by part,
    with a share of the rollout's; empty where the device is unknown.
    """

    num_prompts: PositiveInt
    # With those that dynamic sampling replaces: where none, half and all of them have completions of one reward.
    sampled_prompts: tuple[int, ...] = ()
    num_completions: PositiveInt
    num_steps: PositiveInt  # that train on a rollout
    steps_per_pass: PositiveInt  # each of them trains on a part of the completions
    slots: PositiveInt  # completions that are decoded at once
    slot_tokens: PositiveInt  # that a slot has room for
    prompt_tokens: float  # on average
    completion_tokens: Estimate  # on average
    micro_batches: PositiveInt
    memory: MemoryEstimate  # while completions are sampled
    training_memory: MemoryEstimate  # of a step
    seconds: dict[str, Estimate]

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the samples that a step trains on, all ranks together."""
        samples = self.num_completions / self.steps_per_pass
        return samples * (self.prompt_tokens + self.completion_tokens.value)


class ScoringPlan(PlanPart):
    """The devices of each host that hold the teacher and the reward models, and do not train.

    `memory`: of one of them. `seconds`: that one computes for a step; None: without a teacher, or the device's speed
    is unknown.
    """

    devices: PositiveInt
    memory: MemoryEstimate
    seconds: float | None = None


HIDDEN_SHARE = 0.01  # of a step's time, below which waiting for copies is none


class StreamPlan(PlanPart):
    """Weights that live in the host's memory and stream through the device.

    `micro_batches`: that a layer computes when it has been loaded. `buffer_bytes`: of the layers on the device.
    `host_bytes`: on the host, by what holds them; `pinned_bytes`: of them, what cannot be swapped out. Copies of a
    step: `loaded_bytes` to the device, `sent_bytes` to the host. `hidden_from`: tokens of a load from which no copy
    takes longer than the computing beside it; `waiting_share`: of a step's time, in which the device waits for copies.
    `update_seconds`: of a step's update on the host, and what copies would take if states passed through the device.
    None: the device's speed is unknown, or nothing is updated on the host.
    """

    micro_batches: PositiveInt = 1
    host: HostPlacement = "pinned"
    buffer_bytes: float
    host_bytes: dict[str, float]
    pinned_bytes: float
    host_limit: float
    loaded_bytes: float
    sent_bytes: float
    tokens_per_load: PositiveInt
    hidden_from: int | None = None
    waiting_share: float | None = None
    update_seconds: float | None = None
    update_over_link_seconds: float | None = None
    link: str = ""  # with its rate and where that is from; "": unknown

    @property
    def hidden(self) -> bool | None:
        """Whether copies cost no time that an estimate would tell; None: unknown."""
        return None if self.waiting_share is None else self.waiting_share <= HIDDEN_SHARE


class EpisodesPlan(PlanPart):
    """Completions of several turns: what the model may call, and how often it may answer."""

    tools: tuple[Tool, ...]
    environment: EnvironmentSection
    max_turns: int

    @property
    def files(self) -> tuple[str, ...]:
        """FILE:NAME of each tool and of the environment: code of the user's."""
        own = () if self.environment.python is None else (self.environment.python,)
        return (*(tool.python for tool in self.tools), *own)

    @classmethod
    def of_places(
        cls, tools: Sequence[str], environment: str | None, *, max_turns: int
    ) -> "EpisodesPlan":
        """`tools`: FILE:FUNCTION of each; `environment`: as for `of_environment`. Raises UserError for other texts."""
        try:
            sections = tuple(Tool(python=str(Path(place).absolute())) for place in tools)
        except ValueError as error:
            raise UserError(
                f"no tools: {', '.join(tools)}",
                where="tools",
                fix="name FILE:FUNCTION, such as tools.py:search",
                code=2,
            ) from error
        if environment is None:
            return cls(tools=sections, environment=EnvironmentSection(), max_turns=max_turns)
        plan = cls.of_environment(environment, max_turns=max_turns)
        return plan.model_copy(update={"tools": sections})

    @classmethod
    def of_environment(cls, place: str, *, max_turns: int) -> "EpisodesPlan":
        """`place`: FILE:CLASS, or the address of an OpenEnv server. Raises UserError for another text."""
        is_server = place.startswith(("http://", "https://"))
        try:
            section = EnvironmentSection(
                python=None if is_server else str(Path(place).absolute()),
                openenv=place if is_server else None,
            )
        except ValueError as error:
            raise UserError(
                f"no environment: {place}",
                where="environment",
                fix="name FILE:CLASS, such as games.py:Guess, or the address of an OpenEnv server",
                code=2,
            ) from error
        if section.leaves_machine:
            problem = f"the server of the environment is another machine: {place}"
            fix = "start it here, such as http://127.0.0.1:8000"
            raise UserError(problem, where="environment", fix=fix, code=2)
        return cls(tools=(), environment=section, max_turns=max_turns)

    @classmethod
    def of(cls, recipe: Recipe) -> "EpisodesPlan | None":
        """None where a completion is one answer."""
        if not (recipe.tools or recipe.environment.is_set):
            return None
        max_turns = 1
        if isinstance(recipe.objective, Rollouts):  # others are refused
            max_turns = recipe.objective.max_turns
        return cls(tools=tuple(recipe.tools), environment=recipe.environment, max_turns=max_turns)


class RunPlan(PlanPart):
    """Everything a run executes. Stored as `plan.json`; `PlanReport` adds the figures of its page."""

    name: str
    model: ModelPlan
    data: DataPlan
    optimizer: OptimizerPlan
    train: TrainPlan
    checkpoint: CheckpointPlan
    eval: EvalPlan
    sample: SamplePlan
    logging: LoggingPlan
    objective: AnyObjective = Pretrain()
    rewards: tuple[AnyReward, ...] = ()  # of grpo, rloo and ppo
    episodes: EpisodesPlan | None = None  # None: a completion is one answer
    adapter: Adapter = NoAdapter()
    vision: VisionPlan = VisionPlan()
    quantize: Quantize = Quantize()
    quantized_by: Dequantizer = "torch"  # the implementation that reads quantized weights
    torch: str  # the version of the plan
    memory: MemoryEstimate
    step_seconds: Estimate | None  # None: the device is unknown
    total_tokens: int | None
    choices: tuple[Decision, ...]
    suggestions: tuple[str, ...] = ()  # edits that make it fit, cheapest first
    lengths: Lengths | None = None
    dataset: DatasetFacts | None = None  # None: unknown
    environment: dict[str, str] = {}  # to set before torch is imported, where the user set nothing
    # Keys that a fallback changed so that numbers differ, one entry for each time.
    recovered: tuple[str, ...] = ()
    parallel: ParallelPlan | None = None  # None: one device
    rollout: RolloutPlan | None = None  # None: steps read the dataset
    stream: StreamPlan | None = None  # None: all weights are on the device
    scoring: ScoringPlan | None = None  # None: the ranks have the teacher and the reward models

    @property
    def aligns_texts(self) -> bool:
        """Whether a teacher has another tokenizer, and judges spans of text."""
        return self.dataset is not None and self.dataset.alignment is not None

    @property
    def step_memory(self) -> MemoryEstimate:
        """Of a training step alone, where `memory` may be of the moment in which completions are sampled."""
        return self.memory if self.rollout is None else self.rollout.training_memory

    def memory_limit_of(self, rank: int) -> float:
        """The bytes of the device of a rank that the plan may use."""
        limits = () if self.parallel is None else self.parallel.layout.stage_limits
        return limits[rank // self.train.ranks_per_stage] if limits else self.memory.limit

    @property
    def num_gpus(self) -> int:
        """Of all nodes, with those that score; of a run on CPUs its ranks."""
        nodes = 1 if self.parallel is None else self.parallel.nodes
        scoring = 0 if self.train.device == "cpu" else nodes * self.train.scoring_devices
        return scoring + (1 if self.parallel is None else self.parallel.devices)

    @property
    def scoring_limit(self) -> float:
        """The bytes of a device that scores that the plan may use."""
        return self.memory.limit if self.scoring is None else self.scoring.memory.limit

    @property
    def trained_tokens_per_step(self) -> float:
        """Tokens that count as trained on: a step's with its padding, or those of its completions and prompts."""
        return self.train.tokens_per_step if self.rollout is None else self.rollout.tokens_per_step

    @property
    def seconds(self) -> Estimate | None:
        """Seconds of the run, at least those of `min_steps` for a wall-time run; None: device or length unknown."""
        step_seconds = self.step_seconds
        wall_time = self.train.seconds
        if wall_time is None:
            if step_seconds is None or self.train.steps is None:
                return None
            return step_seconds.scaled(self.train.steps)

        # A wall-time run ends with its time, but takes its least number of steps even if they need longer.
        if step_seconds is None:
            return Estimate(value=wall_time, low=wall_time, high=wall_time, origin="table")
        min_steps_seconds = step_seconds.scaled(self.train.min_steps or 1)
        return Estimate(
            value=max(wall_time, min_steps_seconds.value),
            low=max(wall_time, min_steps_seconds.low),
            high=max(wall_time, min_steps_seconds.high),
            origin="table",
        )

    @property
    def fits(self) -> bool:
        return self.memory.fits and (self.scoring is None or self.scoring.memory.fits)

    @property
    def epochs(self) -> float | None:
        """Epochs of the run; an estimate where dataset or steps are not counted yet. None where unknown."""
        # Without a counted dataset only a length in epochs is known, the recipe's own.
        run_length = None if self.lengths is None else self.lengths.train
        if self.dataset is None or not self.dataset.sequences_per_epoch:
            if run_length is None or run_length.unit != "epochs":
                return None
            return run_length.amount

        # The steps of a wall-time run are those that fit into its time.
        steps: float | None = self.train.steps
        if steps is None and self.train.seconds is not None and self.step_seconds is not None:
            steps = max(self.train.seconds / self.step_seconds.value, self.train.min_steps or 1)
        if steps is None:
            return None
        sequences_per_step = self.train.tokens_per_step // self.data.sequence_length
        return steps * sequences_per_step / self.dataset.sequences_per_epoch


class Suggestion(PlanPart):
    """Recipe overrides ("train.micro_batch_size=8") and their savings."""

    edit: str
    saves: str
    fit: Fit  # of the plan with this edit


class MaxLength(PlanPart):
    """The longest sequence that fits at micro-batch 1: as planned, and with full activation checkpointing."""

    as_planned: int
    checkpointed: int


class SaveEstimate(PlanPart):
    """One checkpoint: how long training waits for it, and how long it takes until it is on the disk.

    `host_bytes`: host memory of each rank for it, kept from the first save on.
    """

    host_bytes: float
    stall_seconds: Estimate
    seconds: Estimate


class KillCost(PlanPart):
    """What a kill at the worst moment loses: training since the last checkpoint. None where unknown."""

    seconds: float | None
    steps: int | None  # None where checkpoints are saved by time
    whole_run: bool  # no checkpoint before the end is sure


class Cost(PlanPart):
    """What a run costs at a price that the user named. `money`: in `currency`, a sign or a code, "" where none was
    named. `per_hour`: the price of one device for an hour, as text. `per_million_tokens`: of these, where the run's
    length is not known yet, not of the run.
    """

    money: Estimate
    per_hour: str
    currency: str
    per_million_tokens: bool = False


class PlanReport(PlanPart):
    """A plan with the other figures of its page; no training code reads it.

    `step_parts`: seconds of a step by operation, empty where unknown; `disk`: bytes of shards and checkpoints;
    `pinned`: bytes of host memory that each rank pins, by purpose, without a save's;
    `energy_kwh`: None where the board's power is unknown; `max_length`: on one device of the chosen layout, None: CPU;
    `cost`: None without a price.
    """

    plan: RunPlan
    claims: tuple[Verdict, ...]
    warnings: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]
    max_length: MaxLength | None
    step_parts: dict[str, Estimate]
    disk: dict[str, float]
    save: SaveEstimate
    kill: KillCost
    pinned: dict[str, int]
    energy_kwh: float | None
    cost: Cost | None = None
