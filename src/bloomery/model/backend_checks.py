"""Compares a decoder of transformers' layers with transformers itself, and a kernel for decoding with SDPA.

Both on a few drawn tokens.

B batch, T time.
"""

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.infer.decoding import Past
from bloomery.model.attention.triton_attention import KernelFailed
from bloomery.model.decoder import Decoder
from bloomery.model.transformers_backend import TransformersBackbone

NUM_TOKENS = 24
# Greatest difference that rounding explains, as a share of the largest logit.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 4e-2}
OTHER_MODEL = "choose another model, or one of the families of docs/reference/models.md"
NO_PACKING = "set data.packing=false: then each row is one document"


@torch.no_grad()
def check_head(model: Decoder, limit: float) -> None:
    """Compares logits with those of transformers' own forward. Raises UserError; the model is in evaluation mode."""
    assert isinstance(model.model, TransformersBackbone) and not model.training
    tokens_BT = _trial_tokens(model)
    expected: Tensor = model.model.reference(input_ids=tokens_BT, use_cache=False).logits
    error = _difference(model(tokens_BT).head, expected)
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
    tokens_BT = _trial_tokens(model)
    first_BT = tokens_BT[:, : NUM_TOKENS // 3]
    second_BT = tokens_BT[:, NUM_TOKENS // 3 :]
    first_length = first_BT.shape[1]

    # A beginning has the same logits whatever follows it.
    error = _difference(model(tokens_BT).head[:, :first_length], model(first_BT).head)
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
        _difference(together[:, :first_length], model(first_BT).head),
        _difference(together[:, first_length:], model(second_BT).head),
    )
    if not worst <= limit:
        raise UserError(
            f"no document masking in this architecture ({worst:.2g} of the largest logit)",
            where="data.packing=true",
            fix=NO_PACKING,
        )


def _trial_tokens(model: Decoder) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    device = model.model.embed_tokens.weight.device
    return torch.randint(model.config.vocab_size, (2, NUM_TOKENS), generator=generator).to(device)


def _difference(actual: Tensor, exact: Tensor) -> float:
    """The greatest one, as a share of the largest exact value; NaN when a value is none."""
    largest = exact.float().abs().max().clamp_min(1e-30)
    return float((actual.float() - exact.float()).abs().max() / largest)


def decoding_problem(decoder: Decoder) -> str | None:
    """Why Triton's kernel cannot decode for this decoder here: it fails, or its logits are not those of SDPA.

    Afterwards the kernel is used where this is None. Both of its forms are tried, that for texts of one length and that
    for several. Raises out-of-memory errors.
    """
    decoder.decode_with_kernel(False)
    expected = _decoded_logits(decoder)
    decoder.decode_with_kernel(True)
    problem = None
    try:
        error = _difference(_decoded_logits(decoder), expected)
        if not error <= max(TOLERANCE.values()):
            problem = f"its logits differ from SDPA's by {error:.2g}"
    except KernelFailed as failure:
        problem = str(failure)
    decoder.decode_with_kernel(problem is None)
    return problem


def _decoded_logits(decoder: Decoder) -> Tensor:
    """[4, V]: of the next token of two texts, of several lengths and then of one."""
    tokens = _trial_tokens(decoder).flatten().tolist()
    logits = []
    for first, second in ((7, 5), (6, 6)):
        past = Past(decoder, slots=2, capacity=8)
        past.read([tokens[:first]], 0)
        past.read([tokens[8 : 8 + second]], 1)
        logits.append(past.read([tokens[16:17], tokens[17:18]]))
    return torch.cat(logits)
