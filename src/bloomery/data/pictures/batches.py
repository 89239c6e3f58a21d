"""The pictures of a micro-batch: what the tower is given, where its output belongs, and positions in three axes.

N tokens of pictures, B sequences, T tokens of each.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from bloomery.data.pictures.encoder import saved_vision
from bloomery.data.pictures.processor import PictureProcessor
from bloomery.facts.pictures import Vision

Ids = np.ndarray[Any, np.dtype[np.int64]]
# Sizes of pictures stay on the host, which makes shapes and loops of them: it would wait to have them back.
ON_THE_HOST = ("image_grid_thw", "image_sizes", "spatial_shapes")


def changed_inputs(
    inputs: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """The inputs of a tower with `change`, which moves a tensor, applied to all but sizes."""
    return {
        name: tensor if name in ON_THE_HOST else change(tensor) for name, tensor in inputs.items()
    }


@dataclass(frozen=True)
class Pictures:
    """`inputs`: of the tower, which makes `num_tokens` of them, by transformers' names. `places`: int64 [N], in the
    flattened tokens of the batch, in their order, those that the tower's output replaces. `taken`: int64 [N], which of
    the tower's tokens each has; None: all in their order.
    """

    inputs: Mapping[str, Tensor]
    num_tokens: int
    places: Tensor
    taken: Tensor | None = None

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Pictures":
        return replace(
            self,
            inputs=changed_inputs(self.inputs, change),
            places=change(self.places),
            taken=None if self.taken is None else change(self.taken),
        )


@final
class PictureLoader:
    """Makes the pictures of batches from the files in a prepared dataset."""

    def __init__(self, prepared: Path, *, shares: bool = False) -> None:
        """`shares`: the tower reads a picture that a batch has several times once. Raises UserError as PictureProcessor
        does.
        """
        self._shares = shares
        source = saved_vision(prepared)
        assert source is not None, "a dataset with pictures says for which model"
        self._vision = source.vision
        self._merged = merged_side(source.vision)
        self._processor = PictureProcessor(prepared, source.vision)

    def pictures_of(self, contents: Sequence[bytes], tokens_BT: Tensor) -> Pictures | None:
        """`contents`: of all sequences, in the order of their tokens; None without any."""
        if not contents:
            return None
        distinct = list(dict.fromkeys(contents)) if self._shares else contents
        made = self._processor.process(distinct)
        is_picture = tokens_BT.flatten() == self._vision.image_token_id
        places = is_picture.nonzero().squeeze(1)
        if len(distinct) == len(contents):
            return Pictures(made.inputs, len(places), places)
        num_tokens = sum(made.num_tokens)
        own_tokens = torch.arange(num_tokens).split(made.num_tokens)
        tokens_of = dict(zip(distinct, own_tokens, strict=True))
        taken = torch.cat([tokens_of[content] for content in contents])
        return Pictures(made.inputs, num_tokens, places, taken)

    def axes_of(
        self, pictures: Pictures | None, tokens_BT: Tensor, documents_BT: Tensor
    ) -> Tensor | None:
        """int64 [3, B, T], the positions of time, row and column; None of a model whose positions are the text's."""
        if self._vision.axes is None:
            return None
        grids = iter(()) if pictures is None else self._grids(pictures)
        rows = [
            axis_positions(
                tokens.numpy(), documents.numpy(), grids, picture=self._vision.image_token_id
            )
            for tokens, documents in zip(tokens_BT, documents_BT, strict=True)
        ]
        return torch.from_numpy(np.stack(rows, axis=1))

    def _grids(self, pictures: Pictures) -> Iterator[tuple[int, int]]:
        """Of each picture of the batch."""
        distinct = len(pictures.inputs["image_grid_thw"])
        grids = [grid_of(pictures.inputs, number, self._merged) for number in range(distinct)]
        if pictures.taken is None:
            return iter(grids)
        firsts = accumulate((rows * columns for rows, columns in grids), initial=0)
        grids_by_token = dict(zip(firsts, grids, strict=False))
        return (
            grids_by_token[token] for token in pictures.taken.tolist() if token in grids_by_token
        )


def merged_side(vision: Vision) -> int:
    """Patches along the side of the square that becomes one token, in models with positions in three axes."""
    side: int = json.loads(vision.raw_config)["vision_config"].get("spatial_merge_size", 2)
    return side


def grid_of(inputs: Mapping[str, Tensor], number: int, merged: int) -> tuple[int, int]:
    """Rows and columns of the tokens of one picture among those that were processed together."""
    _, rows, columns = inputs["image_grid_thw"][number].tolist()
    return rows // merged, columns // merged


def prompt_axes(ids: Sequence[int], grids: Iterable[tuple[int, int]], picture: int) -> Tensor:
    """int64 [3, T], the positions of a single text."""
    documents = np.zeros(len(ids), np.int64)
    return torch.from_numpy(
        axis_positions(np.array(ids, np.int64), documents, grids, picture=picture)
    )


def axis_positions(
    tokens: Ids, documents: Ids, grids: Iterable[tuple[int, int]], *, picture: int
) -> Ids:
    """The positions [3, T] of time, row and column of a sequence's tokens, as in Qwen2-VL (arXiv:2409.12191, 2.1).

    Of text the three are equal and count up; a picture at position p has p in time, p and its row, p and its column,
    and what follows continues after the largest of them. They begin again with each document. `grids`: rows and columns
    of the pictures' tokens.
    """
    axes = np.zeros((3, len(tokens)), np.int64)
    remaining = iter(grids)
    is_picture = tokens == picture
    index = 0
    position = 0
    while index < len(tokens):
        if index == 0 or documents[index] != documents[index - 1]:
            position = 0
        if is_picture[index] and documents[index] >= 0:
            rows, columns = next(remaining)
            end = index + rows * columns
            axes[0, index:end] = position
            axes[1, index:end] = position + np.repeat(np.arange(rows), columns)
            axes[2, index:end] = position + np.tile(np.arange(columns), rows)
            position += max(rows, columns)
        else:
            ends = np.flatnonzero(
                (documents[index + 1 :] != documents[index]) | is_picture[index + 1 :]
            )
            end = index + 1 + int(ends[0]) if len(ends) else len(tokens)
            axes[:, index:end] = np.arange(position, position + end - index)
            position += end - index
        index = end
    axes[:, documents < 0] = 0  # padding, as its positions
    return axes
