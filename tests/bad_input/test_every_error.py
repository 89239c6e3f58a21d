"""Every sentence for a person ends in what to do."""

import ast
from pathlib import Path

import bloomery

ERRORS = {"UserError", "OutOfMemory", "Unsound"}
SOURCES = sorted(Path(bloomery.__file__).parent.rglob("*.py"))


def test_every_user_error_has_a_remedy():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ERRORS
            ):
                given = {keyword.arg for keyword in node.keywords}
                assert "fix" in given or None in given, f"{path}:{node.lineno}"
