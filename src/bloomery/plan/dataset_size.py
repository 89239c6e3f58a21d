"""How many sequences a dataset becomes, before it is prepared: from its rows, packed as `prepare` packs them.

A small dataset is counted: each row is tokenized, the validation set is taken off, and the rest is packed. Of a larger
one every n-th row is tokenized, which gives the tokens per byte of the others; of a very large one the first rows stand
for all. Without a tokenizer the bytes alone count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from bloomery.data.chat.render import EncodedExample
from bloomery.data.examples import Example
from bloomery.data.packing import Ids, count_plain_sequences, pack_units
from bloomery.data.prepare.split import Splitter, content_key, make_splitter, validation_of
from bloomery.data.shards import DOCUMENTS_PER_UNIT, ShardKind
from bloomery.data.sources.documents import Dataset, Document, ReadStats, read_documents
from bloomery.data.sources.picture_columns import holds_pictures
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.recipe.schema import Recipe

BYTES_PER_TOKEN = 3.4  # byte-level BPE of 4k to 50k tokens on source code and English: 2.6 to 4.4
READ_BYTES = 2**20  # of rows of each source that a plan reads
READ_ROWS = 20_000
ENCODED_BYTES = 2**17  # of rows that a plan tokenizes: a fifth of a second
ENCODED_WITH_PICTURES = (
    32  # rows, where some have pictures, each of which takes a fiftieth of a second
)
ENCODED_TEXT = 2**14  # characters of each plain text among them
JSON_LINES = (".jsonl", ".ndjson")

# Relative half-widths of the estimate, by what is known.
OF_BYTES = 0.3
OF_FIRST_ROWS = 0.15
OF_SOME_ROWS = 0.05
COUNTED = 0.01


@dataclass(frozen=True)
class RowSample:
    """The first rows of a source; `is_whole`: there are no others. `sizes`: the bytes of each row's content."""

    dataset: Dataset
    documents: list[Document]
    sizes: list[int]
    is_whole: bool

    @property
    def encoded_rows(self) -> list[int]:
        """Numbers of the rows that are tokenized: every n-th."""
        every = max(1, -(-sum(self.sizes) // ENCODED_BYTES))
        examples = [document.example for document in self.documents]
        if any(example is not None and holds_pictures(example) for example in examples):
            every = max(every, len(examples) // ENCODED_WITH_PICTURES)
        return list(range(0, len(self.documents), every))

    @property
    def num_rows(self) -> float:
        """Of the whole source."""
        if self.is_whole or not self.documents:
            return len(self.documents)
        files = self.dataset.files  # none of a built-in dataset that is made from nothing
        if files and all(file.path.suffix == ".parquet" for file in files):
            from pyarrow.parquet import read_metadata

            return float(sum(read_metadata(file.path).num_rows for file in files))
        sample_bytes = sum(self.sizes)
        if files and files[0].path.suffix in JSON_LINES:
            with files[0].path.open("rb") as lines:
                sample_bytes = sum(map(len, islice(lines, len(self.documents))))
        return len(self.documents) * self.dataset.text_bytes / max(1, sample_bytes)


def sample_rows(dataset: Dataset, *, files: int, on_error: str, stats: ReadStats) -> RowSample:
    """Reads to the end of the source, or to a limit; of a built-in dataset, so many of its files."""
    part = replace(dataset, files=dataset.files[:files]) if dataset.builtin else dataset
    documents = list[Document]()
    sizes = list[int]()
    read_bytes = 0
    rows = read_documents(part, on_error=on_error, stats=stats)
    for document in islice(rows, READ_ROWS):
        documents.append(document)
        sizes.append(_content_bytes(document))
        read_bytes += sizes[-1]
        if read_bytes >= READ_BYTES:
            break
    is_whole = part.files == dataset.files and next(rows, None) is None
    return RowSample(dataset, documents, sizes, is_whole)


def _content_bytes(document: Document) -> int:
    """Of what becomes tokens: of a prompt without its other columns."""
    example = document.example
    if example is not None and example.kind == "prompt":
        return len(prompt_text(example).encode())
    return len(document.wire) + 4 * len(document.tokens or ())


def prompt_text(example: Example) -> str:
    """Of messages, their contents one after the other."""
    if isinstance(example.prompt, str):
        return example.prompt
    return "\n".join(message.content for message in example.prompt)


@dataclass(frozen=True)
class SourceSize:
    """Of the training split of one source, each row read once."""

    rows: float
    sequences: float
    tokens: float
    loss_tokens: float
    longest: int  # tokens of the longest row
    left_out: int
    cut_short: int


@dataclass(frozen=True)
class DatasetSize:
    """The sources of a dataset, with their weights; `spread`: the relative half-width of the number of sequences."""

    sources: Sequence[SourceSize]
    weights: Sequence[float]
    spread: float

    @property
    def is_counted(self) -> bool:
        """Whether every row was tokenized."""
        return self.spread == COUNTED

    @property
    def sequences(self) -> int:
        return sum(
            round(source.sequences * weight)
            for source, weight in zip(self.sources, self.weights, strict=True)
        )

    @property
    def tokens(self) -> int:
        return round(sum(source.tokens for source in self.sources))

    @property
    def loss_share(self) -> float:
        tokens = sum(source.tokens for source in self.sources)
        return sum(source.loss_tokens for source in self.sources) / tokens if tokens else 1.0

    @property
    def longest(self) -> int:
        return max((source.longest for source in self.sources), default=0)


def dataset_size(
    recipe: Recipe,
    samples: Sequence[RowSample],
    kinds: Sequence[ShardKind],
    shard_kind: ShardKind,
    tokenizer: Tokenizer | None,
    encoded: Sequence[Mapping[int, EncodedExample]],
) -> DatasetSize:
    """The size of the training split of these sources.

    `kinds`: of each source, `shard_kind` of all together; `encoded`: for each source, what the chat template made of
    the rows that are tokenized, by their number.
    """
    data = recipe.data
    required_format = recipe.objective.spec.data_kind

    # What the validation set takes: of a small dataset exactly its rows, of a large one its share.
    are_whole = all(sample.is_whole for sample in samples)
    splitter = Splitter(0)
    train_share = 1.0
    if are_whole:
        splitter = make_splitter([sample.dataset for sample in samples], data, required_format)
    else:
        share, _ = validation_of(data, required_format)
        train_share = 1.0 - share

    sources = []
    are_encoded = True
    for sample, kind, encoded_rows in zip(samples, kinds, encoded, strict=True):
        lengths, first_loss_tokens, loss_tokens = _lengths(sample, kind, tokenizer, encoded_rows)
        is_trained = np.array(
            [_is_trained(document, splitter) for document in sample.documents], dtype=bool
        )
        are_encoded &= len(sample.encoded_rows) == len(sample.documents)
        scale = train_share * sample.num_rows / max(1, len(sample.documents))
        sources.append(
            _source_size(
                recipe,
                lengths[is_trained],
                first_loss_tokens[is_trained],
                loss_tokens[is_trained],
                scale=scale,
                is_cut_anywhere=kind == "text" or shard_kind in ("text", "prompts"),
                is_prompts=shard_kind == "prompts",
            )
        )
    spread = COUNTED if are_encoded else OF_SOME_ROWS
    spread = spread if are_whole else OF_FIRST_ROWS
    if tokenizer is None:
        spread = OF_BYTES
    return DatasetSize(sources, [sample.dataset.weight for sample in samples], spread)


def _is_trained(document: Document, splitter: Splitter) -> bool:
    if not document.content and not document.tokens:
        return False
    key = content_key(document)
    return not splitter.keeps(key) and key not in splitter.held_keys


def _lengths(
    sample: RowSample,
    kind: ShardKind,
    tokenizer: Tokenizer | None,
    encoded_rows: Mapping[int, EncodedExample],
) -> tuple[Ids, Ids, Ids]:
    """Of each row: the tokens of its texts, the first loss token of each, [rows, texts per row], and its loss tokens.

    Rows that are not tokenized have the tokens per byte of those that are, and are trained on from their first token.
    """
    texts_per_row = DOCUMENTS_PER_UNIT[kind]
    lengths = np.zeros((len(sample.documents), texts_per_row), np.int64)
    first_loss_tokens = np.zeros_like(lengths)
    loss_tokens = np.zeros(len(sample.documents), np.int64)
    measured_rows = list[int]()
    chosen_rows = set(sample.encoded_rows)
    for row, document in enumerate(sample.documents):
        if document.tokens is not None:
            mask = document.loss_mask
            lengths[row] = len(document.tokens)
            first_loss_tokens[row] = 0 if mask is None else _first_true(mask)
            loss_tokens[row] = len(document.tokens) if mask is None else sum(mask)
        elif row in encoded_rows:
            # The second response of a KTO row is that of another row: about as long.
            texts = encoded_rows[row]
            lengths[row] = np.resize([len(text.ids) for text in texts], texts_per_row)
            first_loss_tokens[row] = np.resize(
                [_first_true(text.loss_mask) for text in texts], texts_per_row
            )
            loss_tokens[row] = np.resize(
                [sum(text.loss_mask) for text in texts], texts_per_row
            ).sum()
        elif document.example is None and tokenizer is not None and row in chosen_rows:
            lengths[row] = _text_tokens(document.text, tokenizer)
            loss_tokens[row] = lengths[row, 0]
        else:
            continue
        measured_rows.append(row)

    # The other rows.
    sizes = np.array(sample.sizes, np.float64)
    tokens_per_byte = 1 / BYTES_PER_TOKEN / texts_per_row
    loss_share = 1.0
    if measured_rows:
        measured_bytes = max(1.0, sizes[measured_rows].sum())
        tokens_per_byte = lengths[measured_rows].sum() / texts_per_row / measured_bytes
        loss_share = loss_tokens[measured_rows].sum() / max(1, lengths[measured_rows].sum())
    other_rows = np.setdiff1d(np.arange(len(sample.documents)), measured_rows)
    lengths[other_rows] = np.maximum(1, np.rint(sizes[other_rows, None] * tokens_per_byte))
    loss_tokens[other_rows] = np.rint(lengths[other_rows].sum(1) * loss_share)
    return lengths, first_loss_tokens, loss_tokens


def _first_true(mask: Sequence[bool]) -> int:
    """The index of the first loss token; the length where there is none."""
    return next((index for index, is_trained in enumerate(mask) if is_trained), len(mask))


def _text_tokens(text: str, tokenizer: Tokenizer) -> int:
    """Of a plain text, with the tokens around it; of a long one by its beginning."""
    beginning = text[:ENCODED_TEXT]
    tokens = len(tokenizer.encode_array(beginning)) * len(text) / max(1, len(beginning))
    ends = {tokenizer.bos_id, tokenizer.eos_id} - {None}
    return round(tokens) + len(ends)


def _source_size(
    recipe: Recipe,
    lengths: Ids,
    first_loss_tokens: Ids,
    loss_tokens: Ids,
    *,
    scale: float,
    is_cut_anywhere: bool,
    is_prompts: bool,
) -> SourceSize:
    """`lengths`, `first_loss_tokens`, `loss_tokens`: of rows to train on, each of which stands for `scale` rows."""
    data = recipe.data
    tokens = int(lengths.sum())
    left_out = cut_short = 0
    if is_prompts:
        sequences = float(len(lengths)) * scale
    elif is_cut_anywhere or data.layout == "fixed":
        sequences = count_plain_sequences(
            round(tokens * scale),
            round(len(lengths) * scale),
            sequence_length=data.sequence_length,
            layout=data.layout,
        )
    else:
        packed = pack_units(
            lengths, first_loss_tokens, sequence_length=data.sequence_length, layout=data.layout
        )
        sequences = packed.sequences * scale
        left_out = packed.dropped_units + packed.all_masked_units
        cut_short = packed.truncated_units
    return SourceSize(
        rows=len(lengths) * scale,
        sequences=sequences,
        tokens=tokens * scale,
        loss_tokens=float(loss_tokens.sum()) * scale,
        longest=int(lengths.max(initial=0)),
        left_out=left_out,
        cut_short=cut_short,
    )
