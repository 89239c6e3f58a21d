"""Where the tests find a Triton: installed, or unpacked into a folder, as PyTorch for the CPU brings none."""

import importlib.util
import os
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
