"""Ranks that share each sequence: all-to-alls around attention trade tokens for heads (Ulysses, arXiv:2309.14509).

Each of N neighboring ranks holds T/N tokens of a sequence through every layer. Attention alone needs them all: there a
rank has all T tokens of 1/N of the heads. The key/value heads must divide by N. A loss of whole texts needs the few
numbers of the head of all T tokens, too: `all_tokens`.

N ranks, B batch, t tokens of a rank, T = N t tokens of a sequence, H heads of all ranks, E head width.
"""

from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from bloomery.parallel.mesh import Mesh


@final
class HeadExchange:
    """Of this rank, with those that share its sequences: what the decoder calls a `SequenceExchange`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.size = mesh.context
        self._name = mesh.context_group.group_name
        _exchanges[self._name] = self

    def to_heads(
        self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens of this rank's share of the heads, from this rank's tokens of all heads. One all-to-all."""
        # For each rank its heads of the queries, keys and values, side by side: they travel together.
        parts_NBTHE = [
            x.transpose(1, 2).unflatten(2, (self.size, -1)).movedim(2, 0)
            for x in (q_BHTE, k_BKTE, v_BKTE)
        ]
        num_heads = [part.shape[3] for part in parts_NBTHE]
        received_NBTHE = _all_to_all(torch.cat(parts_NBTHE, 3).contiguous(), self._name)
        # The parts of a sequence one after the other.
        x_BTHE = received_NBTHE.movedim(0, 1).flatten(1, 2)
        q_BHTE, k_BKTE, v_BKTE = (part.transpose(1, 2) for part in x_BTHE.split(num_heads, 2))
        return q_BHTE, k_BKTE, v_BKTE

    def to_tokens(self, y_BHTE: Tensor) -> Tensor:
        """The way back: this rank's tokens of all heads, from all tokens of its heads."""
        parts_NBTHE = y_BHTE.transpose(1, 2).unflatten(1, (self.size, -1)).movedim(1, 0)
        received_NBTHE: Tensor = _all_to_all(parts_NBTHE.contiguous(), self._name)
        return received_NBTHE.movedim(0, 2).flatten(2, 3).transpose(1, 2)

    def swap(self, parts: Tensor) -> Tensor:
        """Sends part i to the i-th rank of the group; returns the parts received, by rank."""
        received = torch.empty_like(parts)
        with self._mesh.clock.measure("context", self._mesh.device, name="all_to_all"):
            dist.all_to_all_single(received, parts, group=self._mesh.context_group)
        return received


# An operator takes tensors and strings: it finds its exchange by the name of the process group.
_exchanges: dict[str, HeadExchange] = {}


def exchange_size(name: str) -> int:
    """How many ranks trade in the exchange of a process group."""
    return _exchanges[name].size


# An operator: compiled blocks call it, selective checkpointing keeps its result, and a simulation sees its shape.
@torch.library.custom_op("bloomery::all_to_all", mutates_args=())
def _all_to_all(parts: Tensor, name: str) -> Tensor:
    return _exchanges[name].swap(parts)


@_all_to_all.register_fake
def _like_parts(parts: Tensor, name: str) -> Tensor:  # noqa: ARG001
    return torch.empty_like(parts)


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:  # noqa: ARG001
    _, ctx.name = inputs


def _differentiate(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
    # The gradient of what was sent to a rank is there, where the gradient of what that rank received is.
    sent: Tensor = _all_to_all(gradients.contiguous(), ctx.name)
    return sent, None


_all_to_all.register_autograd(_differentiate, setup_context=_save)


def all_tokens(part: Tensor, mesh: Mesh) -> Tensor:
    """Numbers of all tokens [..., T], from those of this rank [..., t], with a gradient.

    Every rank of the group goes on with the same numbers, and counts an Nth of what it makes of them.
    """
    numbers: Tensor = _AllTokens.apply(part, mesh)  # type: ignore[no-untyped-call]  # torch's `apply`
    return numbers


class _AllTokens(torch.autograd.Function):
    """Gathers; the gradient of a rank's tokens is N times its own part, as all N ranks have the same one."""

    @staticmethod
    def forward(context: Any, part: Tensor, mesh: Mesh) -> Tensor:
        context.mesh = mesh
        return mesh.all_gather_tokens(part)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        mesh = context.mesh
        return mesh.own_tokens(gradient) * mesh.context, None
