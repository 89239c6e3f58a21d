"""Pictures that people and programs damage: each is read, or refused in a sentence, in bounded time."""

import io
import random
import time
from base64 import b64encode

import numpy as np
import pytest
from PIL import Image

from bloomery.data.examples import BadRow
from bloomery.data.pictures import sandbox_worker
from bloomery.data.pictures.reader import PictureReader
from bloomery.data.pictures.references import OWN_DATA, reference_of
from pictures_for_tests import bomb

WIDTH, HEIGHT = 48, 32


def saved(picture: Image.Image, form: str = "PNG", **settings) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, form, **settings)
    return stream.getvalue()


def colors() -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8), "RGB")


ROTATED = Image.Exif()
ROTATED[sandbox_worker.ORIENTATION] = 6
DEEP = Image.fromarray(
    np.linspace(0, 65535, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH).astype("uint16")
)
READ = {
    "jpeg": saved(colors(), "JPEG"),
    "webp": saved(colors(), "WEBP"),
    "bmp": saved(colors(), "BMP"),
    "tiff": saved(colors(), "TIFF"),
    "gif of one frame": saved(colors().convert("P"), "GIF"),
    "palette": saved(colors().convert("P")),
    "gray": saved(colors().convert("L")),
    "gray with alpha": saved(colors().convert("LA")),
    "alpha": saved(colors().convert("RGBA")),
    "cmyk": saved(colors().convert("CMYK"), "JPEG"),
    "16 bits": saved(DEEP),
    "bilevel": saved(colors().convert("1")),
    "turned by exif": saved(colors(), "JPEG", exif=ROTATED),
}
FRAMES = [colors(), colors().rotate(90)]
REFUSED = {
    "nothing": (b"", "none of"),
    "text": (b"no picture at all", "none of"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of"),
    "bomb": (bomb(60_000), "pixels"),
    "bomb within pillow's own limit": (bomb(9_000), "pixels"),
    "truncated": (saved(colors())[:-300], "damaged"),
    "truncated jpeg": (saved(colors(), "JPEG")[:-200], "damaged"),
    "animated": (saved(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "animated"),
    "animated webp": (
        saved(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]),
        "animated",
    ),
    "a photo of a phone": (b"\0\0\0\x18ftypheic" + bytes(40), "a HEIC photo, .*: save it as JPEG"),
    "a line": (saved(Image.new("RGB", (3000, 2))), "one side is over"),
}


@pytest.fixture(scope="module")
def reader():
    reader = PictureReader()
    yield reader
    reader.close()


@pytest.mark.parametrize("name", READ)
def test_every_usual_picture_becomes_upright_rgb(reader, name):
    picture = reader.read(reference_of(READ[name], "row"), "row")
    opened = Image.open(io.BytesIO(picture.content))
    assert opened.mode in ("RGB", "L") and opened.format in sandbox_worker.KEPT_FORMATS
    expected = (HEIGHT, WIDTH) if name == "turned by exif" else (WIDTH, HEIGHT)
    assert opened.size == (picture.width, picture.height) == expected
    assert opened.getexif().get(sandbox_worker.ORIENTATION, 1) == 1


def test_alpha_lies_on_white_and_16_bits_keep_their_range(reader):
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    picture = reader.read(reference_of(saved(clear), "row"), "row")
    assert Image.open(io.BytesIO(picture.content)).getpixel((0, 0)) == (255, 255, 255)
    deep = reader.read(reference_of(READ["16 bits"], "row"), "row")
    levels = np.asarray(Image.open(io.BytesIO(deep.content)).convert("L"))
    assert levels.min() == 0 and levels.max() == 255


@pytest.mark.parametrize("name", REFUSED)
def test_every_bad_picture_is_refused_in_a_sentence(reader, name):
    content, reason = REFUSED[name]
    with pytest.raises(BadRow, match=reason):
        reader.read(OWN_DATA + b64encode(content).decode(), "rows.jsonl:7")
    # The next picture is read by the same reader.
    assert reader.read(reference_of(READ["jpeg"], "row"), "row").width == WIDTH


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_damaged_at_random_none_ends_the_run_or_takes_long(reader, count):
    rng = random.Random(count)
    outcomes = set()
    for number in range(count):
        content = bytearray(READ[rng.choice(list(READ))])
        for _ in range(rng.randint(1, 12)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        content = content[: rng.randint(len(content) // 2, len(content))]
        began = time.process_time()
        try:
            reader.read(reference_of(bytes(content), "row"), f"row {number}")
            outcomes.add("read")
        except BadRow as refused:
            assert refused.where == f"row {number}" and refused.fix
            outcomes.add("refused")
        assert time.process_time() - began < 1
    assert "refused" in outcomes
