"""The documentation site: readable colors, a switch between light and dark, a search that works from a file."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from words_of_docs import ROOT

sys.path.append(str(ROOT / "scripts"))

import docs_links

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


HOW_TO = sorted((ROOT / "docs/how-to").glob("*.md"))
LONGEST = 250  # lines: a page that somebody reads while doing something else


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.name)
def test_a_how_to_page_is_short(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").count("\n")
    assert lines <= LONGEST, "split it by what readers look for, and list it in mkdocs.yml"


def test_how_to_pages_are_in_seven_groups() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("  - How-to guides:\n")[1]
    groups = re.split(
        r"^      - ([^:\n]+):\n", nav.split("\n  - Reference:")[0], flags=re.MULTILINE
    )
    assert groups[1::2] == [
        *("Data", "Train", "Scale", "Watch", "Evaluate and use", "Machines", "Migrate"),
    ]
    listed = re.findall(r"(how-to/[\w-]+\.md)", nav)
    assert sorted(listed) == [page.relative_to(ROOT / "docs").as_posix() for page in HOW_TO]


def test_the_search_of_users_has_no_pages_of_contributors() -> None:
    def searched(page: str) -> bool:
        found = SimpleNamespace(file=SimpleNamespace(src_uri=page), meta={})
        docs_links.on_page_markdown("", page=found)
        return not found.meta.get("search", {}).get("exclude", False)

    for_contributors = [
        path.relative_to(ROOT / "docs").as_posix()
        for folder in ("contributing", "decisions")
        for path in (ROOT / "docs" / folder).glob("*.md")
    ]
    assert len(for_contributors) > 20
    assert [page for page in for_contributors if searched(page)] == []
    assert not searched("reference/triton-kernels.md")
    assert all(searched(page.relative_to(ROOT / "docs").as_posix()) for page in HOW_TO)
