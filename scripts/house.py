"""Count the code of src/bloomery by package and compare it with the budgets in pyproject.toml. `make check` prints it.

    python scripts/house.py [FOLDER]

A code line is neither blank nor comment nor docstring. The length of a function is that of its `def` to its end.
Exit code 1 when a package, the spine, the number of files, of modules in a folder or a function is over its budget,
or the median function shorter than the least.
"""

import ast
import io
import statistics
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(text: str, tree: ast.Module) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else HOME / "src" / "bloomery")
    budgets = tomllib.loads((HOME / "pyproject.toml").read_text())["tool"]["bloomery"]["budgets"]
    spine = set(budgets["spine"]["files"])
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    modules: Counter[Path] = Counter()
    functions: list[int] = []
    spine_lines, found = 0, set()
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        place = path.relative_to(root)
        package = place.parts[0] if len(place.parts) > 1 else "(root)"
        count = code_lines(text, tree)
        lines[package] += count
        files[package] += 1
        modules[place.parent] += place.name != "__init__.py"
        if place.as_posix() in spine:
            spine_lines, found = spine_lines + count, found | {place.as_posix()}
        functions += [(n.end_lineno or 0) - n.lineno + 1 for n in ast.walk(tree) if isinstance(n, Function)]
    functions.sort()
    median, ninth = statistics.median(functions), functions[len(functions) * 9 // 10]

    over = []

    def row(name: str, value: float, limit: float, more: str = "") -> None:
        print(f"{name:<22}{value:>8,.0f}{limit:>9,}{more}")
        if value > limit:
            over.append(f"{name}: {value:,.0f} is over its budget of {limit:,}")

    print(f"{'':<22}{'code':>8}{'budget':>9}{'files':>8}")
    for package, count in lines.most_common():
        row(package, count, budgets["packages"].get(package, 0), f"{files[package]:>8}")
    row("all", lines.total(), budgets["code"])
    row("spine", spine_lines, budgets["spine"]["code"])
    row("files", files.total(), budgets["files"])
    row("function, median", median, budgets["function_median"])
    row("function, 9 of 10", ninth, budgets["function_ninth_decile"])
    if median < (least := budgets["function_median_least"]):
        over.append(f"function, median: {median:,.0f} is below {least}: put short ones into their one caller")
    over += [
        f"{folder} has {n} modules, more than 14" for folder, n in modules.items() if n > 14 and folder.name != "cli"
    ]
    over += [f"the spine names {name}, which does not exist" for name in sorted(spine - found)]
    print(*over, sep="\n")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
