"""xIELU (arXiv:2411.13010), the activation of Apertus: two of its numbers are trained, in each layer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bloomery.model.norms import widened


class XIELU(nn.Module):
    """a_p x^2 + beta x above 0, and a_n (exp(min(x, eps)) - 1 - x) + beta x elsewhere.

    a_p = softplus(alpha_p) and a_n = beta + softplus(alpha_n), so that neither changes its sign. Files keep `beta` and
    `eps`, two single numbers that nothing trains.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))
        self.beta = nn.Parameter(torch.empty(()), requires_grad=False)
        self.eps = nn.Parameter(torch.empty(()), requires_grad=False)

    @torch.no_grad()
    def initialize(self) -> None:
        """As in transformers: a_p and a_n are 0.8."""
        beta = 0.5
        self.alpha_p.fill_(0.8).expm1_().log_()
        self.alpha_n.fill_(0.8 - beta).expm1_().log_()
        self.beta.fill_(beta)
        self.eps.fill_(-1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape, in the dtype of x, computed in float32 at least."""
        result: Tensor = _XIELU.apply(x, self.alpha_p, self.alpha_n, self.beta, self.eps)  # type: ignore[no-untyped-call]  # torch's `apply`
        return result


class _XIELU(torch.autograd.Function):
    """Backward keeps x alone: autograd would keep five tensors of its size, in float32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, alpha_p, alpha_n, beta, eps)
        wide_x = widened(x)
        wide_beta = widened(beta)
        negative = _below_zero(wide_x, eps).mul_(wide_beta + F.softplus(widened(alpha_n)))
        positive = wide_x.square().mul_(F.softplus(widened(alpha_p)))
        return torch.where(wide_x > 0, positive, negative).addcmul_(wide_x, wide_beta).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, alpha_p, alpha_n, beta, eps = ctx.saved_tensors
        wide_x, wide_grad, wide_beta = widened(x), widened(grad), widened(beta)
        wide_p, wide_n = widened(alpha_p), widened(alpha_n)
        is_positive = wide_x > 0

        # Of the two numbers, each through its softplus. (The plan counts what is alive at once.)
        grad_p = wide_x.square().mul_(wide_grad).mul_(is_positive).sum()
        grad_n = _below_zero(wide_x, eps).mul_(wide_grad).masked_fill_(is_positive, 0).sum()

        # Of x. Between eps and 0 the exponential is a constant.
        slope = wide_x.exp().masked_fill_(wide_x >= eps, 0).sub_(1)
        slope.mul_(wide_beta + F.softplus(wide_n))
        slope = torch.where(is_positive, wide_x * (2 * F.softplus(wide_p)), slope)
        grad_x = slope.add_(wide_beta).mul_(wide_grad).to(x.dtype)
        return (
            grad_x,
            (grad_p * wide_p.sigmoid()).to(alpha_p.dtype),
            (grad_n * wide_n.sigmoid()).to(alpha_n.dtype),
            None,
            None,
        )


def _below_zero(x: Tensor, eps: Tensor) -> Tensor:
    """exp(min(x, eps)) - 1 - x, a new tensor. The limit keeps exp of large x, which nothing reads, finite."""
    return torch.minimum(x, widened(eps)).expm1_().sub_(x)
