"""Each entry of scripts/words.toml hits its examples of the retired word and spares those of the right use."""

import importlib.util
import io
import sys
import tokenize
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("words", HOME / "scripts" / "words.py")
words = importlib.util.module_from_spec(spec)
sys.modules["words"] = words
spec.loader.exec_module(words)
ENTRIES, BUDGET, _ = words.load_table()
IDS = [entry.write for entry in ENTRIES]
PARTS = sorted(path for path in (HOME / "src/bloomery").iterdir() if path.name != "__pycache__")


def found(entry, example):
    source = f"{example}: ...\n" if example.startswith("class ") else f"{example}(): ...\n"
    source = source if example.startswith(("def ", "class ")) else f'"""{example}"""\n'
    return list(words.hits_in_source(source, ".py", [entry]))


@pytest.mark.parametrize("entry", ENTRIES, ids=IDS)
def test_an_entry_hits_its_examples_and_spares_the_right_uses(entry):
    assert entry.hits
    assert entry.spares
    assert [example for example in entry.hits if not found(entry, example)] == []
    assert [example for example in entry.spares if found(entry, example)] == []


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e.text], ids=[e.write for e in ENTRIES if e.text]
)
def test_searching_around_stems_finds_what_a_full_search_finds(entry):
    pages = "\x01".join(
        path.read_text(encoding="utf-8") for path in sorted((HOME / "docs").rglob("*.md"))
    )
    full = [m.start(1) for m in entry.text_pattern.finditer(pages)]
    assert [m.start(1) for m in entry.hits_in_text(pages, pages.lower())] == full


def test_every_exception_has_a_reason_and_a_place():
    for entry in ENTRIES:
        for allowed in entry.allow:
            assert set(allowed) == {"path", "text", "reason"}
            assert (HOME / allowed["path"]).exists()


def test_every_budget_is_that_of_a_package():
    files = words.files_of([HOME / place for place in words.PLACES])
    assert set(BUDGET) <= {words.package_of(path.relative_to(HOME).as_posix()) for path in files}


@pytest.mark.sampled(4)  # a tokenizer in Python takes seconds for all of them
@pytest.mark.parametrize("entry", PARTS, ids=lambda path: path.name)
def test_comments_and_strings_are_those_of_the_tokenizer(entry):
    for path in entry.rglob("*.py") if entry.is_dir() else [entry]:
        source = path.read_text(encoding="utf-8")
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        expected = [t.string for t in tokens if t.type in (tokenize.COMMENT, tokenize.STRING)]
        if sys.version_info < (3, 12):  # later an f-string is several tokens
            assert [m[0] for m in words.PROSE.finditer(source)] == [
                text.lstrip("rbfuRBFU") for text in expected
            ], path


def test_names_strings_docstrings_and_comments_are_distinguished():
    source = (
        "def rung(card, *, processor):\n"
        '    """A docstring {with} `code` in it."""\n    self.exam, told = 1, "a key_word"\n'
        '    return ["one_key", f"{told} in"\n        "two lines"]  # a comment\n'
    )
    parts = [
        (part.kind, part.line, part.text.replace("\0", "").split())
        for part in words.python_parts(source)
    ]
    assert parts == [
        ("name", 1, ["rung"]),
        ("name", 1, ["card"]),
        ("name", 1, ["processor"]),
        ("name", 3, ["exam"]),
        ("docstring", 2, ["A", "docstring", "in", "it."]),
        ("string", 3, ["a", "key_word"]),
        ("key", 4, ["one_key"]),
        ("string", 4, ["in", "two", "lines"]),
        ("comment", 5, ["a", "comment"]),
    ]


def test_a_page_is_read_without_its_code_markup_and_keys():
    pages = {
        ".md": ("# A head\n`code` [text](https://a.b/rows)\n", "A head [text]( )"),
        ".yaml": ("key: rows   # a comment\n", "# a comment"),
        ".toml": ('[rows]\nrows = "a value"  # a comment\n', '"a value" # a comment'),
        ".html": ("<p class='rows'>{{ rows }} text</p>", "text"),
    }
    for suffix, (source, prose) in pages.items():
        (part,) = words.page_parts(source, suffix)
        assert " ".join(part.text.replace("\0", " ").split()) == " ".join(prose.split())
        assert len(part.text) == len(source)
