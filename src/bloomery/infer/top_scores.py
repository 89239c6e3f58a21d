"""The likeliest tokens of a model at each token of an answer, by one forward over prompt and answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from bloomery.data.batch import Batch
from bloomery.data.top_scores import TopIds, TopLogps
from bloomery.infer.forward import eval_mode, forward_all, to_device
from bloomery.model.decoder import Decoder
from bloomery.model.heads import capped_logits

CHUNK = 256  # rows whose logits exist at once


@final
@dataclass(frozen=True)
class TopTokens:
    """float64 [2, N, K]: log-probabilities of the K likeliest next tokens at the last N positions, and their ids."""

    num_positions: int
    top: int

    def __call__(self, hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
        results = []
        for hidden_CD in hidden_BTD.flatten(0, 1)[-self.num_positions :].split(CHUNK):
            logits_CV = capped_logits(hidden_CD, output.weight, output.bias, softcap)
            logprobs_CK, ids_CK = torch.log_softmax(logits_CV, 1).topk(self.top, 1)
            results.append(torch.stack([logprobs_CK.double(), ids_CK.double()]))
        return torch.cat(results, 1)


@torch.no_grad()
def top_scores(
    decoder: Decoder, prompt_ids: Sequence[int], answer_ids: Sequence[int], top: int
) -> tuple[TopIds, TopLogps]:
    """[answer, `top`] ids and log-probabilities in nats, the likeliest first."""
    ids = torch.tensor([[*prompt_ids, *answer_ids]])[:, :-1]
    batch = Batch(
        tokens=ids,
        labels=ids,
        loss_mask=torch.zeros(ids.shape),
        positions=torch.arange(ids.shape[1])[None],
        documents=torch.zeros_like(ids),
    )
    with eval_mode(decoder):
        (output,) = forward_all(
            decoder,
            [to_device(batch, decoder.device)],
            [TopTokens(len(answer_ids), top)],
            precision="float32",  # of the weights, as they are
        )
    logps, top_ids = output.head.cpu().numpy()
    return top_ids.astype("int32"), logps.astype("float32")
