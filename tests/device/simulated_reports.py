"""A plug-in of pytest: what the simulated device noticed in a child process fails the test that started it.

A problem is raised where it is noticed. A child may swallow that, or nobody may look at how it ended: so each process
also writes its problems to a file, at once.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(tempfile.mkdtemp(prefix="simulated-reports-"))
os.environ["BLOOMERY_SIMULATED_REPORTS"] = str(FOLDER / "process")


@pytest.fixture(autouse=True)
def children_without_problems() -> Iterator[None]:
    yield
    here = f"process.{os.getpid()}"  # its own are in `simulated.report()`
    lines = []
    for file in sorted(FOLDER.iterdir()):
        if file.name != here:
            lines += file.read_text().splitlines()
        file.unlink()
    assert not lines, "a child of this test: " + "; ".join(lines)


def pytest_sessionfinish() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
