"""`bloomery recipes`: the packaged recipes."""

from pathlib import Path
from textwrap import shorten

import click

from bloomery.cli.common import NewPath, print_json, say
from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean
from bloomery.runs.names import find_run


@click.group(invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """List, show and copy the packaged recipes; import those of other programs; print the JSON schema.

    Example: bloomery recipes copy demo mine.yaml
    """
    if context.invoked_subcommand is None:
        context.invoke(list_)


@command.command("list")
def list_() -> None:
    """The packaged recipes, one line each."""
    from bloomery.recipe.load import packaged

    width = max(map(len, packaged()))
    for name, path in packaged().items():
        say(f"{name:<{width}}  {shorten(_first_comment(path), 98 - width, placeholder=' ...')}")


@command.command()
@click.argument("name")
def show(name: str) -> None:
    """Print a packaged recipe, or that of a run, as it is."""
    say(_packaged(name).read_text(encoding="utf-8"), nl=False)


@command.command()
@click.argument("name")
@click.argument("path", required=False, type=NewPath())
def copy(name: str, path: Path | None) -> None:
    """Copy a packaged recipe, or that of a run, to PATH (default: NAME.yaml here), as a start for your own."""
    source = _packaged(name)
    name = source.parent.name if source.name == "recipe.yaml" else name
    target = path if path is not None else Path(f"{name}.yaml")
    target = target / f"{name}.yaml" if target.is_dir() else target
    command = f"bloomery recipes copy {name} my-{name}.yaml"
    _write_new(target, source.read_text(encoding="utf-8"), f"name another file: {command}")
    say(f"{target}: now yours. `bloomery plan {target}` says what it would do.")


@command.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", metavar="PATH", type=NewPath(), help="Write the recipe to PATH instead of printing it.")
def import_(file: Path, out: Path | None) -> None:
    """Convert a training file of Axolotl or LLaMA-Factory to a recipe.

    Every key of FILE is mapped to a recipe key, or listed in a comment with the reason and what to do instead.

    Example: bloomery recipes import axolotl.yml --out mine.yaml
    """
    from bloomery.recipe.importing import import_recipe

    text, program = import_recipe(file)
    if out is None:
        say(text, nl=False)
        return
    _write_new(out, text, "give another --out")
    say(f"{out}: a recipe, from {file} ({program}). Next: bloomery plan {out}", err=True)


def _write_new(path: Path, text: str, fix: str) -> None:
    """A file that did not exist. Raises UserError."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError("that file exists; nothing is overwritten", where=str(path), fix=fix) from error
    except OSError as error:
        problem = f"the recipe cannot be written: {error.strerror}"
        raise UserError(problem, where=str(path), fix="choose another PATH") from error


@command.command()
def schema() -> None:
    """The JSON schema of a recipe, for editors that complete YAML."""
    from bloomery.recipe.load import json_schema

    print_json(json_schema())


def _packaged(name: str) -> Path:
    from bloomery.recipe.load import packaged

    known = packaged()
    if name in known:
        return known[name]
    try:
        return find_run(name) / "recipe.yaml"
    except UserError:  # what is said is of recipes
        pass
    fix = did_you_mean(name, known, "packaged recipes: " + ", ".join(known))
    raise UserError(f"there is no packaged recipe {name!r}", fix=fix, code=2)


def _first_comment(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
