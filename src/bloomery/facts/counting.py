"""What each layer of a decoder is: its sizes, parameters, FLOPs and cached numbers, from the config alone.

`layers` is the one description of a model's layers, which may differ in all of it: the decoder is built from it, and
planner, adapters, caches, kernels and exports read it. A layer that does something else than attention is another
mixer: a name in `config.Mixer`, its parameters here, its module in `model.mixers`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import MappingProxyType

from bloomery.facts.config import (
    DeltaNet,
    Experts,
    LatentAttention,
    LayerSizes,
    Mixer,
    ModelConfig,
    NormPlacement,
    QueryScale,
    RopeScaling,
    ShortConvolution,
    TransformersBackend,
)

Shape = tuple[int, ...]
# What a layer calls the module of its mixer, as transformers does.
MIXER_MODULES: Mapping[Mixer, str] = MappingProxyType(
    {"attention": "self_attn", "delta_net": "linear_attn", "short_convolution": "conv"}
)
# The norms of a layer, in the order in which they run, under transformers' names.
BLOCK_NORMS: Mapping[NormPlacement, tuple[str, ...]] = MappingProxyType(
    {
        "before": ("input_layernorm", "post_attention_layernorm"),
        "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
        "both": (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        "shared": ("input_layernorm",),
    }
)
# Where what every token meets and what the router chooses are normed apart, as in Gemma 4.
EXPERT_NORMS = (
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
)
ROUTER = "mlp.gate.weight"
CHOICE_BIAS = "e_score_correction_bias"  # of the router, by the name that DeepSeek gave it
EXPERT_STACKS = tuple(
    f"mlp.experts.{stack}"
    for stack in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
)
EXPERT_LORA = "mlp.experts.lora."  # of the stacks: what an adapter adds to each
LATENT_EPS = 1e-6  # of the norms inside latent attention, whatever the model's own
DELTA_CHUNK = 64  # tokens that a delta net computes at once; transformers and flash-linear-attention have as many
STATE_BYTES = 4  # of a number of a delta net's state, which is float32 in every precision


def block_norms(placement: NormPlacement, experts: Experts | None) -> tuple[str, ...]:
    """The norms of a layer on its residual stream and branches, by name."""
    has_own = experts is not None and experts.own_norms
    return BLOCK_NORMS[placement] + (EXPERT_NORMS if has_own else ())


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """How heads turn with their positions: the first `width` numbers of each, by frequencies of base `theta`.

    `query_scale`: how their queries grow with them, too.
    """

    width: int
    theta: float
    scaling: RopeScaling | None = None
    query_scale: QueryScale | None = None
    interleave: bool = False  # neighbors turn together, in place of halves


@dataclass(frozen=True)
class Matrix:
    """A linear map, by its name inside its layer ("self_attn.q_proj"); `size` is its values without the bias."""

    name: str
    outputs: int
    inputs: int
    bias: bool

    @property
    def size(self) -> int:
        return self.outputs * self.inputs


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a model. No code that reads it may assume that all layers are alike.

    `shapes`: its parameters by their names inside it, in the order of `Block.named_parameters`. `intermediate_size`:
    the width of its MLP, or of the `experts` that one token meets, the shared one included. `window`: how many keys,
    itself included, a query sees; None: all of them. `rotation`: None where positions do not turn its heads. A layer
    with another mixer than attention has no heads, and `delta_net` or `short_convolution`. `keys_of`: the earlier layer
    whose keys and values it uses, in place of own ones; that layer `lends_keys`. `keys_are_values`: as in ModelConfig.
    """

    number: int
    mixer: Mixer
    hidden_size: int
    matrices: tuple[Matrix, ...]
    shapes: tuple[tuple[str, Shape], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    rotation: Rotation | None
    intermediate_size: int
    gated_mlp: bool
    norm_placement: NormPlacement = "before"
    window: int | None = None
    keys_of: int | None = None
    lends_keys: bool = False
    keys_are_values: bool = False
    per_layer_input_size: int = 0
    delta_net: DeltaNet | None = None
    short_convolution: ShortConvolution | None = None
    latent_attention: LatentAttention | None = None
    experts: Experts | None = None  # in place of an MLP
    # Of transformers' layers: how many experts their stacks have, and how many of them a token meets.
    foreign_experts: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return f"model.layers.{self.number}"

    @cached_property
    def kind(self) -> "Layer":
        """The same for all layers that differ in their number alone."""
        return replace(self, number=0)

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    def cached_bytes(self, tokens: int, itemsize: int) -> int:
        """What a text of so many tokens leaves in the cache: keys and values, or a state of constant size."""
        if self.keys_of is not None:
            return 0
        if self.delta_net is not None:
            sizes = self.delta_net
            state = sizes.num_value_heads * sizes.key_head_dim * sizes.value_head_dim
            convolved_width = 2 * sizes.key_width + sizes.value_width
            return STATE_BYTES * state + itemsize * (sizes.kernel - 1) * convolved_width
        if self.short_convolution is not None:
            return itemsize * (self.short_convolution.kernel - 1) * self.hidden_size
        seen_tokens = tokens if self.window is None else min(tokens, self.window)
        if self.latent_attention is not None:
            latent = self.latent_attention
            return itemsize * (latent.rank + latent.rotary_width) * seen_tokens
        return itemsize * 2 * self.key_width * seen_tokens

    def mixer_flops(self, sequence_length: int) -> float:
        """FLOPs per token in forward of the products that are no matrices of the layer.

        Attention: all scores, and the values that they weigh. A delta net, in each chunk: products of keys, and of
        queries, with keys; the scores times what was written; the state read twice and written once. As torch counts,
        without the triangular system that is solved (`solve_flops`).
        """
        if self.delta_net is not None:
            sizes = self.delta_net
            per_head = (
                2 * DELTA_CHUNK * sizes.key_head_dim
                + DELTA_CHUNK * sizes.value_head_dim
                + 3 * sizes.key_head_dim * sizes.value_head_dim
            )
            return 2.0 * sizes.num_value_heads * per_head * _padded(sequence_length)
        return 4.0 * sequence_length * self.query_width

    def solve_flops(self, sequence_length: int) -> float:
        """FLOPs per token in forward of a delta net's triangular systems, of which torch counts none."""
        if self.delta_net is None:
            return 0.0
        sizes = self.delta_net
        widths = sizes.num_value_heads * (sizes.key_head_dim + sizes.value_head_dim)
        return 1.0 * DELTA_CHUNK * widths * _padded(sequence_length)

    @property
    def expert_share(self) -> float:
        """Of its experts, how many a token meets."""
        count, per_token = self.experts_met
        return per_token / count

    @property
    def experts_met(self) -> tuple[int, int]:
        """How many experts it has, and how many of them a token meets; (1, 1) without any."""
        if self.experts is not None:
            return self.experts.count, self.experts.per_token
        return self.foreign_experts or (1, 1)

    @cached_property
    def stack_shapes(self) -> tuple[Shape, ...]:
        """Of the parameters that have an entry for each expert."""
        if self.experts is not None:
            return tuple(shape for name, shape in self.shapes if is_expert_stack(name))
        if self.foreign_experts is None:
            return ()
        count, _ = self.foreign_experts
        return tuple(
            shape
            for name, shape in self.shapes
            if ".experts." in f".{name}" and shape[:1] == (count,)
        )

    @cached_property
    def idle_parameters(self) -> int:
        """Of the experts that a token does not meet."""
        count, per_token = self.experts_met
        stacked = sum(math.prod(shape) for shape in self.stack_shapes)
        return stacked // count * (count - per_token)

    @cached_property
    def expert_products(self) -> int:
        """Multiply-adds of a token in its experts and their router."""
        count, per_token = self.experts_met
        matrices = sum(math.prod(shape) for shape in self.stack_shapes if len(shape) == 3)
        router = count * self.hidden_size if matrices else 0
        return matrices // count * per_token + router

    @cached_property
    def total_parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.shapes)

    @property
    def active_parameters(self) -> int:
        """The parameters that compute a token."""
        return self.total_parameters - self.idle_parameters

    @cached_property
    def active_products(self) -> int:
        """Multiply-adds of a token in the layer's matrices."""
        return sum(matrix.size for matrix in self.matrices) + self.expert_products

    @cached_property
    def matrix_values(self) -> int:
        """Of its matrices, with their biases; those of experts are no part of them."""
        return sum(matrix.size + matrix.outputs * matrix.bias for matrix in self.matrices)

    @cached_property
    def stacked_values(self) -> int:
        """Of the parameters that hold the same matrix, or bias, of all experts."""
        return sum(math.prod(shape) for name, shape in self.shapes if is_expert_stack(name))


def _padded(sequence_length: int) -> float:
    """Tokens of the chunks of a sequence over its own."""
    return math.ceil(sequence_length / DELTA_CHUNK) * DELTA_CHUNK / sequence_length


@cache
def layers(config: ModelConfig) -> tuple[Layer, ...]:
    """Every layer of the model, in the order of forward."""
    return tuple(_layer(config, index) for index in range(config.num_layers))


def attention_layers(config: ModelConfig) -> tuple[Layer, ...]:
    """Those of `layers` that have attention."""
    return tuple(layer for layer in layers(config) if layer.mixer == "attention")


def _layer(config: ModelConfig, index: int) -> Layer:
    mixer = config.mixers[index] if config.mixers else "attention"
    sizes = _sizes_of_layer(config, index, mixer)
    window = config.sliding_window[index] if config.sliding_window else None
    experts = experts_of(config, index)
    if config.transformers_backend is not None:
        # The class of transformers was asked for its linear maps and for all its parameters.
        prefix = f"model.layers.{index}."
        shapes = tuple(
            (parameter.removeprefix(prefix), shape)
            for parameter, _, shape in config.transformers_backend.parameters
            if parameter.startswith(prefix)
        )
        matrices = tuple(_matrices_of_shapes(config.transformers_backend, dict(shapes)))
    else:
        matrices = tuple(_matrices(config, index, sizes, mixer))
        shapes = tuple(_block_shapes(config, index, sizes, mixer, matrices))
    scale = config.attention_scale
    return Layer(
        number=index,
        mixer=mixer,
        hidden_size=config.hidden_size,
        matrices=matrices,
        shapes=shapes,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        attention_scale=max(sizes.head_dim, 1) ** -0.5 if scale is None else scale,
        rotation=_rotation(config, sizes, index, window) if mixer == "attention" else None,
        intermediate_size=sizes.intermediate_size,
        gated_mlp=config.gated_mlp,
        norm_placement=norm_placement(config, mixer),
        window=window,
        keys_of=keys_of(config, index),
        lends_keys=index in {keys_of(config, number) for number in range(config.num_layers)},
        keys_are_values=mixer == "attention" and _keys_are_values(config, index),
        per_layer_input_size=config.per_layer_input_size,
        delta_net=config.delta_net if mixer == "delta_net" else None,
        short_convolution=config.short_convolution if mixer == "short_convolution" else None,
        latent_attention=config.latent_attention if mixer == "attention" else None,
        experts=experts,
        foreign_experts=_foreign_experts(config),
    )


def _foreign_experts(config: ModelConfig) -> tuple[int, int] | None:
    backend = config.transformers_backend
    if backend is None or not backend.experts:
        return None
    return backend.experts, backend.experts_per_token or backend.experts


def experts_of(config: ModelConfig, index: int) -> Experts | None:
    """What a layer has in place of an MLP."""
    experts = config.experts
    if experts is None or (experts.layers and not experts.layers[index]):
        return None
    return experts


def norm_placement(config: ModelConfig, mixer: Mixer) -> NormPlacement:
    """Of a layer with that mixer; never "by_mixer"."""
    if config.norm_placement != "by_mixer":
        return config.norm_placement
    return "after" if mixer == "attention" else "before"


def keys_of(config: ModelConfig, index: int) -> int | None:
    """The layer whose keys and values a layer uses; None: its own."""
    first_shared = config.num_layers - config.num_kv_shared_layers
    if index < first_shared:
        return None
    windows = config.sliding_window or (None,) * config.num_layers
    has_window = windows[index] is not None
    return [n for n in range(first_shared) if (windows[n] is not None) == has_window][-1]


def _keys_are_values(config: ModelConfig, index: int) -> bool:
    has_window = bool(config.sliding_window) and config.sliding_window[index] is not None
    return config.keys_are_values and not has_window


def _matrices_of_shapes(
    backend: TransformersBackend, shapes: Mapping[str, Shape]
) -> Iterator[Matrix]:
    """The linear maps of a layer of transformers, in the sizes that they have in this one."""
    for name, _, _, has_bias in backend.matrices:
        if (shape := shapes.get(f"{name}.weight")) is not None:
            outputs, inputs = shape
            yield Matrix(name, outputs, inputs, has_bias)


def _sizes_of_layer(config: ModelConfig, index: int, mixer: Mixer) -> LayerSizes:
    inner_width = config.intermediate_size
    if config.layer_sizes:
        inner_width = config.layer_sizes[index].intermediate_size
    if (experts := experts_of(config, index)) is not None:
        inner_width = experts.per_token * experts.width + experts.shared_width
    if mixer != "attention":
        return LayerSizes(num_heads=0, num_kv_heads=0, head_dim=0, intermediate_size=inner_width)
    if config.layer_sizes:
        return replace(config.layer_sizes[index], intermediate_size=inner_width)
    return LayerSizes(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=inner_width,
        rotary_share=config.rotary_share,
    )


def _rotation(
    config: ModelConfig, sizes: LayerSizes, index: int, window: int | None
) -> Rotation | None:
    if config.positions == "learned" or (config.rotary_layers and not config.rotary_layers[index]):
        return None
    width = int(sizes.head_dim * sizes.rotary_share)
    if config.latent_attention is not None:
        width = config.latent_attention.rotary_width
    interleave = config.rope_interleave
    # Layers with a window may rotate by a frequency of their own (Gemma 3).
    if window is not None and config.local_rope_theta is not None:
        return Rotation(width=width, theta=config.local_rope_theta, interleave=interleave)
    return Rotation(
        width=width,
        theta=config.rope_theta,
        scaling=config.rope_scaling,
        query_scale=config.query_scale,
        interleave=interleave,
    )


def head_widths(config: ModelConfig) -> tuple[int, ...]:
    """Every width that heads of the model have, the widest first: a kernel is compiled for each."""
    return tuple(sorted({layer.head_dim for layer in attention_layers(config)}, reverse=True))


def layers_by_attention(config: ModelConfig) -> tuple[Layer, ...]:
    """The first layer of each kind of attention: those alike in heads, window and scale call the same kernel."""
    first_layers: dict[tuple[float | None, ...], Layer] = {}
    for layer in attention_layers(config):
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        first_layers.setdefault((*heads, layer.attention_scale, layer.window), layer)
    return tuple(first_layers.values())


def is_in_layer(name: str) -> bool:
    """Whether a parameter or module of this name is part of a layer."""
    return ".layers." in name


def is_never_trained(name: str) -> bool:
    """Whether a parameter is a stored number that no training changes: a buffer in transformers."""
    return name.endswith(("layer_scalar", "mlp.act_fn.beta", "mlp.act_fn.eps", CHOICE_BIAS))


def is_kept_float32(config: ModelConfig, name: str) -> bool:
    """Whether a parameter is float32 in memory and files, in whatever dtype the others are, as transformers keeps it.

    What chooses among experts would choose others if it were rounded.
    """
    if name.endswith(CHOICE_BIAS):
        return True
    experts = config.experts
    return experts is not None and experts.float32_router and name.endswith(ROUTER)


def is_layer_matrix(name: str, shape: Shape) -> bool:
    """Whether a parameter is a matrix inside a layer, or a stack of them: no embedding, head, norm, bias or router."""
    if not is_in_layer(name) or name.endswith((ROUTER, CHOICE_BIAS)):
        return False
    return len(shape) == (3 if is_of_experts(name) else 2)


def is_decayed(name: str, shape: Shape) -> bool:
    """Whether weight decay applies: to matrices and embeddings, not to norms and biases, those of experts included."""
    return len(shape) >= (3 if is_of_experts(name) else 2)


def is_expert_stack(name: str) -> bool:
    """Whether a parameter holds the same matrix, or bias, of all experts of a layer: [experts, ...]."""
    return name.endswith(EXPERT_STACKS)


def is_of_experts(name: str) -> bool:
    """Whether a parameter is one entry for each expert of a layer: a stack, or a matrix of the LoRA of one."""
    return is_expert_stack(name) or EXPERT_LORA in name


@dataclass(frozen=True)
class ExpertPart:
    """A matrix or bias of one expert: rows `first`.. of entry `expert` of a stack.

    `name`: the parameter that it would be if each expert were a module ("mlp.experts.3.up_proj.weight").
    """

    name: str
    expert: int
    first: int
    rows: int


def expert_parts(name: str, shape: Shape) -> tuple[ExpertPart, ...]:
    """The parts of a stack of experts, in the order in which they lie in memory; of any other parameter none."""
    if not is_expert_stack(name):
        return ()
    path, _, leaf = name.rpartition(".")
    kind = "bias" if leaf.endswith("_bias") else "weight"
    modules = ("down_proj",) if leaf.startswith("down") else ("gate_proj", "up_proj")
    rows = shape[1] // len(modules)
    return tuple(
        ExpertPart(f"{path}.{expert}.{module}.{kind}", expert, place * rows, rows)
        for expert in range(shape[0])
        for place, module in enumerate(modules)
    )


def fused_matrices(name: str, shape: Shape) -> int:
    """How many matrices an entry of a stack of experts holds, below each other: gate and up are two."""
    return len(expert_parts(name, (1, *shape[1:]))) or 1


def matrices_in(name: str, shape: Shape) -> list[Shape]:
    """The shapes of the matrices that a parameter of matrices is: itself, or those of all experts."""
    parts = expert_parts(name, shape)
    if not parts and is_of_experts(name):  # of an adapter
        return [shape[1:]] * shape[0]
    return [(part.rows, *shape[2:]) for part in parts] or [shape]


def expert_stacks(config: ModelConfig) -> dict[str, Shape]:
    """The stacks of matrices, without those of biases: [experts, outputs, inputs] by name.

    Of transformers' layers none: what their class makes of its experts is its own.
    """
    if config.transformers_backend is not None:
        return {}
    return {
        name: shape
        for name, shape in parameter_shapes(config).items()
        if len(shape) == 3 and is_expert_stack(name)
    }


def expert_matrices(config: ModelConfig) -> dict[str, Shape]:
    """The matrices of all experts, each by itself, by the names of `unstacked_shapes`."""
    return {
        part.name: (part.rows, *shape[2:])
        for name, shape in expert_stacks(config).items()
        for part in expert_parts(name, shape)
    }


@cache
def unstacked_shapes(config: ModelConfig) -> Mapping[str, Shape]:
    """`parameter_shapes` with each matrix of an expert by itself, as most files have them.

    Transformers' layers keep their experts as their class has them.
    """
    if config.transformers_backend is not None:
        return MappingProxyType(parameter_shapes(config))
    shapes: dict[str, Shape] = {}
    for name, shape in parameter_shapes(config).items():
        parts = expert_parts(name, shape)
        shapes |= {part.name: (part.rows, *shape[2:]) for part in parts} or {name: shape}
    return MappingProxyType(shapes)


def smallest_window(config: ModelConfig) -> int | None:
    """Of the layers that have a window; None: none has."""
    windows = (layer.window for layer in layers(config) if layer.window is not None)
    return min(windows, default=None)


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every parameter by name, in the order of `Decoder.named_parameters`; a tied head is not listed twice."""
    return dict(_named_shapes(config))


@cache  # a plan asks for the same model thousands of times
def _named_shapes(config: ModelConfig) -> tuple[tuple[str, Shape], ...]:
    if config.transformers_backend is not None:
        return tuple((name, shape) for name, _, shape in config.transformers_backend.parameters)
    width = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    if config.positions == "learned":
        shapes["model.embed_positions.weight"] = (config.max_positions, width)
    if config.per_layer_input_size:
        all_layers = config.num_layers * config.per_layer_input_size
        shapes["model.embed_tokens_per_layer.weight"] = (config.vocab_size, all_layers)
        shapes["model.per_layer_model_projection.weight"] = (all_layers, width)
        shapes |= dict(
            _norm_shapes(config, "model.per_layer_projection_norm", config.per_layer_input_size)
        )
    for layer in layers(config):
        shapes |= {f"{layer.name}.{name}": shape for name, shape in layer.shapes}
    shapes |= dict(_norm_shapes(config, "model.norm", width))
    if config.head == "values":
        shapes["score.weight"] = (1, width)
    elif not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return tuple(shapes.items())


def _block_shapes(
    config: ModelConfig,
    index: int,
    sizes: LayerSizes,
    mixer: Mixer,
    matrices: tuple[Matrix, ...],
) -> Iterator[tuple[str, Shape]]:
    if config.layer_scalar:
        yield "layer_scalar", (1,)
    experts = experts_of(config, index)
    for name in block_norms(norm_placement(config, mixer), experts):
        yield from _norm_shapes(config, name, config.hidden_size)
    if mixer == "delta_net" and config.delta_net is not None:
        yield from _delta_net_shapes(config.delta_net)
    if mixer == "short_convolution" and config.short_convolution is not None:
        yield from _convolution_shapes(
            "conv.conv", config.hidden_size, config.short_convolution.kernel
        )
        if config.short_convolution.bias:
            yield "conv.conv.bias", (config.hidden_size,)
    if mixer == "attention" and config.attention_sinks:
        yield "self_attn.sinks", (sizes.num_heads,)
    for matrix in matrices:
        yield f"{matrix.name}.weight", (matrix.outputs, matrix.inputs)
        if matrix.bias:
            yield f"{matrix.name}.bias", (matrix.outputs,)
        if matrix.name == "self_attn.o_proj" and (latent := config.latent_attention) is not None:
            if latent.query_rank is not None:
                yield "self_attn.q_a_layernorm.weight", (latent.query_rank,)
            yield "self_attn.kv_a_layernorm.weight", (latent.rank,)
        if matrix.name == "self_attn.o_proj" and config.qk_norm != "none":
            over_all_heads = config.qk_norm == "full"
            query_heads = sizes.num_heads if over_all_heads else 1
            key_heads = sizes.num_kv_heads if over_all_heads else 1
            yield from _norm_shapes(config, "self_attn.q_norm", query_heads * sizes.head_dim)
            if keys_of(config, index) is None:
                yield from _norm_shapes(config, "self_attn.k_norm", key_heads * sizes.head_dim)
        if (
            matrix.name == "mlp.down_proj"
            and config.activation == "xielu"
            and config.experts is None
        ):
            yield from (("mlp.act_fn.alpha_p", (1,)), ("mlp.act_fn.alpha_n", (1,)))
            yield from (("mlp.act_fn.beta", ()), ("mlp.act_fn.eps", ()))
    if experts is not None:
        yield from _expert_shapes(config, experts)
    if config.per_layer_input_size:
        yield from _norm_shapes(config, "post_per_layer_input_norm", config.hidden_size)


def _delta_net_shapes(sizes: DeltaNet) -> Iterator[tuple[str, Shape]]:
    """The parameters of a delta net that are no matrices."""
    yield "linear_attn.dt_bias", (sizes.num_value_heads,)
    yield "linear_attn.A_log", (sizes.num_value_heads,)
    if sizes.projections == "separate":
        for name, width in _separate_widths(sizes).items():
            yield from _convolution_shapes(f"linear_attn.{name}_conv1d", width, sizes.kernel)
    else:
        convolved_width = 2 * sizes.key_width + sizes.value_width
        yield from _convolution_shapes("linear_attn.conv1d", convolved_width, sizes.kernel)
    yield "linear_attn.norm.weight", (sizes.value_head_dim,)


def delta_net_projections(sizes: DeltaNet) -> Mapping[str, int]:
    """The matrices that read the input of a delta net, by name, and how many outputs each has."""
    convolved_width = 2 * sizes.key_width + sizes.value_width
    if sizes.projections == "by_head":
        return {
            "in_proj_qkvz": convolved_width + sizes.value_width,
            "in_proj_ba": 2 * sizes.num_value_heads,
        }
    queries_keys_values = {"in_proj_qkv": convolved_width}
    if sizes.projections == "separate":
        widths = _separate_widths(sizes)
        queries_keys_values = {f"{name}_proj": outputs for name, outputs in widths.items()}
    return {
        **queries_keys_values,
        "in_proj_z": sizes.value_width,
        "in_proj_b": sizes.num_value_heads,
        "in_proj_a": sizes.num_value_heads,
    }


def _separate_widths(sizes: DeltaNet) -> dict[str, int]:
    """Of queries, keys and values."""
    return {"q": sizes.key_width, "k": sizes.key_width, "v": sizes.value_width}


def _convolution_shapes(name: str, width: int, kernel: int) -> Iterator[tuple[str, Shape]]:
    """As PyTorch keeps the weight of a convolution of each number by itself."""
    yield f"{name}.weight", (width, 1, kernel)


def _norm_shapes(config: ModelConfig, name: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width,)
    if config.norm in ("layer", "layer_unit_offset") and config.norm_bias:
        yield f"{name}.bias", (width,)


def _expert_shapes(config: ModelConfig, experts: Experts) -> Iterator[tuple[str, Shape]]:
    """The router and the stacks of all experts: the matrices of gate and up, in this order of rows, are one."""
    width = config.hidden_size
    count = experts.count
    yield ROUTER, (count, width)
    if experts.bias:
        yield "mlp.gate.bias", (count,)
    if experts.choice_bias:
        yield f"mlp.gate.{CHOICE_BIAS}", (1, count) if experts.boxed_choice_bias else (count,)
    if experts.normed_router:
        yield "mlp.gate.scale", (width,)
        yield "mlp.gate.per_expert_scale", (count,)
    gates = 2 if config.gated_mlp else 1
    yield "mlp.experts.gate_up_proj", (count, gates * experts.width, width)
    if experts.bias:
        yield "mlp.experts.gate_up_proj_bias", (count, gates * experts.width)
    yield "mlp.experts.down_proj", (count, width, experts.width)
    if experts.bias:
        yield "mlp.experts.down_proj_bias", (count, width)


def _matrices(config: ModelConfig, index: int, sizes: LayerSizes, mixer: Mixer) -> Iterator[Matrix]:
    """The linear maps of a layer of the native decoder."""
    width = config.hidden_size
    inner = sizes.intermediate_size
    match mixer:
        case "attention":
            yield from _attention_matrices(config, index, sizes)
        case "delta_net":
            assert config.delta_net is not None
            yield from _delta_net_matrices(width, config.delta_net)
        case "short_convolution":
            assert config.short_convolution is not None
            bias = config.short_convolution.bias
            yield Matrix("conv.in_proj", 3 * width, width, bias)
            yield Matrix("conv.out_proj", width, width, bias)
    experts = experts_of(config, index)
    if experts is None:
        yield from _mlp_matrices(config, "mlp", inner)
    elif experts.shared_width:
        yield from _mlp_matrices(config, "mlp.shared_expert", experts.shared_width)
        if experts.shared_gate:
            yield Matrix("mlp.shared_expert_gate", 1, width, False)
    if config.per_layer_input_size:
        yield Matrix("per_layer_input_gate", config.per_layer_input_size, width, False)
        yield Matrix("per_layer_projection", width, config.per_layer_input_size, False)


def _mlp_matrices(config: ModelConfig, name: str, inner: int) -> Iterator[Matrix]:
    if config.gated_mlp:
        yield Matrix(f"{name}.gate_proj", inner, config.hidden_size, config.mlp_bias)
    yield Matrix(f"{name}.up_proj", inner, config.hidden_size, config.mlp_bias)
    yield Matrix(f"{name}.down_proj", config.hidden_size, inner, config.mlp_bias)


def _latent_matrices(
    config: ModelConfig, latent: LatentAttention, num_heads: int
) -> Iterator[Matrix]:
    width = config.hidden_size
    query_width = num_heads * (latent.plain_width + latent.rotary_width)
    bias = config.attention_bias
    if latent.query_rank is None:
        yield Matrix("self_attn.q_proj", query_width, width, False)
    else:
        yield Matrix("self_attn.q_a_proj", latent.query_rank, width, bias)
        yield Matrix("self_attn.q_b_proj", query_width, latent.query_rank, False)
    latent_width = latent.rank + latent.rotary_width
    yield Matrix("self_attn.kv_a_proj_with_mqa", latent_width, width, bias)
    heads_width = num_heads * (latent.plain_width + latent.value_width)
    yield Matrix("self_attn.kv_b_proj", heads_width, latent.rank, False)
    yield Matrix("self_attn.o_proj", width, num_heads * latent.value_width, bias)


def _attention_matrices(config: ModelConfig, index: int, sizes: LayerSizes) -> Iterator[Matrix]:
    if config.latent_attention is not None:
        yield from _latent_matrices(config, config.latent_attention, sizes.num_heads)
        return
    width = config.hidden_size
    query_width = sizes.num_heads * sizes.head_dim
    key_width = sizes.num_kv_heads * sizes.head_dim
    gated_width = 2 * query_width if config.attention_gate else query_width
    if config.head_gate:
        yield Matrix("self_attn.g_proj", sizes.num_heads, width, False)
    yield Matrix("self_attn.q_proj", gated_width, width, config.attention_bias)
    if keys_of(config, index) is None:
        yield Matrix("self_attn.k_proj", key_width, width, config.attention_bias)
        if not _keys_are_values(config, index):
            yield Matrix("self_attn.v_proj", key_width, width, config.attention_bias)
    yield Matrix("self_attn.o_proj", width, query_width, config.output_bias)


def _delta_net_matrices(width: int, sizes: DeltaNet) -> Iterator[Matrix]:
    """Of queries, keys and values, mostly together; of the output's gate z, the strength of writing b, the decay a."""
    for name, outputs in delta_net_projections(sizes).items():
        yield Matrix(f"linear_attn.{name}", outputs, width, False)
    yield Matrix("linear_attn.out_proj", width, sizes.value_width, False)


@cache
def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model; tied embeddings count once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


@cache
def active_parameter_count(config: ModelConfig) -> int:
    """Parameters that compute a token: all but the experts that it does not meet."""
    return parameter_count(config) - sum(layer.idle_parameters for layer in layers(config))


def input_products(config: ModelConfig) -> int:
    """Multiply-adds of a token in the matrix that makes the inputs of all layers of the embedded token; 0: none has."""
    return config.num_layers * config.per_layer_input_size * config.hidden_size


def flops_per_token(config: ModelConfig, sequence_length: int, *, backward: bool = True) -> float:
    """Floating-point operations (a multiply-add is two) for each of `sequence_length` tokens of a sequence.

    Matmuls only. Attention counts all T x T scores, including masked ones: the convention of
    torch's FlopCounterMode and of most published MFU figures (PaLM, appendix B). Backward is
    twice forward; recomputation (activation checkpointing, logits in chunks, delta rules) does not count.
    """
    head_outputs = 1 if config.head == "values" else config.vocab_size
    products = head_outputs * config.hidden_size
    products += input_products(config)
    mixers = 0.0
    for layer in layers(config):
        products += layer.active_products
        mixers += layer.mixer_flops(sequence_length)
    return float(2 * products + mixers) * (3 if backward else 1)
