"""Forward of a micro-batch in the run's precision, with document masking; evaluation mode."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from bloomery.data.batch import Batch
from bloomery.model.adapters.lora import is_added
from bloomery.model.decoder import Decoder, Output
from bloomery.model.heads import Head

_AUTOCAST_PRECISIONS = ("bfloat16", "float16")  # over float32 weights


def matmul_dtype(precision: str) -> torch.dtype:
    """The dtype of matmuls, and so of frozen matrices."""
    return {"float32": torch.float32, "float16": torch.float16}.get(precision, torch.bfloat16)


def prepare_weights(model: Decoder, precision: str) -> None:
    """Cast in place: trainable weights to float32 (`bfloat16-pure`: bfloat16), frozen ones to the matmul dtype.

    Adapters keep their dtype. float16 leaves frozen embeddings and norms in float32, so that the residual stream,
    which exceeds 65,504 in some models, is float32 too.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if is_added(name):
                continue
            # A head that shares the matrix of the embeddings is a Linear, but holds an embedding.
            is_embedding = parameter is model.model.embed_tokens.weight
            is_matrix = isinstance(module, nn.Linear) and not is_embedding
            if parameter.requires_grad:
                dtype = torch.bfloat16 if precision == "bfloat16-pure" else torch.float32
            elif precision == "float16" and not is_matrix:
                dtype = torch.float32
            else:
                dtype = matmul_dtype(precision)
            parameter.data = parameter.data.to(dtype)


def precision_context(precision: str, device: str) -> AbstractContextManager[object]:
    """Autocast over float32 weights; nothing for float32 and `bfloat16-pure`."""
    if precision not in _AUTOCAST_PRECISIONS:
        return nullcontext()
    return torch.autocast(device, dtype=matmul_dtype(precision))


def autocast_forward(model: Decoder, precision: str) -> None:
    """Make every forward of the model run inside `precision_context`, in place: for those who call it themselves."""
    if precision in _AUTOCAST_PRECISIONS:
        autocast = torch.autocast(next(model.parameters()).device.type, matmul_dtype(precision))
        model.forward = autocast(model.forward)  # type: ignore[method-assign]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; from pinned memory the copy overlaps with the computation."""
    if device.type == "cpu":
        return batch
    return batch.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))


def forward(model: Decoder, batch: Batch, head: Head, *, precision: str) -> Output:
    """The output for a batch on the model's device, with document masking unless the backend is `sdpa`."""
    isolated = model.model.backend != "sdpa"
    with precision_context(precision, batch.tokens.device.type):
        output: Output = model(
            batch.tokens,
            positions_BT=batch.positions,
            documents_BT=batch.attended_documents if isolated else None,
            head=head,
        )
    return output


def has_dropout(model: Decoder) -> bool:
    """Whether a forward applies dropout, the model's or an adapter's, or noise on its embeddings."""
    if not model.training:
        return False
    config = model.config
    rates: list[object] = [
        getattr(model.model, "embedding_noise", 0.0),
        config.embedding_dropout,
        config.residual_dropout,
        config.attention_dropout,
    ]
    # Our modules call their rate `dropout`; those of PEFT and transformers are nn.Dropout.
    for module in model.modules():
        rates.append(module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", 0))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


@contextmanager
def eval_mode(model: Decoder) -> Iterator[None]:
    """No gradients, dropout or random numbers inside the block; the previous mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        # FSDP2 frees the embeddings, the head and the last layer in backward, which did not happen.
        for module in (model, *model.model.layers):
            if isinstance(module, FSDPModule):
                module.reshard()
