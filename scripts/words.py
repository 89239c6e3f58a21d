"""Find the words that scripts/words.toml retires, and what to write instead. `make check` runs it.

    python scripts/words.py [--path PLACE] [--counts] [--lower]   a report for a reader; exit 1 with --path and hits
    python scripts/words.py --terms                               the field's terms per 10,000 words of README and docs

An entry of the table has a regular expression for `text` (comments, docstrings, string literals, pages), one for `name`
(functions, classes, arguments, fields, constants and one-word string literals), or both. `[budget]` holds the hits that
a package still has: more fail, fewer print "lower it".
"""

import argparse
import ast
import gc
import re
import sys
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, NamedTuple

HOME = Path(__file__).resolve().parents[1]
TABLE = HOME / "scripts" / "words.toml"
PLACES = ["README.md", "benchmarks/README.md", "docs", "scripts", "src/bloomery"]
SKIPPED = (  # history; generated from docstrings; the table itself; the answers to old keys
    "docs/decisions/",
    "docs/contributing/code-map.md",
    "scripts/words.toml",
    "src/bloomery/recipe/aliases",
)
SUFFIXES = {".py", ".sh", ".toml", ".yaml", ".md", ".jinja", ".html"}
BREAK = "\x01"  # between the parts of a file
MARGIN = 60  # characters around a stem that are searched
# What is no prose: format fields, inline code of one word, addresses.
NO_PROSE = re.compile(r"\{[^{}\n]*\}|`[^`\s]+`|https?://[^\s)\"'>]+")
MARKUP = re.compile(r"\{%.*?%\}|\{\{.*?\}\}|<[^>]*>|\{#|#\}", re.DOTALL)
ESCAPE = re.compile(r"\\[nrt\"'\\]")
PROSE = re.compile(
    r"#(?P<comment>[^\n]*)|(?P<quote>\"{3}|'{3}|[\"'])(?P<string>(?:[^\\\"']+|\\.|(?!(?P=quote))[\"'])*)(?P=quote)",
    re.DOTALL,
)
KEY = re.compile(r"[\w.\-/]+")
WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[_.\-/]+")
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Entry:
    """A retired word and what to `write` instead.

    `paths`, `kinds`: where it applies; empty: everywhere. `starts`: only at the beginning of a part. `hits`, `spares`:
    examples, a name written `def some_name`. `allow`: {path, text, reason}; `text` is searched in the line of the hit.
    """

    write: str
    text: str = ""
    name: str = ""
    paths: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    starts: bool = False
    hits: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    allow: tuple[dict[str, str], ...] = ()

    @cached_property
    def text_pattern(self) -> re.Pattern[str]:
        start = rf"(?:\A|{BREAK})\s*" if self.starts else r"(?<![\w-])"
        return re.compile(rf"{start}({spaced(self.text)})(?!\w)", re.IGNORECASE)

    @cached_property
    def name_pattern(self) -> re.Pattern[str]:
        return re.compile(self.name)

    @cached_property
    def stems(self) -> frozenset[str]:
        """Every hit contains one of these literals, in lower case. Only their surroundings are searched."""
        return stems_of(re._parser.parse(spaced(self.text)))

    def hits_in_text(self, text: str, low: str) -> Iterator[re.Match[str]]:
        """`low`: the text in lower case."""
        stems = [stem for stem in self.stems if stem in low] if self.text else ()
        end = 0
        for place in sorted(m.start() for stem in stems for m in re.finditer(re.escape(stem), low)):
            if place >= end:
                start, end = max(end, place - MARGIN), place + 1
                for match in self.text_pattern.finditer(text, start, place + 3 * MARGIN):
                    if match.start(1) > place:
                        break
                    yield match
                    end = max(end, match.end())

    def applies_to(self, path: str) -> bool:
        return not self.paths or path.startswith(self.paths)

    def allows(self, path: str, line: str) -> bool:
        return any(path.startswith(a["path"]) and re.search(a["text"], line) for a in self.allow)


def stems_of(parsed: Iterable[tuple[object, Any]]) -> frozenset[str]:
    """The best set of literals of a parsed pattern, one of which is in every match; {""} where there is none."""
    found, run = [frozenset([""])], ""
    for operation, value in [*parsed, (None, None)]:
        if operation is re._constants.LITERAL:
            run += chr(value).lower()
            continue
        found.append(frozenset([run]))
        if operation is re._constants.SUBPATTERN:
            found.append(stems_of(value[-1]))
        elif operation is re._constants.BRANCH:
            found.append(frozenset().union(*map(stems_of, value[1])))
            found.append(frozenset(run + literal_start(alternative) for alternative in value[1]))
        run = ""
    return max(found, key=lambda stems: min(map(len, stems)))


def literal_start(parsed: Iterable[tuple[object, Any]]) -> str:
    return "".join(
        chr(v).lower() for _, v in takewhile(lambda item: item[0] is re._constants.LITERAL, parsed)
    )


class Part(NamedTuple):
    """A name, a one-word string ("key"), a string, a docstring, a comment or a page. NUL replaces code."""

    kind: str
    line: int
    text: str


class Hit(NamedTuple):
    path: str
    line: int
    kind: str
    found: str
    entry: Entry


@cache
def load_table() -> tuple[list[Entry], dict[str, int], list[str]]:
    """The entries, the budget of each package, the field's terms."""
    raw = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    entries = [
        Entry(**{key: tuple(v) if isinstance(v, list) else v for key, v in e.items()})
        for e in raw["entry"]
    ]
    return entries, raw["budget"], raw["terms"]


def spaced(pattern: str) -> str:
    """A blank of the table matches any whitespace, line breaks too; END the end of a clause."""
    return (
        pattern.replace(" ?", r"\s*")
        .replace(" ", r"\s+")
        .replace("END", rf"\s*(?:[,.;:()|{BREAK}]|\Z)")
    )


def words_in(name: str) -> str:
    """`tokens_per_step` and `TokensPerStep` are "tokens per step"."""
    return WORDS.sub(" ", name).strip().lower()


def blanked(pattern: re.Pattern[str], text: str) -> str:
    """Matches become NUL, line by line, so that offsets stay."""
    return pattern.sub(lambda m: re.sub(r"[^\n]", "\0", m[0]), text)


def python_parts(source: str) -> Iterator[Part]:
    """The names of a module, then its comments, docstrings and strings; neighbors of one kind are joined."""
    tree = ast.parse(source)
    names = list(names_of(tree))
    docstrings = {part.line for part in names if part.kind == "docstring"}
    yield from (part for part in names if part.kind == "name")
    kind, text, first, line, end = "", "", 1, 1, 0
    for token in PROSE.finditer(source):
        gap, body, new = source[end : token.start()], token["string"], "string"
        line += gap.count("\n")
        if body is None:
            body, new = f" {token['comment']}", "comment"
        elif line in docstrings:
            new = "docstring"
        if new != kind or gap.strip():
            yield from finished(kind, first, text)
            kind, text, first = new, "", line
        text += (gap if text else "") + f" {body} "
        line, end = line + body.count("\n"), token.end()
    yield from finished(kind, first, text)


def finished(kind: str, line: int, text: str) -> Iterator[Part]:
    if kind == "string" and KEY.fullmatch(text.strip()):
        yield Part("key", line, text.strip())
    elif kind and not text.startswith(("  fmt:", "  type:", "  noqa")):
        yield Part(kind, line, blanked(NO_PROSE, ESCAPE.sub("  ", text)))


def names_of(block: ast.AST) -> Iterator[Part]:
    """Functions, classes, arguments, fields and constants of a block; the line of each docstring."""
    if (
        isinstance(block, ast.Module | ast.ClassDef | Function)
        and ast.get_docstring(block, clean=False) is not None
    ):
        yield Part("docstring", block.body[0].lineno, "")
    for node in [statement for name in BLOCKS for statement in getattr(block, name, ())]:
        if isinstance(node, Function | ast.ClassDef):
            yield Part("name", node.lineno, node.name)
        if isinstance(node, Function):
            a = node.args
            every = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
            yield from (Part("name", arg.lineno, arg.arg) for arg in every if arg)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            for t in getattr(target, "elts", [target]):
                if isinstance(t, ast.Attribute):
                    yield Part("name", t.lineno, t.attr)
                elif isinstance(t, ast.Name) and isinstance(block, ast.Module | ast.ClassDef):
                    yield Part("name", t.lineno, t.id)
        yield from names_of(node)


def page_parts(text: str, suffix: str) -> Iterator[Part]:
    """A page as one part, without its code, markup and keys."""
    if suffix == ".yaml":  # the comments: values are data
        text = blanked(re.compile(r"^[^#\n]+", re.MULTILINE), text)
    elif suffix == ".toml":
        text = blanked(re.compile(r"^[\w.\-]+ *=|^\[.*\]$", re.MULTILINE), text)
    elif suffix in (".jinja", ".html"):
        text = blanked(MARKUP, text)
    yield Part(
        "page",
        1,
        blanked(NO_PROSE, re.sub(r"^#+ ", lambda m: " " * len(m[0]), text, flags=re.MULTILINE)),
    )


def files_of(places: list[Path]) -> Iterator[Path]:
    for place in places:
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.suffix in SUFFIXES and not path.relative_to(HOME).as_posix().startswith(
                SKIPPED
            ):
                yield path


def hits_in(path: Path, entries: list[Entry]) -> Iterator[Hit]:
    place, source = path.relative_to(HOME).as_posix(), path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for kind, line, found, entry in hits_in_source(
        source, path.suffix, [e for e in entries if e.applies_to(place)]
    ):
        if not entry.allows(place, lines[line - 1]):
            yield Hit(place, line, kind, found, entry)


def hits_in_source(
    source: str, suffix: str, entries: list[Entry]
) -> Iterator[tuple[str, int, str, Entry]]:
    """Kind, line and text of each hit, by line."""
    parts = list(python_parts(source) if suffix == ".py" else page_parts(source, suffix))
    found = [
        (part.kind, part.line, part.text, entry)
        for part in parts
        if part.kind in ("name", "key")
        for entry in retiring(part.text)
        if entry in entries
    ]
    parts = [part for part in parts if part.kind not in ("name", "key")]
    text = BREAK.join(part.text for part in parts)
    starts = list(accumulate((len(part.text) + 1 for part in parts), initial=0))
    low = text.lower()
    for entry in entries:
        for match in entry.hits_in_text(text, low):
            index = bisect_right(starts, match.start(1)) - 1
            kind, line, _ = parts[index]
            if not entry.kinds or kind in entry.kinds:
                line += text.count("\n", starts[index], match.start(1))
                found.append((kind, line, " ".join(match[1].replace("\0", "_").split()), entry))
    return iter(sorted(found, key=lambda hit: hit[1]))


@cache
def retiring(name: str) -> list[Entry]:
    """The entries that retire a name, wherever it is."""
    words, entries = words_in(name), load_table()[0]
    return (
        [e for e in entries if e.name and e.name_pattern.fullmatch(words)]
        if any_name().fullmatch(words)
        else []
    )


@cache
def any_name() -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{entry.name})" for entry in load_table()[0] if entry.name))


def package_of(place: str) -> str:
    parts = place.split("/")
    if parts[:2] == ["src", "bloomery"]:
        return parts[2] if len(parts) > 3 else "(root)"
    return parts[0]


def print_terms(terms: list[str]) -> None:
    pages = [HOME / "README.md", *sorted((HOME / "docs").rglob("*.md"))]
    text = " ".join(path.read_text(encoding="utf-8") for path in pages)
    total = len(re.findall(r"[A-Za-z][\w'-]*", text))
    print(f"{total:,} words in README and docs; per 10,000 words, and in all:")
    for term in terms:
        count = len(re.findall(rf"(?<!\w)(?:{spaced(term)})(?!\w)", text, re.IGNORECASE))
        print(f"{count / total * 1e4:>8.1f} {count:>6,}  {term}")


def compare(counts: Counter[str], budget: dict[str, int]) -> list[str]:
    """Print the hits of each package; return those over budget."""
    print(f"{'':<22}{'hits':>8}{'budget':>9}")
    for package in sorted({*counts, *budget}):
        count, limit = counts[package], budget.get(package, 0)
        print(
            f"{package:<22}{count:>8,}{limit:>9,}{'   lower it: --lower' if count < limit else ''}"
        )
    print(f"{'all':<22}{counts.total():>8,}{sum(budget.values()):>9,}")
    return [package for package, count in counts.items() if count > budget.get(package, 0)]


def lower_budgets(counts: Counter[str], budget: dict[str, int]) -> None:
    table = TABLE.read_text(encoding="utf-8")
    for package, limit in budget.items():
        table = table.replace(
            f'"{package}" = {limit}\n', f'"{package}" = {min(limit, counts[package])}\n'
        )
    TABLE.write_text(table, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--path", type=Path, action="append", help="print the hits of a file or folder"
    )
    parser.add_argument(
        "--counts", action="store_true", help="print the hits per package and per entry"
    )
    parser.add_argument(
        "--lower", action="store_true", help="lower the budgets to the present counts"
    )
    parser.add_argument(
        "--terms", action="store_true", help="count the field's terms in README and docs"
    )
    options = parser.parse_args()
    gc.disable()  # the trees of a few hundred files: collecting takes a quarter of the time
    entries, budget, terms = load_table()
    if options.terms:
        print_terms(terms)
        return 0
    places = [path.resolve() for path in options.path or [HOME / place for place in PLACES]]
    found = [hit for path in files_of(places) for hit in hits_in(path, entries)]
    counts = Counter(package_of(hit.path) for hit in found)
    if options.lower:
        lower_budgets(counts, budget)
        return 0
    if options.path:
        budget = dict.fromkeys(counts, 0)
    if options.counts:
        for entry, count in Counter(hit.entry for hit in found).most_common():
            print(f"{count:>6,}  {(entry.text or entry.name)[:60]:<60}  -> {entry.write}")
    else:
        for hit in found:
            if counts[package_of(hit.path)] > budget.get(package_of(hit.path), 0):
                print(f"{hit.path}:{hit.line}: {hit.found} ({hit.kind}) -> {hit.entry.write}")
    over = compare(counts, budget)
    if over and not options.path:
        print(
            f"read these again: {', '.join(over)}. A reader decides, no build fails: scripts/words.py --path FOLDER"
        )
    return 1 if over and options.path else 0


if __name__ == "__main__":
    sys.exit(main())
