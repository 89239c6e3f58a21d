"""Bytes that are not pinned, in pageable memory or in files, on their way to the device: through a few pinned buffers.

A copy out of pageable memory would hold the host and run at half the speed, and not all memory can be pinned. A thread
fills one buffer while another one is copied. B bytes.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from itertools import cycle
from typing import Any, final

import torch
from torch import Tensor

from bloomery.core.device import current_stream, new_stream, on_stream
from bloomery.core.errors import UserError
from bloomery.facts.limits import STREAM_STAGING_BUFFERS, STREAM_STAGING_BYTES
from bloomery.parallel.transfers import has_own_memory, pinned_block


@final
@dataclass(frozen=True)
class FileBytes:
    """So many bytes of a file, which is read and not mapped: a failing disk under a mapped file kills the process."""

    file: FileIO
    first: int
    num_bytes: int

    def read_into(self, target_B: Tensor, start: int) -> None:
        """Fill host memory with the bytes from `start` on. Raises UserError where the file ends too early."""
        memory = memoryview(target_B.numpy())  # type: ignore[arg-type]  # an array is a buffer
        position = self.first + start
        while memory:
            chunk = os.preadv(self.file.fileno(), [memory], position)
            if not chunk:
                raise UserError(
                    "the file ends too early",
                    where=str(self.file.name),
                    fix="download the model again, and leave its files alone while they are trained from",
                )
            memory = memory[chunk:]
            position += chunk


@final
@dataclass(frozen=True)
class Piece:
    """The bytes of a source from `start` on, and where they go."""

    source: Tensor | FileBytes
    start: int
    target_B: Tensor

    def send(self) -> None:
        """Copy all of them: at once, or on the current stream where they are pinned."""
        if isinstance(self.source, FileBytes):
            assert self.target_B.device.type == "cpu", "files are read into the host's memory"
            self.source.read_into(self.target_B, self.start)
        else:
            end = self.start + len(self.target_B)
            self.target_B.copy_(self.source[self.start : end], non_blocking=True)

    def put(self, into_B: Tensor, first: int) -> None:
        """Copy those from `first` on into `into_B`, as many as it has."""
        if isinstance(self.source, FileBytes):
            self.source.read_into(into_B, self.start + first)
        else:
            begin = self.start + first
            into_B.copy_(self.source[begin : begin + len(into_B)])


@final
class StagedCopy:
    """A copy that a thread makes. As `transfers.CopyUnderWay`, but `finish` waits until the thread has queued it."""

    def __init__(self, queued: Future[Any], work_stream: Any) -> None:
        self._queued: Future[Any] | None = queued
        self._work_stream = work_stream

    def finish(self) -> None:
        """Make the work that is queued from now on wait for the copy. Raises what the thread met."""
        if self._queued is not None:
            queued = self._queued
            self._queued = None
            self._work_stream.wait_event(queued.result())


@final
@dataclass(eq=False)
class _Stage:
    memory_B: Tensor
    copied: Any = None  # the event after the last copy out of it


@final
class StagingRing:
    """The pinned buffers of a device, and the thread that fills them in the order of the calls."""

    def __init__(
        self,
        device: torch.device,
        *,
        num_buffers: int = STREAM_STAGING_BUFFERS,
        buffer_bytes: int = STREAM_STAGING_BYTES,
    ) -> None:
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._stages = cycle(
            [_Stage(pinned_block(buffer_bytes, device)) for _ in range(num_buffers)]
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
        self._stream = new_stream(device)

    def copy(self, pieces: Sequence[Piece]) -> StagedCopy:
        """Begin to copy once the work that is queued by now is over, which may read or write the targets."""
        work_stream = current_stream(self._device)
        queued = self._thread.submit(self._queue, pieces, work_stream.record_event())
        return StagedCopy(queued, work_stream)

    def _queue(self, pieces: Sequence[Piece], work_before: Any) -> Any:
        """In the thread; returns the event after the copies."""
        self._stream.wait_event(work_before)
        for piece in pieces:
            for first in range(0, len(piece.target_B), self._buffer_bytes):
                target_B = piece.target_B[first : first + self._buffer_bytes]
                stage = next(self._stages)
                if stage.copied is not None:
                    stage.copied.synchronize()
                filled_B = stage.memory_B[: len(target_B)]
                piece.put(filled_B, first)
                with on_stream(self._device, self._stream):
                    target_B.copy_(filled_B, non_blocking=True)
                stage.copied = self._stream.record_event()
        return self._stream.record_event()


def staging_of(device: torch.device, largest: int) -> StagingRing | None:
    """Of copies of `largest` bytes at most. None for a device whose memory is the host's: they are read in place."""
    if not has_own_memory(device):
        return None
    return StagingRing(device, buffer_bytes=min(STREAM_STAGING_BYTES, max(1, largest)))
