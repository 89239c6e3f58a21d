"""The pictures of rollouts: of prompts that are completed, and of the micro-batches that train on their completions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import final, overload

from bloomery.data.batch import Batch
from bloomery.data.pictures.batches import PictureLoader
from bloomery.data.pictures.encoder import saved_vision
from bloomery.data.pictures.prompts import PromptMaker
from bloomery.data.prompts import Prompt, Prompts
from bloomery.train.rl.rollout import PlacedSamples

NO_PICTURE = -1  # no token's id


@final
class PromptReader:
    """What is decoded of the prompts of a prepared dataset: ids, with their pictures where it has any."""

    def __init__(self, prepared: Path) -> None:
        source = saved_vision(prepared)
        self._maker = None if source is None else PromptMaker(prepared, source.vision)

    def __call__(self, prompt: Prompt) -> list[int]:
        """Of a prompt of that dataset."""
        ids: list[int] = prompt.ids.tolist()
        return ids if self._maker is None else self._maker.prompt(ids, prompt.pictures)


@final
class PromptsInTurn(Sequence[list[int]]):
    """Prompts of which each is read when it is decoded: what the tower is given of a picture takes memory."""

    def __init__(self, prompts: Sequence[Prompt], read: Callable[[Prompt], list[int]]) -> None:
        self._prompts = prompts
        self._read = read
        self._last: tuple[int, list[int]] | None = None
        self.longest = max((len(prompt.ids) for prompt in prompts), default=0)

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...

    @overload
    def __getitem__(self, index: slice) -> "PromptsInTurn": ...

    def __getitem__(self, index: int | slice) -> "list[int] | PromptsInTurn":
        if isinstance(index, slice):
            return PromptsInTurn(self._prompts[index], self._read)
        if self._last is None or self._last[0] != index:
            self._last = (index, self._read(self._prompts[index]))
        return self._last[1]


@final
class RolloutPictures:
    """Completes micro-batches: reads the pictures of prompts again, which no rollout keeps."""

    def __init__(self, prepared: Path, prompts: Prompts) -> None:
        """`prompts`: those that samples number."""
        self._prompts = prompts
        self._loader = None
        if saved_vision(prepared) is not None:
            # The completions of a prompt are near each other.
            self._loader = PictureLoader(prepared, shares=True)

    def __call__(self, batch: Batch, members: PlacedSamples) -> Batch:
        if self._loader is None:
            return batch
        contents = [
            content
            for sample, _ in members
            for content in self._prompts[sample.prompt_number].pictures
        ]
        # A model may sample the token of a picture, which is none.
        tokens_BT = batch.tokens.clone()
        for sample, place in members:
            first = place.start + len(sample.prompt_ids)
            tokens_BT[place.row, first : place.start + len(sample)] = NO_PICTURE
        pictures = self._loader.pictures_of(contents, tokens_BT)
        axes = self._loader.axes_of(pictures, tokens_BT, batch.documents)
        return replace(batch, pictures=pictures, axes=axes)
