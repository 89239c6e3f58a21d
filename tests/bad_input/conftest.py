"""A workshop each test may spoil, and one tiny trained run that is copied, never touched."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import process, write_workshop

from bloomery.plan.store import write_sealed


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """The working folder: a tiny recipe and its text."""
    write_workshop(tmp_path / "shop")
    monkeypatch.chdir(tmp_path / "shop")
    return tmp_path / "shop"


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A workshop with runs/one, six steps long, done."""
    folder = tmp_path_factory.mktemp("trained") / "shop"
    write_workshop(folder)
    done = process("train", "tiny.yaml", "--run-dir", "runs/one", folder=folder)
    assert done.code == 0, done.err
    return folder


@dataclass(frozen=True)
class Workshop:
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "runs/one"


@pytest.fixture
def stopped(trained, tmp_path, monkeypatch):
    """A copy of the trained workshop whose run was killed after the checkpoint of step 4."""
    folder = tmp_path / "shop"
    shutil.copytree(trained, folder)
    run = folder / "runs/one"
    write_sealed(
        run, {"plan.json": (run / "plan.json").read_text().replace(str(trained), str(folder))}
    )
    shutil.rmtree(run / "checkpoints/step-00000006")
    (run / "checkpoints/best.json").unlink(missing_ok=True)
    events = (run / "events.jsonl").read_text().splitlines()
    first_five = [line for line in events if '"RunEnded"' not in line and '"step": 6' not in line]
    (run / "events.jsonl").write_text("\n".join(first_five) + "\n")
    monkeypatch.chdir(folder)
    return Workshop(folder)


@pytest.fixture
def model(trained, tmp_path, monkeypatch):
    """A folder in Hugging Face's layout, called `model`, in the working folder."""
    source = trained / "runs/one/checkpoints/step-00000006"
    shutil.copytree(
        source, tmp_path / "model", ignore=shutil.ignore_patterns("optimizer*", "rng*", "MANIFEST*")
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model"
