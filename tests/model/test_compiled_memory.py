"""Memory of large tensors on a CPU: what was freed is taken by tensors of its size, and PyTorch counts it."""

import os
import platform
import subprocess
import sys

import pytest

from bloomery.core.allocator import VARIABLES
from bloomery.model.native import find_compiler

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or find_compiler() is None,
    reason="glibc's malloc and a C++ compiler",
)

# Every second tensor is freed, and as many of the same size are made: what a layer leaves to the next one.
CODE = """
import ctypes, sys, torch
from bloomery.core.allocator import keep_freed_memory
from bloomery.model.compiled_memory import fill_freed_memory

def end_of_heap():
    sbrk = ctypes.CDLL(None).sbrk
    sbrk.restype = ctypes.c_void_p
    return sbrk(0)

assert keep_freed_memory()
if sys.argv[1] == "filled":
    fill_freed_memory()
SIZES = (1_000_001,) * 64
tensors = [torch.empty(size, dtype=torch.uint8) for size in SIZES]
del tensors[::2]
end = end_of_heap()
others = [torch.empty(size, dtype=torch.uint8) for size in SIZES[::2]]
assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors + others)
print(end_of_heap() - end)
"""


def printed(code: str, *words: str) -> str:
    """By a process of its own: PyTorch's allocator is that of the whole process."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_tensors_take_the_places_of_freed_ones_of_their_size() -> None:
    """PyTorch's own allocator leaves the places empty: it looks for 96 bytes more than there are."""
    assert int(printed(CODE, "filled")) < 2 * 1_000_001
    assert int(printed(CODE, "pytorch")) > 4 * 1_000_001  # of 32


COUNTED = """
import torch
from bloomery.model.compiled_memory import fill_freed_memory

fill_freed_memory()
with torch.profiler.profile(profile_memory=True) as record:
    tensor = torch.ones(2**20)
    kept = tensor.resize_(2**21)
    del tensor, kept
sizes = [event.nbytes() for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
print(sum(sizes), max(sizes))
try:
    torch.empty(2**46)
except RuntimeError as error:
    print("can't allocate memory" in str(error))
"""


def test_the_profiler_counts_them_and_an_error_is_pytorchs() -> None:
    assert printed(COUNTED).split() == ["0", str(2**23), "True"]
