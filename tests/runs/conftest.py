"""Fixtures of whole runs."""

import os
from pathlib import Path

import pytest
from runs_of_bloomery import Bloomery, write_workshop

from bloomery.launch import supervisor as supervise


@pytest.fixture
def bloomery(tmp_path: Path) -> Bloomery:
    write_workshop(tmp_path)
    return Bloomery(tmp_path)


def dies(folder: Path, monkeypatch: pytest.MonkeyPatch, worker: str) -> Path:
    write_workshop(folder)
    (folder / "runs").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(supervise, "WORKER", worker)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    return folder


@pytest.fixture
def dying_workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, whose training child dies as `deaths.json` next to the run states (`dying_worker`)."""
    return dies(tmp_path, monkeypatch, "dying_worker")


@pytest.fixture
def faulty_links_workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, whose training child has faulty links as `link.txt` there states (`faulty_links_worker`)."""
    return dies(tmp_path, monkeypatch, "faulty_links_worker")


@pytest.fixture(params=["paper_worker", pytest.param("dying_worker", marks=pytest.mark.soak)])
def paper_workshop(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The same for what only the launcher decides, with a child that computes nothing; `make soak` has the real one."""
    return dies(tmp_path, monkeypatch, request.param)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Bloomery:
    """The same run, never disturbed; look, do not touch."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_workshop(folder)
    bloomery = Bloomery(folder)
    done = bloomery.run("train", "tiny.yaml", "--run-dir", "runs/one")
    assert done.returncode == 0, done.stderr
    return bloomery
