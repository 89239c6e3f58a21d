"""Training a tokenizer: words bounded in length, much text in a child process, so that signals are heard

Run as a module it is that child: texts on its standard input, tokenizer.json on its output, progress on its errors.
"""

import json
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, final

from bloomery.core.child import die_with_parent
from bloomery.core.errors import UserError
from bloomery.core.units import MIB
from bloomery.data.tokenizer.tokenizer import SPECIAL, JsonBackend, Tokenizer, guarded
from bloomery.recipe.schema import TrainTokenizer

LONGEST_WORD = 1024  # characters: what counting and merging cost grows with the square of the longest word
_SEGMENT = MIB  # characters that are looked at together where a text may hold a longer one
_BLANK, _SOLID = re.compile(rf"\s{{{LONGEST_WORD},}}"), re.compile(rf"(?<!\S)\S{{{LONGEST_WORD},}}")
_WORD_ENDS = re.compile(r"(?<=[!-~])(?=\n)")
_AT_ONCE = {"bpe": MIB // 2, "unigram": MIB // 16}  # bytes of text that this process trains on itself: a second or two
_END = 2**64 - 1
Progress = Callable[[float, float], None]


def refuse_few_tokens(spec: TrainTokenizer) -> None:
    """Raises UserError for a vocabulary without room for bytes and special tokens."""
    smallest = len({*SPECIAL, *spec.special_tokens}) + 256
    if spec.vocab_size < smallest:
        raise UserError(f"{spec.vocab_size} tokens are fewer than the {smallest} that bytes and special tokens take",
                        where="tokenizer.train.vocab_size", remedy=f"set it to {smallest} or more")  # fmt: skip


def train_tokenizer(
    texts: Iterator[str], spec: TrainTokenizer, folder: Path, progress: Progress = lambda *_: None
) -> Tokenizer:
    """Trains on `texts`, which are read once, and commits the result to `folder`. Ids 0 to 3 are SPECIAL, then the
    recipe's own tokens. `progress` is called a few times a second while it works.
    """
    refuse_few_tokens(spec)
    pieces = chain.from_iterable(bounded(text) for text in texts)
    first, size = list[str](), 0
    while size <= _AT_ONCE[spec.kind] and (piece := next(pieces, None)) is not None:
        first.append(piece)
        size += len(piece.encode())
    small = size <= _AT_ONCE[spec.kind]
    text = _trained(iter(first), spec) if small else _trained_in_child(chain(first, pieces), spec, progress)
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "add_bos_token": True,
    }
    description = json.loads(text)
    for entry in description["added_tokens"]:  # training knows special tokens only; the user's own are part of the text
        entry["special"] = entry["content"] in SPECIAL
    tokenizer = Tokenizer(JsonBackend(description, "the trained tokenizer", set(SPECIAL)), config)
    tokenizer.save(folder)
    return tokenizer


def bounded(text: str) -> Iterator[str]:
    """The text whole when no word of it is longer than LONGEST_WORD; else texts that together have its words, the long
    ones in pieces of that length.
    """
    if not _maybe_long(text):
        yield text
        return
    kept = list[str]()  # ordinary text since the last long word
    for segment in _segments(text):
        for piece, long in _split(segment) if _maybe_long(segment) else [(segment, False)]:
            if long:
                yield from ["".join(kept)] if kept else []
                yield from (piece[start : start + LONGEST_WORD] for start in range(0, len(piece), LONGEST_WORD))
                kept = []
            else:
                kept.append(piece)
    if kept:
        yield "".join(kept)


def _maybe_long(text: str) -> bool:
    """Whether a word of it may be longer than LONGEST_WORD: no word holds white space and letters but for one space."""
    lines = max(map(len, text.split("\n"))) >= LONGEST_WORD  # ten times as fast as the expression
    return (lines and _SOLID.search(text) is not None) or _BLANK.search(text) is not None


def _segments(text: str) -> Iterator[str]:
    """Parts of the text: cut where a word ends for certain, or where there is no such place after _SEGMENT."""
    start = 0
    while start < len(text):
        stop = start + _SEGMENT
        if stop < len(text):
            ends = [match.start() for match in _WORD_ENDS.finditer(text, start + 1, stop)]
            stop = ends[-1] if ends else stop
        yield text[start:stop]
        start = stop


def _split(segment: str) -> Iterator[tuple[str, bool]]:
    """Runs of ordinary words, and long words."""
    from tokenizers import pre_tokenizers

    begin = 0
    for _, (start, stop) in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(segment):
        if stop - start > LONGEST_WORD:
            yield segment[begin:start], False
            yield segment[start:stop], True
            begin = stop
    yield segment[begin:], False


def _trained(texts: Iterator[str], spec: TrainTokenizer, *, told: bool = False) -> str:
    """tokenizer.json. `told`: the library writes its progress to stderr, as JSON where it knows how to."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
    from tokenizers import Tokenizer as Library

    # Both kinds work on bytes written as 256 letters: nothing is unknown and nothing, not even a space, is lost.
    library = Library(models.BPE() if spec.kind == "bpe" else models.Unigram())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    own = [token for token in dict.fromkeys(spec.special_tokens) if token not in SPECIAL]
    options: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "special_tokens": [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *own)],
        "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
        "show_progress": False,
    }
    if spec.kind == "unigram":
        trainer: Any = trainers.UnigramTrainer(**options, unk_token=SPECIAL[0])
    else:
        trainer = trainers.BpeTrainer(**options)
        if told and hasattr(trainer, "progress_format"):
            trainer = trainers.BpeTrainer(**{**options, "show_progress": True, "progress_format": "json"})
    guarded(
        lambda: library.train_from_iterator(texts, trainer), "the tokenizer could not be trained", "tokenizer.train"
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    text: str = library.to_str()
    return text


def _trained_in_child(texts: Iterator[str], spec: TrainTokenizer, progress: Progress) -> str:
    """As `_trained`, by a process that is gone afterwards: the library makes the one that it is in deaf to signals."""
    child = _Child(spec)
    try:
        return child.train(texts, progress)
    finally:
        child.close()


@final
class _Child:
    """The process that trains, and threads that read what it writes."""

    def __init__(self, spec: TrainTokenizer) -> None:
        command = [sys.executable, "-m", __name__, spec.model_dump_json(), str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=MIB,
            start_new_session=True,  # Ctrl+C reaches it through us alone
        )  # fmt: skip
        self._made, self._told, self._last = b"", (0.0, 0.0), b""
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_result, self._read_told)]
        for reader in self._readers:
            reader.start()

    def _read_result(self) -> None:
        assert self._process.stdout
        self._made = self._process.stdout.read()

    def _read_told(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            try:
                entry = json.loads(line)
                self._told = (float(entry["current"]), float(entry["total"]))
            except (ValueError, TypeError, KeyError):
                self._last = line[:300]

    def train(self, texts: Iterator[str], progress: Progress) -> str:
        assert self._process.stdin
        try:
            for text in texts:
                content = text.encode()
                self._process.stdin.write(struct.pack("<Q", len(content)) + content)
            self._process.stdin.write(struct.pack("<Q", _END))
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died: its exit code says so
        while self._readers[0].is_alive():
            self._readers[0].join(0.25)
            progress(*self._told)
        code = self._process.wait()
        if code == 0 and self._made[:1] == b"{":
            return self._made.decode()
        if code == 0 and self._made[:1] == b"[":
            problem, where, remedy = json.loads(self._made)
            raise UserError(problem, where=where, remedy=remedy)
        said = self._last.decode(errors="replace").strip()
        raise UserError(
            f"the process that trained the tokenizer died (code {code}){': ' if said else ''}{said}",
            where="tokenizer.train",
            remedy="if memory ran out, set tokenizer.train.vocab_size to a smaller number, or name fewer files",
        )

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        try:
            self._process.stdin.close()
        except BrokenPipeError:  # what was not yet sent goes nowhere
            self._process.stdin = None
        self._process.stdout.close()
        self._process.stderr.close()


def _received(stream: BinaryIO, parent: int) -> Iterator[str]:
    """The texts that the parent sends; behind the last one nothing is read but the parent's end."""
    while len(header := stream.read(8)) == 8 and (length := struct.unpack("<Q", header)[0]) != _END:
        yield stream.read(length).decode()
    if len(header) < 8:  # the parent is gone
        os._exit(1)
    die_with_parent(parent)


def main() -> None:
    spec, parent = TrainTokenizer.model_validate_json(sys.argv[1]), int(sys.argv[2])
    try:
        made = _trained(_received(sys.stdin.buffer, parent), spec, told=True)
    except UserError as error:
        made = json.dumps([error.problem, error.where, error.remedy])
    sys.stdout.buffer.write(made.encode())
    sys.stdout.buffer.flush()
    os._exit(0)  # the thread that waits for the parent's end holds standard input


if __name__ == "__main__":
    main()
