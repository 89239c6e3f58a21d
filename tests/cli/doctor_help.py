"""`bloomery doctor` called as a function, on recorded machines."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from bloomery.cli import cli

MACHINES = Path(__file__).parent.parent / "machines"
NAMES = sorted(path.stem for path in MACHINES.glob("*.json"))


@pytest.fixture(autouse=True)
def _a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def doctor(*words: str, given: str | bytes | None = None):
    return CliRunner().invoke(cli, ["doctor", *words], input=given, standalone_mode=False)


def record(name: str) -> str:
    return str(MACHINES / f"{name}.json")
