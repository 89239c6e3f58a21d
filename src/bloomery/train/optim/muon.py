"""Muon (Keller Jordan, 2024): orthogonalized momentum for matrices inside blocks, in stacks of one shape.

N matrices of a stack, R rows, C columns.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from bloomery.facts.limits import MUON_STACK
from bloomery.facts.optimizers import NEWTON_SCHULZ_STEPS
from bloomery.parallel.mesh import Mesh
from bloomery.plan.types import OptimizerPlan
from bloomery.train.optim.common import Rounding, Shards
from bloomery.train.optim.placement import StatePlacement
from bloomery.train.optim.registry import UpdateProducts

# The coefficients of the quintic Newton-Schulz iteration that torch.optim.Muon uses too.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# The update's root mean square is that of AdamW (arXiv:2502.16982, section 2.2): both can use one learning rate.
ADAMW_ROOT_MEAN_SQUARE = 0.2
WITHOUT_SHARDS = Shards({})


def iteration_dtype(device: torch.device) -> torch.dtype:
    """bfloat16, as torch.optim.Muon; float32 on a CPU that has no fast products of bfloat16.

    On an AVX2 CPU those of 192 x 512 take 16 times as long, and were nine tenths of a step of `bloomery demo`.
    """
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return torch.bfloat16


def orthogonalize_stack(stack_NRC: Tensor) -> Tensor:
    """Approximately the nearest matrix with orthonormal rows (singular values 0.7 to 1.2) to each of a stack.

    The matrices are wide or square, so that the Gram matrix is the smaller one.
    """
    assert stack_NRC.shape[1] <= stack_NRC.shape[2]
    a, b, c = NEWTON_SCHULZ
    x_NRC = stack_NRC.to(iteration_dtype(stack_NRC.device))
    x_NRC = x_NRC / torch.linalg.vector_norm(x_NRC, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_NRR = torch.bmm(x_NRC, x_NRC.mT)
        polynomial_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, polynomial_NRR, x_NRC, beta=a)
    return x_NRC


def orthogonalize(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonalized matrices of one shape or its transpose, each in its own orientation."""
    wide = [matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix for matrix in matrices]
    results_NRC = orthogonalize_stack(torch.stack(wide))
    return [
        result if matrix.shape == result.shape else result.mT
        for result, matrix in zip(results_NRC, matrices, strict=True)
    ]


def on_full_matrices(
    function: Callable[[Sequence[Tensor]], list[Tensor]],
    shards: Sequence[Tensor],
    rows_by_rank: Sequence[Sequence[int]],
    mesh: Mesh,
) -> list[Tensor]:
    """This rank's rows of `function` of full matrices, of which each rank holds some rows.

    `rows_by_rank`: for each matrix. Each rank owns some of the matrices: one all-to-all brings it their rows from
    every rank, another returns the rows of the results.
    """
    count = len(shards)
    ranks = range(mesh.shard)
    owners = [index * mesh.shard // count for index in range(count)]
    owned = [index for index, owner in enumerate(owners) if owner == mesh.shard_rank]
    widths = [shard.shape[1] for shard in shards]

    # Every rank sends its rows of a matrix to the owner, who receives them ordered by rank, then by matrix.
    send_sizes = [
        sum(shards[index].numel() for index in range(count) if owners[index] == rank)
        for rank in ranks
    ]
    receive_sizes = [
        sum(rows_by_rank[index][rank] * widths[index] for index in owned) for rank in ranks
    ]
    received = mesh.all_to_all_shards(
        torch.cat([shard.reshape(-1) for shard in shards]), send_sizes, receive_sizes
    )
    pieces = received.split(
        [rows_by_rank[index][rank] * widths[index] for rank in ranks for index in owned]
    )
    full_matrices = [
        torch.cat([pieces[rank * len(owned) + place].view(-1, widths[index]) for rank in ranks])
        for place, index in enumerate(owned)
    ]

    # The results go back the same way: to every rank its rows, in the order in which it sent them.
    results = [
        result.split(list(rows_by_rank[index]))
        for result, index in zip(
            function(full_matrices) if full_matrices else [], owned, strict=True
        )
    ]
    result_rows = [result[rank].reshape(-1) for rank in ranks for result in results]
    outgoing = torch.cat(result_rows).to(shards[0].dtype) if result_rows else shards[0].new_empty(0)
    returned = mesh.all_to_all_shards(outgoing, receive_sizes, send_sizes)
    returned_shards = returned.split([shard.numel() for shard in shards])
    return [flat.view_as(shard) for flat, shard in zip(returned_shards, shards, strict=True)]


def stacks_of(
    parameters: Iterable[nn.Parameter],
    shape_of: Callable[[nn.Parameter], Sequence[int]] = lambda parameter: parameter.shape,
) -> list[list[nn.Parameter]]:
    """Matrices of one shape or its transpose, in stacks of bounded size and a fixed order."""
    by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        by_shape.setdefault(tuple(sorted(shape_of(parameter))), []).append(parameter)
    stacks = []
    for shape, matrices in by_shape.items():
        size = max(1, MUON_STACK // math.prod(shape))
        stacks += [matrices[start : start + size] for start in range(0, len(matrices), size)]
    return stacks


@final
class Muon(torch.optim.Optimizer):
    """Equal to torch.optim.Muon with `match_rms_adamw`, batched: two thirds of the time on a CPU, and a busy GPU."""

    def __init__(
        self,
        params: list[nn.Parameter],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        shards: Shards = WITHOUT_SHARDS,
    ) -> None:
        self._shards = shards
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 (torch's, unused)
        for group in self.param_groups:
            parameters = (p for p in group["params"] if p.grad is not None)
            for stack in stacks_of(parameters, self._shards.full_shape):
                self._update(stack, group["lr"], group["momentum"], group["weight_decay"])

    def _update(
        self, stack: list[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        weights = [p.data for p in stack]
        gradients = [p.grad for p in stack if p.grad is not None]
        buffers = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in stack]

        # Nesterov momentum: the gradient moved once more toward its average.
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        directions = [
            gradient.lerp(buffer, momentum)
            for gradient, buffer in zip(gradients, buffers, strict=True)
        ]
        if self._shards.full_parameters:
            rows_by_rank = [self._shards.rows_by_rank(p) for p in stack]
            updates = on_full_matrices(orthogonalize, directions, rows_by_rank, self._shards.mesh)
        else:
            updates = orthogonalize(directions)

        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        updates = [update.to(weight.dtype) for update, weight in zip(updates, weights, strict=True)]
        longest_side = max(self._shards.full_shape(stack[0]))
        torch._foreach_add_(
            weights, updates, alpha=-lr * ADAMW_ROOT_MEAN_SQUARE * math.sqrt(longest_side)
        )


def build(
    named_parameters: Mapping[str, nn.Parameter],
    *,
    plan: OptimizerPlan,
    rounding: Rounding,
    placement: StatePlacement,  # noqa: ARG001 (of every builder: these states stay on the device)
) -> list[torch.optim.Optimizer]:
    """For matrices inside layers."""
    optimizer = Muon(
        list(named_parameters.values()),
        lr=plan.muon_learning_rate,
        momentum=plan.momentum,
        weight_decay=plan.weight_decay,
        shards=rounding.shards,
    )
    return [optimizer]


@final
class ExactMuon:
    """Nesterov momentum, five quintic Newton-Schulz iterations, and the size of AdamW's updates (arXiv:2502.16982)."""

    def __init__(self, plan: OptimizerPlan, decay: float) -> None:
        self._plan = plan
        self._decay = decay
        self._momentum: Tensor | float = 0.0

    def step(self, weight: Tensor, gradient: Tensor) -> Tensor:
        plan = self._plan
        momentum = plan.momentum * self._momentum + (1 - plan.momentum) * gradient
        self._momentum = momentum
        direction = (1 - plan.momentum) * gradient + plan.momentum * momentum
        is_tall = direction.shape[0] > direction.shape[1]
        x = direction.mT if is_tall else direction
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        size = 0.2 * math.sqrt(max(weight.shape))
        decayed = weight * (1 - plan.muon_learning_rate * self._decay)
        update: Tensor = size * (x.mT if is_tall else x)
        return decayed - plan.muon_learning_rate * update


def exact(plan: OptimizerPlan, decay: float) -> ExactMuon:
    """`decay`: the weight decay of the parameter."""
    return ExactMuon(plan, decay)


def products(device: torch.device) -> UpdateProducts:
    """Newton-Schulz iterations of three products each enlarge small singular values 3.4-fold each, and rounding errors
    next to them.
    """
    return UpdateProducts(3 * NEWTON_SCHULZ_STEPS, iteration_dtype(device), NEWTON_SCHULZ[0])
