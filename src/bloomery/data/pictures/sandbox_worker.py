"""A process that decodes pictures of others, with limits on time and memory and without file access.

A picture leaves it as bytes that any reader decodes alike: upright, 8 bits, RGB.
"""

import io
import resource
import signal
import warnings
from typing import NoReturn

from PIL import Image, ImageOps

from bloomery.core.child import accept, reply, requests
from bloomery.data.pictures.references import MAX_PIXELS

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# Written by cameras, browsers and programs as they are; others are written anew.
KEPT_FORMATS = ("JPEG", "PNG", "WEBP")
# How files of phones name themselves behind `ftyp`, of which a photo has more kinds than one.
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
MAX_RATIO = 200  # of the sides: processors refuse more
MEMORY_BYTES = 3 * 2**30
CPU_SECONDS = 10.0  # for one picture
ORIENTATION = 0x0112  # the tag of EXIF


class Refused(Exception):
    """Why a picture is not read."""


def normalized(content: bytes, *, plain: bool = False) -> tuple[bytes, tuple[int, int]]:
    """The picture, and its width and height. `plain`: as a file of nothing but its pixels. Raises Refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(content), formats=FORMATS)
            _refuse_sizes(picture)
            num_frames = getattr(picture, "n_frames", 1)
            if num_frames > 1:
                raise Refused(f"is animated: it has {num_frames} frames")
            # Whether a JPEG is whole is seen at an eighth of its sides, too, in half of the time.
            size = picture.size
            if not plain:
                picture.draft(None, (1, 1))
            picture.load()
            is_upright = picture.getexif().get(ORIENTATION, 1) == 1
            is_plain = picture.mode in ("RGB", "L") and "transparency" not in picture.info
            if plain:
                return _written_anew(picture, "PPM")
            if picture.format in KEPT_FORMATS and is_upright and is_plain:
                return content, size
            return _written_anew(Image.open(io.BytesIO(content), formats=FORMATS), "PNG")
    except Refused:
        raise
    except MemoryError:
        raise Refused("takes more memory than a picture may") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Refused(f"has more than {MAX_PIXELS:,} pixels") from None
    except Image.UnidentifiedImageError:
        kinds = f"none of {', '.join(FORMATS)}"
        brand = content[8:12] if content[4:8] == b"ftyp" else b""
        if brand in HEIC_BRANDS:
            raise Refused(f"is a HEIC photo, {kinds}: save it as JPEG") from None
        raise Refused(f"is {kinds}") from None
    except Exception as error:  # a decoder may raise any exception
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise Refused(f"is damaged: {reason}") from None


def _refuse_sizes(picture: Image.Image) -> None:
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise Refused(f"has {width:,} x {height:,} pixels, and {MAX_PIXELS:,} are read at most")
    if min(width, height) < 1 or max(width, height) > MAX_RATIO * min(width, height):
        raise Refused(f"is {width} x {height} pixels: one side is over {MAX_RATIO} times the other")


def _written_anew(picture: Image.Image, form: str) -> tuple[bytes, tuple[int, int]]:
    upright = ImageOps.exif_transpose(picture)
    if upright.mode.startswith("I;16") or upright.mode == "I":
        upright = upright.convert("I").point(lambda level: level / 256).convert("L")
    elif upright.mode == "F":
        raise Refused("holds floating-point numbers, whose range nobody states")
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        colors = upright.convert("RGBA")
        white = Image.new("RGBA", colors.size, "white")
        upright = Image.alpha_composite(white, colors)
    written = io.BytesIO()
    upright.convert("RGB").save(written, format=form, compress_level=3)
    return written.getvalue(), upright.size


def _stop(_number: int, _frame: object) -> NoReturn:
    raise Refused(f"takes more than {CPU_SECONDS:g} seconds to decode")


def main() -> None:
    """Answers each picture: its width, height and bytes, or what is wrong with it."""
    job = accept()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    Image.init()
    signal.signal(signal.SIGPROF, _stop)
    for request in requests(job):
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            content, (width, height) = normalized(
                request.get("content", b""), plain=job.get("plain", False)
            )
        except Refused as refusal:
            reply(job, {"refused": str(refusal)})
            continue
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        size = {"width": width, "height": height}
        if content is request.get("content"):
            reply(job, size)
        else:
            reply(job, size, content=content)


if __name__ == "__main__":
    main()
