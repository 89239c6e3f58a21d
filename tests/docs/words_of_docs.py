"""What a page tells people to type, and whether the command line and the recipe's schema know it."""

import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import click
from pydantic import BaseModel

from bloomery.cli import cli
from bloomery.hardware.specs import find_gpus
from bloomery.recipe.load import load_recipe, packaged
from bloomery.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
OVERRIDE = re.compile(r"([a-z_]+(?:\.[a-z_]+)+)=(.*)", re.DOTALL)
END = {"|", ">", "2>&1", "&&", "#", "..."}


def shown_equals(page: Path, shown: str, output: str, *, same: Callable[[str], str] = str) -> None:
    """Asserts that a page shows this output; with BLOOMERY_UPDATE=1 in the environment, makes it so.

    `same`: what is left of a text when figures that may change are taken out.
    """
    if os.environ.get("BLOOMERY_UPDATE") and same(output) != same(shown):
        text = page.read_text(encoding="utf-8")
        assert shown in text, "another test changed this block: run the update again"
        page.write_text(text.replace(shown, output), encoding="utf-8")
        return
    assert same(output) == same(shown)


def quoted(text: str) -> list[str]:
    """What stands in backticks outside of fenced blocks."""
    return re.findall(
        r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )


def commands_in(page: str) -> Iterator[str]:
    """Each `bloomery ...` in a fenced or indented block (up to its comment, after two blanks), or in backticks."""
    prose = []
    # a command may go on below
    for index, part in enumerate(re.sub(r" \\\n +", " ", page).split("\n```")):
        if index % 2:
            lines = part.splitlines()[1:]
        else:
            prose.append(part)
            lines = [line for line in part.splitlines() if line.startswith("    ")]
        for line in lines:
            match = re.match(r"\s*(?:\$ )?(bloomery .*)", line)
            if match:
                yield re.split(r"\s{2,}", match[1])[0]
    yield from (
        text for text in quoted(" ".join(prose).replace("\n", " ")) if text.startswith("bloomery ")
    )


def words_of(command: str) -> list[str]:
    """The words after `bloomery`, without brackets around optional ones, up to a pipe."""
    plain = re.sub(r"\[(-[^\]]*)\]", r"\1", command)
    words = shlex.split(plain)[1:]
    return words[: next((at for at, word in enumerate(words) if word in END), len(words))]


def check_command(words: list[str]) -> None:
    """Verb, flags, GPUs and recipe keys exist; where the recipe is a packaged one, the values load, too."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        verb, words = words[0], words[1:]
        found = command.get_command(click.Context(command), verb)
        assert found is not None, f"there is no {verb}"
        command = found
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    flags = {name for option in options for name in (*option.opts, *option.secondary_opts)} | {
        "--help"
    }
    asked = {word for word in words if re.match(r"--?[a-z]", word)}
    assert asked <= flags, f"{command.name} has no {asked - flags}"
    overrides = [word for word in words if OVERRIDE.match(word)]
    for word in overrides:
        check_key(word.partition("=")[0])
    for name in (word for option, word in itertools.pairwise(words) if option == "--gpu"):
        if name not in ("all", "NAME"):
            find_gpus(name)
    if words and words[0] in packaged() and command.name in ("plan", "train", "prepare"):
        load_recipe(words[0], [word for word in overrides if not word.endswith("=")])


def check_key(key: str) -> None:
    """A recipe key, or `section.*` for all of a section; of a section of several kinds, a key of one of them."""
    section: object = Recipe
    for part in key.split("."):
        if part == "*":
            return
        kinds = sections_in(section)
        assert kinds, f"{key} is too deep"
        names = {
            info.alias or name: info.annotation
            for kind in kinds
            for name, info in kind.model_fields.items()
        }
        assert part in names, f"a recipe has no {key}"
        section = names[part]


def sections_in(annotation: object) -> list[type[BaseModel]]:
    """The sections that an annotation allows, such as each kind of adapter."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in sections_in(part)]
