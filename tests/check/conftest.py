from pathlib import Path

import pytest
from faulty_devices import Sides
from runs_of_the_loop import prepared_corpus

from bloomery.check import run_start


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    return prepared_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """No answers of earlier checks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def sides(monkeypatch) -> Sides:
    return Sides(monkeypatch)


@pytest.fixture
def checks_the_cpu(monkeypatch):
    """As if the CPU of the plan was a GPU."""
    monkeypatch.setattr(run_start, "is_checked", lambda *_: True)
