"""The recipe's sections, keys and defaults. Sections do not depend on each other."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from bloomery.core.units import Duration, Unit, parse_bytes, parse_count
from bloomery.recipe.objectives import OBJECTIVES, ObjectiveSpec
from bloomery.recipe.values import (
    Auto,
    Checkpointing,
    ClaimedRange,
    Count,
    Epochs,
    FilePath,
    Length,
    LengthOrNothing,
    OneOrMore,
    PositiveOrNone,
    Precision,
    Share,
    ShellCommand,
    StepRange,
    Steps,
    Tokens,
    WallTime,
    claimed,
    wall_time,
)

LENGTHS: dict[str, Unit] = {"epochs": "epochs", "max_steps": "steps", "max_tokens": "tokens", "max_time": "seconds"}
IF_INSTALLED = "tensorboard-if-installed"  # the tracker of a plan whose recipe names none
# The names of bloomery.model, which is a layer above; a test compares them.
Preset = Literal["go-coder-tiny", "go-coder-small", "go-coder-medium"]
Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3", "olmo2", "phi3", "gpt2",
]  # fmt: skip
AttentionBackend = Literal["sdpa", "mask", "per_document", "varlen", "flex", "blockwise", "math"]


class Section(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A recipe section: unknown keys are errors, values never change after loading."""


class Claims(Section):
    """Expectations of the recipe's author. `plan` checks each claim, `report` compares it with the run."""

    tokens: Annotated[ClaimedRange, claimed(parse_count, "10B or 50 to 100")] | None = Field(
        None, description="Tokens that the run trains on, a value or a range.", examples=["2 to 4 M"]
    )
    epochs: Annotated[ClaimedRange, claimed(parse_count, "10B or 50 to 100")] | None = Field(
        None, description="Epochs that the run makes.", examples=[1]
    )
    tokens_per_second: Annotated[ClaimedRange, claimed(parse_count, "10B or 50 to 100")] | None = Field(
        None, description="Training speed in tokens per second, all devices.", examples=["100 to 100000"]
    )
    duration: Annotated[ClaimedRange, claimed(wall_time, "8h or 5 to 7 days")] | None = Field(
        None, description="Time that the whole run takes.", examples=["1m to 8h"]
    )
    memory: Annotated[ClaimedRange, claimed(parse_bytes, "10 to 11 GB")] | None = Field(
        None, description="Peak memory of one device.", examples=["0.5 to 16 GB"]
    )
    perplexity: dict[Length, Annotated[ClaimedRange, claimed(parse_count, "10B or 50 to 100")]] = Field(
        {}, description="Validation perplexity by step.", examples=[{"100 steps": "20 to 2000"}]
    )


class RopeScalingSection(Section):
    """Stretching of rotary positions, in transformers' terms; fields that a kind does not use are ignored by it."""

    kind: Literal["linear", "dynamic", "llama3", "yarn"] = Field(description="Method that extends the context.")
    factor: PositiveFloat = Field(description="Context length relative to original_max_positions.", examples=[8])
    original_max_positions: PositiveInt | None = Field(
        None, description="Context length of pretraining, in tokens.", examples=[8192]
    )
    low_freq_factor: PositiveFloat = Field(
        1.0, description="llama3: wavelengths above original_max_positions / low_freq_factor are scaled in full."
    )
    high_freq_factor: PositiveFloat = Field(
        4.0, description="llama3: wavelengths below original_max_positions / high_freq_factor are not scaled."
    )
    beta_fast: PositiveFloat = Field(32.0, description="yarn: rotations above which a dimension is not scaled.")
    beta_slow: PositiveFloat = Field(1.0, description="yarn: rotations below which a dimension is scaled in full.")
    attention_factor: PositiveFloat | None = Field(
        None, description="yarn: factor of the attention logits; unset: from `factor`.", examples=[1.0]
    )
    truncate: bool = Field(True, description="yarn: round the boundaries of the dimensions to integers.")


class Model(Section):
    """Where the model comes from: `from` (folder or Hub id), `preset`, or `family` with its sizes.

    Sizes override those of a preset. With `from` only rope_scaling, rope_theta and max_positions can be changed.
    """

    from_: Annotated[str | None, Field(alias="from")] = Field(
        None,
        description="Pretrained model: a folder in Hugging Face format or a Hub id.",
        examples=["Qwen/Qwen2.5-1.5B-Instruct"],
    )
    preset: Preset | None = Field(
        None, description="Architecture and sizes of a packaged model, with random weights.", examples=["go-coder-tiny"]
    )
    family: Family | None = Field(
        None, description="Architecture of a new model; the sizes follow below.", examples=["llama"]
    )
    implementation: Auto | Literal["native", "transformers"] = Field(
        "auto", description="Layers that compute the model: Bloomery's (native) or those of transformers."
    )
    load_with: Literal["native", "transformers"] = Field(
        "native", description="Loader of a model that runs in transformers' layers; transformers: from_pretrained."
    )
    vocab_size: PositiveInt | None = Field(
        None, description="Tokens of the vocabulary; unset: those of the tokenizer.", examples=[50000]
    )
    hidden_size: PositiveInt | None = Field(None, description="Width of the hidden states.", examples=[512])
    intermediate_size: PositiveInt | None = Field(None, description="Width of the MLP.", examples=[2048])
    num_layers: PositiveInt | None = Field(None, description="Number of transformer layers.", examples=[8])
    num_heads: PositiveInt | None = Field(None, description="Attention heads (queries).", examples=[8])
    num_kv_heads: PositiveInt | None = Field(
        None, description="Key and value heads; fewer than num_heads: grouped-query attention.", examples=[8]
    )
    head_dim: PositiveInt | None = Field(
        None, description="Width of one attention head; unset: hidden_size / num_heads.", examples=[64]
    )
    max_positions: PositiveInt | None = Field(None, description="Context length in tokens.", examples=[1024])
    norm: Literal["rms", "rms_unit_offset", "layer"] | None = Field(
        None, description="Normalization layer.", examples=["rms"]
    )
    norm_eps: PositiveFloat | None = Field(None, description="Epsilon of the normalization layers.", examples=[1e-05])
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] | None = Field(
        None, description="Activation function of the MLP.", examples=["silu"]
    )
    qk_norm: Literal["none", "head", "full"] | None = Field(
        None, description="Normalization of queries and keys: per head or over the full width.", examples=["none"]
    )
    rope_theta: PositiveFloat | None = Field(
        None, description="Base of the rotary position embedding.", examples=[10000]
    )
    rope_scaling: RopeScalingSection | None = Field(
        None, description="Context extension of the rotary position embedding."
    )
    sliding_window: PositiveInt | None = Field(
        None, description="Attention window in tokens; unset: the whole context.", examples=[4096]
    )
    tie_embeddings: bool | None = Field(
        None, description="Use one matrix for the input embedding and the output head.", examples=[True]
    )
    dropout: Share | None = Field(
        None, description="Dropout probability; unset: that of the preset or the pretrained model.", examples=[0.1]
    )
    initializer_range: PositiveFloat | None = Field(
        None, description="Standard deviation of the random initial weights.", examples=[0.02]
    )


class TrainTokenizer(Section):
    kind: Literal["bpe", "unigram"] = Field("bpe", description="Algorithm: byte-level BPE or unigram.")
    vocab_size: Annotated[int, Field(gt=0, le=2**24)] = Field(
        50_000, description="Tokens of the vocabulary, special tokens included."
    )
    special_tokens: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="Special tokens besides <s> </s> <pad> <unk>.", examples=[["<PR_TITLE>"]]
    )


class TokenizerSection(Section):
    """`from`: "same" (the model's own), a folder, a tokenizer.json or .model file; or `train` one from the data.

    `additional_special_tokens`: added to it; the model's embeddings grow by one row each, the mean of the others.
    """

    from_: Annotated[str | None, Field(alias="from")] = Field(
        None, description="same (the model's), a folder, a tokenizer.json or a SentencePiece .model.", examples=["same"]
    )
    additional_special_tokens: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="Special tokens to add; each new embedding row is the mean of the others."
    )
    train: TrainTokenizer | None = Field(
        None, description="Train a tokenizer on the data, once; a resumed run reuses it."
    )


class Chat(Section):
    template: str | None = Field(
        None,
        description="Chat template: a name or a file; none: no template; unset: the tokenizer's.",
        examples=["chatml"],
    )
    train_on: Literal["assistant", "all", "last"] = Field(
        "assistant", description="Messages with loss: the assistant's, all, or the last of the assistant."
    )


Layout = Literal["packed", "padded", "fixed"]
Format = Auto | Literal[
    "text", "code", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "tokens",
    "messages", "sharegpt", "alpaca", "completion", "preference", "kto",
]  # fmt: skip


class Source(Section):
    """One dataset of several. `weight`: how often an epoch repeats it (2: twice, 0.5: half of its sequences)."""

    path: FilePath = Field(description="File, folder or Hub id.")
    glob: str | None = Field(None, description="Pattern of file names below path.", examples=["*.go"])
    format: Format = Field("auto", description="Format of the files; auto: by their content.")
    columns: dict[str, str] = Field({}, description="Names of the columns in the files, by role.")
    weight: PositiveFloat = Field(1.0, description="Passes per epoch: 2 reads the source twice, 0.5 half of it.")


class Data(Section):
    path: FilePath | None = Field(None, description="File, folder or Hub id (ORG/NAME).", examples=["my-text"])
    glob: str | None = Field(
        None, description="Pattern of file names below path; unset: every file of the format.", examples=["*.py"]
    )
    format: Format = Field("auto", description="Format of the files; auto: by their content.")
    columns: dict[str, str] = Field(
        {},
        description="Names of the columns in the files, by role; default: the usual names.",
        examples=[{"text": "text"}],
    )
    builtin: Literal["stdlib-code", "stdlib-chat", "stdlib-pairs"] | None = Field(
        None, description="Dataset made from the Python installation of this machine.", examples=["stdlib-code"]
    )
    sources: list[Source] = Field(
        [],
        description="Several datasets instead of path.",
        examples=[
            [{"path": "code", "glob": "*.go", "weight": 2.0}, {"path": "issues.jsonl", "columns": {"text": "body"}}]
        ],
    )
    sequence_length: Annotated[int, Field(ge=2)] = Field(1024, description="Tokens per training sequence.")
    validation: str | float = Field(
        "auto", description="Validation set: a share (5%), a path or a split; auto: the dataset's own split, else 1%."
    )
    packing: bool = Field(
        True, description="Fill each sequence with several documents; false: one document per sequence, padded."
    )
    document_masking: bool = Field(True, description="No attention across the documents of a packed sequence.")
    chat: Chat = Field(Chat(), description="How conversations are formatted and masked.")
    on_error: Literal["stop", "skip"] = Field("stop", description="At a malformed row: stop, or skip and count it.")
    prepared: FilePath | None = Field(
        None, description="Folder of the tokenized dataset; unset: prepared/<recipe>-<hash>.", examples=["shards"]
    )
    num_proc: Auto | Annotated[int, Field(ge=0)] = Field("auto", description="Processes that tokenize the dataset.")
    pin_memory: Auto | bool = Field("auto", description="Copy batches to the GPU from pinned memory.")
    prefetch: Auto | PositiveInt = Field("auto", description="Batches read ahead.")

    @property
    def layout(self) -> Layout:
        """How sequences are made of documents: packed, padded, or (fixed) packed without document masking."""
        if not self.packing:
            return "padded"
        return "packed" if self.document_masking else "fixed"


class ObjectiveSection(Section):
    """The loss, by its `kind`."""

    kind: str = Field(description="Training objective.")

    @property
    def spec(self) -> ObjectiveSpec:
        return OBJECTIVES[self.kind]


class Pretrain(ObjectiveSection):
    """Trains on every token."""

    kind: Literal["pretrain"] = Field("pretrain", description="Cross-entropy on every token.")


class Sft(ObjectiveSection):
    """Trains on the responses of conversations, as set by `data.chat.train_on`."""

    kind: Literal["sft"] = Field(description="Cross-entropy on the responses.")


class Preference(ObjectiveSection):
    """Raises the likelihood of the chosen over the rejected response, relative to the reference model."""

    kind: Literal["dpo", "ipo"] = Field(description="Preference pairs against a reference model.")
    beta: PositiveFloat = Field(0.1, description="Strength of the penalty for leaving the reference model.")
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = Field(
        0.0, description="dpo: assumed share of pairs with swapped labels."
    )


class SimPo(ObjectiveSection):
    """Pairs without a reference model: mean log-probabilities a margin `gamma` apart (arXiv:2405.14734)."""

    kind: Literal["simpo"] = Field(description="Preference pairs without a reference model.")
    beta: PositiveFloat = Field(2.0, description="Scale of the rewards.")
    gamma: NonNegativeFloat = Field(1.0, description="Target margin between the rewards.")


class OrPo(ObjectiveSection):
    """Trains on the chosen response and raises its odds over the rejected one's (arXiv:2403.07691)."""

    kind: Literal["orpo"] = Field(description="Cross-entropy plus an odds ratio loss.")
    beta: PositiveFloat = Field(0.1, description="Weight of the odds ratio loss.")


class Kto(ObjectiveSection):
    """Single answers, each marked desirable or not (arXiv:2402.01306)."""

    kind: Literal["kto"] = Field(description="Single responses marked desirable or not.")
    beta: PositiveFloat = Field(0.1, description="Strength of the penalty for leaving the reference model.")
    desirable_weight: PositiveFloat = Field(1.0, description="Loss weight of desirable responses.")
    undesirable_weight: PositiveFloat = Field(1.0, description="Loss weight of undesirable responses.")


class Reward(ObjectiveSection):
    """One value per text, higher for the chosen response of a pair."""

    kind: Literal["reward"] = Field(description="Reward model: one number per text.")


class Distill(ObjectiveSection):
    """Distillation: `kd_ratio` of the loss is the divergence from a larger model, the rest is that of the labels."""

    kind: Literal["distill"] = Field(description="Knowledge distillation from a teacher.")
    teacher: str = Field(
        description="Teacher model: a folder in Hugging Face format or a Hub id.", examples=["Qwen/Qwen2.5-7B-Instruct"]
    )
    temperature: PositiveFloat = Field(1.0, description="Temperature of both distributions.")
    kd_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.5,
        description="Share of the distillation loss; the rest is cross-entropy with the labels (torchtune's kd_ratio).",
    )


class Online(ObjectiveSection):
    """The model generates responses, which are then scored."""

    kind: Literal["ppo", "grpo"] = Field(description="Reinforcement learning on generated responses.")


Objective = Annotated[
    Pretrain | Sft | Preference | SimPo | OrPo | Kto | Reward | Distill | Online, Field(discriminator="kind")
]


class NoAdapter(Section):
    """Every parameter is trained."""

    kind: Literal["none"] = Field("none", description="No adapter: every parameter is trained.")


class Lora(Section):
    kind: Literal["lora", "dora"] = Field(description="Low-rank adapters.")
    rank: PositiveInt = Field(16, description="Rank of the LoRA matrices.")
    alpha: PositiveFloat = Field(32.0, description="Scale: the update is multiplied by alpha / rank.")
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(rank) instead (rsLoRA).")
    init: Literal["default", "pissa"] = Field(
        "default",
        description="Initial LoRA matrices: random and zero, or from the singular values of the weight (pissa).",
    )
    dropout: Share = Field(0.0, description="Dropout probability before the LoRA matrices.")
    target_modules: OneOrMore[str] = Field(
        ["q_proj", "v_proj"], description="Modules with LoRA: names, patterns or all-linear."
    )
    modules_to_save: OneOrMore[str] = Field(
        [], description="Modules trained in full, such as embed_tokens, lm_head, norms."
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Data type of the LoRA matrices.")


class Peft(BaseModel, frozen=True, extra="allow"):
    """Any other method of PEFT, with PEFT's own fields."""

    kind: Literal["peft"] = Field(description="Any other method of PEFT.")
    method: str = Field(description="PEFT's name of the method; PEFT's own fields go next to it.", examples=["adalora"])


Adapter = Annotated[NoAdapter | Lora | Peft, Field(discriminator="kind")]


class Quantize(Section):
    kind: Literal["none", "nf4", "int8"] = Field(
        "none", description="Storage of the frozen base weights; needs an adapter."
    )
    double_quant: bool = Field(True, description="nf4: quantize the scales, too (arXiv:2305.14314).")


class Wsd(Section):
    """Warmup, stable, decay: `decay` is the length of the last part, `min_lr_ratio` where it ends, of the rate."""

    kind: Literal["wsd"] = Field("wsd", description="Warmup, stable, decay.")
    decay: Length = Field(Duration(20.0, "percent"), description="Length of the decay at the end of the run.")
    min_lr_ratio: Share = Field(0.0, description="Final learning rate, relative to learning_rate.")


class OptimizerSection(Section):
    kind: Literal["adamw", "muon", "adafactor"] = Field(
        "adamw", description="muon updates the matrices of the layers, AdamW the rest."
    )
    learning_rate: PositiveFloat = Field(5e-4, description="Peak learning rate.")
    muon_learning_rate: PositiveFloat | None = Field(
        None, description="muon: learning rate of the matrices; unset: learning_rate.", examples=[0.02]
    )
    momentum: Share = Field(0.95, description="muon: momentum.")
    betas: tuple[Share, Share] = Field((0.9, 0.95), description="AdamW: decay rates of the two averages.")
    eps: PositiveFloat = Field(1e-8, description="AdamW: added to the denominator.")
    weight_decay: NonNegativeFloat = Field(0.1, description="Decoupled weight decay.")
    state_dtype: Literal["float32", "bfloat16", "int8"] = Field("float32", description="Data type of AdamW's states.")
    paged: bool = Field(False, description="Another name for offload, as in paged_adamw.")
    offload: Annotated[bool, AfterValidator(lambda asked, info: asked or info.data.get("paged", False))] = Field(
        False, validate_default=True, description="Keep AdamW's states in pinned host memory, copied in pieces."
    )
    fused_backward: bool = Field(
        False, description="Update each parameter during backward and free its gradient; no gradient accumulation."
    )
    stochastic_rounding: bool = Field(False, description="Round bfloat16 weights stochastically.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] | Wsd = Field(
        "cosine",
        description="Shape of the learning rate after warmup.",
        examples=[{"kind": "wsd", "decay": "20%", "min_lr_ratio": 0.0}],
    )
    min_lr_ratio: Share = Field(0.0, description="Final learning rate of cosine and linear, relative to learning_rate.")
    warmup: LengthOrNothing = Field(Duration(1.0, "percent"), description="Length of the linear warmup.")


def _with_one_length(value: Any) -> Any:
    """Another length replaces the default of one epoch."""
    if isinstance(value, dict) and "epochs" not in value and any(value.get(key) is not None for key in LENGTHS):
        return value | {"epochs": None}
    return value


class Train(Section):
    epochs: Epochs | None = Field(
        1.0,
        description="Length in passes over the dataset. Set exactly one of epochs, max_steps, max_tokens, max_time.",
    )
    max_steps: Steps | None = Field(None, description="Length of the run in optimizer steps.", examples=[1000])
    max_tokens: Tokens | None = Field(None, description="Length of the run in tokens.", examples=["10B"])
    max_time: WallTime | None = Field(
        None,
        description="Length of the run in wall time; the number of steps follows from measured steps.",
        examples=["8h"],
    )
    min_steps: PositiveInt | None = Field(
        None, description="max_time: at least so many steps, even if they take longer.", examples=[200]
    )
    tokens_per_step: Auto | Count = Field(
        "auto",
        description="Tokens per optimizer step on all devices (global batch); auto: from the model and the dataset.",
    )
    batch_size: PositiveInt | None = Field(
        None, description="Sequences per optimizer step on all devices, instead of tokens_per_step.", examples=[16]
    )
    micro_batch_size: Auto | PositiveInt = Field(
        "auto", description="Sequences per forward pass and device; changes memory and speed, not the result."
    )
    precision: Precision = Field(
        "auto", description="Data type of the computation; all but bfloat16-pure keep float32 master weights."
    )
    compile: Auto | bool = Field("auto", description="Use torch.compile.")
    attention: Auto | AttentionBackend = Field("auto", description="Attention kernel.")
    activation_checkpointing: Checkpointing = Field(
        "auto",
        description="Recompute activations in backward: none, selected operations, all layers (true) or every N-th.",
    )
    offload_activations: bool = Field(False, description="Keep activations in host memory until backward.")
    max_grad_norm: PositiveOrNone = Field(1.0, description="Clip the gradient to this norm; none or null: no clipping.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="Seed of initial weights, data order and dropout."
    )
    deterministic: Auto | bool = Field("auto", description="Bitwise repeatable steps on a GPU, which are slower.")

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
    replicate: Auto | PositiveInt = Field("auto", description="Data parallel replicas.")
    shard: Auto | PositiveInt = Field("auto", description="Devices that shard parameters, gradients and states (FSDP).")
    tensor: PositiveInt = Field(1, description="Tensor parallel devices.")
    context: PositiveInt = Field(1, description="Context parallel devices.")
    pipeline: PositiveInt = Field(1, description="Pipeline stages.")
    pipeline_schedule: Literal["1f1b"] = Field("1f1b", description="Order of the micro-batches in the pipeline.")
    pipeline_microbatches: Auto | PositiveInt = Field("auto", description="Micro-batches per step in the pipeline.")


class Checkpoint(Section):
    every: Length = Field(Duration(1000.0, "steps"), description="Interval between checkpoints.")
    keep: PositiveInt = Field(3, description="Checkpoints to keep, besides the best.")
    async_save: Auto | bool = Field("auto", description="Write checkpoints in the background.")


class Eval(Section):
    every: Literal["none"] | Length = Field(
        Duration(500.0, "steps"), description="Interval between evaluations; none: off."
    )
    tokens: Auto | Count = Field("auto", description="Tokens of the validation set per evaluation.")
    early_stopping_patience: Literal["none"] | PositiveInt = Field(
        "none", description="Evaluations without a lower loss after which the run ends; none: off."
    )


class Sample(Section):
    """Texts that the model generates at every evaluation."""

    prompts: list[str] = Field(
        [], description="Prompts that the model completes or answers at every evaluation.", examples=[["def main():"]]
    )
    max_new_tokens: PositiveInt = Field(200, description="Longest completion in tokens.")
    temperature: NonNegativeFloat = Field(0.8, description="Sampling temperature; 0: greedy.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.95, description="Nucleus sampling: share of the probability to sample from."
    )


class Command(Section):
    command: ShellCommand = Field(description="Program that receives each event as a JSON line on stdin.")


Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow"] | Command


class Logging(Section):
    every: Length = Field(
        Duration(10.0, "steps"), description="Interval of the terminal and the trackers; events.jsonl has every step."
    )
    trackers: OneOrMore[Tracker] = Field(
        ["tensorboard"],
        description="Experiment trackers, one or a list; the default is silent if tensorboard is not installed.",
        examples=[["wandb", {"command": "./hook.sh"}]],
    )
    max_gpu_temperature: Literal["auto", "none"] | Annotated[float, Field(ge=40, le=120)] = Field(
        "auto", description="Pause the run above this temperature in degrees Celsius; auto: 5 below the GPU's limit."
    )
    memory: bool = Field(False, description="Print the peak memory in each line.")
    profile_steps: Literal["none"] | StepRange = Field(
        "none", description="First and last step to profile.", examples=[[100, 102]]
    )

    @property
    def libraries(self) -> list[str]:
        """The trackers that are Python packages which `bloomery` does not bring."""
        return [tracker for tracker in self.trackers if not isinstance(tracker, Command) and tracker != "tensorboard"]


class Recipe(Section):
    """One training run, everywhere the same. Runs and shards take its `name`; without one, that of the file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = Field(
        None, description="Name of the run folder; unset: the name of the recipe file.", examples=["my-run"]
    )
    extends: str | None = Field(
        None, description="A packaged recipe or a file that this one changes.", examples=["go-coder-125m"]
    )
    claims: Claims = Field(
        Claims(), description="What you expect of the run; plan checks each claim, report compares it with the run."
    )
    model: Model = Field(description="The model: exactly one of from, preset and family.")
    tokenizer: TokenizerSection = Field(TokenizerSection(), description="The tokenizer: from or train.")
    data: Data = Field(description="The dataset: exactly one of path, builtin and sources.")
    objective: Objective = Field(Pretrain(), description="The training objective.")
    adapter: Adapter = Field(NoAdapter(), description="Parameter-efficient fine-tuning.")
    quantize: Quantize = Field(Quantize(), description="Quantization of the frozen base weights.")
    optimizer: OptimizerSection = Field(OptimizerSection(), description="The optimizer and its learning rate schedule.")
    train: Train = Field(Train(), description="Length, batch, precision and memory of training.")
    parallel: Parallel = Field(Parallel(), description="Layout on several devices.")
    checkpoint: Checkpoint = Field(Checkpoint(), description="Saving.")
    eval: Eval = Field(Eval(), description="Evaluation on the validation set.")
    sample: Sample = Field(Sample(), description="Texts sampled at every evaluation.")
    logging: Logging = Field(Logging(), description="Terminal, trackers, temperature and profiling.")

    @property
    def tokens_per_step(self) -> Literal["auto"] | int:
        """`train.tokens_per_step`, or that of `train.batch_size`."""
        asked = self.train
        return asked.tokens_per_step if asked.batch_size is None else asked.batch_size * self.data.sequence_length
