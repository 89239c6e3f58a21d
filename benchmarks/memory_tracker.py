"""How many bytes of tensors live at once while a function runs, from the allocator's own record.

The profiler sees every allocation, those inside operators too; a dispatch mode sees no further than an operator's edge.
Buffers that BLAS keeps for itself are not torch's and not counted.
"""

from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that tensors on the CPU held during `run()`, above what they held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    events = record.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return max(accumulate((size for _, size in sorted(changes, key=lambda change: change[0])), initial=0))


def _self_check() -> None:
    held = peak_bytes(lambda: (torch.empty(2**20), torch.empty(2**20).add_(1)))
    assert 8 * 2**20 <= held < 8.1 * 2**20, held


if __name__ == "__main__":
    _self_check()
