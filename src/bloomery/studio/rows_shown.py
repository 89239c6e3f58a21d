"""The first rows of a dataset as a model reads them: what is trained on, and pictures. Does not import torch."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from nicegui import ui

from bloomery.core.errors import system_errors_worded
from bloomery.core.text import harmless
from bloomery.data.prepare.prepare import prepared_folder
from bloomery.plan.gather import fetch_text
from bloomery.recipe.load import load_text
from bloomery.report.previews import ShownDocument, first_rows, shown_document
from bloomery.studio.components import text
from bloomery.studio.recipe_form import SOURCE

NUM_ROWS = 3


def shown_rows(recipe_text: str, name: str) -> list[ShownDocument]:
    """As `bloomery prepare --preview` reads them. Downloads a dataset of the Hub. Raises UserError."""
    with system_errors_worded():
        loaded_recipe = load_text(recipe_text, name=name, source=SOURCE)
        fetch_text(loaded_recipe.recipe)
        folder = prepared_folder(loaded_recipe, Path())
        rows = first_rows(loaded_recipe, folder, NUM_ROWS, report=lambda *_: None)
    length = loaded_recipe.recipe.data.sequence_length
    return [shown_document(row, length) for row in rows]


def show_rows(place: ui.element, documents: Sequence[ShownDocument]) -> None:
    """Each row with its counts; the tokens trained on have a color."""
    place.clear()
    with place:
        has_mask = any(has_loss for one in documents for _, has_loss in one.tokens)
        words = "It learns the marked part:" if has_mask else "Every token is trained on:"
        text(f"Rows as the model reads them. {words}", "p").classes("small")
        for document in documents:
            with ui.element("div").classes("row-shown").props("tabindex=0 role=region") as box:
                box.props["aria-label"] = harmless(document.title)
                text(harmless(f"{document.title} · {document.counts}"), "p").classes("small muted")
                if document.pictures:
                    _show_pictures(document)
                with ui.element("div").classes("mono"):
                    for has_loss, tokens in groupby(document.tokens, key=lambda token: token[1]):
                        piece = text("".join(token for token, _ in tokens))
                        if has_loss:
                            piece.classes("studio-loss")
                if document.hidden:
                    text(f"... and {document.hidden:,} more tokens", "p").classes("small muted")


def _show_pictures(document: ShownDocument) -> None:
    with ui.element("div").classes("row-pictures"):
        for number, picture in enumerate(document.pictures, start=1):
            with ui.element("figure"):
                if picture.shown is not None:
                    image = ui.element("img")
                    image.props["src"] = picture.shown.url
                    image.props["alt"] = f"picture {number}"
                text(f"picture {number} · {picture.text}", "figcaption").classes("small muted")
