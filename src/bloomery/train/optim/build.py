"""Building the plan's optimizer; its state is named after the parameters."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import final

import torch
import torch._dynamo  # imported by every torch optimizer: better now, with everything else
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bloomery.core.errors import UserError
from bloomery.model.io.parameters import local, part_of
from bloomery.model.limits import INT8_BLOCK, MUON_STACK, refuse_split_int8_blocks
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.estimate.states import OPTIMIZERS
from bloomery.plan.types import OptimizerPlan
from bloomery.train.optim.adafactor import Adafactor
from bloomery.train.optim.adamw import ChunkedAdamW, StatePlacement
from bloomery.train.optim.common import Gate, Rounding, Shards, exact_norm

Rule = Adafactor | ChunkedAdamW
ONE_RANK = Shards({})


@final
class FusedBackward:
    """One optimizer per parameter, called by autograd's hook: at most two gradients exist, or a compiled block's.

    The global norm is known only after backward, so gradients are clipped one by one. From the first non-finite
    gradient of a step on nothing is updated; the device decides, the host does not wait. `heads`: weights whose
    gradient a head adds to `.grad` itself, without a hook; they are updated at the next hook.
    """

    def __init__(self, rules: Mapping[nn.Parameter, Rule], heads: Sequence[nn.Parameter]) -> None:
        self._rules = dict(rules)
        self._heads = tuple(heads)
        self._armed = False
        self._factor = 1.0
        self._clip = float("inf")
        self._open: Tensor | None = None
        self._updates: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # norm; 1 if updated
        for parameter in self._rules:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def begin(self, *, factor: float, clip: float | None) -> None:
        """Call before backward. Gradients are scaled by `factor`; each is clipped to a norm of `clip`."""
        self._armed = True
        self._factor = factor
        self._clip = float("inf") if clip is None else clip
        self._open = None
        self._updates = {}

    def finish(self) -> float:
        """Call after backward: the unscaled norm over all gradients, non-finite if one is."""
        for parameter in self._rules:
            if parameter.grad is not None:
                self._update(parameter)
        self._armed = False
        if not self._updates:
            return 0.0
        pairs = torch.stack([torch.stack(pair) for pair in self._updates.values()]).tolist()
        for parameter, (_, updated) in zip(self._updates, pairs, strict=True):
            if not updated:
                self._rules[parameter].state[parameter]["step"] -= 1
        norms = {parameter: norm for parameter, (norm, _) in zip(self._updates, pairs, strict=True)}
        self._open = None
        self._updates = {}
        return math.sqrt(sum(norms.get(parameter, 0.0) ** 2 for parameter in self._rules))

    def drop(self) -> None:
        """Reset after an interrupted backward."""
        self._armed = False
        self._open = None
        self._updates = {}

    def _ready(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        assert isinstance(parameter, nn.Parameter)
        for head in self._heads:
            if head is not parameter and head.grad is not None:
                self._update(head)
        self._update(parameter)

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        norm = exact_norm(parameter.grad) / self._factor
        finite = norm.isfinite().to(torch.float32)
        self._open = finite if self._open is None else self._open * finite
        # as in torch's clip_grad_norm_
        scale = (self._clip / (norm + 1e-6)).clamp(max=1.0) / self._factor
        self._rules[parameter].step(gate=Gate(self._open, scale))
        parameter.grad = None
        self._updates[parameter] = norm, self._open


def head_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of output layers outside the blocks that are not tied to an embedding."""
    embedded = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    found = [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." not in name and module.weight.requires_grad
    ]
    return [
        weight for weight in found if isinstance(weight, nn.Parameter) and weight not in embedded
    ]


# Quintic Newton-Schulz iteration, Keller Jordan, "Muon" (2024), the coefficients that torch.optim.Muon uses too.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
SAME_ON_RANKS = ("step", "col_var")  # slots that every rank has whole
_AS_WEIGHTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # stored in the weight's dtype


def orthogonalize(stack_NRC: Tensor) -> Tensor:
    """Approximately the nearest matrix with orthonormal rows (singular values 0.7 to 1.2) to each of a stack.

    In bfloat16; the matrices are wide or square, so that the Gram matrix is the smaller one.
    """
    assert stack_NRC.shape[1] <= stack_NRC.shape[2]
    a, b, c = _NEWTON_SCHULZ
    x = stack_NRC.to(torch.bfloat16)
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def orthogonal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """`orthogonalize` of matrices of one shape or its transpose, in their own orientation."""
    wide = [matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix for matrix in matrices]
    stack_NRC = orthogonalize(torch.stack(wide))
    return [
        u if matrix.shape == u.shape else u.mT
        for u, matrix in zip(stack_NRC, matrices, strict=True)
    ]


def across_shards(
    work: Callable[[Sequence[Tensor]], list[Tensor]],
    parts: Sequence[Tensor],
    rows: Sequence[Sequence[int]],
    mesh: Mesh,
) -> list[Tensor]:
    """`work` on whole matrices of which each rank has some rows: this rank's rows of the results.

    `rows`: of each matrix, by rank. Each rank works on its share of the matrices: one all-to-all brings it their rows,
    another returns those of the results.
    """
    owner = [place * mesh.shard // len(parts) for place in range(len(parts))]
    own = mesh.shard_rank
    widths = [part.shape[1] for part in parts]
    mine = [place for place, rank in enumerate(owner) if rank == own]
    sent = [
        sum(parts[i].numel() for i in range(len(parts)) if owner[i] == rank)
        for rank in range(mesh.shard)
    ]
    held = [sum(rows[i][rank] * widths[i] for i in mine) for rank in range(mesh.shard)]
    arrived = mesh.all_to_all_shards(torch.cat([part.reshape(-1) for part in parts]), sent, held)
    pieces = arrived.split([rows[i][rank] * widths[i] for rank in range(mesh.shard) for i in mine])
    count = len(mine)
    whole = [
        torch.cat([pieces[rank * count + place].view(-1, widths[i]) for rank in range(mesh.shard)])
        for place, i in enumerate(mine)
    ]
    results = [
        result.split(list(rows[i]))
        for result, i in zip(work(whole) if whole else [], mine, strict=True)
    ]
    back = [result[rank].reshape(-1) for rank in range(mesh.shard) for result in results]
    outgoing = torch.cat(back).to(parts[0].dtype) if back else parts[0].new_empty(0)
    returned = mesh.all_to_all_shards(outgoing, held, sent).split([part.numel() for part in parts])
    return [flat.view_as(part) for flat, part in zip(returned, parts, strict=True)]


def stacks(
    parameters: Iterable[nn.Parameter],
    shape_of: Callable[[nn.Parameter], Sequence[int]] = lambda parameter: parameter.shape,
) -> list[list[nn.Parameter]]:
    """Matrices of one shape or its transpose, in stacks of bounded size and a fixed order."""
    by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        by_shape.setdefault(tuple(sorted(shape_of(parameter))), []).append(parameter)
    runs = []
    for shape, members in by_shape.items():
        size = max(1, MUON_STACK // math.prod(shape))
        runs += [members[i : i + size] for i in range(0, len(members), size)]
    return runs


@final
class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices inside blocks; equal to torch.optim.Muon with `match_rms_adamw`, batched.

    Batched matmuls take two thirds of the time on a CPU and keep a GPU busy. The update's root mean square is scaled to
    AdamW's 0.2 (arXiv:2502.16982, section 2.2), so that both can use one learning rate.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        shards: Shards = ONE_RANK,
    ) -> None:
        self._shards = shards
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 (torch's, unused)
        for group in self.param_groups:
            for run in stacks(
                (p for p in group["params"] if p.grad is not None), self._shards.shape
            ):
                self._step(run, group["lr"], group["momentum"], group["weight_decay"])

    def _step(
        self, run: list[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        weights = [p.data for p in run]
        gradients = [p.grad for p in run if p.grad is not None]
        buffers = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in run]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        steepest = [g.lerp(m, momentum) for g, m in zip(gradients, buffers, strict=True)]
        if self._shards.whole:
            found = across_shards(
                orthogonal, steepest, [self._shards.rows(p) for p in run], self._shards.mesh
            )
        else:
            found = orthogonal(steepest)
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        update = [u.to(p.dtype) for u, p in zip(found, weights, strict=True)]
        torch._foreach_add_(
            weights, update, alpha=-lr * 0.2 * math.sqrt(max(self._shards.shape(run[0])))
        )


@final
class OptimizersContainer:
    """One or more torch optimizers with one interface, for a model's trainable parameters."""

    def __init__(
        self,
        members: list[torch.optim.Optimizer],
        names: Mapping[nn.Parameter, str],
        backward: FusedBackward | None = None,
        shards: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        """`names`: of the parameters that `members` update. `shards`: the model's parameter of each that is a shard."""
        self._members = members
        self._names = dict(names)
        self._backward = backward
        self._shards = dict(shards)
        for group in self._groups():
            group["peak"] = group["lr"]

    def _groups(self) -> list[dict[str, object]]:
        return [group for member in self._members for group in member.param_groups]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's trainable parameters, in its order."""
        return [self._shards.get(parameter, parameter) for parameter in self._names]

    @property
    def members(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers."""
        return list(self._members)

    @property
    def fused_backward(self) -> bool:
        """A step is `begin_step`, backward, `finish_step` instead of backward, `step`."""
        return self._backward is not None

    def step(self, lr_scale: float) -> None:
        """One update at `lr_scale` times each peak learning rate."""
        self._set_rate(lr_scale)
        with torch.no_grad():
            for part, whole in self._shards.items():
                part.data = local(whole)
                part.grad = None if whole.grad is None else local(whole.grad)
        for member in self._members:
            member.step()

    def begin_step(self, lr_scale: float, *, factor: float, clip: float | None) -> None:
        """Update in the next backward, whose gradients are scaled by `factor`. AdamW clips each to a norm of `clip`.

        Adafactor clips its updates and needs no gradient clipping.
        """
        assert self._backward is not None
        self._set_rate(lr_scale)
        self._backward.begin(
            factor=factor, clip=None if isinstance(self._members[0], Adafactor) else clip
        )

    def finish_step(self) -> float:
        """Call after that backward: the global norm; if non-finite, the update is incomplete."""
        assert self._backward is not None
        return self._backward.finish()

    def _set_rate(self, lr_scale: float) -> None:
        for group in self._groups():
            group["lr"] = group["peak"] * lr_scale  # type: ignore[operator]  # a group holds anything

    def zero_grad(self) -> None:
        """Drop every gradient and the state of an interrupted backward."""
        if self._backward is not None:
            self._backward.drop()
        for parameter in (*self._names, *self._shards.values()):
            parameter.grad = None

    def named_tensors(self) -> dict[str, Tensor]:
        """The live state tensors with dimensions, by "parameter.slot": this rank's rows where it has a shard."""
        for member in self._members:
            if isinstance(member, ChunkedAdamW):
                member.settle()
        return {name: value for name, value in self._slots() if value.ndim > 0}

    def is_split(self, key: str) -> bool:
        """Whether the state "parameter.slot" is this rank's rows of a larger tensor."""
        name, _, slot = key.rpartition(".")
        return slot not in SAME_ON_RANKS and name in {self._names[part] for part in self._shards}

    def scalars(self) -> dict[str, float]:
        """State without dimensions (step counts), by "parameter.slot"."""
        return {name: value.item() for name, value in self._slots() if value.ndim == 0}

    def _slots(self) -> Iterable[tuple[str, Tensor]]:
        for member in self._members:
            for parameter, state in member.state.items():
                assert isinstance(parameter, nn.Parameter)
                for slot, value in state.items():
                    yield f"{self._names[parameter]}.{slot}", value

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:
        """Replace all state by copies of the values of `named_tensors` and `scalars`, whole; a shard takes its rows.

        Raises UserError for parameters that this model does not train, or another state dtype.
        """
        stored: dict[str, dict[str, Tensor]] = {}
        for key, value in [
            *tensors.items(),
            *((k, torch.tensor(v, dtype=torch.float32)) for k, v in scalars.items()),
        ]:
            parameter, _, slot = key.rpartition(".")
            stored.setdefault(parameter, {})[slot] = value
        if unknown := sorted(set(stored) - set(self._names.values())):
            raise UserError(
                f"optimizer state for a parameter that is not trained: {unknown[0]}",
                where=f"{len(unknown)} of {len(stored)} parameters in the checkpoint",
                fix="resume with the recipe that the run started with",
            )
        for member in self._members:
            member.state.clear()
            for group in member.param_groups:
                for parameter in group["params"]:
                    slots = stored.get(self._names[parameter])
                    if slots is None:
                        continue
                    if (whole := self._shards.get(parameter)) is not None:
                        slots = {
                            slot: value
                            if slot in SAME_ON_RANKS
                            else part_of(value, whole, block=INT8_BLOCK)
                            for slot, value in slots.items()
                        }
                    if isinstance(member, ChunkedAdamW):
                        member.state[parameter] = member.adopted(
                            parameter, slots, name=self._names[parameter]
                        )
                    else:
                        member.state[parameter] = _placed(
                            slots, parameter, fused=bool(group.get("fused"))
                        )


def _placed(
    slots: Mapping[str, Tensor], parameter: nn.Parameter, *, fused: bool
) -> dict[str, Tensor]:
    """torch's rules: step counts on the host unless fused; moments in the weight's dtype."""
    host = torch.device("cpu")
    return {
        slot: value.to(
            parameter.device if fused or value.ndim else host,
            copy=True,
            dtype=parameter.dtype if slot in _AS_WEIGHTS else value.dtype,
        )
        for slot, value in slots.items()
    }


def _decay_groups(
    named: Mapping[str, nn.Parameter], weight_decay: float
) -> list[dict[str, object]]:
    """Weight decay for matrices and embeddings, not for norms and biases, as in nanoGPT's `configure_optimizers`."""
    decayed = [p for p in named.values() if p.ndim >= 2]
    others = [p for p in named.values() if p.ndim < 2]
    return [
        {"params": p, "weight_decay": w} for p, w in ((decayed, weight_decay), (others, 0.0)) if p
    ]


def build_optimizer(
    model: nn.Module, plan: OptimizerPlan, *, seed: int = 0, mesh: Mesh = SINGLE_RANK
) -> OptimizersContainer:
    """The plan's optimizer over the trainable parameters. `seed`: of stochastic rounding.

    Must run before the first forward: FSDP2 leaves the root unsharded after it. `muon` gives matrices inside blocks to
    Muon at `muon_learning_rate`, and embeddings, head, norms and biases to AdamW at `learning_rate`.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Optimizers update this rank's rows as plain tensors: each operation of a DTensor costs the host time.
    named = {
        name: nn.Parameter(local(p.detach())) if isinstance(p, DTensor) else p
        for name, p in trained.items()
    }
    names = {p: name for name, p in named.items()}
    shards = Shards({p: trained[name] for name, p in named.items() if p is not trained[name]}, mesh)
    container = partial(OptimizersContainer, names=names, shards=shards.whole)
    spec = OPTIMIZERS[plan.kind]
    rounding = Rounding(names, seed, plan.stochastic_rounding, shards)
    if plan.state_dtype == "int8" and shards.whole:
        refuse_split_int8_blocks(
            {name: shards.shape(part) for part, name in names.items()}, mesh.shard
        )
    placement = StatePlacement(away=plan.offload)
    chunked = partial(_chunked, plan=plan, rounding=rounding, placement=placement)
    if plan.fused_backward:
        rules = {
            p: chunked(_decay_groups({name: p}, plan.weight_decay)) for name, p in named.items()
        }
        return OptimizersContainer(
            list(rules.values()), names, FusedBackward(rules, head_weights(model))
        )
    if spec.stacks:  # Muon
        matrices = {name: p for name, p in named.items() if p.ndim == 2 and ".layers." in name}
        rest = {name: p for name, p in named.items() if name not in matrices}
        inside = list(matrices.values())
        muon = Muon(
            inside,
            lr=plan.muon_learning_rate,
            momentum=plan.momentum,
            weight_decay=plan.weight_decay,
            shards=shards,
        )
        return container([muon, _torchs(rest, plan)])
    if (
        not spec.own
        and plan.state_dtype == "float32"
        and not (plan.offload or plan.stochastic_rounding)
    ):
        return container([_torchs(named, plan)])
    return container([chunked(_decay_groups(named, plan.weight_decay))])


def _torchs(named: Mapping[str, nn.Parameter], plan: OptimizerPlan) -> torch.optim.AdamW:
    groups = _decay_groups(named, plan.weight_decay)
    return torch.optim.AdamW(
        groups, lr=plan.learning_rate, betas=plan.betas, eps=plan.eps, fused=plan.fused
    )


def _chunked(
    groups: list[dict[str, object]],
    *,
    plan: OptimizerPlan,
    rounding: Rounding,
    placement: StatePlacement,
) -> Adafactor | ChunkedAdamW:
    if plan.kind == "adafactor":
        return Adafactor(groups, lr=plan.learning_rate, rounding=rounding)
    assert plan.kind == "adamw", "the plan refuses Muon with lean states and in backward"
    return ChunkedAdamW(
        groups,
        lr=plan.learning_rate,
        betas=plan.betas,
        eps=plan.eps,
        states=plan.state_dtype,
        rounding=rounding,
        placement=placement,
    )
