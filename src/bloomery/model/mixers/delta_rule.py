"""The gated delta rule: a matrix per head that forgets, and in which each token rewrites what its key finds.

For each token, with key k, value v, decay exp(g) and strength beta (arXiv:2412.06464, equation 10):

    S <- exp(g) S;    S <- S + k (beta (v - k S));    out = q S

`chunked_delta_rule` computes chunks of tokens by matrix products, `delta_rule_step` one token. Everything is float32.

B batch, T time, H heads, E width of a key, F width of a value, N chunks, C tokens of a chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.facts.counting import DELTA_CHUNK

CHUNK = DELTA_CHUNK


def chunked_delta_rule(
    q_BHTE: Tensor,
    k_BHTE: Tensor,
    v_BHTF: Tensor,
    decay_BHT: Tensor,
    beta_BHT: Tensor,
    *,
    first_BT: Tensor | None = None,
    state_BHEF: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What each token reads, [B, H, T, F], and the state after the last one, [B, H, E, F]; all float32.

    `decay`: g, at most 0. first_BT: where the document of each token starts in its row; None: every row is one. No
    document sees another: decays between two of them are masked, since a large negative one would cost digits.
    `state`: before the first token, of its document.
    """
    batch, heads, length, key_width = k_BHTE.shape
    padding = -length % CHUNK
    q, k, v = (
        F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, CHUNK)) for x in (q_BHTE, k_BHTE, v_BHTF)
    )
    decay, beta = (F.pad(x, (0, padding)).unflatten(2, (-1, CHUNK)) for x in (decay_BHT, beta_BHT))
    decayed_BHNC = decay.cumsum(-1)  # since the chunk began
    num_chunks = q.shape[2]

    # How much of token j is left at token i of its chunk: nothing where i comes first, or j is of another document.
    is_later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    document_BN1C = None
    if first_BT is not None:
        document_BN1C = F.pad(first_BT, (0, padding), value=0)
        document_BN1C[:, length:] = first_BT[:, -1:]
        document_BN1C = document_BN1C.view(batch, 1, num_chunks, CHUNK)
        is_hidden = is_later | (document_BN1C[..., :, None] != document_BN1C[..., None, :])
    else:
        is_hidden = is_later
    left = (decayed_BHNC[..., :, None] - decayed_BHNC[..., None, :]).masked_fill(
        is_hidden, float("-inf")
    )
    left_BHNCC = left.exp()

    # How much of the state before the chunk is left at each token, and how much of each token at the chunk's end.
    into_BHNC = decayed_BHNC.exp()
    out_of_BHNC = (decayed_BHNC[..., -1:] - decayed_BHNC).exp()
    if document_BN1C is not None:
        last_BN11 = document_BN1C[..., -1:]
        before_BN11 = torch.cat((document_BN1C[:, :, :1, :1], last_BN11[:, :, :-1]), 2)
        into_BHNC = into_BHNC * (document_BN1C == before_BN11)
        out_of_BHNC = out_of_BHNC * (document_BN1C == last_BN11)

    # What each token writes depends on what those before it in the chunk wrote: a triangular system, for the values
    # and for what is taken from the state before the chunk. Solved, not inverted: with keys alike and beta 1 the
    # inverse by repeated squaring is wrong by ten digits.
    weighted_k = k * beta[..., None]
    system = (weighted_k @ k.mT) * left_BHNCC
    right_sides = torch.cat((v * beta[..., None], weighted_k * into_BHNC[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, right_sides, upper=False, unitriangular=True)
    written, taken = solved.split((v.shape[-1], key_width), -1)

    # Then chunk by chunk: a token reads the state before its chunk, and what was written in the chunk up to it.
    scores = (q @ k.mT) * left_BHNCC
    q_into = q * into_BHNC[..., None]
    k_out = (k * out_of_BHNC[..., None]).mT
    kept_BHN11 = into_BHNC[..., -1, None, None]
    state = state_BHEF
    if state is None:
        state = v.new_zeros(batch, heads, key_width, v.shape[-1])
    outputs = []
    for chunk in range(num_chunks):
        new = written[:, :, chunk] - taken[:, :, chunk] @ state
        outputs.append(q_into[:, :, chunk] @ state + scores[:, :, chunk] @ new)
        state = state * kept_BHN11[:, :, chunk] + k_out[:, :, chunk] @ new
    return torch.cat(outputs, 2)[:, :, :length], state


def delta_rule_step(
    q_BHE: Tensor,
    k_BHE: Tensor,
    v_BHF: Tensor,
    decay_BH: Tensor,
    beta_BH: Tensor,
    state_BHEF: Tensor,
) -> Tensor:
    """What one token of each text reads, [B, H, F]; the state is changed in place."""
    state_BHEF *= decay_BH.exp()[..., None, None]
    found_BHF = (k_BHE[..., None, :] @ state_BHEF).squeeze(-2)
    written_BHF = (v_BHF - found_BHF) * beta_BH[..., None]
    state_BHEF += k_BHE[..., None] * written_BHF[..., None, :]
    return (q_BHE[..., None, :] @ state_BHEF).squeeze(-2)
