"""Statistics of a prepared dataset (`prepare --check`), and documents with their loss mask (`prepare --preview`)."""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.units import counted
from bloomery.data.packing import Layout, PackedSequences, count_sequences, truncated_lengths
from bloomery.data.pictures.encoder import VisionSource
from bloomery.data.prepare.kinds import kind_of
from bloomery.data.prepare.pipeline import Preparation
from bloomery.data.prepare.split import size_warnings
from bloomery.data.prepare.workers import LocalEncoder
from bloomery.data.shards import (
    DOCUMENTS_PER_UNIT,
    Manifest,
    ShardKind,
    Split,
    StoredPictures,
    open_split,
    read_manifest,
)
from bloomery.data.tokenizer.templates import NOT_OWN
from bloomery.data.tokenizer.tokenizer import Tokenizer

SAMPLE_TOKENS = 2**20  # of a split: the entropy of 50,000 tokens to about 0.02 nats
STRETCHES = 64  # of the sample, evenly over the split
SAMPLE_DOCUMENTS = 20_000  # the first ones: repeats are usually near each other or everywhere


@dataclass(frozen=True)
class DatasetStats:
    """`unigram_nats`: the loss of a model that predicts each token by its frequency alone."""

    tokens: int
    unigram_nats: float
    bytes_per_token: float | None  # None: pre-tokenized
    duplicates: float  # share of the sampled documents that repeat an earlier one


def read_stats(prepared: Path) -> DatasetStats:
    """Statistics of the training split, from a sample. Raises UserError as `read_manifest` does."""
    split = open_split(prepared, "train", read_manifest(prepared))
    record = split.record
    size = record.bytes / record.tokens if record.bytes and record.tokens else None
    return DatasetStats(record.tokens, unigram_nats(split), size, duplicates(split))


def unigram_nats(split: Split) -> float:
    """Shannon entropy of the loss tokens, with Miller's (1955) correction of (kinds - 1) / 2N for the sample size."""
    # Stretches over the whole split: sources follow each other, and differ.
    total = len(split.tokens)
    stretch_tokens = min(total, SAMPLE_TOKENS) // STRETCHES or total
    stride = max(1, stretch_tokens, total // STRETCHES)
    stretches = [np.zeros(0, np.int64)]
    for start in range(0, total, stride):
        stretch = split.tokens[start : start + stretch_tokens]
        if split.loss_mask is not None:
            stretch = stretch[split.loss_mask[start : start + stretch_tokens] > 0]
        stretches.append(stretch)
    loss_tokens = np.concatenate(stretches)
    sample_size = max(1, len(loss_tokens))
    shares = np.unique(loss_tokens, return_counts=True)[1] / sample_size
    correction = (len(shares) - 1) / (2 * sample_size)
    return float(-(shares * np.log(shares)).sum() + correction)


def duplicates(split: Split) -> float:
    """Share of the first documents that repeat one before them, token for token."""
    num_within = int(np.searchsorted(split.bounds, SAMPLE_TOKENS, side="right"))
    count = min(len(split), SAMPLE_DOCUMENTS, max(1, num_within))
    pictures = split.pictures
    digests = {
        blake2b(split.document(index).tobytes(), digest_size=16).digest()
        + (b"" if pictures is None else _picture_digests(pictures, index))
        for index in range(count)
    }
    return 1 - len(digests) / max(1, count)


def _picture_digests(pictures: StoredPictures, document: int) -> bytes:
    """What tells the pictures of a document from others: the same question about another one is another row."""
    return b"".join(
        blake2b(pictures[number], digest_size=16).digest()
        for number in pictures.of_document(document)
    )


Lengths = np.ndarray[Any, np.dtype[np.int64]]
_CHUNK = 2**20  # tokens read at once
UNITS: dict[ShardKind, str] = {
    "text": "documents",
    "chat": "conversations",
    "pairs": "pairs",
    "kto": "labeled responses",
    "prompts": "prompts",
}


def unit_name(manifest: Manifest) -> str:
    """The name of the units of all sources together."""
    return "texts" if manifest.mixed else UNITS[manifest.kind]


@dataclass(frozen=True)
class PackingStats:
    """Packing of conversations or pairs: sequences, positions with tokens, and the units cut or left out."""

    sequences: int
    positions: int
    truncated: int
    cut: int
    dropped: int
    uncut: int
    all_masked: int


@dataclass(frozen=True)
class DatasetCheck:
    """Statistics of the train split. A unit is a document, a conversation or a pair. `lengths`: pairs (most tokens,
    units), shortest first.
    """

    kind: ShardKind
    units: int
    empty: int
    skipped: int
    held_back: int
    duplicates: int  # units equal to an earlier one of their split
    unknown: int  # unknown tokens
    tokens: int
    sequences: int
    longer: int  # units longer than a sequence
    cut: int  # tokens in no sequence
    double_bos: int  # texts that begin with two BOS tokens
    missing_eos: int  # texts whose end token is not trained on
    other_eos: int  # texts that end in another token than the EOS token
    lengths: tuple[tuple[int, int], ...]
    packing: PackingStats | None = None  # of conversations and pairs
    unit_name: str = "documents"
    warnings: tuple[str, ...] = field(default=())


def packing_stats(split: Split, *, sequence_length: int, layout: Layout) -> PackingStats | None:
    """None for plain text and prompts, and without document masking."""
    if split.kind == "prompts":
        return None
    sequences = PackedSequences(split, sequence_length=sequence_length, layout=layout, pad_id=None)
    packed_sources = list(sequences.packed_sources.values())
    if not packed_sources:
        return None
    plain = list[Lengths]()  # per text of a source: the number of labels
    for part, (_, first_document), (_, end) in zip(
        split.record.parts, split.part_starts, split.part_starts[1:], strict=False
    ):
        if part.plain:
            bounds = np.asarray(split.bounds[first_document : end + 1]).astype(np.int64)
            plain.append(bounds[1:] - bounds[:-1] - 1)
    longer = [np.maximum(labels - sequence_length, 0) for labels in plain if layout == "padded"]
    cut = sum(int(excess.sum()) for excess in longer)
    texts = sum(
        int(labels.sum()) if layout == "padded" else max(int((labels + 1).sum()) - 1, 0)
        for labels in plain
    )
    return PackingStats(
        sequences=sum(sequences.counts),
        positions=sum(int(source.lengths[source.units].sum()) for source in packed_sources)
        + texts
        - cut,
        truncated=sum(source.truncated_units for source in packed_sources)
        + sum(int((excess > 0).sum()) for excess in longer),
        cut=sum(source.truncated_tokens for source in packed_sources) + cut,
        dropped=sum(source.dropped_units - source.uncut_units for source in packed_sources),
        uncut=sum(source.uncut_units for source in packed_sources),
        all_masked=sum(source.all_masked_units for source in packed_sources),
    )


def check_dataset(
    folder: Path,
    manifest: Manifest,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    layout: Layout,
    missing_tokens: list[str] | None = None,
) -> DatasetCheck:
    """Read the shards of the train split once. `missing_tokens`: markup of the chat template that is no token."""
    split = Split(folder, manifest, "train")
    bounds: Lengths = np.asarray(split.bounds).astype(np.int64)[:: DOCUMENTS_PER_UNIT[split.kind]]
    lengths: Lengths = bounds[1:] - bounds[:-1]
    counts = count_sequences(
        folder, manifest, sequence_length=sequence_length, layout=layout
    ).counts
    packing = packing_stats(split, sequence_length=sequence_length, layout=layout)
    # The last token of plain text is only a label.
    longest = sequence_length if packing else sequence_length + 1
    longer = lengths[lengths > longest]
    lost = int((longer - longest).sum()) if layout == "padded" else 0
    ends = {tokenizer.id_of(name) for name in tokenizer.control_tokens()}
    duplicates, double_bos, missing_eos, other_eos = _texts(
        split, manifest, {end for end in ends if end is not None}
    )
    unknown = 0
    unk_id = manifest.unk_id
    for start in range(0, len(split.tokens), _CHUNK) if unk_id is not None else ():
        unknown += int((split.tokens[start : start + _CHUNK] == unk_id).sum())
    histogram = tuple[tuple[int, int], ...]()  # units by length, in powers of two
    if len(lengths):
        edges = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
        histogram = tuple(
            (2 ** int(edge), int((edges == edge).sum()))
            for edge in range(edges.min(), edges.max() + 1)
        )
    check = DatasetCheck(
        kind=split.kind,
        units=len(lengths),
        empty=manifest.empty,
        skipped=manifest.skipped,
        held_back=manifest.held_back,
        duplicates=duplicates,
        unknown=unknown,
        tokens=manifest.train.tokens,
        sequences=sum(counts),
        longer=len(longer),
        cut=packing.cut if packing else lost,
        double_bos=double_bos,
        missing_eos=missing_eos,
        other_eos=other_eos,
        lengths=histogram,
        packing=packing,
        unit_name=unit_name(manifest),
    )
    warnings = (
        *_warnings(check, manifest),
        *size_warnings(manifest, sequence_length=sequence_length),
        *_chat_warnings(check, manifest, tokenizer, missing_tokens or []),
        *_label_warnings(split),
    )
    return replace(check, warnings=warnings)


def _label_warnings(split: Split) -> Iterator[str]:
    """KTO compares desirable with undesirable responses: a dataset with one label alone teaches neither."""
    if split.kto_labels is None:
        return
    labels = np.unique(split.kto_labels[:: DOCUMENTS_PER_UNIT[split.kind]]).tolist()
    if labels == [1]:
        yield (
            "every response is labeled desirable: KTO needs undesirable ones too; "
            "objective.kind=sft trains on desirable ones in less time"
        )
    elif labels == [0]:
        yield (
            "every response is labeled undesirable: KTO needs desirable ones too; "
            "are the labels inverted?"
        )


def _texts(split: Split, manifest: Manifest, ends: set[int]) -> tuple[int, int, int, int]:
    """Units that repeat an earlier one; texts that begin with two BOS tokens; texts whose end is not trained on; texts
    that end in another of `ends` than the EOS token. The ends of plain text next to conversations and of prompts, which
    the model continues, are not checked.
    """
    keys = array("Q")
    together = DOCUMENTS_PER_UNIT[split.kind]
    double = 0
    num_missing = 0
    num_other = 0
    for unit in range(len(split) // together):
        digest = blake2b(digest_size=8)
        for index in range(unit * together, (unit + 1) * together):
            ids = split.document(index)
            digest.update(ids.astype(np.uint32).tobytes() + b"|")
            if split.pictures is not None:
                digest.update(_picture_digests(split.pictures, index))
            double += manifest.bos_id is not None and ids[:2].tolist() == [manifest.bos_id] * 2
            if split.rows is not None:  # other columns make another row of the same prompt
                digest.update(split.rows[index])
                continue
            if split.is_plain(index):
                continue
            if split.loss_mask is None:  # BOS and EOS may be one token
                loss_mask = {int(ids[0]), int(ids[-1])} if len(ids) else set()
            else:
                flags = split.loss_mask[int(split.bounds[index]) : int(split.bounds[index + 1])] > 0
                loss_mask = set(ids[flags].tolist())
            if (
                manifest.eos_id in loss_mask
                or not loss_mask
                or (manifest.kind == "kto" and index % 2)
            ):
                continue
            has_end = bool(ends & loss_mask)
            num_other = num_other + has_end
            num_missing = num_missing + (not has_end)
        keys.append(int.from_bytes(digest.digest(), "big"))
    repeated = len(keys) - len(np.unique(np.frombuffer(keys, np.uint64))) if keys else 0
    return repeated, double, num_missing, num_other


def _warnings(check: DatasetCheck, manifest: Manifest) -> Iterator[str]:
    units = check.unit_name
    if check.duplicates > 0.01 * check.units:
        yield f"{check.duplicates / check.units:.0%} of the {units} are exact duplicates of an earlier one"
    if check.unknown > 0.001 * check.tokens:
        yield f"{check.unknown / check.tokens:.1%} of the tokens are unknown tokens: use a tokenizer for this text"
    if check.cut > 0.01 * check.tokens:
        fix = "set data.packing=true" if check.kind == "text" else "raise data.sequence_length"
        yield f"{check.cut / check.tokens:.0%} of the tokens are truncated: {fix}"
    if check.skipped:
        yield f"{counted(check.skipped, 'rows')} skipped, the first: {manifest.first_skipped}"
    if not manifest.validation.tokens:
        yield "no validation set: overfitting cannot be detected"
    if check.double_bos:
        texts = counted(check.double_bos, "texts")
        yield f"{texts} begin with two BOS tokens (id {manifest.bos_id}); models are trained with one"


def _chat_warnings(
    check: DatasetCheck, manifest: Manifest, tokenizer: Tokenizer, missing_tokens: list[str]
) -> Iterator[str]:
    num_rendered = sum(part.documents for part in manifest.train.parts if not part.plain)
    # The response for the KL term does not count.
    texts = num_rendered // (2 if check.kind == "kto" else 1)
    units = UNITS[check.kind]
    end = (
        "(the tokenizer has none)"
        if manifest.eos_id is None
        else tokenizer.decode([manifest.eos_id])
    )
    if (
        check.kind == "text"
        and manifest.eos_id is not None
        and (check.missing_eos or check.other_eos)
    ):
        yield f"{check.missing_eos + check.other_eos:,} of {texts:,} texts do not end with the EOS token {end}"
    if check.kind != "text" and check.missing_eos:
        yield (
            f"{check.missing_eos:,} of {texts:,} responses have no end token to train on, so the model will not stop: "
            f"the chat template must end a turn with the EOS token {end} or another special token"
        )
    if check.kind != "text" and check.other_eos:
        yield (
            f"{check.other_eos:,} of {texts:,} responses end with the template's own token, not with the EOS token "
            f"{end}: bloomery chat stops there, other programs if eos_token in tokenizer_config.json names it"
        )
    if check.packing and check.packing.all_masked:
        yield f"left out: {counted(check.packing.all_masked, units)} with all labels masked; see data.chat.train_on"
    if check.packing and check.packing.dropped:
        yield f"left out: {counted(check.packing.dropped, units)} with all labels within data.sequence_length masked"
    if check.packing and check.packing.uncut:
        yield (
            f"left out: {counted(check.packing.uncut, units)} with pictures, longer than data.sequence_length: none is"
            " cut; raise it"
        )
    if manifest.template.endswith(NOT_OWN):
        yield f"the chat template is {manifest.template}: the model may not know its markup"
    if missing_tokens:
        yield (
            f"the chat template writes {', '.join(missing_tokens)}, which the tokenizer splits into several tokens: "
            "add them with tokenizer.additional_special_tokens, or set data.chat.template to one that fits"
        )
    if manifest.eos_id is not None and manifest.eos_id == manifest.pad_id:
        yield (
            f"the EOS token {end} is also the padding token. Bloomery masks padding by position; programs that mask "
            "it by its id never train on EOS, and their models do not stop"
        )


@dataclass(frozen=True)
class PreviewedPicture:
    """Its size in pixels as it is stored, and how many tokens stand for it, the marks around it included.

    `content`: its file.
    """

    width: int
    height: int
    tokens: int
    content: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Preview:
    """A document as training reads it. `pieces`: its tokens as text, `ids` as numbers; `loss_mask`: those trained on
    (None: all, or of a prompt none). `role`: chosen, rejected, desirable or undesirable. `bad_row`: why it has no
    tokens. `kind`: prompt; text or conversation, where a run has both. `pictures`: in the order of their tokens;
    `picture_id`: the token in whose place the model sees them.
    """

    source: str
    split: str
    ids: list[int]
    pieces: list[str]
    sequences: int  # the fewest that hold it; 0: it is left out
    cut: int  # tokens in no sequence
    loss_mask: list[bool] | None = None
    role: str = ""
    bad_row: str = ""
    kind: str = ""
    pictures: tuple[PreviewedPicture, ...] = ()
    picture_id: int | None = None


def preview(
    work: Preparation, count: int, *, sequence_length: int, layout: Layout
) -> Iterator[Preview]:
    """The first `count` documents, some of each source. Of a pair both responses; for KTO only the example's own, as
    the response for the KL term is not trained on. Trains and saves the tokenizer when it does not exist yet; writes
    nothing else.
    """
    tokenizer = work.begin()
    vision = None if work.rendering is None else work.rendering.vision
    picture_id = None if vision is None else vision.vision.image_token_id
    with closing(LocalEncoder(tokenizer, work.rendering)) as encoder:
        for name, document in work.first_documents(count):
            kind = ""
            example = document.example
            sides = list[tuple[list[int], list[bool]]]()
            pictures: list[tuple[PreviewedPicture, ...]] = []
            if work.rendering is not None and (kind_of(document) == "text" or work.kinds.plain):
                kind = "text" if kind_of(document) == "text" else "conversation"
            if document.tokens is not None:
                sides.append(
                    (
                        list(document.tokens),
                        list(document.loss_mask or [True] * len(document.tokens)),
                    )
                )
            else:
                batch = encoder.encode([document])
                if batch.bad_rows:
                    problem = batch.bad_rows[0].reason
                    yield Preview(document.source, name, [], [], 0, 0, bad_row=problem, kind=kind)
                    continue
                flags = (
                    np.ones(len(batch.ids), np.uint8)
                    if batch.loss_mask is None
                    else batch.loss_mask
                )
                ends = np.cumsum(batch.lengths)[:-1].astype(np.int64)
                parts = zip(np.split(batch.ids, ends), np.split(flags > 0, ends), strict=True)
                sides += [(ids.tolist(), mask.tolist()) for ids, mask in parts]
                if vision is not None:
                    pictures = [_previewed(of_one, vision, tokenizer) for of_one in batch.pictures]
            if kind_of(document) == "prompts":
                ids, _ = sides[0]
                yield Preview(
                    document.source,
                    name,
                    ids,
                    pieces(ids, tokenizer),
                    1,
                    0,
                    kind="prompt",
                    pictures=next(iter(pictures), ()),
                    picture_id=picture_id,
                )
                continue
            if kind_of(document) == "text":
                ids, mask = sides[0]
                cut = max(len(ids) - 1 - sequence_length, 0) if layout == "padded" else 0
                sequences = 1 if layout == "padded" else -(-len(ids) // sequence_length)
                text = pieces(ids, tokenizer)
                yield Preview(
                    document.source,
                    name,
                    ids,
                    text,
                    sequences,
                    cut,
                    mask if kind else None,
                    kind=kind,
                )
                continue
            roles = [""]
            if example is not None and example.kind == "pair":
                roles = ["chosen", "rejected"]
            elif example is not None and example.kind == "kto":
                roles = ["desirable" if example.desirable else "undesirable"]
            kept_lengths = truncated_lengths(
                np.array([[len(ids) for ids, _ in sides]], np.int64), sequence_length
            )[0].tolist()
            fits = all(
                any(mask[1:count]) for (_, mask), count in zip(sides, kept_lengths, strict=True)
            )
            cuts = [len(ids) - left for (ids, _), left in zip(sides, kept_lengths, strict=True)]
            fits = fits and not (any(pictures) and any(cuts))  # one with a picture is never cut
            of_sides = pictures or [()] * len(sides)
            for (ids, mask), cut, role, of_side in zip(sides, cuts, roles, of_sides, strict=False):
                text = pieces(ids, tokenizer)
                yield Preview(
                    document.source,
                    name,
                    ids,
                    text,
                    int(fits),
                    cut,
                    mask,
                    role,
                    kind=kind,
                    pictures=of_side,
                    picture_id=picture_id,
                )


def _previewed(
    contents: Sequence[bytes], vision: VisionSource, tokenizer: Tokenizer
) -> tuple[PreviewedPicture, ...]:
    if not contents:
        return ()
    return tuple(
        PreviewedPicture(*size, len(tokenizer.encode_rendered(text)), content)
        for content, (size, text) in zip(contents, vision.sizes_and_texts(contents), strict=True)
    )


def pieces(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    """Each id as text. A character of several tokens is at the last of them."""
    printed = []
    start = 0
    for stop in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:stop])
        if text.endswith("�") and stop - start < 4 and stop < len(ids):
            printed.append("")
            continue
        printed.append(text)
        start = stop
    return printed
