"""The pictures of a dataset, for a plan: their sizes, what the tower is given of them, and how they fill sequences.

They are counted from the sizes of some; no pixel is read.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from bloomery.data.pictures.encoder import VisionSource, saved_vision, vision_source
from bloomery.data.pictures.processor import size_of
from bloomery.data.shards import DOCUMENTS_PER_UNIT, Manifest, ShardKind, open_split
from bloomery.facts.picture_sizes import PictureShape
from bloomery.facts.pictures import vision_of
from bloomery.facts.towers import Tower, tower_of
from bloomery.plan.estimate.step import StepPictures
from bloomery.plan.types import DatasetFacts, PictureFacts, PictureLoad, PictureSize, RunPlan
from bloomery.recipe.objectives import Rollouts
from bloomery.recipe.schema import Lora, Recipe

LOOKED_AT = 256  # documents with pictures, whose sizes a plan reads
SHOWN_SIZES = 3


@dataclass(frozen=True)
class PictureDocument:
    """A document with pictures: its tokens, and the width and height of each picture."""

    tokens: int
    sizes: Sequence[tuple[int, int]]


@lru_cache(maxsize=4)
def tower_in(raw_config: str) -> Tower | None:
    """Of a config.json."""
    return tower_of(json.loads(raw_config))


def pictures_of_prepared(
    prepared: Path, manifest: Manifest, recipe: Recipe, *, sequences: int
) -> PictureFacts | None:
    """`sequences`: of its training split, each source read once."""
    source = saved_vision(prepared)
    split = open_split(prepared, "train", manifest)
    pictures = split.pictures
    if source is None or pictures is None:
        return None
    documents = [
        PictureDocument(
            int(split.bounds[number + 1] - split.bounds[number]),
            [size_of(pictures[index]) for index in pictures.of_document(number)],
        )
        for number in pictures.some_documents(LOOKED_AT)
    ]
    return picture_facts(
        source,
        documents,
        recipe,
        kind=manifest.kind,
        num_pictures=len(pictures),
        sequences=sequences,
    )


def pictures_of_rows(
    recipe: Recipe,
    documents: Iterable[tuple[int, Sequence[bytes]]],
    *,
    kind: ShardKind,
    rows_per_document: float,
    sequences: int,
) -> PictureFacts | None:
    """Before preparation. `documents`: tokens and pictures of some; `rows_per_document`: for how many each stands."""
    with_pictures = [
        PictureDocument(tokens, [size_of(content) for content in contents])
        for tokens, contents in documents
        if contents
    ]
    source = vision_source(recipe)
    if source is None or not with_pictures:
        return None
    num_pictures = sum(len(document.sizes) for document in with_pictures) * rows_per_document
    return picture_facts(
        source,
        with_pictures,
        recipe,
        kind=kind,
        num_pictures=round(num_pictures),
        sequences=sequences,
    )


def picture_facts(
    source: VisionSource,
    documents: Sequence[PictureDocument],
    recipe: Recipe,
    *,
    kind: ShardKind,
    num_pictures: int,
    sequences: int,
) -> PictureFacts | None:
    """Of these documents with pictures, which stand for all. None where the image processor or the tower is not known,
    and where no document fits into a sequence.
    """
    tower = tower_in(source.raw_config)
    length = recipe.data.sequence_length
    if isinstance(recipe.objective, Rollouts):  # a prompt is packed with its completion
        response = recipe.objective.max_completion_length
        documents = [
            PictureDocument(document.tokens + response, document.sizes) for document in documents
        ]
        mean_tokens = sum(document.tokens for document in documents) / max(1, len(documents))
        sequences = max(1, round(sequences * mean_tokens / length))
    documents = [document for document in documents if document.tokens <= length]
    if source.shapes is None or tower is None or not documents or not sequences:
        return None
    shapes = {
        size: source.shapes.shape(*size) for size in {s for each in documents for s in each.sizes}
    }
    loads = [load_of([shapes[size] for size in document.sizes], tower) for document in documents]

    # Sequences have as many of them as documents of this length fit in, where documents are packed, and as there are.
    packed = recipe.data.layout == "packed"
    filled = [
        load.times(min(length // document.tokens, num_pictures / load.pictures) if packed else 1)
        for load, document in zip(loads, documents, strict=True)
    ]
    counts = Counter(size for document in documents for size in document.sizes)
    num_looked_at = counts.total()
    every = load_of([shapes[size] for size in counts.elements()], tower)
    answers = DOCUMENTS_PER_UNIT[kind]
    mean = every.times(num_pictures / num_looked_at / sequences)
    fullest = max(filled, key=lambda load: load.patches)
    at_least_mean = mean.times(math.ceil(mean.pictures) / mean.pictures)
    return PictureFacts(
        raw_config=source.raw_config,
        pictures_per_epoch=num_pictures,
        looked_at=num_looked_at,
        sizes=tuple(
            PictureSize(
                width=size[0],
                height=size[1],
                tokens=shapes[size].features,
                share=count / num_looked_at,
            )
            for size, count in counts.most_common(SHOWN_SIZES)
        ),
        of_picture=every.times(1 / num_looked_at),
        mean=mean.read_once_for(answers),
        fullest=max(fullest, at_least_mean, key=lambda load: load.patches).read_once_for(answers),
    )


def load_of(shapes: Sequence[PictureShape], tower: Tower) -> PictureLoad:
    """Of these pictures together."""
    return PictureLoad(
        pictures=len(shapes),
        patches=sum(shape.patches for shape in shapes),
        longest=max((max(shape.pieces) for shape in shapes), default=0),
        features=sum(shape.features for shape in shapes),
        input_bytes=sum(shape.input_bytes for shape in shapes),
        flops=sum(map(tower.flops, shapes)),
    )


def tokens_of_sizes(folder: Path | None, sizes: Sequence[tuple[int, int]]) -> list[PictureSize]:
    """What pictures of these sizes would be for the model of a folder; none where that is not known."""
    if folder is None or not (folder / "config.json").is_file():
        return []
    text = (folder / "config.json").read_text(encoding="utf-8")
    if vision_of(json.loads(text), where=str(folder)) is None:
        return []
    shapes = VisionSource(str(folder), text).shapes
    if shapes is None:
        return []
    return [
        PictureSize(
            width=width, height=height, tokens=shapes.shape(width, height).features, share=0.0
        )
        for width, height in sizes
    ]


def sees_both_ways(dataset: DatasetFacts | None) -> bool:
    """Whether there are pictures whose tokens attend to those after them, in a model of this kind."""
    facts = None if dataset is None else dataset.pictures
    vision = None if facts is None else vision_of(json.loads(facts.raw_config))
    return vision is not None and vision.both_ways != "none"


def step_pictures(recipe: Recipe | RunPlan, dataset: DatasetFacts | None) -> StepPictures | None:
    """None of a dataset without pictures."""
    if dataset is None or not dataset.tower_weights:
        return None
    facts = dataset.pictures
    adapter = recipe.adapter
    seen = StepPictures(
        weights=dataset.tower_weights,
        train=recipe.vision.train,
        adapted=adapter.vision if isinstance(adapter, Lora) else "none",
        rank=adapter.rank if isinstance(adapter, Lora) else 0,
        teacher_weights=dataset.teacher_tower_weights,
        sequence_length=recipe.data.sequence_length,
    )
    if facts is None:
        return seen
    return replace(
        seen,
        tower=tower_in(facts.raw_config),
        mean=facts.mean,
        fullest=facts.fullest,
        both_ways=sees_both_ways(dataset),
    )
