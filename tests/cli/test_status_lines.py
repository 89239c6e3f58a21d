"""Folders, recipes and prompts with [brackets] are shown as they are while something is waited for."""

import io
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from rich.console import Console

from bloomery.cli import plan as plan_simulate
from bloomery.cli.bench import Table
from bloomery.cli.runs import waiting
from bloomery.cli.smoke_test import report_event
from bloomery.monitor.events import Phase
from bloomery.recipe.schema import Sample

STRANGE = "[red]a [/x]"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def colours(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")


def test_waiting_for_a_run():
    with redirect_stderr(Terminal()) as shown, waiting(Path("runs/[red]a")) as told:
        told(Phase(name=STRANGE))
    assert "waiting for [red]a" in shown.getvalue()


def test_phases_of_a_smoke_test():
    result = type("Result", (), {"plan": type("RunPlan", (), {"train": None, "sample": Sample()})})
    with redirect_stderr(Terminal()), Console(stderr=True).status("preparing") as status:
        report_event(result, Phase(name=STRANGE, done=1, total=2), status)
        assert f"{STRANGE} 50%" in str(status.renderable.text)


def test_settings_of_a_bench():
    with redirect_stderr(Terminal()):
        assert sys.stderr.isatty()
        table = Table(to_stderr=True)
        table._now(f"sample.prompts={STRANGE}", "forward")
        assert f"{STRANGE}: forward" in str(table._status.renderable.text)
        table.print("done")


def test_phases_of_a_simulation():
    with redirect_stderr(Terminal()), plan_simulate.progress() as show:
        show(STRANGE)
