"""Exact attention in plain PyTorch whose memory grows with T, for devices without a fused kernel.

A tile is a block of queries against a block of keys. Forward runs the online softmax over the tiles of a query block
(Milakov and Gimelshein, arXiv:1805.02867) and keeps one log-sum-exp a query; backward recomputes each tile from it
(Dao et al., arXiv:2205.14135, algorithm 4). Tiles that no query may see are never touched.

Legend: B batch, T time, H query heads, K key heads, G = H / K heads that share keys, E head width, n queries and m keys
of a tile. Sums run in float32 for half types (float64 stays); every step is deterministic.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, library

from bloomery.facts.limits import ATTENTION_BLOCK as BLOCK
from bloomery.facts.limits import CPU_SCORES, GPU_SCORES
from bloomery.model.attention.sinks import SinkAttention


class Options(NamedTuple):
    """The attention settings of a layer."""

    window: int | None  # keys that a query sees, itself included
    softcap: float | None
    scale: float
    dropout: float
    sinks_H: Tensor | None = None  # a logit of each head that has no key and no value

    @property
    def numbers(self) -> tuple[int | None, float | None, float, float]:
        """What operators and tiles take: they compute without sinks."""
        return self.window, self.softcap, self.scale, self.dropout


class QueryDocuments(NamedTuple):
    """Document masking, and the seed of dropout."""

    first_BT: Tensor | None  # where each token's document starts
    # [2, B, blocks] on the CPU: lowest and highest document start of each query block
    reach: Tensor | None
    seed: Tensor | None  # 0-dim, on the CPU


class Forward(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: QueryDocuments, options: Options
    ) -> tuple[Tensor, Tensor]:
        """(output [B, H, T, E], log-sum-exp [B, H, T]) outside autocast."""


class Backward(Protocol):
    def __call__(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        sums: Tensor,
        documents: QueryDocuments,
        options: Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, each in memory like `like_projection` of it."""


Attention = Callable[[Tensor, Tensor, Tensor, QueryDocuments, Options], Tensor]


class _Context(Protocol):
    """The autograd context of the operator."""

    saved_tensors: tuple[Tensor, ...]
    options: Options

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


def like_projection(x_BHTE: Tensor) -> Tensor:
    """Empty and [B, T, H, E] in memory, as a projection leaves it, so that the output's `flatten` copies nothing."""
    batch, heads, length, width = x_BHTE.shape
    return x_BHTE.new_empty(batch, length, heads, width).transpose(1, 2)


def sums_like(q_BHTE: Tensor) -> Tensor:
    """Empty [B, H, T] for log-sum-exps: float32 for half types, float64 stays."""
    return q_BHTE.new_empty(
        q_BHTE.shape[:3], dtype=torch.promote_types(q_BHTE.dtype, torch.float32)
    )


def attention_operator(
    name: str,
    forward: Forward,
    backward: Backward,
    *,
    sums: Callable[[Tensor], Tensor],
    device: str | None = None,
) -> Attention:
    """Registers forward and backward as the operator `bloomery::NAME`, with autograd and fake tensors.

    `sums` returns an empty tensor in the layout of the forward's log-sum-exp, for the queries that it is given.
    """

    @library.custom_op(f"bloomery::{name}", mutates_args=(), device_types=device)
    def forward_operator(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        first: Tensor | None,
        reach: Tensor | None,
        seed: Tensor | None,
        window: int | None,
        softcap: float | None,
        scale: float,
        dropout: float,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            return forward(
                q,
                k,
                v,
                QueryDocuments(first, reach, seed),
                Options(window, softcap, scale, dropout),
            )

    @library.custom_op(f"bloomery::{name}_backward", mutates_args=(), device_types=device)
    def backward_operator(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        sums_BHT: Tensor,
        first: Tensor | None,
        reach: Tensor | None,
        seed: Tensor | None,
        window: int | None,
        softcap: float | None,
        scale: float,
        dropout: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            options = Options(window, softcap, scale, dropout)
            documents = QueryDocuments(first, reach, seed)
            return backward(grad, q, k, v, output, sums_BHT, documents, options)

    # `inputs` are those of the operator: q, k, v, the document masking, and the options.
    def save(ctx: _Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:3], *output, *inputs[3:6])
        ctx.options = Options(*inputs[6:])

    def differentiate(ctx: _Context, grad: Tensor, _grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        gradients = backward_operator(grad, *ctx.saved_tensors, *ctx.options.numbers)
        num_without_gradient = len(QueryDocuments._fields) + len(ctx.options.numbers)
        return *gradients, *[None] * num_without_gradient

    # The layouts that torch.compile and a simulation see without values.
    forward_operator.register_fake(lambda q, *_: (like_projection(q), sums(q)))
    backward_operator.register_fake(
        lambda _grad, q, k, v, *_: (like_projection(q), like_projection(k), like_projection(v))
    )
    forward_operator.register_autograd(differentiate, setup_context=save)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, documents: QueryDocuments, options: Options
    ) -> Tensor:
        settings = (*documents, *options.numbers)
        if options.sinks_H is not None:
            operators = forward_operator, backward_operator
            output: Tensor = SinkAttention.apply(q, k, v, options.sinks_H, operators, settings)  # type: ignore[no-untyped-call]  # torch's `apply`
            return output
        outputs: tuple[Tensor, Tensor] = forward_operator(q, k, v, *settings)
        return outputs[0]

    return attend


@dataclass(frozen=True)
class Tile:
    """A block of keys, for the block of queries that lists it."""

    number: int  # names its dropout mask
    keys: slice
    masked: bool  # some query of the block does not see some key


@dataclass(frozen=True)
class AttentionCall:
    """One call: document masking and attention settings."""

    first_BT: Tensor | None
    # [2, B, blocks] on the CPU: lowest and highest document start of each query block
    reach: Tensor | None
    seed: Tensor | None
    window: int | None
    softcap: float | None
    scale: float
    dropout: float

    def query_blocks(self, length: int) -> Iterator[tuple[slice, list[Tile]]]:
        """Each query block with its tiles from the diagonal down: the running maximum is finite at once."""
        num_blocks = -(-length // BLOCK)
        lowest_N = [0] * num_blocks
        highest_N = [0] * num_blocks
        if self.reach is not None:
            lowest_N = self.reach[0].amin(0).tolist()
            highest_N = self.reach[1].amax(0).tolist()
        for index, (lowest, highest) in enumerate(zip(lowest_N, highest_N, strict=True)):
            start = index * BLOCK
            stop = min(index * BLOCK + BLOCK, length)
            # No query of the block sees a key before `first_key`; some query does not see those
            # before `first_shared_key`.
            first_key = lowest
            first_shared_key = highest
            if self.window is not None:
                first_key = max(lowest, start - self.window + 1)
                first_shared_key = max(highest, stop - self.window)
            tiles = [
                Tile(
                    index * (index + 1) // 2 + block,
                    slice(block * BLOCK, min(block * BLOCK + BLOCK, stop)),
                    block == index or block * BLOCK < first_shared_key,
                )
                for block in range(index, first_key // BLOCK - 1, -1)
            ]
            yield slice(start, stop), tiles

    def groups(
        self, q_BHTE: Tensor, device_type: str | None = None
    ) -> Iterator[tuple[slice, "AttentionCall"]]:
        """Rows of the batch that are computed at once, each group with its own call.

        The type of device decides how many scores a group has; that of the queries unless one is given.
        """
        batch, heads, length, _ = q_BHTE.shape
        on_cpu = (device_type or q_BHTE.device.type) == "cpu"
        num_scores = CPU_SCORES if on_cpu else GPU_SCORES
        group_size = max(1, num_scores // (heads * min(length, BLOCK) ** 2))
        for number, start in enumerate(range(0, batch, group_size)):
            rows = slice(start, start + group_size)
            first = None if self.first_BT is None else self.first_BT[rows]
            reach = None if self.reach is None else self.reach[:, rows]
            seed = None if self.seed is None else self.seed + (number << 32)
            yield rows, replace(self, first_BT=first, reach=reach, seed=seed)

    def hidden(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """[B or 1, 1, 1, n, m], True where the query does not see the key."""
        query_n1 = torch.arange(queries.start, queries.stop, device=device)[:, None]
        key_m = torch.arange(keys.start, keys.stop, device=device)
        hidden = key_m > query_n1
        if self.window is not None:
            hidden = hidden | (query_n1 - key_m >= self.window)
        if self.first_BT is not None:
            hidden = hidden | (key_m < self.first_BT[:, None, None, queries, None])
        return hidden if hidden.ndim == 5 else hidden[None, None, None]

    def capped(self, scores: Tensor) -> Tensor:
        return (
            scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)
        )

    def dropped(self, tile: Tile, shares: Tensor) -> Tensor:
        """True where a share is dropped, from 16 random bits; forward and backward of one call get the same."""
        assert self.seed is not None
        generator = torch.Generator(shares.device)
        generator.manual_seed(_mixed(int(self.seed) + tile.number))
        num_words = -(-shares.numel() // 4)  # an int64 has four int16
        random_words = torch.empty(num_words, dtype=torch.int64, device=shares.device)
        random_words.random_(-(2**63), None, generator=generator)
        random_int16 = random_words.view(torch.int16)[: shares.numel()].view(shares.shape)
        return random_int16 < self._dropped_of_65536 - 32768

    @property
    def _dropped_of_65536(self) -> int:
        return min(round(self.dropout * 65536), 65535)

    @property
    def boost(self) -> float:
        """The factor of kept probabilities, which preserves their expectation under dropout."""
        return 65536 / (65536 - self._dropped_of_65536)


def _mixed(value: int) -> int:
    """splitmix64's finalizer (Steele et al., OOPSLA 2014), so that neighboring tiles have unrelated generators."""
    value = (value * 0x9E3779B97F4A7C15) % 2**64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) % 2**64
    return (value ^ value >> 31) % 2**63


def reach_of(first_BT: Tensor) -> Tensor:
    """[2, B, blocks] on the CPU: the lowest and the highest document start among the queries of each block."""
    # Starts never decrease along a row: a block's first query has the lowest, its last the highest.
    lowest_BN = first_BT[:, ::BLOCK]
    highest_BN = torch.cat([first_BT[:, BLOCK - 1 :: BLOCK], first_BT[:, -1:]], 1)
    return torch.stack([lowest_BN, highest_BN[:, : lowest_BN.shape[1]]]).cpu()


def _grouped(x_BHTE: Tensor, key_heads: int) -> Tensor:
    """[B, K, G, T, E], contiguous: its tiles then multiply without a copy of the full tensor."""
    return torch.unflatten(x_BHTE.contiguous(), 1, (key_heads, -1))


def _scores(query: Tensor, key: Tensor, call: AttentionCall) -> Tensor:
    """[B, K, G, n, m] from query [B, K, G, n, E] (scaled already) and key [B, K, m, E]; soft-capped, not masked."""
    scores = (query.flatten(2, 3) @ key.mT).to(torch.promote_types(query.dtype, torch.float32))
    return torch.unflatten(call.capped(scores), 2, query.shape[2:4])


def forward(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """The output [B, H, T, E], [B, T, H, E] in memory, and the log-sum-exp [B, H, T]."""
    out_BHTE = like_projection(q_BHTE)
    sums_BHT = sums_like(q_BHTE)
    q = _grouped(q_BHTE, k_BKTE.shape[1])
    k = k_BKTE.contiguous()
    v = v_BKTE.contiguous()
    for queries, tiles in call.query_blocks(q_BHTE.shape[2]):
        query = q[..., queries, :] * call.scale
        # Online softmax: shares are relative to the largest score so far, and the sums of shares
        # and of weighted values are scaled down when a tile has a larger one.
        value_sum = torch.zeros_like(query, dtype=sums_BHT.dtype)
        share_sum = torch.zeros_like(value_sum[..., :1])
        max_score = torch.full_like(share_sum, float("-inf"))
        for tile in tiles:
            scores = _scores(query, k[:, :, tile.keys], call)
            if tile.masked:
                scores.masked_fill_(call.hidden(queries, tile.keys, scores.device), float("-inf"))
            new_max_score = torch.maximum(max_score, scores.amax(-1, keepdim=True))
            shares = scores.sub_(new_max_score).exp_()
            scale_down = max_score.sub_(new_max_score).exp_()
            share_sum.mul_(scale_down).add_(shares.sum(-1, keepdim=True))
            # Dropped shares still count in the softmax's sum.
            if call.dropout:
                shares.masked_fill_(call.dropped(tile, shares), 0.0)
            tile_values = shares.to(v.dtype).flatten(2, 3) @ v[:, :, tile.keys]
            value_sum.mul_(scale_down).add_(torch.unflatten(tile_values, 2, query.shape[2:4]))
            max_score = new_max_score
        out_BHTE[:, :, queries] = value_sum.mul_(call.boost).div_(share_sum).flatten(1, 2)
        sums_BHT[:, :, queries] = (max_score + share_sum.log_()).flatten(1, 2).squeeze(-1)
    return out_BHTE, sums_BHT


def backward(
    grad_BHTE: Tensor,
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    out_BHTE: Tensor,
    sums_BHT: Tensor,
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: with p the shares, dS = p (dP - sum of dO O), through the soft-cap's slope.

    arXiv:2205.14135, algorithm 4.
    """
    key_heads = k_BKTE.shape[1]
    exact_dtype = sums_BHT.dtype
    dq_BHTE = like_projection(q_BHTE)
    dk = torch.zeros(k_BKTE.shape, dtype=exact_dtype, device=k_BKTE.device)
    dv = torch.zeros(v_BKTE.shape, dtype=exact_dtype, device=v_BKTE.device)
    q = _grouped(q_BHTE, key_heads)
    grad = _grouped(grad_BHTE, key_heads)
    k = k_BKTE.contiguous()
    v = v_BKTE.contiguous()
    sums = _grouped(sums_BHT, key_heads)[..., None]
    delta = _grouped((grad_BHTE.to(exact_dtype) * out_BHTE).sum(-1), key_heads)[..., None]
    for queries, tiles in call.query_blocks(q_BHTE.shape[2]):
        query = q[..., queries, :] * call.scale
        d_out = grad[..., queries, :].flatten(2, 3) * call.boost
        d_query = torch.zeros(d_out.shape, dtype=exact_dtype, device=q.device)
        for tile in tiles:
            # The shares of forward again, from the log-sum-exp instead of the running maximum.
            key = k[:, :, tile.keys]
            value = v[:, :, tile.keys]
            scores = _scores(query, key, call)
            slope = (
                None if call.softcap is None else (scores / call.softcap).square_().neg_().add_(1)
            )
            shares = scores.sub_(sums[..., queries, :]).exp_()
            if tile.masked:
                shares.masked_fill_(call.hidden(queries, tile.keys, shares.device), 0.0)
            # Only kept shares have met values; the softmax's gradient needs all of them.
            d_shares = torch.unflatten((d_out @ value.mT).to(exact_dtype), 2, query.shape[2:4])
            kept_shares = shares
            if call.dropout:
                dropped = call.dropped(tile, shares)
                kept_shares = shares.masked_fill(dropped, 0.0)
                d_shares.masked_fill_(dropped, 0.0)
            dv[:, :, tile.keys] += kept_shares.to(v.dtype).flatten(2, 3).mT @ d_out

            # Through the softmax and the soft-cap to the scores, and from these to queries and keys.
            d_scores = d_shares.sub_(delta[..., queries, :]).mul_(shares)
            if slope is not None:
                d_scores.mul_(slope)
            d_scores = d_scores.to(q.dtype).flatten(2, 3)
            d_query += d_scores @ key
            dk[:, :, tile.keys] += d_scores.mT @ query.flatten(2, 3)
        dq_BHTE[:, :, queries] = torch.unflatten(
            d_query.mul_(call.scale), 2, query.shape[2:4]
        ).flatten(1, 2)
    return dq_BHTE, dk.to(k_BKTE.dtype), dv.to(v_BKTE.dtype)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: QueryDocuments, options: Options
) -> tuple[Tensor, Tensor]:
    out_BHTE = like_projection(q)
    sums_BHT = sums_like(q)
    call = AttentionCall(documents.first_BT, documents.reach, documents.seed, *options.numbers)
    for rows, group_call in call.groups(q):
        out_BHTE[rows], sums_BHT[rows] = forward(q[rows], k[rows], v[rows], group_call)
    return out_BHTE, sums_BHT


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
    dq = like_projection(q)
    dk = like_projection(k)
    dv = like_projection(v)
    call = AttentionCall(documents.first_BT, documents.reach, documents.seed, *options.numbers)
    for rows, group_call in call.groups(q):
        dq[rows], dk[rows], dv[rows] = backward(
            grad[rows], q[rows], k[rows], v[rows], output[rows], sums[rows], group_call
        )
    return dq, dk, dv


# Document starts come with their `reach_of`.
blockwise = attention_operator("blockwise", _forward, _backward, sums=sums_like)
