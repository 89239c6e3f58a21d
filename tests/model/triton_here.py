"""Where the tests find a Triton: installed, or unpacked into a folder, as PyTorch for the CPU brings none."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = "3.8.0"
FOLDER = Path.home() / ".cache" / "bloomery" / f"triton-{VERSION}"


def environment(**variables: str) -> dict[str, str]:
    """The variables of a process that can import Triton; skips the test where there is none."""
    found = {**os.environ, **variables}
    if importlib.util.find_spec("triton") is not None:
        return found
    if not (FOLDER / "triton").is_dir():
        pytest.skip(f"needs Triton {VERSION}, which compiles without a GPU: make triton (0.9 GB)")
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
    return {**found, "PYTHONPATH": path}


def in_interpreter(script: str, *arguments: object) -> list[dict]:
    """What a script of this folder prints, a line of JSON each, where Triton interprets kernels on the CPU."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            Path(__file__).with_name(script),
            *map(str, arguments),
        ],
        env=environment(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
