"""Tokenizers: text to token ids and back, for tokenizer.json and SentencePiece files."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import numpy as np

from bloomery.core.errors import UserError
from bloomery.core.files import write_durably
from bloomery.data.tokenizer import fast_bpe as words
from bloomery.data.tokenizer.markup import Markup, ids_of
from bloomery.data.tokenizer.roles import ANOTHER, ROLES, configuration, read_json, roles
from bloomery.data.tokenizer.sentencepiece import MADE_BY, MODEL_FILE, SentencePiece
from bloomery.data.tokenizer.spelling import bytes_of_letters, bytes_of_piece
from bloomery.data.tokenizer.vocabulary_files import MERGES, VOCABULARY, described
from bloomery.hub import cached_model, fetch_tokenizer
from bloomery.recipe.schema import Recipe, TrainTokenizer

MOST_GROWTH = 64.0  # Llama, Gemma, T5 and other published tokenizers: 2 or less
_MOST_PREPENDED = 16.0  # letters
Json = dict[str, Any]
# An entry of added_tokens that matches its exact text anywhere.
EXACT: Json = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


def canonical(description: Json) -> str:
    """The JSON of a tokenizer with sorted keys, without padding and truncation, which are settings of its use."""
    without_settings = {**description, "padding": None, "truncation": None}
    return json.dumps(without_settings, ensure_ascii=False, sort_keys=True)


def check_ids(description: Json, where: str) -> None:
    """Raises UserError unless ids and tokens are one to one, and ids dense enough for an embedding."""
    model = description.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise UserError("not a valid tokenizer: model.vocab is missing", where=where, fix=ANOTHER)
    vocab = model["vocab"]
    if not vocab:
        raise UserError("not a valid tokenizer: its vocabulary is empty", where=where, fix=ANOTHER)
    # BPE and WordPiece map tokens to ids; Unigram lists (token, score), and the place is the id.
    try:
        ids: dict[str, Any] = {}
        if isinstance(vocab, dict):
            ids.update(vocab)
        else:
            ids.update((entry[0], index) for index, entry in enumerate(vocab))
        added = {entry["content"]: entry["id"] for entry in description.get("added_tokens") or []}
    except (TypeError, KeyError, IndexError) as error:
        problem = "not a valid tokenizer: the vocabulary is malformed"
        raise UserError(problem, where=where, fix=ANOTHER) from error
    if isinstance(vocab, list) and len(ids) != len(vocab):
        raise UserError("the vocabulary holds a token twice", where=where, fix=ANOTHER)
    # An added token may repeat one of the vocabulary, but only under the same id.
    for token, index in added.items():
        if ids.setdefault(token, index) != index:
            problem = f"token {token!r} has two ids, {ids[token]} and {index}"
            raise UserError(problem, where=where, fix=ANOTHER)
    # The embedding has a row for every id up to the largest: a huge id would allocate memory for
    # rows that no token uses.
    owners: dict[int, str] = {}
    for token, index in ids.items():
        if type(index) is not int or not 0 <= index <= 2 * len(ids) + 1024:
            problem = f"token {token!r} has the invalid id {index!r} among {len(ids):,} tokens"
            raise UserError(problem, where=where, fix=ANOTHER)
        if owners.setdefault(index, token) is not token:
            problem = f"id {index} belongs to two tokens, {owners[index]!r} and {token!r}"
            raise UserError(problem, where=where, fix=ANOTHER)


def check_growth(description: Json, where: str) -> float:
    """The most characters of normalized text per character of text. Raises UserError when the normalizer or the decoder
    makes texts longer than memory.
    """
    grown = {part: _growth(description.get(part)) for part in ("normalizer", "decoder")}
    for part, factor in grown.items():
        if factor > MOST_GROWTH:
            times = f"{factor:,.0f}" if factor < 1e15 else "more than 10^15"
            raise UserError(
                f"the {part} makes a text up to {times} times as long", where=where, fix=ANOTHER
            )
    return grown["normalizer"]


def _growth(step: object) -> float:
    """The factor of Replace and Prepend, which write text of the file; other steps normalize Unicode."""
    if not isinstance(step, dict):
        return 1.0
    factor = 1.0
    if step.get("type") == "Replace":
        factor = _replacement_growth(step.get("pattern"), step.get("content"))
    elif step.get("type") == "Prepend":
        factor = max(1.0, len(str(step.get("prepend"))) / _MOST_PREPENDED)
    # The steps of a sequence follow each other, so that their factors multiply.
    nested = (step.get(key) for key in ("normalizers", "decoders"))
    inner_steps = [inner for steps in nested if isinstance(steps, list) for inner in steps]
    return factor * math.prod(map(_growth, inner_steps))


def _replacement_growth(pattern: object, content: object) -> float:
    """The factor of Replace: of a text that consists of matches alone."""
    content_length = len(content) if isinstance(content, str) else 0
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    if literal and isinstance(literal, str):
        return max(1.0, content_length / len(literal))
    # A match of an expression may have a single character or, between two characters, none.
    return max(1.0, content_length + _matches_nothing(pattern))


def _matches_nothing(pattern: object) -> float:
    """1 when an expression may match between two characters, where its text is added without replacing any."""
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    if not isinstance(expression, str) or re.search(r"\(\?|\\[bBAzZG]|[\^$|]", expression):
        return 1.0
    try:
        return float(re.fullmatch(expression, "") is not None)
    except (re.error, RecursionError, OverflowError):
        return 1.0


SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")  # ids 0 to 3, in this order
CONFIG = "tokenizer_config.json"
# Vocabularies of other kinds, which transformers can convert: WordPiece, tiktoken, Mistral's tekken.
_OTHER_FILES = ("vocab.txt", "tekken.json", "tiktoken.model", "qwen.tiktoken", MERGES)
TOKENIZER_FILES = ("tokenizer.json", MODEL_FILE, VOCABULARY)
_MARKUP = re.compile(r"<\|[\w ]{1,40}\|>|<(?:start|end)_of_turn>")
_Result = TypeVar("_Result")


class Affixes(NamedTuple):
    """Ids that a tokenizer adds before and after a text."""

    prefix: list[int]
    suffix: list[int]


Placed = tuple[list[int], list[tuple[int, int]]]  # ids, and the characters of the text of each


def guarded(call: Callable[[], _Result], problem: str, where: str) -> _Result:
    """Call the tokenizers library, which raises Exception, and PanicException, a direct subclass of BaseException."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, UserError):
        raise
    except BaseException as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise UserError(
            f"{problem}: {reason}", where=where, fix="use another tokenizer file"
        ) from error


def refuse_unknown_ids(ids: Iterable[int], vocab_size: int) -> None:
    """Raises UserError for an id outside a model's `vocab_size`."""
    largest = max(ids, default=-1)
    if largest >= vocab_size:
        raise UserError(
            f"token id {largest:,} is outside the model's vocabulary of {vocab_size:,}",
            where="tokenizer.json",
            fix="use the tokenizer that the model was trained with",
        )


@final
class JsonBackend:
    """A tokenizer.json in the tokenizers library. `description`: its content; `growth`: the most characters of
    normalized text per character of text. SentencePiece has the same methods for a .model file, without `merge`.
    """

    def __init__(self, description: Json, where: str, control: set[str]) -> None:
        check_ids(description, where)
        self.description = description
        self._where = where
        self.growth = check_growth(description, where)
        self._text = canonical(description)
        # BOS, EOS, padding and unknown are never matched in a text; every other added token is,
        # special or not.
        added = description.get("added_tokens") or []
        demoted = [{**entry, "special": entry["content"] in control} for entry in added]
        plain_description = {**description, "added_tokens": demoted}
        is_plain = plain_description == description
        self._plain = self._loaded(self._text if is_plain else canonical(plain_description))
        self._plain.encode_special_tokens = True

    def _loaded(self, text: str) -> Any:
        from tokenizers import Tokenizer as Library

        return self._guarded(lambda: Library.from_str(text), "is not a valid tokenizer")

    def _guarded(
        self, call: Callable[[], _Result], problem: str = "the tokenizer failed on a text"
    ) -> _Result:
        return guarded(call, problem, self._where)

    @cached_property
    def _library(self) -> Any:
        """The tokenizer as in the file; `_plain` matches fewer tokens in a text."""
        return self._loaded(self._text)

    @cached_property
    def _placing(self) -> Any:
        """As `_library`, with the leading space of a token as part of the token."""
        return self._loaded(self._text.replace('"trim_offsets": true', '"trim_offsets": false'))

    def encode_places(self, texts: list[str]) -> list[Placed]:
        encodings = self._guarded(
            lambda: self._placing.encode_batch(texts, add_special_tokens=False)
        )
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def encode_rendered(self, text: str) -> list[int]:
        call = getattr(self._library, "encode_batch_fast", self._library.encode_batch)
        ids: list[int] = self._guarded(lambda: call([text], add_special_tokens=False))[0].ids
        return ids

    @cached_property
    def affixes(self) -> Affixes:
        """The ids that the file's own rule adds before and after every text."""
        for text in ("a", "0", " ", "\u00e9"):  # a small vocabulary may lack some of them
            encoding = self._guarded(partial(self._library.encode, text, add_special_tokens=True))
            is_text = [sequence is not None for sequence in encoding.sequence_ids]
            if any(is_text):
                end = len(is_text) - is_text[::-1].index(True)
                return Affixes(encoding.ids[: is_text.index(True)], encoding.ids[end:])
        return Affixes([], [])

    def encode_batch(self, texts: list[str], *, special: bool) -> list[list[int]]:
        library = self._library if special else self._plain
        call = getattr(library, "encode_batch_fast", library.encode_batch)
        encodings = self._guarded(lambda: call(texts, add_special_tokens=False))
        return [encoding.ids for encoding in encodings]

    def merge(self, word: str) -> list[int]:
        """Ids of one word, without normalizing or splitting it."""
        return [token.id for token in self._plain.model.tokenize(word)]

    def decode(self, ids: list[int]) -> str:
        call = partial(self._plain.decode, ids, skip_special_tokens=False)
        text: str = self._guarded(call, "the tokenizer cannot decode")
        return text

    @cached_property
    def _byte_level(self) -> bool:
        steps = [self.description.get(key) for key in ("pre_tokenizer", "decoder")]
        return '"ByteLevel"' in json.dumps(steps)

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(entry["id"] for entry in self.description.get("added_tokens") or [])

    def token_bytes(self) -> list[int]:
        vocab: dict[str, int] = self._plain.get_vocab(with_added_tokens=True)
        added = {entry["id"]: entry for entry in self.description.get("added_tokens") or []}
        sizes = [0] * (max(vocab.values()) + 1)
        for token, index in vocab.items():
            entry = added.get(index)
            if entry is not None:
                # A special token stands for no text.
                sizes[index] = 0 if entry.get("special") else len(self._spelled_added(token))
            elif self._byte_level:
                # Each byte is one character of GPT-2's alphabet.
                sizes[index] = len(token)
            elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                sizes[index] = 1
            else:
                sizes[index] = len(token.replace("▁", " ").encode())
        return sizes

    def spelled(self, index: int) -> bytes:
        token: str | None = self._plain.id_to_token(index)
        if token is None:  # a row of the embedding without a token
            return b""
        if index in self._added_ids:
            return self._spelled_added(token)
        return bytes_of_letters(token) if self._byte_level else bytes_of_piece(token)

    def _spelled_added(self, token: str) -> bytes:
        """An added token is written as it is, but for the spaces of SentencePiece: Gemma adds runs of them."""
        return (token if self._byte_level else token.replace("▁", " ")).encode()

    def id_of(self, token: str) -> int | None:
        index: int | None = self._plain.token_to_id(token)
        return index

    def special(self) -> list[str]:
        """Special tokens, and those with their markup: a recipe's own tokens are part of texts, but may end a turn."""
        added = self.description.get("added_tokens") or []
        return [
            entry["content"]
            for entry in added
            if entry.get("special") or _MARKUP.fullmatch(entry["content"])
        ]

    def fingerprint(self) -> str:
        return hashlib.sha256(self._text.encode("utf-8", "surrogatepass")).hexdigest()

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": (self._text + "\n").encode("utf-8", "surrogatepass")}


@final
class Tokenizer:
    """Encodes text without adding ids, and decodes ids without dropping any."""

    def __init__(self, backend: JsonBackend | SentencePiece, config: Json) -> None:
        self._backend = backend
        self._config = config
        names = roles(backend.description, config)
        ids = {role: backend.id_of(name) if name else None for role, name in names.items()}
        self.bos_id = ids["bos_token"]
        self.eos_id = ids["eos_token"]
        self.pad_id = ids["pad_token"]
        self.unk_id = ids["unk_token"]
        present_roles = {role: name for role, name in names.items() if ids[role] is not None}
        self.config: Json = {**config, **present_roles}
        self._token_bytes = np.array(backend.token_bytes(), dtype=np.int32)
        self.hash = backend.fingerprint()

    @property
    def json(self) -> str | None:
        """Its tokenizer.json; SentencePiece has none."""
        return self._files().get("tokenizer.json", b"").decode() or None

    @property
    def normalizes(self) -> bool:
        """Whether texts change before they are split; SentencePiece has its own rules."""
        description = self._backend.description
        return not description or description.get("normalizer") is not None

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self._token_bytes)

    @property
    def dtype(self) -> str:
        """The dtype of an id in shards."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text. "<s>" or "</s>" in a text are characters, and control tokens only with `special`; other added
        tokens always match.
        """
        return self.encode_batch([text], special=special)[0]

    def encode_batch(self, texts: list[str], *, special: bool = False) -> list[list[int]]:
        if all(map(self._short, texts)):
            return self._backend.encode_batch(texts, special=special)
        # The library's memory grows with the text: a long one is encoded in pieces that end where
        # words do.
        ids_of_texts = []
        for text in texts:
            pieces = words.pieces(text, self._ends)
            ids = chain.from_iterable(self._piece(piece, special=special) for piece in pieces)
            ids_of_texts.append(list(ids))
        return ids_of_texts

    def _piece(self, text: str, *, special: bool = False) -> list[int]:
        words.refuse_long(self._size(text))
        return self._backend.encode_batch([text], special=special)[0]

    def _short(self, text: str) -> bool:
        return len(text) * self._backend.growth <= words.PIECE

    def _size(self, text: str) -> int:
        """The most bytes of the normalized text."""
        return round(len(text.encode()) * self._backend.growth)

    @cached_property
    def _ends(self) -> re.Pattern[str] | None:
        return words.word_ends(self._backend.description)

    def too_long(self, text: str, *, special: bool = False) -> UserError | None:
        """The error when `encode_array`, or `encode` with `special`, needs too much memory for a text; else None."""
        # A character has at most four bytes.
        if len(text) * self._backend.growth <= words.LONGEST_PIECE // 4:
            return None
        # The fast encoder takes ASCII word by word, so that only its longest word needs memory.
        try:
            fast = None if special else self._fast
            for piece in words.pieces(text, self._ends):
                size = self._size(piece)
                if fast and size > words.LONGEST_PIECE and piece.isascii():
                    size = fast.longest(piece)
                words.refuse_long(size)
        except UserError as error:
            return error
        return None

    def encode_places(self, texts: list[str]) -> list[Placed]:
        """Ids of texts, with control tokens, and the characters of each id."""
        for text in texts:
            words.refuse_long(self._size(text), words.LONGEST_PLACED)
        return self._backend.encode_places(texts)

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of `encode_places` alone, which take less time and memory."""
        words.refuse_long(self._size(text), words.LONGEST_PLACED)
        return self._backend.encode_rendered(text)

    @cached_property
    def markup(self) -> Markup:
        """The control tokens that a chat template writes, and how messages that spell them out stay text."""
        role_tokens = [self.config.get(role) for role in ROLES]
        names = [*self._backend.special(), *(name for name in role_tokens if isinstance(name, str))]
        return Markup(
            ids_of(dict.fromkeys(names), self.id_of),
            lambda: self.description,
            self._rendered_encoder,
        )

    def _rendered_encoder(self, description: Json) -> Callable[[str], list[int]]:
        from tokenizers import Tokenizer as Library

        library = guarded(
            lambda: Library.from_str(canonical(description)),
            "cannot rename tokens",
            "the tokenizer",
        )
        call = getattr(library, "encode_batch_fast", library.encode_batch)

        def encode(text: str) -> list[int]:
            words.refuse_long(self._size(text), words.LONGEST_PLACED)
            ids: list[int] = call([text], add_special_tokens=False)[0].ids
            return ids

        return encode

    def encode_prompt(self, text: str) -> list[int]:
        """A text to be continued, as the tokenizer of transformers encodes it, but without what that adds at its end.

        Control tokens that the text spells out count. The prefix is added unless the text begins with it.
        """
        ids = self.encode(text, special=True)
        return ids if ids[: len(self.prefix)] == self.prefix else [*self.prefix, *ids]

    def encode_whole(self, text: str) -> list[int]:
        """A text that nothing follows: `encode_prompt`, and what the tokenizer adds at the end."""
        ids = self.encode_prompt(text)
        ends = not self.suffix or ids[-len(self.suffix) :] == self.suffix
        return ids if ends else [*ids, *self.suffix]

    @property
    def prefix(self) -> list[int]:
        """The ids that transformers adds before a plain text: the BOS token or none, of some tokenizers two."""
        return self._affixes.prefix

    @property
    def suffix(self) -> list[int]:
        """The ids that transformers adds after a plain text: none for nearly all models that generate."""
        return self._affixes.suffix

    @cached_property
    def _affixes(self) -> Affixes:
        """Of the post-processor of tokenizer.json: with that file, transformers ignores `add_bos_token`, which decides
        for a .model alone.
        """
        if isinstance(self._backend, JsonBackend):
            return self._backend.affixes
        added_ids = {
            key: [token] if token is not None and self._config.get(key) is True else []
            for key, token in (("add_bos_token", self.bos_id), ("add_eos_token", self.eos_id))
        }
        return Affixes(added_ids["add_bos_token"], added_ids["add_eos_token"])

    def id_of(self, token: str) -> int | None:
        return self._backend.id_of(token)

    @cached_property
    def description(self) -> Json:
        """The tokenizer.json, for a SentencePiece model its conversion. Raises UserError where there is none."""
        if self._backend.description:
            return self._backend.description
        files = self._files()
        if "tokenizer.json" not in files:
            problem = "this SentencePiece model has no equal tokenizer.json"
            raise UserError(
                problem, where=MODEL_FILE, fix="save a tokenizer.json next to it with transformers"
            )
        described: Json = json.loads(files["tokenizer.json"])
        return described

    def _files(self) -> dict[str, bytes]:
        """The files of the backend; a converted tokenizer.json adds the ids to a text that this tokenizer adds."""
        if isinstance(self._backend, SentencePiece):
            return self._backend.files(self._affixes.prefix, self._affixes.suffix)
        return self._backend.files()

    def control_tokens(self) -> list[str]:
        """Special tokens by name: what may end a turn. The begin token is one of them only where it ends texts too."""
        begin_id = self.bos_id if self.bos_id != self.eos_id else None
        return [name for name in self._backend.special() if self._backend.id_of(name) != begin_id]

    def encode_array(self, text: str) -> words.Ids:
        """The ids of `encode` as `dtype`, several times as fast where byte-level BPE allows it."""
        if self._short(text):
            return self._array(text)
        return np.concatenate([self._array(piece) for piece in words.pieces(text, self._ends)])

    def _array(self, text: str) -> words.Ids:
        if self._fast is not None:
            return self._fast.encode(text)
        return np.array(self._piece(text), dtype=self.dtype)

    @cached_property
    def _fast(self) -> words.WordEncoder | None:
        description = self._backend.description
        pattern = words.word_pattern(description)
        if pattern is None or not words.plain_added(description):
            return None
        if isinstance(self._backend, SentencePiece):
            return None
        # As `encode` does: BOS, EOS, padding and unknown are characters, other added tokens match.
        control = set(roles(description, self._config).values())
        entries = description.get("added_tokens") or []
        added = [entry["content"] for entry in entries if entry["content"] not in control]
        try:
            return words.WordEncoder(pattern, added, self.encode, self._backend.merge, self.dtype)
        except ValueError:  # the pattern has no ASCII form
            return None

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids)

    def spelled(self, token: int) -> bytes:
        """The bytes of text that a token stands for, which may be a part of a character; its name for a special one."""
        return self._backend.spelled(token)

    def token_bytes(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """int32 [vocab_size]: the bytes of text of each id; 0 for special tokens."""
        return self._token_bytes

    def with_tokens(self, tokens: Iterable[str]) -> "Tokenizer":
        """This tokenizer with the missing special tokens added, whose ids follow. Raises UserError."""
        distinct_tokens = dict.fromkeys(tokens)
        missing_tokens = [token for token in distinct_tokens if self.id_of(token) is None]
        if not missing_tokens:
            return self
        if not self._backend.description:
            raise UserError(
                "tokens cannot be added to a SentencePiece .model",
                where="tokenizer.additional_special_tokens",
                fix="save it as tokenizer.json with transformers, and set tokenizer.from to that",
            )
        # No id of the file changes: the new ones follow the largest.
        new_entries: list[Json] = [
            {"id": index, "content": token, **EXACT}
            for index, token in enumerate(missing_tokens, start=self.vocab_size)
        ]
        earlier_entries = self._backend.description.get("added_tokens") or []
        description = {
            **self._backend.description,
            "added_tokens": [*earlier_entries, *new_entries],
        }
        # transformers reads both files, so the new tokens must stand in both.
        config = dict(self._config)
        decoder_entries = config.get("added_tokens_decoder")
        if isinstance(decoder_entries, dict):
            by_id = dict(decoder_entries)
            for new_entry in new_entries:
                settings = {key: value for key, value in new_entry.items() if key != "id"}
                by_id[str(new_entry["id"])] = settings
            config["added_tokens_decoder"] = by_id
        control = {name for name in roles(description, config).values() if name}
        backend = JsonBackend(description, "tokenizer.additional_special_tokens", control)
        return Tokenizer(backend, config)

    def save(self, folder: Path) -> None:
        """Write files that transformers' AutoTokenizer opens. The tokenizer appears last, by rename: with it the folder
        is complete.
        """
        config = {
            "clean_up_tokenization_spaces": False,
            **dict.fromkeys(ROLES),  # null: transformers would take the token of a class
            **self.config,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        config.pop("auto_map", None)  # names remote code
        files = {
            CONFIG: (json.dumps(config, ensure_ascii=False, indent=2) + "\n").encode(),
            **self._files(),
        }
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_durably(folder / name, content)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a folder, a tokenizer.json or a SentencePiece .model. Raises UserError when it is missing or
    invalid.
    """
    config = configuration(path if path.is_dir() else path.parent)
    file = _tokenizer_file(path, config) if path.is_dir() else path
    if file.suffix == ".model":
        backend = SentencePiece(file)
        return Tokenizer(backend, {**backend.roles(), **config, MADE_BY: MODEL_FILE})
    description = described(file.parent, config) if file.name == VOCABULARY else read_json(file)
    control = {name for name in roles(description, config).values() if name}
    return Tokenizer(JsonBackend(description, str(file), control), config)


def _tokenizer_file(folder: Path, config: Json) -> Path:
    """The file of a folder to load. Raises UserError when there is none."""
    # A folder saved from a .model may also have the conversion to tokenizer.json, for other
    # programs.
    names = ["tokenizer.json", MODEL_FILE, "spiece.model"]
    if config.get(MADE_BY) == MODEL_FILE:
        names = [MODEL_FILE]
    files = [folder / name for name in names if (folder / name).is_file()]
    files = files or [
        path for path in sorted(folder.glob("*.model")) if path.name not in _OTHER_FILES
    ]
    if not files and (folder / VOCABULARY).is_file():
        return folder / VOCABULARY
    if not files:
        problem = "no tokenizer.json or SentencePiece .model in it"
        fix = "set tokenizer.from to the file or another folder"
        others = [name for name in _OTHER_FILES if (folder / name).is_file()]
        if others:
            problem += f", only {', '.join(others)}"
            fix = (
                f"python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}')"
                ".save_pretrained('NEW_FOLDER')\" writes a tokenizer.json where transformers can read it"
            )
        raise UserError(problem, where=str(folder), fix=fix)
    return files[0]


def tokenizer_spec(recipe: Recipe) -> dict[str, Any]:
    """The tokenizer's settings: a name to load, or how to train one (the default without model.from)."""
    section = recipe.tokenizer
    if section.from_ and section.train:
        problem = "the recipe has both tokenizer.from and tokenizer.train"
        raise UserError(problem, where="tokenizer", fix="remove tokenizer.from or tokenizer.train")
    # A pretrained model keeps its own tokenizer, unless the recipe says how to train another.
    name = section.from_
    if not name and not section.train and recipe.model.from_:
        name = "same"
    if name == "same":
        if not recipe.model.from_:
            problem = "tokenizer.from=same needs model.from"
            raise UserError(
                problem, where="tokenizer.from", fix="set model.from, or tokenizer.train"
            )
        name = recipe.model.from_
    if name:
        # The key is absent without tokens: the spec is part of the identity of a prepared folder.
        spec: dict[str, Any] = {"from": name}
        if section.additional_special_tokens:
            spec["additional_special_tokens"] = section.additional_special_tokens
        return spec
    # A new tokenizer has all tokens from the start: those of both lists.
    train = section.train
    if train is None:
        train = TrainTokenizer(vocab_size=recipe.model.vocab_size or TrainTokenizer().vocab_size)
    missing_tokens = [
        token for token in section.additional_special_tokens if token not in train.special_tokens
    ]
    special_tokens = [*train.special_tokens, *missing_tokens]
    complete_train = train.model_copy(update={"special_tokens": special_tokens})
    return {"train": complete_train.model_dump(mode="json")}


def find_tokenizer(recipe: Recipe) -> Tokenizer | TrainTokenizer:
    """The recipe's tokenizer, from disk or the Hub, or how to train one. Raises UserError."""
    spec = tokenizer_spec(recipe)
    if "train" in spec:
        return TrainTokenizer.model_validate(spec["train"])
    tokenizer = load_tokenizer(fetch_tokenizer(spec["from"]))
    return tokenizer.with_tokens(spec.get("additional_special_tokens", []))


def new_tokens(recipe: Recipe) -> int:
    """How many of `additional_special_tokens` the named tokenizer lacks; all of them where it is not on this disk."""
    requested_tokens = set[str]()
    if "from" in tokenizer_spec(recipe):
        requested_tokens.update(recipe.tokenizer.additional_special_tokens)
    if requested_tokens and _tokenizer_to_extend(recipe) is None:
        return len(requested_tokens)
    return len(new_ids(recipe))


def new_ids(recipe: Recipe) -> tuple[int, ...]:
    """The ids of `additional_special_tokens` that the named tokenizer lacks; none where it is not on this disk."""
    tokenizer = _tokenizer_to_extend(recipe)
    if tokenizer is None:
        return ()
    extended = tokenizer.with_tokens(recipe.tokenizer.additional_special_tokens)
    return tuple(range(tokenizer.vocab_size, extended.vocab_size))


def _tokenizer_to_extend(recipe: Recipe) -> Tokenizer | None:
    """The tokenizer that tokens are added to, if there are any and it is on this disk."""
    spec = tokenizer_spec(recipe)
    if "from" not in spec or not spec.get("additional_special_tokens"):
        return None
    folder = cached_model(spec["from"])
    if folder is None:
        return None
    # The weights of a model may be on this disk without its tokenizer.
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return load_tokenizer(folder)
