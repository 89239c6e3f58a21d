"""A decoder described by architectural facts. No field is a model's name; nothing here needs torch."""

from dataclasses import dataclass, field
from typing import Literal

from bloomery.core.errors import UserError

NormKind = Literal["rms", "rms_unit_offset", "layer", "layer_unit_offset"]
# Of the norms of a layer (`model.decoder.Block`); "by_mixer": after attention, and before any other mixer.
NormPlacement = Literal["before", "after", "both", "shared", "by_mixer"]
# Of queries and keys: over each head, before or after it is rotated, or over all heads at once.
QueryNorm = Literal["none", "head", "rotated_head", "full"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
RopeKind = Literal["linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
# How transformers' layers keep the documents of a row apart.
DocumentWay = Literal["positions", "masks", "mask", "rows"]
Projections = Literal["together", "separate", "by_head"]  # of a delta net
Mixer = Literal["attention", "delta_net", "short_convolution"]  # mixes the tokens of a sequence


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched. Formulas and defaults are those of transformers' `modeling_rope_utils`.

    `turning_share`: of the frequencies of a head, the part that is not 0 (`proportional`, Gemma 4). `mscale_all_dim`:
    of yarn, what DeepSeek scales the scores of latent attention by (`ModelConfig.attention_scale`).
    """

    kind: RopeKind
    factor: float
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    turning_share: float = 1.0
    mscale_all_dim: float | None = None


@dataclass(frozen=True, kw_only=True)
class QueryScale:
    """Queries far into a text are larger: times 1 + beta log(1 + floor(position / every)), as in Llama 4."""

    beta: float
    every: int


@dataclass(frozen=True, kw_only=True)
class StoredBuffer:
    """A few numbers that a model's files keep and that are not trained, by the name that they have there.

    `name_in_memory`: what transformers' model calls them.
    """

    name: str
    name_in_memory: str
    dtype: str  # "bfloat16"
    shape: tuple[int, ...]
    numbers: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class StoredConversion:
    """Parameters, by our names, that transformers makes of tensors that files keep in another form: (name, shape)."""

    parameters: tuple[str, ...]
    stored: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class TransformersBackend:
    """An architecture that transformers computes (`model.transformers_backend`).

    It holds what plans, files and adapters ask of it.

    `parameters`: our name, the files' name and the shape of each; `conversions`: of those that files keep in another
    form, whose name is then that in transformers' memory. `experts`: how many a layer has. `matrices`: the linear maps
    of layers as `counting.Matrix` has them, each as the first layer with it has it (another may have its own size, or
    none); `factor`: of the hidden states that the output matrix reads. `documents`: how those of one row are kept
    apart, by positions that begin anew, by the mask of each kind of layer, by one mask, or as rows of their own.
    `cache`: whether transformers' own continues a text, or the text is read again for each token.
    """

    raw_config: str  # its config.json
    attention: str  # of transformers: sdpa or eager
    parameters: tuple[tuple[str, str, tuple[int, ...]], ...]
    matrices: tuple[tuple[str, int, int, bool], ...]
    architecture: str = ""  # the name of its class in transformers
    factor: float = 1.0
    documents: DocumentWay = "positions"
    documents_reason: str = ""  # why they are rows of their own
    cache: Literal["own", "none"] = "own"
    buffers: tuple[StoredBuffer, ...] = ()
    # thousands of names, which follow from the rest: plans look a config up thousands of times
    conversions: tuple[StoredConversion, ...] = field(default=(), hash=False)
    experts: int = 0
    experts_per_token: int = 0  # 0: its config does not say
    safe_reason: str = ""  # why transformers itself loads the weights; empty: it does not


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of an MLP: a router chooses `per_token` of `count` MLPs of `width` for each token.

    The router's logits become scores, by a softmax over all experts or a sigmoid of each; those of the chosen ones are
    the weights of their sum. `softmax_of_chosen`: the logits choose, and the softmax is over the chosen ones alone.
    `normalize`: the weights are divided by their sum plus `least_sum`; with `clamps_sum` by the larger of the two.
    `weight_scale` multiplies them. `choice_bias`: a stored number of each expert is added to its score for the choice
    alone (arXiv:2408.15664); with `boxed_choice_bias` they are a matrix of one row. `groups`: experts are chosen from
    the `groups_per_token` best of so many equal groups; a group is as good as its best expert, or as its
    `best_of_group` best together. `normed_router`: it reads the token normed without a weight, times a
    stored number of each input and 1 / sqrt(inputs), and one of each expert multiplies the weights (Gemma 4).

    `float32_router`: its matrix is float32 in memory and files, too, in whatever dtype the others are (as each choice
    bias is). `bias`: of each expert and of the router. `clamp`: of gate and up as in gpt-oss, with its activation, in
    which `slope` is that of the sigmoid.
    `shared_width`: of an MLP that computes every token, too; `shared_gate`: the sigmoid of a linear map of the token
    multiplies it. `own_norms`: router and experts read the residual stream, the experts through a norm of their own,
    and what they and the shared MLP make is normed apart before it is added (Gemma 4). `layers`: which layers have
    experts, the others an MLP; empty: all. `balance`: the coefficient of the loss that evens their load, as the config
    states it; 0: none.
    """

    count: int
    per_token: int
    width: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    softmax_of_chosen: bool = False
    normalize: bool = False
    least_sum: float = 0.0
    clamps_sum: bool = False
    weight_scale: float = 1.0
    choice_bias: bool = False
    boxed_choice_bias: bool = False
    normed_router: bool = False
    groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 1
    float32_router: bool = False
    bias: bool = False
    clamp: float | None = None
    slope: float = 1.702
    shared_width: int = 0
    shared_gate: bool = False
    own_norms: bool = False
    layers: tuple[bool, ...] = ()
    balance: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """The sizes of gated delta nets (arXiv:2412.06464), which keep a matrix per head in place of keys and values.

    Each key head serves num_value_heads / num_key_heads consecutive value heads. `kernel`: the tokens that the
    convolution before them sees, the own one included. `projections`: queries, keys and values have one matrix
    ("together"); or each has a matrix and a convolution, as in OLMo-Hybrid ("separate"); or there are two matrices for
    all that is projected, with the rows of each key head together, as in Qwen3-Next ("by_head").
    `negative_eigenvalues`: tokens are written with strengths of up to 2 (arXiv:2411.12537). `norm_eps`: of the norm of
    what is read; None: that of the model.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel: int = 4
    projections: Projections = "together"
    negative_eigenvalues: bool = False
    norm_eps: float | None = None

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True, kw_only=True)
class ShortConvolution:
    """A gated convolution over the last `kernel` tokens, each number by itself, as in LFM2 (arXiv:2511.23404)."""

    kernel: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention (arXiv:2405.04434): keys and values are made of a vector of `rank` numbers.

    A query or key has `plain_width` numbers and `rotary_width` that rotate, of a key the same for all heads; a value
    has `value_width`. `query_rank`: of queries that are made of a vector, too.
    """

    query_rank: int | None
    rank: int
    plain_width: int
    rotary_width: int
    value_width: int

    @property
    def head_dim(self) -> int:
        """Of heads as attention computes them, the narrower ones filled up."""
        return max(self.plain_width + self.rotary_width, self.value_width)


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The sizes of one layer, in a model whose layers differ in them. The fields mean what a ModelConfig's do."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rotary_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Facts of the whole model, and those in which layers differ, as a config.json states them.

    What one layer is, `counting.layers` answers: it alone reads the fields that hold for some layers.
    `family` (a key of `families.FAMILIES`) sets the names in a saved checkpoint; the decoder never reads it.
    """

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 4096
    norm: NormKind = "rms"
    norm_eps: float = 1e-5
    norm_bias: bool = True  # layer norms only
    norm_placement: NormPlacement = "before"
    qk_norm: QueryNorm = "none"
    value_norm: bool = False  # of each head's values, without a weight
    activation: Activation = "silu"
    gated_mlp: bool = True
    attention_bias: bool = False
    output_bias: bool = False
    # In layers without a window, the keys before their norm are the values, too.
    keys_are_values: bool = False
    # The last layers that use the keys and values of an earlier one: of the last layer before them that has, as they,
    # a window or none.
    num_kv_shared_layers: int = 0
    # q_proj computes, beside the query of each head, a gate of its output
    attention_gate: bool = False
    head_gate: bool = False  # g_proj computes one number for each head, a gate of its output
    mlp_bias: bool = False
    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rotary_share: float = 1.0  # the part of each head that rotates
    # neighboring numbers of a head turn together, in place of its halves
    rope_interleave: bool = False
    query_scale: QueryScale | None = None
    local_rope_theta: float | None = None  # layers with a sliding window, where it differs
    rotary_layers: tuple[bool, ...] = ()  # layers that rotate at all; empty: every one
    sliding_window: tuple[int | None, ...] = ()  # per layer; empty: none
    mixers: tuple[Mixer, ...] = ()  # per layer; empty: attention in every one
    # of all layers with attention; head_dim is then its own, and every head has keys
    latent_attention: LatentAttention | None = None
    delta_net: DeltaNet | None = None  # of the layers that have one
    short_convolution: ShortConvolution | None = None
    layer_sizes: tuple[LayerSizes, ...] = ()  # per layer; empty: the sizes above hold for every one
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    # a logit of each head that takes a share of its softmax and has no value, as in gpt-oss
    attention_sinks: bool = False
    final_softcap: float | None = None
    logit_scale: float = 1.0  # of the logits; a reward model has none
    scale_embeddings: bool = False
    # Of embedded tokens, and of what mixers and MLPs add to them (Granite).
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    # Numbers that each layer is given of a token, beside the residual stream, from an embedding of their own; 0: none.
    per_layer_input_size: int = 0
    # A stored number, which is not trained, multiplies what leaves a layer.
    layer_scalar: bool = False
    tie_embeddings: bool = False
    # in place of the MLP; `intermediate_size` is the width of the layers without
    experts: Experts | None = None
    # what is made of the last hidden states: logits, or one number each
    head: Literal["tokens", "values"] = "tokens"
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    transformers_backend: TransformersBackend | None = (
        None  # then the facts above are those that a plan needs, and the layers transformers'
    )


# What begins with the embedded tokens, as named in the decoder.
BESIDE_EMBEDDING = (
    "model.embed_positions",
    "model.embed_tokens_per_layer",
    "model.per_layer_model_projection",
    "model.per_layer_projection_norm",
)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The part of a decoder that one stage of a pipeline holds.

    `groups`: its layers, by their numbers in the whole decoder; between two groups of an interleaved pipeline a
    micro-batch goes through the other stages. `embeds`: whether the first group begins with embedded tokens.
    `has_embedding`: also where the head is here and tied to it.
    """

    groups: tuple[range, ...]
    embeds: bool
    has_embedding: bool
    has_head: bool

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for group in self.groups for layer in group)

    def has(self, name: str) -> bool:
        """Whether the parameter or module of that name in the whole decoder is here."""
        if name.startswith("model.layers."):
            return int(name.split(".")[2]) in self.layers
        if name.startswith(BESIDE_EMBEDDING):
            return self.embeds
        if name.startswith("model.embed_tokens"):
            return self.has_embedding
        return self.has_head


def whole_model(config: ModelConfig) -> Stage:
    """The only stage of a decoder that is not cut."""
    layers = range(config.num_layers)
    return Stage(groups=(layers,), embeds=True, has_embedding=True, has_head=True)


def refuse_values(config: ModelConfig, *, where: str) -> None:
    """Raises UserError for a reward model where text is generated."""
    if config.head == "values":
        raise UserError(
            "a reward model gives values and no text", where=where, fix="name a language model"
        )


def checked_config(config: ModelConfig, *, where: str) -> ModelConfig:
    """The same config. Raises UserError where facts contradict each other."""
    problem = None
    common_sizes = LayerSizes(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rotary_share=config.rotary_share,
    )
    for sizes in dict.fromkeys((common_sizes, *config.layer_sizes)):
        problem = problem or _size_problem(config, sizes)
    for name in ("sliding_window", "rotary_layers", "layer_sizes", "mixers"):
        entries = getattr(config, name)
        if problem is None and entries and len(entries) != config.num_layers:
            problem = f"{name} has {len(entries)} entries for {config.num_layers} layers"
    problem = problem or _sharing_problem(config)
    delta_net = config.delta_net
    if delta_net is not None and delta_net.num_value_heads % delta_net.num_key_heads:
        problem = (
            f"{delta_net.num_value_heads} value heads of the delta net do not divide among"
            f" {delta_net.num_key_heads} key heads"
        )
    problem = problem or _expert_problem(config)
    if problem:
        raise UserError(problem, where=where, fix="change one of the two values")
    return config


def _expert_problem(config: ModelConfig) -> str | None:
    experts = config.experts
    if experts is None:
        return None
    if experts.per_token > experts.count:
        return f"a token meets {experts.per_token} experts, and there are {experts.count}"
    if experts.count % experts.groups:
        return f"{experts.count} experts do not divide among {experts.groups} groups"
    if experts.layers and len(experts.layers) != config.num_layers:
        return (
            f"{len(experts.layers)} entries of layers with experts, for {config.num_layers} layers"
        )
    open_experts = experts.count // experts.groups * experts.groups_per_token
    if experts.groups_per_token > experts.groups or open_experts < experts.per_token:
        return f"{experts.groups_per_token} of {experts.groups} groups have no {experts.per_token} experts"
    return None


def _sharing_problem(config: ModelConfig) -> str | None:
    shared = config.num_kv_shared_layers
    if shared == 0:
        return None
    first_shared = config.num_layers - shared
    has_window = [window is not None for window in config.sliding_window] or [False] * (
        config.num_layers
    )
    if first_shared < 1 or set(has_window[first_shared:]) - set(has_window[:first_shared]):
        return f"{shared} layers of {config.num_layers} share keys and values, and no earlier layer is of their kind"
    return None


def _size_problem(config: ModelConfig, sizes: LayerSizes) -> str | None:
    if sizes.num_heads % sizes.num_kv_heads:
        return f"{sizes.num_heads} query heads do not divide among {sizes.num_kv_heads} key/value heads"
    rotary_width = int(sizes.head_dim * sizes.rotary_share)
    if config.positions == "rotary" and (rotary_width < 2 or rotary_width % 2):
        return f"head_dim {sizes.head_dim}: the part that rotates ({rotary_width}) must be even"
    return None
