"""Whether Triton's kernel for decoding is right for a decoder on this device: its logits are compared with SDPA's."""

import torch
from torch import Tensor

from bloomery.infer.past import Past
from bloomery.model.attention.triton_attention import KernelFailed
from bloomery.model.decoder import Decoder
from bloomery.model.transformers_checks import TOLERANCE, largest_difference, trial_tokens


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
        error = largest_difference(_decoded_logits(decoder), expected)
        if not error <= max(TOLERANCE.values()):
            problem = f"its logits differ from SDPA's by {error:.2g}"
    except KernelFailed as failure:
        problem = str(failure)
    decoder.decode_with_kernel(problem is None)
    return problem


def _decoded_logits(decoder: Decoder) -> Tensor:
    """[4, V]: of the next token of two texts, of several lengths and then of one."""
    tokens = trial_tokens(decoder).flatten().tolist()
    logits = []
    for first, second in ((7, 5), (6, 6)):
        past = Past(decoder, slots=2, capacity=8)
        past.read([tokens[:first]], 0)
        past.read([tokens[8 : 8 + second]], 1)
        logits.append(past.read([tokens[16:17], tokens[17:18]]))
    return torch.cat(logits)
