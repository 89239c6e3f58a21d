"""Where the states of an optimizer wait for their step: beside the weights, or in the host's memory."""

from collections.abc import Iterator, Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from bloomery.parallel import offload as copies
from bloomery.train.optim.common import gathered, same_place

# Of a piece of an optimizer's work, by moment and by tensor of a moment: what is kept of each span.
Kept = list[list[list[Tensor]]]


class Home(Protocol):
    def place(self, fresh: Tensor) -> Tensor:
        """A new state, or one from a checkpoint, where it is at home."""
        ...

    def visits(self, pieces: Sequence[Kept], device: torch.device) -> Iterator[list[list[Tensor]]]:
        """The states of one piece after the other, on the device, spans one behind the other."""
        ...

    def send(self, values: list[Tensor], targets: list[list[Tensor]]) -> None:
        """What became of one moment of the piece that was last brought, back home."""
        ...

    def settle(self) -> None:
        """Returns when the host may read every state."""
        ...


@final
class Beside:
    """In the memory of the weights' own device."""

    def place(self, fresh: Tensor) -> Tensor:
        return fresh

    def visits(self, pieces: Sequence[Kept], device: torch.device) -> Iterator[list[list[Tensor]]]:  # noqa: ARG002 (a Home's)
        for piece in pieces:
            yield [[gathered(parts) for parts in moment] for moment in piece]

    def send(self, values: list[Tensor], targets: list[list[Tensor]]) -> None:
        for value, parts in zip(values, targets, strict=True):
            put_back(value, parts)

    def settle(self) -> None:
        return


def put_back(value: Tensor, parts: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """Cut where its parts were joined; nothing to do where it is the part itself."""
    if len(parts) == 1:
        if not same_place(value, parts[0]):
            parts[0].copy_(value, non_blocking=non_blocking)
        return
    cut = value.split_with_sizes([len(part) for part in parts])
    torch._foreach_copy_(list(parts), list(cut), non_blocking=non_blocking)


@final
class Host:
    """In pinned memory of the host. Pieces visit the device in turn: one is worked on, one comes, one or two go.

    Copies run beside the work. Device memory: four pieces of states at most, whatever the model's size. For weights on
    the host it is the same as `Beside`.
    """

    def __init__(self) -> None:
        self._beside, self._lane = Beside(), copies.Lane()

    def place(self, fresh: Tensor) -> Tensor:
        return copies.pinned_like(fresh).copy_(fresh) if copies.apart(fresh.device) else fresh

    def visits(self, pieces: Sequence[Kept], device: torch.device) -> Iterator[list[list[Tensor]]]:
        if not copies.apart(device):
            yield from self._beside.visits(pieces, device)
            return
        ahead = self._bring(pieces[0], device)
        for number in range(len(pieces)):
            brought, here = ahead
            if number + 1 < len(pieces):
                ahead = self._bring(pieces[number + 1], device)
            copies.wait_for(here, device)
            yield brought

    def _bring(self, piece: Kept, device: torch.device) -> tuple[list[list[Tensor]], torch.cuda.Event]:
        rooms = [[_room(parts, device) for parts in moment] for moment in piece]

        def copy() -> None:
            for moment, kinds in zip(piece, rooms, strict=True):
                for parts, room in zip(moment, kinds, strict=True):
                    places = room.split_with_sizes([len(part) for part in parts])
                    for part, place in zip(parts, places, strict=True):
                        place.copy_(part, non_blocking=True)

        return rooms, self._lane.after_work(device, copy)

    def send(self, values: list[Tensor], targets: list[list[Tensor]]) -> None:
        if not copies.apart(values[0].device):
            self._beside.send(values, targets)
            return

        def copy() -> None:
            for value, parts in zip(values, targets, strict=True):
                put_back(value, parts, non_blocking=True)

        self._lane.out(values, copy, under_way=4)  # two moments a piece

    def settle(self) -> None:
        self._lane.settle()


def _room(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    sizes = (sum(len(part) for part in parts), *parts[0].shape[1:])
    return torch.empty(sizes, dtype=parts[0].dtype, device=device)
