"""Compares a decoder of transformers' layers with transformers itself, on a few drawn tokens.

B batch, T time.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.model.decoder import Decoder
from bloomery.model.transformers_backend import TransformersBackbone
from bloomery.model.transformers_trial import documents_problem

NUM_TOKENS = 24
# Greatest difference that rounding explains, as a share of the largest logit.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 4e-2}
OTHER_MODEL = "choose another model, or one of the families of docs/reference/models.md"


def check_layers(model: Decoder, dtype: torch.dtype, *, packed: bool) -> None:
    """The checks of a run, whose matmuls have this dtype, and whose rows are `packed` with documents.

    Raises UserError. The model is in evaluation mode.
    """
    check_head(model, TOLERANCE[dtype])
    check_rows(model, TOLERANCE[dtype])
    if packed:
        check_documents(model, TOLERANCE[dtype])


@torch.no_grad()
def check_head(model: Decoder, limit: float) -> None:
    """Compares logits with those of transformers' own forward. Raises UserError; the model is in evaluation mode."""
    assert isinstance(model.model, TransformersBackbone) and not model.training
    tokens_BT = trial_tokens(model)
    # The model first: its shards are then gathered for the reference, which is made of the same modules.
    with _matmul_autocast(model):
        logits = model(tokens_BT).head
        with model.model.whole() as reference:
            expected: Tensor = reference(input_ids=tokens_BT, use_cache=False).logits
    error = largest_difference(logits, expected)
    if not error <= limit:
        raise UserError(
            f"its logits are more than a matrix of its last hidden states (they differ by {error:.2g})",
            where=f"a {model.config.family} model through transformers",
            fix=OTHER_MODEL,
        )


def _matmul_autocast(model: Decoder) -> AbstractContextManager[object]:
    """Autocast where matrices are kept in the dtype of matmuls and other weights in float32."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    halves = dtypes & {torch.bfloat16, torch.float16}
    if not halves or len(dtypes) == 1:
        return nullcontext()
    return torch.autocast(model.model.embed_tokens.weight.device.type, halves.pop())


@torch.no_grad()
def check_rows(model: Decoder, limit: float) -> None:
    """No token may see a later one. Raises UserError."""
    assert not model.training
    tokens_BT = trial_tokens(model)
    first_BT = tokens_BT[:, : NUM_TOKENS // 3]

    # A beginning has the same logits whatever follows it.
    error = largest_difference(model(tokens_BT).head[:, : first_BT.shape[1]], model(first_BT).head)
    if not error <= limit:
        raise UserError(
            f"its tokens see later ones, so that it cannot be trained to predict them ({error:.2g})",
            where=f"a {model.config.family} model through transformers",
            fix=OTHER_MODEL,
        )


@torch.no_grad()
def check_documents(model: Decoder, limit: float) -> None:
    """Where documents of a row reach each other, they become rows of their own from now on."""
    assert isinstance(model.model, TransformersBackbone) and not model.training
    if model.model.documents == "rows":
        return

    # Architectures refuse a mask of documents in their own words.
    try:
        problem = documents_problem(
            lambda tokens_BT, documents_BT: model(tokens_BT, documents_BT=documents_BT).head,
            lambda tokens_BT: model(tokens_BT).head,
            trial_tokens(model),
            rounding=limit,
        )
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        problem = f"it takes no mask of documents ({str(error).partition(chr(10))[0][:80]})"
    if problem is not None:
        model.model.documents = "rows"
        model.model.documents_reason = problem


def trial_tokens(model: Decoder) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    device = model.model.embed_tokens.weight.device
    return torch.randint(model.config.vocab_size, (2, NUM_TOKENS), generator=generator).to(device)


def largest_difference(actual: Tensor, exact: Tensor) -> float:
    """The greatest one, as a share of the largest exact value; NaN when a value is none."""
    largest = exact.float().abs().max().clamp_min(1e-30)
    return float((actual.float() - exact.float()).abs().max() / largest)
