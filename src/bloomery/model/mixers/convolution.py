"""The causal convolution of each number of a sequence by itself, kept inside its document.

B batch, T time, C numbers of a token, K tokens that the kernel sees, the own one included.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bloomery.model.norms import widened


class DepthwiseConvolution(nn.Module):
    """The weight [C, 1, K] is that of PyTorch's Conv1d with C groups; its last number is of the own token."""

    def __init__(self, width: int, kernel: int, *, bias: bool = False) -> None:
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(width, 1, kernel))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x_BTC: Tensor, first_BT: Tensor | None, past: Tensor | None = None) -> Tensor:
        """[B, T, C] in the dtype of `x`; sums are float32.

        first_BT: where the document of each token starts in its row; None: every row is one. past: the K - 1 tokens
        before these [B, K - 1, C], which are replaced in place by the last K - 1; zeros before a text begins.
        """
        weight_CK = self.weight.squeeze(1)
        if past is None:
            convolved_BTC = convolved(x_BTC, weight_CK, first_BT)
        else:
            assert first_BT is None, "a cache holds one document a row"
            convolved_BTC = convolved_with_past(x_BTC, weight_CK, past)
        return convolved_BTC if self.bias is None else convolved_BTC + self.bias.to(x_BTC.dtype)


def convolved(
    x_BTC: Tensor, weight_CK: Tensor, first_BT: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """The convolution [B, T, C] of sequences in which the document of each token starts at `first_BT`.

    As `dtype`; None: in that of `x`.
    """
    result: Tensor = _Convolve.apply(x_BTC, weight_CK, first_BT, dtype or x_BTC.dtype)  # type: ignore[no-untyped-call]  # torch's `apply`
    return result


def convolved_with_past(x_BTC: Tensor, weight_CK: Tensor, past: Tensor) -> Tensor:
    """The same of tokens whose K - 1 predecessors are `past`, which the last K - 1 replace; not differentiated."""
    length = x_BTC.shape[1]
    with_past = torch.cat((past.to(x_BTC.dtype), x_BTC), 1)
    convolved_BTC = _convolved(with_past, weight_CK, None)[:, -length:].to(x_BTC.dtype)
    past.copy_(with_past[:, with_past.shape[1] - past.shape[1] :])
    return convolved_BTC


class _Convolve(torch.autograd.Function):
    """Tap by tap: it saves its input alone, where a padded copy for each tap would be K of them."""

    @staticmethod
    def forward(
        ctx: Any, x_BTC: Tensor, weight_CK: Tensor, first_BT: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x_BTC, weight_CK, first_BT)
        return _convolved(x_BTC, weight_CK, first_BT).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTC: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x_BTC, weight_CK, first_BT = ctx.saved_tensors
        wide_grad = widened(grad_BTC)
        wide_weight = widened(weight_CK)
        last_tap = weight_CK.shape[1] - 1
        grad_x = wide_grad * wide_weight[:, last_tap]
        grad_taps = [(wide_grad * x_BTC).flatten(0, 1).sum(0)]
        for distance in range(1, min(last_tap + 1, x_BTC.shape[1])):
            seen_grad = _inside_document(wide_grad[:, distance:], first_BT, distance)
            grad_x[:, :-distance].addcmul_(seen_grad, wide_weight[:, last_tap - distance])
            grad_taps.append((seen_grad * x_BTC[:, :-distance]).flatten(0, 1).sum(0))
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_taps += [torch.zeros_like(grad_taps[0])] * (last_tap + 1 - len(grad_taps))
            grad_weight = torch.stack(grad_taps[::-1], 1).to(weight_CK.dtype)
        return grad_x.to(x_BTC.dtype), grad_weight, None, None


def _convolved(x_BTC: Tensor, weight_CK: Tensor, first_BT: Tensor | None) -> Tensor:
    """In float32 at least."""
    wide_x = widened(x_BTC)
    wide_weight = widened(weight_CK)
    last_tap = weight_CK.shape[1] - 1
    convolved = wide_x * wide_weight[:, last_tap]
    for distance in range(1, min(last_tap + 1, x_BTC.shape[1])):
        tap = wide_x[:, :-distance] * wide_weight[:, last_tap - distance]
        convolved[:, distance:] += _inside_document(tap, first_BT, distance)
    return convolved


def _inside_document(tap_BTC: Tensor, first_BT: Tensor | None, distance: int) -> Tensor:
    """What the tokens from `distance` on see of the token so far before them: nothing beyond their document's start."""
    if first_BT is None:
        return tap_BTC
    length = first_BT.shape[1]
    position_T = torch.arange(length - distance, device=first_BT.device)
    return tap_BTC * (first_BT[:, distance:] <= position_T)[..., None]
