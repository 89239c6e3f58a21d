"""Small weights, and a record of what bitsandbytes makes of them, for tests where it is not installed.

pip install --no-deps 'bitsandbytes>=0.50'
PYTHONPATH=tests/model python tests/model/quantized_oracle.py > tests/model/quantised_by_bitsandbytes.json
"""

import base64
import hashlib
import json
import math

import torch
from torch import Tensor

SHAPES = {
    "whole blocks": ((16, 128), "float32"),
    "a short block": ((24, 20), "bfloat16"),
    "an odd number": ((7, 9), "float16"),
    "scales of scales": ((160, 130), "float32"),
}


def weight_of(shape: tuple[int, int], dtype: str) -> Tensor:
    """Nearly normal numbers that no random library changes, with an outlier and, of several blocks, one of zeros."""
    count = math.prod(shape)
    random_bytes = b"".join(
        hashlib.sha256(f"{count}/{index}".encode()).digest() for index in range(-(-count // 8))
    )
    values = (
        torch.frombuffer(bytearray(random_bytes), dtype=torch.uint8)[: 4 * count].view(-1, 4).sum(1)
        - 510.0
    )
    values *= 2.0**-13
    if count > 64:
        values[:64] = 0
    values[-1] = 1.5
    return values.view(shape).to(getattr(torch, dtype))


def text(tensor: Tensor) -> str:
    """The bytes of a tensor in memory."""
    return base64.b64encode(
        tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    ).decode()


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(
        tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def recorded(weight: Tensor) -> dict[str, str]:
    """Codes, both kinds of scales, and what is read back."""
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    levels = functional.create_dynamic_map()
    plain_torch = torch._C.DispatchKey.CompositeExplicitAutograd
    _, double_state = functional.quantize_4bit(
        weight, quant_type="nf4", blocksize=64, compress_statistics=True
    )
    # Near the middle between two levels its kernel for processors takes either; its plain torch the nearest.
    exact_codes, _ = torch.ops.bitsandbytes.quantize_blockwise.default._op_dk(
        plain_torch, state.absmax - double_state.offset, levels, 256
    )
    return {
        "codes": digest(codes),
        "scales": digest(state.absmax),
        "read": digest(functional.dequantize_4bit(codes, state)),
        "double_scales": text(double_state.absmax),
        "exact_scales": digest(exact_codes),
        "outer": text(double_state.state2.absmax),
        "mean": text(double_state.offset[None]),
        "double_read": digest(functional.dequantize_4bit(codes, double_state)),
    }


if __name__ == "__main__":
    from bitsandbytes import __version__

    cases = {name: recorded(weight_of(shape, dtype)) for name, (shape, dtype) in SHAPES.items()}
    print(json.dumps({"bitsandbytes": __version__, "cases": cases}, indent=1))
