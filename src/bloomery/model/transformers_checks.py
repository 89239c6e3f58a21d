"""Compares a decoder of transformers' layers with transformers itself, on a few drawn tokens.

B batch, T time.
"""

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.model.decoder import Decoder
from bloomery.model.transformers_backend import TransformersBackbone

NUM_TOKENS = 24
# Greatest difference that rounding explains, as a share of the largest logit.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 4e-2}
OTHER_MODEL = "choose another model, or one of the families of docs/reference/models.md"
NO_PACKING = "set data.packing=false: then each row is one document"


def check_layers(model: Decoder, dtype: torch.dtype, *, packed: bool) -> None:
    """Both checks of a run, whose matmuls have this dtype. Raises UserError; the model is in evaluation mode."""
    check_head(model, TOLERANCE[dtype])
    check_rows(model, TOLERANCE[dtype], packed=packed)


@torch.no_grad()
def check_head(model: Decoder, limit: float) -> None:
    """Compares logits with those of transformers' own forward. Raises UserError; the model is in evaluation mode."""
    assert isinstance(model.model, TransformersBackbone) and not model.training
    tokens_BT = trial_tokens(model)
    expected: Tensor = model.model.reference(input_ids=tokens_BT, use_cache=False).logits
    error = largest_difference(model(tokens_BT).head, expected)
    if not error <= limit:
        raise UserError(
            f"its logits are more than a matrix of its last hidden states (they differ by {error:.2g})",
            where=f"a {model.config.family} model through transformers",
            fix=OTHER_MODEL,
        )


@torch.no_grad()
def check_rows(model: Decoder, limit: float, *, packed: bool) -> None:
    """No token may see a later one, nor, in `packed` rows, one of another document. Raises UserError."""
    assert not model.training
    tokens_BT = trial_tokens(model)
    first_BT = tokens_BT[:, : NUM_TOKENS // 3]
    second_BT = tokens_BT[:, NUM_TOKENS // 3 :]
    first_length = first_BT.shape[1]

    # A beginning has the same logits whatever follows it.
    error = largest_difference(model(tokens_BT).head[:, :first_length], model(first_BT).head)
    if not error <= limit:
        raise UserError(
            f"its tokens see later ones, so that it cannot be trained to predict them ({error:.2g})",
            where=f"a {model.config.family} model through transformers",
            fix=OTHER_MODEL,
        )
    if not packed:
        return

    # Two documents in a row have the logits that each has alone.
    number_T = torch.arange(NUM_TOKENS, device=tokens_BT.device)
    document_T = number_T.ge(first_length).long()
    position_T = number_T - document_T * first_length
    try:
        together = model(
            tokens_BT,
            documents_BT=document_T.expand(tokens_BT.shape),
            positions_BT=position_T.expand(tokens_BT.shape),
        ).head
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        reason = str(error).partition("\n")[0][:120]
        raise UserError(
            f"this architecture takes no mask of documents ({reason})",
            where="data.packing=true",
            fix=NO_PACKING,
        ) from error
    worst = max(
        largest_difference(together[:, :first_length], model(first_BT).head),
        largest_difference(together[:, first_length:], model(second_BT).head),
    )
    if not worst <= limit:
        raise UserError(
            f"no document masking in this architecture ({worst:.2g} of the largest logit)",
            where="data.packing=true",
            fix=NO_PACKING,
        )


def trial_tokens(model: Decoder) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    device = model.model.embed_tokens.weight.device
    return torch.randint(model.config.vocab_size, (2, NUM_TOKENS), generator=generator).to(device)


def largest_difference(actual: Tensor, exact: Tensor) -> float:
    """The greatest one, as a share of the largest exact value; NaN when a value is none."""
    largest = exact.float().abs().max().clamp_min(1e-30)
    return float((actual.float() - exact.float()).abs().max() / largest)
