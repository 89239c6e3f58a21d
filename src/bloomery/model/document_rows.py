"""Documents of packed rows as rows of their own, for layers that cannot keep them apart in one.

B batch, T time, N documents, L length of the longest of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Documents share a forward whose lengths are within this share of the longest: less padding, or fewer forwards.
LEAST_SHARE = 0.75
# Ranks that share weights must compute equally many forwards, whatever their documents: these shares of T bound them.
FIXED_SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)


class DocumentGroup(NamedTuple):
    """Documents of similar lengths. `places`: int64 [N, L], of each token in the flattened rows; padding is -1."""

    places: Tensor


def document_groups(documents_BT: Tensor, *, fixed: bool) -> list[DocumentGroup]:
    """Each document of the rows once, the longest first; padding (-1) is in none. `documents_BT` may be anywhere.

    `fixed`: as many groups as FIXED_SHARES, some of them without a document.
    """
    spans = _spans(documents_BT.cpu().numpy())
    spans.sort(key=lambda span: span[0] - span[1])
    if fixed:
        return [_group(part) for part in _parts_by_share(spans, documents_BT.shape[1])]

    groups = []
    start = 0
    while start < len(spans):
        first, end = spans[start]
        least = LEAST_SHARE * (end - first)
        stop = start
        while stop < len(spans) and spans[stop][1] - spans[stop][0] >= least:
            stop += 1
        groups.append(_group(spans[start:stop]))
        start = stop
    return groups


def padding_share(groups: Sequence[DocumentGroup]) -> float:
    """The share of padding in what is computed."""
    computed = sum(group.places.numel() for group in groups)
    padding = sum(int((group.places < 0).sum()) for group in groups)
    return padding / max(1, computed)


def _spans(
    documents_BT: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
) -> list[tuple[int, int]]:
    """First place and end of each document, in the flattened rows."""
    changes = np.ones(documents_BT.shape, bool)
    changes[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    starts = np.flatnonzero(changes)
    ends = np.append(starts[1:], documents_BT.size)
    is_document = documents_BT.reshape(-1)[starts] >= 0
    return list(zip(starts[is_document].tolist(), ends[is_document].tolist(), strict=True))


def _parts_by_share(spans: list[tuple[int, int]], length: int) -> list[list[tuple[int, int]]]:
    limits = [share * length for share in FIXED_SHARES[1:]]
    parts: list[list[tuple[int, int]]] = [[] for _ in FIXED_SHARES]
    for first, end in spans:
        parts[sum(end - first <= limit for limit in limits)].append((first, end))
    return parts


def _group(spans: Sequence[tuple[int, int]]) -> DocumentGroup:
    longest = max((end - first for first, end in spans), default=0)
    places = torch.full((len(spans), longest), -1, dtype=torch.int64)
    for row, (first, end) in enumerate(spans):
        places[row, : end - first] = torch.arange(first, end)
    return DocumentGroup(places)
