"""Rows as a model reads them, with their loss mask and pictures: `bloomery prepare --preview N`, studio's New run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bloomery.core.units import counted
from bloomery.data.pictures.thumbnails import Shown, shown_picture
from bloomery.data.prepare.pipeline import Report
from bloomery.data.prepare.prepare import preparation, refuse_layout
from bloomery.data.prepare.stats import Preview, PreviewedPicture, preview
from bloomery.recipe.load import LoadedRecipe
from bloomery.report.charts import render

MOST_TOKENS = 400  # of a row


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


def first_rows(
    loaded_recipe: LoadedRecipe, folder: Path, count: int, *, report: Report
) -> list[Preview]:
    """The first rows of a dataset as training reads them. `folder`: of the prepared dataset. Raises UserError."""
    recipe = loaded_recipe.recipe
    refuse_layout(recipe)
    length, layout = recipe.data.sequence_length, recipe.data.layout
    with preparation(loaded_recipe, folder, report=report) as preparing:
        return list(preview(preparing, count, sequence_length=length, layout=layout))


def shown_document(document: Preview, sequence_length: int) -> ShownDocument:
    """A document for the page, cut where it is long, as on a terminal."""
    # The first token has no loss: nothing predicts it. Of a document without a mask, nothing is marked.
    mask = None if document.loss_mask is None else [False, *document.loss_mask[1:]]
    pieces, mask = with_short_pictures(document, mask)
    kept = pieces[:MOST_TOKENS]
    learned = [False] * len(kept) if mask is None else mask[: len(kept)]
    role = f" ({document.role})" if document.role else ""
    kind = f"{document.kind} · " if document.kind else ""
    return ShownDocument(
        f"{document.source}{role}",
        f"{document.split} · {kind}{counts_of(document, sequence_length)}",
        tuple(map(ShownPicture.of, document.pictures)),
        list(zip(map(visible, kept), learned, strict=True)),
        len(pieces) - len(kept),
    )


def counts_of(document: Preview, sequence_length: int) -> str:
    """The tokens, loss tokens and sequences of a document, or the reason why training leaves it out."""
    if document.bad_row:
        return f"left out: {visible(document.bad_row)}"

    # Plain text has a loss on every token and is packed into sequences.
    truncation = f" · {document.cut:,} tokens truncated" if document.cut else ""
    sequences = f"{counted(document.sequences, 'sequences')} of {sequence_length:,} tokens"
    tokens = f"{len(document.ids):,} tokens"
    if document.pictures and document.cut:
        return f"{tokens} · left out: longer than {sequence_length:,}, and a text with pictures is never cut"
    if document.kind == "prompt":
        return tokens
    if document.loss_mask is None:
        return f"{tokens} · {sequences}{truncation}"

    # The loss is on the prediction of a token, and nothing predicts the first one.
    loss_tokens = sum(document.loss_mask[1:])
    tokens += f" · loss on {loss_tokens:,}{truncation}"
    if document.kind == "text":
        return f"{tokens} · {sequences}"
    if document.sequences:
        return tokens

    if not loss_tokens:
        return f"{tokens} · left out: all labels are masked"
    side = " on one side of the pair" if document.role in ("chosen", "rejected") else ""
    return f"{tokens} · left out: no loss tokens{side} after truncation to {sequence_length:,}"


def with_short_pictures(
    document: Preview, loss_mask: list[bool] | None
) -> tuple[list[str], list[bool] | None]:
    """Pieces and loss mask with one piece for each stretch of a picture's tokens, which says how many there are."""
    starts = [
        index
        for index, token in enumerate(document.ids)
        if not (index and token == document.picture_id == document.ids[index - 1])
    ]
    pieces = list[str]()
    for start, end in zip(starts, [*starts[1:], len(document.ids)], strict=True):
        times = f" x {end - start:,} " if end - start > 1 else ""
        pieces.append(document.pieces[start] + times)
    return pieces, None if loss_mask is None else [loss_mask[start] for start in starts]


def visible(piece: str) -> str:
    """The text with escapes for control characters: untrusted text must not control a terminal."""
    return "".join(
        char if char in "\n\t" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in piece
    )


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
