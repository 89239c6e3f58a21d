"""Pictures of colored shapes with a question about each, made here: a dataset for vision-language models that needs no
download.
"""

import base64
import functools
import io
import random
from collections.abc import Iterator

from bloomery.data.examples import PICTURE, Example, Message, to_wire
from bloomery.data.pictures.references import OWN_DATA
from bloomery.data.sources.formats import PROMPTS, RequiredFormat

NAME = "shapes"
NUM_PICTURES = 3000
SIDE = 32  # pixels
SMALLEST = 10  # pixels from the middle of a shape to its edge
LARGEST = 14
SHAPES = ("circle", "square", "triangle")
COLORS = {"red": (214, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 214)}
QUESTIONS = {"Which shape?": SHAPES, "Which color?": tuple(COLORS)}


def examples(required_format: RequiredFormat) -> Iterator[Example]:
    """Conversations, or prompts with the right `answer` as a column for rewards.

    Each picture has one shape of one color on a pale ground. A question has three answers, equally often right.
    """
    for number, (picture, question, answer) in enumerate(_rows(0, NUM_PICTURES)):
        prompt = Message("user", f"{PICTURE}{question}", pictures=(picture,))
        source = f"{NAME}:{number}"
        if required_format == PROMPTS:
            yield Example(source, "prompt", (prompt,), (), columns={"answer": answer})
        else:
            yield Example(source, "chat", (), ((prompt, Message("assistant", answer)),))


def other_examples(count: int) -> list[Example]:
    """Conversations about pictures that the dataset does not have."""
    return [
        Example(
            f"new {NAME}:{number}",
            "chat",
            (Message("user", f"{PICTURE}{question}", pictures=(picture,)),),
            ((Message("assistant", answer),),),
        )
        for number, (picture, question, answer) in enumerate(_rows(1, count))
    ]


@functools.cache  # a plan asks for their size, too
def _rows(seed: int, count: int) -> list[tuple[str, str, str]]:
    """Pictures as data URLs, each with its question and the right answer."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        # Together the three go through all combinations of shape, color and question.
        shape = SHAPES[number % 3]
        color = list(COLORS)[number // 3 % 3]
        question = list(QUESTIONS)[number // 9 % 2]
        picture = OWN_DATA + base64.b64encode(_drawn(shape, color, draw)).decode("ascii")
        rows.append((picture, question, shape if QUESTIONS[question] is SHAPES else color))
    return rows


def _drawn(shape: str, color: str, draw: random.Random) -> bytes:
    """A PNG file. Sizes overlap: a count of colored pixels does not tell a circle from the others."""
    from PIL import Image, ImageDraw

    red, green, blue = (draw.randint(170, 230) for _ in range(3))
    picture = Image.new("RGB", (SIDE, SIDE), (red, green, blue))
    radius = draw.randint(SMALLEST, LARGEST)
    x = draw.randint(radius, SIDE - 1 - radius)
    y = draw.randint(radius, SIDE - 1 - radius)
    box = (x - radius, y - radius, x + radius, y + radius)
    pen = ImageDraw.Draw(picture)
    match shape:
        case "circle":
            pen.ellipse(box, fill=COLORS[color])
        case "square":
            pen.rectangle(box, fill=COLORS[color])
        case _:
            corners = [(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)]
            pen.polygon(corners, fill=COLORS[color])
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def num_bytes(required_format: RequiredFormat) -> int:
    """The size of the rows as JSON."""
    return sum(len(to_wire(example)) for example in examples(required_format))
