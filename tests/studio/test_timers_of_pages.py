"""NiceGUI answers as soon as a timer of a page runs: what a page awaits after it would come late, by the socket."""

import ast
from pathlib import Path

import bloomery.studio

PAGES = sorted(Path(bloomery.studio.__file__).parent.glob("*_page.py"))


def own_nodes(function: ast.AsyncFunctionDef) -> list[ast.AST]:
    """Those of the function without the functions inside it."""
    nodes = list[ast.AST]()
    waiting = list[ast.AST](function.body)
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes.append(node)
            waiting += ast.iter_child_nodes(node)
    return nodes


def test_timers_begin_after_the_last_await_of_a_page():
    num_timers = 0
    for path in PAGES:
        for function in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(function, ast.AsyncFunctionDef):
                continue
            nodes = own_nodes(function)
            timers = [
                node.lineno
                for node in nodes
                if isinstance(node, ast.Call)
                and ast.unparse(node.func) in ("update_every", "ui.timer")
            ]
            awaits = [node.lineno for node in nodes if isinstance(node, ast.Await)]
            num_timers += len(timers)
            if timers and awaits:
                assert max(awaits) < min(timers), f"{path.name}: {function.name}"
    assert num_timers >= 8
