"""Pictures of an example as a model takes them: their bytes, and the text that stands for each."""

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol, final

from bloomery.core.errors import UserError
from bloomery.core.files import read_input
from bloomery.data.examples import BadRow
from bloomery.data.pictures.processor import (
    TEXTS,
    PictureProcessor,
    size_of,
    text_from_size,
)
from bloomery.data.pictures.prompts import PromptMaker
from bloomery.data.pictures.reader import Picture, PictureReader
from bloomery.data.pictures.references import MAX_BYTES, OWN_DATA
from bloomery.facts.picture_sizes import (
    PROCESSOR_FILES,
    PictureSizes,
    processor_settings,
)
from bloomery.facts.pictures import Vision, vision_of
from bloomery.hub import cached_model
from bloomery.recipe.schema import Recipe

CONFIG = (
    "pictures.json"  # in a prepared dataset: the config.json of the model that its pictures are for
)


class EncodedPicture(NamedTuple):
    content: bytes
    text: str


@dataclass(frozen=True)
class VisionSource:
    """A folder with an image processor, and the config.json of its model."""

    folder: str
    raw_config: str

    @cached_property
    def vision(self) -> Vision:
        vision = vision_of(json.loads(self.raw_config), where=self.folder)
        assert vision is not None
        return vision

    @cached_property
    def shapes(self) -> PictureSizes | None:
        """The image processor as arithmetic; None of one that is not known."""
        settings = processor_settings(Path(self.folder))
        return None if settings is None else PictureSizes.of(json.loads(self.raw_config), settings)

    @property
    def sizes(self) -> PictureSizes | None:
        """The same, where the text that stands for a picture follows from it."""
        return self.shapes if self.vision.kind != "lfm2_vl" else None  # its text is its processor's

    @cached_property
    def _processor(self) -> PictureProcessor:
        """The image processor itself, whose import takes seconds."""
        return PictureProcessor(Path(self.folder), self.vision)

    @property
    def digest(self) -> str:
        """Of all that decides what a picture becomes."""
        parts = [self.raw_config.encode()]
        parts += [path.read_bytes() for path in _processor_files(Path(self.folder))]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def texts_of(self, pictures: Sequence[Picture]) -> list[str]:
        """What stands for each picture of an example, at least one: from their sizes where the image processor is
        known, else as it says. Raises ValueError or OSError for one that it refuses.
        """
        if self.sizes is None:
            return self._processor.process([picture.content for picture in pictures]).texts
        return [
            text_from_size(self.vision, self.sizes.shape(picture.width, picture.height))
            for picture in pictures
        ]

    def sizes_and_texts(self, contents: Sequence[bytes]) -> list[tuple[tuple[int, int], str]]:
        """Of pictures in a prepared dataset, at least one: width and height, and the text that stands for each."""
        pictures = [Picture(content, *size_of(content)) for content in contents]
        texts = self.texts_of(pictures)
        return [
            ((picture.width, picture.height), text)
            for picture, text in zip(pictures, texts, strict=True)
        ]

    def refuse_miscounted(self, contents: Sequence[bytes]) -> None:
        """Raises UserError where the image processor makes another text of these pictures than their sizes say."""
        if self.sizes is None:
            return
        for content, (size, text) in zip(contents, self.sizes_and_texts(contents), strict=True):
            if self._processor.process([content]).texts != [text]:
                raise UserError(
                    f"the image processor makes something else of {size[0]} x {size[1]} pixels than its settings say",
                    where=self.folder,
                    fix="install the version of transformers that `bloomery doctor` names",
                )

    def save(self, folder: Path) -> None:
        """Into a prepared dataset, from which training makes the same of its pictures."""
        for path in _processor_files(Path(self.folder)):
            shutil.copyfile(path, folder / path.name)
        (folder / CONFIG).write_text(self.raw_config + "\n", encoding="utf-8")


def _processor_files(folder: Path) -> list[Path]:
    return [folder / name for name in PROCESSOR_FILES if (folder / name).is_file()]


def vision_source(recipe: Recipe) -> VisionSource | None:
    """Where the recipe's model has what reads pictures; None of one that reads text, or that is not on this disk."""
    if recipe.model.from_ is None:
        return None
    folder = cached_model(recipe.model.from_)
    if folder is None or not (folder / "config.json").is_file():
        return None
    try:
        hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError:  # whoever reads the model says so
        return None
    if not isinstance(hf, dict) or vision_of(hf, where=str(folder)) is None:
        return None
    return VisionSource(str(folder), json.dumps(hf, sort_keys=True))


def encoder_of(recipe: Recipe) -> "PictureEncoder | None":
    """Of a recipe whose model reads pictures."""
    source = vision_source(recipe)
    return None if source is None else PictureEncoder(source)


def saved_vision(prepared: Path) -> VisionSource | None:
    """That of a prepared dataset with pictures."""
    path = prepared / CONFIG
    if not path.is_file():
        return None
    return VisionSource(str(prepared), json.dumps(json.loads(path.read_text()), sort_keys=True))


class ReadsPictures(Protocol):
    """Where the pictures of located references come from."""

    def read(self, reference: str, where: str) -> Picture:
        """Raises BadRow."""

    def close(self) -> None: ...


@final
class PictureEncoder:
    """`reader`: None: one in a child, which begins with the first picture. `close` ends it."""

    def __init__(self, source: VisionSource, reader: ReadsPictures | None = None) -> None:
        self._source = source
        self._reader = reader or PictureReader()
        self._prompts: PromptMaker | None = None

    @property
    def mark(self) -> str:
        """What the chat template writes for a picture."""
        return TEXTS[self._source.vision.kind].mark

    def encode(self, references: Sequence[str], where: str) -> list[EncodedPicture]:
        """Of located references, at least one. Raises BadRow."""
        pictures = [self._reader.read(reference, where) for reference in references]
        try:
            texts = self._source.texts_of(pictures)
        except UserError:
            raise
        except (ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:160]
            raise BadRow(
                where, f"holds a picture that the model's processor refuses: {reason}"
            ) from error
        return [
            EncodedPicture(picture.content, text)
            for picture, text in zip(pictures, texts, strict=True)
        ]

    def reference(self, path: Path) -> str:
        """A data URL of a file's picture as it is now, for `Message.pictures`. Raises UserError."""
        address = re.match(r"(https?):/", str(path))  # a path has one slash of the two
        if address is not None:
            raise UserError(
                f"the image is on the network ({address[1]}), and nothing is fetched",
                where=str(path),
                fix="download it, and name its file",
            )
        content = base64.b64encode(read_input(path, MAX_BYTES)).decode("ascii")
        try:
            (picture,) = self.encode([OWN_DATA + content], str(path))
        except BadRow as error:
            problem = "the file " + error.reason.removeprefix("holds a picture that ")
            raise UserError(problem, where=str(path), fix="choose another image") from error
        return OWN_DATA + base64.b64encode(picture.content).decode("ascii")

    def prompt(self, ids: Sequence[int], contents: Sequence[bytes]) -> list[int]:
        """The ids with what the tower is given of pictures, as `encode` returned them. Raises UserError."""
        if self._prompts is None:
            self._prompts = PromptMaker(Path(self._source.folder), self._source.vision)
        try:
            return self._prompts.prompt(ids, contents)
        except (ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:160]
            raise UserError(
                f"the model's image processor refuses a picture: {reason}",
                fix="send the picture in another size",
            ) from error

    def close(self) -> None:
        self._reader.close()
