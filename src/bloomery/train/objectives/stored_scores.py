"""Distillation from a file of a teacher's likeliest tokens: forward KL with the rest of the probability as one outcome.

Let S be the K tokens of the file, t and m the probabilities of teacher and model, t' = 1 - sum of t over S, m' the
model's of all others. The divergence is sum over S of t log(t/m) + t' log(t'/m'): KL(t || m) of K + 1 outcomes. It is
at most that of all tokens (data processing inequality; Cover and Thomas, Elements of Information Theory, 2.8), and
equal to it where S is the vocabulary, or where the model divides its rest as the teacher does.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bloomery.data.batch import Batch
from bloomery.infer.forward import loss_positions_in
from bloomery.model.heads import capped_logits

# In extras of a batch, [B, T, K]: the teacher's likeliest tokens, and their log-probabilities.
TOP_IDS = "top_ids"
TOP_LOGPS = "top_logps"


@final
@dataclass(frozen=True)
class StoredDivergence:
    """float32 [2, B, T]: the log-probability of each label, and the divergence from the stored scores, in nats.

    0 where the weight is 0. Logits exist for `chunk` rows at a time, and are recomputed in backward.
    """

    batch: Batch
    chunk: int

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        batch = self.batch
        loss_positions = loss_positions_in(batch)
        if loss_positions is None:
            loss_positions = batch.loss_mask.flatten().nonzero().squeeze(1)
        rows = (
            hidden_BTD.flatten(0, 1)[loss_positions],
            batch.labels.flatten()[loss_positions],
            batch.extras[TOP_IDS].flatten(0, 1)[loss_positions],
            batch.extras[TOP_LOGPS].flatten(0, 1)[loss_positions],
        )
        chunks = zip(*(torch.split(of_rows, self.chunk) for of_rows in rows), strict=True)
        scored = partial(_scores_and_divergence, softcap=softcap)
        results = [
            checkpoint(
                scored,
                output.weight,
                output.bias,
                *chunk,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for chunk in chunks
        ]
        loss_results = torch.cat(results, 1)
        blank_results = loss_results.new_zeros(len(loss_results), batch.labels.numel())
        all_results = blank_results.index_copy(1, loss_positions, loss_results)
        return all_results.view(-1, *batch.labels.shape)


def _scores_and_divergence(
    weight_VD: Tensor,
    bias_V: Tensor | None,
    hidden_CD: Tensor,
    labels_C: Tensor,
    top_ids_CK: Tensor,
    top_logps_CK: Tensor,
    *,
    softcap: float | None,
) -> Tensor:
    """[2, C], as in `StoredDivergence`."""
    logits_CV = capped_logits(hidden_CD, weight_VD, bias_V, softcap)
    logprobs_CV = torch.log_softmax(logits_CV, 1)
    scores_C = logprobs_CV.gather(1, labels_C[:, None]).squeeze(1)

    # Entries that only the teacher has, as padding of its vocabulary, are among the rest.
    vocab_size = len(weight_VD)
    is_shared_CK = top_ids_CK < vocab_size
    top_ids_CK = torch.where(is_shared_CK, top_ids_CK, 0).long()
    top_logps_CK = top_logps_CK.to(logprobs_CV.dtype).masked_fill(~is_shared_CK, -math.inf)
    top_CK = top_logps_CK.exp()
    log_ratios_CK = torch.where(is_shared_CK, top_logps_CK, 0) - logprobs_CV.gather(1, top_ids_CK)
    divergence_C = (top_CK * log_ratios_CK).sum(1)

    # All others are one outcome. Without any of them the logarithm of the model's would be that of nothing.
    if top_ids_CK.shape[1] < vocab_size:
        rest_C = (1 - top_CK.sum(1)).clamp(min=0)
        ids_CK = torch.where(is_shared_CK, top_ids_CK, top_ids_CK[:, :1])
        others_CV = logprobs_CV.scatter(1, ids_CK, -math.inf)
        divergence_C = divergence_C + torch.xlogy(rest_C, rest_C) - rest_C * others_CV.logsumexp(1)
    return torch.stack([scores_C, divergence_C])
