"""The validation set: chosen by a hash of the content, so that copies of a document stay in one split."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from bloomery.core.errors import UserError, one_line
from bloomery.core.units import counted
from bloomery.data.shards import DOCUMENTS_PER_UNIT, Manifest
from bloomery.data.sources.documents import (
    Dataset,
    Document,
    ReadStats,
    open_dataset,
    open_datasets,
    read_documents,
    sources_of,
)
from bloomery.data.sources.files import SourceFile, other_splits
from bloomery.data.sources.formats import ROW_FORMATS, RequiredFormat
from bloomery.data.sources.splits import validation_split
from bloomery.hub import PREFIX, data_place
from bloomery.recipe.schema import Data, Source

_SALT = b"exam"
AUTO = "auto"
_USUAL_SHARE = 0.01  # where a dataset has no validation split
# A share of a small dataset is raised to what can measure a loss: 20 documents, or about 4,000 tokens of text; but to
# no more than one document in five.
MEASURABLE_ROWS = 20
MEASURABLE_BYTES = 2**14
SHARE_OF_SMALL = 5
SPLIT_RULE = 2  # of these numbers: an unfinished `prepare` of another rule begins again


def content_key(document: Document) -> int:
    """64 bits of the content. For KTO and prompts of the prompt, so that all rows with one prompt stay in one split."""
    example = document.example
    if example is not None and example.kind in ("kto", "prompt") and example.prompt:
        content = repr(example.prompt).encode()
    elif document.tokens is not None:
        content = np.array(document.tokens, np.uint32).tobytes()
    else:
        content = document.wire
    return int.from_bytes(blake2b(content, digest_size=8, salt=_SALT).digest(), "big")


@dataclass(frozen=True)
class Splitter:
    """Documents with a key below `threshold` are the validation set. Train documents whose key is in `held_keys` are
    left out.
    """

    threshold: int
    held_keys: frozenset[int] = frozenset()

    def keeps(self, key: int) -> bool:
        return key < self.threshold


def validation_of(
    data: Data, required_format: RequiredFormat = "text"
) -> tuple[float, list[Dataset]]:
    """`data.validation`: a share, or datasets. Those are a path, a split of the sources that have it, or with auto the
    validation split of each source. Raises UserError for a share outside 0 to 1, and for no such path or split.
    """
    setting = data.validation
    share = _share(setting)
    if share is not None:
        if not 0 <= share < 1:
            fix = "set a share such as 5%, 0, a path, or the name of a split of the dataset"
            raise UserError(
                f"{setting} is not a share of the dataset", where="data.validation", fix=fix
            )
        return share, []
    splits = [
        (source, other_splits(source, rows=required_format in ROW_FORMATS))
        for source in sources_of(data)
    ]
    if setting == AUTO:
        datasets = list[Dataset]()
        for source, names in splits:
            split = validation_split(names)
            if split is not None:
                datasets.append(open_dataset(source, required_format, split=split))
        return (0.0 if datasets else _USUAL_SHARE), datasets
    # A name is that of a split, where a source has it; else it is a path.
    name = str(setting)
    datasets = [
        open_dataset(source, required_format, split=name)
        for source, names in splits
        if name in names
    ]
    if datasets:
        return 0.0, datasets
    if not data_place(name).exists() and not name.startswith(PREFIX):
        present_splits = sorted({split for _, names in splits for split in names})
        choices = "the path of a file or folder"
        if present_splits:
            choices = f"one of its splits: {', '.join(present_splits)}"
        problem = "no such file, folder or split of the dataset"
        where = f"data.validation: {name}"
        raise UserError(problem, where=where, fix=f"set a share such as 1%, or {choices}")
    named_source = Source(path=name, glob=data.glob, format=data.format, columns=data.columns)
    return 0.0, [open_dataset(named_source, required_format)]


def _share(setting: str | float) -> float | None:
    """A number, or a text such as "5%" or "0.05"; None for any other text."""
    if not isinstance(setting, str):
        return float(setting)
    try:
        number = float(setting.rstrip("% "))
    except ValueError:
        return None
    return number / 100 if setting.rstrip().endswith("%") else number


def validation_datasets(data: Data, required_format: RequiredFormat = "text") -> list[Dataset]:
    """The datasets of `validation_of`, none when it is a share."""
    return validation_of(data, required_format)[1]


@dataclass(frozen=True)
class FileRoles:
    """The files to train on, those of the validation set, and those of other splits, which are never trained on.
    `share`: of the validation set, where it is taken from the training files.
    """

    train: tuple[SourceFile, ...]
    validation: tuple[SourceFile, ...]
    left_out: tuple[SourceFile, ...]
    share: float

    def __str__(self) -> str:
        """ "training: train.jsonl; validation: validation.jsonl; left out: test.jsonl"."""
        validation = f"{100 * self.share:g}% of them" if self.share else "none"
        if self.validation:
            validation = _named(self.validation)
        left_out = f"; left out: {_named(self.left_out)}" if self.left_out else ""
        return f"training: {_named(self.train)}; validation: {validation}{left_out}"


def _named(files: Sequence[SourceFile]) -> str:
    """Up to two files by name, the others by number."""
    names = [file.shown for file in files]
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} and {counted(len(names) - 1, 'other files')}"


def file_roles(data: Data, required_format: RequiredFormat = "text") -> FileRoles | None:
    """The role of each file of a dataset; None for a built-in one, and where its files are not on this disk. Raises
    UserError as `validation_of` does.
    """
    if data.builtin or not all(data_place(source.path).exists() for source in sources_of(data)):
        return None
    rows = required_format in ROW_FORMATS
    share, held_datasets = validation_of(data, required_format)
    train = [file for dataset in open_datasets(data, required_format) for file in dataset.files]
    validation = [file for dataset in held_datasets for file in dataset.files]
    read_paths = {file.path for file in (*train, *validation)}
    splits = [
        files for source in sources_of(data) for files in other_splits(source, rows=rows).values()
    ]
    left_out = [file for files in splits for file in files if file.path not in read_paths]
    return FileRoles(tuple(train), tuple(validation), tuple(left_out), share)


def make_splitter(
    datasets: Iterable[Dataset], data: Data, required_format: RequiredFormat = "text"
) -> Splitter:
    """Documents whose key is below the share of all keys. Reads until they can measure a loss: MEASURABLE_ROWS
    documents or MEASURABLE_BYTES of text. Where the whole dataset has fewer below it, the lowest keys are added until
    that holds, up to a fifth of the documents.

    From two different documents on, neither split is empty: the lowest key is always validation, the highest never.
    Memory is constant: the lowest keys of at most MEASURABLE_ROWS documents.
    """
    share, held_datasets = validation_of(data, required_format)
    if held_datasets:
        held_keys = set[int]()
        for dataset in held_datasets:
            held_keys |= _held_keys(dataset, on_error=data.on_error)
        return Splitter(0, frozenset(held_keys))
    threshold = round(share * 2**64)
    if not threshold:
        return Splitter(0)
    # Most datasets are large, and this stops after their first documents.
    lowest_sizes: dict[int, int] = {}  # the size of each document with one of the lowest keys
    distinct_keys = set[int]()  # as many as the fifth needs
    highest_key = -1
    for dataset in datasets:
        for document in read_documents(dataset, on_error=data.on_error, stats=ReadStats()):
            if not document.content and not document.tokens:
                continue
            key = content_key(document)
            highest_key = max(highest_key, key)
            if len(distinct_keys) < SHARE_OF_SMALL * MEASURABLE_ROWS:
                distinct_keys.add(key)
            if key not in lowest_sizes:
                lowest_sizes[key] = len(document.wire) + 4 * len(document.tokens or ())
                if len(lowest_sizes) > MEASURABLE_ROWS:
                    del lowest_sizes[max(lowest_sizes)]
            sizes_below = [size for low_key, size in lowest_sizes.items() if low_key < threshold]
            measurable = len(sizes_below) >= MEASURABLE_ROWS or sum(sizes_below) >= MEASURABLE_BYTES
            if measurable and threshold <= highest_key:
                return Splitter(threshold)
    # Copies of one document cannot be split.
    if len(distinct_keys) < 2:
        return Splitter(0)
    # The dataset is small: the threshold rises, key by key, until the loss can be measured.
    most_rows = max(1, len(distinct_keys) // SHARE_OF_SMALL)
    for rows, key in enumerate(sorted(lowest_sizes), start=1):
        bytes_below = sum(size for low_key, size in lowest_sizes.items() if low_key < threshold)
        if key >= threshold and bytes_below < MEASURABLE_BYTES and rows <= most_rows:
            threshold = key + 1
    return Splitter(min(threshold, highest_key))


def size_warnings(manifest: Manifest, *, sequence_length: int) -> Iterator[str]:
    """What `prepare` and `train` say about a dataset that is too small to train on or to measure, or without EOS."""
    train = manifest.train
    validation = manifest.validation
    rows = train.documents // DOCUMENTS_PER_UNIT[manifest.kind]
    if rows < MEASURABLE_ROWS and train.tokens < MEASURABLE_ROWS * sequence_length:
        yield f"only {counted(rows, 'rows')} to train on: the model will memorize them; use a few hundred or more"
    if manifest.kind == "prompts":
        if 0 < validation.documents < MEASURABLE_ROWS:
            yield f"the validation set has {counted(validation.documents, 'prompts')}: its reward is noisy"
    elif 0 < validation.tokens < sequence_length:
        loss_tokens = validation.loss_tokens
        loss = ""
        if loss_tokens is not None and loss_tokens < validation.tokens:
            loss = f", {loss_tokens:,} of them with a loss"
        yield f"the validation set has {validation.tokens:,} tokens{loss}, less than one sequence: its loss is noisy"
    for file, number in manifest.held_files:
        rest = "is also in the validation set" if number == 1 else "are also in the validation set"
        yield f"{one_line(file)}: {counted(number, 'rows')} {rest}; not trained on"
    if manifest.eos_id is None and (manifest.kind == "text" or manifest.mixed):
        yield (
            "the tokenizer has no EOS token, so that no plain text ends with one and the model will not stop: "
            "name it as eos_token in tokenizer_config.json"
        )


def _held_keys(dataset: Dataset, *, on_error: str) -> frozenset[int]:
    """Raises UserError for an empty validation set."""
    stats = ReadStats()
    documents = read_documents(dataset, on_error=on_error, stats=stats)
    keys = frozenset(
        content_key(document) for document in documents if document.content or document.tokens
    )
    if not keys:
        skipped = f": {counted(stats.skipped, 'rows')} skipped, the first: {stats.first_skipped}"
        fix = "set data.validation to another file, to a share such as 1%, or to 0 for no validation set"
        problem = f"the validation set is empty{skipped if stats.skipped else ''}"
        raise UserError(problem, where=f"data.validation: {dataset.path}", fix=fix)
    return keys


def repeated_lines(validation: Iterable[str], train: Iterable[str]) -> float:
    """The share of validation lines, without blank ones, that also occur in train. Keeps their hashes in memory."""
    lines = [_line_key(line) for text in validation for line in text.splitlines() if line.strip()]
    keys = set(lines)
    repeated = set[int]()
    for text in train:
        repeated.update(key for line in text.splitlines() if (key := _line_key(line)) in keys)
    return sum(line in repeated for line in lines) / len(lines) if lines else 0.0


def _line_key(line: str) -> int:
    return int.from_bytes(blake2b(line.encode(), digest_size=8).digest(), "big")
