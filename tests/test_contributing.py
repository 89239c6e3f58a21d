"""CONTRIBUTING and the README name files, links and make targets that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "README.md")


def missing_names(text: str) -> list[str]:
    """Links, paths of the repository and make targets of a page that lead nowhere."""
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    paths = re.findall(r"`((?:src|tests|scripts|benchmarks|docs)/[\w./-]+)`", text)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)\b(?=[`\s,]*(?:`|#|\n))", text)
    missing_paths = [name for name in (*links, *paths) if not (ROOT / name).exists()]
    return missing_paths + [f"make {name}" for name in commands if name not in targets]


@pytest.mark.parametrize("page", PAGES)
def test_what_the_page_names_exists(page: str) -> None:
    assert missing_names((ROOT / page).read_text(encoding="utf-8")) == []


def test_what_is_gone_is_found() -> None:
    text = "[a page](docs/none.md), `src/bloomery/none.py` and `make none`"
    assert missing_names(text) == ["docs/none.md", "src/bloomery/none.py", "make none"]
