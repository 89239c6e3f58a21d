"""Scripts and benchmarks, which no test runs whole, import what exists."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("scripts", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)


def imported_names(tree: ast.AST) -> list[tuple[str, str]]:
    """Of each `from bloomery... import NAME`, at any depth: the module and the name."""
    return [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "bloomery"
        for alias in node.names
    ]


def is_there(module: str, name: str) -> bool:
    """Whether the module has the name, or the package a module of that name."""
    imported = importlib.import_module(module)
    if hasattr(imported, name):
        return True
    is_package = hasattr(imported, "__path__")
    return is_package and importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("file", FILES)
def test_what_a_script_imports_exists(file: str) -> None:
    names = imported_names(ast.parse((ROOT / file).read_bytes()))
    assert [f"{module}.{name}" for module, name in names if not is_there(module, name)] == []
