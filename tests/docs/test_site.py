"""The documentation site: readable colors, a switch between light and dark, a search that works from a file."""

import re

from words_of_docs import ROOT

CSS = (ROOT / "docs/stylesheets/contrast.css").read_text()
# The theme's backgrounds of a page and of the text on its header.
PAGE = {"default": "#ffffff", "slate": "#1e2129"}


def luminance(color: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.1)."""
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def colors_of(scheme: str) -> dict[str, str]:
    block = re.search(rf'scheme="{scheme}"\] {{(.*?)}}', CSS, re.DOTALL)
    assert block is not None
    return dict(re.findall(r"--md-([\w-]+): (#[0-9a-f]{6})", block[1]))


def test_links_and_tabs_have_the_contrast_that_wcag_asks_of_text() -> None:
    assert round(contrast("#000000", "#ffffff")) == 21
    for scheme, background in PAGE.items():
        colors = colors_of(scheme)
        assert contrast(colors["typeset-a-color"], background) >= 4.5
        assert contrast(colors["accent-fg-color"], background) >= 4.5
        assert contrast("#ffffff", colors["primary-fg-color"]) >= 4.5  # header and tabs


def test_search_works_in_pages_that_are_opened_as_files() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    # else the theme loads one from a foreign site
    script = re.search(r"polyfills: \[(\S+iframe-worker\.js)\]", config)
    assert "\n  - offline\n" in config
    assert script is not None
    assert (ROOT / "docs" / script[1]).is_file()


def test_a_reader_can_switch_between_light_and_dark() -> None:
    assert (ROOT / "mkdocs.yml").read_text().count("toggle:") == 3
