"""`bloomery prepare RECIPE --preview N --html FILE`: rows as a model reads them, with their pictures, on one page."""

from collections.abc import Sequence
from dataclasses import dataclass

from bloomery.data.pictures.thumbnails import Shown, shown_picture
from bloomery.data.prepare.stats import PreviewedPicture
from bloomery.report.charts import render


@dataclass(frozen=True)
class ShownPicture:
    """`shown`: a small copy; None where nothing is installed that decodes it."""

    shown: Shown | None
    text: str

    @classmethod
    def of(cls, picture: PreviewedPicture) -> "ShownPicture":
        return cls(shown_picture(picture.content), picture_text(picture))


@dataclass(frozen=True)
class ShownDocument:
    """A row with its tokens as text, each with whether it is trained on. `hidden`: how many are not shown."""

    title: str
    counts: str
    pictures: tuple[ShownPicture, ...]
    tokens: Sequence[tuple[str, bool]]
    hidden: int


def picture_text(picture: PreviewedPicture) -> str:
    """Its size, and how many tokens stand for it."""
    return f"{picture.width:,} x {picture.height:,} pixels · {picture.tokens:,} tokens"


def preview_page(name: str, documents: Sequence[ShownDocument]) -> str:
    """One file without scripts, which fetches nothing. `name`: of the recipe."""
    return render(
        "preview.html",
        name=name,
        written="Written by bloomery prepare --preview.",
        documents=documents,
        has_loss=any(has_loss for one in documents for _, has_loss in one.tokens),
        shows_pictures=any(picture.shown for one in documents for picture in one.pictures),
    )
