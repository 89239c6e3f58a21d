"""Without the simulated device nothing here is collected: `python tests/device/run.py` has it.

Intel's is reached as torch.xpu, the others as torch.cuda: `run.py --device intel,2,4` collects test_intel.py alone.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.core.device import accelerator_type, cap_memory, num_devices

# Helpers of the tests of plans, simulations and the check, and of the benchmarks, are used here too.
ROOT = Path(__file__).parents[2]
HELPERS = ("tests/simulate", "tests/plan", "tests/check", "benchmarks")
sys.path[:0] = [str(ROOT / place) for place in HELPERS]

described = os.environ.get("BLOOMERY_SIMULATED", "")
vendor = described.partition(",")[0].partition(":")[0]


def is_for_another_device(file: Path) -> bool:
    return not vendor or (file.name == "test_intel.py") != (vendor == "intel")


collect_ignore = [
    path.name for path in Path(__file__).parent.glob("test_*.py") if is_for_another_device(path)
]


def pytest_collect_file(file_path: Path) -> None:
    """pytest collects a file that is named on its command line although it is ignored: tests would fail for no reason
    that they name.
    """
    if file_path.name.startswith("test_") and is_for_another_device(file_path):
        device = "--device intel,2,4 " if file_path.name == "test_intel.py" else ""
        command = f"python tests/device/run.py {device}{file_path.relative_to(ROOT)}"
        message = "this process lacks the simulated device that these tests need"
        raise pytest.Collector.CollectError(f"{message}: {command}")


@pytest.fixture(autouse=True)
def no_cap() -> Iterator[None]:
    """A run caps the memory of its process: the next test has all of it."""
    yield
    device_type = accelerator_type()
    for index in range(num_devices(device_type) if device_type else 0):
        cap_memory(f"{device_type}:{index}", float("inf"))
