"""Files of answers that become a dataset: rows as training reads them, in a file that a killed command continues."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import SEEK_END
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from bloomery.core.errors import UserError
from bloomery.core.files import write_durably
from bloomery.data.chat.render import as_turn
from bloomery.data.examples import Example, num_pictures
from bloomery.data.top_scores import (
    SUFFIX,
    ScoresHeader,
    TopIds,
    TopLogps,
    add_answer,
    stored_answers,
)
from bloomery.infer.dataset_prompts import DatasetPrompt

Json = dict[str, Any]
MASKED = -100  # the label of a token of the prompt


class Shard(NamedTuple):
    """One of `num_parts` parts of the rows of a dataset: every so many-th row, from row `part` on."""

    part: int
    num_parts: int

    def of(self, rows: Iterator[DatasetPrompt]) -> Iterator[DatasetPrompt]:
        return islice(rows, self.part, None, self.num_parts)


def shard_of(text: str) -> Shard:
    """ "0/4": the first of four. Raises UserError."""
    index, slash, count = text.partition("/")
    if slash and index.isdecimal() and count.isdecimal() and int(index) < int(count):
        return Shard(int(index), int(count))
    raise UserError(
        f"no part of a dataset: {text}",
        where="--shard",
        fix="write I/N with I below N: --shard 0/4, 1/4, 2/4 and 3/4 are all rows",
        code=2,
    )


def refuse_pictures(examples: Iterable[Example]) -> None:
    """Raises UserError for a prompt with pictures, which no row of such a file has."""
    for example in examples:
        if num_pictures(example):
            raise UserError(
                "not supported yet: answers to pictures as a dataset",
                where=example.source,
                fix="print them with --jsonl in place of --out",
            )


def training_row(example: Example, answer: str) -> Json:
    """A row of a dataset: messages that end with the answer, or of a text its prompt and completion."""
    if isinstance(example.prompt, str):
        return {"prompt": example.prompt, "completion": answer}
    turns = [
        {name: value for name, value in as_turn(turn).items() if name != "thinking"}
        for turn in example.prompt
    ]
    row: Json = {"messages": [*turns, {"role": "assistant", "content": answer}]}
    if example.tools:
        row["tools"] = list(example.tools)
    return row


class AnswerFile(NamedTuple):
    """`num_rows`: complete ones that were there before. `scores`: the file of the model's likeliest tokens, if any."""

    file: BinaryIO
    num_rows: int
    scores: BinaryIO | None = None

    def add(self, row: Json) -> None:
        """One line, which a killed process leaves whole or not at all where it is read again."""
        self.file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self.file.flush()

    def add_scored(
        self, prompt_ids: Sequence[int], answer_ids: Sequence[int], top_ids: TopIds, logps: TopLogps
    ) -> None:
        """A row of token ids, after its scores: a line has them in any case."""
        assert self.scores is not None
        ids = [*prompt_ids, *answer_ids]
        add_answer(self.scores, ids, len(prompt_ids), top_ids, logps)
        self.add({"input_ids": ids, "labels": [MASKED] * len(prompt_ids) + list(answer_ids)})


@contextmanager
def answer_file(
    path: Path, settings: Mapping[str, Any], scores: ScoresHeader | None = None
) -> Iterator[AnswerFile]:
    """The file at `path`, new or continued, with its `settings` beside it: a file has answers of one command alone.
    `scores`: a file of them is beside it, too, with this header.

    Raises UserError for a file of other settings, and for one that no such command began.
    """
    record = path.with_name(path.name + ".settings.json")
    content = json.dumps(settings, indent=1, ensure_ascii=False, sort_keys=True)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(record, content)
    elif not record.exists():
        raise UserError(
            "the file is there, and no `bloomery generate --out` began it",
            where=str(path),
            fix="name another file, or delete this one",
        )
    elif (begun := json.loads(record.read_text(encoding="utf-8"))) != json.loads(content):
        changed = sorted(
            name for name in {*begun, *settings} if begun.get(name) != settings.get(name)
        )
        raise UserError(
            f"the file was begun with other settings: {', '.join(changed)}",
            where=str(path),
            fix="give the command of its beginning, or name another file",
        )
    with path.open("a+b") as file:
        ends = _line_ends(file)
        if scores is None:
            file.truncate(ends[-1])  # the rest of a line that a kill cut
            yield AnswerFile(file, len(ends) - 1)
            return
        with path.with_name(path.name + SUFFIX).open("a+b") as scores_file:
            answer_ends = _answer_ends(scores_file, scores)
            num_rows = min(len(ends), len(answer_ends)) - 1
            file.truncate(ends[num_rows])
            scores_file.truncate(answer_ends[num_rows])
            if not answer_ends[num_rows]:
                scores_file.write(scores.packed())
            yield AnswerFile(file, num_rows, scores_file)


def _line_ends(file: BinaryIO) -> list[int]:
    """Where the complete lines end, after 0."""
    file.seek(0)
    ends = [0]
    for line in file:
        if line.endswith(b"\n"):
            ends.append(ends[-1] + len(line))
    return ends


def _answer_ends(file: BinaryIO, header: ScoresHeader) -> list[int]:
    """Where the header and the complete answers of a file of scores end: 0 where the header is cut."""
    packed = header.packed()
    file.seek(0)
    if file.read(len(packed)) != packed:
        return [0]
    size = file.seek(0, SEEK_END)
    answers = stored_answers(file, header, size)
    return [
        len(packed),
        *(answer.start + answer.num_tokens * header.token_bytes for answer in answers),
    ]
