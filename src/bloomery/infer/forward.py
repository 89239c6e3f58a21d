"""Forward of a micro-batch in the run's precision, with document masking; evaluation mode."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import repeat

import torch
from torch import Tensor, nn

from bloomery.core.device import accelerator_type, can
from bloomery.core.errors import UserError
from bloomery.data.batch import Batch, Places
from bloomery.facts.counting import is_kept_float32, is_never_trained
from bloomery.model.adapters.lora import is_added
from bloomery.model.attention.attend import DocumentBorders, borders_of
from bloomery.model.decoder import Decoder, Output
from bloomery.model.experts import ExpertMLPs
from bloomery.model.forward_input import ForwardInput
from bloomery.model.heads import Head
from bloomery.model.io.parameters import is_sharded
from bloomery.model.pictures import SeenPictures

_AUTOCAST_PRECISIONS = ("bfloat16", "float16")  # over float32 weights


def matmul_dtype(precision: str) -> torch.dtype:
    """The dtype of matmuls, and so of frozen matrices."""
    return {"float32": torch.float32, "float16": torch.float16}.get(precision, torch.bfloat16)


def prepare_weights(model: Decoder, precision: str) -> None:
    """Cast in place: trainable weights to float32 (`bfloat16-pure`: bfloat16), frozen ones to the matmul dtype.

    Adapters keep their dtype. float16 leaves frozen embeddings and norms in float32, so that the residual stream,
    which exceeds 65,504 in some models, is float32 too.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if is_added(name):
                continue
            # A head that shares the matrix of the embeddings is a Linear, but holds an embedding.
            is_embedding = parameter is model.model.embed_tokens.weight
            is_matrix = isinstance(module, nn.Linear) and not is_embedding
            is_matrix |= isinstance(module, ExpertMLPs) and parameter.ndim == 3
            if is_never_trained(name) or is_kept_float32(model.config, name):
                dtype = torch.float32  # few numbers, which a training in full may not round
            elif parameter.requires_grad:
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
        autocast = torch.autocast(model.device.type, matmul_dtype(precision))
        model.forward = autocast(model.forward)  # type: ignore[method-assign]


def with_places(batch: Batch) -> Batch:
    """The batch of the host with its places."""
    borders = borders_of(batch.attended_documents)
    loss_positions = batch.loss_mask.flatten().nonzero().squeeze(1)
    return replace(batch, places=Places(loss_positions, *borders))


def pinned(batch: Batch) -> Batch:
    """The batch with its places, in memory of the host from which copies to a device overlap with its work.

    On a machine without a device that has copies it is the batch itself.
    """
    device_type = accelerator_type()
    if device_type is None or not can(device_type, "streams"):
        return batch
    return _mapped_with_places(batch, Tensor.pin_memory)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`, with its places; for a batch that is not pinned the host waits."""
    if device.type == "cpu":
        return batch
    return _mapped_with_places(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _mapped_with_places(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    places = batch.places or with_places(batch).places
    assert places is not None
    return replace(batch.map_tensors(change), places=places.map_tensors(change))


def borders_in(batch: Batch) -> DocumentBorders | None:
    """The borders of the attended documents, if the batch has its places."""
    if batch.places is None:
        return None
    return DocumentBorders(batch.places.document_offsets, batch.places.document_reach)


def loss_positions_in(batch: Batch) -> Tensor | None:
    """Those of its loss mask, if the batch has its places."""
    return None if batch.places is None else batch.places.loss_positions


def forward(
    model: Decoder, batch: Batch, head: Head, *, precision: str, counts_loads: bool = False
) -> Output:
    """The output for a batch on the model's device, with document masking unless the backend is `sdpa`.

    `counts_loads`: of the experts, which only native layers have.
    """
    (output,) = forward_all(model, [batch], [head], precision=precision, counts_loads=counts_loads)
    return output


def forward_all(
    model: Decoder,
    batches: Sequence[Batch],
    heads: Sequence[Head],
    *,
    precision: str,
    counts_loads: bool = False,
    begin: Sequence[Callable[[], None]] = (),
) -> list[Output]:
    """`forward` of each: every layer computes all of them before the next one (`Decoder.forward_all`).

    `begin`: of each, called before it begins; none: nothing is called.
    """
    isolated = model.model.backend != "sdpa"
    inputs = [
        ForwardInput(
            batch.tokens,
            positions_BT=batch.positions,
            documents_BT=batch.attended_documents if isolated else None,
            borders=borders_in(batch),
            head=head,
            is_real_BT=batch.documents >= 0 if counts_loads else None,
            pictures=seen_pictures(model, batch, begin=begin_one),
            axes_3BT=batch.axes,
            begin=begin_one,
        )
        for batch, head, begin_one in zip(batches, heads, begin or repeat(None), strict=False)
    ]
    with precision_context(precision, batches[0].tokens.device.type):
        return model.forward_all(inputs)


def seen_pictures(
    model: Decoder, batch: Batch, *, begin: Callable[[], None] | None = None
) -> SeenPictures | None:
    """What the model's tower makes of the pictures of a batch; None without any.

    `begin`: called before it; seeds dropout. Raises UserError where it makes another number of tokens than the text has
    for them.
    """
    if batch.pictures is None:
        return None
    vision = model.vision
    assert vision is not None, "a run with pictures has a tower"
    if begin is not None:
        begin()
    pictures = batch.pictures
    features = vision(pictures.inputs)
    refuse_other_number(len(features.features_ND), pictures.num_tokens, "data.prepared")
    if pictures.taken is not None:
        refuse_other_number(len(pictures.taken), len(pictures.places), "data.prepared")
        features = features.take(pictures.taken)
    return SeenPictures(
        pictures.places,
        features.features_ND,
        features.deep_features,
        both_ways=vision.vision.both_ways,
    )


def refuse_other_number(num_made: int, num_marked: int, where: str) -> None:
    """Raises UserError where the tower makes another number of tokens of pictures than the text has for them."""
    if num_made != num_marked:
        raise UserError(
            f"the tower makes {num_made} tokens of pictures for which the text has {num_marked}",
            where=where,
            fix="take the processor of this very model, and prepare the dataset again",
        )


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
        free_gathered(model)


def free_gathered(model: Decoder) -> None:
    """After forwards without a backward, in which FSDP2 would free the embeddings, the head and the last layer."""
    for module in (model, *model.model.layers):
        if is_sharded(module):
            module.reshard()
