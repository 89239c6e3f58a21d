"""Train a tokenizer. Words are bounded in length; large datasets use a child process, for signals."""

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

LONGEST_WORD = 1024  # characters: training time grows with the square of the longest word
_SEGMENT = MIB  # characters split at once in a text with a longer word
_BLANK = re.compile(rf"\s{{{LONGEST_WORD},}}")
_SOLID = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD},}}")
_WORD_ENDS = re.compile(r"(?<=[!-~])(?=\n)")
# Bytes of text that are trained on in this process, in a second or two.
_AT_ONCE = {"bpe": MIB // 2, "unigram": MIB // 16}
_HOURS = 1e6  # seconds: no time limit; a child that dies is noticed
Progress = Callable[[float, float], None]


def refuse_few_tokens(spec: TrainTokenizer) -> None:
    """Raises UserError for a vocabulary smaller than all bytes and special tokens."""
    smallest = len({*SPECIAL, *spec.special_tokens}) + 256
    if spec.vocab_size < smallest:
        problem = f"vocab_size {spec.vocab_size} is below {smallest}, the number of bytes and special tokens"
        raise UserError(
            problem, where="tokenizer.train.vocab_size", fix=f"set it to {smallest} or more"
        )


def train_tokenizer(
    texts: Iterator[str], spec: TrainTokenizer, folder: Path, progress: Progress = lambda *_: None
) -> Tokenizer:
    """Train on `texts`, read once, and save the tokenizer to `folder`. Ids 0 to 3 are SPECIAL, followed by the recipe's
    own tokens. `progress` is called a few times per second.
    """
    refuse_few_tokens(spec)
    pieces = chain.from_iterable(bounded(text) for text in texts)
    first_pieces = list[str]()
    size = 0
    while size <= _AT_ONCE[spec.kind] and (piece := next(pieces, None)) is not None:
        first_pieces.append(piece)
        size += len(piece.encode())
    is_small = size <= _AT_ONCE[spec.kind]
    text = (
        _trained(iter(first_pieces), spec)
        if is_small
        else _trained_in_child(chain(first_pieces, pieces), spec, progress)
    )
    config: dict[str, Any] = dict(
        zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL, strict=True)
    )
    config["add_bos_token"] = True
    description = json.loads(text)
    # The recipe's own tokens are part of the text, not special.
    for entry in description["added_tokens"]:
        entry["special"] = entry["content"] in SPECIAL
    tokenizer = Tokenizer(JsonBackend(description, "the trained tokenizer", set(SPECIAL)), config)
    tokenizer.save(folder)
    return tokenizer


def bounded(text: str) -> Iterator[str]:
    """The text itself when no word of it is longer than LONGEST_WORD; else its words in several texts, long ones in
    pieces of that length.
    """
    if not _maybe_long(text):
        yield text
        return
    from tokenizers import pre_tokenizers

    # Words, and the text since the last long one.
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    segment_parts = list[str]()
    start = 0
    while start < len(text):  # a segment ends where a word always ends, if there is such a place
        stop = start + _SEGMENT
        if stop < len(text):
            ends = [match.start() for match in _WORD_ENDS.finditer(text, start + 1, stop)]
            stop = ends[-1] if ends else stop
        segment = text[start:stop]
        unsplit_from = 0
        start = stop
        for _, (word_start, word_end) in (
            splitter.pre_tokenize_str(segment) if _maybe_long(segment) else ()
        ):
            if word_end - word_start > LONGEST_WORD:
                segment_parts.append(segment[unsplit_from:word_start])
                yield "".join(segment_parts)
                yield from (
                    segment[cut : min(cut + LONGEST_WORD, word_end)]
                    for cut in range(word_start, word_end, LONGEST_WORD)
                )
                segment_parts = []
                unsplit_from = word_end
        segment_parts.append(segment[unsplit_from:])
    if segment_parts:
        yield "".join(segment_parts)


def _maybe_long(text: str) -> bool:
    """Whether a word may be longer than LONGEST_WORD. A word is white space, or text after one space."""
    lines = max(map(len, text.split("\n"))) >= LONGEST_WORD  # ten times as fast as the expression
    return (lines and _SOLID.search(text) is not None) or _BLANK.search(text) is not None


def _trained(texts: Iterator[str], spec: TrainTokenizer, *, show_progress: bool = False) -> str:
    """tokenizer.json. `show_progress`: the library writes its progress to stderr, as JSON where it can."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
    from tokenizers import Tokenizer as Library

    # Both kinds work on bytes written as 256 characters: no token is unknown, and no space is lost.
    library = Library(models.BPE() if spec.kind == "bpe" else models.Unigram())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    recipe_tokens = [token for token in dict.fromkeys(spec.special_tokens) if token not in SPECIAL]
    options: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "special_tokens": [
            AddedToken(token, special=True, normalized=False)
            for token in (*SPECIAL, *recipe_tokens)
        ],
        "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
        "show_progress": False,
    }
    if spec.kind == "unigram":
        trainer: Any = trainers.UnigramTrainer(**options, unk_token=SPECIAL[0])
    else:
        trainer = trainers.BpeTrainer(**options)
        if show_progress and hasattr(trainer, "progress_format"):
            trainer = trainers.BpeTrainer(
                **{**options, "show_progress": True, "progress_format": "json"}
            )
    guarded(
        lambda: library.train_from_iterator(texts, trainer),
        "tokenizer training failed",
        "tokenizer.train",
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    text: str = library.to_str()
    return text


def _trained_in_child(texts: Iterator[str], spec: TrainTokenizer, progress: Progress) -> str:
    """As `_trained`, in a child process, as the library blocks signals in its process."""
    with Child(
        "bloomery.data.tokenizer.training", {"spec": spec.model_dump_json()}, environment=os.environ
    ) as child:
        for text in texts:
            child.send({}, text.encode(), seconds=_HOURS)
        child.send({"end": True}, seconds=_HOURS)
        while (message := child.next(0.25)) == "silent":
            progress(*_progress_of(child.tail))
        if isinstance(message, str):
            code = child.code
            reason = last_words(child.tail)
            raise UserError(
                f"the process that trained the tokenizer died (code {code}){': ' if reason else ''}{reason}",
                where="tokenizer.train",
                fix="if it was out of memory, set tokenizer.train.vocab_size to a smaller number, or use fewer files",
            )
        progress(*_progress_of(child.tail))  # a quick one has printed nothing yet
    if "refused" in message:
        problem, where, fix = message["refused"]
        raise UserError(problem, where=where, fix=fix)
    content: bytes = message["content"]
    return content.decode()


def _progress_of(lines: list[str]) -> tuple[float, float]:
    """Done and total of the last progress line of the library."""
    for line in reversed(lines):
        try:
            entry = json.loads(line)
            return float(entry["current"]), float(entry["total"])
        except (ValueError, TypeError, KeyError):
            continue
    return 0.0, 0.0


def main() -> None:
    """The child process: reads texts, writes tokenizer.json; prints the library's progress."""
    job = accept()

    def received() -> Iterator[str]:
        for message in requests(job):
            if "end" in message:
                return
            yield message.get("content", b"").decode()
        os._exit(1)  # the parent is gone

    try:
        tokenizer_json = _trained(
            received(), TrainTokenizer.model_validate_json(job["spec"]), show_progress=True
        )
    except UserError as error:
        reply(job, {"refused": [error.problem, error.where, error.fix]})
    else:
        reply(job, {}, tokenizer_json.encode())


if __name__ == "__main__":
    main()
