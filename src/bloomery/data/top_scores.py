"""A teacher's likeliest tokens and their log-probabilities at each token of answers, in files beside the answers.

A file (little-endian) begins with a header of 64 bytes: `MAGIC`, K, the size of the teacher's vocabulary, the sha256 of
its tokenizer, zeros. Each answer follows: 16 bytes of BLAKE2b of all its ids (int64, prompt included), uint32 the place
of its first token, uint32 how many tokens it has; then of each token K uint32 ids, the likeliest first; then as many
float32 log-probabilities. Answers are found by the ids of prepared documents, so that files may be in any order.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, final

import numpy as np

from bloomery.core.errors import UserError
from bloomery.data.shards import Split

MAGIC = b"bloomery scores\x01"
_HEADER = struct.Struct("<16sII32s8x")
_ANSWER = struct.Struct("<16sII")
SCORE_BYTES = 8  # an id and a log-probability
SUFFIX = ".scores"
KEY = "objective.teacher_scores"

Ids = np.ndarray[Any, np.dtype[np.int64]]
TopIds = np.ndarray[Any, np.dtype[np.int32]]
TopLogps = np.ndarray[Any, np.dtype[np.float32]]


class ScoresHeader(NamedTuple):
    """`top`: tokens at each place; `vocab_size`: entries of the teacher's output layer."""

    top: int
    vocab_size: int
    tokenizer: str

    def packed(self) -> bytes:
        return _HEADER.pack(MAGIC, self.top, self.vocab_size, bytes.fromhex(self.tokenizer))

    @property
    def token_bytes(self) -> int:
        """Of each token of an answer."""
        return SCORE_BYTES * self.top


class StoredAnswer(NamedTuple):
    """`num_tokens`: those with scores, which begin at byte `start` of the file."""

    digest: bytes
    first: int
    num_tokens: int
    start: int


def digest_of_ids(ids: Ids) -> bytes:
    return hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=16).digest()


def add_answer(
    file: BinaryIO, ids: Sequence[int], first: int, top_ids: TopIds, logps: TopLogps
) -> None:
    """Appends the scores [tokens, K] of the tokens of `ids` from `first` on."""
    head = _ANSWER.pack(digest_of_ids(np.array(ids, np.int64)), first, len(top_ids))
    file.write(head + top_ids.astype("<u4").tobytes() + logps.astype("<f4").tobytes())
    file.flush()


def read_header(file: BinaryIO, where: str) -> ScoresHeader:
    """Raises UserError for a file of another kind."""
    content = file.read(_HEADER.size)
    if len(content) < _HEADER.size or not content.startswith(MAGIC):
        raise UserError(
            "not a file of a teacher's scores",
            where=where,
            fix="name a file that `bloomery generate --out FILE --top-scores K` wrote: FILE.scores",
        )
    _, top, vocab_size, tokenizer = _HEADER.unpack(content)
    return ScoresHeader(top, vocab_size, tokenizer.hex())


def stored_answers(file: BinaryIO, header: ScoresHeader, size: int) -> Iterator[StoredAnswer]:
    """Those behind the header that are complete in `size` bytes."""
    start = _HEADER.size
    while start + _ANSWER.size <= size:
        file.seek(start)
        digest, first, count = _ANSWER.unpack(file.read(_ANSWER.size))
        begin = start + _ANSWER.size
        start = begin + count * header.token_bytes
        if start > size:
            return
        yield StoredAnswer(digest, first, count, begin)


def scores_files(pattern: str) -> list[Path]:
    """The files that a name or a pattern such as part-*.jsonl.scores means. Raises UserError."""
    named = Path(pattern)
    paths = sorted(named.parent.glob(named.name))
    if not paths:
        raise UserError(
            f"no such file: {pattern}",
            where=KEY,
            fix="name the file that `bloomery generate --out FILE --top-scores K` wrote: FILE.scores",
        )
    return paths


def common_header(paths: Sequence[Path]) -> ScoresHeader:
    """Raises UserError for files of different teachers."""
    headers = []
    for path in paths:
        with path.open("rb") as file:
            headers.append(read_header(file, str(path)))
    different = next((n for n, header in enumerate(headers) if header != headers[0]), None)
    if different is not None:
        raise UserError(
            f"scores of another teacher, or of another number of tokens, than in {paths[0]}",
            where=str(paths[different]),
            fix="name files of one teacher and one --top-scores",
        )
    return headers[0]


@final
class TopScores:
    """The scores of the documents of a split."""

    def __init__(self, paths: Sequence[Path], split: Split) -> None:
        """Raises UserError for a document without scores."""
        self.header = common_header(paths)
        self._contents = [np.memmap(path, np.uint8, "r") for path in paths]
        answers: dict[bytes, tuple[int, StoredAnswer]] = {}
        for number, path in enumerate(paths):
            with path.open("rb") as file:
                for answer in stored_answers(file, self.header, path.stat().st_size):
                    answers[answer.digest] = number, answer
        self._bounds = split.bounds[:].astype(np.int64)
        self._answers = []
        missing = 0
        for document in range(len(split)):
            stored_answer = answers.get(digest_of_ids(split.document(document)))
            missing += stored_answer is None
            if stored_answer is not None:
                self._answers.append(stored_answer)
        if missing:
            raise UserError(
                f"{missing:,} of {len(split):,} rows of the dataset have no scores",
                where=KEY,
                fix="set data.path to the file of answers that was written with the scores, all of it",
            )

    def of_labels(
        self, label_indices: Ids, loss_mask: np.ndarray[Any, np.dtype[np.float32]]
    ) -> tuple[TopIds, TopLogps]:
        """[T, K] of each label of a sequence, 0 where it is masked. `label_indices`: their places in the split."""
        top = self.header.top
        top_ids = np.zeros((len(label_indices), top), np.int32)
        logps = np.zeros((len(label_indices), top), np.float32)
        scored = np.flatnonzero(loss_mask > 0)
        documents = np.searchsorted(self._bounds, label_indices[scored], side="right") - 1
        for document in np.unique(documents):
            label_positions = scored[documents == document]
            number, answer = self._answers[document]
            rows = label_indices[label_positions] - self._bounds[document] - answer.first
            assert rows.min() >= 0 and rows.max() < answer.num_tokens, "the labels are the answer's"
            size = answer.num_tokens * top * 4
            content = self._contents[number]
            of_answer = content[answer.start : answer.start + 2 * size]
            ids_of_answer = of_answer[:size].view("<u4").reshape(answer.num_tokens, top)
            logps_of_answer = of_answer[size:].view("<f4").reshape(answer.num_tokens, top)
            top_ids[label_positions] = ids_of_answer[rows]
            logps[label_positions] = logps_of_answer[rows]
        return top_ids, logps
