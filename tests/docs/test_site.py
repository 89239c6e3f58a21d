"""The documentation site: readable colors, a switch between light and dark, a search that works from a file."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from words_of_docs import ROOT

from bloomery.core.look import colors
from contrast import contrast

sys.path.append(str(ROOT / "scripts"))

import docs_links

CSS = (ROOT / "docs/stylesheets/contrast.css").read_text()


# The theme has colors of its own for these, and those of text for the others.
PAINTED = ("keyword", "string", "number", "function", "constant", "special")


def color_of(name: str, *, dark: bool) -> str:
    """What the theme's name for a color comes to: a token, or a pair of its own."""
    value = re.search(rf"--md-{name}: ([^;]+);", CSS)
    assert value is not None
    if token := re.fullmatch(r"var\(--([\w-]+)\)", value[1]):
        return colors(dark=dark)[token[1]]
    pair = re.fullmatch(r"light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", value[1])
    assert pair is not None, value[1]
    return pair[1 + dark]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_of_it(dark: bool) -> None:
    page = color_of("default-bg-color", dark=dark)
    for text in ("typeset-a-color", "accent-fg-color", "typeset-color", "default-fg-color--light"):
        assert contrast(color_of(text, dark=dark), page) >= 4.5, text
    code = color_of("code-bg-color", dark=dark)
    # Of every kind of word that the theme paints in code. Kinds that are not named here have the color of text.
    painted = set(re.findall(r"--md-(code-hl-\w+-color):", CSS))
    assert painted == {f"code-hl-{kind}-color" for kind in PAINTED}
    for text in ("code-fg-color", "default-fg-color--light", *painted):
        assert contrast(color_of(text, dark=dark), code) >= 4.5, text
    header = color_of("primary-fg-color", dark=dark)
    assert contrast(color_of("primary-bg-color", dark=dark), header) >= 4.5  # and tabs


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


def searched(page: str) -> bool:
    """Whether the search of the site has this page."""
    found = SimpleNamespace(file=SimpleNamespace(src_uri=page), meta={})
    docs_links.on_page_markdown("", page=found)
    return not found.meta.get("search", {}).get("exclude", False)


def test_the_search_of_users_has_no_pages_of_contributors() -> None:
    for_contributors = [
        path.relative_to(ROOT / "docs").as_posix()
        for folder in ("contributing", "decisions")
        for path in (ROOT / "docs" / folder).glob("*.md")
    ]
    assert len(for_contributors) > 20
    assert [page for page in for_contributors if searched(page)] == []
    assert not searched("reference/triton-kernels.md")
    assert all(searched(page.relative_to(ROOT / "docs").as_posix()) for page in HOW_TO)


# Files of the repository that a page for users names rightly: what a command reads, and where a GPU is added. A test or
# a source file as proof helps nobody who cannot read it.
TO_ACT_ON = re.compile(
    r"tests/machines|--data src/bloomery/core|hardware/gpus\.toml|below `src/bloomery`"
)
CITED = re.compile(
    r"(?<![\w./-])(?:tests|src/bloomery)/\S+|(?<![\w/-])test_\w+\.py|"
    r"`(?:plan|check|model|data|train|hardware|recipe|facts|monitor)/[\w/]+\.(?:py|toml)`"
)


def cited_in(text: str) -> list[str]:
    """The test and source files that a page names; those in a comment of the page are for its writers."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not TO_ACT_ON.search(line)]
    return [found for line in lines for found in CITED.findall(line)]


def test_pages_of_users_cite_no_tests_and_no_sources() -> None:
    assert cited_in("as tested (`tests/train/test_ppo.py`)") == ["tests/train/test_ppo.py`)"]
    assert cited_in("see `plan/estimate/speed.py`") == ["`plan/estimate/speed.py`"]
    assert cited_in("bloomery doctor --machine tests/machines/mi50.json") == []
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    users = [
        page
        for page in pages
        if page.parent == ROOT or searched(page.relative_to(ROOT / "docs").as_posix())
    ]
    assert len(users) > 100
    cited = {
        str(page.relative_to(ROOT)): found
        for page in users
        if page.name != "operating-systems.md"
        and (found := cited_in(page.read_text(encoding="utf-8")))
    }
    assert cited == {}


def test_every_picture_is_on_a_page() -> None:
    """What no page shows is never drawn again, and keeps an old look in the repository."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "docs/tutorials/notebook.ipynb",
    ]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    pictures = [path.name for path in (ROOT / "docs/figures").iterdir()]
    assert [name for name in pictures if f"figures/{name}" not in text] == []
