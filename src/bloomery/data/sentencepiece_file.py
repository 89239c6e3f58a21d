"""SentencePiece .model files, through SentencePiece itself: its ids and no others."""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, final

from bloomery.data import sentencepiece_json
from bloomery.data.tokenizer_file import MAX_FILE
from bloomery.disk import read_input
from bloomery.errors import UserError

MODEL_FILE = "tokenizer.model"
MADE_BY = "made_from"  # tokenizer_config.json: where it says MODEL_FILE, tokenizer.json is a translation of that


@final
class SentencePiece:
    """Backend of a .model file."""

    def __init__(self, path: Path) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise UserError(
                "a SentencePiece .model needs its library",
                where=str(path),
                remedy="pip install 'bloomery[sentencepiece]'",
            ) from error
        self.description: dict[str, Any] = {}
        self.growth = 1.0
        self._content = read_input(path, MAX_FILE)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self._content)
            size = int(self._processor.get_piece_size())
        except (RuntimeError, ValueError) as error:
            raise UserError(
                "is no SentencePiece model, or a damaged one", where=str(path), remedy="copy or download it again"
            ) from error
        self._ids = {self._processor.id_to_piece(index): index for index in range(size)}
        if len(self._ids) != size:
            raise UserError("holds a piece twice", where=str(path), remedy="copy or download it again")

    def encode_batch(self, texts: list[str], *, special: bool) -> list[list[int]]:
        """`special` changes nothing: SentencePiece never reads control tokens out of a text."""
        del special
        ids: list[list[int]] = self._processor.encode(texts)
        return ids

    def encode_places(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Through the tokenizer.json that the model translates to: SentencePiece reads no control tokens. Raises
        UserError where it does not translate.
        """
        if self._translated is None:
            raise UserError("this SentencePiece model has no tokenizer.json that cuts text alike, which chats need",
                            where=MODEL_FILE, remedy="save a tokenizer.json beside it with transformers")  # fmt: skip
        encodings = self._translated.encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    @cached_property
    def _translated(self) -> Any:
        """Judged by probes that spell no piece: here <s> is a token, and not letters as in other texts."""
        from tokenizers import Tokenizer as Library

        described = sentencepiece_json.describe(self._content)
        if described is None:
            return None
        library = Library.from_str(json.dumps(described))
        probes = [text.replace("<s> <0x0A>", "") for text in sentencepiece_json.PROBES]
        cut = [library.encode(text, add_special_tokens=False).ids for text in probes]
        return library if cut == self.encode_batch(probes, special=False) else None

    def begins_with(self, token: int) -> bool:
        """Llama's tokenizers put the begin token before every text; where not, tokenizer_config.json says so."""
        return bool(token == self._processor.bos_id())

    def special(self) -> list[str]:
        return [piece for piece, index in self._ids.items() if self._processor.is_control(index)]

    def merge(self, word: str) -> list[int]:
        """Ids of one word; SentencePiece has no words of its own."""
        return self.encode_batch([word], special=False)[0]

    def decode(self, ids: list[int]) -> str:
        text: str = self._processor.decode(ids)
        return text

    def token_bytes(self) -> list[int]:
        processor, sizes = self._processor, []
        for piece, index in self._ids.items():
            silent = processor.is_control(index) or processor.is_unknown(index) or processor.is_unused(index)
            sizes.append(0 if silent else 1 if processor.is_byte(index) else len(piece.replace("▁", " ").encode()))
        return sizes

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)

    def roles(self) -> dict[str, str]:
        """The tokens that the model itself names."""
        ids = {"bos_token": self._processor.bos_id(), "eos_token": self._processor.eos_id(),
               "pad_token": self._processor.pad_id(), "unk_token": self._processor.unk_id()}  # fmt: skip
        return {role: self._processor.id_to_piece(index) for role, index in ids.items() if index >= 0}

    def fingerprint(self) -> str:
        return hashlib.sha256(self._content).hexdigest()

    def files(self) -> dict[str, bytes]:
        """The model, and a tokenizer.json for programs without SentencePiece where that cuts the probes alike."""
        described = self._description()
        written = {"tokenizer.json": (json.dumps(described, ensure_ascii=False) + "\n").encode()} if described else {}
        return {**written, MODEL_FILE: self._content}

    def _description(self) -> dict[str, Any] | None:
        from tokenizers import Tokenizer as Library

        described = sentencepiece_json.describe(self._content)
        if described is None:
            return None
        library = Library.from_str(json.dumps(described))
        library.encode_special_tokens = True
        cut = [library.encode(text, add_special_tokens=False).ids for text in sentencepiece_json.PROBES]
        return described if cut == self.encode_batch(list(sentencepiece_json.PROBES), special=False) else None
