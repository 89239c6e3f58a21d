"""A step of decoding on a CPU as one compiled function: `step.cpp`, built once per machine by its C++ compiler.

PyTorch spends much of a step of a small model between its kernels, and on CPUs without bfloat16 instructions its
matmuls read slower than memory can (benchmarks/README.md). Weights are read where they are; numbers between them stay
float32.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.model.adapters.lora import LoraLinear
from bloomery.model.cache import FEW, Cache
from bloomery.model.decoder import MLP, Attention, Backbone, Block, Decoder
from bloomery.model.heads import capped
from bloomery.model.io.quantized import QuantizedWeight, quantize_int8
from bloomery.model.io.weights import QuantizedLinear
from bloomery.model.limits import WEIGHTS_BLOCK
from bloomery.model.native import Library, Uncompiled, library
from bloomery.model.norms import LayerNorm, RMSNorm
from bloomery.model.rope import Rotary

# numbers that the code handles at once, and bytes
LANES = 16
LINE = 64
HUGE = 2**21
MADV_HUGEPAGE = 14
LEAST = 2**24  # bytes of weights: smaller models answer before the code is compiled
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


class _Matrix(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scales", "bias", "A", "B")),
        *((name, c_int64) for name in ("outputs", "inputs", "kind", "rank")),
    )


class _Norm(Structure):
    _fields_ = (("gain", c_void_p), ("bias", c_void_p), ("centered", c_int64), ("eps", c_double))


class _Layer(Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *(
            (name, _Norm)
            for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")
        ),
        *((name, _Norm) for name in ("q_norm", "k_norm")),
        *((name, c_void_p) for name in ("cos", "sin", "keys", "values")),
        ("kept", c_int64),
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
                "inner",
                "heads",
                "kv_heads",
                "width",
                "half",
                "activation",
                "cache_kind",
                "norm_whole",
            )
        ),
        ("scale", c_float),
        ("softcap", c_float),
    )


def compile_step(decoder: Decoder, on_load: Callable[[str], None]) -> None:
    """Texts of the decoder are decoded by compiled code where there is some; `on_load` gets why they are not.

    Its weights must stay as they are from then on.
    """
    size = sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))
    if decoder.model.embed_tokens.weight.device.type != "cpu" or size < LEAST:
        return
    try:
        decoder.step = CompiledStep(decoder)
    except Uncompiled as error:
        on_load(f"decoding: in PyTorch, which is slower ({error})")
    else:
        on_load("decoding: compiled for this CPU")


@final
class CompiledStep:
    """A function of tokens that reads the decoder's weights where they are: make another when these change.

    Raises Uncompiled with the reason where the decoder, the device or the machine has none.
    """

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        body = decoder.model
        if (reason := _unsupported(decoder)) is not None:
            raise Uncompiled(reason)
        assert isinstance(body, Backbone)
        self.config = config
        self._body = body
        self._run = _built()
        self._held: list[Tensor] = []  # what the structures point to, and the decoder does not hold
        _move_together([*decoder.parameters(), *decoder.buffers()])
        self._tables: tuple[int, list[Rotary | None]] = 0, []
        layers: Any = body.layers
        quantized = any(isinstance(module, QuantizedWeight) for module in decoder.modules())
        # PyTorch turns all int8 weights into floats at each forward
        self._most = 8 * FEW if quantized else FEW
        self._layers = (_Layer * config.num_layers)(*(self._layer(block) for block in layers))
        self._model = _Model(
            self._layers,
            self._norm(body.norm),
            self._matrix(decoder.lm_head, int8=quantized),
            config.num_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rotary_width // 2,
            ACTIVATIONS.index(config.activation),
            0,
            config.qk_norm == "full",
            layers[0].self_attn.scale,
            config.attention_softcap or 0.0,
        )

    def takes(self, tokens: Sequence[Sequence[int]], first: int, cache: Cache) -> bool:
        """Whether it may append these tokens: not many, and none pushes another of them out of a window."""
        count = sum(map(len, tokens))
        one = all(len(ids) <= 1 for ids in tokens)
        longest = max(cache.lengths[first + row] + len(ids) for row, ids in enumerate(tokens))
        return one or (count <= self._most and all(longest <= layer.kept for layer in cache.layers))

    def __call__(
        self, tokens: Sequence[Sequence[int]], first: int, cache: Cache, *, every: bool = False
    ) -> Tensor:
        """Appends tokens to the slots from `first` on.

        Returns logits, float32 [N, V], after the last token of each slot or, with `every`, after each token.
        """
        slots = [first + row for row, ids in enumerate(tokens) for _ in ids]
        places = [
            cache.lengths[first + row] + at
            for row, ids in enumerate(tokens)
            for at in range(len(ids))
        ]
        assert max(places) < cache.capacity, (
            f"{max(places) + 1} tokens do not fit into {cache.capacity}"
        )
        ends = [
            at
            for at in range(len(slots))
            if every or at + 1 == len(slots) or slots[at] != slots[at + 1]
        ]
        self._point_to(cache)
        numbers = c_int64 * len(slots)
        with torch.no_grad():
            ids = torch.tensor([token for row in tokens for token in row])
            embedded = self._body.embed(ids, torch.tensor(places)).float().contiguous()
            logits = torch.empty(len(ends), self._model.head.outputs)
            self._run(
                ctypes.byref(self._model),
                len(slots),
                numbers(*slots),
                numbers(*places),
                embedded.data_ptr(),
                len(ends),
                (c_int64 * len(ends))(*ends),
                logits.data_ptr(),
                torch.get_num_threads(),
            )
            cache.append(first, [len(ids) for ids in tokens])
            return capped(logits, self.config.final_softcap)

    def _point_to(self, cache: Cache) -> None:
        """Names the cache's tensors, and tables of as many positions as it has, in the structures."""
        capacity, tables = self._tables
        if capacity < cache.capacity:
            tables = self._body.rotary(torch.arange(cache.capacity))
            self._tables = cache.capacity, tables
        embeddings = self._body.embed_tokens.weight
        for layer, held, table in zip(self._layers, cache.layers, tables, strict=True):
            keys, values = held.memory(self.config.num_kv_heads, self.config.head_dim, embeddings)
            layer.keys = keys.data_ptr()
            layer.values = values.data_ptr()
            layer.kept = held.kept
            if table is not None:
                layer.cos = table.cos.data_ptr()
                layer.sin = table.sin.data_ptr()
            self._model.cache_kind = KINDS[keys.dtype]

    def _layer(self, block: Any) -> _Layer:
        config = self.config
        attention = block.self_attn
        mlp = block.mlp
        before = config.norm_placement != "after"
        after = config.norm_placement != "before"
        names = (
            "input_layernorm" if before else None,
            "post_attention_layernorm" if after else None,
            ("pre_feedforward_layernorm" if after else "post_attention_layernorm")
            if before
            else None,
            "post_feedforward_layernorm" if after else None,
        )
        norms = [None if name is None else getattr(block, name) for name in names]
        norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        maps = [getattr(attention, f"{name}_proj") for name in "qkvo"]
        maps += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        return _Layer(*map(self._matrix, maps), *map(self._norm, norms))

    def _norm(self, norm: nn.Module | None) -> _Norm:
        if norm is None:
            return _Norm()
        assert isinstance(norm, RMSNorm | LayerNorm)
        gain = norm.weight.detach().float()
        if isinstance(norm, RMSNorm):
            return _Norm(self._hold(gain + 1 if norm.unit_offset else gain), None, 0, norm.eps)
        return _Norm(self._hold(gain), self._hold(norm.bias), 1, norm.eps)

    def _matrix(self, linear: nn.Module | None, *, int8: bool = False) -> _Matrix:
        """`int8`: in a copy, where the weight is not."""
        if linear is None:
            return _Matrix()
        assert isinstance(linear, nn.Linear | QuantizedLinear)
        A = B = None
        rank = 0
        if isinstance(linear, LoraLinear):
            A, B = (each.detach() for each in linear.pair(torch.float32))
            spare = -len(A) % LANES
            rank = len(A) + spare
            A = F.pad(A, (0, 0, 0, spare))
            B = F.pad(B * linear.scale, (0, spare))
        scales = None
        stored = None if type(linear) is nn.Linear else linear.stored
        if isinstance(stored, QuantizedWeight):
            weight = stored.codes
            scales = stored.scales.view(torch.float32)
            shape = (stored.outputs, stored.inputs)
        else:
            assert isinstance(linear, nn.Linear)
            weight = linear.weight.detach()
            shape = (linear.out_features, linear.in_features)
            if int8:
                weight, scales = quantize_int8(weight.flatten())
        pointers = [self._hold(each, whole=False) for each in (weight, scales)]
        return _Matrix(
            *pointers,
            *(self._hold(each) for each in (linear.bias, A, B)),
            *shape,
            KINDS[weight.dtype],
            rank,
        )

    def _hold(self, tensor: Tensor | None, *, whole: bool = True) -> int | None:
        """The address of a tensor, kept as it is or as float32 (`whole`)."""
        if tensor is None:
            return None
        tensor = (tensor.detach().float() if whole else tensor).contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()


@torch.no_grad()
def _move_together(tensors: Sequence[Tensor]) -> None:
    """Into one block of huge pages (where Linux gives these to who asks), one after another, so that no copy is left.

    Of many small pages a CPU spends a tenth of the time on finding them.
    """
    sizes = [-(-tensor.nbytes // LINE) * LINE for tensor in tensors]
    block = torch.empty(sum(sizes) + 2 * HUGE, dtype=torch.uint8)
    start = -block.data_ptr() % HUGE
    whole = (len(block) - start) // HUGE * HUGE
    with contextlib.suppress(OSError, AttributeError):  # another system: pages stay as they are
        ctypes.CDLL(None).madvise(
            c_void_p(block.data_ptr() + start), ctypes.c_size_t(whole), MADV_HUGEPAGE
        )
    for tensor, size in zip(tensors, sizes, strict=True):
        place = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor)
        tensor.data = place
        start += size


def _unsupported(decoder: Decoder) -> str | None:
    """Why the compiled code does not compute this decoder."""
    config = decoder.config
    body = decoder.model
    if not isinstance(body, Backbone) or config.head != "tokens":
        return "its layers are not Bloomery's"
    if body.embed_tokens.weight.device.type != "cpu":
        return "it is not on a CPU"
    if config.rope_scaling is not None and config.rope_scaling.kind in ("dynamic", "longrope"):
        return "its positions depend on a text's length"
    widths = config.hidden_size, config.intermediate_size, config.query_width
    if config.head_dim % LANES or any(width % LINE for width in widths):
        return f"its widths are not multiples of {LINE}"
    for name, module in decoder.named_modules():
        if isinstance(module, LoraLinear):
            good = not module.dora and (module.stored is None or module.stored.base == "int8")
        elif isinstance(module, QuantizedWeight):
            good = module.base == "int8" and module.inputs % WEIGHTS_BLOCK == 0
        elif isinstance(module, nn.Linear):
            good = type(module) is nn.Linear and module.weight.dtype in KINDS
        else:
            known = (
                Decoder,
                Backbone,
                Block,
                Attention,
                MLP,
                QuantizedLinear,
                RMSNorm,
                LayerNorm,
                nn.Embedding,
                nn.ModuleList,
            )
            good = isinstance(module, known)
        if not good:
            return f"{name} is stored or computed in another way"
    return None


@functools.cache
def _built() -> Any:
    """The function `step` of `step.cpp`. Raises Uncompiled."""
    run = library(Library("bloomery.model", "step.cpp")).step
    pointer = c_void_p
    run.argtypes = (pointer, c_int64, pointer, pointer, pointer, c_int64, pointer, pointer, c_int64)
    run.restype = None
    return run
