"""Count the code of src/bloomery by package. `make check` prints the figures for people to look at; none fails it.

    python scripts/house.py [FOLDER]

A code line is neither blank nor comment nor docstring. The length of a function is that of its `def` to its end.
Exit code 1 only when the spine names a file that does not exist.
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
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(text: str, tree: ast.Module) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | Function)
            and ast.get_docstring(node, clean=False) is not None
        ):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else HOME / "src" / "bloomery")
    spine = set(
        tomllib.loads((HOME / "pyproject.toml").read_text())["tool"]["bloomery"]["spine"]["files"]
    )
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    function_lengths: list[int] = []
    spine_lines = 0
    missing_files = set(spine)
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        name = path.relative_to(root)
        package = name.parts[0] if len(name.parts) > 1 else "(root)"
        count = code_lines(text, tree)
        lines[package] += count
        files[package] += 1
        if name.as_posix() in spine:
            spine_lines += count
            missing_files.discard(name.as_posix())
        function_lengths += [
            (n.end_lineno or 0) - n.lineno + 1 for n in ast.walk(tree) if isinstance(n, Function)
        ]
    function_lengths.sort()

    print(f"{'':<22}{'code':>8}{'files':>8}")
    for package, count in lines.most_common():
        print(f"{package:<22}{count:>8,}{files[package]:>8}")
    print(f"{'all':<22}{lines.total():>8,}{files.total():>8}")
    print(f"{'spine':<22}{spine_lines:>8,}{len(spine):>8}")
    print(f"{'function, median':<22}{statistics.median(function_lengths):>8,.0f}")
    print(f"{'function, 9 of 10':<22}{function_lengths[len(function_lengths) * 9 // 10]:>8,}")
    for name in sorted(missing_files):
        print(f"the spine names {name}, which does not exist")
    return 1 if missing_files else 0


if __name__ == "__main__":
    sys.exit(main())
