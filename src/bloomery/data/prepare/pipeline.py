"""The steps of `prepare`, from its journal to the manifest.

Files appear in this order: preparing.json (the journal: recipe and progress), the tokenizer, shards that grow,
sources.jsonl, manifest.json. A folder with a manifest is complete.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from pydantic import BaseModel, ValidationError

from bloomery.core.errors import UserError
from bloomery.core.files import open_input, write_durably
from bloomery.core.units import MIB, counted
from bloomery.data.chat.written import PartCounts, added
from bloomery.data.examples import BadRow, num_pictures, texts_of
from bloomery.data.pictures.encoder import vision_source
from bloomery.data.prepare.kinds import (
    KtoPairCheck,
    checked_tokens,
    kinds_among,
    max_prompt_tokens,
    refuse_mixture,
    row_of,
    train_on,
)
from bloomery.data.prepare.split import SPLIT_RULE, content_key, make_splitter, validation_datasets
from bloomery.data.prepare.workers import (
    Array,
    EncodedBatch,
    Rendering,
    count_workers,
    encode_in_order,
    encoders,
)
from bloomery.data.prompts import row_json
from bloomery.data.shards import (
    DOCUMENTS_PER_UNIT,
    JOURNAL,
    MANIFEST,
    Lost,
    Manifest,
    SourceRecord,
    SplitName,
    SplitProgress,
    SplitWriter,
    file_record,
    write_manifest,
)
from bloomery.data.sources.documents import (
    Dataset,
    Document,
    ReadStats,
    open_datasets,
    read_documents,
    unpadded,
)
from bloomery.data.sources.files import SourceFile
from bloomery.data.tokenizer.templates import NONE, find_template, own_templates
from bloomery.data.tokenizer.tokenizer import (
    TOKENIZER_FILES,
    Tokenizer,
    find_tokenizer,
    load_tokenizer,
)
from bloomery.data.tokenizer.training import train_tokenizer
from bloomery.recipe.schema import Recipe

FINGERPRINT = "sources.jsonl"  # sizes and checksums of the source files
SPLITS: tuple[SplitName, SplitName] = ("train", "validation")
Report = Callable[[str, float, float], None]  # phase, done, total (0: unknown)


@dataclass(frozen=True)
class FileState:
    """One source file as it was read. A touched file has another time and the same sha256 ("" until computed)."""

    source: int
    name: str
    bytes: int
    mtime_ns: int
    sha256: str = ""


def file_states(datasets: list[Dataset]) -> list[FileState]:
    """Every file of every source, by its size and time alone."""
    states = list[FileState]()
    for source, dataset in enumerate(datasets):
        for file in dataset.files:
            try:
                status = file.path.stat()
            except OSError as error:
                fix = "check its owner, its permissions and the disk"
                raise UserError(
                    f"cannot be read: {error.strerror}", where=str(file.path), fix=fix
                ) from error
            states.append(FileState(source, file.name, status.st_size, status.st_mtime_ns))
    return states


def _digest(states: list[FileState]) -> str:
    lines = "\n".join(json.dumps(asdict(state)) for state in states)
    return hashlib.sha256(lines.encode()).hexdigest()


def _sha256(file: SourceFile) -> str:
    with open_input(file.path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def record_sources(
    datasets: list[Dataset],
    states: list[FileState],
    folder: Path,
    report: Callable[[float, float], None],
) -> tuple[SourceRecord, ...]:
    """Write the checksum of every file to FINGERPRINT. Raises UserError when a file changed since `states`."""
    # hashlib releases the interpreter's lock, so that threads hash several files at once.
    files = [file for dataset in datasets for file in dataset.files]
    total = sum(state.bytes for state in states)
    bytes_done = 0
    states_with_sums = list[FileState]()
    with ThreadPoolExecutor(4) as threads:
        for state, sha256 in zip(states, threads.map(_sha256, files), strict=True):
            states_with_sums.append(replace(state, sha256=sha256))
            bytes_done += state.bytes
            report(bytes_done, total)
    # The checksums describe what was tokenized only if nothing was written from the first read
    # until now.
    current_states = file_states(datasets)
    if _digest(current_states) != _digest(states):
        changed_names = sorted({state.name for state in set(states) ^ set(current_states)})
        raise UserError(
            "the dataset changed while it was read",
            where=changed_names[0] if changed_names else "data",
            fix="wait until nothing writes there, then run the same command again",
        )
    rows = [json.dumps(asdict(state)) + "\n" for state in states_with_sums]
    write_durably(folder / FINGERPRINT, "".join(rows))
    # The manifest has one digest per source, in which the time of a file does not count.
    records = []
    for index, dataset in enumerate(datasets):
        of_source = [state for state in states_with_sums if state.source == index]
        lines = "".join(f"{state.name} {state.bytes} {state.sha256}\n" for state in of_source)
        digest = hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()
        size = sum(state.bytes for state in of_source)
        records.append(
            SourceRecord(path=dataset.path, files=len(of_source), bytes=size, sha256=digest)
        )
    return tuple(records)


def stale(folder: Path, datasets: list[Dataset], *, most_read: int | None = None) -> str | None:
    """The first file that changed after the shards were made; None without any. A file with another time is read for
    its checksum, unless it has more bytes than `most_read`.
    """
    try:
        lines = (folder / FINGERPRINT).read_text(encoding="utf-8").splitlines()
        recorded_states = [FileState(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        fix = f"delete {folder} and prepare again"
        raise UserError(
            "file is missing or damaged", where=str(folder / FINGERPRINT), fix=fix
        ) from error
    unseen_states = {(state.source, state.name): state for state in recorded_states}
    files = [file for dataset in datasets for file in dataset.files]
    for state, file in zip(file_states(datasets), files, strict=True):
        recorded_state = unseen_states.pop((state.source, state.name), None)
        if recorded_state is None or recorded_state.bytes != state.bytes:
            return str(file.path)
        # A copied or touched file has another time: only then is it read.
        is_touched = recorded_state.mtime_ns != state.mtime_ns
        is_read = most_read is None or state.bytes <= most_read
        if is_touched and is_read and recorded_state.sha256 != _sha256(file):
            return str(file.path)
    # What is left was removed from the dataset.
    return next((name for _, name in unseen_states), None)


PICTURE_BYTES = 2**15  # of text that a picture counts for: about as long does it take
MOST_NAMED = 64  # files whose rows repeat in the validation set, each with its number


class PrepareJournal(BaseModel):
    """The progress of an unfinished `prepare`: `read` documents of source `source` are in the splits."""

    identity: str
    sources: str
    source: int = 0
    read: int = 0
    empty: int = 0
    held_back: int = 0
    held_files: dict[str, int] = {}  # of each file, up to MOST_NAMED
    failed: int = 0  # examples that the chat template refused
    first_failed: str = ""
    template: str = ""  # the description of the chat template
    parts: PartCounts = {}  # that the chat template leaves out
    train: SplitProgress = SplitProgress()
    validation: SplitProgress = SplitProgress()


def open_journal(folder: Path, *, identity: str, sources: str) -> PrepareJournal:
    """The folder's journal when it belongs to the same recipe and files, else a new one in a cleared folder. A finished
    folder has none and gets none. Raises UserError for a folder with other files.
    """
    fresh = PrepareJournal(identity=identity, sources=sources)
    path = folder / JOURNAL
    if (folder / MANIFEST).is_file():
        return fresh
    if path.is_file():
        try:
            journal = PrepareJournal.model_validate_json(path.read_bytes())
        except ValidationError:
            journal = None
        if journal and (journal.identity, journal.sources) == (fresh.identity, fresh.sources):
            return journal
        # An unfinished attempt is removed; the journal last, as it names the recipe of these files.
        patterns = (
            "train-*.bin",
            "validation-*.bin",
            "tokenizer*",
            FINGERPRINT,
            "special_tokens_map.json",
            JOURNAL,
        )
        for draft in [draft for pattern in patterns for draft in sorted(folder.glob(pattern))]:
            draft.unlink()
    other_names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if other_names:
        raise UserError(
            f"the folder has files that `prepare` did not write: {other_names[0]}",
            where=str(folder),
            fix="set data.prepared to an empty or a new folder",
        )
    write_durably(path, fresh.model_dump_json())
    return fresh


@dataclass(frozen=True)
class Limits:
    """Sizes and times of the work. Tests set small ones."""

    shard_tokens: int = 100_000_000
    batch_bytes: int = MIB
    tokenizer_bytes: int = 2_000_000_000
    journal_seconds: float = 5.0


def streams(recipe: Recipe) -> list[Dataset]:
    """The sources, followed by those of data.validation."""
    kind = recipe.objective.spec.data_kind
    return open_datasets(recipe.data, kind) + validation_datasets(recipe.data, kind)


@dataclass
class EncodeTask:
    """A batch to encode, and the journal's counters after it."""

    documents: list[tuple[SplitName, Document]]
    source: int
    num_read: int
    num_empty: int
    held_back: int
    held_files: dict[str, int]


class EncodedDocument(NamedTuple):
    """`lengths`: the tokens of each of its responses; `loss_mask`: one entry per token, for plain text none;
    `pictures`: of each response.
    """

    document: Document
    ids: Array
    lengths: Array
    loss_mask: Array
    pictures: list[tuple[bytes, ...]]


def _num_pictures(document: Document) -> int:
    return 0 if document.example is None else num_pictures(document.example)


def _row(document: Document) -> bytes:
    """What rewards are given of a prompt's row."""
    example = document.example
    assert example is not None
    return row_json(*row_of(example))


def untokenised() -> UserError:
    """The error for token ids without a tokenizer in the recipe."""
    return UserError(
        "the dataset has token ids, and the recipe names no tokenizer",
        where="tokenizer.from",
        fix="set tokenizer.from to the folder of the tokenizer that made them",
    )


def no_documents(
    datasets: list[Dataset], skipped: int, first_skipped: str, first_fix: str = ""
) -> UserError:
    """`first_fix`: the cure of the first row that was skipped, where it is known."""
    where = f"data: {', '.join(dataset.path for dataset in datasets)}"
    if not skipped:
        fix = "add text, or set data.path and data.glob"
        return UserError("the dataset is empty", where=where, fix=fix)
    return UserError(
        f"nothing to train on: {counted(skipped, 'rows')} skipped, the first: {first_skipped}",
        where=where,
        fix=first_fix.removesuffix(", or set data.on_error=skip") or "correct the rows",
    )


@final
class Preparation:
    """One `prepare`, from its journal to the manifest."""

    def __init__(
        self, recipe: Recipe, name: str, identity: str, folder: Path, report: Report, limits: Limits
    ) -> None:
        self._recipe = recipe
        self._data = recipe.data
        self._name = name
        self._identity = identity
        self._folder = folder
        self._report = report
        self._limits = limits
        self._are_pictures_checked = False
        self._datasets = streams(recipe)
        validation = validation_datasets(recipe.data, recipe.objective.spec.data_kind)
        self._num_train = len(self._datasets) - len(validation)
        self._states = file_states(self._datasets)
        self._bytes = sum(state.bytes for state in self._states)
        self._journal = open_journal(
            folder, identity=identity, sources=f"{_digest(self._states)} {SPLIT_RULE}"
        )
        self._summary = ReadStats()
        # The first document of a source decides its kind: later ones of another kind are refused.
        first_documents = list[Document | None]()
        for dataset in self._datasets:
            documents = read_documents(dataset, on_error=self._data.on_error, stats=ReadStats())
            first_documents.append(next(documents, None))
        self.kinds = kinds_among(first_documents)
        self.kind = self.kinds.shard_kind

    def begin(self) -> Tokenizer:
        """The tokenizer, after choosing the validation split. It is saved to the folder with the chat template in use,
        so that other programs format conversations alike.
        """
        train = self._datasets[: self._num_train]
        self._splitter = make_splitter(train, self._data, self._recipe.objective.spec.data_kind)
        self._tokenizer = tokenizer = self._find_tokenizer()
        rendering = self.rendering
        verbatim = self._recipe.objective.spec.reads_text
        template = self._data.chat.template
        if rendering is not None and self.kinds.formatted(
            template, tokenizer.config, verbatim=verbatim
        ):
            # A resumed `prepare` finds the template in use as the tokenizer's own.
            description = find_template(template, tokenizer.config).description
            self._journal.template = self._journal.template or description
        changes_own = bool(self._data.chat.template_kwargs) and bool(
            own_templates(tokenizer.config)
        )
        if rendering is not None and (
            changes_own if rendering.template is None else rendering.template != NONE
        ):
            with rendering.renderer(tokenizer) as renderer:
                template_in_use = renderer.template
            saved: object = template_in_use.text
            if template_in_use.tool_use is not None:  # as transformers stores several
                saved = [
                    {"name": "default", "template": template_in_use.text},
                    {"name": "tool_use", "template": template_in_use.tool_use},
                ]
            if tokenizer.config.get("chat_template") != saved:
                tokenizer.config["chat_template"] = saved
                tokenizer.save(self._folder)
        return tokenizer

    @property
    def rendering(self) -> Rendering | None:
        """How examples are tokenized; None for plain text."""
        if self.kind == "text":
            return None
        template = self._data.chat.template
        verbatim = self._recipe.objective.spec.reads_text
        return Rendering(
            template,
            train_on(self._recipe),
            DOCUMENTS_PER_UNIT[self.kind],
            verbatim,
            max_prompt_tokens(self._recipe),
            self._data.chat.template_kwargs,
            vision_source(self._recipe),
        )

    def first_documents(self, count: int) -> Iterator[tuple[SplitName, Document]]:
        """The first documents of each train source, at most `count` in total. Call `begin` before.

        Raises UserError where all sources were asked and none has any.
        """
        is_empty = True
        for source in range(self._num_train):
            share = count // self._num_train + (source < count % self._num_train)
            start = PrepareJournal(identity="", sources="")
            tasks = self._tasks(start, only_source=source) if share else ()
            for entry in islice((entry for task in tasks for entry in task.documents), share):
                is_empty = False
                yield entry
        if is_empty and count >= self._num_train:
            raise self._no_documents(self._summary)

    def run(self) -> Manifest:
        tokenizer = self.begin()
        try:
            self._open_writers()
        except Lost:  # the disk lost writes: begin the shards again
            self._journal = PrepareJournal(
                identity=self._journal.identity,
                sources=self._journal.sources,
                template=self._journal.template,
            )
            self._open_writers()
        try:
            tasks = self._tasks(self._journal)
            first_tasks = list(islice(tasks, 1))
            size = self._size_by(first_tasks)
            workers = count_workers(self._data.num_proc, size, rendered=self.rendering is not None)
            with encoders(self._folder, tokenizer, workers, self.rendering) as using:
                jobs = (
                    (task, [document for _, document in task.documents if document.tokens is None])
                    for task in chain(first_tasks, tasks)
                )
                self._write_all(encode_in_order(jobs, using))
            return self._finish()
        except BaseException:
            for name, writer in self._writers.items():  # keep exactly what is in the journal
                writer.cut_back(getattr(self._journal, name))
            raise

    def _size_by(self, first_tasks: list[EncodeTask]) -> float:
        """Bytes of text that take as long as the whole dataset, pictures included: as many in all rows as in these."""
        text_bytes = sum(dataset.text_bytes for dataset in self._datasets)
        documents = [document for task in first_tasks for _, document in task.documents]
        count = sum(map(_num_pictures, documents))
        bytes_of_rows = sum(len(document.wire) for document in documents)
        return text_bytes * (1 + PICTURE_BYTES * count / max(1, bytes_of_rows))

    def _open_writers(self) -> None:
        dtype = self._tokenizer.dtype
        size = self._limits.shard_tokens
        self._writers = {
            name: SplitWriter(
                self._folder, name, dtype, size, getattr(self._journal, name), self.kind
            )
            for name in SPLITS
        }

    def _find_tokenizer(self) -> Tokenizer:
        """The one in the folder; else the recipe's; else a new one, trained on the train documents."""
        if any((self._folder / name).is_file() for name in TOKENIZER_FILES):
            return load_tokenizer(self._folder)
        tokenizer = find_tokenizer(self._recipe)
        if isinstance(tokenizer, Tokenizer):
            tokenizer.save(self._folder)
            return tokenizer
        self._report("tokenizer", 0, 0)
        return train_tokenizer(
            self._train_texts(), tokenizer, self._folder, partial(self._report, "tokenizer")
        )

    def _train_texts(self) -> Iterator[str]:
        """Texts of the train split, up to `tokenizer_bytes`."""
        bytes_taken = 0
        any_tokens = False
        stats = ReadStats()
        limit = min(self._limits.tokenizer_bytes, self._bytes)
        for source, dataset in enumerate(self._datasets[: self._num_train]):
            for document in read_documents(dataset, on_error=self._data.on_error, stats=stats):
                any_tokens = any_tokens or document.tokens is not None
                if document.tokens is not None or self._split_of(source, document) != "train":
                    continue
                texts = [document.text] if document.example is None else texts_of(document.example)
                bytes_taken += sum(len(text.encode()) for text in texts)
                if bytes_taken > self._limits.tokenizer_bytes:
                    return
                yield from texts
                self._report("tokenizer", bytes_taken, max(limit, bytes_taken))
        if not bytes_taken:
            raise untokenised() if any_tokens else self._no_documents(stats)

    def _no_documents(self, stats: ReadStats) -> UserError:
        journal = self._journal
        return no_documents(
            self._datasets,
            stats.skipped + journal.failed,
            stats.first_skipped or journal.first_failed,
            stats.first_fix,
        )

    def _tasks(
        self, start: PrepareJournal, *, only_source: int | None = None
    ) -> Iterator[EncodeTask]:
        """Batches of about batch_bytes, after the documents in the journal `start`. The end of a source ends its batch.
        `only_source`: batches of that source alone.
        """
        # Counters go on from the journal, so that a resumed `prepare` writes the same manifest.
        num_empty = start.empty
        held_back = start.held_back
        held_files = dict(start.held_files)
        sources = range(len(self._datasets)) if only_source is None else [only_source]
        for source in sources:
            batch = list[tuple[SplitName, Document]]()
            size = 0
            num_read = 0
            for outcome, document in self._sorted_documents(source, start):
                num_read += 1
                if outcome == "written":
                    continue
                if outcome == "empty":
                    num_empty += 1
                elif outcome == "held":
                    held_back += 1
                    file = self._summary.file
                    if file in held_files or len(held_files) < MOST_NAMED:
                        held_files[file] = held_files.get(file, 0) + 1
                elif outcome in SPLITS:
                    batch.append((outcome, document))
                    content = document.wire if document.example else document.text
                    size += len(content) + 4 * len(document.tokens or ())
                    size += PICTURE_BYTES * _num_pictures(document)
                if size >= self._limits.batch_bytes:
                    yield EncodeTask(
                        batch, source, num_read, num_empty, held_back, dict(held_files)
                    )
                    batch = []
                    size = 0
            # Even an empty batch says that the source is done. For sources before the journal's, it
            # already says so.
            if source >= start.source:
                yield EncodeTask(batch, source, num_read, num_empty, held_back, dict(held_files))

    def _sorted_documents(
        self, source: int, start: PrepareJournal
    ) -> Iterator[tuple[str, Document]]:
        """Every document of a source, in order, with what becomes of it: its split, "written" (the shards of the
        journal `start` have it), "empty", "held" (a copy is in the validation set) or "bad" (too long to encode).
        """
        tokenizer = self._tokenizer
        dataset = self._datasets[source]
        on_error = self._data.on_error
        kto_pairs = KtoPairCheck(dataset, partial(self._split_of, source), on_error=on_error)
        num_written = start.read if source == start.source else 0
        documents = read_documents(dataset, on_error=on_error, stats=self._summary)
        for number, raw_document in enumerate(documents, start=1):
            # Padding and skipped rows have no counter in the journal: they are counted again.
            refuse_mixture(raw_document, self.kinds.sources[source])
            document = unpadded(
                raw_document, pad_id=tokenizer.pad_id, ends=(tokenizer.bos_id, tokenizer.eos_id)
            )
            self._summary.padding += document.padding or 0
            # A KTO example takes its second response from the documents before it, so that those
            # go through `kto_pairs` again.
            is_written = source < start.source or number <= num_written
            if is_written and self.kind != "kto":
                yield "written", document
                continue
            # The split is a hash of the row as it was read; padding alone leaves nothing to train on.
            outcome = "empty" if document.tokens == () else self._split_of(source, raw_document)
            if outcome in SPLITS and document.example is None:
                error = tokenizer.too_long(document.text)
                if error is not None:
                    bad_row = BadRow(document.source, error.problem, error.fix)
                    if on_error != "skip":
                        raise bad_row
                    self._summary.skip(bad_row)
                    outcome = "bad"
            if self.kind == "kto" and outcome in SPLITS:
                document = kto_pairs.of(document, outcome)
            yield "written" if is_written else outcome, document

    def _split_of(self, source: int, document: Document) -> str:
        if not document.content and not document.tokens:
            return "empty"
        if source >= self._num_train:
            return "validation"
        key = content_key(document)
        if key in self._splitter.held_keys:
            return "held"
        return "validation" if self._splitter.keeps(key) else "train"

    def _write_all(self, encoded: Iterator[tuple[EncodeTask, EncodedBatch]]) -> None:
        written_at = time.monotonic()
        parts_begun = len(self._journal.train.parts)
        for task, batch in encoded:
            self._last_task = task
            # A source without documents in a split still has its part there, of length 0.
            for writer in self._writers.values():
                for _ in range(parts_begun, task.source + 1):
                    writer.begin_part()
            parts_begun = max(parts_begun, task.source + 1)
            for bad_row in batch.bad_rows.values():
                if self._data.on_error != "skip":
                    raise bad_row
                self._journal.failed += 1
                if not self._journal.first_failed:
                    self._journal.first_failed = f"{bad_row.where}: {bad_row.reason}"
            self._journal.parts = added(self._journal.parts, batch.parts)
            self._check_pictures(batch)
            self._add(task, batch)
            text_bytes = sum(writer.progress.bytes for writer in self._writers.values())
            bytes_done = min(max(text_bytes, self._summary.bytes_read), self._bytes)
            self._report("tokens", bytes_done, self._bytes)
            if time.monotonic() - written_at >= self._limits.journal_seconds:
                self._commit()
                written_at = time.monotonic()

    def _check_pictures(self, batch: EncodedBatch) -> None:
        """By the first pictures, that the model's image processor makes of them what was counted from their sizes.

        Raises UserError.
        """
        pictures = [picture for of_document in batch.pictures for picture in of_document]
        source = (
            vision_source(self._recipe) if pictures and not self._are_pictures_checked else None
        )
        if source is not None:
            source.refuse_miscounted(pictures[:2])
            self._are_pictures_checked = True

    def _add(self, task: EncodeTask, encoded: EncodedBatch) -> None:
        """Append the documents of a batch to their splits, in order. An example has one document per response, a
        refused one none.
        """
        documents_of_split: dict[SplitName, list[EncodedDocument]] = {name: [] for name in SPLITS}
        # The batch of the encoder has only the documents without tokens: `number` counts those.
        responses = DOCUMENTS_PER_UNIT[self.kind]
        bounds = [0, *np.cumsum(encoded.lengths).tolist()]
        number = 0
        for name, document in task.documents:
            if document.tokens is not None:
                documents_of_split[name].append(self._pretokenized(document))
                continue
            if number not in encoded.bad_rows:
                first_response = number * responses
                end_response = first_response + responses
                token_range = slice(int(bounds[first_response]), int(bounds[end_response]))
                loss_mask = np.zeros(0, np.uint8)
                if encoded.loss_mask is not None:
                    loss_mask = encoded.loss_mask[token_range]
                documents_of_split[name].append(
                    EncodedDocument(
                        document,
                        ids=encoded.ids[token_range],
                        lengths=encoded.lengths[first_response:end_response],
                        loss_mask=loss_mask,
                        pictures=encoded.pictures[first_response:end_response],
                    )
                )
            number += 1
        for name, documents in documents_of_split.items():
            if documents:
                self._append(self._writers[name], documents)

    def _pretokenized(self, document: Document) -> EncodedDocument:
        """A document that came as tokens, which it keeps. Without a mask every token is trained on."""
        ids = checked_tokens(document, self._tokenizer)
        loss_mask = np.ones(len(ids), np.uint8)
        if document.loss_mask is not None:
            loss_mask = np.array(document.loss_mask, np.uint8)
        return EncodedDocument(document, ids, np.array([len(ids)], np.uint64), loss_mask, [()])

    def _append(self, writer: SplitWriter, documents: list[EncodedDocument]) -> None:
        ids = np.concatenate([entry.ids for entry in documents])
        lengths = np.concatenate([entry.lengths for entry in documents])
        if self.kind == "text":
            size = sum(len(entry.document.text.encode()) for entry in documents)
            writer.add(ids, lengths, size)
            return
        # A template writes more than the row says: the bytes are those that the tokens stand for.
        size = int(self._tokenizer.token_bytes()[ids].sum())
        pictures = [of_one for entry in documents for of_one in entry.pictures]
        if self.kind == "prompts":
            rows = [_row(entry.document) for entry in documents]
            writer.add(ids, lengths, size, rows=rows, pictures=pictures)
            return
        loss_mask = np.concatenate([entry.loss_mask for entry in documents])
        examples = [entry.document.example for entry in documents]
        desirable = [example is not None and example.desirable is True for example in examples]
        kto_labels = np.repeat(np.array(desirable, np.uint8), DOCUMENTS_PER_UNIT[self.kind])
        writer.add(ids, lengths, size, loss_mask, kto_labels, pictures=pictures)

    def _commit(self) -> None:
        """Flush the shards, then write the journal: after a kill, `prepare` resumes from here."""
        last_task = self._last_task
        splits = {name: writer.sync() for name, writer in self._writers.items()}
        counters = {
            "source": last_task.source,
            "read": last_task.num_read,
            "empty": last_task.num_empty,
            "held_back": last_task.held_back,
            "held_files": last_task.held_files,
        }
        self._journal = self._journal.model_copy(update=splits | counters)
        write_durably(self._folder / JOURNAL, self._journal.model_dump_json())

    def _finish(self) -> Manifest:
        """Write checksums, sources.jsonl and the manifest; remove the journal."""
        if not any(writer.progress.documents for writer in self._writers.values()):
            raise self._no_documents(self._summary)
        self._commit()
        if any(writer.progress.pictures for writer in self._writers.values()):
            source = vision_source(self._recipe)
            assert source is not None, "it has made pictures of them"
            source.save(self._folder)
        weights = [dataset.weight for dataset in self._datasets]
        splits = {
            name: writer.finish(weights, self.kinds.plain) for name, writer in self._writers.items()
        }
        sources = record_sources(
            self._datasets, self._states, self._folder, partial(self._report, "checksums")
        )
        template = self._data.chat.template
        summary = self._summary
        journal = self._journal
        tokenizer = self._tokenizer
        verbatim = self._recipe.objective.spec.reads_text
        formatted = self.kinds.formatted(template, tokenizer.config, verbatim=verbatim)
        manifest = Manifest(
            recipe=self._name,
            identity=self._identity,
            tokenizer_hash=tokenizer.hash,
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            unk_id=tokenizer.unk_id,
            dtype=tokenizer.dtype,
            shard_tokens=self._limits.shard_tokens,
            train=splits["train"],
            validation=splits["validation"],
            sources=sources,
            skipped=summary.skipped + journal.failed,
            first_skipped=summary.first_skipped or journal.first_failed,
            empty=journal.empty,
            held_back=journal.held_back,
            held_files=tuple(journal.held_files.items()),
            kind=self.kind,
            formats=tuple(sorted(summary.formats)),
            unread_columns=tuple(summary.use.unread_columns),
            unread_turn_keys=tuple(summary.use.unread_turn_keys),
            template_parts=tuple(journal.parts.items()),
            padding=summary.padding,
            turns=formatted,
            template=journal.template,
            texts=self.kinds.texts,
            snapshot=file_record(self._folder / FINGERPRINT),
        )
        manifest = write_manifest(self._folder, manifest)
        (self._folder / JOURNAL).unlink()
        return manifest
