"""What a decoder reads of prompts with pictures: the tower's features and positions in three axes, piece by piece.

T tokens of a piece, N of them of pictures.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from bloomery.core.device import sent
from bloomery.core.errors import UserError
from bloomery.data.pictures.batches import changed_inputs
from bloomery.data.pictures.encoder import PictureEncoder, VisionSource
from bloomery.data.pictures.prompts import PicturePrompt
from bloomery.facts.picture_sizes import PROCESSOR_FILES
from bloomery.facts.pictures import vision_of
from bloomery.infer.forward import refuse_other_number
from bloomery.infer.model_folder import ModelFiles
from bloomery.model.adapters.tower import open_tower
from bloomery.model.decoder import Decoder
from bloomery.model.io.stored import vision_tensors
from bloomery.model.pictures import SeenPictures
from bloomery.model.vision import PictureFeatures, tower_dtype


def seen_in_piece(
    decoder: Decoder, prompt: Sequence[int] | None, start: int, end: int
) -> SeenPictures | None:
    """What the tower makes of the pictures between two places of a prompt; None without any. Raises UserError."""
    if not isinstance(prompt, PicturePrompt):
        return None
    vision = decoder.vision
    assert vision is not None, "who makes prompts with pictures loads the tower"
    places = list[int]()
    pieces = list[PictureFeatures]()
    for picture in prompt.pictures:
        inside = [i for i, place in enumerate(picture.places) if start <= place < end]
        if not inside:
            continue
        if picture.features is None:
            inputs = changed_inputs(picture.inputs, lambda each: sent(each, decoder.device))
            features = vision(inputs)
            refuse_other_number(len(features.features_ND), len(picture.places), "the prompt")
            picture.features = features
        features = picture.features
        taken = slice(inside[0], inside[-1] + 1)
        places += [picture.places[index] - start for index in inside]
        pieces.append(features.take(taken))
    if not pieces:
        return None
    deep = zip(*(piece.deep_features for piece in pieces), strict=True)
    return SeenPictures(
        sent(torch.tensor(places), decoder.device),
        torch.cat([piece.features_ND for piece in pieces]),
        tuple(torch.cat(of_layer) for of_layer in deep),
        both_ways=vision.vision.both_ways,
    )


def axes_in_piece(prompt: Sequence[int] | None, start: int, end: int) -> Tensor:
    """int64 [3, T]: positions in three axes of the tokens between two places of a text that begins with a prompt."""
    places = torch.arange(start, end)
    if not isinstance(prompt, PicturePrompt) or prompt.axes is None:
        return places.expand(3, -1)
    of_prompt = prompt.axes[:, start:end]
    after = places[of_prompt.shape[1] :] + prompt.shift
    return torch.cat((of_prompt, after.expand(3, -1)), 1)


def has_axes(prompt: Sequence[int] | None) -> bool:
    """Whether positions of the text are not its places."""
    return isinstance(prompt, PicturePrompt) and prompt.axes is not None


def picture_source(files: ModelFiles) -> VisionSource | None:
    """What reads pictures for a model, in its own folder or in that of its base; None of one that reads text alone."""
    for folder in (files.weights, files.base):
        if folder is None or not any((folder / name).is_file() for name in PROCESSOR_FILES):
            continue
        try:
            hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # an adapter's folder has none
            continue
        if vision_of(hf, where=str(folder)) is not None:
            return VisionSource(str(folder), json.dumps(hf, sort_keys=True))
    return None


def load_eyes(decoder: Decoder, files: ModelFiles, source: VisionSource) -> None:
    """From now on prompts may have pictures: loads the tower, unless it is there. Raises UserError."""
    if decoder.vision is None:
        folder = Path(source.folder)
        adapter = None if files.base is None else files.weights
        decoder.see(
            open_tower(
                source.vision,
                folder,
                dtype=tower_dtype(decoder.model.embed_tokens.weight.dtype),
                device=decoder.device,
                adapter=adapter,
                config=decoder.config,
            )
        )


def tower_parameters(source: VisionSource | None) -> int:
    """How many `load_eyes` loads: for the check of memory before."""
    if source is None:
        return 0
    return sum(math.prod(tensor.shape) for tensor in vision_tensors(Path(source.folder)).values())


def seeing_source(files: ModelFiles) -> VisionSource:
    """Raises UserError for a model that reads text alone."""
    source = picture_source(files)
    if source is None:
        raise UserError(
            "this model reads text, and no pictures",
            where=str(files.weights),
            fix="choose a vision-language model, in a folder with its preprocessor_config.json",
        )
    return source


def open_eyes(decoder: Decoder, files: ModelFiles) -> PictureEncoder:
    """`load_eyes`, with the encoder for prompts; `close` it at the end. Raises UserError as `seeing_source` does."""
    source = seeing_source(files)
    load_eyes(decoder, files, source)
    return PictureEncoder(source)


@final
class Eyes:
    """Reads pictures of prompts. The tower is loaded with the first one: most chats have none.

    `encoder`: for the chat format, which closes it.
    """

    def __init__(self, decoder: Decoder, files: ModelFiles, source: VisionSource) -> None:
        self.encoder = PictureEncoder(source)
        self._decoder = decoder
        self._files = files
        self._source = source

    def open(self) -> None:
        """Loads the tower, unless it is there. Raises UserError."""
        load_eyes(self._decoder, self._files, self._source)

    def reference(self, path: Path) -> str:
        """A data URL of a file's picture as it is now, for `Message.pictures`. Raises UserError."""
        reference = self.encoder.reference(path)
        self.open()
        return reference
