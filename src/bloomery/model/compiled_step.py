"""A step of decoding on a CPU as one compiled function: `step.cpp`, built once per machine by its C++ compiler.

PyTorch spends much of a step of a small model between its kernels, and on CPUs without bfloat16 instructions its
matmuls read slower than memory can (benchmarks/README.md). The code reads the weights in place; activations
stay float32.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int64, c_void_p
from itertools import accumulate
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.facts.counting import Layer, layers
from bloomery.facts.limits import WEIGHTS_BLOCK
from bloomery.model.adapters.lora import LoraLinear
from bloomery.model.cache import STEP_TOKENS, Cache, StateCache
from bloomery.model.decoder import MLP, Backbone, Block, Decoder
from bloomery.model.experts import ExpertMLPs, MixtureOfExperts, Router
from bloomery.model.heads import capped
from bloomery.model.io.quantized import QuantizedWeight, quantize_int8
from bloomery.model.io.weights import QuantizedLinear
from bloomery.model.mixers.attention import Attention
from bloomery.model.mixers.convolution import DepthwiseConvolution
from bloomery.model.mixers.delta_net import GatedDeltaNet
from bloomery.model.mixers.short_convolution import GatedShortConvolution
from bloomery.model.native import Library, Uncompiled, library
from bloomery.model.norms import LayerNorm, RMSNorm
from bloomery.model.quantized_experts import QuantizedExperts
from bloomery.model.rope import Rotary

LANES = 16  # numbers that the code handles at once
LINE = 64  # bytes of a cache line, and of an alignment
HUGE = 2**21  # bytes of a huge page
MADV_HUGEPAGE = 14
LEAST = 2**24  # bytes of weights: smaller models answer before the code is compiled
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
MIXERS = ("attention", "delta_net", "short_convolution")
QUERY_NORMS = ("none", "head", "rotated_head", "full")
# Facts of `Experts` that the structure has by the same names, and all that the code computes.
NUMBERS_OF_EXPERTS = (
    *("count", "per_token", "width", "softmax_of_chosen", "normalize", "clamps_sum"),
    *("groups", "groups_per_token", "best_of_group", "least_sum", "weight_scale", "slope"),
)
COMPUTED_FACTS = (
    *NUMBERS_OF_EXPERTS,
    *("scores", "choice_bias", "boxed_choice_bias", "bias", "clamp"),
    *("shared_width", "shared_gate"),
)
# Modules other than linear maps that the code computes.
SUPPORTED_MODULES = (
    Decoder,
    Backbone,
    Block,
    Attention,
    GatedDeltaNet,
    GatedShortConvolution,
    DepthwiseConvolution,
    MLP,
    MixtureOfExperts,
    QuantizedLinear,
    QuantizedExperts,
    RMSNorm,
    LayerNorm,
    nn.Embedding,
    nn.ModuleList,
    nn.ModuleDict,
)


class _Matrix(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scales", "bias", "A", "B")),
        *((name, c_int64) for name in ("outputs", "inputs", "kind", "rank")),
    )


class _Norm(Structure):
    _fields_ = (("gain", c_void_p), ("bias", c_void_p), ("centered", c_int64), ("eps", c_double))


class _Layer(Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("q", "k", "v", "decay", "o", "gate", "up", "down")),
        *(
            (name, _Norm)
            for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")
        ),
        *((name, _Norm) for name in ("q_norm", "k_norm")),
        *((name, c_void_p) for name in ("cos", "sin", "growth", "keys", "values")),
        ("capacity", c_int64),
        *((name, c_int64) for name in ("mixer", "inner", "heads", "kv_heads")),
        *((name, c_int64) for name in ("width", "value_width", "half", "gated")),
        *((name, c_void_p) for name in ("taps", "tap_bias", "step_bias", "rate")),
        *((name, c_void_p) for name in ("convolved", "memory")),
        ("kernel", c_int64),
        ("scale", c_float),
        *((name, c_void_p) for name in ("sinks", "mixture")),
    )


class _Mixture(Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("router", "gate_up", "down", "shared_gate")),
        ("choice_bias", c_void_p),
        *((name, c_int64) for name in ("count", "per_token", "width", "gated", "sigmoid")),
        *((name, c_int64) for name in ("softmax_of_chosen", "normalize", "clamps_sum", "groups")),
        *((name, c_int64) for name in ("groups_per_token", "best_of_group", "clamped")),
        *((name, c_float) for name in ("least_sum", "weight_scale", "clamp", "slope")),
    )


class _Model(Structure):
    _fields_ = (
        ("layers", POINTER(_Layer)),
        ("norm", _Norm),
        ("head", _Matrix),
        *(
            (name, c_int64)
            for name in (
                "num_layers",
                "hidden",
                "activation",
                "cache_kind",
                "qk_norm",
                "interleave",
                "shared_norm",
            )
        ),
        ("softcap", c_float),
        ("multiplier", c_float),
    )


def compile_step(decoder: Decoder, on_load: Callable[[str], None]) -> None:
    """Gives the decoder a compiled step where the machine can build one; `on_load` gets a line on what decodes.

    The decoder's weights must not change afterwards.
    """
    size = sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))
    if decoder.device.type != "cpu" or size < LEAST:
        return
    try:
        decoder.step = CompiledStep(decoder)
    except Uncompiled as error:
        on_load(f"decoding: in PyTorch, which is slower ({error})")
    else:
        on_load("decoding: compiled for this CPU")


@final
class CompiledStep:
    """A function of tokens that reads the decoder's weights in place: make another when these change.

    Raises Uncompiled with the reason where the decoder, the device or the machine does not support it.
    """

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        body = decoder.model
        if (reason := _unsupported(decoder)) is not None:
            raise Uncompiled(reason)
        assert isinstance(body, Backbone)
        self.config = config
        self._body = body
        self._run = _code().step
        # Converted copies that the structures point to; nothing else keeps them alive.
        self._copies: list[Tensor] = []
        self._mixtures: list[_Mixture] = []
        # The rotations of the positions of the largest cache so far.
        self._table_length = 0
        self._tables: list[Rotary | None] = []
        _move_together([*decoder.parameters(), *decoder.buffers()])

        # PyTorch turns all int8 weights into floats at each forward, so that this code stays faster
        # for more tokens.
        quantized = any(isinstance(module, QuantizedWeight) for module in decoder.modules())
        self._max_tokens = 8 * STEP_TOKENS if quantized else STEP_TOKENS

        # The model as the structures of step.cpp, in the order of their fields.
        blocks: Any = body.layers
        described_layers = layers(config)
        self._layers = (_Layer * config.num_layers)(
            *(
                self._layer(block, described)
                for block, described in zip(blocks, described_layers, strict=True)
            )
        )
        self._model = _Model(
            self._layers,
            self._norm(body.norm, scale=config.logit_scale),
            self._matrix(decoder.lm_head, int8=quantized),
            config.num_layers,
            config.hidden_size,
            ACTIVATIONS.index(config.activation),
            0,
            QUERY_NORMS.index(config.qk_norm),
            config.rope_interleave,
            config.norm_placement == "shared",
            config.attention_softcap or 0.0,
            config.residual_multiplier,
        )

    def takes(self, tokens: Sequence[Sequence[int]], first: int, cache: Cache) -> bool:
        """Whether it can append these tokens: not many, and none pushes another of them out of a window."""
        if all(len(ids) <= 1 for ids in tokens):
            return True
        num_tokens = sum(map(len, tokens))
        max_length = max(cache.lengths[first + row] + len(ids) for row, ids in enumerate(tokens))
        return num_tokens <= self._max_tokens and max_length <= cache.shortest_window

    def __call__(
        self, tokens: Sequence[Sequence[int]], first: int, cache: Cache, *, every: bool = False
    ) -> Tensor:
        """Appends tokens to the slots from `first` on.

        Returns logits, float32 [N, V], after the last token of each slot or, with `every`, after each token.
        """
        # The tokens of all slots as one list: of each its slot, its position there, and whether its
        # logits are computed.
        slots: list[int] = []
        positions: list[int] = []
        logit_indices: list[int] = []
        for slot, ids in enumerate(tokens, first):
            for position in range(cache.lengths[slot], cache.lengths[slot] + len(ids)):
                if every:
                    logit_indices.append(len(slots))
                slots.append(slot)
                positions.append(position)
            if ids and not every:
                logit_indices.append(len(slots) - 1)
        assert max(positions) < cache.capacity, (
            f"{max(positions) + 1} tokens do not fit into {cache.capacity}"
        )

        # The compiled code reads and writes the memory of tensors that Python holds.
        self._point_to(cache)
        numbers = c_int64 * len(slots)
        with torch.no_grad():
            flat_ids = torch.tensor([token for ids in tokens for token in ids])
            embedded = self._body.embed(flat_ids, torch.tensor(positions)).float().contiguous()
            logits = torch.empty(len(logit_indices), self._model.head.outputs)
            self._run(
                ctypes.byref(self._model),
                len(slots),
                numbers(*slots),
                numbers(*positions),
                embedded.data_ptr(),
                len(logit_indices),
                (c_int64 * len(logit_indices))(*logit_indices),
                logits.data_ptr(),
                torch.get_num_threads(),
            )
            cache.append(first, [len(ids) for ids in tokens])
            return capped(logits, self.config.final_softcap)

    def _point_to(self, cache: Cache) -> None:
        """Points the structures to the cache's tensors, and to rotations of as many positions as it has."""
        if self._table_length < cache.capacity:
            self._tables = self._body.rotary(torch.arange(cache.capacity))
            self._table_length = cache.capacity
        embeddings = self._body.embed_tokens.weight
        described_layers = layers(self.config)
        for layer, described, layer_cache, table in zip(
            self._layers, described_layers, cache.layers, self._tables, strict=True
        ):
            if isinstance(layer_cache, StateCache):
                self._point_to_states(layer, layer_cache, described, embeddings)
                continue
            keys, values = layer_cache.memory(
                described.num_kv_heads, described.head_dim, embeddings
            )
            layer.keys = keys.data_ptr()
            layer.values = values.data_ptr()
            layer.capacity = layer_cache.capacity
            if table is not None:
                layer.cos = table.cos.data_ptr()
                layer.sin = table.sin.data_ptr()
                if table.query_scale is not None:
                    layer.growth = table.query_scale.data_ptr()
        self._model.cache_kind = KINDS[embeddings.dtype]

    def _point_to_states(
        self, layer: _Layer, cache: StateCache, described: Layer, embeddings: Tensor
    ) -> None:
        """The same for a layer without attention."""
        channels = described.hidden_size
        if described.delta_net is not None:
            sizes = described.delta_net
            channels = 2 * sizes.key_width + sizes.value_width
            state = (sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim)
            layer.memory = cache.every(
                "memory", state, embeddings.new_empty(0, dtype=torch.float32)
            ).data_ptr()
        layer.convolved = cache.every(
            "convolved", (layer.kernel - 1, channels), embeddings
        ).data_ptr()

    def _layer(self, block: Any, described: Layer) -> _Layer:
        """The structure of a block; the cache's tensors are put in later."""
        mlp = block.mlp

        # Where a norm stands only before each part, "post_attention_layernorm" is the MLP's.
        norm_names: tuple[str | None, ...]
        match self.config.norm_placement:
            case "before":
                norm_names = ("input_layernorm", None, "post_attention_layernorm", None)
            case "shared":
                norm_names = ("input_layernorm", None, None, None)
            case "after":
                norm_names = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
            case "both":
                norm_names = (
                    "input_layernorm",
                    "post_attention_layernorm",
                    "pre_feedforward_layernorm",
                    "post_feedforward_layernorm",
                )
        layer = _Layer()
        places = ("before_attention", "after_attention", "before_mlp", "after_mlp")
        for place, name in zip(places, norm_names, strict=True):
            setattr(layer, place, self._norm(None if name is None else getattr(block, name)))
        if isinstance(mlp, MixtureOfExperts):
            self._put_mixture(layer, mlp)
        else:
            self._put_mlp(layer, mlp)
        layer.mixer = MIXERS.index(described.mixer)
        if isinstance(block.mixer, GatedDeltaNet):
            self._put_delta_net(layer, block.mixer)
        elif isinstance(block.mixer, GatedShortConvolution):
            self._put_short_convolution(layer, block.mixer)
        else:
            self._put_attention(layer, block.mixer, described)
        return layer

    def _put_mlp(self, layer: _Layer, mlp: nn.Module) -> None:
        assert isinstance(mlp, MLP)
        layer.gate = self._matrix(mlp.gate_proj)
        layer.up = self._matrix(mlp.up_proj)
        layer.down = self._matrix(mlp.down_proj)
        layer.inner = layer.up.outputs

    def _put_mixture(self, layer: _Layer, module: MixtureOfExperts) -> None:
        """The experts, and the shared one as the layer's MLP."""
        router = module.gate
        facts = router.facts
        experts = module.experts
        mixture = _Mixture(
            router=self._weight(router.weight, router.bias),
            gate_up=self._stack(experts, "gate_up_proj"),
            down=self._stack(experts, "down_proj"),
            shared_gate=self._matrix(module.shared_expert_gate),
            choice_bias=self._floats(router.e_score_correction_bias),
            gated=experts.gated,
            sigmoid=facts.scores == "sigmoid",
            clamped=facts.clamp is not None,
            clamp=facts.clamp or 0.0,
            **{name: getattr(facts, name) for name in NUMBERS_OF_EXPERTS},
        )
        self._mixtures.append(mixture)
        layer.mixture = ctypes.addressof(mixture)
        if module.shared_expert is not None:
            self._put_mlp(layer, module.shared_expert)

    def _stack(self, experts: ExpertMLPs, name: str) -> _Matrix:
        """The matrix of the first expert, which those of the others follow."""
        bias_EO = getattr(experts, f"{name}_bias")
        if name not in experts.quantized:
            return self._weight(getattr(experts, name), bias_EO)
        quantized = experts.quantized[name]
        assert isinstance(quantized, QuantizedExperts)
        stored = quantized.stored
        return self._weight(
            stored.codes.view(stored.shape), bias_EO, stored.scales.view(torch.float32)
        )

    def _weight(self, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> _Matrix:
        """A matrix [O, I], or the first of a stack [E, O, I], without an adapter."""
        *_, outputs, inputs = weight.shape
        return _Matrix(
            weight=self._address(weight.detach()),
            scales=self._address(scales),
            bias=self._floats(bias),
            outputs=outputs,
            inputs=inputs,
            kind=KINDS[weight.dtype],
        )

    def _put_attention(self, layer: _Layer, attention: Attention, described: Layer) -> None:
        for name in "qkvo":
            setattr(layer, name, self._matrix(getattr(attention, f"{name}_proj")))
        layer.q_norm = self._norm(attention.q_norm)
        layer.k_norm = self._norm(attention.k_norm)
        layer.heads = described.num_heads
        layer.kv_heads = described.num_kv_heads
        layer.width = described.head_dim
        layer.half = 0 if described.rotation is None else described.rotation.width // 2
        layer.gated = self.config.attention_gate
        layer.scale = described.attention_scale
        layer.sinks = self._floats(attention.sinks)

    def _put_delta_net(self, layer: _Layer, net: GatedDeltaNet) -> None:
        sizes = net.sizes
        layer.q = self._matrix(net.in_proj_qkv)
        layer.k = self._matrix(net.in_proj_z)
        layer.v = self._matrix(net.in_proj_b)
        layer.decay = self._matrix(net.in_proj_a)
        layer.o = self._matrix(net.out_proj)
        layer.q_norm = self._norm(net.norm)
        layer.heads = sizes.num_value_heads
        layer.kv_heads = sizes.num_key_heads
        layer.width = sizes.key_head_dim
        layer.value_width = sizes.value_head_dim
        layer.step_bias = self._floats(net.dt_bias)
        layer.rate = self._floats(-net.A_log.detach().float().exp())
        self._put_convolution(layer, net.conv1d)

    def _put_short_convolution(self, layer: _Layer, mixer: GatedShortConvolution) -> None:
        layer.q = self._matrix(mixer.in_proj)
        layer.o = self._matrix(mixer.out_proj)
        self._put_convolution(layer, mixer.conv)

    def _put_convolution(self, layer: _Layer, convolution: DepthwiseConvolution) -> None:
        layer.taps = self._floats(convolution.weight.squeeze(1).mT)
        layer.tap_bias = self._floats(convolution.bias)
        layer.kernel = convolution.kernel

    def _norm(self, norm: nn.Module | None, *, scale: float = 1.0) -> _Norm:
        """`scale`: of what the norm makes."""
        if norm is None:
            return _Norm()
        assert isinstance(norm, RMSNorm | LayerNorm) and norm.weight is not None
        gain = norm.weight.detach().float()
        if norm.unit_offset:
            gain = gain + 1
        if isinstance(norm, RMSNorm):
            return _Norm(self._floats(gain * scale), None, 0, norm.eps)
        bias = None if norm.bias is None else norm.bias.detach().float() * scale
        return _Norm(self._floats(gain * scale), self._floats(bias), 1, norm.eps)

    def _matrix(self, linear: nn.Module | None, *, int8: bool = False) -> _Matrix:
        """A linear map with its LoRA matrices. `int8`: a float weight is copied as int8."""
        if linear is None:
            return _Matrix()
        assert isinstance(linear, nn.Linear | QuantizedLinear)

        # LoRA's rank is padded with zeros to what the code multiplies at once.
        A = None
        B = None
        rank = 0
        if isinstance(linear, LoraLinear):
            lora_A, lora_B = linear.pair(torch.float32)
            padding = -len(lora_A) % LANES
            rank = len(lora_A) + padding
            A = F.pad(lora_A.detach(), (0, 0, 0, padding))
            B = F.pad(lora_B.detach() * linear.scale, (0, padding))

        scales = None
        quantized_weight = None if type(linear) is nn.Linear else linear.stored
        if isinstance(quantized_weight, QuantizedWeight):
            weight = quantized_weight.codes
            scales = quantized_weight.scales.view(torch.float32)
            shape = (quantized_weight.outputs, quantized_weight.inputs)
        else:
            assert isinstance(linear, nn.Linear)
            weight = linear.weight.detach()
            shape = (linear.out_features, linear.in_features)
            if int8:
                weight, scales = quantize_int8(weight.flatten())
        return _Matrix(
            self._address(weight),
            self._address(scales),
            self._floats(linear.bias),
            self._floats(A),
            self._floats(B),
            *shape,
            KINDS[weight.dtype],
            rank,
        )

    def _floats(self, tensor: Tensor | None) -> int | None:
        """The address of a tensor as float32, which this object keeps alive."""
        return None if tensor is None else self._address(tensor.detach().float())

    def _address(self, tensor: Tensor | None) -> int | None:
        """The address of a tensor in its own dtype, which this object keeps alive."""
        if tensor is None:
            return None
        contiguous = tensor.contiguous()
        self._copies.append(contiguous)
        return contiguous.data_ptr()


@torch.no_grad()
def _move_together(tensors: Sequence[Tensor]) -> None:
    """Moves the tensors into one block of huge pages, one after another, so that no copy is left.

    With small pages, a CPU spends a tenth of a step on looking up their addresses. Tensors that are there already, as
    those of a model that trains between rollouts, stay.
    """
    sizes = [-(-tensor.nbytes // LINE) * LINE for tensor in tensors]
    if _are_together(tensors, sizes):
        return
    block = torch.empty(sum(sizes) + 2 * HUGE, dtype=torch.uint8)
    start = -block.data_ptr() % HUGE
    huge_bytes = (len(block) - start) // HUGE * HUGE
    # Linux must be asked for huge pages; on another system the pages stay as they are.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).madvise(
            c_void_p(block.data_ptr() + start), ctypes.c_size_t(huge_bytes), MADV_HUGEPAGE
        )
    for tensor, size in zip(tensors, sizes, strict=True):
        moved_tensor = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        moved_tensor.copy_(tensor)
        tensor.data = moved_tensor
        start += size


def _are_together(tensors: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether they are in one block of memory, one after another, each with so many bytes of room."""
    block = tensors[0].untyped_storage().data_ptr()
    addresses = accumulate(sizes[:-1], initial=tensors[0].data_ptr())
    return all(
        tensor.untyped_storage().data_ptr() == block and tensor.data_ptr() == address
        for tensor, address in zip(tensors, addresses, strict=True)
    )


def _unsupported(decoder: Decoder) -> str | None:
    """Why the compiled code does not compute this decoder."""
    config = decoder.config
    body = decoder.model
    if not isinstance(body, Backbone) or config.head != "tokens":
        return "its layers are not Bloomery's"
    if decoder.device.type != "cpu":
        return "it is not on a CPU"
    if decoder.weight_stream is not None:
        return "its weights stream"
    if config.activation == "xielu":
        return "its activation has numbers of its own"
    if config.head_gate:
        return "its heads have gates of one number"
    if config.norm_placement == "by_mixer":
        return "its layers have their norms in two places"
    if config.rope_scaling is not None and config.rope_scaling.kind in ("dynamic", "longrope"):
        return "its positions depend on a text's length"
    if config.latent_attention is not None:
        return "its keys are made of a latent vector"
    if config.experts is not None and (config.experts.normed_router or config.experts.own_norms):
        return "its router or experts have norms of their own"
    # The code reads a matrix in full cache lines, and a head in full vectors.
    for layer in layers(config):
        if layer.keys_of is not None or layer.lends_keys or layer.keys_are_values:
            return "its layers share keys and values"
        inputs = [config.hidden_size]
        if layer.experts is None:
            inputs.append(layer.intermediate_size)
        else:
            inputs += [layer.experts.width, layer.experts.shared_width]
        heads = []
        if layer.mixer == "attention":
            inputs.append(layer.query_width)
            heads.append(layer.head_dim)
        if layer.delta_net is not None:
            inputs.append(layer.delta_net.value_width)
            heads += [layer.delta_net.key_head_dim, layer.delta_net.value_head_dim]
        if any(width % LINE for width in inputs) or any(width % LANES for width in heads):
            return f"its widths are not multiples of {LINE}, or those of its heads not of {LANES}"
    if config.delta_net is not None and config.delta_net.projections != "together":
        return "its delta nets have other matrices"
    if config.per_layer_input_size or config.layer_scalar or config.value_norm:
        return "its layers have parts that are not compiled"
    # Every module must be one that the code computes, with weights that it reads.
    for name, module in decoder.named_modules():
        if isinstance(module, LoraLinear):
            is_read = (
                module.weight.dtype in KINDS
                if module.stored is None
                else module.stored.base == "int8"
            )
            is_supported = is_read and not module.dora
        elif isinstance(module, QuantizedWeight):
            is_supported = module.base == "int8" and module.inputs % WEIGHTS_BLOCK == 0
        elif isinstance(module, nn.Linear):
            is_supported = type(module) is nn.Linear and module.weight.dtype in KINDS
        elif isinstance(module, ExpertMLPs) and module.exchange is not None:
            return "its experts are divided among ranks"
        elif isinstance(module, Router | ExpertMLPs):
            is_supported = all(parameter.dtype in KINDS for parameter in module.parameters())
        else:
            is_supported = isinstance(module, SUPPORTED_MODULES)
        if not is_supported:
            return f"{name} is stored or computed in another way"
    return None


def use_tiles(*, wanted: bool) -> bool:
    """Whether AMX multiplies bfloat16 matrices from now on; where the CPU has it, it does without being asked.

    For tests and measurements: no step may run meanwhile. Raises Uncompiled.
    """
    return bool(_code().step_begin(wanted))


@functools.cache
def _code() -> Any:
    """The functions of `step.cpp`. Raises Uncompiled."""
    code: Any = library(Library("bloomery.model", "step.cpp", ("tiles.h",)))
    pointer = c_void_p
    code.step.argtypes = (
        *(pointer, c_int64, pointer, pointer, pointer, c_int64, pointer, pointer),
        c_int64,
    )
    code.step.restype = None
    code.step_begin.argtypes = (c_int,)
    code.step_begin.restype = c_int
    code.step_begin(1)
    return code
