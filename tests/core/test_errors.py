"""Errors for the user: each names its subject, on its first line."""

import ast
from collections.abc import Iterator
from pathlib import Path

import bloomery

SOURCE = Path(bloomery.__file__).parent
PREDICATES = (
    "is",
    "are",
    "was",
    "has",
    "have",
    "had",
    "holds",
    "needs",
    "ends",
    "begins",
    "belongs",
    "does",
)


def beginnings(node: ast.expr, values: dict[str, list[ast.expr]]) -> Iterator[str]:
    """The first words of what the expression may be, as far as they stand in the source."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            yield text
        case ast.IfExp(body=one, orelse=other):
            yield from (text for branch in (one, other) for text in beginnings(branch, values))
        case ast.Name(id=name):
            yield from (text for value in values.get(name, ()) for text in beginnings(value, {}))


def test_no_error_begins_with_a_verb_that_has_no_subject():
    """`error: has 3,027 bytes instead of 4,096` does not say what has them."""
    found, calls = [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(source)) if "UserError(" in source else ():
            if not isinstance(function, ast.FunctionDef):
                continue
            values: dict[str, list[ast.expr]] = {}
            nodes = list(ast.walk(function))
            for node in nodes:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    values.setdefault(node.targets[0].id, []).append(node.value)
            for node in nodes:
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id == "UserError"
                ):
                    calls += 1
                    texts = beginnings(node.args[0], values) if node.args else ()
                    found += [
                        f"{path.name}: {text}"
                        for text in texts
                        if text.partition(" ")[0] in PREDICATES
                    ]
    assert calls > 300
    assert found == []
