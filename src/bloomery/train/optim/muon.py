"""Muon (Keller Jordan, 2024): orthogonalized momentum for matrices inside blocks, in stacks of one shape.

N matrices of a stack, R rows, C columns.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor, nn

from bloomery.facts.counting import fused_matrices
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

    The matrices are wide or square, so that the Gram matrix is the smaller one. The stack is in the dtype of the
    iteration, and overwritten. Memory: that of two stacks and of their Gram matrices.
    """
    assert stack_NRC.shape[1] <= stack_NRC.shape[2]
    a, b, c = NEWTON_SCHULZ
    x_NRC = stack_NRC
    del stack_NRC
    x_NRC.div_(torch.linalg.vector_norm(x_NRC, dim=(1, 2), keepdim=True).clamp(min=1e-7))
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_NRR = torch.bmm(x_NRC, x_NRC.mT)
        polynomial_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        del gram_NRR
        x_NRC = torch.baddbmm(x_NRC, polynomial_NRR, x_NRC, beta=a)
        del polynomial_NRR
    return x_NRC


def stacked(matrices: Iterable[Tensor], count: int, dtype: torch.dtype) -> Tensor:
    """So many matrices of one shape or its transpose. One of them is read at a time."""
    stack_NRC: Tensor | None = None
    for index, matrix in enumerate(matrices):
        if stack_NRC is None:
            stack_NRC = matrix.new_empty((count, *sorted(matrix.shape)), dtype=dtype)
        oriented(stack_NRC[index], matrix.shape).copy_(matrix)
    assert stack_NRC is not None, "a stack has a matrix"
    return stack_NRC


def oriented(matrix_RC: Tensor, shape: Sequence[int]) -> Tensor:
    """A matrix of a stack as a view of this shape, which may be that of its transpose."""
    return matrix_RC if matrix_RC.shape == tuple(shape) else matrix_RC.mT


def orthogonalize(
    matrices: Iterable[Tensor], shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[Tensor]:
    """Orthogonalized matrices of one shape or its transpose, each in its own orientation. `dtype`: of the iteration."""
    results_NRC = orthogonalize_stack(stacked(matrices, len(shapes), dtype))
    return [oriented(result, shape) for result, shape in zip(results_NRC, shapes, strict=True)]


def orthogonalize_shards(
    shards: Iterable[Tensor],
    shapes: Sequence[Sequence[int]],
    rows_by_rank: Sequence[Sequence[int]],
    mesh: Mesh,
    dtype: torch.dtype,
) -> list[Tensor]:
    """`orthogonalize` of matrices of which each rank holds some rows: this rank's rows of the results.

    `shards`: this rank's rows of each, read one at a time; `shapes`: of the full matrices; `rows_by_rank`: for each
    matrix. Each rank owns some of the matrices: one all-to-all brings it their rows from every rank, another returns
    the rows of the results. Nothing of the way there is held in the iteration, which would double its memory.
    """
    count = len(shapes)
    ranks = range(mesh.holders)
    owners = [index * mesh.holders // count for index in range(count)]
    owned = [index for index, owner in enumerate(owners) if owner == mesh.holder_rank]
    widths = [shape[1] for shape in shapes]
    own_sizes = [
        rows[mesh.holder_rank] * width for rows, width in zip(rows_by_rank, widths, strict=True)
    ]
    send_sizes = [
        sum(own_sizes[index] for index in range(count) if owners[index] == rank) for rank in ranks
    ]
    receive_sizes = [
        sum(rows_by_rank[index][rank] * widths[index] for index in owned) for rank in ranks
    ]

    # Every rank sends its rows of a matrix to the owner, who receives them ordered by rank, then by matrix.
    received = mesh.all_to_all_shards(
        _one_after_another(shards, own_sizes), send_sizes, receive_sizes
    )
    nothing = received.new_empty(0)
    piece_sizes = [rows_by_rank[index][rank] * widths[index] for rank in ranks for index in owned]
    pieces = list(received.split(piece_sizes))
    del received

    def full_matrices() -> Iterator[Tensor]:
        for place, index in enumerate(owned):
            yield torch.cat(pieces[place :: len(owned)]).view(*shapes[index])
        pieces.clear()  # the stack is complete

    results = list[Tensor]()
    if owned:
        results = orthogonalize(full_matrices(), [shapes[index] for index in owned], dtype)

    # The results go back the same way: to every rank its rows, in the order in which it sent them.
    row_groups = [
        result.split(list(rows_by_rank[index]))
        for result, index in zip(results, owned, strict=True)
    ]
    result_rows = [group[rank].reshape(-1) for rank in ranks for group in row_groups]
    outgoing = torch.cat(result_rows).to(nothing.dtype) if result_rows else nothing
    del results, row_groups, result_rows
    returned = mesh.all_to_all_shards(outgoing, receive_sizes, send_sizes)
    return [
        flat.view(rows[mesh.holder_rank], width)
        for flat, rows, width in zip(returned.split(own_sizes), rows_by_rank, widths, strict=True)
    ]


def _one_after_another(tensors: Iterable[Tensor], sizes: Sequence[int]) -> Tensor:
    """The values of all tensors in one flat tensor; one of them is read at a time."""
    flat: Tensor | None = None
    start = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        if flat is None:
            flat = tensor.new_empty(sum(sizes))
        flat[start : start + size].copy_(tensor.reshape(-1))
        start += size
    assert flat is not None, "a stack has a matrix"
    return flat


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
        device_type: str | None = None,
        fused: Mapping[nn.Parameter, int] = MappingProxyType({}),
    ) -> None:
        """`device_type`: iterate as on this type of device; None: as on that of the parameters.

        `fused`: how many matrices each entry of a stack of experts holds, below each other.
        """
        self._shards = shards
        self._device_type = device_type
        self._fused = fused
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 (torch's, unused)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            matrices = [p for p in parameters if p.ndim == 2]
            for stack in stacks_of(matrices, self._shards.full_shape):
                self._update(stack, group["lr"], group["momentum"], group["weight_decay"])
            for parameter in parameters:
                if parameter.ndim == 3:
                    self._update_experts(
                        parameter, group["lr"], group["momentum"], group["weight_decay"]
                    )

    def _update(
        self, stack: list[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        weights = [p.data for p in stack]
        gradients = [p.grad for p in stack if p.grad is not None]
        buffers = [self._momentum_of(p) for p in stack]

        # Nesterov momentum: the gradient moved once more toward its average.
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        directions = (
            gradient.lerp(buffer, momentum)
            for gradient, buffer in zip(gradients, buffers, strict=True)
        )
        shapes = [self._shards.full_shape(p) for p in stack]
        dtype = self._iteration_dtype(weights[0])
        if stack[0] in self._shards.full_parameters:
            rows_by_rank = [self._shards.rows_by_rank(p) for p in stack]
            updates = orthogonalize_shards(
                directions, shapes, rows_by_rank, self._shards.mesh, dtype
            )
        else:
            updates = orthogonalize(directions, shapes, dtype)

        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        updates = [update.to(weight.dtype) for update, weight in zip(updates, weights, strict=True)]
        longest_side = max(shapes[0])
        torch._foreach_add_(
            weights, updates, alpha=-lr * ADAMW_ROOT_MEAN_SQUARE * math.sqrt(longest_side)
        )

    def _update_experts(
        self, parameter: nn.Parameter, lr: float, momentum: float, weight_decay: float
    ) -> None:
        """Of the experts that this rank holds, whose matrices are whole: shards of a stack are some of its experts."""
        assert parameter.grad is not None
        buffer = self._momentum_of(parameter)
        torch.lerp(buffer, parameter.grad, 1 - momentum, out=buffer)
        parameter.data.mul_(1 - lr * weight_decay)

        num_fused = self._fused.get(parameter, 1)
        gradients, buffers, weights = (
            list(stack.unflatten(1, (num_fused, -1)).flatten(0, 1))
            for stack in (parameter.grad.contiguous(), buffer, parameter.data)
        )
        if not weights:
            return  # more ranks than experts
        shape = weights[0].shape
        size = max(1, MUON_STACK // shape.numel())
        for start in range(0, len(weights), size):
            part = slice(start, start + size)
            directions = (
                gradient.lerp(buffer, momentum)
                for gradient, buffer in zip(gradients[part], buffers[part], strict=True)
            )
            matrices = weights[part]
            dtype = self._iteration_dtype(parameter)
            updates = orthogonalize(directions, [shape] * len(matrices), dtype)
            torch._foreach_add_(
                matrices,
                [update.to(parameter.dtype) for update in updates],
                alpha=-lr * ADAMW_ROOT_MEAN_SQUARE * math.sqrt(max(shape)),
            )

    def _momentum_of(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(
                parameter, memory_format=torch.contiguous_format
            )
        buffer: Tensor = state["momentum_buffer"]
        return buffer

    def _iteration_dtype(self, weight: Tensor) -> torch.dtype:
        return iteration_dtype(torch.device(self._device_type or weight.device))


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
        device_type=rounding.device_type,
        fused={p: fused_matrices(name, p.shape) for name, p in named_parameters.items()},
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
        is_tall = direction.shape[-2] > direction.shape[-1]
        x = direction.mT if is_tall else direction
        x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        size = 0.2 * math.sqrt(max(weight.shape[-2:]))
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
