"""Sampling: the settings, the distribution that they make of logits, and a token of it.

A text of its own has a stream of random numbers, and penalties of what it says: `sample_token`. Rows of completions
take numbers that are given: `sample_each_row`.

Legend: N completions, V vocabulary, C pieces of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.core.device import computes_float64, is_accelerator, sent
from bloomery.core.errors import UserError

IMPOSSIBLE = float("-inf")
COLDEST = 1e-4  # below it float32 logits overflow, and the likeliest token is certain anyway


LEAST_TOP_P = 1e-30  # of a top_p: the likeliest token stays
# The likeliest tokens, which nearly always reach top_p: sorting a full vocabulary takes milliseconds.
HEAD = 1024


PIECE = 256  # entries of the vocabulary that are summed before the search for a token


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings. Temperature 0 is greedy; filters run in the order of the fields.

    `logit_bias` is added to the logits of tokens. `repetition_penalty` divides positive logits of tokens that occurred,
    and multiplies negative ones (Keskar et al. 2019); `frequency_penalty` is subtracted for each time that a token was
    generated, `presence_penalty` once, as by OpenAI; no sequence of `no_repeat_ngram_size` tokens occurs twice;
    `stop_ids` end the text and are not part of it, and are not sampled before `min_new_tokens`. `top_k` keeps the k
    likeliest; `top_p` the fewest whose probabilities add up to p; `min_p` those at least p times as likely as the
    likeliest. Completions that are sampled in rows have no penalties, and their stop id is part of them.
    """

    max_new_tokens: int = 200
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert (
            self.temperature >= 0
            and self.repetition_penalty > 0
            and 0 < self.top_p <= 1
            and 0 <= self.min_p <= 1
        )

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on the text before it, or on a bias."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1.0
            or self.frequency_penalty
            or self.presence_penalty
            or self.no_repeat_ngram_size
            or self.min_new_tokens
        )


def known_ids(*ids: int | None) -> tuple[int, ...]:
    """The distinct ids that are not None: end tokens of a tokenizer, a model and a template."""
    return tuple(sorted({token for token in ids if token is not None}))


class NotFinite(UserError):
    """The logits of a model hold NaN or infinity."""

    def __init__(self) -> None:
        super().__init__(
            "the model answers with numbers that are not finite: its weights are damaged or have diverged",
            where="the model",
            fix="try an earlier checkpoint with --step, or another copy of the model",
        )


def sample_token(
    logits: Tensor,
    prompt: Sequence[int],
    new: Sequence[int],
    sampling: Sampling,
    random: torch.Generator,
) -> int:
    """A token from float32 logits [V] on the CPU, after the prompt and the new tokens."""
    penalized_logits = penalized(logits, prompt, new, sampling)
    if sampling.temperature < COLDEST:
        return int(penalized_logits.argmax())
    distribution = next_distribution(penalized_logits, sampling)
    return int(torch.multinomial(distribution, 1, generator=random))


def penalized(
    logits: Tensor, prompt: Sequence[int], new: Sequence[int], sampling: Sampling
) -> Tensor:
    """Logits [V] after the biases, and the penalties of tokens that occurred; the same tensor where there are none."""
    if sampling.logit_bias:
        ids = torch.tensor([token for token, _ in sampling.logit_bias])
        logits = logits.index_add(0, ids, torch.tensor([bias for _, bias in sampling.logit_bias]))
    # Lower logits, for repetition in all of the text and for frequency in the new tokens.
    if sampling.repetition_penalty != 1.0:
        ids = torch.tensor(sorted({*prompt, *new}))
        id_logits = logits[ids]
        penalty = sampling.repetition_penalty
        penalized_logits = torch.where(id_logits > 0, id_logits / penalty, id_logits * penalty)
        logits = logits.index_copy(0, ids, penalized_logits)
    if new and (sampling.frequency_penalty or sampling.presence_penalty):
        ids, counts = torch.tensor(new).unique(return_counts=True)
        logits = logits.index_add(
            0, ids, -(sampling.frequency_penalty * counts + sampling.presence_penalty)
        )

    # Impossible tokens: an end that is too early, and the end of an n-gram that occurred.
    banned = list(sampling.stop_ids) if len(new) < sampling.min_new_tokens else []
    if size := sampling.no_repeat_ngram_size:
        tokens = [*prompt, *new]
        ngram_start = tokens[len(tokens) - size + 1 :]
        for start in range(len(tokens) - size + 1):
            end = start + size - 1
            if tokens[start:end] == ngram_start:
                banned.append(tokens[end])
    if not banned:
        return logits

    # A grammar may allow nothing but banned tokens: then they stay.
    allowed_logits = logits.index_fill(0, torch.tensor(banned), float("-inf"))
    return allowed_logits if allowed_logits.max() > float("-inf") else logits


def next_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [V] after temperature, top-k, top-p and min-p; at least one token stays."""
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = logits.masked_fill(below_top_k(logits, sampling.top_k), IMPOSSIBLE)
    if sampling.top_p < 1.0:
        # Sorting the largest probabilities is enough unless they do not reach p together.
        shares = logits.softmax(-1)
        head, order = shares.topk(min(HEAD, len(shares)))
        if len(head) < len(shares) and head.sum() < max(sampling.top_p, LEAST_TOP_P):
            head, order = shares.sort(descending=True)
        top_ids = order[~beyond_top_p(head, sampling.top_p)]
        logits = torch.full_like(logits, IMPOSSIBLE).index_copy(0, top_ids, logits[top_ids])
    shares = logits.softmax(-1)
    if sampling.min_p > 0.0:
        shares = shares.masked_fill(shares < sampling.min_p * shares.max(), 0.0)
    return shares / shares.sum()


def filtered_rows(logprobs_NV: Tensor, sampling: Sampling) -> Tensor:
    """The log-probabilities of what top-k, top-p and min-p leave, over the tokens that they leave.

    As `next_distribution` for each row; but training reads these logarithms, and a row must not depend on the others: a
    stable sort takes tokens of one probability in one order for any number of rows.
    """
    if sampling.top_k is not None and sampling.top_k < logprobs_NV.shape[1]:
        is_dropped_NV = below_top_k(logprobs_NV, sampling.top_k)
        logprobs_NV = logprobs_NV.masked_fill(is_dropped_NV, IMPOSSIBLE).log_softmax(-1)
    if sampling.top_p < 1.0:
        shares_NV, order_NV = logprobs_NV.exp().sort(descending=True, stable=True)
        is_dropped_NV = beyond_top_p(shares_NV, sampling.top_p)
        is_dropped_NV = torch.zeros_like(is_dropped_NV).scatter(1, order_NV, is_dropped_NV)
        logprobs_NV = logprobs_NV.masked_fill(is_dropped_NV, IMPOSSIBLE).log_softmax(-1)
    if sampling.min_p > 0.0:
        largest_N1 = logprobs_NV.max(-1, keepdim=True).values
        is_dropped_NV = logprobs_NV.exp() < sampling.min_p * largest_N1.exp()
        logprobs_NV = logprobs_NV.masked_fill(is_dropped_NV, IMPOSSIBLE).log_softmax(-1)
    return logprobs_NV


def below_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Whether a token of the last dimension is less likely than the k-th likeliest."""
    return logits < logits.topk(top_k).values[..., -1:]


def beyond_top_p(sorted_shares: Tensor, top_p: float) -> Tensor:
    """Of falling probabilities, those whose token goes: the likelier ones reach p without it."""
    return rising_sums(sorted_shares) - sorted_shares >= max(top_p, LEAST_TOP_P)


def rising_sums(values: Tensor) -> Tensor:
    """The sums up to each element of the last dimension, of numbers from 0 that sum up to 2**18 at most.

    A GPU may add real numbers in another order each time, so PyTorch refuses its `cumsum` where a run is to repeat
    bitwise (`torch.use_deterministic_algorithms`). Whole numbers have one sum in any order: there the numbers are cut
    to multiples of 2**-44, and a token is never drawn whose share is 2**-44 of the likeliest.
    """
    if not (torch.are_deterministic_algorithms_enabled() and is_accelerator(values.device)):
        return values.cumsum(-1)
    whole_sums = (values * 2.0**44).long().cumsum_(-1)
    return whole_sums.to(values.dtype).div_(2.0**44)


def sample_each_row(
    logits_NV: Tensor, uniforms_N: Tensor, sampling: Sampling
) -> tuple[list[int], list[float]]:
    """A token of each row, and its log-probability.

    The token is where the cumulative distribution passes the row's uniform number. The host waits for the device once.
    Raises NotFinite.
    """
    assert sampling.temperature > 0 and not sampling.has_penalties
    # A device without float64 leaves the draw to the host, which has to wait for it anyway.
    if not computes_float64(logits_NV.device):
        logits_NV = logits_NV.cpu()
    # 1. Probabilities, up to a factor of each row: a pass over all logits for the logarithm of their sum is saved.
    if sampling.temperature != 1.0:
        logits_NV = logits_NV / sampling.temperature
    least_N, most_N = logits_NV.aminmax(dim=-1)
    if sampling.top_k is not None or sampling.top_p < 1.0 or sampling.min_p > 0.0:
        logits_NV = filtered_rows(logits_NV.log_softmax(-1), sampling)
        most_N = logits_NV.amax(-1)
    weights_NV = (logits_NV - most_N[:, None]).exp_()

    # 2. The piece of the vocabulary, then the token in it, where the cumulative sum passes the number. The sum of all
    # probabilities differs from 1 by rounding: the number is taken of what they sum up to.
    padding = -weights_NV.shape[1] % PIECE
    pieces_NCV = F.pad(weights_NV, (0, padding)).view(len(weights_NV), -1, PIECE)
    ends_NC = rising_sums(pieces_NCV.sum(-1).double())
    total_N1 = ends_NC[:, -1:]
    passed_N1 = sent(uniforms_N, ends_NC.device)[:, None] * total_N1
    piece_N1 = _passing(ends_NC, passed_N1)
    before_N1 = F.pad(ends_NC, (1, 0)).gather(1, piece_N1)
    piece_NV = pieces_NCV.gather(1, piece_N1[:, :, None].expand(-1, -1, PIECE))[:, 0]
    ids_N1 = piece_N1 * PIECE + _passing(before_N1 + rising_sums(piece_NV.double()), passed_N1)

    # 3. The host needs the tokens, and with them gets the rest. NaN has led to no token.
    ids_N1 = ids_N1.clamp(max=logits_NV.shape[1] - 1)
    logps_N1 = (logits_NV.gather(1, ids_N1) - most_N[:, None]).double() - total_N1.log()
    is_finite_N = least_N.isfinite() & total_N1[:, 0].isfinite()
    results_3N = torch.stack([ids_N1[:, 0].double(), logps_N1[:, 0].float().double(), is_finite_N])
    ids, logps, is_finite = results_3N.tolist()
    if not all(is_finite):
        raise NotFinite
    return [int(id_) for id_ in ids], logps


def _passing(sums_NC: Tensor, numbers_N1: Tensor) -> Tensor:
    """int64 [N, 1]: where the rising sums of a row pass its number; by rounding none may: the last that is a rise."""
    passing_N1 = torch.searchsorted(sums_NC, numbers_N1, right=True)
    last_N1 = torch.searchsorted(sums_NC, sums_NC[:, -1:].contiguous())
    # NaN passes nothing, and has no place.
    return torch.minimum(passing_N1, last_N1).clamp(max=sums_NC.shape[1] - 1)
