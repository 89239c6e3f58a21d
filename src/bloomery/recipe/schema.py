"""What a recipe may say. Defaults live here and nowhere else; sections know nothing of each other."""

import shlex
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from bloomery.core.units import Duration, Unit, parse_bytes, parse_count
from bloomery.recipe.objectives import OBJECTIVES, ObjectiveSpec
from bloomery.recipe.values import (
    Auto,
    ClaimedRange,
    Count,
    Epochs,
    FilePath,
    Length,
    LengthOrNothing,
    OneOrMore,
    Share,
    Steps,
    Tokens,
    WallTime,
    claimed,
    wall_time,
)

LENGTHS: dict[str, Unit] = {"epochs": "epochs", "max_steps": "steps", "max_tokens": "tokens", "max_time": "seconds"}
IF_INSTALLED = "tensorboard-if-installed"  # the tracker of a plan whose recipe names none
LONGEST_TRACE = 20  # steps: a profile of more fills the disk
Precision = Literal["float32", "bfloat16", "float16", "bfloat16-pure"]
# The names that bloomery.model knows, which is a layer above; a test holds them equal.
Preset = Literal["go-coder-tiny", "go-coder-small", "go-coder-medium"]
Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3", "olmo2", "phi3", "gpt2",
]  # fmt: skip
AttentionBackend = Literal["sdpa", "mask", "per_document", "varlen", "flex", "blockwise", "math"]


PrecisionNames = Literal[Auto, Precision, "fp32", "bf16", "fp16"]


def _precision(value: object) -> object:
    """The short names of Transformers, too."""
    return (
        {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(value, value)
        if isinstance(value, str)
        else value
    )


def _checkpointing(value: object) -> object:
    """true is "full", false is "none"."""
    return ("full" if value else "none") if isinstance(value, bool) else value


class Section(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A recipe section: unknown keys are errors, values never change after loading."""


class Claims(Section):
    """What the author expects. `plan` checks every claim, `report` compares it with the run."""

    tokens: Annotated[ClaimedRange, claimed(parse_count, "10B or 50 to 100")] | None = None
    epochs: Annotated[ClaimedRange, claimed(parse_count, "10B or 50 to 100")] | None = None
    tokens_per_second: Annotated[ClaimedRange, claimed(parse_count, "10B or 50 to 100")] | None = None
    duration: Annotated[ClaimedRange, claimed(wall_time, "8h or 5 to 7 days")] | None = None
    memory: Annotated[ClaimedRange, claimed(parse_bytes, "10 to 11 GB")] | None = None
    perplexity: dict[Length, Annotated[ClaimedRange, claimed(parse_count, "10B or 50 to 100")]] = {}


class RopeScalingSection(Section):
    """Stretching of rotary positions, in transformers' terms; fields that a kind does not use are ignored by it."""

    kind: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: PositiveFloat
    original_max_positions: PositiveInt | None = None
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    attention_factor: PositiveFloat | None = None
    truncate: bool = True


class Model(Section):
    """Where the model comes from: `from` (folder or Hub id), `preset`, or `family` with its sizes.

    Sizes beside a preset override it; beside `from` they are refused when the recipe is resolved.
    """

    from_: Annotated[str | None, Field(alias="from")] = None
    preset: Preset | None = None
    family: Family | None = None
    implementation: Auto | Literal["native", "transformers"] = "auto"
    load_with: Literal["native", "transformers"] = "native"
    vocab_size: PositiveInt | None = None
    hidden_size: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    num_layers: PositiveInt | None = None
    num_heads: PositiveInt | None = None
    num_kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    max_positions: PositiveInt | None = None
    norm: Literal["rms", "rms_unit_offset", "layer"] | None = None
    norm_eps: PositiveFloat | None = None
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] | None = None
    qk_norm: Literal["none", "head", "full"] | None = None
    rope_theta: PositiveFloat | None = None
    rope_scaling: RopeScalingSection | None = None
    sliding_window: PositiveInt | None = None
    tie_embeddings: bool | None = None
    dropout: Share | None = None
    initializer_range: PositiveFloat | None = None


class TrainTokenizer(Section):
    kind: Literal["bpe", "unigram"] = "bpe"
    vocab_size: Annotated[int, Field(gt=0, le=2**24)] = 50_000  # more than any model has; the trainer reserves them all
    special_tokens: list[Annotated[str, Field(min_length=1)]] = []


class TokenizerSection(Section):
    """`from`: "same" (the model's own), a folder, a tokenizer.json or .model file; or `train` one from the data.

    `additional_special_tokens`: added to it; the model's embeddings grow by one row each, the mean of the others.
    """

    from_: Annotated[str | None, Field(alias="from")] = None
    additional_special_tokens: list[Annotated[str, Field(min_length=1)]] = []
    train: TrainTokenizer | None = None


class Chat(Section):
    template: str | None = None
    train_on: Literal["assistant", "all", "last"] = "assistant"


Layout = Literal["packed", "padded", "fixed"]
Format = Auto | Literal[
    "text", "code", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "tokens",
    "messages", "sharegpt", "alpaca", "completion", "preference", "kto",
]  # fmt: skip


class Source(Section):
    """One corpus of several. `weight`: how often an epoch sees it (2 = twice, 0.5 = half of its rows)."""

    path: FilePath
    glob: str | None = None
    format: Format = "auto"
    columns: dict[str, str] = {}
    weight: PositiveFloat = 1.0


class Data(Section):
    path: FilePath | None = None
    glob: str | None = None
    format: Format = "auto"
    columns: dict[str, str] = {}
    builtin: Literal["stdlib-code", "stdlib-chat", "stdlib-pairs"] | None = None
    sources: list[Source] = []
    sequence_length: Annotated[int, Field(ge=2)] = 1024  # of one token nothing is predicted
    validation: str | float = "auto"  # a split of the data set that is meant for it, else 1%
    packing: bool = True
    document_masking: bool = True  # without packing each sequence is one document
    chat: Chat = Chat()
    on_error: Literal["stop", "skip"] = "stop"
    prepared: FilePath | None = None
    num_proc: Auto | Annotated[int, Field(ge=0)] = "auto"
    pin_memory: Auto | bool = "auto"
    prefetch: Auto | PositiveInt = "auto"

    @property
    def layout(self) -> Layout:
        """How sequences are made of documents: packed, padded, or (fixed) packed without document masking."""
        if not self.packing:
            return "padded"
        return "packed" if self.document_masking else "fixed"


class ObjectiveSection(Section):
    """The loss, by its `kind`."""

    kind: str

    @property
    def spec(self) -> ObjectiveSpec:
        return OBJECTIVES[self.kind]


class Pretrain(ObjectiveSection):
    """Every token is learned."""

    kind: Literal["pretrain"] = "pretrain"


class Sft(ObjectiveSection):
    """The answers of conversations are learned, as `data.chat.train_on` says."""

    kind: Literal["sft"]


class Preference(ObjectiveSection):
    """Of two answers, the chosen one is made likelier than the rejected one, compared with the model of the start."""

    kind: Literal["dpo", "ipo"]
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0  # dpo: the share of pairs that are wrong way round


class SimPo(ObjectiveSection):
    """Pairs without a reference model: mean log-probabilities a margin `gamma` apart (arXiv:2405.14734)."""

    kind: Literal["simpo"]
    beta: PositiveFloat = 2.0
    gamma: NonNegativeFloat = 1.0


class OrPo(ObjectiveSection):
    """The chosen answer is learned, and its odds are raised above the rejected one's (arXiv:2403.07691)."""

    kind: Literal["orpo"]
    beta: PositiveFloat = 0.1


class Kto(ObjectiveSection):
    """Single answers, each marked desirable or not (arXiv:2402.01306)."""

    kind: Literal["kto"]
    beta: PositiveFloat = 0.1
    desirable_weight: PositiveFloat = 1.0
    undesirable_weight: PositiveFloat = 1.0


class Reward(ObjectiveSection):
    """One number a text, higher for the chosen answer of a pair."""

    kind: Literal["reward"]


class Distill(ObjectiveSection):
    """Distillation: `kd_ratio` of the loss is the divergence from a larger model, the rest is that of the labels."""

    kind: Literal["distill"]
    teacher: str  # a folder in Hugging Face's layout, or an id on the Hub
    temperature: PositiveFloat = 1.0
    kd_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5


class Online(ObjectiveSection):
    """The model writes answers that are then judged."""

    kind: Literal["ppo", "grpo"]


Objective = Annotated[
    Pretrain | Sft | Preference | SimPo | OrPo | Kto | Reward | Distill | Online, Field(discriminator="kind")
]


class NoAdapter(Section):
    """Every parameter is trained."""

    kind: Literal["none"] = "none"


class Lora(Section):
    kind: Literal["lora", "dora"]
    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    use_rslora: bool = False
    init: Literal["default", "pissa"] = "default"
    dropout: Share = 0.0
    target_modules: OneOrMore[str] = ["q_proj", "v_proj"]
    modules_to_save: OneOrMore[str] = []
    dtype: Literal["float32", "bfloat16"] = "float32"


class Peft(BaseModel, frozen=True, extra="allow"):
    """Any other method of PEFT, with PEFT's own fields."""

    kind: Literal["peft"]
    method: str


Adapter = Annotated[NoAdapter | Lora | Peft, Field(discriminator="kind")]


class Quantize(Section):
    kind: Literal["none", "nf4", "int8"] = "none"
    double_quant: bool = True  # nf4: the scales are quantised, too (arXiv:2305.14314)


class Wsd(Section):
    """Warmup, stable, decay: `decay` is the length of the last part, `min_lr_ratio` where it ends, of the rate."""

    kind: Literal["wsd"] = "wsd"
    decay: Length = Duration(20.0, "percent")
    min_lr_ratio: Share = 0.0


class OptimizerSection(Section):
    kind: Literal["adamw", "muon", "adafactor"] = "adamw"
    learning_rate: PositiveFloat = 5e-4
    muon_learning_rate: PositiveFloat | None = (
        None  # of the matrices; the rest takes learning_rate, as they do without it
    )
    momentum: Share = 0.95
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    paged: bool = False
    offload: bool = False
    fused_backward: bool = False
    stochastic_rounding: bool = False
    schedule: Literal["cosine", "linear", "constant", "wsd"] | Wsd = "cosine"
    min_lr_ratio: Share = 0.0  # cosine and linear end at this share of the rate
    warmup: LengthOrNothing = Duration(1.0, "percent")


def _with_one_length(value: Any) -> Any:
    """Another length replaces the default of one epoch."""
    if isinstance(value, dict) and "epochs" not in value and any(value.get(key) is not None for key in LENGTHS):
        return value | {"epochs": None}
    return value


class Train(Section):
    epochs: Epochs | None = 1.0
    max_steps: Steps | None = None
    max_tokens: Tokens | None = None
    max_time: WallTime | None = None
    min_steps: PositiveInt | None = None  # of max_time, which then takes longer where it must
    tokens_per_step: Auto | Count = "auto"
    batch_size: PositiveInt | None = None  # sequences per step on all devices, instead of tokens_per_step
    micro_batch_size: Auto | PositiveInt = "auto"
    precision: Annotated[Auto | Precision, BeforeValidator(_precision, json_schema_input_type=PrecisionNames)] = "auto"
    compile: Auto | bool = "auto"
    attention: Auto | AttentionBackend = "auto"
    activation_checkpointing: Annotated[
        Auto | Annotated[str, Field(pattern="^(none|selective|full|every-[1-9][0-9]*)$")],
        BeforeValidator(_checkpointing, json_schema_input_type=str | bool),
    ] = "auto"
    offload_activations: bool = False
    max_grad_norm: PositiveFloat | None = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    deterministic: Auto | bool = "auto"

    _one_length = model_validator(mode="before")(_with_one_length)

    @property
    def auto_batch(self) -> bool:
        return self.tokens_per_step == "auto" and self.batch_size is None

    @property
    def length_key(self) -> str:
        """The key that sets the length, such as "max_steps"."""
        return next((key for key in LENGTHS if getattr(self, key) is not None), "epochs")

    @property
    def length(self) -> Duration:
        amount = getattr(self, self.length_key)
        if isinstance(amount, Duration):
            return amount
        return Duration(1.0 if amount is None else float(amount), LENGTHS[self.length_key])


class Parallel(Section):
    replicate: Auto | PositiveInt = "auto"
    shard: Auto | PositiveInt = "auto"
    tensor: PositiveInt = 1
    context: PositiveInt = 1
    pipeline: PositiveInt = 1
    pipeline_schedule: Literal["1f1b"] = "1f1b"
    pipeline_microbatches: Auto | PositiveInt = "auto"


class Checkpoint(Section):
    every: Length = Duration(1000.0, "steps")
    keep: PositiveInt = 3
    async_save: Auto | bool = "auto"


class Eval(Section):
    every: Literal["none"] | Length = Duration(500.0, "steps")
    tokens: Auto | Count = "auto"  # of the validation split that an evaluation during training reads
    early_stopping_patience: Literal["none"] | PositiveInt = "none"  # evaluations without improvement that end the run


class Sample(Section):
    """Texts that the model generates at every evaluation."""

    prompts: list[str] = []
    max_new_tokens: PositiveInt = 200
    temperature: NonNegativeFloat = 0.8
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.95


def _words_of_a_command(value: str) -> str:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError("a quote is never closed in this command") from error
    if not words:
        raise ValueError("must be a command, not an empty text")
    return value


class Command(Section):
    command: Annotated[str, AfterValidator(_words_of_a_command)]


def _in_order(value: list[int]) -> list[int]:
    if value[0] > value[1] or value[1] - value[0] >= LONGEST_TRACE:
        raise ValueError(f"must be the first and the last of at most {LONGEST_TRACE} steps, such as [100, 102]")
    return value


Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow"] | Command


class Logging(Section):
    every: Length = Duration(10.0, "steps")
    trackers: OneOrMore[Tracker] = ["tensorboard"]
    max_gpu_temperature: Literal["auto", "none"] | Annotated[float, Field(ge=40, le=120)] = "auto"  # degrees Celsius
    memory: bool = False  # prints the peak so far in each line; events always have it
    profile_steps: (
        Literal["none"] | Annotated[list[PositiveInt], Field(min_length=2, max_length=2), AfterValidator(_in_order)]
    ) = "none"

    @property
    def libraries(self) -> list[str]:
        """The trackers that are Python packages which `bloomery` does not bring."""
        return [tracker for tracker in self.trackers if not isinstance(tracker, Command) and tracker != "tensorboard"]


class Recipe(Section):
    """One training run, everywhere the same. Runs and shards take its `name`; without one, that of the file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
    extends: str | None = None
    claims: Claims = Claims()
    model: Model
    tokenizer: TokenizerSection = TokenizerSection()
    data: Data
    objective: Objective = Pretrain()
    adapter: Adapter = NoAdapter()
    quantize: Quantize = Quantize()
    optimizer: OptimizerSection = OptimizerSection()
    train: Train = Train()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    sample: Sample = Sample()
    logging: Logging = Logging()

    @property
    def tokens_per_step(self) -> Literal["auto"] | int:
        """`train.tokens_per_step`, or that of `train.batch_size`."""
        asked = self.train
        return asked.tokens_per_step if asked.batch_size is None else asked.batch_size * self.data.sequence_length
