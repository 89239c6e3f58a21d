"""The built-in pictures: the shape and the color that the answer says, which nothing but the picture tells."""

import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from bloomery.data.pictures.references import encoded_bytes
from bloomery.data.sources.documents import ReadStats, open_datasets, read_documents
from bloomery.data.sources.shapes import COLORS, NUM_PICTURES, QUESTIONS, SHAPES
from bloomery.plan.dataset_size import sample_rows
from bloomery.recipe.schema import Data


def rows(required_format):
    (dataset,) = open_datasets(Data(builtin="shapes"), required_format)
    documents = list(read_documents(dataset, on_error="stop", stats=ReadStats()))
    assert dataset.text_bytes == sum(len(document.wire) for document in documents)
    return [document.example for document in documents]


def seen(reference):
    """The shape and the color in a picture, by the widths of its colored rows."""
    content = encoded_bytes(reference, "a row")
    pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)
    is_shape = np.ptp(pixels, axis=2) > 100
    color = tuple(pixels[is_shape][0])
    widths = [int(count) for count in is_shape.sum(1) if count]
    top, bottom, widest = widths[0], widths[-1], max(widths)
    shape = "square" if top == widest else "triangle" if bottom == widest else "circle"
    return shape, next(name for name, value in COLORS.items() if value == color)


def test_answers_are_what_the_pictures_show():
    counts = Counter()
    pictures = set()
    for number, example in enumerate(rows("sft")):
        ((prompt, answer),) = example.responses
        (reference,) = prompt.pictures
        question = prompt.content[1:]
        if number % 5 == 0:  # of each of the 18 combinations
            shape, color = seen(reference)
            assert answer.content == (shape if QUESTIONS[question] is SHAPES else color)
        counts[question, answer.content] += 1
        pictures.add(reference)
    assert len(pictures) == NUM_PICTURES
    # Guessing the most frequent answer is right a third of the time.
    assert len(counts) == 6
    assert max(counts.values()) - min(counts.values()) <= 3


def test_prompts_have_the_answer_as_a_column():
    answers = [example.responses[0][1].content for example in rows("sft")]
    assert [example.columns["answer"] for example in rows("prompts")] == answers


def test_a_plan_counts_them_from_the_first_ones():
    (dataset,) = open_datasets(Data(builtin="shapes"), "sft")
    sample = sample_rows(dataset, files=8, on_error="stop", stats=ReadStats())
    assert not sample.is_whole
    assert sample.num_rows == pytest.approx(NUM_PICTURES, rel=0.01)
