"""The plan's optimizer over a model's trainable parameters; its state is named after them.

The state of a parameter is a few tensors, its slots, each named "parameter.slot": `exp_avg` is a slot of AdamW. Under
FSDP2 a rank has a shard of most parameters: some of their rows, and these rows of their slots. Checkpoints have full
tensors.
"""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol, cast, final, runtime_checkable

import torch
import torch._dynamo  # imported by every torch optimizer: better now, with everything else
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bloomery.core.errors import UserError
from bloomery.facts.counting import is_of_experts
from bloomery.facts.limits import INT8_BLOCK, refuse_split_int8_blocks
from bloomery.facts.optimizers import OPTIMIZERS, USUAL_OPTIMIZER, updating_kind
from bloomery.model.decoder import trained_parameters
from bloomery.model.io.parameters import local, rows_of
from bloomery.model.io.safetensors import StoredPart
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.types import OptimizerPlan
from bloomery.train.optim.common import Rounding, Shards, State, scale_gradients
from bloomery.train.optim.fused_backward import FusedBackward, GatedOptimizer, head_weights_of
from bloomery.train.optim.placement import StatePlacement
from bloomery.train.optim.registry import code_of

# Slots that are loaded in the dtype of the weight, as torch does it; the others keep that of the checkpoint.
IN_WEIGHT_DTYPE = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def is_same_on_ranks(slot: str, name: str) -> bool:
    """Whether a slot of a shard is no rows, but the same on all ranks, and so is neither gathered for a checkpoint nor
    cut from one: the count of steps, and Adafactor's variances of columns, which are sums over the rows of all ranks.

    Those of a stack of experts are one row for each expert.
    """
    return slot == "step" or (slot == "col_var" and not is_of_experts(name))


@runtime_checkable
class OwnStateFormat(Protocol):
    """An optimizer whose states have another format or place than torch's."""

    def loaded_state(self, parameter: nn.Parameter, slots: State, *, name: str) -> State:
        """Copies of a parameter's slots from a checkpoint, in this optimizer's format and place."""
        ...

    def settle(self) -> None:
        """Wait until the host can read every state."""
        ...


@runtime_checkable
class ScalingOptimizer(Protocol):
    """An optimizer that need not pass over memory to scale gradients before its update."""

    def step_scaled(self, factor: float) -> None:
        """One update by the gradients times a factor, which may be scaled in place."""
        ...


@final
class OptimizersContainer:
    """One or more torch optimizers (the members) with one interface, for a model's trainable parameters.

    Muon has two members, for matrices in blocks and for everything else; fused into backward, each parameter has one.
    """

    def __init__(
        self,
        members: list[torch.optim.Optimizer],
        names: Mapping[nn.Parameter, str],
        *,
        placement: StatePlacement,
        clips_updates: bool = False,
        backward: FusedBackward | None = None,
        full_parameters: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        """`names`: of the parameters that `members` update. `full_parameters`: of each of them that is this rank's rows
        as a plain tensor, the model's own parameter (a DTensor). `clips_updates`: whether the optimizer clips its
        updates itself, so that gradients are not clipped. `placement`: of the members' states.
        """
        self._members = members
        self._names = dict(names)
        self._placement = placement
        self._clips_updates = clips_updates
        self._backward = backward
        self._full_parameters = dict(full_parameters)
        self._sharded_names = {self._names[shard] for shard in full_parameters}
        # Schedules scale the learning rate of each group from its peak; groups may have different ones (Muon).
        for group in self._groups():
            group["peak"] = group["lr"]

    def _groups(self) -> list[dict[str, object]]:
        return [group for member in self._members for group in member.param_groups]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's trainable parameters, in its order."""
        return list(self.named_parameters.values())

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The same by name."""
        return {
            name: self._full_parameters.get(parameter, parameter)
            for parameter, name in self._names.items()
        }

    @property
    def members(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers."""
        return list(self._members)

    @property
    def fused_backward(self) -> bool:
        """A step is `begin_step`, backward, `finish_step` instead of backward, `step`."""
        return self._backward is not None

    def step(self, lr_scale: float, *, gradient_factor: float = 1.0) -> None:
        """One update at `lr_scale` times each peak learning rate, by the gradients times a factor.

        Afterwards some of them may be scaled in place, and others as they were.
        """
        self._set_learning_rate(lr_scale)
        # FSDP2 may have moved its shards, and each backward makes new gradients: the plain tensors of the members
        # become this rank's rows of both.
        with torch.no_grad():
            for shard, parameter in self._full_parameters.items():
                shard.data = local(parameter)
                shard.grad = None if parameter.grad is None else local(parameter.grad)
        for member in self._members:
            if isinstance(member, ScalingOptimizer):
                member.step_scaled(gradient_factor)
                continue
            parameters = [p for group in member.param_groups for p in group["params"]]
            scale_gradients([p.grad for p in parameters if p.grad is not None], gradient_factor)
            member.step()
        self._placement.release_sent()

    def begin_step(self, lr_scale: float, *, factor: float, clip: float | None) -> None:
        """Call before a backward, which then updates each parameter as soon as its gradient is complete.

        `factor`: the one by which the loss was multiplied (the loss scale of float16, else 1); each gradient is first
        divided by it. Then each gradient by itself is clipped to a norm of `clip`: in the unit of the unscaled
        gradients, and per parameter, because the global norm is known only after the backward. None: no clipping.
        """
        assert self._backward is not None
        self._set_learning_rate(lr_scale)
        self._backward.begin(factor=factor, clip=None if self._clips_updates else clip)

    def finish_step(self) -> float:
        """Call after that backward: the norm over all gradients, unscaled and before clipping.

        Where it is not finite, the update is incomplete: only the parameters before the first such gradient have it.
        """
        assert self._backward is not None
        norm = self._backward.finish()
        self._placement.release_sent()
        return norm

    def _set_learning_rate(self, lr_scale: float) -> None:
        for group in self._groups():
            group["lr"] = group["peak"] * lr_scale  # type: ignore[operator]  # a group holds anything

    def zero_grad(self) -> None:
        """Drop every gradient, and forget a backward that was interrupted after `begin_step`."""
        if self._backward is not None:
            self._backward.reset()
        for parameter in (*self._names, *self._full_parameters.values()):
            parameter.grad = None

    def named_tensors(self) -> dict[str, Tensor]:
        """The live state tensors with dimensions, by "parameter.slot": this rank's rows where `is_split`."""
        for member in self._members:
            if isinstance(member, OwnStateFormat):
                member.settle()
        return {name: value for name, value in self._named_slots() if value.ndim > 0}

    def scalars(self) -> dict[str, float]:
        """State without dimensions (step counts), by "parameter.slot". The host waits for the device at most once."""
        values = {name: value for name, value in self._named_slots() if value.ndim == 0}
        names_by_place = dict[tuple[torch.device, torch.dtype], list[str]]()
        for name, value in values.items():
            names_by_place.setdefault((value.device, value.dtype), []).append(name)
        numbers = dict[str, float]()
        for names in names_by_place.values():
            of_place = torch.stack([values[name] for name in names]).tolist()
            numbers |= dict(zip(names, of_place, strict=True))
        return {name: numbers[name] for name in values}

    def is_split(self, key: str) -> bool:
        """Whether the state "parameter.slot" is this rank's rows of a tensor that a checkpoint has in full."""
        name, _, slot = key.rpartition(".")
        return name in self._sharded_names and not is_same_on_ranks(slot, name)

    def _named_slots(self) -> Iterable[tuple[str, Tensor]]:
        for member in self._members:
            for parameter, state in member.state.items():
                assert isinstance(parameter, nn.Parameter)
                for slot, value in state.items():
                    yield f"{self._names[parameter]}.{slot}", value

    def load(
        self,
        tensors: Mapping[str, Tensor],
        scalars: Mapping[str, float],
        *,
        other_stages: Collection[str] = (),
    ) -> None:
        """Replace all state by copies of the full values of `named_tensors` and `scalars`; a shard takes its rows.

        `tensors`: of a StoredPart these rows alone are read. `other_stages`: names of parameters whose states are left
        to other stages of a pipeline. Raises UserError for parameters that this model does not train, or another state
        dtype.
        """
        # "parameter.slot" keys become the slots of each parameter.
        keys_by_name: dict[str, list[str]] = {}
        for key in (*tensors, *scalars):
            keys_by_name.setdefault(key.rpartition(".")[0], []).append(key)

        known_names = {*self._names.values(), *other_stages}
        unknown_names = sorted(keys_by_name.keys() - known_names)
        if unknown_names:
            raise UserError(
                f"optimizer state for a parameter that is not trained: {unknown_names[0]}",
                where=f"{len(unknown_names)} of {len(keys_by_name)} parameters in the checkpoint",
                fix="resume with the recipe that the run started with",
            )

        # A parameter without state in the checkpoint starts with that of its first update. The slots of one parameter
        # at a time are in memory twice.
        for member in self._members:
            member.state.clear()
            for group in member.param_groups:
                for parameter in group["params"]:
                    name = self._names[parameter]
                    if name not in keys_by_name:
                        continue
                    slots = {
                        key.rpartition(".")[2]: torch.tensor(scalars[key], dtype=torch.float32)
                        if key in scalars
                        else self._rows_of_this_rank(parameter, key, tensors)
                        for key in keys_by_name[name]
                    }
                    if isinstance(member, OwnStateFormat):
                        member.state[parameter] = member.loaded_state(parameter, slots, name=name)
                    else:
                        fused = bool(group.get("fused"))
                        member.state[parameter] = _torch_state(slots, parameter, fused=fused)

    def _rows_of_this_rank(
        self, parameter: nn.Parameter, key: str, tensors: Mapping[str, Tensor]
    ) -> Tensor:
        full_parameter = self._full_parameters.get(parameter)
        name, _, slot = key.rpartition(".")
        if full_parameter is None or is_same_on_ranks(slot, name):
            return tensors[key]
        if isinstance(tensors, StoredPart):
            num_rows = tensors.num_rows(key)
            return tensors.rows(key, *rows_of(num_rows, full_parameter, block=INT8_BLOCK))
        full_state = tensors[key]
        start, count = rows_of(len(full_state), full_parameter, block=INT8_BLOCK)
        return full_state[start : start + count]


def _torch_state(slots: State, parameter: nn.Parameter, *, fused: bool) -> State:
    """torch's rules: step counts on the host unless fused; moments in the weight's dtype."""
    host = torch.device("cpu")
    return {
        slot: value.to(
            parameter.device if fused or value.ndim else host,
            copy=True,
            dtype=parameter.dtype if slot in IN_WEIGHT_DTYPE else value.dtype,
        )
        for slot, value in slots.items()
    }


def build_optimizer(
    model: nn.Module,
    plan: OptimizerPlan,
    *,
    seed: int = 0,
    mesh: Mesh = SINGLE_RANK,
    device_type: str | None = None,
    rates: Mapping[str, float] = MappingProxyType({}),
) -> OptimizersContainer:
    """The plan's optimizer over the trainable parameters. `seed`: of stochastic rounding.

    Native optimizers update one piece of the values after another: as many (`common.piece_size`) as keep a GPU busy, or
    fit into the cache of a CPU core. So float32 intermediates take memory for a piece only. `device_type`: take and
    move pieces as on this type of device, where it is not the parameters' own (a simulation of a GPU on a CPU).
    `rates`: peak learning rates by parameter, of those that have another one than the plan's; AdamW updates them.

    Must run before the first forward. FSDP2 keeps the root's parameters (such as the head) gathered from a forward to
    the next backward: they are plain full tensors then, and would be taken for parameters that are not sharded.
    """
    trainable = trained_parameters(model)

    # Optimizers update this rank's rows as plain tensors: each operation of a DTensor costs the host time.
    parameters_by_name = {
        name: nn.Parameter(local(p.detach())) if isinstance(p, DTensor) else p
        for name, p in trainable.items()
    }
    names = {parameter: name for name, parameter in parameters_by_name.items()}
    full_parameters = {
        p: trainable[name] for name, p in parameters_by_name.items() if p is not trainable[name]
    }
    shards = Shards(full_parameters, mesh)

    # A block of int8 values has one scale, so all of it must be on one rank.
    if plan.state_dtype == "int8" and full_parameters:
        full_shapes = {
            name: shards.full_shape(parameter)
            for name, parameter in parameters_by_name.items()
            if parameter in full_parameters
        }
        refuse_split_int8_blocks(full_shapes, mesh.holders)

    clips_updates = OPTIMIZERS[plan.kind].clips_updates
    rounding = Rounding(names, seed, plan.stochastic_rounding, shards, device_type)
    placement = StatePlacement(offload=plan.offload, device_type=device_type)
    if not parameters_by_name:
        return OptimizersContainer(
            [], {}, placement=placement
        )  # a stage of a pipeline whose weights are all frozen
    if not plan.fused_backward:
        members = []
        for rate in dict.fromkeys(rates.get(name) for name in parameters_by_name):
            parameters = {n: p for n, p in parameters_by_name.items() if rates.get(n) == rate}
            plan_of_rate = plan
            if rate is not None:
                kind = plan.kind if OPTIMIZERS[plan.kind].own_rate is None else USUAL_OPTIMIZER
                plan_of_rate = plan.model_copy(update={"learning_rate": rate, "kind": kind})
            members += _members(parameters, plan_of_rate, rounding, placement)
        return OptimizersContainer(
            members,
            names,
            placement=placement,
            clips_updates=clips_updates,
            full_parameters=full_parameters,
        )

    # Fused into backward each parameter has an optimizer of its own, which autograd's hook calls. The plan refuses that
    # for several devices: there are no shards here.
    members = []
    for name, parameter in parameters_by_name.items():
        (member,) = _members({name: parameter}, plan, rounding, placement)
        members.append(member)

    # Their steps take a gate: numbers on the device that scale a gradient, or from the first non-finite gradient of a
    # backward on leave weights and states as they are, without the host waiting to see it. The plan refuses a fused
    # backward for optimizers without one.
    gated_members = cast(list[GatedOptimizer], members)
    backward = FusedBackward(
        dict(zip(parameters_by_name.values(), gated_members, strict=True)),
        head_weights_of(model),
        rounding,
    )
    return OptimizersContainer(
        members, names, placement=placement, clips_updates=clips_updates, backward=backward
    )


def _members(
    named_parameters: Mapping[str, nn.Parameter],
    plan: OptimizerPlan,
    rounding: Rounding,
    placement: StatePlacement,
) -> list[torch.optim.Optimizer]:
    """The torch optimizers of the plan's kind, then AdamW's of the parameters that it leaves."""
    by_kind: dict[str, dict[str, nn.Parameter]] = {plan.kind: {}}
    for name, parameter in named_parameters.items():
        kind = updating_kind(plan.kind, name, rounding.shards.full_shape(parameter))
        by_kind.setdefault(kind, {})[name] = parameter
    # LoRA matrices leave nothing for AdamW, and norms alone nothing for Muon.
    return [
        member
        for kind, parameters in by_kind.items()
        if parameters
        for member in code_of(kind).build(
            parameters, plan=plan, rounding=rounding, placement=placement
        )
    ]
