"""Per-token loss of documents, log-likelihood of continuations, and rewards of pairs, for `eval` and the report."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bloomery.core.device import sent
from bloomery.core.errors import UserError
from bloomery.core.progress import progress
from bloomery.core.units import counted
from bloomery.infer.forward import eval_mode
from bloomery.model.decoder import Decoder, Output
from bloomery.model.heads import LabelScores, ScoreSettings, Values, capped
from bloomery.model.norms import widened
from bloomery.train.objectives.losses import reward_loss

_TOKENS_A_FORWARD = 8192
_TOKENS_A_FORWARD_OF_CPU = (
    2048  # nearly as fast, and a large model says within seconds how far it is
)
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
    decoder: Decoder, documents: Sequence[Sequence[int]], *, context: int | None = None
) -> Iterator[np.ndarray]:
    """For each document, float32 [len - 1]: the loss of each token but the first, in nats.

    `context` (default: `max_positions`) limits the attention span. Memory is bounded by the longest document.
    """
    context = min(context or decoder.config.max_positions, decoder.config.max_positions)
    num_tokens = sum(max(len(tokens) - 1, 0) for tokens in documents)
    num_done = 0
    most_tokens = _tokens_a_forward(decoder.device)
    for group in _groups(documents):
        losses = [np.zeros(max(len(tokens) - 1, 0), np.float32) for tokens in group]
        pieces = list[Window]()
        for document, tokens in enumerate(group):
            pieces += windows(len(tokens), context, document)

        # The longest windows first, since a batch is padded to its first one.
        pieces.sort(key=lambda piece: piece.start - piece.end)
        position = 0
        while position < len(pieces):
            width = pieces[position].end - pieces[position].start
            batch = pieces[position : position + max(most_tokens // width, 1)]
            position += len(batch)
            for piece, scores in zip(batch, _score(decoder, group, batch), strict=True):
                losses[piece.document][piece.scored - 1 : piece.end - 1] = scores
                num_done += len(scores)
            progress(f"{num_done:,} of {num_tokens:,} tokens")
        yield from losses


def _tokens_a_forward(device: torch.device) -> int:
    return _TOKENS_A_FORWARD_OF_CPU if device.type == "cpu" else _TOKENS_A_FORWARD


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
    device = decoder.device
    width = batch[0].end - batch[0].start - 1
    tokens_BT = torch.zeros(len(batch), width, dtype=torch.int64)
    labels_BT = torch.zeros_like(tokens_BT)
    loss_mask_BT = torch.zeros(len(batch), width)
    for row, piece in enumerate(batch):
        ids = torch.tensor(documents[piece.document][piece.start : piece.end], dtype=torch.int64)
        tokens_BT[row, : len(ids) - 1] = ids[:-1]
        labels_BT[row, : len(ids) - 1] = ids[1:]
        loss_mask_BT[row, piece.scored - 1 - piece.start : len(ids) - 1] = 1
    chunk = max(_LOGITS_AT_ONCE // decoder.config.vocab_size, 1)
    loss_positions = loss_mask_BT.flatten().nonzero().squeeze(1)
    head = LabelScores(
        sent(labels_BT, device),
        sent(loss_mask_BT, device),
        ScoreSettings(chunk),
        sent(loss_positions, device),
    )
    with eval_mode(decoder):
        output: Output = decoder(sent(tokens_BT, device), head=head)
    scores_BT = output.head.float().cpu().numpy()
    return [
        -scores_BT[row, piece.scored - 1 - piece.start : piece.end - 1 - piece.start]
        for row, piece in enumerate(batch)
    ]


@dataclass(frozen=True)
class Likelihood:
    """A continuation's log-probability in nats, and whether greedy decoding would write it."""

    logprob: float
    greedy: bool


@dataclass(frozen=True)
class ScoresAt:
    """A head that scores label n at position n of B * T alone, so that no other logits are computed."""

    positions_N: Tensor
    labels_N: Tensor
    chunk: int  # positions whose logits are computed at once

    @classmethod
    def of(cls, positions: Sequence[int], labels: Sequence[int], decoder: Decoder) -> "ScoresAt":
        """On the decoder's device, with chunks by its vocabulary."""
        device = decoder.device
        chunk = max(_LOGITS_AT_ONCE // decoder.config.vocab_size, 1)
        return cls(sent(torch.tensor(positions), device), sent(torch.tensor(labels), device), chunk)

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        """[2, N]: log-probabilities of the labels, and 1 where a label is the likeliest token."""
        hidden_ND = hidden_BTD.flatten(0, 1)[self.positions_N]
        hidden_chunks = hidden_ND.split(self.chunk)
        label_chunks = self.labels_N.split(self.chunk)
        score_chunks = []
        for hidden_CD, labels_C in zip(hidden_chunks, label_chunks, strict=True):
            scores_CV = capped(widened(output(hidden_CD)), softcap).log_softmax(-1)
            scores_C = scores_CV.gather(1, labels_C[:, None]).squeeze(1)
            is_likeliest_C = (scores_CV.argmax(-1) == labels_C).to(scores_C.dtype)
            score_chunks.append(torch.stack([scores_C, is_likeliest_C]))
        return torch.cat(score_chunks, 1)


def score_continuations(
    decoder: Decoder, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[Likelihood]:
    """The likelihood of each continuation after its context, both with at least one token.

    Contexts are truncated at their start. Choices of one token after one context share a row. Raises UserError for a
    continuation longer than the model's context.
    """
    # Pairs by their input, which lacks the last token: choices of one token after one context have the same.
    max_positions = decoder.config.max_positions
    pairs_by_input: dict[tuple[int, ...], list[int]] = {}
    for pair, (context, continuation) in enumerate(pairs):
        if len(continuation) > max_positions:
            raise UserError(
                f"a continuation of {len(continuation):,} tokens is longer than the context"
                f" of {max_positions:,}",
                where="the task",
                fix="remove it, or use a model with a longer context",
            )
        input_ids = (*context, *continuation)[-max_positions - 1 : -1]
        pairs_by_input.setdefault(input_ids, []).append(pair)

    # Batches of the longest inputs first; padding is at the end, outside causal attention.
    inputs = sorted(pairs_by_input, key=len, reverse=True)
    device = decoder.device
    most_tokens = _tokens_a_forward(device)
    likelihoods = [Likelihood(0.0, False)] * len(pairs)
    position = 0
    with eval_mode(decoder):
        while position < len(inputs):
            width = len(inputs[position])
            batch = inputs[position : position + max(most_tokens // width, 1)]
            position += len(batch)
            tokens_BT = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in batch])

            # Each continuation is scored at the last positions of its row, one for each of its tokens.
            batch_pairs = list[int]()
            sizes = list[int]()
            positions = list[int]()
            labels = list[int]()
            for row, ids in enumerate(batch):
                row_end = row * width + len(ids)
                for pair in pairs_by_input[ids]:
                    continuation = pairs[pair][1]
                    batch_pairs.append(pair)
                    sizes.append(len(continuation))
                    positions += range(row_end - len(continuation), row_end)
                    labels += continuation
            head = ScoresAt.of(positions, labels, decoder)
            output: Output = decoder(sent(tokens_BT, device), head=head)
            pair_scores = output.head.float().cpu().split(sizes, 1)
            for pair, scores_2C in zip(batch_pairs, pair_scores, strict=True):
                logprob = float(scores_2C[0].double().sum())
                likelihoods[pair] = Likelihood(logprob, greedy=bool(scores_2C[1].all()))
            progress(f"{position:,} of {counted(len(inputs), 'inputs')}")
    return likelihoods


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
    """The metrics of at least one pair; texts 2i and 2i + 1 are prompt and chosen, prompt and rejected response."""
    values_1S = value_scores(decoder, texts).double()[None]
    parts = reward_loss(values_1S, torch.arange(len(texts))[None])
    means = {name: float(sums[0] / sums[1]) for name, sums in parts.metrics.items()}
    return PairMetrics(loss=float(parts.total / parts.count), **means, pairs=int(parts.count))


def forward_batches(lengths: Sequence[int], tokens_per_forward: int) -> list[list[int]]:
    """The numbers of the texts that share a forward, those of the longest first: padding is at the end."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    batches = []
    position = 0
    while position < len(order):
        length = lengths[order[position]]
        batches.append(order[position : position + max(tokens_per_forward // length, 1)])
        position += len(batches[-1])
    return batches


def value_scores(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    tokens_per_forward: int | None = None,
) -> Tensor:
    """float32 [texts], on the host: the value at the last token of each."""
    values = torch.zeros(len(texts))
    num_done = 0
    device = decoder.device
    with eval_mode(decoder):
        most_tokens = tokens_per_forward or _tokens_a_forward(device)
        for numbers in forward_batches([len(text) for text in texts], most_tokens):
            length = len(texts[numbers[0]])
            tokens_BT = torch.zeros(len(numbers), length, dtype=torch.int64)
            for row, number in enumerate(numbers):
                tokens_BT[row, : len(texts[number])] = torch.tensor(
                    texts[number], dtype=torch.int64
                )
            values_BT: Tensor = decoder(sent(tokens_BT, device), head=Values()).head
            ends = torch.tensor([len(texts[number]) - 1 for number in numbers])
            values[numbers] = values_BT.float().cpu()[torch.arange(len(numbers)), ends]
            num_done += len(numbers)
            progress(f"{num_done:,} of {counted(len(texts), 'responses')}")
    return values
