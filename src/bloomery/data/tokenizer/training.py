"""Training a tokenizer: words bounded in length, much text in a child process, so that signals are heard."""

import json
import os
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from bloomery.core.child import Child, accept, last_words, reply, requests
from bloomery.core.errors import UserError
from bloomery.core.units import MIB
from bloomery.data.tokenizer.tokenizer import SPECIAL, JsonBackend, Tokenizer, guarded
from bloomery.recipe.schema import TrainTokenizer

LONGEST_WORD = 1024  # characters: what counting and merging cost grows with the square of the longest word
_SEGMENT = MIB  # characters that are looked at together where a text may hold a longer one
_BLANK, _SOLID = re.compile(rf"\s{{{LONGEST_WORD},}}"), re.compile(rf"(?<!\S)\S{{{LONGEST_WORD},}}")
_WORD_ENDS = re.compile(r"(?<=[!-~])(?=\n)")
_AT_ONCE = {"bpe": MIB // 2, "unigram": MIB // 16}  # bytes of text that this process trains on itself: a second or two
_HOURS = 1e6  # seconds: it takes as long as it takes, and a child that dies is noticed
Progress = Callable[[float, float], None]


def refuse_few_tokens(spec: TrainTokenizer) -> None:
    """Raises UserError for a vocabulary without room for bytes and special tokens."""
    smallest = len({*SPECIAL, *spec.special_tokens}) + 256
    if spec.vocab_size < smallest:
        raise UserError(f"{spec.vocab_size} tokens are fewer than the {smallest} that bytes and special tokens take",
                        where="tokenizer.train.vocab_size", fix=f"set it to {smallest} or more")  # fmt: skip


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
    config: dict[str, Any] = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    config["add_bos_token"] = True
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
    from tokenizers import pre_tokenizers

    words, kept = pre_tokenizers.ByteLevel(add_prefix_space=False), list[str]()  # ordinary text since the last long one
    start = 0
    while start < len(text):  # segments end where a word does for certain, or where there is no such place
        stop = start + _SEGMENT
        if stop < len(text):
            ends = [match.start() for match in _WORD_ENDS.finditer(text, start + 1, stop)]
            stop = ends[-1] if ends else stop
        segment, begin, start = text[start:stop], 0, stop
        for _, (first, last) in words.pre_tokenize_str(segment) if _maybe_long(segment) else ():
            if last - first > LONGEST_WORD:
                kept.append(segment[begin:first])
                yield "".join(kept)
                yield from (segment[at : min(at + LONGEST_WORD, last)] for at in range(first, last, LONGEST_WORD))
                kept, begin = [], last
        kept.append(segment[begin:])
    if kept:
        yield "".join(kept)


def _maybe_long(text: str) -> bool:
    """Whether a word of it may be longer than LONGEST_WORD: no word holds white space and letters but for one space."""
    lines = max(map(len, text.split("\n"))) >= LONGEST_WORD  # ten times as fast as the expression
    return (lines and _SOLID.search(text) is not None) or _BLANK.search(text) is not None


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
    with Child("bloomery.data.tokenizer.training", {"spec": spec.model_dump_json()}, environment=os.environ) as child:
        for text in texts:
            child.send({}, text.encode(), seconds=_HOURS)
        child.send({"end": True}, seconds=_HOURS)
        while (told := child.next(0.25)) == "silent":
            progress(*_progress_of(child.tail))
        if isinstance(told, str):
            code, said = child.code, last_words(child.tail)
            raise UserError(
                f"the process that trained the tokenizer died (code {code}){': ' if said else ''}{said}",
                where="tokenizer.train",
                fix="if memory ran out, set tokenizer.train.vocab_size to a smaller number, or name fewer files",
            )  # fmt: skip
    if "refused" in told:
        problem, where, fix = told["refused"]
        raise UserError(problem, where=where, fix=fix)
    made: bytes = told["content"]
    return made.decode()


def _progress_of(lines: list[str]) -> tuple[float, float]:
    """Done and total by the last line of progress that the library wrote."""
    for line in reversed(lines):
        try:
            entry = json.loads(line)
            return float(entry["current"]), float(entry["total"])
        except (ValueError, TypeError, KeyError):
            continue
    return 0.0, 0.0


def main() -> None:
    """A child: texts in, tokenizer.json out; the library's progress is what it prints."""
    job = accept()

    def received() -> Iterator[str]:
        for message in requests(job):
            if "end" in message:
                return
            yield message.get("content", b"").decode()
        os._exit(1)  # the parent is gone

    try:
        made = _trained(received(), TrainTokenizer.model_validate_json(job["spec"]), told=True)
    except UserError as error:
        reply(job, {"refused": [error.problem, error.where, error.fix]})
    else:
        reply(job, {}, made.encode())


if __name__ == "__main__":
    main()
