"""How far a model's probabilities are from a teacher's, in chunks: neither's logits ever exist whole.

Legend: as in `heads`; S the width of the teacher.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bloomery.model.heads import capped


@dataclass(frozen=True)
class Teacher:
    """`hidden` gives the last hidden states [B, T, S] of the batch, `output` and `softcap` what becomes of them."""

    hidden: Callable[[], Tensor]
    output: nn.Linear
    softcap: float | None


@dataclass(frozen=True)
class Divergence:
    """float32 [2, B, T]: the log-probability of each label, and KL(teacher || model) at that position in nats.

    Both are 0 where the weight is 0. The divergence is of softmax(logits / temperature). Logits of both models exist
    for `chunk` rows at a time and are computed anew in backward. Embeddings of one vocabulary may be padded to
    different sizes: to the teacher, what the model has more is impossible.
    """

    labels_BT: Tensor
    weights_BT: Tensor
    chunk: int
    temperature: float
    teacher: Teacher

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        learned = (self.weights_BT.flatten() != 0).nonzero().squeeze(1)
        with torch.no_grad():
            taught_NS = self.teacher.hidden().flatten(0, 1)[learned]
        shared = min(output.out_features, self.teacher.output.out_features)
        heads = output.weight, output.bias, *_first(self.teacher.output, shared)
        piece = partial(_scored, caps=(softcap, self.teacher.softcap), temperature=self.temperature)
        hidden_ND, labels_N = hidden_BTD.flatten(0, 1)[learned], self.labels_BT.flatten()[learned]
        pieces = [
            checkpoint(piece, h_CD, t_CS, *heads, labels_C, use_reentrant=False, preserve_rng_state=False)
            for h_CD, t_CS, labels_C in zip(
                *(torch.split(x, self.chunk) for x in (hidden_ND, taught_NS, labels_N)), strict=True
            )
        ]
        found_2N = torch.cat(pieces, 1)
        whole = found_2N.new_zeros(2, self.labels_BT.numel()).index_copy(1, learned, found_2N)
        return whole.view(2, *self.labels_BT.shape)


def _first(output: nn.Linear, rows: int) -> tuple[Tensor, Tensor | None]:
    """Some architectures of transformers have a bias on their logits."""
    return output.weight[:rows], None if output.bias is None else output.bias[:rows]


def _scored(
    h_CD: Tensor,
    t_CS: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    weight_VS: Tensor,
    taught_bias_V: Tensor | None,
    labels_C: Tensor,
    *,
    caps: tuple[float | None, float | None],
    temperature: float,
) -> Tensor:
    """[2, C]."""
    logits_CV = capped(_exact(F.linear(h_CD.to(weight_VD.dtype), weight_VD, bias_V)), caps[0])
    with torch.no_grad():
        taught_CV = capped(_exact(F.linear(t_CS.to(weight_VS.dtype), weight_VS, taught_bias_V)), caps[1])
        taught_CV = torch.log_softmax(taught_CV / temperature, 1)
    scores_C = torch.log_softmax(logits_CV, 1).gather(1, labels_C[:, None]).squeeze(1)
    learned_CV = torch.log_softmax(logits_CV / temperature, 1)[:, : len(weight_VS)]
    divergence_C = (taught_CV.exp() * (taught_CV - learned_CV)).sum(1)
    return torch.stack([scores_C, divergence_C])


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
