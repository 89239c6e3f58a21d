"""The recipe's sections, keys and defaults. Sections do not depend on each other. No torch."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from bloomery.core.plugins import plugin_names
from bloomery.core.units import Duration, Unit
from bloomery.facts.attention import BACKENDS
from bloomery.facts.config import Activation, NormKind, QueryNorm
from bloomery.facts.families import FAMILIES
from bloomery.facts.optimizers import OPTIMIZERS, USUAL_OPTIMIZER
from bloomery.facts.presets import PRESETS
from bloomery.recipe.episodes import EnvironmentSection, Tool
from bloomery.recipe.objectives import ObjectiveSection, Pretrain, any_objective
from bloomery.recipe.plugins import add_plugins
from bloomery.recipe.rewards import AnyReward
from bloomery.recipe.sections import Section, key
from bloomery.recipe.values import (
    Auto,
    Checkpointing,
    ClaimedBytes,
    ClaimedNumber,
    ClaimedTime,
    Count,
    Epochs,
    FilePath,
    Length,
    LengthOrNothing,
    OneOrMore,
    PositiveOrNone,
    Precision,
    SequenceLength,
    Share,
    ShellCommand,
    StepRange,
    Steps,
    Tokens,
    WallTime,
)

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved"]
PipelineTransport = Literal["device", "host"]


LENGTHS: dict[str, Unit] = {
    "epochs": "epochs",
    "max_steps": "steps",
    "max_tokens": "tokens",
    "max_time": "seconds",
}
IF_INSTALLED = "tensorboard-if-installed"  # the tracker of a plan whose recipe names none
# Keys whose values are the names in a table of facts. Installed packages add to some of them, which mypy cannot know.
if TYPE_CHECKING:
    FamilyName = str
    PresetName = str
    OptimizerKind = str
    AttentionBackend = str
    AnyObjective = ObjectiveSection
else:
    add_plugins()
    FamilyName = FAMILIES.name_literal()
    PresetName = PRESETS.name_literal()
    OptimizerKind = OPTIMIZERS.name_literal()
    AttentionBackend = BACKENDS.name_literal()
    AnyObjective = any_objective()
# Between nodes: the usual one, sockets, or GB/s of a node.
AssumedNetwork = Auto | Literal["tcp"] | PositiveFloat


class Claims(Section):
    """Expectations of the recipe's author. `plan` checks each claim, `report` compares it with the run."""

    tokens: ClaimedNumber | None = key(
        None, "Tokens that the run trains on, a value or a range.", "2 to 4 M"
    )
    epochs: ClaimedNumber | None = key(None, "Epochs that the run makes.", 1)
    tokens_per_second: ClaimedNumber | None = key(
        None, "Training speed in tokens per second, all devices.", "100 to 100000"
    )
    duration: ClaimedTime | None = key(None, "Time that the whole run takes.", "1m to 8h")
    step_time: list[ClaimedTime] = key(
        [], "Times of a step, each a value or a range.", ["0.01s to 2m"]
    )
    memory: ClaimedBytes | None = key(None, "Peak memory of one device.", "0.5 to 16 GB")
    perplexity: dict[Length, ClaimedNumber] = key(
        {}, "Validation perplexity by step.", {"100 steps": "20 to 2000"}
    )


class RopeScalingSection(Section):
    """Stretching of rotary positions, in transformers' terms; fields that a kind does not use are ignored by it."""

    kind: Literal["linear", "dynamic", "llama3", "yarn"] = Field(
        description="Method that extends the context."
    )
    factor: PositiveFloat = Field(
        description="Context length relative to original_max_positions.", examples=[8]
    )
    original_max_positions: PositiveInt | None = key(
        None, "Context length of pretraining, in tokens.", 8192
    )
    low_freq_factor: PositiveFloat = key(
        1.0,
        "llama3: wavelengths above original_max_positions / low_freq_factor are scaled in full.",
    )
    high_freq_factor: PositiveFloat = key(
        4.0, "llama3: wavelengths below original_max_positions / high_freq_factor are not scaled."
    )
    beta_fast: PositiveFloat = key(32.0, "yarn: rotations above which a dimension is not scaled.")
    beta_slow: PositiveFloat = key(
        1.0, "yarn: rotations below which a dimension is scaled in full."
    )
    attention_factor: PositiveFloat | None = key(
        None, "yarn: factor of the attention logits; unset: from `factor`.", 1.0
    )
    truncate: bool = key(True, "yarn: round the boundaries of the dimensions to integers.")


class DeltaNetSection(Section):
    """The heads of gated delta nets (arXiv:2412.06464); each key head serves equally many value heads."""

    num_key_heads: PositiveInt | None = key(
        None, "Heads of queries and keys; unset: model.num_heads.", 16
    )
    num_value_heads: PositiveInt | None = key(
        None, "Heads of values, a multiple of num_key_heads; unset: model.num_heads.", 32
    )
    key_head_dim: PositiveInt | None = key(
        None, "Width of a query and a key; unset: model.head_dim.", 128
    )
    value_head_dim: PositiveInt | None = key(None, "Width of a value; unset: model.head_dim.", 128)


class ExpertsSection(Section):
    """The experts that stand in place of each MLP of a new model."""

    count: PositiveInt | None = key(None, "Experts of a layer; unset: the family's.", 8)
    per_token: PositiveInt | None = key(
        None, "Experts that the router chooses for a token; unset: the family's.", 2
    )
    width: PositiveInt | None = key(None, "Width inside an expert; unset: the family's.", 512)


class Model(Section):
    """Where the model comes from: `from` (folder or Hub id), `preset`, or `family` with its sizes.

    Sizes override those of a preset. With `from` only rope_scaling, rope_theta and max_positions can be changed.
    """

    from_: Annotated[str | None, Field(alias="from")] = key(
        None,
        "Pretrained model: a folder in Hugging Face format or a Hub id; random:NAME: made here.",
        "Qwen/Qwen2.5-1.5B-Instruct",
    )
    preset: PresetName | None = key(
        None, "Architecture and sizes of a packaged model, with random weights.", "go-coder-tiny"
    )
    family: FamilyName | None = key(
        None, "Architecture of a new model; the sizes follow below.", "llama"
    )
    implementation: Auto | Literal["native", "transformers"] = key(
        "auto", "Layers that compute the model: Bloomery's (native) or those of transformers."
    )
    load_with: Literal["native", "transformers"] = key(
        "native",
        "Loader of a model that runs in transformers' layers; transformers: from_pretrained.",
    )
    vocab_size: PositiveInt | None = key(
        None, "Tokens of the vocabulary; unset: those of the tokenizer.", 50000
    )
    hidden_size: PositiveInt | None = key(None, "Width of the hidden states.", 512)
    intermediate_size: PositiveInt | None = key(None, "Width of the MLP.", 2048)
    num_layers: PositiveInt | None = key(None, "Number of transformer layers.", 8)
    num_heads: PositiveInt | None = key(None, "Attention heads (queries).", 8)
    num_kv_heads: PositiveInt | None = key(
        None, "Key and value heads; fewer than num_heads: grouped-query attention.", 8
    )
    head_dim: PositiveInt | None = key(
        None, "Width of one attention head; unset: hidden_size / num_heads.", 64
    )
    max_positions: PositiveInt | None = key(None, "Context length in tokens.", 1024)
    norm: NormKind | None = key(None, "Normalization layer.", "rms")
    norm_eps: PositiveFloat | None = key(None, "Epsilon of the normalization layers.", 1e-05)
    activation: Activation | None = key(None, "Activation function of the MLP.", "silu")
    qk_norm: QueryNorm | None = key(
        None, "Normalization of queries and keys: per head or over the full width.", "none"
    )
    rope_theta: PositiveFloat | None = key(None, "Base of the rotary position embedding.", 10000)
    rope_scaling: RopeScalingSection | None = key(
        None, "Context extension of the rotary position embedding."
    )
    sliding_window: PositiveInt | None = key(
        None, "Attention window in tokens; unset: the whole context.", 4096
    )
    delta_net: DeltaNetSection | None = key(
        None, "Sizes of the gated delta nets of a family that has them; unset: those of attention."
    )
    experts: ExpertsSection | None = key(
        None, "Experts in place of each MLP, of a family that has them; unset: the family's."
    )
    tie_embeddings: bool | None = key(
        None, "Use one matrix for the input embedding and the output head.", True
    )
    dropout: Share | None = key(
        None, "Dropout probability; unset: that of the preset or the pretrained model.", 0.1
    )
    initializer_range: PositiveFloat | None = key(
        None, "Standard deviation of the random initial weights.", 0.02
    )


class TrainTokenizer(Section):
    kind: Literal["bpe", "unigram"] = key("bpe", "Algorithm: byte-level BPE or unigram.")
    vocab_size: Annotated[int, Field(gt=0, le=2**24)] = key(
        50_000, "Tokens of the vocabulary, special tokens included."
    )
    special_tokens: list[Annotated[str, Field(min_length=1)]] = key(
        [], "Special tokens added to <s> </s> <pad> <unk>.", ["<PR_TITLE>"]
    )


class TokenizerSection(Section):
    """`from`: "same" (the model's own), a folder, a tokenizer.json or .model file; or `train` one from the data.

    `additional_special_tokens`: added to it; the model's embeddings grow by one row each, the mean of the others.
    """

    from_: Annotated[str | None, Field(alias="from")] = key(
        None, "same (the model's), a folder, a tokenizer.json or a SentencePiece .model.", "same"
    )
    additional_special_tokens: list[Annotated[str, Field(min_length=1)]] = key(
        [], "Special tokens to add; each new embedding row is the mean of the others."
    )
    train: TrainTokenizer | None = key(
        None, "Train a tokenizer on the data, once; a resumed run reuses it."
    )


class Chat(Section):
    template: str | None = key(
        None,
        "Chat template: a name or a file; none: no chat template; unset: the tokenizer's.",
        "chatml",
    )
    train_on: Literal["assistant", "all", "last"] = key(
        "assistant",
        "Messages with labels: the assistant's, all, or the assistant's last; others are masked.",
    )
    template_kwargs: dict[str, bool | int | float | str] = key(
        {},
        "Variables of the chat template, which the saved template has as defaults.",
        {"enable_thinking": False},
    )


Layout = Literal["packed", "padded", "fixed"]
FORMAT_NAMES = (
    "auto",
    "text",
    "code",
    "jsonl",
    "json",
    "csv",
    "tsv",
    "parquet",
    "arrow",
    "webdataset",
    "verifiers",
    "tokens",
    "messages",
    "sharegpt",
    "alpaca",
    "captions",
    "completion",
    "preference",
    "kto",
    "prompts",
)
if TYPE_CHECKING:
    Format = str
else:
    Format = Literal[(*FORMAT_NAMES, *plugin_names("formats"))]


class Source(Section):
    """One dataset of several. `weight`: how often an epoch repeats it (2: twice, 0.5: half of its sequences)."""

    path: FilePath = Field(description="Dataset: a file, folder or Hub id.")
    glob: str | None = key(None, "Pattern of file names below path.", "*.go")
    format: Format = key("auto", "Format of the dataset; auto: by its files and columns.")
    columns: dict[str, str] = key({}, "Names of the dataset's columns, by role.")
    pictures: FilePath | None = key(
        None, "Folder of the pictures that rows name; unset: that of the dataset.", "images"
    )
    weight: PositiveFloat = key(1.0, "Passes per epoch: 2 reads the dataset twice, 0.5 half of it.")


class Data(Section):
    path: FilePath | None = key(None, "Dataset: a file, folder or Hub id (ORG/NAME).", "my-text")
    glob: str | None = key(
        None, "Pattern of file names below path; unset: every file of the format.", "*.py"
    )
    format: Format = key("auto", "Format of the dataset; auto: by its files and columns.")
    columns: dict[str, str] = key(
        {}, "Names of the dataset's columns, by role; default: the usual names.", {"text": "text"}
    )
    builtin: (
        Literal["stdlib-code", "stdlib-chat", "stdlib-pairs", "arithmetic", "shapes"] | None
    ) = key(
        None,
        "Dataset made on this machine: Python's standard library, sums, or pictures of shapes.",
        "stdlib-code",
    )
    pictures: FilePath | None = key(
        None, "Folder of the pictures that rows name; unset: that of the dataset.", "images"
    )
    sources: list[Source] = key(
        [],
        "Several datasets instead of path.",
        [
            {"path": "code", "glob": "*.go", "weight": 2.0},
            {"path": "issues.jsonl", "columns": {"text": "body"}},
        ],
    )
    sequence_length: SequenceLength = key(1024, "Tokens per training sequence.")
    validation: str | float = key(
        "auto",
        "Validation set: a share (5%), a path or a split; auto: the dataset's own split, else 1%.",
    )
    packing: bool = key(
        True, "Sample packing: several documents per sequence; false: one document, padded."
    )
    document_masking: bool = key(True, "No attention across the documents of a packed sequence.")
    chat: Chat = key(Chat(), "Chat template and loss mask of conversations.")
    on_error: Literal["stop", "skip"] = key(
        "stop", "At a malformed example: stop, or skip and count it."
    )
    prepared: FilePath | None = key(
        None, "Folder of the tokenized dataset; unset: prepared/<recipe>-<hash>.", "shards"
    )
    num_proc: Auto | Annotated[int, Field(ge=0)] = key(
        "auto", "Processes that tokenize the dataset."
    )
    pin_memory: Auto | bool = key("auto", "Copy batches to the GPU from pinned memory.")
    prefetch: Auto | PositiveInt = key("auto", "Batches read ahead.")

    @property
    def layout(self) -> Layout:
        """How sequences are made of documents: packed, padded, or (fixed) packed without document masking."""
        if not self.packing:
            return "padded"
        return "packed" if self.document_masking else "fixed"


VisionParts = Literal["none", "projector", "tower", "all"]


class NoAdapter(Section):
    """Every parameter is trained."""

    kind: Literal["none"] = key("none", "No adapter: full fine-tuning, every parameter is trained.")


class Lora(Section):
    kind: Literal["lora", "dora"] = Field(description="LoRA or DoRA adapter.")
    rank: PositiveInt = key(16, "Rank of the LoRA matrices.")
    alpha: PositiveFloat = key(32.0, "Scale of LoRA: the update is multiplied by alpha / rank.")
    rank_pattern: dict[str, PositiveInt] = key(
        {},
        "Other ranks by names or patterns of target modules; the first that fits.",
        {"experts": 4},
    )
    alpha_pattern: dict[str, PositiveFloat] = key(
        {},
        "Other alphas by names or patterns of target modules; the first that fits.",
        {"experts": 8},
    )
    use_rslora: bool = key(False, "Scale by alpha / sqrt(rank) instead (rsLoRA).")
    init: Literal["default", "pissa"] = key(
        "default",
        "Initial LoRA matrices: random and zero, or from the singular values of the weight (pissa).",
    )
    dropout: Share = key(0.0, "Dropout probability before the LoRA matrices.")
    target_modules: OneOrMore[str] = key(
        ["all-linear"],
        "Modules with LoRA: names, patterns, or all-linear (every matrix of the layers but routers).",
        ["q_proj", "v_proj"],
    )
    modules_to_save: OneOrMore[str] = key(
        [], "Modules trained in full, such as embed_tokens, lm_head, norms."
    )
    vision: VisionParts = key(
        "none",
        "Parts that read pictures with LoRA on all their linear maps, beside target_modules.",
    )
    dtype: Literal["float32", "bfloat16"] = key("float32", "Data type of the LoRA matrices.")


class Peft(BaseModel, frozen=True, extra="allow"):
    """Any other method of PEFT, with PEFT's own fields."""

    kind: Literal["peft"] = Field(description="Any other method of PEFT.")
    method: str = Field(
        description="PEFT's name of the method; PEFT's own fields go next to it.",
        examples=["adalora"],
    )


Adapter = Annotated[NoAdapter | Lora | Peft, Field(discriminator="kind")]


class Quantize(Section):
    kind: Literal["none", "nf4", "int8"] = key(
        "none",
        "Quantization of the frozen base weights: 4 bits (nf4: QLoRA) or 8 bits; needs an adapter.",
    )
    double_quant: bool = key(True, "nf4: quantize the scales, too (arXiv:2305.14314).")


class VisionSection(Section):
    """What is trained of the parts that read pictures: the tower, and the projector that fits its output to the text.

    By default both run as published. `adapter.vision` puts LoRA on them instead.
    """

    train: VisionParts = key("none", "Parts that read pictures and are trained in full.")
    learning_rate: Auto | PositiveFloat = key(
        "auto",
        "Learning rate of the tower; auto: 2e-6 in full, optimizer.learning_rate with LoRA.",
        2e-6,
    )
    projector_learning_rate: Auto | PositiveFloat = key(
        "auto",
        "Learning rate of the projector; auto: optimizer.learning_rate, but 2e-5 in full beside an adapter.",
        1e-3,
    )
    freeze_language_model: bool = key(
        False,
        "Train nothing else, as in the first stage of LLaVA: a projector alone, from captions.",
    )


class RouterSection(Section):
    """What evens the load of the experts of a mixture. Without a loss or a bias a few experts may take all tokens."""

    loss: Literal["auto", "none"] | NonNegativeFloat = key(
        "auto",
        "Coefficient of the load balancing loss; auto: the model config's, none with a frozen router.",
        0.001,
    )
    z_loss: PositiveOrNone = key(
        None,
        "Coefficient of the router z-loss, which keeps its logits small; none or null: no loss.",
        0.001,
    )
    bias_update: PositiveOrNone = key(
        None,
        "Step of the biases that even the load without a loss (arXiv:2408.15664), of models with such biases.",
        0.001,
    )
    counts: Literal["step", "micro_batch"] = key(
        "step",
        "Load that the loss evens: of the whole step, which takes one more forward with gradient accumulation,"
        " or of each micro-batch.",
    )
    pooled: bool = key(
        True,
        "Even the load of all layers together, as transformers; false: of each layer, as Switch Transformers.",
    )


class Wsd(Section):
    """Warmup, stable, decay: `decay` is the length of the last part, `min_lr_ratio` where it ends, of the rate."""

    kind: Literal["wsd"] = key("wsd", "Warmup, stable, decay.")
    decay: Length = key(Duration(20.0, "percent"), "Length of the decay at the end of the run.")
    min_lr_ratio: Share = key(0.0, "Final learning rate, relative to learning_rate.")


class OptimizerSection(Section):
    kind: OptimizerKind = key(
        USUAL_OPTIMIZER, "muon updates the matrices of the layers, AdamW the rest."
    )
    learning_rate: Auto | PositiveFloat = key(
        "auto", "Peak learning rate; auto: the usual one of the objective and the adapter.", 2e-4
    )
    muon_learning_rate: PositiveFloat | None = key(
        None,
        "muon: learning rate of the matrices; unset: learning_rate, 0.002 for a new model whose"
        " learning_rate is auto.",
        0.02,
    )
    momentum: Share = key(0.95, "muon: momentum.")
    betas: tuple[Share, Share] = key((0.9, 0.95), "AdamW: decay rates of the two averages.")
    eps: PositiveFloat = key(1e-8, "AdamW: added to the denominator.")
    weight_decay: Auto | NonNegativeFloat = key(
        "auto", "Decoupled weight decay; auto: 0.1 for pretraining, 0 for fine-tuning.", 0.1
    )
    state_dtype: Literal["float32", "bfloat16", "int8"] = key(
        "float32", "Data type of AdamW's states."
    )
    paged: bool = key(False, "Another name for offload, as in paged_adamw.")
    offload: Annotated[
        bool, AfterValidator(lambda offload, info: offload or info.data.get("paged", False))
    ] = Field(
        False,
        validate_default=True,
        description="Keep AdamW's states in pinned host memory, copied in pieces.",
    )
    fused_backward: bool = key(
        False,
        "Update each parameter during backward and free its gradient; no gradient accumulation.",
    )
    stochastic_rounding: bool = key(False, "Round bfloat16 weights stochastically.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] | Wsd = key(
        "cosine",
        "Shape of the learning rate after warmup.",
        {"kind": "wsd", "decay": "20%", "min_lr_ratio": 0.0},
    )
    min_lr_ratio: Share = key(
        0.0, "Final learning rate of cosine and linear, relative to learning_rate."
    )
    warmup: Auto | LengthOrNothing = key(
        "auto",
        "Length of the linear warmup; auto: 1% for pretraining, 10% for preferences, else 3%.",
        "3%",
    )


def _with_one_length(value: Any) -> Any:
    """Another length replaces the default of one epoch."""
    if not isinstance(value, dict) or "epochs" in value:
        return value
    has_length = any(value.get(key) is not None for key in LENGTHS)
    return value | {"epochs": None} if has_length else value


class Train(Section):
    epochs: Epochs | None = key(
        1.0,
        "Length in passes over the dataset. Set exactly one of epochs, max_steps, max_tokens, max_time.",
    )
    max_steps: Steps | None = key(None, "Length of the run in optimizer steps.", 1000)
    max_tokens: Tokens | None = key(None, "Length of the run in tokens.", "10B")
    max_time: WallTime | None = key(
        None,
        "Length of the run in wall time; the learning rate follows the elapsed time.",
        "8h",
    )
    min_steps: PositiveInt | None = key(
        None, "max_time: at least so many steps, even if they take longer.", 200
    )
    tokens_per_step: Auto | Count = key(
        "auto",
        "Tokens per optimizer step on all devices (global batch); auto: from the model and the dataset.",
    )
    batch_size: PositiveInt | None = key(
        None, "Sequences per optimizer step on all devices, instead of tokens_per_step.", 16
    )
    micro_batch_size: Auto | PositiveInt = key(
        "auto",
        "Sequences per forward pass and device; changes GPU memory and speed, not the result.",
    )
    precision: Precision = key(
        "auto", "Data type of the computation; all but bfloat16-pure keep float32 master weights."
    )
    compile: Auto | bool = key("auto", "Use torch.compile.")
    attention: Auto | AttentionBackend = key(
        "auto", "Attention backend; auto: flash attention where the GPU has it."
    )
    activation_checkpointing: Checkpointing = key(
        "auto",
        "Gradient checkpointing of activations: none, selected operations, all layers (true) or every N-th.",
    )
    offload_activations: bool = key(False, "Keep activations in host memory until backward.")
    max_grad_norm: PositiveOrNone = key(
        1.0, "Clip the gradient to this norm; none or null: no clipping."
    )
    neftune_alpha: PositiveOrNone = key(
        None,
        "NEFTune: noise of at most alpha / sqrt(tokens x width) on the embeddings in training; 5 to 15 is usual.",
        5.0,
    )
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = key(
        None,
        "Train an exponential moving average of the weights, too; it is evaluated and saved as the model.",
        0.999,
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = key(
        0, "Seed of initial weights, data order and dropout."
    )
    deterministic: Auto | bool = key("auto", "Bitwise repeatable steps on a GPU, which are slower.")

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


# The largest machine that is planned for, Frontier, has 75,264 devices. Of a list of more the planner would run full.
MOST_RANKS = 2**17
Devices = Annotated[PositiveInt, Field(le=MOST_RANKS)]


class Parallel(Section):
    replicate: Auto | Devices = key("auto", "Data parallel replicas.")
    shard: Auto | Devices = key(
        "auto", "Devices that shard parameters, gradients and states (FSDP)."
    )
    pipeline: Auto | Devices = key(
        "auto", "Pipeline stages: devices that each hold some of the layers."
    )
    context: Devices = key(
        1,
        "Neighboring devices that share each sequence, among those of replicate and shard: each"
        " holds a part of the tokens (Ulysses).",
    )
    expert: Devices = key(
        1,
        "Neighboring devices, among those of replicate and shard, that divide the experts of each"
        " layer: tokens travel to their experts.",
    )
    scoring_devices: Annotated[int, Field(ge=0, le=64)] = key(
        0,
        "Devices of each host that hold the teacher and the reward models and score while the others train; on a CPU"
        " processes of their own.",
        1,
    )
    stream: Literal["auto", "off", "layers", "experts"] = key(
        "auto",
        "Keep weights in the host's memory and copy them to the device as they are needed: those of"
        " one layer after the other, or of the experts alone.",
    )
    stream_micro_batches: PositiveInt | Literal["auto"] = key(
        "auto",
        "Micro-batches of a step that pass through a layer for each copy of its weights, where they"
        " stream; the activations at the borders of layers of all of them are kept.",
    )
    pipeline_schedule: PipelineSchedule = key(
        "1f1b",
        "Order of the micro-batches: 1f1b holds few of them in memory, interleaved waits less"
        " and sends more, gpipe holds all of them.",
    )
    pipeline_chunks: Auto | Devices = key(
        "auto", "Groups of layers of each stage; auto: 2 when interleaved, else 1."
    )
    pipeline_microbatches: Auto | PositiveInt = key(
        "auto", "Micro-batches of a step that each pipeline takes."
    )
    pipeline_link: Auto | PipelineTransport = key(
        "auto",
        "Path between stages: host (CPU memory), device (NCCL or RCCL);"
        " auto: the faster one that passes the check before the first step.",
    )
    network: AssumedNetwork = key(
        "auto",
        "Network that the plan assumes between nodes: auto is the usual one of such nodes,"
        " tcp is sockets without RCCL's or NCCL's plugin, a number is GB/s of a node.",
        25.0,
    )


class Checkpoint(Section):
    every: Length = key(
        Duration(900.0, "seconds"),
        "Interval between checkpoints. A time also saves at each best evaluation where that costs little;"
        " steps, tokens, epochs or % are moved to a multiple of eval.every.",
    )
    keep: PositiveInt = key(3, "Newest checkpoints to keep. The best weights are always kept.")
    async_save: Auto | bool = key("auto", "Write checkpoints in the background.")


class Eval(Section):
    every: Literal["none"] | Length = key(
        Duration(12.5, "percent"), "Interval between evaluations; none: off."
    )
    on_start: bool = key(False, "Evaluate before the first step, too: the model as it begins.")
    tokens: Auto | Count = key("auto", "Tokens of the validation set per evaluation.")
    early_stopping_patience: Literal["none"] | PositiveInt = key(
        "none", "Evaluations without a lower loss after which the run ends; none: off."
    )


class ImagePrompt(Section):
    image: FilePath = Field(description="Image before the text.")
    text: str = Field(description="Question about the image.")


class Sample(Section):
    """Texts that the model generates at every evaluation."""

    prompts: list[str | ImagePrompt] = key(
        [],
        "Prompts that the model completes or answers at every evaluation.",
        ["def main():", {"image": "receipt.png", "text": "What is the total?"}],
    )
    max_new_tokens: PositiveInt = key(200, "Longest completion in tokens.")
    temperature: NonNegativeFloat = key(0.8, "Sampling temperature; 0: greedy.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = key(
        0.95, "Nucleus sampling: share of the probability to sample from."
    )


class Command(Section):
    command: ShellCommand = Field(
        description="Program that receives each event as a JSON line on stdin."
    )


Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow"] | Command


class Logging(Section):
    every: Length = key(
        Duration(10.0, "steps"),
        "Interval of the terminal and the trackers; events.jsonl has every step.",
    )
    trackers: OneOrMore[Tracker] = key(
        ["tensorboard"],
        "Experiment trackers, one or a list; the default is silent if tensorboard is not installed.",
        ["wandb", {"command": "./hook.sh"}],
    )
    max_gpu_temperature: Literal["auto", "none"] | Annotated[float, Field(ge=40, le=120)] = key(
        "auto",
        "Pause the run above this temperature in degrees Celsius; auto: 5 below the GPU's limit.",
    )
    memory: bool = key(False, "Print the peak memory (of the GPU) in each line.")
    profile_steps: Literal["none"] | StepRange = key(
        "none", "First and last step to profile.", [100, 102]
    )
    completions: Literal["none", "shown", "all"] = key(
        "shown", "Completions of a rollout written to the run folder: none, those shown, or all."
    )

    @property
    def libraries(self) -> list[str]:
        """The trackers that are Python packages which `bloomery` does not bring."""
        return [
            tracker
            for tracker in self.trackers
            if not isinstance(tracker, Command) and tracker != "tensorboard"
        ]


class Recipe(Section):
    """One training run, everywhere the same. Runs and shards take its `name`; without one, that of the file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = key(
        None, "Name of the run folder; unset: the name of the recipe file.", "my-run"
    )
    extends: str | None = key(
        None, "A packaged recipe or a file that this one changes.", "go-coder-125m"
    )
    claims: Claims = key(
        Claims(),
        "What you expect of the run; plan checks each claim, report compares it with the run.",
    )
    model: Model = Field(description="The model: exactly one of from, preset and family.")
    tokenizer: TokenizerSection = key(TokenizerSection(), "The tokenizer: from or train.")
    data: Data = Field(description="The dataset: exactly one of path, builtin and sources.")
    objective: AnyObjective = key(Pretrain(), "The training objective.")
    rewards: list[AnyReward] = key(
        [],
        "grpo, rloo and ppo: what scores the completions.",
        [
            {"python": "my_rewards.py:score", "timeout": "60s", "memory": "4GiB"},
            {"verifier": "exact_match", "column": "answer"},
            {"verifier": "regex", "column": "answer", "pattern": "<answer>(.*)</answer>"},
            {"verifier": "length", "max_characters": 400},
            {"verifier": "soft_overlong", "max_completion_len": 1024, "soft_punish_cache": 256},
            {"verifier": "json_schema", "json_schema": {"type": "object"}},
            {
                "verifier": "unit_tests",
                "column": "test",
                "program_timeout": "5s",
                "program_memory": "256MiB",
            },
            {"function": "score"},
            {"plugin": "politeness"},
        ],
    )
    tools: list[Tool] = key(
        [],
        "grpo and rloo: functions that the model may call, over several turns.",
        [{"python": "my_tools.py:search"}],
    )
    environment: EnvironmentSection = key(
        EnvironmentSection(), "A state and a reward for each episode, and limits of tools."
    )
    adapter: Adapter = key(NoAdapter(), "Parameter-efficient fine-tuning.")
    quantize: Quantize = key(Quantize(), "Quantization of the frozen base weights.")
    vision: VisionSection = key(VisionSection(), "Training of the parts that read pictures.")
    optimizer: OptimizerSection = key(
        OptimizerSection(), "The optimizer and its learning rate schedule."
    )
    router: RouterSection = key(RouterSection(), "Balance of the experts of a mixture.")
    train: Train = key(Train(), "Length, batch, precision and memory of training.")
    parallel: Parallel = key(Parallel(), "Layout on several devices.")
    checkpoint: Checkpoint = key(Checkpoint(), "Saving.")
    eval: Eval = key(Eval(), "Evaluation on the validation set.")
    sample: Sample = key(Sample(), "Texts sampled at every evaluation.")
    logging: Logging = key(Logging(), "Terminal, trackers, temperature and profiling.")

    @property
    def tokens_per_step(self) -> Literal["auto"] | int:
        """`train.tokens_per_step`, or that of `train.batch_size`."""
        if self.train.batch_size is not None:
            return self.train.batch_size * self.data.sequence_length
        return self.train.tokens_per_step
