"""A trial of transformers' layers under our head: whether logits are those of transformers, and documents apart."""

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.model.decoder import Decoder
from bloomery.model.transformers_backend.backbone import ForeignBackbone

TOKENS = 24
# Greatest difference that rounding explains, as a share of the largest logit.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 4e-2}
OTHER = "choose another model, or one of the families of docs/models.md"


@torch.no_grad()
def check_head(model: Decoder, limit: float) -> None:
    """Compares logits with those of transformers' own forward. Raises UserError; the model is in evaluation mode."""
    assert isinstance(model.model, ForeignBackbone) and not model.training
    tokens_BT = _tokens(model)
    theirs: Tensor = model.model.whole(input_ids=tokens_BT, use_cache=False).logits
    error = _difference(model(tokens_BT), theirs)
    if not error <= limit:
        problem = f"its logits are more than a matrix of its last hidden states (they differ by {error:.2g})"
        raise UserError(problem, where=f"a {model.config.family} model through transformers", remedy=OTHER)


@torch.no_grad()
def check_rows(model: Decoder, limit: float, *, packed: bool) -> None:
    """No token may see a later one, nor, in `packed` rows, one of another document. Raises UserError."""
    assert not model.training
    tokens_BT, where = _tokens(model), f"a {model.config.family} model through transformers"
    first, second = tokens_BT[:, : TOKENS // 3], tokens_BT[:, TOKENS // 3 :]
    error = _difference(model(tokens_BT)[:, : first.shape[1]], model(first))
    if not error <= limit:
        problem = f"its tokens see later ones, so that it cannot be trained to predict them ({error:.2g})"
        raise UserError(problem, where=where, remedy=OTHER)
    if not packed:
        return
    numbers, device = torch.arange(TOKENS), tokens_BT.device
    documents = numbers.ge(first.shape[1]).long()
    positions = numbers - documents * first.shape[1]
    rows = documents.to(device).expand(tokens_BT.shape), positions.to(device).expand(tokens_BT.shape)
    apart = "set data.layout=padded: then each row is one document"
    try:
        together = model(tokens_BT, documents_BT=rows[0], positions_BT=rows[1])
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        problem = f"this architecture takes no mask of documents ({str(error).partition(chr(10))[0][:120]})"
        raise UserError(problem, where="data.layout=packed", remedy=apart) from error
    errors = [_difference(a, model(b)) for a, b in ((together[:, : first.shape[1]], first),
                                                    (together[:, first.shape[1] :], second))]  # fmt: skip
    if not max(errors) <= limit:
        problem = f"documents of one row see each other in this architecture ({max(errors):.2g} of the largest logit)"
        raise UserError(problem, where="data.layout=packed", remedy=apart)


def _tokens(model: Decoder) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    device = model.model.embed_tokens.weight.device
    return torch.randint(model.config.vocab_size, (2, TOKENS), generator=draw).to(device)


def _difference(found: Tensor, exact: Tensor) -> float:
    """NaN when a value is none."""
    share = (found.float() - exact.float()).abs().max() / exact.float().abs().max().clamp_min(1e-30)
    return float(share)
