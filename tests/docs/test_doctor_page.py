"""docs/how-to/check-your-machine.md shows what `bloomery doctor` answers today to the machines below tests/machines."""

import re
import shlex
import time

import pytest
from click.testing import CliRunner
from words_of_docs import ROOT, shown_equals

from bloomery.cli import cli
from bloomery.hardware.doctor.diagnose import RULES

PAGE = ROOT / "docs/how-to/check-your-machine.md"
BLOCKS = re.findall(r"```\n\$ (bloomery doctor .*tests/machines/.*)\n((?:.*\n)+?)```", PAGE.read_text(encoding="utf-8"))


def without_figures(text: str) -> str:
    """The time that it took, and what the planner says in the last lines, change with the machine and the planner."""
    text = re.sub(r" +\d+\.\d s$", "", text, flags=re.MULTILINE)
    return re.sub(r"\(\d+\.\d of (\d+\.\d) GiB\)( · about [\d.]+ \w+)?", r"(of \1 GiB)", text)


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_what_is_shown_is_what_is_said(command: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    done = CliRunner().invoke(cli, shlex.split(command)[1:], standalone_mode=False)
    monkeypatch.undo()
    time.tzset()
    shown_equals(PAGE, shown, done.output, same=without_figures)


def test_there_are_examples_and_the_rules_behind_them() -> None:
    assert len(BLOCKS) >= 4
    assert len(RULES) > 20
