"""Prompts with pictures: ids of tokens, and what the tower is given of each picture among them.

T tokens of the prompt.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from bloomery.core.errors import UserError
from bloomery.facts.pictures import Vision

if TYPE_CHECKING:
    from torch import Tensor

    from bloomery.data.pictures.processor import Processed

KEPT_PICTURES = 8  # what the processor made of them, up to 20 MB each


@final
@dataclass(eq=False)
class PromptPicture:
    """A picture of a prompt. `inputs`: of the tower, by transformers' names. `places`: those of its tokens.

    `key`: a number of its content. `features`: what the tower made of it, once a model has read it.
    """

    inputs: "Mapping[str, Tensor]"
    places: Sequence[int]
    key: int
    features: Any = None


@final
class PicturePrompt(list[int]):
    """The ids of a prompt with `pictures`, at least one. A copy or a slice of it is a list without them.

    `axes`: int64 [3, T], positions of time, row and column; None of a model whose positions are the text's.
    `is_whole`: a picture may not be read in two pieces, as its tokens see each other both ways.
    """

    def __init__(
        self,
        ids: Sequence[int],
        pictures: Sequence[PromptPicture],
        *,
        axes: "Tensor | None",
        is_whole: bool,
    ) -> None:
        super().__init__(ids)
        self.pictures = tuple(pictures)
        self.axes = axes
        self.is_whole = is_whole
        # What tells its tokens from those of another prompt: of pictures their contents, as negative numbers.
        self.keys = list(ids)
        for picture in pictures:
            for index, place in enumerate(picture.places):
                self.keys[place] = -picture.key - index
        # What a token after the prompt has for a position, less its place.
        self.shift = 0 if axes is None else int(axes.max()) + 1 - len(ids)

    @property
    def num_bytes(self) -> int:
        """Of what the tower is given."""
        return sum(each.nbytes for picture in self.pictures for each in picture.inputs.values())

    def unread(self) -> "PicturePrompt":
        """The same prompt for a model whose tower has changed since it read this one."""
        pictures = [replace(picture, features=None) for picture in self.pictures]
        return PicturePrompt(self, pictures, axes=self.axes, is_whole=self.is_whole)

    def whole_until(self, end: int) -> int:
        """The first place from `end` on at which the prompt can be divided."""
        while self.is_whole and end < len(self) and self.keys[end] < 0:
            end += 1
        return end


def keys_of(ids: Sequence[int]) -> Sequence[int]:
    """What tells the tokens of a prompt, with pictures or without, from those of another."""
    return ids.keys if isinstance(ids, PicturePrompt) else ids


@final
class PromptMaker:
    """Makes prompts with the image processor in a folder, of a model or of a prepared dataset."""

    def __init__(self, folder: Path, vision: Vision) -> None:
        """Raises UserError as PictureProcessor does."""
        from bloomery.data.pictures.processor import PictureProcessor

        self._vision = vision
        self._processor = PictureProcessor(folder, vision)
        # The turns of a chat have the same pictures again.
        self._recent: OrderedDict[bytes, Processed] = OrderedDict()

    def prompt(self, ids: Sequence[int], contents: Sequence[bytes]) -> list[int]:
        """`contents`: of pictures as `reader` leaves them, in the order of their tokens; without any it is a list.

        Each is processed by itself, so that what the tower makes of it does not depend on the others. Raises UserError
        where the prompt has another number of tokens for them than the processor.
        """
        if not contents:
            return list(ids)
        from bloomery.data.pictures.batches import grid_of, merged_side, prompt_axes

        vision = self._vision
        places = [place for place, token in enumerate(ids) if token == vision.image_token_id]
        pictures = list[PromptPicture]()
        start = 0
        for content in contents:
            digest = hashlib.sha256(content).digest()
            processed = self._processed(content, digest)
            end = start + processed.num_tokens[0]
            key = int.from_bytes(digest[:7]) << 24  # and the number of a token
            pictures.append(PromptPicture(processed.inputs, places[start:end], key))
            start = end
        if start != len(places):
            raise UserError(
                f"the prompt has {len(places)} tokens of pictures for which the processor makes {start}",
                fix="take the tokenizer and the processor of one model, and spell no token of a picture in a text",
            )
        axes = None
        if vision.axes is not None:
            merged = merged_side(vision)
            grids = [grid_of(picture.inputs, 0, merged) for picture in pictures]
            axes = prompt_axes(ids, grids, vision.image_token_id)
        return PicturePrompt(ids, pictures, axes=axes, is_whole=vision.both_ways != "none")

    def _processed(self, content: bytes, digest: bytes) -> "Processed":
        if digest not in self._recent:
            self._recent[digest] = self._processor.process([content])
        self._recent.move_to_end(digest)
        while len(self._recent) > KEPT_PICTURES:
            self._recent.popitem(last=False)
        return self._recent[digest]
