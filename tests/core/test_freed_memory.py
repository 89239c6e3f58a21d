"""Freed memory that stays with the process costs no page faults when it is taken again."""

import os
import platform
import subprocess
import sys

import pytest

from bloomery.core.allocator import VARIABLES

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
MIB = 2**20
PAGES = 128 * MIB // 4096
CODE = f"""
import ctypes, resource
from bloomery.core import allocator

def take():
    address = library.malloc({128 * MIB})
    library.memset(address, 1, {128 * MIB})
    library.free(address)

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
library.free.argtypes = (ctypes.c_void_p,)
SETTING
take()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
take()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(setting: str, **variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    answer = subprocess.run(
        [sys.executable, "-c", CODE.replace("SETTING", setting)],
        capture_output=True,
        text=True,
        check=True,
        env=environment | variables,
    )
    return int(answer.stdout)


def test_memory_that_was_freed_is_taken_again_without_page_faults() -> None:
    assert faults("allocator.keep_freed_memory()") < PAGES // 100


def test_memory_that_is_returned_is_new_each_time() -> None:
    if faults("") < PAGES // 2:
        pytest.skip("memory comes in huge pages here")
    assert faults("allocator.return_freed_memory()") > PAGES // 2


def test_a_variable_of_the_user_has_the_last_word() -> None:
    if faults("") < PAGES // 2:
        pytest.skip("memory comes in huge pages here")
    assert faults("allocator.keep_freed_memory()", MALLOC_MMAP_THRESHOLD_="65536") > PAGES // 2
