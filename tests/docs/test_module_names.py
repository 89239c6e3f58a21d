"""A module that a comment, a docstring or a page for contributors names exists."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.recipe.aliases import known_keys

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "bloomery"
PACKAGES = [path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()]
MODULE = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:[./][a-z]\w*)+(?![\w/-])")
FILES = (".py", ".toml", ".html", ".cpp", ".jsonl")
# Attributes of a decoder and of a recipe, and run folders.
NO_MODULES = (
    "model.layers",
    "model.tokenizer",
    "model.embed_tokens",
    "model.language_model",
    "model.generate",
    "recipe.parallel",
    "runs/",
)
SUFFIXES = ("json", "jsonl", "safetensors", "html", "md")


def comments_of(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def exists(name: str) -> bool:
    """Whether the name leads to a file, or to something in one. A recipe key may begin like a package."""
    parts = re.split("[./]", name)
    keys = {key[: len(parts)] for key in known_keys()}
    if tuple(parts) in keys or name.startswith(NO_MODULES) or parts[-1] in SUFFIXES:
        return True
    folder = SOURCE
    for part in parts:
        if (folder / part).is_dir():
            folder /= part
            continue
        return any((folder / f"{part}{suffix}").is_file() for suffix in FILES)
    return True


@pytest.mark.parametrize("package", PACKAGES)
def test_comments_name_modules_that_exist(package: str) -> None:
    gone = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path in sorted((SOURCE / package).rglob("*.py"))
        for text in comments_of(path)
        for name in MODULE.findall(text)
        if not exists(name)
    ]
    assert gone == []


PAGES = sorted(
    [*(ROOT / "docs/decisions").glob("*.md"), *(ROOT / "docs/contributing").glob("*.md")]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_for_contributors_name_modules_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = [name for code in re.findall("`([^`]+)`", text) for name in MODULE.findall(code)]
    assert [name for name in names if not exists(name)] == []


def test_a_module_that_is_gone_is_found() -> None:
    assert exists("train/loop.py") and exists("facts.config") and exists("train.seed")
    assert not exists("train/nowhere.py") and not exists("model.weights")
