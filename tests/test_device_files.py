"""A test of the simulated device, named to a process that lacks it, is answered with the command that has it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "command"),
    [
        (
            "tests/device/test_fake_steps.py",
            "python tests/device/run.py tests/device/test_fake_steps.py",
        ),
        (
            "tests/device/test_intel.py",
            "python tests/device/run.py --device intel,2,4 tests/device/test_intel.py",
        ),
    ],
)
def test_a_named_file_is_not_run_without_the_device(file: str, command: str) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "BLOOMERY_SIMULATED"
    }
    result = subprocess.run(
        [sys.executable, "-m", "pytest", file],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert command in result.stdout
