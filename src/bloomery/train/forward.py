"""One micro-batch through the model: in the run's precision, documents kept apart, with or without gradients."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from bloomery.data.loader import Batch
from bloomery.model.decoder import Decoder
from bloomery.model.heads import Head


def product_dtype(precision: str) -> torch.dtype:
    """What matrix products read, and so what frozen matrices are kept in."""
    return {"float32": torch.float32, "float16": torch.float16}.get(precision, torch.bfloat16)


def precision_context(precision: str, device: str) -> AbstractContextManager[object]:
    """Matrix products in half precision over float32 weights. `bfloat16-pure` needs none: its weights are bfloat16."""
    if precision not in ("bfloat16", "float16"):
        return nullcontext()
    return torch.autocast(device, dtype=product_dtype(precision))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch there; from pinned memory the copy runs beside the computation."""
    if device.type == "cpu":
        return batch
    return batch.each(lambda tensor: tensor.to(device, non_blocking=True))


def forward(model: Decoder, batch: Batch, head: Head, *, precision: str) -> Tensor:
    """What the head makes of a batch on the model's device. Documents are kept apart unless the kernel is `sdpa`."""
    isolated = model.model.backend != "sdpa"
    with precision_context(precision, batch.tokens.device.type):
        output: Tensor = model(
            batch.tokens,
            positions_BT=batch.positions,
            documents_BT=batch.documents if isolated else None,
            head=head,
        )
    return output


def drops(model: Decoder) -> bool:
    """Whether a forward draws what it drops: of a model that is trained with dropout, its own or an adapter's."""
    config = model.config
    rates: list[object] = [config.embedding_dropout, config.residual_dropout, config.attention_dropout]
    rates += [each.p if isinstance(each, nn.Dropout) else getattr(each, "dropout", 0) for each in model.modules()]
    return model.training and any(isinstance(rate, float) and rate > 0 for rate in rates)


@contextmanager
def looking(model: Decoder) -> Iterator[None]:
    """No gradients, no dropout, no random number drawn; the mode of before afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
