"""How many bytes of tensors live at once while a function runs, from the allocator's own record.

The profiler sees every allocation, those inside operators too; a dispatch mode sees no further than an operator's edge.
Buffers that BLAS keeps for itself are not torch's and not counted.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that tensors on the CPU held during `run()`, above what they held before."""
    with recording() as peak:
        run()
    return peak()


@contextmanager
def recording() -> Iterator[Callable[[], int]]:
    """Gives a function that tells, after the block, the most bytes above those of its beginning."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        yield lambda: _peak(record)


def _peak(record: profile) -> int:
    events = record.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return max(
        accumulate((size for _, size in sorted(changes, key=lambda change: change[0])), initial=0)
    )


def held_bytes() -> int:
    """Bytes of every tensor on the CPU that Python can reach, shared storage counted once."""
    found = [
        thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)
    ]
    storages = [tensor.untyped_storage() for tensor in found if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _self_check() -> None:
    before = held_bytes()
    kept = torch.empty(2**20)
    assert held_bytes() - before == 4 * 2**20
    held = peak_bytes(lambda: (torch.empty(2**20), torch.empty(2**20).add_(1)))
    assert 8 * 2**20 <= held < 8.1 * 2**20, held
    del kept


if __name__ == "__main__":
    _self_check()
