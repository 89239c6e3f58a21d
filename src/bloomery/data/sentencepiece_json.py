"""A SentencePiece model described as a tokenizer.json, so that programs without SentencePiece cut text as it does.

The file is a protocol buffer (sentencepiece_model.proto of google/sentencepiece): ModelProto holds pieces (1), the
trainer's settings (2) and the normaliser's (3). Only the fields named below are read.
"""

import base64
import struct
from collections.abc import Iterator
from typing import Any

PROBES = (
    "",
    " ",
    "def f(x):\n    return x  # größer\n",
    "  two  spaces and\ttabs ",
    "世界 🎈 <s> <0x0A> ▁x",
    "ﬁ ½ ① é",
)
Json = dict[str, Any]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # ModelProto.SentencePiece.Type
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
_SPACE = "▁"
Field = tuple[int, int | bytes]  # number, value


def fields(message: bytes) -> Iterator[Field]:
    """The fields of one message; ValueError when it is none. Fixed-width values come as their bytes."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        size, place = _varint(message, place) if kind == 2 else ({1: 8, 5: 4}.get(kind, -1), place)
        if size < 0 or place + size > len(message):
            raise ValueError("no protocol buffer")
        yield key >> 3, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(message):
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
    raise ValueError("no protocol buffer")


def _message(value: int | bytes) -> dict[int, int | bytes]:
    return dict(fields(value)) if isinstance(value, bytes) else {}


def describe(model: bytes) -> Json | None:
    """The tokenizer.json of a unigram or BPE model; None for another kind, and for spaces that end words."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in fields(model):
        if number == 1:
            pieces.append(_piece(_message(value)))
        elif number == 2:
            trainer = _message(value)
        elif number == 3:
            normalizer = _message(value)
    kind = trainer.get(3, UNIGRAM)
    if kind not in (UNIGRAM, BPE) or trainer.get(24) or not normalizer.get(5, 1):
        return None
    byte_fallback = bool(trainer.get(35))
    dummy_prefix = bool(normalizer.get(3, 1))
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(pieces),
        "normalizer": _normalizer(normalizer, dummy_prefix), "pre_tokenizer": None, "post_processor": None,
        "decoder": _decoder(dummy_prefix),
        "model": _unigram(pieces, byte_fallback) if kind == UNIGRAM else _bpe(pieces, byte_fallback),
    }  # fmt: skip


def _piece(message: dict[int, int | bytes]) -> tuple[str, float, int]:
    text, score, kind = message.get(1, b""), message.get(2, bytes(4)), message.get(3, NORMAL)
    assert isinstance(text, bytes) and isinstance(score, bytes) and isinstance(kind, int)
    return text.decode(), struct.unpack("<f", score)[0], kind


def _added(pieces: list[tuple[str, float, int]]) -> list[Json]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": text, "special": kind != USER_DEFINED, **plain}
        for index, (text, _, kind) in enumerate(pieces)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _normalizer(settings: dict[int, int | bytes], dummy_prefix: bool) -> Json:
    steps: list[Json] = []
    charsmap = settings.get(2, b"")
    if isinstance(charsmap, bytes) and charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if settings.get(4, 1):
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if dummy_prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _decoder(dummy_prefix: bool) -> Json:
    steps: list[Json] = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    steps += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if dummy_prefix else []
    return {"type": "Sequence", "decoders": steps}


def _unigram(pieces: list[tuple[str, float, int]], byte_fallback: bool) -> Json:
    """SentencePiece never matches control, byte and unused pieces in a text; the library would, so they are dear."""
    costly = min((score for _, score, kind in pieces if kind == NORMAL), default=0.0) - 100
    vocab = [[text, score if kind in (NORMAL, USER_DEFINED) else costly] for text, score, kind in pieces]
    unknown = next(index for index, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN)
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": byte_fallback}


def _bpe(pieces: list[tuple[str, float, int]], byte_fallback: bool) -> Json:
    """Merges from scores: a piece may come from any two pieces that it can be cut into, the better piece first."""
    ids = {text: index for index, (text, _, kind) in enumerate(pieces)}
    whole = {text for text, _, kind in pieces if kind in (NORMAL, USER_DEFINED)}
    ranked = sorted(((score, text) for text, score, kind in pieces if kind == NORMAL), key=lambda entry: -entry[0])
    merges = []
    for _, text in ranked:
        cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        merges += sorted((cut for cut in cuts if whole.issuperset(cut)), key=lambda cut: (ids[cut[0]], ids[cut[1]]))
    unknown = next(text for text, _, kind in pieces if kind == UNKNOWN)
    return {
        "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": byte_fallback, "ignore_merges": False,
        "vocab": ids, "merges": [list(merge) for merge in merges],
    }  # fmt: skip
