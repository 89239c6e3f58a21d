"""Folders, recipes and prompts with [brackets] are shown as they are while something is waited for."""

import io
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from rich.console import Console

from bloomery.cli import plan as plan_simulate
from bloomery.cli.bench import Table
from bloomery.cli.smoke_test import report_event
from bloomery.cli.stop_and_save import waiting
from bloomery.monitor.events import EventLog, Phase, RunEnded
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
        table.show_phase(f"sample.prompts={STRANGE}", "forward")
        assert f"{STRANGE}: forward" in str(table._status.renderable.text)
        table.print("done")


def test_phases_of_a_simulation():
    with redirect_stderr(Terminal()), plan_simulate.progress() as show:
        show(STRANGE)


def test_a_report_says_what_it_does(monkeypatch, tmp_path, capfd):
    """Without a terminal a line appears after the silent seconds; stdout has the path alone."""
    from bloomery.cli import cli, common
    from bloomery.report import page

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "recipe.yaml").touch()
    with EventLog(run_dir / "events.jsonl") as log:
        log(RunEnded(step=3, status="finished"))
    monkeypatch.setattr(common, "SILENT_SECONDS", 0.05)
    draw = page.page

    def slow_page(*arguments):
        time.sleep(0.5)
        return draw(*arguments)

    monkeypatch.setattr(page, "page", slow_page)
    cli.main(["report", str(run_dir)], standalone_mode=False)
    out, err = capfd.readouterr()
    assert out == f"{run_dir / 'report.html'}\n"
    assert "progress   report: drawing the page" in err
    assert "progress   report\n" not in err


def test_every_tensor_of_an_export_is_told_and_a_listener_ends_with_its_block(tmp_path):
    from bloomery.core.progress import progress, told_to
    from bloomery.export.gguf import export_gguf
    from bloomery.export.layouts import export
    from bloomery.infer.model_folder import find_model
    from models_for_tests import make_model

    source, told = make_model(tmp_path / "model"), []
    with told_to(told.append):
        export(source, tmp_path / "out", dtype="bfloat16")
        export_gguf(find_model(source), tmp_path / "x.gguf")
    count = len(told)
    progress("nobody listens")
    assert len(told) == count
    assert any("writing tensor 1 of" in text and "model.safetensors" in text for text in told)
    assert any("opening the export in transformers" in text for text in told)
    assert any("comparing tensor 1 of" in text for text in told)
