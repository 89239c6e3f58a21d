"""Per-token loss of documents, log-likelihood of continuations, and rewards of pairs, for `eval` and the report."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.model.decoder import Decoder, Output
from bloomery.model.heads import LabelScores, Values, capped
from bloomery.model.norms import widened
from bloomery.train.forward import eval_mode
from bloomery.train.losses import reward_loss

_TOKENS_A_FORWARD = 8192
_TOKENS_A_GROUP = 65_536  # sorted together, so that windows of one length share a forward
_LOGITS_AT_ONCE = 2**24  # elements: 64 MiB in float32


@dataclass(frozen=True)
class Window:
    """Tokens [start, end) of a document; those from `scored` on are scored, the rest is context."""

    document: int
    start: int
    end: int
    scored: int


def windows(length: int, context: int, document: int = 0) -> Iterator[Window]:
    """Half-overlapping windows of at most `context` tokens that score each token but the first once.

    Every scored token has at least half a context before it (the sliding window of transformers' guide to perplexity).
    """
    assert context >= 2, "a window of one token scores nothing"
    stride = max(context // 2, 1)
    scored = 1
    for start in range(0, length, stride):
        end = min(start + context, length)
        if end > scored:
            yield Window(document, start, end, max(scored, start + 1))
        scored = end
        if end == length:
            return


def score_documents(
    decoder: Decoder, documents: Iterable[Sequence[int]], *, context: int | None = None
) -> Iterator[np.ndarray]:
    """For each document, float32 [len - 1]: the loss of each token but the first, in nats.

    `context` (default: `max_positions`) limits the attention span. Memory is bounded by the longest document.
    """
    context = min(context or decoder.config.max_positions, decoder.config.max_positions)
    for group in _groups(documents):
        nats = [np.zeros(max(len(tokens) - 1, 0), np.float32) for tokens in group]
        pieces = [
            piece for i, tokens in enumerate(group) for piece in windows(len(tokens), context, i)
        ]
        pieces.sort(key=lambda piece: piece.start - piece.end)
        begin = 0
        while begin < len(pieces):  # the longest first: a batch is padded to its first
            rows = max(_TOKENS_A_FORWARD // (pieces[begin].end - pieces[begin].start), 1)
            batch = pieces[begin : begin + rows]
            begin += rows
            for piece, scores in zip(batch, _score(decoder, group, batch), strict=True):
                nats[piece.document][piece.scored - 1 : piece.end - 1] = scores
        yield from nats


def _groups(documents: Iterable[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    group: list[Sequence[int]] = []
    size = 0
    for tokens in documents:
        group.append(tokens)
        size += len(tokens)
        if size >= _TOKENS_A_GROUP:
            yield group
            group = []
            size = 0
    if group:
        yield group


def _score(
    decoder: Decoder, documents: list[Sequence[int]], batch: list[Window]
) -> list[np.ndarray]:
    """The per-token loss of each window's scored tokens. Padding is at the end, outside causal attention."""
    device = next(decoder.parameters()).device
    width = batch[0].end - batch[0].start - 1
    tokens_BT = torch.zeros(len(batch), width, dtype=torch.int64)
    labels_BT = torch.zeros_like(tokens_BT)
    loss_mask_BT = torch.zeros(len(batch), width)
    for row, piece in enumerate(batch):
        ids = torch.tensor(documents[piece.document][piece.start : piece.end], dtype=torch.int64)
        tokens_BT[row, : len(ids) - 1], labels_BT[row, : len(ids) - 1] = ids[:-1], ids[1:]
        loss_mask_BT[row, piece.scored - 1 - piece.start : len(ids) - 1] = 1
    chunk = max(_LOGITS_AT_ONCE // decoder.config.vocab_size, 1)
    with eval_mode(decoder):
        output: Output = decoder(
            tokens_BT.to(device),
            head=LabelScores(labels_BT.to(device), loss_mask_BT.to(device), chunk),
        )
    scores_BT = output.head.float().cpu().numpy()
    return [
        -scores_BT[row, piece.scored - 1 - piece.start : piece.end - 1 - piece.start]
        for row, piece in enumerate(batch)
    ]


@dataclass(frozen=True)
class Likelihood:
    """Of a continuation: its log-probability in nats, and whether greedy decoding would write it."""

    logprob: float
    greedy: bool


@dataclass(frozen=True)
class _ScoresAt:
    """float32 [2, N]: the log-probability of label n at place n of B * T, and 1 where no token is likelier."""

    places_N: Tensor
    labels_N: Tensor
    chunk: int

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        """[2, N]: log-probabilities of the labels, and 1 where a label is the likeliest token."""
        hidden_ND = hidden_BTD.flatten(0, 1)[self.places_N]
        found = []
        for hidden_CD, labels_C in zip(
            hidden_ND.split(self.chunk), self.labels_N.split(self.chunk), strict=True
        ):
            scores_CV = capped(widened(output(hidden_CD)), softcap).log_softmax(-1)
            scores_C = scores_CV.gather(1, labels_C[:, None]).squeeze(1)
            found.append(
                torch.stack([scores_C, (scores_CV.argmax(-1) == labels_C).to(scores_C.dtype)])
            )
        return torch.cat(found, 1)


def score_continuations(
    decoder: Decoder, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[Likelihood]:
    """The likelihood of each continuation after its context, both with at least one token.

    Contexts are truncated at their start. Choices of one token after one context share a row. Raises UserError for a
    continuation longer than the model's context.
    """
    most = decoder.config.max_positions
    device = next(decoder.parameters()).device
    rows: dict[tuple[int, ...], list[int]] = {}  # the input of a row, and the pairs that it scores
    for number, (context, continuation) in enumerate(pairs):
        if len(continuation) > most:
            problem = f"a continuation of {len(continuation):,} tokens is longer than the context of {most:,}"
            raise UserError(
                problem, where="the task", fix="remove it, or use a model with a longer context"
            )
        rows.setdefault((*context, *continuation)[-most - 1 : -1], []).append(number)
    order = sorted(rows, key=len, reverse=True)
    begin = 0
    chunk = max(_LOGITS_AT_ONCE // decoder.config.vocab_size, 1)
    scores = [Likelihood(0.0, False)] * len(pairs)
    with eval_mode(decoder):
        while begin < len(order):  # longest first; padding is at the end, outside causal attention
            width = len(order[begin])
            batch = order[begin : begin + max(_TOKENS_A_FORWARD // width, 1)]
            begin += len(batch)
            tokens_BT = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in batch])
            numbers = [(row, number) for row, ids in enumerate(batch) for number in rows[ids]]
            sizes = [len(pairs[number][1]) for _, number in numbers]
            places = [
                row * width + len(batch[row]) - size + place
                for (row, _), size in zip(numbers, sizes, strict=True)
                for place in range(size)
            ]
            labels = [token for _, number in numbers for token in pairs[number][1]]
            head = _ScoresAt(
                torch.tensor(places, device=device), torch.tensor(labels, device=device), chunk
            )
            output: Output = decoder(tokens_BT.to(device), head=head)
            for (_, number), each_2C in zip(
                numbers, output.head.float().cpu().split(sizes, 1), strict=True
            ):
                scores[number] = Likelihood(
                    float(each_2C[0].double().sum()), bool(each_2C[1].all())
                )
    return scores


@dataclass(frozen=True)
class PairMetrics:
    """Means over pairs. `margin`: chosen minus rejected reward; `accuracy`: pairs with a positive margin; `loss`:
    -log sigmoid of the margin.
    """

    loss: float
    accuracy: float
    margin: float
    chosen_reward: float
    rejected_reward: float
    pairs: int


def score_pairs(decoder: Decoder, texts: Sequence[Sequence[int]]) -> PairMetrics:
    """Of at least one pair; texts 2i and 2i + 1 are prompt and chosen, prompt and rejected response."""
    values_1S = values_of(decoder, texts).double()[None]
    parts = reward_loss(values_1S, torch.arange(len(texts))[None])
    means = {name: float(some[0] / some[1]) for name, some in parts.metrics.items()}
    return PairMetrics(loss=float(parts.total / parts.count), **means, pairs=int(parts.count))


def values_of(decoder: Decoder, texts: Sequence[Sequence[int]]) -> Tensor:
    """float32 [texts], on the host: the value at the last token of each."""
    values = torch.zeros(len(texts))
    device = next(decoder.parameters()).device
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    begin = 0
    with eval_mode(decoder):
        while begin < len(order):  # longest first; padding is at the end, outside causal attention
            length = len(texts[order[begin]])
            numbers = order[begin : begin + max(_TOKENS_A_FORWARD // length, 1)]
            tokens_BT = torch.zeros(len(numbers), length, dtype=torch.int64)
            for row, number in enumerate(numbers):
                tokens_BT[row, : len(texts[number])] = torch.tensor(
                    texts[number], dtype=torch.int64
                )
            values_BT: Tensor = decoder(tokens_BT.to(device), head=Values()).head
            ends = torch.tensor([len(texts[number]) - 1 for number in numbers])
            values[numbers] = values_BT.float().cpu()[torch.arange(len(numbers)), ends]
            begin += len(numbers)
    return values
