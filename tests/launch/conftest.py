"""Fixtures of whole runs."""

import os
from pathlib import Path

import pytest
from runs_of_bloomery import Bloomery, write_workshop

from bloomery.runs import supervisor as supervise


@pytest.fixture
def bloomery(tmp_path: Path) -> Bloomery:
    write_workshop(tmp_path)
    return Bloomery(tmp_path)


@pytest.fixture
def dying_workshop(tmp_path: Path, monkeypatch) -> Path:
    """The working folder, whose training child dies as `deaths.json` beside the run says (`dying_worker`)."""
    write_workshop(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervise, "WORKER", "dying_worker")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    return tmp_path


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Bloomery:
    """The same run, never disturbed; look, do not touch."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_workshop(folder)
    bloomery = Bloomery(folder)
    done = bloomery.run("train", "tiny.yaml", "--run-dir", "runs/one")
    assert done.returncode == 0, done.stderr
    return bloomery
