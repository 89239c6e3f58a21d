"""Where optimizer states are stored: on the weights' device, or in pinned host memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from bloomery.parallel.transfers import CopyStream, CopyUnderWay, has_own_memory, pinned_all
from bloomery.train.optim.common import concatenated, same_memory

# The stored tensors of a piece: for each moment, for each tensor of the moment, one view for each span.
PieceStates = list[list[list[Tensor]]]
StateKey = tuple[nn.Parameter, str]  # and its slot


@final
class StatePlacement:
    """Optimizer states on the weights' device, or with `offload` in pinned host memory.

    Offloaded pieces are copied to the device in turn, and copies overlap with the update: one piece is updated, one
    arrives, one or two leave. Device memory: four pieces of states. No difference for weights on the host, unless they
    stand for those of a `device_type`.
    """

    def __init__(self, *, offload: bool, device_type: str | None = None) -> None:
        self._offload = offload
        self._device_type = device_type
        self._copy_stream = CopyStream()
        # Of states that will come: tensors without data. And on the host: where each is stored.
        self._expected = dict[StateKey, Tensor]()
        self._stored = dict[StateKey, Tensor]()

    def _offloads_from(self, device: torch.device) -> bool:
        return self._offload and has_own_memory(self._device_type or device)

    def expect(self, states: Mapping[StateKey, Tensor]) -> None:
        """Tensors without data, as the states that will be placed: on the host they are pinned together.

        Each alone would be rounded up to a power of two, to nearly twice as much.
        """
        self._expected |= states

    def place(self, key: StateKey, state: Tensor) -> Tensor:
        """A new state, or one from a checkpoint, where it is to be stored. It was expected."""
        if not self._offloads_from(state.device):
            return state
        if key not in self._stored:
            missing = [other for other in self._expected if other not in self._stored]
            tensors = pinned_all([self._expected[other] for other in missing], state.device)
            self._stored.update(zip(missing, tensors, strict=True))
        # A state of before may still be on its way there.
        self._copy_stream.synchronize()
        return self._stored[key].copy_(state)

    def visits(
        self, pieces: Sequence[PieceStates], device: torch.device
    ) -> Iterator[list[list[Tensor]]]:
        """The states of each piece in turn, on the device, spans concatenated."""
        if not self._offloads_from(device):
            for piece in pieces:
                yield [[concatenated(views) for views in moment] for moment in piece]
            return
        next_arrival = self._copy_to_device(pieces[0], device)
        for index in range(len(pieces)):
            states, under_way = next_arrival
            # The next piece is copied while this one is updated.
            if index + 1 < len(pieces):
                next_arrival = self._copy_to_device(pieces[index + 1], device)
            under_way.finish()
            yield states

    def _copy_to_device(
        self, piece: PieceStates, device: torch.device
    ) -> tuple[list[list[Tensor]], CopyUnderWay]:
        def empty_for(views: Sequence[Tensor]) -> Tensor:
            shape = (sum(len(view) for view in views), *views[0].shape[1:])
            return torch.empty(shape, dtype=views[0].dtype, device=device)

        states = [[empty_for(views) for views in moment] for moment in piece]

        def copy() -> None:
            for moment, moment_states in zip(piece, states, strict=True):
                for views, state in zip(moment, moment_states, strict=True):
                    targets = state.split_with_sizes([len(view) for view in views])
                    for view, target in zip(views, targets, strict=True):
                        target.copy_(view, non_blocking=True)

        tensors = [state for moment_states in states for state in moment_states]
        return states, self._copy_stream.run_after_work(tensors, copy)

    def send(self, values: list[Tensor], targets: list[list[Tensor]]) -> None:
        """Copy one updated moment of the current piece to where it is stored."""
        offloads = self._offloads_from(values[0].device)

        def copy() -> None:
            """The views of a piece in one call; what is in place already is not copied."""
            for value, views in zip(values, targets, strict=True):
                if len(views) > 1:
                    parts = value.split_with_sizes([len(view) for view in views])
                    torch._foreach_copy_(list(views), list(parts), non_blocking=offloads)
                elif not same_memory(value, views[0]):
                    views[0].copy_(value, non_blocking=offloads)

        if offloads:
            self._copy_stream.send(values, copy, most_under_way=4)  # two moments per piece
        else:
            copy()

    def release_sent(self) -> None:
        """Call after an update: what still leaves does not stay on the device during the next step.

        The device waits for the last copies, of two pieces at most (some milliseconds). The host does not.
        """
        self._copy_stream.release_sent()

    def settle(self) -> None:
        """Wait until the host can read every state."""
        self._copy_stream.synchronize()
