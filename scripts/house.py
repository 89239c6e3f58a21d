"""Count the code of src/bloomery, and how it reads. `make check` prints the figures for people; none fails it.

    python scripts/house.py [FOLDER]
    python scripts/house.py --names     each public name with two meanings, and its modules

A code line is neither blank nor comment nor docstring. The length of a function is that of its `def` to its end.
The second table stands beside the same figures of nanochat, litgpt and lingua: names without a noun are stored names
that are a pronoun, a participle or an adjective alone; packed assignments are `a, b = x, y` that swap nothing.
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
NO_NOUN = frozenset(
    """
above again all also always any asked asking away back bad begin begun below big both built busy
by called changed chosen closed coming done down each either empty ended even false far few
found free full given going gone good got held here how in inside it just kept known large least
lent less loaded long made many mine missing more most moved much named near needed neither
never next none of off on once one ones only open other others ours out outside over own place
put read ready real room said same seen sent set short shown small so some still stored struck
such taken that theirs them then there they this thus to told true under up used usual waited
wanted what when which who whole whose why within without words written wrong yet
""".split()
)
# Figures of the packages of nanochat (2026-07), litgpt (2026-06) and lingua (2025-06), by the same count.
ANCHORS = {
    "names without a noun, per 1,000": ("0.9", "1.5", "9.5"),
    "packed assignments, per 1,000 lines": ("10", "2", "2"),
    "comments of their own, per 1,000 lines": ("196", "74", "49"),
    "the formatter overruled": ("0", "0", "0"),
}
STYLE_OF_SPINE = ("parallel", "plan", "runs")  # packages that are counted with the spine


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


def style(text: str, tree: ast.Module) -> Counter[str]:
    """Counts of a file: stored names, those without a noun, packed assignments, comments, skipped formatting."""
    counts: Counter[str] = Counter()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            counts["comments"] += token.line.lstrip().startswith("#")
            counts["skips"] += "fmt: skip" in token.string
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id.strip("_")
        elif isinstance(node, ast.arg):
            name = node.arg.strip("_")
        if name not in ("", "self", "cls"):
            counts["names"] += 1
            counts["no noun"] += name in NO_NOUN
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            target = node.targets[0]
            if isinstance(target, ast.Tuple):
                assigned = {ast.unparse(element) for element in target.elts}
                counts["packed"] += assigned != {ast.unparse(part) for part in node.value.elts}
    return counts


def two_meanings(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Public classes and functions that two modules or more define, each with these modules."""
    modules: dict[str, list[str]] = {}
    for module, tree in trees.items():
        definitions = [node for node in tree.body if isinstance(node, ast.ClassDef | Function)]
        for name in sorted({node.name for node in definitions if not node.name.startswith("_")}):
            modules.setdefault(name, []).append(module)
    return {name: modules[name] for name in sorted(modules) if len(modules[name]) > 1}


def style_rows(counts: Counter[str]) -> list[str]:
    """The figures of the second table, in the order of ANCHORS."""
    lines = max(counts["lines"], 1)
    return [
        f"{1000 * counts['no noun'] / max(counts['names'], 1):.1f}",
        f"{1000 * counts['packed'] / lines:.1f}",
        f"{1000 * counts['comments'] / lines:.0f}",
        f"{counts['skips']}",
    ]


def main() -> int:
    folders = [argument for argument in sys.argv[1:] if argument != "--names"]
    root = Path(folders[0] if folders else HOME / "src" / "bloomery")
    spine = set(
        tomllib.loads((HOME / "pyproject.toml").read_text())["tool"]["bloomery"]["spine"]["files"]
    )
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    function_lengths: list[int] = []
    spine_lines = 0
    spine_style: Counter[str] = Counter()
    rest_style: Counter[str] = Counter()
    missing_files = set(spine)
    trees: dict[str, ast.Module] = {}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        trees[path.relative_to(root).with_suffix("").as_posix()] = tree
        name = path.relative_to(root)
        package = name.parts[0] if len(name.parts) > 1 else "(root)"
        count = code_lines(text, tree)
        lines[package] += count
        in_spine = name.as_posix() in spine or package in STYLE_OF_SPINE
        (spine_style if in_spine else rest_style).update(style(text, tree) + Counter(lines=count))
        files[package] += 1
        if name.as_posix() in spine:
            spine_lines += count
            missing_files.discard(name.as_posix())
        function_lengths += [
            (n.end_lineno or 0) - n.lineno + 1 for n in ast.walk(tree) if isinstance(n, Function)
        ]
    function_lengths.sort()
    shared_names = two_meanings(trees)
    if "--names" in sys.argv:
        print("\n".join(f"{name}: {', '.join(modules)}" for name, modules in shared_names.items()))
        return 0

    print(f"{'':<22}{'code':>8}{'files':>8}")
    for package, count in lines.most_common():
        print(f"{package:<22}{count:>8,}{files[package]:>8}")
    print(f"{'all':<22}{lines.total():>8,}{files.total():>8}")
    print(f"{'spine':<22}{spine_lines:>8,}{len(spine):>8}")
    print(f"{'function, median':<22}{statistics.median(function_lengths):>8,.0f}")
    print(f"{'function, 9 of 10':<22}{function_lengths[len(function_lengths) * 9 // 10]:>8,}")
    print(f"\n{'':<40}{'spine':>8}{'rest':>8}{'nanochat':>10}{'litgpt':>8}{'lingua':>8}")
    figures = zip(ANCHORS.items(), style_rows(spine_style), style_rows(rest_style), strict=True)
    for (title, (nanochat, litgpt, lingua)), of_spine, of_rest in figures:
        print(f"{title:<40}{of_spine:>8}{of_rest:>8}{nanochat:>10}{litgpt:>8}{lingua:>8}")
    print(f"\npublic names with two meanings: {len(shared_names)} (--names lists them)")
    for name in sorted(missing_files):
        print(f"the spine names {name}, which does not exist")
    return 1 if missing_files else 0


if __name__ == "__main__":
    sys.exit(main())
