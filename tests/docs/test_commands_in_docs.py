"""Whatever the pages and messages tell people to type can be typed; every verb has a page."""

import re
from functools import cache
from pathlib import Path

from words_of_docs import ROOT, check_command, check_key, commands_in, quoted, words_of

from bloomery.cli import COMMANDS, cli
from bloomery.core.errors import UserError
from bloomery.recipe.schema import Recipe

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "src").rglob("*.yaml")), ROOT / "pyproject.toml"]
SECTIONS = "|".join(Recipe.model_fields)
FILES = {path.name for path in (ROOT / "src").rglob("*") if path.is_file()}


def test_the_commands_on_a_page_exist() -> None:
    pages = {command: page for page in PAGES for command in commands_in(page.read_text())}
    for command, page in pages.items():
        try:
            check_command(words_of(command))
        except (AssertionError, UserError) as fault:
            fault.add_note(f"{page}: {command}")
            raise


def test_pages_have_commands() -> None:
    assert len({command for page in PAGES for command in commands_in(page.read_text())}) > 300


def test_a_recipe_key_on_a_page_exists() -> None:
    texts = {text for page in PAGES for text in quoted(page.read_text())}
    for key in sorted(text for text in texts if re.fullmatch(rf"(?:{SECTIONS})(?:\.[a-z_]+)+=?", text)):
        if key not in FILES and not key.endswith((".json", ".safetensors", ".py", ".sh")):  # train.py is no key
            check_key(key.rstrip("="))


def test_every_verb_has_a_page() -> None:
    index = (ROOT / "docs/index.md").read_text()
    named = {words_of(text)[0] for text in quoted(index) if text.startswith("bloomery ")}
    assert {verb for verb in COMMANDS if cli.get_command(None, verb)} <= named  # type: ignore[arg-type]  # asked without a context
    for link in re.findall(r"\]\(([\w./-]+\.md)\)", index):
        assert (ROOT / "docs" / link).is_file(), link


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page}: {link}"
        for path in re.findall(r"`((?:tests|src|scripts|benchmarks)/[\w./-]+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page}: {path}"


@cache
def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown's toc makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def test_links_to_headings_lead_somewhere() -> None:
    for page in PAGES:
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
            target = (page.parent / link if link else page).resolve()
            assert target.suffix != ".md" or anchor in anchors_of(target), f"{page}: {link}#{anchor}"


def test_messages_name_verbs_that_exist() -> None:
    for source in SOURCES:
        for verb in re.findall(r"`bloomery ([a-z]+)", source.read_text()):
            assert verb in COMMANDS, f"{source}: bloomery {verb}"
