"""`bloomery stop SWEEP`: the process of a sweep, which another terminal has begun, saves and stops its runs."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from bloomery.cli.stop_and_save import stop_command
from bloomery.core.errors import UserError
from bloomery.core.run_lock import worked_on

HOLDER = """
import sys, time
from pathlib import Path
from bloomery.core.run_folder import RunFolder
from bloomery.core.errors import UserError
from bloomery.core.run_lock import hold_run_lock
from bloomery.core.signals import stop_requests
with hold_run_lock(RunFolder(Path(sys.argv[1]).absolute())), stop_requests() as requests:
    print("held", flush=True)
    while not requests.stop_requested:
        time.sleep(0.05)
"""


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/s")
    folder.mkdir(parents=True)
    about = {"sweep": "0", "recipe": "tiny", "runs": {"a": {"train.seed": 1}}, "keys": ["train.seed"]}
    about |= {"metric": "eval.loss", "metric_kind": "eval.loss", "lower_is_better": True}
    (folder / "sweep.json").write_text(json.dumps(about | {"command": ["sweep", "tiny"]}))
    return folder


def test_a_sweep_of_another_terminal_stops(sweep: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(sweep)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        waiting = threading.Thread(target=other.wait, daemon=True)
        waiting.start()
        answer = CliRunner().invoke(stop_command, ["runs/s"], catch_exceptions=False)
        waiting.join(30)
        assert other.returncode == 0
    finally:
        other.kill()
    assert f"process {other.pid} saves and stops" in answer.output
    assert "bloomery sweep tiny" in answer.output
    assert not worked_on(sweep)


def test_a_sweep_that_nobody_trains_is_an_error(sweep: Path) -> None:
    answer = CliRunner().invoke(stop_command, ["s"])
    assert isinstance(answer.exception, UserError)
    assert answer.exception.problem == "no process trains this sweep"
