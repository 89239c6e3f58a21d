"""Prompts and responses from Python's standard library: a docstring's first sentence, and the function's source."""

import ast
import functools
import os
import platform
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

from bloomery.core.errors import UserError
from bloomery.data.examples import Example, Message
from bloomery.data.sources.files import SourceFile

MAX_ANSWER = 1500  # characters: some 500 tokens
MAX_QUESTION = 160
SHARES = {"stdlib-chat": 0.19, "stdlib-pairs": 0.31}  # of the library's bytes, in Python 3.11
_IMPERATIVES = """
accept acquire activate add adjust allow append apply arrange ask assert assign attach bind block build calculate
call cancel change check choose clean clear close collect combine compare compile compose compute configure connect
construct consume convert copy count create decide decode define delete destroy detach detect determine disable
discard display divide draw dump emit enable encode encrypt ensure enter escape estimate evaluate examine execute
expand extend extract feed fetch fill filter find finish fix flush format generate get give guess handle highlight
import increase indent initialize insert inspect install instantiate invert invoke iterate join kill list load
locate lock log look lookup make map mark match merge modify move multiply normalize notify obtain open pack parse
perform pick place pop prepare print process produce provide push put query quote raise read receive record recover
redirect reduce refresh register release remove rename render repeat replace report request reset resolve restore
retrieve return reverse rotate round run save scan schedule search select send separate serialize set show shuffle
shut shutdown skip sort split start stop store strip submit subtract swap take terminate test toggle trace transform
translate truncate try turn unbind unlock unpack unquote unregister update use validate verify wait walk warn wrap
write yield
"""
_KNOWN = frozenset(_IMPERATIVES.split())
_PHRASES = (
    "Write a {what} that {does}.",
    "Write a Python {what} that {does}.",
    "Write a {what} `{name}` that {does}.",
    "Please write a Python {what} named {name} that {does}.",
    "I need a {what} that {does}. Write it in Python.",
    "How would you write a {what} that {does} in Python?",
    "Write a {what} called {name}. It {does}.",
)


def conversations(files: tuple[SourceFile, ...]) -> Iterator[Example]:
    """One prompt and response per function."""
    for source, prompt, response in _functions(files):
        yield Example(
            source, "chat", (), ((Message("user", prompt), Message("assistant", response)),)
        )


def pairs(files: tuple[SourceFile, ...]) -> Iterator[Example]:
    """Each prompt with its response and, as the rejected one, the same lines in reverse order where that is no valid
    Python: as long, of the same words, and wrong. Small models can be trained to distinguish them.
    """
    for source, prompt, response in _functions(files):
        backwards = "\n".join(reversed(response.splitlines()))
        if not _is_python(backwards):
            responses = (Message("assistant", response),), (Message("assistant", backwards),)
            yield Example(source, "pair", (Message("user", prompt),), responses)


@functools.lru_cache(maxsize=1)
def _functions(files: tuple[SourceFile, ...]) -> list[tuple[str, str, str]]:
    """The place, prompt and response of functions, without repeated prompts and responses: the prompt asks for what the
    docstring says, the response is the source without it. A file that is no valid Python of this version has none.
    """
    prompts = set[str]()
    responses = set[str]()
    rows = list[tuple[str, str, str]]()
    for file in files:
        try:
            text = file.path.read_bytes().decode("utf-8")
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        lines = text.splitlines(keepends=True)
        functions = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        for node in sorted(functions, key=lambda node: node.lineno):
            does = _summary(ast.get_docstring(node) or "")
            response = _response_of(node, lines) if does else None
            if does and response and does.lower() not in prompts and response not in responses:
                prompts.add(does.lower())
                responses.add(response)
                arguments = [*node.args.posonlyargs, *node.args.args]
                kind = "method" if arguments and arguments[0].arg in ("self", "cls") else "function"
                phrase = _PHRASES[crc32(f"{node.name} {does}".encode()) % len(_PHRASES)]
                prompt = phrase.format(what=kind, does=does, name=node.name)
                rows.append((f"{file.name}:{node.lineno}", prompt, response))
    return rows


def _summary(docstring: str) -> str | None:
    """The first sentence in the third person: "Return the sum." becomes "returns the sum"."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence = paragraph.split(". ")[0].rstrip(".:")
    first_word, _, rest = sentence.partition(" ")
    verb = first_word.lower()
    if verb not in _KNOWN:
        verb = next(
            (stem for stem in (verb[:-1], verb[:-2]) if verb.endswith("s") and stem in _KNOWN), ""
        )
    if verb.endswith(("s", "sh", "ch", "x", "z")):
        third_person = f"{verb}es"
    else:
        third_person = (
            f"{verb[:-1]}ies" if verb.endswith("y") and verb[-2] not in "aeiou" else f"{verb}s"
        )
    is_usable = (
        first_word[:1].isupper() and rest and rest.isascii() and len(sentence) <= MAX_QUESTION
    )
    return f"{third_person} {rest}" if verb and is_usable and ">>>" not in rest else None


def _response_of(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str | None:
    """The source without the docstring, dedented; None when it is empty or too long."""
    docstring, *body = node.body
    first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    if (
        not body
        or docstring.end_lineno is None
        or node.end_lineno is None
        or body[0].lineno <= docstring.end_lineno
    ):
        return None
    source_lines = (
        lines[first_line - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
    )
    response = textwrap.dedent("".join(source_lines)).strip()
    if docstring.lineno == node.lineno or len(response) > MAX_ANSWER or not response.isascii():
        return None
    return response if _is_python(response) else None  # dedenting may have changed a string in it


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


# Character tables and documentation topics are data in the shape of code; tests repeat what they test.
_LEFT_OUT = {
    "encodings",
    "pydoc_data",
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
}


def stdlib_files() -> list[SourceFile]:
    """The standard library's .py files, sorted. Raises UserError for an interpreter without them (a frozen one)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = _names_below(root)
    if not names:
        raise UserError(
            "this Python has no source files of its standard library",
            where=str(root),
            fix="set data.path to your own dataset",
        )
    return [SourceFile(root / name, name, "code") for name in names]


@functools.cache  # a plan lists them twice
def _names_below(root: Path) -> tuple[str, ...]:
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    return tuple(sorted(path.relative_to(root).as_posix() for path in paths))


def identity() -> str:
    """Implementation, version and folder of this Python, which decide the dataset."""
    return f"{platform.python_implementation()} {platform.python_version()} in {sysconfig.get_paths()['stdlib']}"
