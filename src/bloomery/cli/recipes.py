"""`bloomery recipes`: the packaged recipes"""

import shutil
from pathlib import Path

import click

from bloomery.cli.common import NewPath, echo, print_json
from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean
from bloomery.runs.folder import find_run


@click.group(invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """List, show, copy and import recipes; print the JSON schema.

    Example: bloomery recipes copy demo mine.yaml
    """
    if context.invoked_subcommand is None:
        context.invoke(list_)


@command.command("list")
def list_() -> None:
    """List the packaged recipes with model, dataset and GPU."""
    from bloomery.recipe.load import packaged

    rows, others = [("recipe", "method", "model", "GPU", "dataset")], []
    for name, path in packaged().items():
        comment = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").rstrip(".")
        method, colon, rest = comment.partition(": ")
        if not colon or name.endswith("-tiny"):
            others.append(name)
            continue
        model, dataset, gpu = rest.split(", ")
        smallest = gpu.removesuffix(" GPU").replace("one ", "").replace("no", "none")
        smallest = smallest.removesuffix(" GPUs").replace("eight ", "8 x ")
        rows.append((name, method, model, smallest, dataset))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = shutil.get_terminal_size((1000, 24)).columns  # a pipe gets whole lines
    for row in rows if room >= sum(widths[:-1]) + 20 else [row[:-1] for row in rows]:  # no room for a dataset
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip()
        echo(line if len(line) <= room else line[: room - 1] + "…")
    twins = sum(name.endswith("-tiny") for name in others)
    echo("\nGPU         the smallest one that fits, estimated")
    echo(f"NAME-tiny   {twins} of them with a small random model: test your setup on a CPU")
    echo("everything  every key with its default: bloomery recipes show everything")


@command.command()
@click.argument("name")
def show(name: str) -> None:
    """Print a packaged recipe or the recipe of a run."""
    echo(_recipe_path(name).read_text(encoding="utf-8"), nl=False)


@command.command()
@click.argument("name")
@click.argument("path", required=False, type=NewPath())
def copy(name: str, path: Path | None) -> None:
    """Copy a recipe to PATH (default: NAME.yaml)."""
    source = _recipe_path(name)
    name = source.parent.name if source.name == "recipe.yaml" else name
    target = path if path is not None else Path(f"{name}.yaml")
    target = target / f"{name}.yaml" if target.is_dir() else target
    command = f"bloomery recipes copy {name} my-{name}.yaml"
    _write_new(target, source.read_text(encoding="utf-8"), command)
    echo(f"copied     {target}\nnext       bloomery plan {target}")


@command.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", metavar="PATH", type=NewPath(), help="Write the recipe to PATH, not to stdout.")
def import_(file: Path, out: Path | None) -> None:
    """Convert an Axolotl or LLaMA-Factory YAML to a recipe.

    Every key of FILE is mapped to a recipe key, or listed in a comment with the reason and an alternative.

    Example: bloomery recipes import axolotl.yml --out mine.yaml
    """
    from bloomery.recipe.aliases import import_recipe

    text, program = import_recipe(file)
    if out is None:
        echo(text, nl=False)
        return
    _write_new(out, text, "choose another --out")
    echo(f"imported   {out}, from {file} ({program})\nnext       bloomery plan {out}", err=True)


def _write_new(path: Path, text: str, fix: str) -> None:
    """Write a new file. Raises UserError where it exists."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError("the file exists; nothing was overwritten", where=str(path), fix=fix) from error
    except OSError as error:
        problem = f"cannot write the recipe: {error.strerror}"
        raise UserError(problem, where=str(path), fix="choose another PATH") from error


@command.command()
def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    from bloomery.recipe.load import json_schema

    print_json(json_schema())


def _recipe_path(name: str) -> Path:
    from bloomery.recipe.load import packaged

    known = packaged()
    if name in known:
        return known[name]
    try:
        return find_run(name) / "recipe.yaml"
    except UserError:  # its message is about runs
        pass
    fix = did_you_mean(name, known, "`bloomery recipes list` lists the packaged recipes")
    raise UserError(f"no such packaged recipe or run: {name!r}", fix=fix, code=2)
