"""What a reward model says of texts, and how well it tells the chosen answer of a pair from the rejected one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bloomery.model.decoder import Decoder
from bloomery.model.heads import Values
from bloomery.train.forward import looking
from bloomery.train.losses import reward_loss

_TOKENS_A_FORWARD = 8192


@dataclass(frozen=True)
class Judgement:
    """Means over pairs. `margin` is how much more the chosen answer is worth than the rejected one, `accuracy` the
    share of pairs in which that is above 0, `loss` its -log sigmoid.
    """

    loss: float
    accuracy: float
    margin: float
    chosen_reward: float
    rejected_reward: float
    pairs: int


def judge_pairs(decoder: Decoder, texts: Sequence[Sequence[int]]) -> Judgement:
    """Of at least one pair; texts 2i and 2i + 1 are the chosen and the rejected answer, each after its prompt."""
    values_1S = values_of(decoder, texts).double()[None]
    parts = reward_loss(values_1S, torch.arange(len(texts))[None])
    means = {name: float(some[0] / some[1]) for name, some in parts.metrics.items()}
    return Judgement(loss=float(parts.total / parts.count), **means, pairs=int(parts.count))


def values_of(decoder: Decoder, texts: Sequence[Sequence[int]]) -> Tensor:
    """float32 [texts], on the host: the value at the last token of each, which sees all the others."""
    found = torch.zeros(len(texts))
    with looking(decoder):
        for numbers in _batches([len(text) for text in texts]):
            found[numbers] = _values(decoder, [texts[number] for number in numbers])
    return found


def _batches(lengths: list[int]) -> Iterator[list[int]]:
    """Numbers of texts, longest first, as many as are padded to some tokens."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    edges = [0]
    while edges[-1] < len(order):
        edges.append(edges[-1] + max(_TOKENS_A_FORWARD // lengths[order[edges[-1]]], 1))
    return (order[begin:end] for begin, end in pairwise(edges))


def _values(decoder: Decoder, texts: list[Sequence[int]]) -> Tensor:
    """Padding stands behind a text, where causal attention never looks."""
    tokens_BT = torch.zeros(len(texts), len(texts[0]), dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens_BT[row, : len(text)] = torch.tensor(text, dtype=torch.int64)
    values_BT: Tensor = decoder(tokens_BT.to(next(decoder.parameters()).device), head=Values())
    ends = torch.tensor([len(text) - 1 for text in texts])
    return values_BT.float().cpu()[torch.arange(len(texts)), ends]
