"""The prompts of a prepared dataset, in the order of a run, each with the columns of its row for rewards."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

from bloomery.core.errors import UserError
from bloomery.data.order import Visits
from bloomery.data.shards import Ids, SplitName, open_split, read_manifest
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer

Turns = list[dict[str, Any]]  # messages as chat templates take them


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt of a run.

    `ids`: int64 [tokens], all that the model is given. `text`: the text of the row; of messages, what the chat template
    wrote. `messages`: those of the row, None where it has a text. `columns`: the row's other columns. `pictures`: files
    of those that `ids` have tokens for, in their order.
    """

    ids: Ids
    text: str
    messages: Turns | None
    columns: dict[str, Any]
    pictures: tuple[bytes, ...] = ()


def row_json(prompt: str | Turns, columns: Mapping[str, Any]) -> bytes:
    """A row as `Prompts` reads it."""
    row = {"prompt": prompt, "columns": columns}
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()


@final
class Prompts:
    """Prompts of a prepared folder, by number. Prompt i of a run is f(seed, i), whatever the number of ranks.

    An epoch visits the prompts of each source as often as its weight says (`Visits`), and the epochs follow each other.
    The validation set has each prompt once, in the order of the dataset; it may be empty. Raises UserError as
    `read_manifest` does, for a folder without prompts, for weights that read none of them and, when a prompt is read,
    for a damaged file.
    """

    def __init__(self, prepared: Path, *, seed: int, split: SplitName = "train") -> None:
        manifest = read_manifest(prepared)
        if manifest.kind != "prompts":
            fix = "set data.format=prompts, or train with another objective"
            raise UserError("the prepared dataset has no prompts", where=str(prepared), fix=fix)
        self._prepared = prepared
        self._split = open_split(prepared, split, manifest)
        self._is_shuffled = split == "train"
        parts = self._split.record.parts
        weights = [part.weight if self._is_shuffled else 1.0 for part in parts]
        self._visits = Visits([part.documents for part in parts], weights, seed)
        if self._is_shuffled and not len(self._visits):
            problem = "no prompt is read: the weights of the sources round to none"
            raise UserError(problem, where=str(prepared), fix="raise the weights in data.sources")

    def __len__(self) -> int:
        """The prompts of an epoch."""
        return len(self._visits)

    def __iter__(self) -> Iterator[Prompt]:
        """The first epoch."""
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Prompt:
        """The prompt of this number in the run; numbers from `len` on belong to later epochs."""
        return self._read(self.document(number))

    def pictures_of(self, number: int) -> tuple[bytes, ...]:
        """Of the prompt of this number."""
        return self._pictures(self.document(number))

    def document(self, number: int) -> int:
        """Which row of the dataset the prompt of this number is."""
        if number < 0 or (number >= len(self) and not self._is_shuffled):
            raise IndexError(number)
        locate = self._visits.locate if self._is_shuffled else self._visits.in_order
        source, prompt_of_source = locate(number)
        (_, first_document) = self._split.part_starts[source]
        return first_document + prompt_of_source

    def _pictures(self, document: int) -> tuple[bytes, ...]:
        stored = self._split.pictures
        if stored is None:
            return ()
        return tuple(stored[number] for number in stored.of_document(document))

    def _read(self, document: int) -> Prompt:
        assert self._split.rows is not None
        ids = self._split.document(document)
        row = json.loads(self._split.rows[document])
        prompt = row["prompt"]
        pictures = self._pictures(document)
        if isinstance(prompt, str):
            return Prompt(ids, prompt, None, row["columns"], pictures)
        return Prompt(ids, self._tokenizer.decode(ids.tolist()), prompt, row["columns"], pictures)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._prepared)
