"""Ranks that divide the experts of each layer: all-to-alls bring tokens there and back (GShard, arXiv:2006.16668).

Of N neighboring ranks each holds E/N experts of every layer, in the order of the ranks. It sends each row of its tokens
to the rank of the row's expert, computes the rows that arrive, and sends them back. How many rows travel differs from
step to step: a small all-to-all of counts comes first, and the host waits for it, once a layer and pass. A rank without
rows takes part as well.

N ranks, E experts of all ranks, S rows that a rank sends, R rows that arrive there.
"""

from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from bloomery.model.decoder import Decoder
from bloomery.model.experts import ExpertExchange, ExpertMLPs
from bloomery.model.io.parameters import is_split
from bloomery.model.io.weights import quantized_weights
from bloomery.parallel.mesh import Mesh

EXPERT_AXIS = "expert"


def divide_experts(model: Decoder, expert_mesh: DeviceMesh, exchange: ExpertExchange) -> None:
    """Leave this rank its share of each layer's experts, in place. On the meta device, before shards are applied.

    `expert_mesh`: of the ranks that divide them; `exchange`: how rows travel between those.

    Its parameters are then DTensors, of which each rank has some rows: weights, states and checkpoints treat them as
    those of shards.
    """
    for module in model.modules():
        if isinstance(module, ExpertMLPs):
            module.exchange = exchange
            # The bytes of each expert are whole: those of a stack are divided as it is.
            for _, weight in quantized_weights(module):
                weight.become_parameters()
            # Adapters of stacks have a matrix for each expert, too.
            for path, parameter in list(module.named_parameters()):
                count = len(parameter) // expert_mesh.size()
                # A tensor of its own: a view would keep the memory of all experts.
                divided = DTensor.from_local(
                    torch.empty_like(parameter.detach()[:count]),
                    expert_mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                owner, _, name = path.rpartition(".")
                module.get_submodule(owner).register_parameter(
                    name, nn.Parameter(divided, requires_grad=parameter.requires_grad)
                )


def is_divided(parameter: Tensor) -> bool:
    """Whether ranks divide the experts that the parameter belongs to."""
    return is_split(parameter) and parameter.device_mesh.mesh_dim_names == (EXPERT_AXIS,)


@final
class RowExchange:
    """Of this rank, with those that divide the experts: what the decoder calls an `ExpertExchange`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.size = mesh.expert
        self.name = mesh.expert_group.group_name
        _exchanges[self.name] = self

    def begin(self, ends_E: Tensor) -> "RowJourney":
        counts_NE = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).unflatten(0, (self.size, -1))
        # By rank, how many rows it sends to each expert of this one.
        arriving_NE = _all_to_all_rows(counts_NE, [1] * self.size, [1] * self.size, self.name)
        # The host waits for the device here: it must know how much it sends, and how much comes.
        sent, arriving = torch.stack([counts_NE.sum(1), arriving_NE.sum(1)]).tolist()
        experts_E = torch.arange(counts_NE.shape[1], device=ends_E.device)
        experts_R = experts_E.repeat(self.size).repeat_interleave(
            arriving_NE.flatten(), output_size=sum(arriving)
        )
        return RowJourney(self.name, experts_R, sent, arriving)

    def swap(self, rows: Tensor, sent: list[int], arriving: list[int]) -> Tensor:
        """Sends each rank of the group so many rows; returns those received, by rank."""
        received = rows.new_empty(sum(arriving), *rows.shape[1:])
        with self._mesh.clock.measure("expert", self._mesh.device, name="all_to_all"):
            dist.all_to_all_single(
                received, rows.contiguous(), arriving, sent, group=self._mesh.expert_group
            )
        return received


@final
class RowJourney:
    """What the decoder calls a `Journey`. `sent`, `arriving`: rows to and from each rank."""

    def __init__(self, name: str, experts_R: Tensor, sent: list[int], arriving: list[int]) -> None:
        self.experts_R = experts_R
        self._name = name
        self._sent = sent
        self._arriving = arriving

    def there(self, x_S: Tensor) -> Tensor:
        arrived: Tensor = _all_to_all_rows(x_S, self._sent, self._arriving, self._name)
        return arrived

    def back(self, x_R: Tensor) -> Tensor:
        returned: Tensor = _all_to_all_rows(x_R, self._arriving, self._sent, self._name)
        return returned


# An operator takes tensors, numbers and strings: it finds its exchange by the name of the process group.
_exchanges: dict[str, RowExchange] = {}


# An operator: selective checkpointing keeps its result.
@torch.library.custom_op("bloomery::all_to_all_rows", mutates_args=())
def _all_to_all_rows(rows: Tensor, sent: list[int], arriving: list[int], name: str) -> Tensor:
    return _exchanges[name].swap(rows, sent, arriving)


@_all_to_all_rows.register_fake
def _like_arriving(rows: Tensor, sent: list[int], arriving: list[int], name: str) -> Tensor:  # noqa: ARG001
    return rows.new_empty(sum(arriving), *rows.shape[1:])


def _save(ctx: Any, inputs: tuple[Tensor, list[int], list[int], str], output: Tensor) -> None:  # noqa: ARG001
    _, ctx.sent, ctx.arriving, ctx.name = inputs


def _differentiate(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None, None]:
    # The gradient of what was sent to a rank is there, where the gradient of what that rank received is.
    sent: Tensor = _all_to_all_rows(gradients.contiguous(), ctx.arriving, ctx.sent, ctx.name)
    return sent, None, None, None


_all_to_all_rows.register_autograd(_differentiate, setup_context=_save)
