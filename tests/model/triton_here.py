"""Where the tests find a Triton: installed, or unpacked into a folder, as PyTorch for the CPU brings none."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

import preloaded

VERSION = "3.8.0"
# As `python SCRIPT ...` does, and forked from a process that has imported torch.
RUN_SCRIPT = """
import os, runpy, sys
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def environment(**variables: str) -> dict[str, str]:
    """The variables of a process that can import Triton; skips the test where there is none."""
    all_variables = {**os.environ, **variables}
    return (
        all_variables
        if importlib.util.find_spec("triton") is not None
        else all_variables | path_of(VERSION)
    )


def path_of(version: str) -> dict[str, str]:
    """PYTHONPATH with this version of Triton, unpacked; skips the test where it is not."""
    folder = Path.home() / ".cache" / "bloomery" / f"triton-{version}"
    if not (folder / "triton").is_dir():
        needs = f"needs Triton {version}, which compiles without a GPU"
        pytest.skip(f"{needs}: make triton TRITON={version} (0.6 to 1 GB)")
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    }


def in_interpreter(name: str, *arguments: object) -> list[dict]:
    """What a script of this folder prints, a line of JSON each, where Triton interprets kernels on the CPU."""
    return script(name, *arguments, TRITON_INTERPRET="1")


def script(name: str, *arguments: object, **variables: str) -> list[dict]:
    """What a script of this folder prints, a line of JSON each, in a process that can import Triton."""
    path = Path(__file__).with_name(name)
    process = preloaded.run(
        [sys.executable, "-c", RUN_SCRIPT, str(path), *map(str, arguments)],
        env=environment(**variables),
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return [json.loads(line) for line in process.stdout.splitlines()]
