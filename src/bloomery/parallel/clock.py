"""How long a step communicates: seconds of collectives, by axis of the mesh and as the host waits for them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from bloomery.core.device import is_accelerator, recorded_event
from bloomery.parallel.collective_notes import CollectiveNotes


@final
class CommunicationClock:
    """Seconds in collectives since the last `reset`.

    On a CPU a collective ends when its call returns. A GPU's collectives run behind the host: their seconds are
    measured between two events of the device, and read once these are over. Each is noted, for the case of a hang.
    """

    def __init__(self) -> None:
        self.notes = CollectiveNotes()
        self.waited_seconds = 0.0  # of the host, in any collective
        self._host_seconds_by_axis = dict[str, float]()
        self._host_end = 0.0  # of the last collective, on time.perf_counter
        self._device_events: list[tuple[str, Any, Any]] = []

    def reset(self) -> None:
        """Begin a step."""
        self.waited_seconds = 0.0
        self._host_seconds_by_axis.clear()
        self._device_events.clear()

    @contextmanager
    def measure(
        self, axis: str = "", device: str = "cpu", *, name: str = "numbers of the host"
    ) -> Iterator[None]:
        """Count the block, a collective over `axis` of tensors on `device`; "": of a few numbers, on the host.

        `name`: of the collective, for the notes. Of a collective that raises, the end counts, too: this rank is out
        of it, and others may wait for it elsewhere.
        """
        name = f"{name}, {axis}" if axis else name
        if is_accelerator(device):
            start = recorded_event(device)
            try:
                yield
            finally:
                end = recorded_event(device)
                self._device_events.append((axis, start, end))
                self.notes.follow(name, start, end)
        else:
            with self.noted(name):
                self._host_end = time.perf_counter()
                try:
                    yield
                finally:
                    self._count_host_seconds(axis)

    @contextmanager
    def noted(self, name: str, device: str = "cpu") -> Iterator[None]:
        """Note the block, a collective of tensors on `device` whose seconds are not counted."""
        if is_accelerator(device):
            start = recorded_event(device)
            try:
                yield
            finally:
                self.notes.follow(name, start, recorded_event(device))
        else:
            self.notes.enter(name)
            try:
                yield
            finally:
                self.notes.finish(name)

    def measure_since_last(self, axis: str, device: str) -> None:
        """Count what followed the last collective as one over `axis`.

        FSDP2 sums gradients between replicas by itself, right after its reduce-scatter, and then calls a hook.
        """
        if is_accelerator(device):
            _, _, start = self._device_events[-1]
            self._device_events.append((axis, start, recorded_event(device)))
        else:
            self._count_host_seconds(axis)

    def seconds_by_axis(self) -> dict[str, float]:
        """Seconds of each axis that communicated; call after the host has waited for the device."""
        seconds = dict(self._host_seconds_by_axis)
        for axis, start, end in self._device_events:
            if end.query():
                seconds[axis] = seconds.get(axis, 0.0) + start.elapsed_time(end) / 1e3
        return seconds

    def _count_host_seconds(self, axis: str) -> None:
        """Everything since the last end was spent in this collective."""
        start = self._host_end
        self._host_end = time.perf_counter()
        elapsed = self._host_end - start
        self.waited_seconds += elapsed
        if axis:
            self._host_seconds_by_axis[axis] = self._host_seconds_by_axis.get(axis, 0.0) + elapsed
