"""Whatever the pages and messages tell people to type can be typed; every verb has a page."""

import re

import pytest
from words_of_docs import ROOT, check_command, check_key, commands_in, quoted, words_of

from bloomery.cli import COMMANDS, cli
from bloomery.recipe.schema import Recipe

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "src").rglob("*.yaml")), ROOT / "pyproject.toml"]
SECTIONS = "|".join(Recipe.model_fields)
FILES = {path.name for path in (ROOT / "src").rglob("*") if path.is_file()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_on_a_page_exist(page) -> None:
    for command in sorted(set(commands_in(page.read_text()))):
        check_command(words_of(command))


def test_pages_have_commands() -> None:
    assert len({command for page in PAGES for command in commands_in(page.read_text())}) > 300


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_recipe_key_on_a_page_exists(page) -> None:
    keys = [text for text in quoted(page.read_text()) if re.fullmatch(rf"(?:{SECTIONS})(?:\.[a-z_]+)+=?", text)]
    for key in keys:
        if key not in FILES and not key.endswith((".json", ".safetensors", ".py", ".sh")):  # train.py is no key
            check_key(key.rstrip("="))


def test_every_verb_has_a_page() -> None:
    index = (ROOT / "docs/index.md").read_text()
    named = {words_of(text)[0] for text in quoted(index) if text.startswith("bloomery ")}
    assert {verb for verb in COMMANDS if cli.get_command(None, verb)} <= named  # type: ignore[arg-type]  # asked without a context
    for link in re.findall(r"\]\(([\w./-]+\.md)\)", index):
        assert (ROOT / "docs" / link).is_file(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page) -> None:
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"`((?:tests|src|scripts|benchmarks)/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists(), path


def anchors_of(page: str) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown's toc makes them."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_to_headings_lead_somewhere(page) -> None:
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        target = page.parent / link if link else page
        assert target.suffix != ".md" or anchor in anchors_of(target.read_text()), f"{link}#{anchor}"


def test_messages_name_verbs_that_exist() -> None:
    for source in SOURCES:
        for verb in re.findall(r"`bloomery ([a-z]+)", source.read_text()):
            assert verb in COMMANDS, f"{source}: bloomery {verb}"
