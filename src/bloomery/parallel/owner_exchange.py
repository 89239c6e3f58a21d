"""The rows of a checkpoint on their way from the ranks that hold them to the owners of the tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from bloomery.core.device import can, synchronize
from bloomery.facts.limits import aligned_bytes, pinned_blocks
from bloomery.model.io.parameters import local
from bloomery.parallel.ownership import OwnedTensor

Key = tuple[str, str]  # part and name of a tensor as ranks hold it
CONNECT_TAG = 2**30  # above those of all pieces


@final
class HostBuffer:
    """Host memory for the rows that a rank hands in: kept from save to save, and pinned for a GPU.

    Fresh memory would cost a page fault every 4 KiB while training waits. Pinned memory is asked for in blocks that
    PyTorch does not round up.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._is_pinned = can(device_type, "streams")
        self._blocks = list[Tensor]()

    @torch.no_grad()
    def copy(self, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """The bytes of each tensor, flat, in this buffer until the next copy. Raises as an allocation does."""
        sizes = [aligned_bytes(tensor.nbytes) for tensor in tensors.values()]
        if self._is_pinned:
            block_sizes, places = pinned_blocks(sizes)
        else:
            block_sizes = [sum(sizes)]
            starts = accumulate(sizes, initial=0)
            places = [(0, start) for start, _ in zip(starts, sizes, strict=False)]
        fits = len(self._blocks) >= len(block_sizes) and all(
            len(block) >= size for block, size in zip(self._blocks, block_sizes, strict=False)
        )
        if not fits:
            self._blocks.clear()  # freed before there are others
            self._blocks += [
                torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)
                for size in block_sizes
            ]

        copies = {}
        for (key, tensor), (block, start) in zip(tensors.items(), places, strict=True):
            copy = self._blocks[block][start : start + tensor.nbytes]
            copy.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=self._is_pinned)
            copies[key] = copy
        synchronize(self._device_type)
        return copies


@torch.no_grad()
def bytes_on_host(tensor: Tensor) -> Tensor:
    """This rank's rows as flat bytes on the CPU; those of a contiguous tensor on the CPU without a copy."""
    return local(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)


def bring_to_owners(
    owned_tensors: Sequence[OwnedTensor],
    bytes_of: Callable[[Key], Tensor],
    group: dist.ProcessGroup,
    *,
    sends_ahead: bool,
) -> Iterator[tuple[OwnedTensor, Tensor]]:
    """Yield the tensors that this rank owns, in turn, each in full on the host; every rank of `group` iterates.

    In each round every owner gets its next tensor, so that it holds one at a time. `bytes_of` returns what this rank
    hands in. `sends_ahead`: all of that is in memory, and is offered at once: a slow owner then stops no other.
    Otherwise it is asked for round by round. Raises RuntimeError when another rank has ended.
    """
    rank = dist.get_rank()
    _connect(rank, owned_tensors, group)
    # Each piece has a tag of its own, by which both ends know it.
    tensors_by_owner: dict[int, list[_Tagged]] = {}
    first_tag = 0
    for owned in owned_tensors:
        tensors_by_owner.setdefault(owned.owner, []).append(_Tagged(owned, first_tag))
        first_tag += len(owned.pieces)
    rounds = [
        [tagged for tagged in tensors_of_round if tagged is not None]
        for tensors_of_round in zip_longest(*tensors_by_owner.values())
    ]

    def offer(tensors: Sequence[_Tagged]) -> list[_Message]:
        """Begin to send this rank's pieces; gloo moves a piece once its owner asks for it."""
        sends = []
        for owned, first_tag in tensors:
            for tag, piece in enumerate(owned.pieces, first_tag):
                if piece.rank == rank != owned.owner:
                    content = bytes_of((owned.part, piece.name))
                    work = dist.isend(content, owned.owner, group=group, tag=tag)
                    assert work is not None, "every rank is in the group"
                    sends.append(_Message(work, content))
        return sends

    sends = [send for tensors in rounds for send in offer(tensors)] if sends_ahead else []
    for tensors in rounds:
        if not sends_ahead:
            sends = offer(tensors)
        for tagged in tensors:
            if tagged.owned.owner == rank:
                yield tagged.owned, _received(tagged, bytes_of, group)
        if not sends_ahead:
            _finish(sends)
    if sends_ahead:
        _finish(sends)


def _connect(rank: int, owned_tensors: Sequence[OwnedTensor], group: dist.ProcessGroup) -> None:
    """Uses every connection of this rank once.

    Where ranks connect when they first send to each other, the first message waits until the other rank uses the
    connection as well. Ranks that first wait for pieces could wait for each other in a circle; here each uses all of
    its connections before it waits for a message.
    """
    partners = {
        owned.owner if piece.rank == rank else piece.rank
        for owned in owned_tensors
        for piece in owned.pieces
        if (rank in (owned.owner, piece.rank)) and owned.owner != piece.rank
    }
    messages = []
    for partner in sorted(partners):
        for start in (dist.isend, dist.irecv):
            content = torch.zeros(1, dtype=torch.uint8)
            work = start(content, partner, group=group, tag=CONNECT_TAG)
            assert work is not None, "every rank is in the group"
            messages.append(_Message(work, content))
    _finish(messages)


class _Tagged(NamedTuple):
    """A tensor and the tag of its first piece."""

    owned: OwnedTensor
    first_tag: int


class _Message(NamedTuple):
    """A message under way, and its bytes, which must stay until it has arrived."""

    work: dist.Work
    content: Tensor


def _finish(messages: Sequence[_Message]) -> None:
    for message in messages:
        message.work.wait()


def _received(
    tagged: _Tagged, bytes_of: Callable[[Key], Tensor], group: dist.ProcessGroup
) -> Tensor:
    """The tensor in full; a view of what this rank holds where that is all of it."""
    owned = tagged.owned
    rank = owned.owner
    dtype: torch.dtype = getattr(torch, owned.dtype)
    if len(owned.pieces) == 1 and owned.pieces[0].rank == rank:
        content = bytes_of((owned.part, owned.pieces[0].name))
        return content.view(dtype).view(owned.shape)

    content = torch.empty(owned.bytes, dtype=torch.uint8)
    receives = []
    for tag, piece in enumerate(owned.pieces, tagged.first_tag):
        target = content[piece.start : piece.start + piece.size]
        if piece.rank == rank:
            target.copy_(bytes_of((owned.part, piece.name)))
        else:
            work = dist.irecv(target, piece.rank, group=group, tag=tag)
            assert work is not None, "every rank is in the group"
            receives.append(_Message(work, target))
    _finish(receives)
    return content.view(dtype).view(owned.shape)
