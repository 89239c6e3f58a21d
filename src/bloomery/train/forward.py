"""Forward of a micro-batch in the run's precision, with document masking; evaluation mode."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bloomery.data.batch import Batch
from bloomery.model.adapters.lora import is_adapter
from bloomery.model.decoder import Decoder
from bloomery.model.heads import Head


def product_dtype(precision: str) -> torch.dtype:
    """The dtype of matmuls, and so of frozen matrices."""
    return {"float32": torch.float32, "float16": torch.float16}.get(precision, torch.bfloat16)


def prepare_weights(model: Decoder, precision: str) -> None:
    """Cast in place: trainable weights to float32 (`bfloat16-pure`: bfloat16), frozen ones to the matmul dtype.

    Adapters keep their dtype. float16 leaves frozen embeddings and norms in float32, so that the residual stream,
    which exceeds 65,504 in some models, is float32 too.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if is_adapter(name):
                continue
            dtype = product_dtype(precision)
            if parameter.requires_grad:
                dtype = torch.bfloat16 if precision == "bfloat16-pure" else torch.float32
            elif precision == "float16" and (
                parameter is model.model.embed_tokens.weight or not isinstance(module, nn.Linear)
            ):
                dtype = torch.float32
            parameter.data = parameter.data.to(dtype)


def precision_context(precision: str, device: str) -> AbstractContextManager[object]:
    """Autocast over float32 weights; nothing for float32 and `bfloat16-pure`."""
    if precision not in ("bfloat16", "float16"):
        return nullcontext()
    return torch.autocast(device, dtype=product_dtype(precision))


def in_precision(model: Decoder, precision: str) -> None:
    """In place: every forward of the model runs in that precision."""
    if precision in ("bfloat16", "float16"):
        device = next(model.parameters()).device.type
        whole = torch.autocast(device, dtype=product_dtype(precision))(model.forward)
        model.forward = whole  # type: ignore[method-assign]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; from pinned memory the copy overlaps with the computation."""
    if device.type == "cpu":
        return batch
    return batch.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))


def forward(model: Decoder, batch: Batch, head: Head, *, precision: str) -> Tensor:
    """The head's output for a batch on the model's device, with document masking unless the backend is `sdpa`."""
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
    """Whether a forward applies dropout, the model's or an adapter's, or noise on its embeddings."""
    config = model.config
    rates: list[object] = [getattr(model.model, "embedding_noise", 0.0)]
    rates += [config.embedding_dropout, config.residual_dropout, config.attention_dropout]
    rates += [
        each.p if isinstance(each, nn.Dropout) else getattr(each, "dropout", 0)
        for each in model.modules()
    ]
    return model.training and any(isinstance(rate, float) and rate > 0 for rate in rates)


@contextmanager
def eval_mode(model: Decoder) -> Iterator[None]:
    """No gradients, dropout or random numbers inside the block; the previous mode afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        for module in (model, *model.model.layers):
            # without a backward, embeddings, head and last layer stay gathered
            if isinstance(module, FSDPModule):
                module.reshard()
