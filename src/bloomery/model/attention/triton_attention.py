"""Launches Triton's attention kernels: exact attention whose memory grows with T, in one kernel a pass.

For GPUs without a fused kernel of PyTorch, and where those that PyTorch has refuse the options. `triton` is imported
when the first kernel runs.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from bloomery.core.device import properties_of
from bloomery.model.attention.blockwise import (
    Options,
    QueryDocuments,
    attention_operator,
    like_projection,
    sums_like,
)
from bloomery.model.attention.tiles import (
    MAX_WIDTH,
    SPLIT_KEYS,
    TileShape,
    columns_at_once,
    decode_tile,
    padded_width,
    tile_shape,
)

SHARE_STEPS = 2**16  # dropout's probability is a multiple of one in so many
# Kernels count in 32 bits from the first number of a head to the last one.
LARGEST_OFFSET = 2**31 - 1


class KernelFailed(RuntimeError):
    """A kernel cannot be compiled, loaded or launched here.

    Running out of memory is no failure of a kernel: PyTorch's and Python's errors pass unchanged, and the message of
    a driver's error is part of this one's.
    """


@contextmanager
def _launching(kernel: str) -> Iterator[None]:
    """Raises KernelFailed for what Triton raises: its compiler, its cache, the launcher's C compiler and the driver
    have no class in common.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # The last line: before it, the compiler prints the code that it refuses.
        reason = (str(error).strip().splitlines() or [""])[-1].strip()
        raise KernelFailed(
            f"the Triton kernel {kernel} failed: {type(error).__name__}: {reason[:200]}"
        ) from error


@cache
def _kernels() -> ModuleType:
    from bloomery.model.attention import triton_kernels

    return triton_kernels


@cache
def arch_of(device: torch.device) -> str:
    """Such as gfx1030 or sm_90; "any" on the CPU, where Triton's interpreter runs."""
    return properties_of(device).arch or "any"


def _heads(x_BHTE: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor whose head numbers are neighbors, and the strides of its other axes.

    Raises KernelFailed where a head does not lie within 32 bits of its first number.
    """
    _, _, length, width = x_BHTE.shape
    if (length - 1) * x_BHTE.stride(2) + width > LARGEST_OFFSET:
        raise KernelFailed(
            f"the Triton kernels reach {LARGEST_OFFSET:,} numbers from a head's first one: "
            f"{length:,} tokens of {x_BHTE.stride(2):,} numbers are too many"
        )
    return x_BHTE, x_BHTE.stride(0), x_BHTE.stride(1), x_BHTE.stride(2)


def _with_neighbors(x_BHTE: Tensor) -> Tensor:
    """The tensor itself if the numbers of a head are neighbors in memory, else a copy."""
    return x_BHTE if x_BHTE.stride(3) == 1 else x_BHTE.contiguous()


def _first(documents: QueryDocuments) -> Tensor | None:
    return None if documents.first_BT is None else documents.first_BT.to(torch.int32).contiguous()


def _stop(first_BT: Tensor) -> Tensor:
    """Where each token's document ends: the number of tokens whose document starts no later."""
    return torch.searchsorted(first_BT, first_BT, right=True).to(torch.int32)


def _numbers(options: Options, seed: Tensor | None) -> dict[str, float]:
    """The scalar arguments that all kernels have."""
    num_dropped = min(round(options.dropout * SHARE_STEPS), SHARE_STEPS - 1)
    seed_bits = 0 if seed is None else int(seed)
    return {
        "seed_low": _signed(seed_bits & 0xFFFFFFFF),
        "seed_high": _signed(seed_bits >> 32 & 0xFFFFFFFF),
        "scale": options.scale,
        "softcap": options.softcap or 1.0,
        # Kept shares are larger, so that their expectation stays.
        "boost": SHARE_STEPS / (SHARE_STEPS - num_dropped),
        "num_dropped": num_dropped,
        "window": options.window or 0,
    }


def _signed(bits: int) -> int:
    """32 bits as the int32 that has them: one type of argument, whatever the number."""
    return bits - 2**32 if bits >= 2**31 else bits


def _variant(q: Tensor, first_BT: Tensor | None, options: Options) -> dict[str, int | bool]:
    """The constants that a kernel is compiled for."""
    return {
        "HAS_DOCUMENTS": first_BT is not None,
        "HAS_WINDOW": options.window is not None,
        "HAS_SOFTCAP": options.softcap is not None,
        "HAS_DROPOUT": options.dropout > 0,
        **_widths(q.shape[-1]),
    }


def _widths(width: int) -> dict[str, int]:
    """Of a head: its numbers, and those that a kernel computes with. Raises KernelFailed."""
    if width > MAX_WIDTH:
        raise KernelFailed(
            f"the Triton kernels take heads of at most {MAX_WIDTH} numbers, not {width}"
        )
    return {"E": width, "WIDTH": padded_width(width)}


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel with its arguments, for heads of `width` numbers. Tiles change its time and its rounding alone."""

    kernel: str
    device: torch.device
    width: int
    length: int  # tokens, of which `axis` of a tile are one program's
    axis: Literal["rows", "keys"]
    programs: int  # for each block of tokens: heads of all sequences
    arguments: Mapping[str, object]

    def run(self, tile: TileShape | None = None) -> None:
        """None: the tile of `tile_shape`. Raises KernelFailed."""
        if tile is None:
            tile = tile_shape(self.kernel, arch=arch_of(self.device), width=self.width)
        block = tile.rows if self.axis == "rows" else tile.keys
        grid = (math.ceil(self.length / block), self.programs)
        columns = columns_at_once(arch_of(self.device), self.width)
        with _launching(self.kernel):
            getattr(_kernels(), self.kernel)[grid](
                **self.arguments,
                COLUMNS=columns,
                ROWS=tile.rows,
                KEYS=tile.keys,
                num_warps=tile.warps,
                num_stages=1,
            )


def forward_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    documents: QueryDocuments,
    options: Options,
) -> KernelLaunch:
    """Writes `out` and `sums`, the log-sum-exp of each query."""
    batch, heads, length, width = q.shape
    q, k, v = (_with_neighbors(x) for x in (q, k, v))
    first_BT = _first(documents)
    arguments = {
        "q_heads": _heads(q),
        "k_heads": _heads(k),
        "v_heads": _heads(v),
        "out_heads": _heads(out),
        "sums_pointer": sums,
        "first_pointer": sums if first_BT is None else first_BT,
        "length": length,
        "num_heads": heads,
        "heads_per_key": heads // k.shape[1],
        **_numbers(options, documents.seed),
        **_variant(q, first_BT, options),
    }
    return KernelLaunch("forward", q.device, width, length, "rows", batch * heads, arguments)


def backward_launches(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    documents: QueryDocuments,
    options: Options,
) -> Iterator[KernelLaunch]:
    """Write the gradients of q, k and v; must run in their order: the first writes `delta`, which the second reads."""
    batch, heads, length, width = q.shape
    key_heads = k.shape[1]
    dq, dk, dv = gradients
    grad, q, k, v = (_with_neighbors(x) for x in (grad, q, k, v))
    first_BT = _first(documents)
    delta_BHT = torch.empty_like(sums)
    shared = {
        "q_heads": _heads(q),
        "k_heads": _heads(k),
        "v_heads": _heads(v),
        "d_out_heads": _heads(grad),
        "sums_pointer": sums,
        "delta_pointer": delta_BHT,
        "first_pointer": sums if first_BT is None else first_BT,
        "length": length,
        "heads_per_key": heads // key_heads,
        **_numbers(options, documents.seed),
        **_variant(q, first_BT, options),
    }
    of_queries = {"out_heads": _heads(output), "dq_heads": _heads(dq), "num_heads": heads}
    yield KernelLaunch(
        "backward_q", q.device, width, length, "rows", batch * heads, shared | of_queries
    )
    of_keys = {
        "dk_heads": _heads(dk),
        "dv_heads": _heads(dv),
        "stop_pointer": sums if first_BT is None else _stop(first_BT),
        "num_key_heads": key_heads,
    }
    yield KernelLaunch(
        "backward_kv", q.device, width, length, "keys", batch * key_heads, shared | of_keys
    )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: QueryDocuments, options: Options
) -> tuple[Tensor, Tensor]:
    out = like_projection(q)
    sums_BHT = sums_like(q)
    if out.numel() > 0:
        forward_launch(q, k, v, out, sums_BHT, documents, options).run()
    return out, sums_BHT


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    documents: QueryDocuments,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = like_projection(q), like_projection(k), like_projection(v)
    if grad.numel() > 0:
        for launch in backward_launches(grad, q, k, v, output, sums, gradients, documents, options):
            launch.run()
    return gradients


triton = attention_operator("triton", _forward, _backward, sums=sums_like)


@torch.library.custom_op("bloomery::triton_decode", mutates_args=())
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_keys_B: Tensor | None,
    softcap: float | None,
    scale: float,
) -> Tensor:
    """[B, H, 1, E]: attention of one new token of each text to the keys [B, K, S, E] of a cache; no gradients.

    `num_keys_B`: how many of the S keys each text's token sees; None: all. A window is the cache's: it keeps no more.
    """
    batch, heads, _, width = q.shape
    key_heads, num_keys = k.shape[1:3]
    q, k, v = (_with_neighbors(x) for x in (q, k, v))
    num_splits = math.ceil(num_keys / SPLIT_KEYS)
    out_parts = q.new_empty((batch, heads, num_splits, width), dtype=torch.float32)
    sums = q.new_empty((batch, heads, num_splits), dtype=torch.float32)
    tile = decode_tile(arch_of(q.device))
    grid = (num_splits, math.ceil(heads // key_heads / tile.rows), batch * key_heads)
    with _launching("decode"):
        _kernels().decode[grid](
            q_heads=_heads(q),
            k_heads=_heads(k),
            v_heads=_heads(v),
            out_pointer=out_parts,
            sums_pointer=sums,
            counts_pointer=sums if num_keys_B is None else num_keys_B,
            scale=scale,
            softcap=softcap or 1.0,
            num_keys=num_keys,
            num_splits=num_splits,
            num_key_heads=key_heads,
            heads_per_key=heads // key_heads,
            HAS_COUNTS=num_keys_B is not None,
            HAS_SOFTCAP=softcap is not None,
            **_widths(width),
            ROWS=tile.rows,
            KEYS=tile.keys,
            SPLIT=SPLIT_KEYS,
            num_warps=tile.warps,
            num_stages=1,
        )
    # Splits are as much of the whole as their softmax's sums are.
    shares = torch.softmax(sums, -1)
    return (shares[..., None] * out_parts).sum(2, keepdim=True).to(q.dtype)


decode.register_fake(lambda q, *_: q.new_empty(q.shape))
