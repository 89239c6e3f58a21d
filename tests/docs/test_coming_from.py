"""Every statement of a guide that people come from has a command, a test or a correction here, and those exist."""

import re
import shlex
from pathlib import Path

import click
import pytest

from bloomery.cli import VERBS, cli
from bloomery.recipe.load import load_recipe

ROOT = Path(__file__).parents[2]
GUIDES = {"go-coder-guide.md": (59, "go-coder-125m")}


def rows_of(page: str) -> dict[int, list[str]]:
    """Number -> the cells there, here, correction."""
    text = (ROOT / "docs/coming-from" / page).read_text(encoding="utf-8")
    rows = [cells_of(line) for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    return {int(row[0]): row[1:] for row in rows}


def cells_of(line: str) -> list[str]:
    """The cells of a row; an escaped bar is part of its cell."""
    return [cell.strip().replace("\0", "|") for cell in line.replace(r"\|", "\0").strip().strip("|").split("|")]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


CASES = [(page, number, cells) for page in GUIDES for number, cells in rows_of(page).items()]


@pytest.mark.parametrize("page", GUIDES)
def test_every_statement_of_the_guide_has_a_row(page: str) -> None:
    assert sorted(rows_of(page)) == list(range(1, GUIDES[page][0] + 1))


@pytest.mark.parametrize(("page", "number", "cells"), CASES, ids=[f"{page}-{number}" for page, number, _ in CASES])
def test_row_says_what_is_done_here(page: str, number: int, cells: list[str]) -> None:
    assert number
    there, here, correction = cells
    assert there
    assert quoted(here) or correction, "neither a command, nor a test, nor a correction"
    for text in quoted(here):
        check(text, GUIDES[page][1])


def check(text: str, recipe: str) -> None:
    if text.startswith("bloomery "):
        check_command(shlex.split(text)[1:])
    elif text.startswith("tests/"):
        assert (ROOT / text).exists(), text
    elif "=" in text:
        load_recipe(recipe, shlex.split(text))
    else:
        assert re.match(r"(make \w+|--?\w+|[a-z_.]+)$", text), f"{text!r} is neither a command, a recipe key nor a test"


def check_command(words: list[str]) -> None:
    verb = words[0]
    assert verb in VERBS, verb
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None, f"{verb} is not built"
    while isinstance(command, click.Group):
        words = words[1:]
        command = command.get_command(click.Context(command), words[0])
        assert command is not None, words
    flags = {option for parameter in command.params if isinstance(parameter, click.Option) for option in parameter.opts}
    asked = {word for word in words if word.startswith("-")}
    assert asked <= flags, f"{verb} has no {asked - flags}"
