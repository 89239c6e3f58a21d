"""SentencePiece models, and their conversion to a tokenizer.json for programs without SentencePiece."""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

from bloomery.core.errors import UserError
from bloomery.core.extras import install_extra
from bloomery.core.files import read_input
from bloomery.data.tokenizer.roles import MAX_FILE, added_around
from bloomery.data.tokenizer.spelling import bytes_of_piece

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
_SPACE = "▁"


def describe(model: bytes) -> Json | None:
    """The tokenizer.json of a unigram or BPE model; None for other types, and when spaces end words."""
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2  # protobuf defines its names at import
    proto = messages.ModelProto.FromString(model)
    trainer = proto.trainer_spec
    normalizer = proto.normalizer_spec
    pieces = [(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    builders = {trainer.UNIGRAM: _unigram, trainer.BPE: bpe_of_pieces}
    if (
        trainer.model_type not in builders
        or trainer.treat_whitespace_as_suffix
        or not normalizer.escape_whitespaces
    ):
        return None
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": index, "content": text, "special": kind != USER_DEFINED, **plain}
        for index, (text, _, kind) in enumerate(pieces)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    steps: list[Json] = []
    if normalizer.precompiled_charsmap:
        charsmap = base64.b64encode(normalizer.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if normalizer.remove_extra_whitespaces:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if normalizer.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    decoders: list[Json] = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += (
        [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
        if normalizer.add_dummy_prefix
        else []
    )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": builders[trainer.model_type](pieces, trainer.byte_fallback),
    }


def _unigram(pieces: list[tuple[str, float, int]], byte_fallback: bool) -> Json:
    """SentencePiece never matches control, byte and unused pieces. The library would, so their score is low."""
    costly = min((score for _, score, kind in pieces if kind == NORMAL), default=0.0) - 100
    vocab = [
        [text, score if kind in (NORMAL, USER_DEFINED) else costly] for text, score, kind in pieces
    ]
    unknown = next(index for index, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN)
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": byte_fallback}


def bpe_of_pieces(pieces: list[tuple[str, float, int]], byte_fallback: bool) -> Json:
    """Merges from scores: all splits of a piece into two pieces, in the order of their scores."""
    ids = {text: index for index, (text, _, kind) in enumerate(pieces)}
    usable_pieces = {text for text, _, kind in pieces if kind in (NORMAL, USER_DEFINED)}
    ranked = sorted(
        ((score, text) for text, score, kind in pieces if kind == NORMAL),
        key=lambda entry: -entry[0],
    )
    merges = []
    for _, text in ranked:
        cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        merges += sorted(
            (cut for cut in cuts if usable_pieces.issuperset(cut)),
            key=lambda cut: (ids[cut[0]], ids[cut[1]]),
        )
    unknown = next(text for text, _, kind in pieces if kind == UNKNOWN)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": ids,
        "merges": [list(merge) for merge in merges],
    }


MODEL_FILE = "tokenizer.model"
# A key of tokenizer_config.json. With MODEL_FILE as its value, tokenizer.json is converted from
# that.
MADE_BY = "made_from"


@final
class SentencePiece:
    """Backend of a .model file."""

    def __init__(self, path: Path) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            problem = "the sentencepiece package is not installed"
            fix = install_extra("sentencepiece")
            raise UserError(problem, where=str(path), fix=fix) from error
        self.description: dict[str, Any] = {}
        self.growth = 1.0
        self._content = read_input(path, MAX_FILE)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self._content)
            size = int(self._processor.get_piece_size())
        except (RuntimeError, ValueError) as error:
            problem = "not a SentencePiece model, or damaged"
            raise UserError(problem, where=str(path), fix="copy or download it again") from error
        self._ids = {self._processor.id_to_piece(index): index for index in range(size)}
        if len(self._ids) != size:
            raise UserError(
                "the vocabulary has a duplicate piece",
                where=str(path),
                fix="copy or download it again",
            )

    def encode_batch(self, texts: list[str], *, special: bool) -> list[list[int]]:
        """`special` has no effect: SentencePiece never matches control tokens in a text."""
        del special
        ids: list[list[int]] = self._processor.encode(texts)
        return ids

    def encode_places(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """With the converted tokenizer.json, as SentencePiece matches no control tokens. Raises UserError when it
        cannot be converted.
        """
        if self._translated is None:
            problem = (
                "this SentencePiece model has no equal tokenizer.json, which chat templates need"
            )
            raise UserError(
                problem, where=MODEL_FILE, fix="save a tokenizer.json next to it with transformers"
            )
        encodings = self._translated.encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def encode_rendered(self, text: str) -> list[int]:
        """Raises UserError as `encode_places` does."""
        return self.encode_places([text])[0][0]

    @cached_property
    def _translated(self) -> Any:
        """Checked with probes without markup: here <s> is a token, in other texts characters."""
        return self._library(special=False)

    def _library(self, *, special: bool) -> Any:
        """The model in the tokenizers library, if it gives the same ids for the probes; else None."""
        from tokenizers import Tokenizer as Library

        described = describe(self._content)
        if described is None:
            return None
        library = Library.from_str(json.dumps(described))
        library.encode_special_tokens = special
        probes = list(PROBES) if special else [text.replace("<s> <0x0A>", "") for text in PROBES]
        cut = [library.encode(text, add_special_tokens=False).ids for text in probes]
        return library if cut == self.encode_batch(probes, special=False) else None

    def special(self) -> list[str]:
        return [piece for piece, index in self._ids.items() if self._processor.is_control(index)]

    def decode(self, ids: list[int]) -> str:
        text: str = self._processor.decode(ids)
        return text

    def spelled(self, index: int) -> bytes:
        piece: str = self._processor.id_to_piece(index)
        return bytes_of_piece(piece)

    def token_bytes(self) -> list[int]:
        processor = self._processor
        sizes = []
        for piece, index in self._ids.items():
            silent = (
                processor.is_control(index)
                or processor.is_unknown(index)
                or processor.is_unused(index)
            )
            sizes.append(
                0
                if silent
                else 1
                if processor.is_byte(index)
                else len(piece.replace("▁", " ").encode())
            )
        return sizes

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)

    def roles(self) -> dict[str, str]:
        """The special tokens of the model."""
        ids = {
            "bos_token": self._processor.bos_id(),
            "eos_token": self._processor.eos_id(),
            "pad_token": self._processor.pad_id(),
            "unk_token": self._processor.unk_id(),
        }
        return {
            role: self._processor.id_to_piece(index) for role, index in ids.items() if index >= 0
        }

    def fingerprint(self) -> str:
        return hashlib.sha256(self._content).hexdigest()

    def files(self, prefix: Sequence[int] = (), suffix: Sequence[int] = ()) -> dict[str, bytes]:
        """The model, and a tokenizer.json for other programs if it gives the same ids for the probes.

        `prefix`, `suffix`: ids that the tokenizer.json adds to a text.
        """
        described = describe(self._content) if self._library(special=True) is not None else None
        if described is None:
            return {MODEL_FILE: self._content}
        if prefix or suffix:
            named = self._processor.id_to_piece
            described["post_processor"] = added_around(
                {named(index): index for index in prefix}, {named(index): index for index in suffix}
            )
        content = (json.dumps(described, ensure_ascii=False) + "\n").encode()
        return {"tokenizer.json": content, MODEL_FILE: self._content}
