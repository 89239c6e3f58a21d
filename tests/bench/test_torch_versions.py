"""`benchmarks/torch_versions.py` measures two environments in turns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "torch_versions.py"


@pytest.fixture
def environment(tmp_path):
    """The interpreter of an environment whose `bench` replies these figures, and notes that it ran."""

    def made(name: str, *, speed: float, first_loss: float = 8.0) -> Path:
        learning = {"loss_before": first_loss, "loss_after": 6.0}
        document = {"points": [{"tokens_per_second": speed, "learning": learning}]}
        python = tmp_path / name
        python.write_text(
            f"#!/bin/sh\necho {name} >> {tmp_path}/turns\necho '{json.dumps(document)}'\n"
        )
        python.chmod(0o755)
        return python

    return made


def compared(*pythons: Path, recipe: str = "demo") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), recipe, *map(str, pythons), "--rounds", "2"]
    return subprocess.run(command, capture_output=True, text=True)


def test_two_environments_are_measured_in_turns(environment, tmp_path):
    result = compared(environment("older", speed=100.0), environment("newer", speed=250.0))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "turns").read_text().split() == ["older", "newer"] * 2
    assert "ratio    2.50 (2.50 to 2.50 in 2 rounds), second to first" in result.stdout
    assert "warning" not in result.stdout and "noise" not in result.stdout


def test_other_losses_for_the_same_work_are_a_warning(environment):
    result = compared(
        environment("right", speed=100.0),
        environment("wrong", speed=100.0, first_loss=9.0),
    )
    assert "the first losses differ by 12.5%" in result.stdout
    assert "no difference beyond the noise" in result.stdout


def test_an_environment_that_cannot_measure_is_named(environment, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    result = compared(environment("works", speed=100.0), broken)
    assert result.returncode == 1
    assert "broken could not measure the recipe (exit code 1)" in result.stderr
