"""How much of a text two tokenizers split at the same bytes: `python benchmarks/tokenizer_pairs.py FOLDER TEXTS ...`.

FOLDER has a folder per tokenizer, as scripts/real_tokenizers.py makes them. TEXTS are files: of a .jsonl the answers of
its conversations are taken, of a Django package (.whl) its translations, of another file passages of its lines. The
table has, of each pair, the share of the student's tokens that are in spans, and the share that are one token of both.
"""

import argparse
import json
import re
import zipfile
from collections.abc import Iterator
from itertools import islice, permutations
from pathlib import Path

from bloomery.data.tokenizer.alignment import continuing_ids
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.train.rl.teacher_texts import TeacherTexts

TEXTS = 400  # of each file
LINES = 20  # of a passage
LANGUAGES = ("zh_Hans", "ja", "ko", "ru", "ar", "hi", "th", "he", "el")
EMOJI = ("🎈", "👩🏽‍🚀", "🇳🇴", "❤️", "🫠", "…", "™️", "👍🏿")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--pairs", nargs="*", help="as STUDENT:TEACHER (default: all)")
    given = parser.parse_args()
    tokenizers = {
        path.name: load_tokenizer(path) for path in sorted(given.folder.iterdir()) if path.is_dir()
    }
    pairs = [tuple(pair.split(":")) for pair in given.pairs or ()] or permutations(tokenizers, 2)
    texts = {path.name: list(islice(passages(path), TEXTS)) for path in given.texts}
    texts["emoji"] = [
        text.replace(". ", f" {EMOJI[number % len(EMOJI)]} ") + EMOJI[(number + 3) % len(EMOJI)]
        for number, text in enumerate(next(iter(texts.values())))
    ]
    print("student", "teacher", *texts, sep=" | ")
    for student, teacher in pairs:
        reader = TeacherTexts(
            student=tokenizers[student], teacher=tokenizers[teacher], stop_ids=(), end_id=None
        )
        shares = [measured(reader, of_file) for of_file in texts.values()]
        print(student, teacher, *(f"{a:.1%}, {b:.1%}" for a, b in shares), sep=" | ")


def passages(path: Path) -> Iterator[str]:
    if path.suffix == ".jsonl":
        for row in path.read_text(encoding="utf-8").splitlines():
            for message in json.loads(row)["messages"]:
                if message["role"] == "assistant":
                    yield message["content"]
    elif path.suffix == ".whl":
        yield from translations(path)
    else:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for start in range(0, len(lines), LINES):
            yield "".join(lines[start : start + LINES])


def translations(path: Path) -> Iterator[str]:
    """Of each language some sentences, one language after the other."""
    with zipfile.ZipFile(path) as package:
        of_languages = []
        for language in LANGUAGES:
            content = package.read(f"django/conf/locale/{language}/LC_MESSAGES/django.po").decode()
            quoted = re.findall(r'^msgstr ((?:"[^"\\]*"\n)+)', content, re.MULTILINE)
            texts = ("".join(re.findall(r'"(.*)"', lines)) for lines in quoted)
            of_languages.append([text for text in texts if len(text) > 20])
    for sentences in zip(*of_languages, strict=False):
        yield from sentences


def measured(reader: TeacherTexts, texts: list[str]) -> tuple[float, float]:
    """The shares of the student's tokens in spans, and of those in spans of one token of each."""
    num_tokens = num_aligned = num_alone = 0
    for text in texts:
        ids = encoded(reader.student, text)
        num_tokens += len(ids)
        for span in reader.read(ids, room=10**6).spans:
            length = span.end - span.start
            num_aligned += length
            num_alone += length == 1 == span.other_end - span.other_start
    return num_aligned / num_tokens, num_alone / num_tokens


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """As the student would sample it, behind its prompt."""
    ids = continuing_ids(tokenizer, text)
    return ids or tokenizer.encode(text)


if __name__ == "__main__":
    main()
