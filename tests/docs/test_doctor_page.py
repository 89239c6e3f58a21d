"""docs/how-to/check-your-machine.md and docker.md show today's output for the machines of tests/machines."""

import re
import shlex
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from words_of_docs import ROOT, shown_equals

from bloomery.cli import cli
from bloomery.hardware.doctor.diagnose import RULES

PAGES = [ROOT / "docs/how-to/check-your-machine.md", ROOT / "docs/how-to/docker.md"]
BLOCK = re.compile(r"```console\n\$ (bloomery doctor .*tests/machines/.*)\n((?:.*\n)+?)```")
BLOCKS = [
    (page, *block) for page in PAGES for block in BLOCK.findall(page.read_text(encoding="utf-8"))
]


def without_figures(text: str) -> str:
    """The time that it took, and what the planner says in the last lines, change with the machine and the planner."""
    text = re.sub(r" +\d+\.\d s$", "", text, flags=re.MULTILINE)
    return re.sub(r"\(\d+\.\d of (\d+\.\d) GiB\)( · about [\d.]+ \w+)?", r"(of \1 GiB)", text)


@pytest.mark.parametrize(
    ("page", "command", "shown"), BLOCKS, ids=[command for _, command, _ in BLOCKS]
)
def test_a_page_shows_today_s_output(
    page: Path, command: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    done = CliRunner().invoke(cli, shlex.split(command)[1:], standalone_mode=False)
    monkeypatch.undo()
    time.tzset()
    shown_equals(page, shown, done.output, same=without_figures)


def test_there_are_examples_and_the_rules_behind_them() -> None:
    assert len(BLOCKS) >= 4
    assert len(RULES) > 20
