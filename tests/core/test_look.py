"""One look: the tokens are legible in the light and in the dark, and every page reads them."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from bloomery.core.look import colors, image_tokens, tokens
from contrast import contrast

REPOSITORY = Path(__file__).parents[2]
GROUNDS = ("paper", "card", "sunk")
# Text, and what it lies on.
TEXTS = [
    *((text, ground) for text in ("ink", "ink-2", "ink-3", "good", "warn", "bad") for ground in GROUNDS),
    *((text, ground) for text in ("ember", "ember-ink") for ground in ("paper", "card")),
    ("ember-ink", "ember-soft"),
    ("on-ember", "ember"),
    *((name, f"{name}-soft") for name in ("good", "warn", "bad")),
    *((ink, f"{name}-soft") for ink in ("ink", "ink-2") for name in ("good", "warn", "bad", "ember")),
]  # fmt: skip


def test_the_measure_of_contrast() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # of WCAG's examples


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_is_legible(dark: bool) -> None:
    values = colors(dark=dark)
    faint = {pair: contrast(*map(values.__getitem__, pair)) for pair in TEXTS}
    assert {pair: round(ratio, 2) for pair, ratio in faint.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_curves_stand_out_from_their_card(dark: bool) -> None:
    values = colors(dark=dark)
    faint = {
        name: contrast(values[name], values["card"])
        for name in values
        if re.fullmatch(r"c\d", name)
    }
    assert len(faint) == 8
    assert all(ratio >= 3 for ratio in faint.values()), faint  # WCAG's figure for graphics


def test_an_image_has_the_same_colors() -> None:
    text = image_tokens(".chart")
    light, dark = text.split("@media (prefers-color-scheme:dark)")
    for part, is_dark in ((light, False), (dark, True)):
        assert dict(re.findall(r"--([\w-]+):(#[0-9a-f]{6})", part)) == colors(dark=is_dark)


def test_the_documentation_has_the_same_tokens() -> None:
    """The site is built from docs/ alone."""
    copy = REPOSITORY / "docs" / "stylesheets" / "tokens.css"
    original = files("bloomery.core").joinpath("tokens.css").read_text(encoding="utf-8")
    assert copy.read_text(encoding="utf-8") == original, "copy src/bloomery/core/tokens.css"


# Where a page names a color, it names a token.
SHEETS = (
    "studio/style.css",
    "report/templates/style.css",
    "report/templates/image.css",
    "serve/page.html",
)


@pytest.mark.parametrize("sheet", SHEETS)
def test_no_page_has_colors_of_its_own(sheet: str) -> None:
    text = files("bloomery").joinpath(sheet).read_text(encoding="utf-8")
    styles = (
        text if sheet.endswith(".css") else re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    )
    assert "var(--" in styles
    rules = re.sub(r"/\*.*?\*/", "", styles, flags=re.DOTALL)
    own = re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[;,\s)}])|rgba?\([^)]*\)", rules)
    assert own == []
    unknown = set(re.findall(r"var\(--([\w-]+)", styles)) - set(
        re.findall(r"--([\w-]+):", tokens() + styles)
    )
    assert unknown == set()
