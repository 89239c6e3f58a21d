from pathlib import Path

import pytest
from runs_of_the_loop import prepared_corpus


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    return prepared_corpus(tmp_path_factory.mktemp("corpus"))
