"""The work of `prepare`, from where its journal stands to the manifest.

Order of the folder's life: preparing.json (the journal: whose folder this is, and how far it is), the tokenizer,
shards that grow, sources.jsonl, manifest.json. Where the manifest is, all is there.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, final

import numpy as np
from pydantic import BaseModel, ValidationError

from bloomery.core.errors import UserError
from bloomery.core.units import MIB
from bloomery.data.chat.detect import wants_of
from bloomery.data.chat.examples import texts_of
from bloomery.data.chat.templates import find_template
from bloomery.data.prepare import fingerprint as snapshot
from bloomery.data.prepare.examples import (
    Twins,
    add_examples,
    checked_tokens,
    keep_template,
    kinds_of,
    refuse_mixture,
    train_on,
    verbatim,
)
from bloomery.data.prepare.split import Splitter, content_key, make_splitter, validation_corpora
from bloomery.data.prepare.workers import (
    Encoded,
    Rendering,
    count_workers,
    encode_in_order,
    encoders,
    packed_example,
    packed_text,
)
from bloomery.data.shards.format import (
    ANSWERS,
    JOURNAL,
    MANIFEST,
    Manifest,
    Name,
    ShardKind,
    file_record,
    write_manifest,
)
from bloomery.data.shards.writer import Lost, Progress, SplitWriter
from bloomery.data.sources.documents import Corpus, Document, Tally, open_corpora, read_documents, unpadded
from bloomery.data.sources.streams import Flaw
from bloomery.data.tokenizer.resolve import find_tokenizer
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, write_file
from bloomery.data.tokenizer.training import train_tokenizer
from bloomery.recipe.schema import Recipe


class Journal(BaseModel):
    """How far an unfinished `prepare` is: `read` documents of source `source` went into the splits."""

    identity: str
    sources: str
    source: int = 0
    read: int = 0
    empty: int = 0
    held_back: int = 0
    failed: int = 0  # examples that could not be rendered
    first_failed: str = ""
    train: Progress = Progress()
    validation: Progress = Progress()


def open_journal(folder: Path, *, identity: str, sources: str) -> Journal:
    """The journal that stands there when it is about the same recipe and files, else a fresh one in a cleared
    folder. A finished folder has none and gets none. Raises UserError for a folder that holds something else.
    """
    fresh = Journal(identity=identity, sources=sources)
    path = folder / JOURNAL
    if (folder / MANIFEST).is_file():
        return fresh
    if path.is_file():
        try:
            found = Journal.model_validate_json(path.read_bytes())
        except ValidationError:
            found = None
        if found and (found.identity, found.sources) == (fresh.identity, fresh.sources):
            return found
        _clear(folder)
    foreign = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if foreign:
        raise UserError(
            f"holds files that no `prepare` wrote, such as {foreign[0]}",
            where=str(folder),
            remedy="set data.prepared to an empty or a new folder",
        )
    write_file(path, fresh.model_dump_json().encode())
    return fresh


def _clear(folder: Path) -> None:
    """Removes an unfinished attempt; the journal goes last, as it says whose files these are."""
    patterns = [
        "train-*.bin",
        "validation-*.bin",
        "tokenizer*",
        snapshot.SNAPSHOT,
        "special_tokens_map.json",
        JOURNAL,
    ]
    for path in [path for pattern in patterns for path in sorted(folder.glob(pattern))]:
        path.unlink()


SPLITS: tuple[Name, Name] = ("train", "validation")
Report = Callable[[str, float, float], None]  # phase, done, total (0: unknown)


@dataclass(frozen=True)
class Limits:
    """Sizes that tests make small."""

    shard_tokens: int = 100_000_000
    batch_bytes: int = MIB
    tokenizer_bytes: int = 2_000_000_000
    journal_seconds: float = 5.0


def streams(recipe: Recipe) -> list[Corpus]:
    """The sources, and behind them those of validation where it has its own."""
    wants = wants_of(recipe)
    return open_corpora(recipe.data, wants) + validation_corpora(recipe.data, wants)


@dataclass
class Job:
    """A batch on its way to the shards, and the journal's counters behind it."""

    documents: list[tuple[Name, Document]]
    source: int
    read: int
    empty: int
    held_back: int

    def texts(self, kind: ShardKind) -> list[str]:
        """What is encoded: texts, or examples and texts among them as they travel."""
        found = [document for _, document in self.documents if document.tokens is None]
        if kind == "text":
            return [document.text for document in found]
        return [
            packed_text(document.text) if document.example is None else packed_example(document.example, document.text)
            for document in found
        ]


def untokenised() -> UserError:
    """For ids of a tokenizer that the recipe does not name."""
    return UserError(
        "the text is token ids already, and no tokenizer is named",
        where="tokenizer.from",
        remedy="set it to the folder of the tokenizer that made them",
    )


def no_text(corpora: list[Corpus], skipped: int, first: str) -> UserError:
    told = f"; {skipped} rows were skipped, the first: {first}" if skipped else ""
    return UserError(
        f"there is no text in it{told}",
        where=f"data: {', '.join(corpus.path for corpus in corpora)}",
        remedy="put text there, or mend data.path and data.glob",
    )


@final
class Work:
    """One `prepare` from where the journal stands to the manifest."""

    def __init__(self, recipe: Recipe, name: str, identity: str, folder: Path, report: Report, limits: Limits) -> None:
        self._recipe, self._name, self._identity = recipe, name, identity
        self._folder, self._report, self._limits = folder, report, limits
        self._data = recipe.data
        self._wants = wants_of(recipe)
        self._corpora = streams(recipe)
        self._num_train = len(self._corpora) - len(validation_corpora(self._data, self._wants))
        self._seen = snapshot.look(self._corpora)
        self._journal = open_journal(folder, identity=identity, sources=snapshot.digest(self._seen))
        self._failed, self._first_failed = self._journal.failed, self._journal.first_failed
        self._tally = Tally()
        self.kinds = kinds_of(self._corpora, on_error=self._data.on_error)
        self.kind = self.kinds.whole
        self._bytes = sum(entry.bytes for entry in self._seen)

    def begin(self) -> tuple[Splitter, Tokenizer]:
        """What comes before the shards: how documents are split, and the tokenizer, which is kept in the folder."""
        splitter = make_splitter(self._corpora[: self._num_train], self._data, self._wants)
        tokenizer = self._tokenizer(splitter)
        self._too_long = tokenizer.too_long
        self._unpadded = partial(unpadded, pad_id=tokenizer.pad_id, ends=(tokenizer.bos_id, tokenizer.eos_id))
        if self.rendering is not None:
            keep_template(tokenizer, self.rendering, self._folder)
        return splitter, tokenizer

    @property
    def rendering(self) -> Rendering | None:
        """How examples become tokens; None for plain text."""
        if self.kind == "text":
            return None
        chat = self._data.chat
        return Rendering(chat.template, train_on(self._recipe), ANSWERS[self.kind], verbatim(self._recipe))

    def first_documents(self, splitter: Splitter, count: int) -> Iterator[tuple[Name, Document]]:
        """The first of each source that is trained on, `count` in all as far as there are so many."""
        for source in range(self._num_train):
            share = count // self._num_train + (source < count % self._num_train)
            jobs = self._jobs(splitter, Journal(identity="", sources=""), only=source) if share else ()
            yield from islice((found for job in jobs for found in job.documents), share)

    def run(self) -> Manifest:
        splitter, tokenizer = self.begin()
        writers = self._writers(tokenizer)
        try:
            size = sum(corpus.text_bytes for corpus in self._corpora)
            workers = count_workers(self._data.workers, size, rendered=self.rendering is not None)
            with encoders(self._folder, tokenizer, workers, self.rendering) as using:
                jobs = ((job, job.texts(self.kind)) for job in self._jobs(splitter, self._journal))
                self._write_all(encode_in_order(jobs, using), writers, tokenizer)
            return self._finish(writers, tokenizer)
        except BaseException:
            for name, writer in writers.items():  # nothing half-written stays; what the journal vouches for does
                writer.cut_back(getattr(self._journal, name))
            raise

    def _tokenizer(self, splitter: Splitter) -> Tokenizer:
        """The one that is there; else the recipe's own; else one trained on the train documents."""
        if any((self._folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            return load_tokenizer(self._folder)
        found = find_tokenizer(self._recipe)
        if isinstance(found, Tokenizer):
            found.save(self._folder)
            return found
        self._report("tokenizer", 0, 0)
        return train_tokenizer(self._train_texts(splitter), found, self._folder, partial(self._report, "tokenizer"))

    def _train_texts(self, splitter: Splitter) -> Iterator[str]:
        """Texts of the train split, up to a sample that no vocabulary outgrows."""
        taken, any_tokens, tally = 0, False, Tally()
        limit = min(self._limits.tokenizer_bytes, self._bytes)
        for corpus in self._corpora[: self._num_train]:
            for document in read_documents(corpus, on_error=self._data.on_error, tally=tally):
                any_tokens = any_tokens or document.tokens is not None
                key = content_key(document)
                if document.tokens is not None or splitter.keeps(key) or key in splitter.held:
                    continue
                texts = [document.text] if document.example is None else texts_of(document.example)
                taken += sum(len(text.encode()) for text in texts)
                if taken > self._limits.tokenizer_bytes:
                    return
                yield from texts
                self._report("tokenizer", taken, max(limit, taken))
        if not taken:
            raise untokenised() if any_tokens else self._empty(tally)

    def _empty(self, tally: Tally) -> UserError:
        return no_text(self._corpora, tally.skipped + self._failed, tally.first_skipped or self._first_failed)

    def _writers(self, tokenizer: Tokenizer) -> dict[Name, SplitWriter]:
        def opened() -> dict[Name, SplitWriter]:
            return {
                name: SplitWriter(
                    self._folder,
                    name,
                    tokenizer.dtype,
                    self._limits.shard_tokens,
                    getattr(self._journal, name),
                    self.kind,
                )
                for name in SPLITS
            }

        try:
            return opened()
        except Lost:  # the disk forgot what was written: begin the shards again
            self._journal = Journal(identity=self._journal.identity, sources=self._journal.sources)
            self._failed, self._first_failed = 0, ""
            return opened()

    def _jobs(self, splitter: Splitter, start: Journal, *, only: int | None = None) -> Iterator[Job]:
        """Batches of some batch_bytes from where the journal stands; a source ends its batch. Documents before that
        are read and passed over. `only`: of one source.
        """
        empty, held_back = start.empty, start.held_back
        for source in range(len(self._corpora)) if only is None else (only,):
            batch, size, read = list[tuple[Name, Document]](), 0, 0
            passed = start.read if source == start.source else 0
            corpus = self._corpora[source]
            split_of = partial(self._split_of, source, splitter=splitter)
            twins = Twins(corpus, split_of, on_error=self._data.on_error) if self.kind == "kto" else None
            for document in read_documents(corpus, on_error=self._data.on_error, tally=self._tally):
                read += 1
                refuse_mixture(document, self.kinds.sources[source])
                behind = source < start.source or read <= passed
                whole, document = document, self._unpadded(document)
                self._tally.padding += document.padding or 0
                if behind and twins is None:
                    continue
                name = split_of(whole) if document.tokens != () else "empty"
                if name in SPLITS and document.example is None and (error := self._too_long(document.text)) is not None:
                    flaw, name = Flaw(document.source, error.problem, error.remedy), "flawed"
                    if self._data.on_error != "skip":
                        raise flaw.error()
                    self._tally.skip(flaw)
                twin = twins.of(document, name) if twins is not None and name in SPLITS else document
                if behind:
                    continue
                empty, held_back = empty + (name == "empty"), held_back + (name == "held")
                if name in SPLITS:
                    batch.append((name, twin))
                    size += len(document.text) + 4 * len(document.tokens or ())
                if size >= self._limits.batch_bytes:
                    yield Job(batch, source, read, empty, held_back)
                    batch, size = [], 0
            if source >= start.source:
                yield Job(batch, source, read, empty, held_back)

    def _split_of(self, source: int, document: Document, splitter: Splitter) -> str:
        if not document.text and not document.tokens:
            return "empty"
        if source >= self._num_train:
            return "validation"
        key = content_key(document)
        if key in splitter.held:
            return "held"
        return "validation" if splitter.keeps(key) else "train"

    def _write_all(
        self, encoded: Iterator[tuple[Job, Encoded]], writers: dict[Name, SplitWriter], tokenizer: Tokenizer
    ) -> None:
        written, begun = time.monotonic(), len(self._journal.train.parts)
        for job, ids in encoded:
            self._last = job
            while begun <= job.source:
                for writer in writers.values():
                    writer.begin_part()
                begun += 1
            if self.kind == "text":
                _add(job, ids, writers, tokenizer)
            else:
                self._refuse_or_count(ids)
                add_examples(job.documents, ids, writers, tokenizer, ANSWERS[self.kind])
            text_bytes = sum(writer.progress.bytes for writer in writers.values())
            self._report("tokens", min(max(text_bytes, self._tally.bytes_read), self._bytes), self._bytes)
            if time.monotonic() - written >= self._limits.journal_seconds:
                self._commit(job, writers)
                written = time.monotonic()

    def _refuse_or_count(self, encoded: Encoded) -> None:
        """Raises UserError for an example that could not be rendered, unless such are skipped."""
        for flaw in encoded.flaws.values():
            if self._data.on_error != "skip":
                raise flaw.error()
            self._failed += 1
            self._first_failed = self._first_failed or f"{flaw.where}: {flaw.problem}"

    def _commit(self, job: Job, writers: dict[Name, SplitWriter]) -> None:
        counters: dict[str, Any] = {name: writer.sync() for name, writer in writers.items()}
        counters |= {"source": job.source, "read": job.read, "empty": job.empty, "held_back": job.held_back}
        counters |= {"failed": self._failed, "first_failed": self._first_failed}
        self._journal = self._journal.model_copy(update=counters)
        write_file(self._folder / JOURNAL, self._journal.model_dump_json().encode())

    def _finish(self, writers: dict[Name, SplitWriter], tokenizer: Tokenizer) -> Manifest:
        """Checksums, sources.jsonl, the manifest; then the journal is not needed."""
        if not any(writer.progress.documents for writer in writers.values()):
            raise self._empty(self._tally)
        self._commit(self._last, writers)
        weights = [corpus.weight for corpus in self._corpora]
        splits = {name: writer.finish(weights, self.kinds.plain) for name, writer in writers.items()}
        sources = snapshot.record(
            self._corpora, self._seen, self._folder, lambda done, total: self._report("checksums", done, total)
        )
        chat = self._data.chat
        formatted = self.kinds.formatted(chat.template, tokenizer.config, verbatim=verbatim(self._recipe))
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
            skipped=self._tally.skipped + self._failed,
            first_skipped=self._tally.first_skipped or self._first_failed,
            empty=self._last.empty,
            held_back=self._last.held_back,
            kind=self.kind,
            formats=tuple(sorted(self._tally.formats)),
            padding=self._tally.padding,
            turns=formatted,
            template=find_template(chat.template, tokenizer.config).origin if formatted else "",
            texts=self.kinds.texts,
            snapshot=file_record(self._folder / snapshot.SNAPSHOT),
        )
        manifest = write_manifest(self._folder, manifest)
        (self._folder / JOURNAL).unlink()
        return manifest


def _add(job: Job, encoded: Encoded, writers: dict[Name, SplitWriter], tokenizer: Tokenizer) -> None:
    """Each document of a batch into its split, in order."""
    ends, text = np.cumsum(encoded.lengths).tolist(), 0
    ids: dict[Name, list[np.ndarray[Any, np.dtype[Any]]]] = {name: [] for name in SPLITS}
    sizes: dict[Name, int] = dict.fromkeys(SPLITS, 0)
    for name, document in job.documents:
        if document.tokens is None:
            ids[name].append(encoded.ids[ends[text] - int(encoded.lengths[text]) : ends[text]])
            sizes[name] += len(document.text.encode())
            text += 1
        else:
            ids[name].append(checked_tokens(document, tokenizer))
    for name, parts in ids.items():
        if parts:
            lengths = np.array([len(part) for part in parts], np.uint64)
            writers[name].add(np.concatenate(parts), lengths, sizes[name])
