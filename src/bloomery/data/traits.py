"""What prepared text is like as a whole: how surprising single tokens are, bytes a token, repeated documents."""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.data.shards import Split, open_split, read_manifest

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
