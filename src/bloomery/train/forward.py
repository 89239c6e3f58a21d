"""One micro-batch through the model: in the run's precision, documents kept apart, with or without gradients."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from bloomery.data.loading.loader import Batch
from bloomery.model.adapters.lora import is_adapter
from bloomery.model.decoder import Decoder
from bloomery.model.heads import Head


def product_dtype(precision: str) -> torch.dtype:
    """What matrix products read, and so what frozen matrices are kept in."""
    return {"float32": torch.float32, "float16": torch.float16}.get(precision, torch.bfloat16)


def prepare_weights(model: Decoder, precision: str) -> None:
    """Trained weights are float32 ones, of `bfloat16-pure` bfloat16 ones; an adapter's have the dtype that was asked.

    Frozen ones are kept as matrix products read them. float16 keeps frozen embeddings and norms in float32 all the
    same, so that the sums between the layers, which outgrow 65,504 in some models, are float32 too.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not is_adapter(name):
                parameter.data = parameter.data.to(_kept_as(parameter, module, model, precision))


def _kept_as(parameter: nn.Parameter, module: nn.Module, model: Decoder, precision: str) -> torch.dtype:
    if parameter.requires_grad:
        return torch.bfloat16 if precision == "bfloat16-pure" else torch.float32
    embeds = parameter is model.model.embed_tokens.weight
    if precision == "float16" and (embeds or not isinstance(module, nn.Linear)):
        return torch.float32
    return product_dtype(precision)


def precision_context(precision: str, device: str) -> AbstractContextManager[object]:
    """Matrix products in half precision over float32 weights. `bfloat16-pure` needs none: its weights are bfloat16."""
    if precision not in ("bfloat16", "float16"):
        return nullcontext()
    return torch.autocast(device, dtype=product_dtype(precision))


def in_precision(model: Decoder, precision: str) -> None:
    """In place: every forward of the model runs in that precision, on the device that it is called on."""
    if precision in ("bfloat16", "float16"):
        device = next(model.parameters()).device.type
        whole = torch.autocast(device, dtype=product_dtype(precision))(model.forward)
        model.forward = whole  # type: ignore[method-assign]


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
def eval_mode(model: Decoder) -> Iterator[None]:
    """No gradients, no dropout, no random number drawn; the mode of before afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
