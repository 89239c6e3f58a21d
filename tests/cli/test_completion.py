"""Shell completion: the script of each shell, and what it answers."""

import subprocess

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from bloomery.cli import cli
from bloomery.cli.common import SHELLS


def completed(words: list[str], start: str) -> list[str]:
    return [
        item.value for item in ShellComplete(cli, {}, "bloomery", "X").get_completions(words, start)
    ]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell):
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0 and "_BLOOMERY_COMPLETE" in done.output
    if shell == "bash":
        assert (
            subprocess.run(["bash", "-n"], input=done.output, text=True, check=False).returncode
            == 0
        )


def test_commands_recipes_runs_and_keys_are_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/mine-1").mkdir(parents=True)
    (tmp_path / "mine.yaml").touch()
    assert completed([], "pl") == ["plan"]
    assert "go-coder-125m" in completed(["plan"], "go-") and completed(["train"], "mi") == [
        "mine.yaml"
    ]
    assert completed(["resume"], "mi") == ["mine-1"] and "last" in completed(["watch"], "")
    assert "train.epochs=" in completed(["train", "demo"], "train.ep")
