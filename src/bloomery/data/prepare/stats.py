"""The health of prepared text: what is repeated, cut, foreign or not learned, and what that means."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.units import counted
from bloomery.data.loading.packing import Layout, Rows
from bloomery.data.shards.format import ANSWERS, Manifest, ShardKind, Split, open_split, read_manifest
from bloomery.data.tokenizer.tokenizer import Tokenizer

SAMPLE_TOKENS = 2**20  # of a split: the entropy of 50,000 tokens to about 0.02 nats
STRETCHES = 64  # that the sample is taken in, evenly over the split
SAMPLE_DOCUMENTS = 20_000  # in order: repeats of a file usually lie near each other or everywhere


@dataclass(frozen=True)
class Traits:
    """`unigram_nats`: the loss of a model that knows how often each token occurs, and nothing else."""

    tokens: int
    unigram_nats: float
    bytes_per_token: float | None  # None: the text came as token ids
    duplicates: float  # share of the sampled documents that an earlier one repeats


def read_traits(prepared: Path) -> Traits:
    """Of the training split, from a sample. Raises UserError as `read_manifest` does."""
    split = open_split(prepared, "train", read_manifest(prepared))
    record = split.record
    size = record.bytes / record.tokens if record.bytes and record.tokens else None
    return Traits(record.tokens, unigram_nats(split), size, duplicates(split))


def unigram_nats(split: Split) -> float:
    """Shannon's entropy of the learned tokens, with Miller's (1955) correction of (kinds - 1) / 2N for the sample's
    size.
    """
    total = len(split.tokens)
    each = min(total, SAMPLE_TOKENS) // STRETCHES or total
    starts = range(0, total, max(each, total // STRETCHES)) if total else ()
    ids = np.concatenate([_learned(split, start, start + each) for start in starts]) if total else np.zeros(0, np.int64)
    counts = np.unique(ids, return_counts=True)[1] / max(1, len(ids))
    return float(-(counts * np.log(counts)).sum() + (len(counts) - 1) / (2 * max(1, len(ids))))


def _learned(split: Split, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    ids = split.tokens[start:stop]
    return ids if split.learned is None else ids[split.learned[start:stop] > 0]


def duplicates(split: Split) -> float:
    """Share of the first documents that repeat one before them, token for token."""
    seen = {blake2b(split.document(i).tobytes(), digest_size=16).digest() for i in range(_looked_at(split))}
    return 1 - len(seen) / max(1, _looked_at(split))


def _looked_at(split: Split) -> int:
    within = int(np.searchsorted(split.bounds, SAMPLE_TOKENS, side="right"))
    return min(len(split), SAMPLE_DOCUMENTS, max(1, within))


Lengths = np.ndarray[Any, np.dtype[np.int64]]
_CHUNK = 2**20  # tokens looked at together
UNITS: dict[ShardKind, str] = {
    "text": "documents", "chat": "conversations", "pairs": "pairs", "kto": "marked answers",
}  # fmt: skip


def named(manifest: Manifest) -> str:
    """What one calls the units of all sources together."""
    return "texts" if manifest.mixed else UNITS[manifest.kind]


@dataclass(frozen=True)
class Fill:
    """How structured text is laid into rows: rows, positions that hold tokens, and what was cut or left out."""

    rows: int
    positions: int
    truncated: int
    cut: int
    dropped: int
    unlearned: int


@dataclass(frozen=True)
class Health:
    """The train split in figures; `lengths` are (tokens, up to and including; units), shortest first. A unit is a
    document, a conversation, or a pair.
    """

    kind: ShardKind
    units: int
    empty: int
    skipped: int
    held_back: int
    duplicates: int  # units equal to an earlier one of their split
    unknown: int  # tokens that stand for what the tokenizer does not know
    tokens: int
    rows: int
    longer: int  # units longer than a row
    cut: int  # tokens that no row holds
    double_bos: int  # texts that begin with two
    missing_eos: int  # texts of which no token that could end them is learned
    foreign_eos: int  # texts that end in another token than the tokenizer's end token
    lengths: tuple[tuple[int, int], ...]
    fill: Fill | None = None  # of structured text
    named: str = "documents"
    warnings: tuple[str, ...] = field(default=())


def fill_of(split: Split, *, sequence_length: int, layout: Layout) -> Fill | None:
    """None for plain text, and for the stream of the layout fixed."""
    rows = Rows(split, sequence_length=sequence_length, layout=layout, pad_id=None)
    if not rows.fitted:
        return None
    plain = [_labels(split, part) for part, record in enumerate(split.record.parts) if record.plain]
    longer = [np.maximum(labels - sequence_length, 0) for labels in plain if layout == "padded"]
    cut = sum(int(more.sum()) for more in longer)
    texts = sum(int(labels.sum()) if layout == "padded" else max(int((labels + 1).sum()) - 1, 0) for labels in plain)
    return Fill(
        rows=sum(rows.counts),
        positions=sum(int(fitted.lengths[fitted.units].sum()) for fitted in rows.fitted) + texts - cut,
        truncated=sum(fitted.truncated for fitted in rows.fitted) + sum(int((more > 0).sum()) for more in longer),
        cut=sum(fitted.cut for fitted in rows.fitted) + cut,
        dropped=sum(fitted.dropped for fitted in rows.fitted),
        unlearned=sum(fitted.unlearned for fitted in rows.fitted),
    )


def _labels(split: Split, part: int) -> Lengths:
    """Of each text of a source: the tokens after its first."""
    (_, begin), (_, end) = split.part_starts[part], split.part_starts[part + 1]
    bounds: Lengths = np.asarray(split.bounds[begin : end + 1]).astype(np.int64)
    return bounds[1:] - bounds[:-1] - 1


def health(
    folder: Path,
    manifest: Manifest,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    layout: Layout,
    missing: list[str] | None = None,
) -> Health:
    """Reads the shards of the train split once. `missing`: markup of the chat template that is no token."""
    split = Split(folder, manifest, "train")
    bounds: Lengths = np.asarray(split.bounds).astype(np.int64)[:: ANSWERS[split.kind]]
    lengths: Lengths = bounds[1:] - bounds[:-1]
    rows = Rows(split, sequence_length=sequence_length, layout=layout, pad_id=None)
    fill = fill_of(split, sequence_length=sequence_length, layout=layout)
    longest = sequence_length if fill else sequence_length + 1  # of plain text the last token is a label alone
    longer = lengths[lengths > longest]
    lost = int((longer - longest).sum()) if layout == "padded" else 0
    ends = {tokenizer.id_of(name) for name in tokenizer.control_tokens()}
    duplicates, double_bos, missing_eos, foreign_eos = _texts(split, manifest, {end for end in ends if end is not None})
    found = Health(
        kind=split.kind, units=len(lengths), empty=manifest.empty, skipped=manifest.skipped,
        held_back=manifest.held_back, duplicates=duplicates, unknown=_unknown(split, manifest.unk_id),
        tokens=manifest.train.tokens, rows=sum(rows.counts), longer=len(longer), cut=fill.cut if fill else lost,
        double_bos=double_bos, missing_eos=missing_eos, foreign_eos=foreign_eos, lengths=_histogram(lengths), fill=fill,
        named=named(manifest),
    )  # fmt: skip
    warnings = (
        *_warnings(found, manifest, sequence_length),
        *_chat_warnings(found, manifest, tokenizer, missing or []),
        *_one_sided(split),
    )
    return Health(**{**vars(found), "warnings": warnings})


def _texts(split: Split, manifest: Manifest, ends: set[int]) -> tuple[int, int, int, int]:
    """Units that repeat an earlier one; texts that begin with two begin tokens; texts without a learned end; texts
    that end in another of `ends` than the tokenizer's. Of text beside conversations the ends are not looked at.
    """
    keys, together = array("Q"), ANSWERS[split.kind]
    double, endless, foreign = 0, 0, 0
    for unit in range(len(split) // together):
        digest = blake2b(digest_size=8)
        for index in range(unit * together, (unit + 1) * together):
            ids = split.document(index)
            digest.update(ids.astype(np.uint32).tobytes() + b"|")
            double += manifest.bos_id is not None and ids[:2].tolist() == [manifest.bos_id] * 2
            if split.is_plain(index):
                continue
            learned = _where_it_ends(split, index, ids)
            if manifest.eos_id in learned or not learned or (manifest.kind == "kto" and index % 2):
                continue
            ended = bool(ends & learned)
            foreign, endless = foreign + ended, endless + (not ended)
        keys.append(int.from_bytes(digest.digest(), "big"))
    repeated = len(keys) - len(np.unique(np.frombuffer(keys, np.uint64))) if keys else 0
    return repeated, double, endless, foreign


def _where_it_ends(split: Split, index: int, ids: Lengths) -> set[int]:
    """The learned tokens of a text; of plain text its first and last, as where begin and end are one token it stands
    first.
    """
    if split.learned is None:
        return {int(ids[0]), int(ids[-1])} if len(ids) else set()
    flags = split.learned[int(split.bounds[index]) : int(split.bounds[index + 1])] > 0
    return set(ids[flags].tolist())


def _unknown(split: Split, unk_id: int | None) -> int:
    if unk_id is None:
        return 0
    starts = range(0, len(split.tokens), _CHUNK)
    return sum(int((split.tokens[start : start + _CHUNK] == unk_id).sum()) for start in starts)


def _histogram(lengths: Lengths) -> tuple[tuple[int, int], ...]:
    """Units by length, in powers of two."""
    if not len(lengths):
        return ()
    edges = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    return tuple((2 ** int(edge), int((edges == edge).sum())) for edge in range(edges.min(), edges.max() + 1))


def _one_sided(split: Split) -> Iterator[str]:
    """Of marked answers that are all marked alike."""
    marks = set() if split.marks is None else set(np.asarray(split.marks)[:: ANSWERS[split.kind]].tolist())
    if marks == {1}:
        yield "every answer is marked as desirable: nothing tells kto what to avoid, and sft learns them with less work"
    if marks == {0}:
        yield "every answer is marked as undesirable: there is nothing to learn instead; are the labels turned round?"


def _warnings(found: Health, manifest: Manifest, sequence_length: int) -> Iterator[str]:
    units = found.named
    if found.duplicates > 0.01 * found.units:
        yield f"{found.duplicates / found.units:.0%} of the {units} repeat an earlier one word for word"
    if found.unknown > 0.001 * found.tokens:
        yield f"{found.unknown / found.tokens:.1%} of the tokens are unknown to the tokenizer, made for other text"
    if found.cut > 0.01 * found.tokens:
        mend = "packed would keep them" if found.kind == "text" else "a larger data.sequence_length would keep them"
        yield f"{found.cut / found.tokens:.0%} of the tokens are cut off: {mend}"
    if found.skipped:
        yield f"{counted(found.skipped, 'rows')} skipped, the first: {manifest.first_skipped}"
    if 0 < manifest.validation.tokens < sequence_length:
        yield f"validation is {manifest.validation.tokens:,} tokens, less than one sequence: its loss will be noise"
    if not manifest.validation.tokens:
        yield "there is no validation text: nothing will tell learning from memorising"
    if found.double_bos:
        texts = counted(found.double_bos, "texts")
        yield f"two begin tokens (id {manifest.bos_id}) stand before {texts}: no model was trained so"


def _chat_warnings(found: Health, manifest: Manifest, tokenizer: Tokenizer, missing: list[str]) -> Iterator[str]:
    asked = sum(part.documents for part in manifest.train.parts if not part.plain)
    texts, units = asked // (2 if found.kind == "kto" else 1), UNITS[found.kind]  # a marked answer's twin is none
    end = "(the tokenizer has none)" if manifest.eos_id is None else tokenizer.decode([manifest.eos_id])
    if found.kind == "text" and manifest.eos_id is not None and (found.missing_eos or found.foreign_eos):
        yield f"{found.missing_eos + found.foreign_eos:,} of {texts:,} texts do not end in the end token {end}"
    if found.kind != "text" and found.missing_eos:
        yield (
            f"{found.missing_eos:,} of {texts:,} answers teach no end, so the model will not know when to stop: "
            f"the chat template must end a turn with the end token {end} or another special one"
        )
    if found.kind != "text" and found.foreign_eos:
        yield (
            f"{found.foreign_eos:,} of {texts:,} answers end in the template's own token and not in the end token "
            f"{end}: bloomery chat stops there, other programs if eos_token in tokenizer_config.json names it"
        )
    if found.fill and found.fill.unlearned:
        yield f"left out: {counted(found.fill.unlearned, units)} with nothing to learn; see data.chat.train_on"
    if found.fill and found.fill.dropped:
        yield f"left out: {counted(found.fill.dropped, units)} with nothing to learn within data.sequence_length"
    if missing:
        yield (
            f"the chat template writes {', '.join(missing)}, which the tokenizer does not know as single tokens: "
            "add them with tokenizer.add_tokens, or set data.chat.template to one that fits the tokenizer"
        )
    if manifest.eos_id is not None and manifest.eos_id == manifest.pad_id:
        yield (
            f"the end token {end} is the padding token, too: harmless here, where padding is never learned; programs "
            "that mask padding by its id would never teach a model to stop"
        )
