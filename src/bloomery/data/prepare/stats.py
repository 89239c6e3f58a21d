"""What training will see of prepared text: single documents as tokens, and the health of all of it."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.units import counted
from bloomery.data.chat.render import EncodedExample, EncodedText, Renderer
from bloomery.data.loading.packing import Layout, PackedSequences, truncated_lengths
from bloomery.data.prepare.kinds import kind_of
from bloomery.data.prepare.pipeline import Preparation
from bloomery.data.shards.format import DOCUMENTS_PER_UNIT, Manifest, ShardKind, Split, open_split, read_manifest
from bloomery.data.sources.documents import Document
from bloomery.data.sources.readers import BadRow
from bloomery.data.tokenizer.tokenizer import Tokenizer

SAMPLE_TOKENS = 2**20  # of a split: the entropy of 50,000 tokens to about 0.02 nats
STRETCHES = 64  # that the sample is taken in, evenly over the split
SAMPLE_DOCUMENTS = 20_000  # in order: repeats of a file usually lie near each other or everywhere


@dataclass(frozen=True)
class DatasetStats:
    """`unigram_nats`: the loss of a model that knows how often each token occurs, and nothing else."""

    tokens: int
    unigram_nats: float
    bytes_per_token: float | None  # None: the text came as token ids
    duplicates: float  # share of the sampled documents that an earlier one repeats


def read_stats(prepared: Path) -> DatasetStats:
    """Of the training split, from a sample. Raises UserError as `read_manifest` does."""
    split = open_split(prepared, "train", read_manifest(prepared))
    record = split.record
    size = record.bytes / record.tokens if record.bytes and record.tokens else None
    return DatasetStats(record.tokens, unigram_nats(split), size, duplicates(split))


def unigram_nats(split: Split) -> float:
    """Shannon's entropy of the learned tokens, with Miller's (1955) correction of (kinds - 1) / 2N for the sample's
    size.
    """
    total = len(split.tokens)
    each = min(total, SAMPLE_TOKENS) // STRETCHES or total
    ids = [np.zeros(0, np.int64)]
    for start in range(0, total, max(each, total // STRETCHES)) if total else ():
        stretch = split.tokens[start : start + each]
        ids.append(stretch if split.loss_mask is None else stretch[split.loss_mask[start : start + each] > 0])
    loss_mask = np.concatenate(ids)
    counts = np.unique(loss_mask, return_counts=True)[1] / max(1, len(loss_mask))
    return float(-(counts * np.log(counts)).sum() + (len(counts) - 1) / (2 * max(1, len(loss_mask))))


def duplicates(split: Split) -> float:
    """Share of the first documents that repeat one before them, token for token."""
    within = int(np.searchsorted(split.bounds, SAMPLE_TOKENS, side="right"))
    count = min(len(split), SAMPLE_DOCUMENTS, max(1, within))
    seen = {blake2b(split.document(index).tobytes(), digest_size=16).digest() for index in range(count)}
    return 1 - len(seen) / max(1, count)


Lengths = np.ndarray[Any, np.dtype[np.int64]]
_CHUNK = 2**20  # tokens looked at together
UNITS: dict[ShardKind, str] = {
    "text": "documents", "chat": "conversations", "pairs": "pairs", "kto": "marked answers",
}  # fmt: skip


def unit_name(manifest: Manifest) -> str:
    """What one calls the units of all sources together."""
    return "texts" if manifest.mixed else UNITS[manifest.kind]


@dataclass(frozen=True)
class PackingStats:
    """How structured text is laid into rows: rows, positions that hold tokens, and what was cut or left out."""

    rows: int
    positions: int
    truncated: int
    cut: int
    dropped: int
    all_masked: int


@dataclass(frozen=True)
class DatasetCheck:
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
    other_eos: int  # texts that end in another token than the tokenizer's end token
    lengths: tuple[tuple[int, int], ...]
    packing: PackingStats | None = None  # of structured text
    unit_name: str = "documents"
    warnings: tuple[str, ...] = field(default=())


def packing_stats(split: Split, *, sequence_length: int, layout: Layout) -> PackingStats | None:
    """None for plain text, and for the stream of the layout fixed."""
    rows = PackedSequences(split, sequence_length=sequence_length, layout=layout, pad_id=None)
    if not rows.packed:
        return None
    plain = list[Lengths]()  # of each text of a source: the tokens after its first
    for part, (_, begin), (_, end) in zip(split.record.parts, split.part_starts, split.part_starts[1:], strict=False):
        if part.plain:
            bounds = np.asarray(split.bounds[begin : end + 1]).astype(np.int64)
            plain.append(bounds[1:] - bounds[:-1] - 1)
    longer = [np.maximum(labels - sequence_length, 0) for labels in plain if layout == "padded"]
    cut = sum(int(more.sum()) for more in longer)
    texts = sum(int(labels.sum()) if layout == "padded" else max(int((labels + 1).sum()) - 1, 0) for labels in plain)
    return PackingStats(
        rows=sum(rows.counts),
        positions=sum(int(packed.lengths[packed.units].sum()) for packed in rows.packed) + texts - cut,
        truncated=sum(packed.truncated for packed in rows.packed) + sum(int((more > 0).sum()) for more in longer),
        cut=sum(packed.cut for packed in rows.packed) + cut,
        dropped=sum(packed.dropped for packed in rows.packed),
        all_masked=sum(packed.all_masked for packed in rows.packed),
    )


def check_dataset(
    folder: Path,
    manifest: Manifest,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    layout: Layout,
    missing: list[str] | None = None,
) -> DatasetCheck:
    """Reads the shards of the train split once. `missing`: markup of the chat template that is no token."""
    split = Split(folder, manifest, "train")
    bounds: Lengths = np.asarray(split.bounds).astype(np.int64)[:: DOCUMENTS_PER_UNIT[split.kind]]
    lengths: Lengths = bounds[1:] - bounds[:-1]
    rows = PackedSequences(split, sequence_length=sequence_length, layout=layout, pad_id=None)
    packing = packing_stats(split, sequence_length=sequence_length, layout=layout)
    longest = sequence_length if packing else sequence_length + 1  # of plain text the last token is a label alone
    longer = lengths[lengths > longest]
    lost = int((longer - longest).sum()) if layout == "padded" else 0
    ends = {tokenizer.id_of(name) for name in tokenizer.control_tokens()}
    duplicates, double_bos, missing_eos, other_eos = _texts(split, manifest, {end for end in ends if end is not None})
    unknown, unk_id = 0, manifest.unk_id
    for start in range(0, len(split.tokens), _CHUNK) if unk_id is not None else ():
        unknown += int((split.tokens[start : start + _CHUNK] == unk_id).sum())
    histogram = tuple[tuple[int, int], ...]()  # units by length, in powers of two
    if len(lengths):
        edges = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
        histogram = tuple((2 ** int(edge), int((edges == edge).sum())) for edge in range(edges.min(), edges.max() + 1))
    found = DatasetCheck(
        kind=split.kind, units=len(lengths), empty=manifest.empty, skipped=manifest.skipped,
        held_back=manifest.held_back, duplicates=duplicates, unknown=unknown,
        tokens=manifest.train.tokens, rows=sum(rows.counts), longer=len(longer), cut=packing.cut if packing else lost,
        double_bos=double_bos, missing_eos=missing_eos, other_eos=other_eos, lengths=histogram, packing=packing,
        unit_name=unit_name(manifest),
    )  # fmt: skip
    kto_labels = (
        set()
        if split.kto_labels is None
        else set(np.asarray(split.kto_labels)[:: DOCUMENTS_PER_UNIT[split.kind]].tolist())
    )
    one_sided = {
        (1,): "desirable: nothing tells kto what to avoid, and sft learns them with less work",
        (0,): "undesirable: there is nothing to learn instead; are the labels turned round?",
    }.get(tuple(kto_labels))
    warnings = (
        *_warnings(found, manifest, sequence_length),
        *_chat_warnings(found, manifest, tokenizer, missing or []),
        *([f"every answer is marked as {one_sided}"] if one_sided else []),
    )
    return replace(found, warnings=warnings)


def _texts(split: Split, manifest: Manifest, ends: set[int]) -> tuple[int, int, int, int]:
    """Units that repeat an earlier one; texts that begin with two begin tokens; texts without a learned end; texts
    that end in another of `ends` than the tokenizer's. Of text beside conversations the ends are not looked at.
    """
    keys, together = array("Q"), DOCUMENTS_PER_UNIT[split.kind]
    double, endless, foreign = 0, 0, 0
    for unit in range(len(split) // together):
        digest = blake2b(digest_size=8)
        for index in range(unit * together, (unit + 1) * together):
            ids = split.document(index)
            digest.update(ids.astype(np.uint32).tobytes() + b"|")
            double += manifest.bos_id is not None and ids[:2].tolist() == [manifest.bos_id] * 2
            if split.is_plain(index):
                continue
            if split.loss_mask is None:  # where begin and end are one token it stands first
                loss_mask = {int(ids[0]), int(ids[-1])} if len(ids) else set()
            else:
                flags = split.loss_mask[int(split.bounds[index]) : int(split.bounds[index + 1])] > 0
                loss_mask = set(ids[flags].tolist())
            if manifest.eos_id in loss_mask or not loss_mask or (manifest.kind == "kto" and index % 2):
                continue
            ended = bool(ends & loss_mask)
            foreign, endless = foreign + ended, endless + (not ended)
        keys.append(int.from_bytes(digest.digest(), "big"))
    repeated = len(keys) - len(np.unique(np.frombuffer(keys, np.uint64))) if keys else 0
    return repeated, double, endless, foreign


def _warnings(found: DatasetCheck, manifest: Manifest, sequence_length: int) -> Iterator[str]:
    units = found.unit_name
    if found.duplicates > 0.01 * found.units:
        yield f"{found.duplicates / found.units:.0%} of the {units} repeat an earlier one word for word"
    if found.unknown > 0.001 * found.tokens:
        yield f"{found.unknown / found.tokens:.1%} of the tokens are unknown to the tokenizer, made for other text"
    if found.cut > 0.01 * found.tokens:
        fix = "packed would keep them" if found.kind == "text" else "a larger data.sequence_length would keep them"
        yield f"{found.cut / found.tokens:.0%} of the tokens are cut off: {fix}"
    if found.skipped:
        yield f"{counted(found.skipped, 'rows')} skipped, the first: {manifest.first_skipped}"
    if 0 < manifest.validation.tokens < sequence_length:
        yield f"validation is {manifest.validation.tokens:,} tokens, less than one sequence: its loss will be noise"
    if not manifest.validation.tokens:
        yield "there is no validation text: nothing will tell learning from memorising"
    if found.double_bos:
        texts = counted(found.double_bos, "texts")
        yield f"two begin tokens (id {manifest.bos_id}) stand before {texts}: no model was trained so"


def _chat_warnings(found: DatasetCheck, manifest: Manifest, tokenizer: Tokenizer, missing: list[str]) -> Iterator[str]:
    asked = sum(part.documents for part in manifest.train.parts if not part.plain)
    texts, units = asked // (2 if found.kind == "kto" else 1), UNITS[found.kind]  # a marked answer's twin is none
    end = "(the tokenizer has none)" if manifest.eos_id is None else tokenizer.decode([manifest.eos_id])
    if found.kind == "text" and manifest.eos_id is not None and (found.missing_eos or found.other_eos):
        yield f"{found.missing_eos + found.other_eos:,} of {texts:,} texts do not end in the end token {end}"
    if found.kind != "text" and found.missing_eos:
        yield (
            f"{found.missing_eos:,} of {texts:,} answers teach no end, so the model will not know when to stop: "
            f"the chat template must end a turn with the end token {end} or another special one"
        )
    if found.kind != "text" and found.other_eos:
        yield (
            f"{found.other_eos:,} of {texts:,} answers end in the template's own token and not in the end token "
            f"{end}: bloomery chat stops there, other programs if eos_token in tokenizer_config.json names it"
        )
    if found.packing and found.packing.all_masked:
        yield f"left out: {counted(found.packing.all_masked, units)} with nothing to learn; see data.chat.train_on"
    if found.packing and found.packing.dropped:
        yield f"left out: {counted(found.packing.dropped, units)} with nothing to learn within data.sequence_length"
    if missing:
        yield (
            f"the chat template writes {', '.join(missing)}, which the tokenizer does not know as single tokens: "
            "add them with tokenizer.additional_special_tokens, or set data.chat.template to one that fits"
        )
    if manifest.eos_id is not None and manifest.eos_id == manifest.pad_id:
        yield (
            f"the end token {end} is the padding token, too: harmless here, where padding is never learned; programs "
            "that mask padding by its id would never teach a model to stop"
        )


@dataclass(frozen=True)
class Preview:
    """A document as training sees it. `pieces` are its tokens as text, `ids` the same as numbers, and `loss_mask` says
    which of them are learned (None: all). `role`: what an answer is in its pair. `bad_row`: why there are none. `kind`:
    what it is, where a run learns from several.
    """

    source: str
    split: str
    ids: list[int]
    pieces: list[str]
    rows: int  # how many rows it touches at least; 0: it is left out
    cut: int  # tokens that no row holds
    loss_mask: list[bool] | None = None
    role: str = ""
    bad_row: str = ""
    kind: str = ""


def preview(work: Preparation, count: int, *, sequence_length: int, layout: Layout) -> Iterator[Preview]:
    """The first `count` documents, of several sources some of each. The tokenizer is trained and kept when it is not
    there yet; nothing else is written.
    """
    splitter, tokenizer = work.begin()
    documents = work.first_documents(splitter, count)
    if work.rendering is None:
        yield from (_plain(*found, tokenizer, sequence_length, layout) for found in documents)
        return
    mixed = bool(work.kinds.plain)
    with work.rendering.renderer(tokenizer) as renderer:
        for name, document in documents:
            if kind_of(document) == "text":
                seen = _plain(name, document, tokenizer, sequence_length, layout)
                yield replace(seen, loss_mask=[True] * len(seen.ids), kind="text")
            else:
                found = _structured(name, document, renderer, tokenizer, sequence_length)
                yield from (replace(seen, kind="conversation" if mixed else "") for seen in found)


def _plain(name: str, document: Document, tokenizer: Tokenizer, sequence_length: int, layout: Layout) -> Preview:
    if document.tokens is not None:
        ids = list(document.tokens)
    else:
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        end = [] if tokenizer.eos_id in (None, tokenizer.bos_id) else [tokenizer.eos_id]
        ids = [*begin, *tokenizer.encode(document.text), *[index for index in end if index is not None]]
    cut = max(len(ids) - 1 - sequence_length, 0) if layout == "padded" else 0
    rows = 1 if layout == "padded" else -(-len(ids) // sequence_length)
    return Preview(document.source, name, ids, pieces(ids, tokenizer), rows, cut)


def _structured(
    name: str, document: Document, renderer: Renderer, tokenizer: Tokenizer, sequence_length: int
) -> Iterator[Preview]:
    """Both answers of a pair; of a marked answer its own alone, as its twin is never learned. Of an example, or of
    tokens whose maker has said which are learned.
    """
    example, roles = document.example, [""]
    if example is None:
        assert document.tokens is not None and document.loss_mask is not None
        sides: EncodedExample | BadRow = (EncodedText(list(document.tokens), list(document.loss_mask)),)
    else:
        sides = renderer.encode_batch([example])[0]
        if example.kind == "pair":
            roles = ["chosen", "rejected"]
        elif example.kind == "kto":
            roles = ["desirable" if example.desirable else "undesirable"]
    if isinstance(sides, BadRow):
        yield Preview(document.source, name, [], [], 0, 0, bad_row=sides.problem)
        return
    whole = np.array([[len(side.ids) for side in sides]], np.int64)
    kept = truncated_lengths(whole, sequence_length)[0].tolist()
    fits = all(any(side.loss_mask[1:count]) for side, count in zip(sides, kept, strict=True))
    for side, count, role in zip(sides, kept, roles, strict=False):
        text, cut = pieces(side.ids, tokenizer), len(side.ids) - count
        yield Preview(document.source, name, side.ids, text, int(fits), cut, side.loss_mask, role)


def pieces(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    """Each id as text; a character that several tokens share shows in the last of them."""
    shown, start = [], 0
    for stop in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:stop])
        if text.endswith("�") and stop - start < 4 and stop < len(ids):
            shown.append("")
            continue
        shown.append(text)
        start = stop
    return shown
