"""What several verbs share: how a recipe and a run are named, and how JSON is printed."""

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

import click

from bloomery.core.errors import UserError
from bloomery.core.text import expanded, harmless

if TYPE_CHECKING:
    from rich.text import Text

    from bloomery.recipe.load import LoadedRecipe

F = TypeVar("F", bound=Callable[..., Any])


def recipe_argument(function: F) -> F:
    """Click arguments `recipe: str` and `overrides: tuple[str, ...]` for `RECIPE [section.key=value ...]`."""
    return click.argument("recipe")(overrides_argument(function))


def recipe_or_model(function: F) -> F:
    """As `recipe_argument`, or `--model M --data D` without a recipe; `chosen_recipe` makes one of them."""
    options = (
        click.option("--model", metavar="MODEL", help="A folder or Hub id; without RECIPE, one is made for both."),
        click.option("--data", metavar="PATH", help="A file, a folder or hub:ORG/NAME to train on."),
        click.argument("recipe", required=False),
        overrides_argument,
    )
    for decorate in reversed(options):
        function = decorate(function)
    return function


def chosen_recipe(
    recipe: str | None, overrides: tuple[str, ...], model: str | None, data: str | None, *, fetch: bool = False
) -> "tuple[LoadedRecipe, str]":
    """The recipe that is meant, and the words that name it to another command. Beside a recipe, `model` and `data` are
    overrides; without one a recipe is made of both, and printed. Raises UserError (code 2).
    """
    from bloomery.hub import PREFIX, fetch_dataset, fetch_model, is_hub_id
    from bloomery.plan.made import guessed_columns, made_recipe, refuse_data
    from bloomery.recipe.load import load_recipe, load_text, packaged

    if recipe is not None and "=" in recipe and (model or data) and not Path(recipe).exists():
        overrides, recipe = (recipe, *overrides), None
    if recipe is not None:
        if recipe not in packaged():
            refuse_data(recipe)
        given = [f"{key}={value}" for key, value in (("model.from", model), ("data.path", data)) if value is not None]
        words = (*given, *overrides)
        loaded = load_recipe(recipe, words)
        for line in guessed_columns(loaded.recipe):
            say(f"columns    {line}", err=True)
        return loaded, shlex.join([recipe, *words])
    if model is None or data is None:
        missing = "a recipe is missing" if model is data else f"--{'data' if model else 'model'} is missing"
        fix = "name a recipe (`bloomery recipes` lists the packaged ones), or --model MODEL --data PATH"
        raise UserError(missing, where="the command line", fix=fix, code=2)
    with text_flags():
        if fetch and is_hub_id(model):
            fetch_model(model)
        if fetch and (data.startswith(PREFIX) or is_hub_id(data)):
            fetch_dataset(PREFIX + data.removeprefix(PREFIX))
        text, name = made_recipe(model, data)
    made = ["--model", model, "--data", data]
    loaded = load_text(text, name=name, source=shlex.join(made), overrides=overrides)
    say(f"# made for {shlex.join(made)}; as a file of yours, any key can be changed\n{text}", err=True)
    return loaded, shlex.join([*made, *overrides])


def overrides_argument(function: F) -> F:
    """The click argument `overrides: tuple[str, ...]`; words that are not `section.key=value` are refused."""
    return click.argument("overrides", nargs=-1, metavar="[section.key=value ...]", callback=_overrides)(function)


def _overrides(context: click.Context, parameter: click.Parameter, value: Sequence[str]) -> tuple[str, ...]:
    del parameter
    for word in value:
        if word.startswith("-") and context.info_name == "train":  # a word behind `--`: others are flags
            problem = f"{word} behind -- is for a launcher of several processes, and this version trains in one"
            fix = "leave out -- and what follows; `bloomery plan RECIPE --gpus 2` plans for several devices"
            raise UserError(problem, where=f"`{context.command_path}`", fix=fix, code=2)
        if "=" not in word:
            fix = f"overrides look like train.epochs=2; `{context.command_path} --help` shows the rest"
            raise UserError(f"{word!r} is not an override", where=f"`{context.command_path}`", fix=fix, code=2)
    return tuple(value)


def devices_option(function: F) -> F:
    """The click option `devices: str`."""
    told = "The device to use: auto (the GPU where one can be used), cpu, or its number."
    return click.option("-d", "--devices", metavar="DEVICE", default="auto", show_default=True, help=told)(function)


def quantize_option(function: F) -> F:
    """The click option `quantize: str | None`."""
    kinds = click.Choice(["none", "nf4", "int8"])
    told = "Keep frozen matrices in 4 or 8 bits [default: as the run kept them that trained MODEL]."
    return click.option("--quantize", type=kinds, help=told)(function)


def loading(text: str) -> None:
    """A line on stderr about what is loaded."""
    say(f"loading    {text}", err=True)


def literal(text: str) -> "Text":
    """For a status line of rich, whose spinner reads [brackets] in a str as markup whatever its console is told."""
    from rich.text import Text

    return Text(text)


@final
class NewPath(click.Path):
    """A place that will be written. `~name` of nobody here is refused: no folder is ever called that on purpose."""

    def __init__(self, *, file_okay: bool = True) -> None:
        super().__init__(path_type=Path, file_okay=file_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = expanded(Path(os.fsdecode(super().convert(value, param, ctx))))
        if not str(value) or str(path).startswith("~"):
            problem = f"there is no user {path.parts[0][1:]!r} here" if str(value) else "an empty name is no place"
            where = f"{param.opts[0] if param else 'the path'} {value}".rstrip()
            raise UserError(problem, where=where, fix="name a folder or file that can be made", code=2)
        return path


def data_path(data: Path) -> Path:
    """A path as it is; `hub:ORG/NAME` as the folder of that data set."""
    from bloomery.hub import PREFIX, fetch_dataset

    return fetch_dataset(str(data)) if str(data).startswith(PREFIX) else data


@contextmanager
def text_flags() -> Iterator[None]:
    """What is wrong with a text or a chat template, said of `--data` and `--template` and not of a recipe's keys."""
    try:
        yield
    except UserError as error:
        if error.where == "data.chat.template":
            fix = "name one: --template chatml, llama2, llama3, qwen, mistral, gemma, or a file"
            raise UserError(error.problem, where="--template", fix=fix, code=2) from error
        fix = _of_flags("name a text: --data PATH" if error.fix == "mend data.path" else error.fix)
        where = error.where.removeprefix("data.path: ")
        raise UserError(error.problem, where=where, fix=fix, code=error.code) from error


def _of_flags(fix: str) -> str:
    """A remedy without a recipe's keys: no flag skips rows or maps columns."""
    for words in (", or set data.on_error to skip", ", set data.on_error to skip"):
        fix = fix.replace(words, "")
    fix = fix.replace("set data.chat.template to another", "name another with --template")
    fix = re.sub(r"^name it: data\.columns=\{(\w+): NAME\}", r"rename its column to \1", fix)
    return fix.replace("data.path=", "--data ")


def refuse_undecoded(text: str, *, what: str = "the prompt", where: str = "--prompt") -> None:
    """Raises UserError (code 2) for bytes that this terminal's encoding does not know."""
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        problem, fix = f"{what} is not text in this terminal's encoding", "write it in UTF-8: LANG=C.UTF-8"
        raise UserError(problem, where=where, fix=fix, code=2)


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text that may hold what others wrote: names of files and runs, parts of a dataset, answers of a model."""
    click.echo(harmless(text), err=err, nl=nl)


def print_json(value: object) -> None:
    """One JSON document on stdout. Numbers that JSON lacks (NaN, infinity) become null."""
    ascii_only = (getattr(sys.stdout, "encoding", None) or "utf-8").lower() not in ("utf-8", "utf8")
    click.echo(json.dumps(plain(value), indent=2, ensure_ascii=ascii_only, allow_nan=False))


def plain(value: object) -> Any:
    """Dataclasses, pydantic models and paths as what JSON knows."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json", by_alias=True))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
