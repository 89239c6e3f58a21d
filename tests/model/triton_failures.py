"""What Triton raises where its kernels cannot be made or started, with the real compiler.

Run by test_attention_triton.py.

Needs no GPU: a driver that reports one in place of ROCm's, which starts nothing. Prints one JSON object: for each
failure whether the attention failed by name, whether it counts as out of memory, and the message.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from triton import runtime
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import max_shared_mem
from triton.runtime.build import compile_module_from_src
from triton.runtime.driver import driver

from bloomery.model.attention import tiles, triton_attention
from bloomery.model.attention.attend import attend, layout_of
from bloomery.model.attention.tiles import TileShape
from bloomery.model.attention.triton_attention import KernelFailed
from bloomery.train.process import out_of_memory

SHARED_BYTES = 65536
started = []


class Driver:
    """An RX 6700 XT that is not here. Its launcher is compiled by the machine's C compiler, as that of every GPU."""

    def __init__(self) -> None:
        self.shared_bytes = SHARED_BYTES
        self.error = ""
        self.utils = SimpleNamespace(
            get_device_properties=lambda _device: {"max_shared_mem": self.shared_bytes},
            load_binary=self.load,
            unload_module=lambda _module: None,
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", "gfx1030", 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def load(self, name: str, *_: object) -> tuple[object, object, int, int, int]:
        if self.error:
            raise RuntimeError(self.error)
        started.append(name)
        return object(), object(), 0, 0, 1024

    def launcher_cls(self, _source: object, _metadata: object):
        code = '#include <Python.h>\nstatic struct PyModuleDef m = {PyModuleDef_HEAD_INIT, "m"};\n'
        code += f"/* {os.environ['LAUNCHER']} */ PyMODINIT_FUNC PyInit_started(void) {{ return PyModule_Create(&m); }}"
        compile_module_from_src(src=code, name="started")
        return lambda *_arguments: None


def backward_of_attention() -> None:
    q = torch.randn(1, 2, 20, 64).half().requires_grad_()
    output = attend(
        *(q, q, q),
        layout_of(None, backend="triton"),
        backend="triton",
        window=None,
        softcap=None,
        scale=0.125,
        dropout=0.0,
    )
    output.sum().backward()


def failure(number: int) -> dict[str, object]:
    """Of the next attempt: nothing that an earlier one has compiled is left in this process."""
    os.environ["LAUNCHER"] = str(number)
    runtime.build._find_compiler.cache_clear()
    max_shared_mem.cache_clear()
    if triton_attention._kernels.cache_info().currsize:
        for kernel in ("forward", "backward_q", "backward_kv"):
            getattr(triton_attention._kernels(), kernel).device_caches.clear()
    try:
        backward_of_attention()
    except Exception as error:
        failed = isinstance(error, KernelFailed)
        return {"failed": failed, "memory": out_of_memory(error), "message": str(error)}
    return {"failed": False, "memory": False, "message": ""}


def main(folder: str) -> None:
    gpu = Driver()
    os.environ["TRITON_CACHE_DIR"] = str(Path(folder, "cache"))
    results = {}

    # The first launch of a process imports the kernels, and with them Triton.
    sys.modules["bloomery.model.attention.triton_kernels"] = None
    results["import"] = failure(0)
    del sys.modules["bloomery.model.attention.triton_kernels"]

    driver.set_active(gpu)
    results["nothing"] = failure(1)
    assert started == ["forward", "backward_q", "backward_kv"], started

    path = os.environ["PATH"]
    os.environ["PATH"] = folder
    os.environ.pop("CC", None)
    results["no C compiler"] = failure(2)
    os.environ["PATH"] = path

    # A folder that cannot be written, to root neither.
    cache = os.environ["TRITON_CACHE_DIR"]
    os.environ["TRITON_CACHE_DIR"] = "/dev/null/cache"
    results["cache folder"] = failure(3)
    os.environ["TRITON_CACHE_DIR"] = cache

    # The compiler takes powers of two alone.
    tiles.use_tile("backward_q", TileShape(24, 16, 4), arch="any", width=64)
    results["compiler"] = failure(4)
    tiles._in_use.clear()

    gpu.shared_bytes = 1024
    results["resources"] = failure(5)
    gpu.shared_bytes = SHARED_BYTES

    gpu.error = "Triton Error [HIP]:  Code: 2, Messsage: out of memory"
    results["memory"] = failure(6)
    gpu.error = "Triton Error [HIP]:  Code: 209, Messsage: no kernel image is available"
    results["no image"] = failure(7)
    gpu.error = ""
    results["afterwards"] = failure(8)
    print(json.dumps(results))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
