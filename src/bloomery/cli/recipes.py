"""`bloomery recipes`: list, show, copy and import recipes, and their JSON schema. No torch"""

import shutil
from pathlib import Path

import click

from bloomery.cli.common import NewPath, echo, print_json, recipe_or_model, text_flags
from bloomery.core.errors import UserError
from bloomery.core.run_folder import find_run
from bloomery.core.text import did_you_mean


@click.group(invoke_without_command=True)
@click.pass_context
def recipes_command(context: click.Context) -> None:
    """List, show, copy and import recipes; print the JSON schema.

    Example: bloomery recipes copy demo mine.yaml
    """
    if context.invoked_subcommand is None:
        context.invoke(list_)


@recipes_command.command("list")
def list_() -> None:
    """List the packaged recipes with model, dataset and GPU."""
    from bloomery.recipe.load import by_release, packaged, twins

    # The first line of a packaged recipe is a comment `# METHOD: MODEL, DATASET, GPU.`; the demos have another.
    rows = [("recipe", "method", "model", "GPU", "dataset")]
    small_twins = twins()
    for name, path in sorted(packaged().items(), key=lambda item: (by_release(item[0]), item[0])):
        comment = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").rstrip(".")
        method, colon, description = comment.partition(": ")
        if not colon or name in small_twins:
            continue
        model, dataset, gpu_phrase = description.split(", ")
        gpu = gpu_phrase.removesuffix(" GPU").replace("one ", "").replace("no", "none")
        for word, count in (("two", 2), ("four", 4), ("six", 6), ("eight", 8)):
            gpu = gpu.removesuffix(" GPUs").replace(f"{word} ", f"{count} x ")
        rows.append((name, method, model, gpu, dataset))

    # A terminal too narrow for 20 columns of dataset gets none; a pipe gets complete lines.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    num_columns = shutil.get_terminal_size((1000, 24)).columns
    shows_dataset = num_columns >= sum(widths[:-1]) + 20
    for row in rows:
        cells = row if shows_dataset else row[:-1]
        padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False)]
        line = "  ".join(padded).rstrip()
        echo(line if len(line) <= num_columns else line[: num_columns - 1] + "…")
    echo("\nGPU         the smallest one that fits, estimated")
    echo(
        f"NAME-tiny   {len(small_twins)} of them with a small random model: test your setup on a CPU"
    )
    echo("everything  every key with its default: bloomery recipes show everything")


@recipes_command.command()
@recipe_or_model
def show(
    recipe: str | None, overrides: tuple[str, ...], model: str | None, data: str | None
) -> None:
    """Print a recipe: packaged, of a run, or generated.

    With --model and --data: the recipe that `train` generates for them and for the keys behind them, as a file.

    \b
    Example: bloomery recipes show qwen2.5-1.5b-lora
             bloomery recipes show --model Qwen/Qwen3.5-0.8B --data chats.jsonl train.epochs=2 > mine.yaml
    """
    if recipe is not None and "=" in recipe and model and data:
        overrides = (recipe, *overrides)
        recipe = None
    if recipe is None and model is not None and data is not None:
        from bloomery.plan.made import made_recipe

        with text_flags():
            echo(made_recipe(model, data, overrides).complete_text, nl=False)
        return
    if recipe is None or overrides or model or data:
        fix = "bloomery recipes show NAME, or bloomery recipes show --model MODEL --data PATH [section.key=value ...]"
        problem = "missing argument: NAME, or --model and --data"
        raise UserError(problem, where="`bloomery recipes show`", fix=fix, code=2)
    echo(_recipe_path(recipe).read_text(encoding="utf-8"), nl=False)


@recipes_command.command()
@click.argument("name")
@click.argument("path", required=False, type=NewPath())
def copy(name: str, path: Path | None) -> None:
    """Copy a recipe to PATH (default: NAME.yaml)."""
    source = _recipe_path(name)
    # A run's recipe is named after the run.
    recipe_name = source.parent.name if source.name == "recipe.yaml" else name
    target = path if path is not None else Path(f"{recipe_name}.yaml")
    if target.is_dir():
        target /= f"{recipe_name}.yaml"
    command = f"bloomery recipes copy {recipe_name} my-{recipe_name}.yaml"
    _write_new(target, source.read_text(encoding="utf-8"), command)
    echo(f"copied     {target}\nnext       bloomery plan {target}")


@recipes_command.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out",
    "out_path",
    metavar="PATH",
    type=NewPath(),
    help="Write the recipe to PATH, not to stdout.",
)
def import_(file: Path, out_path: Path | None) -> None:
    """Convert a file of another training tool to a recipe.

    FILE is a YAML or JSON file of Axolotl, LLaMA-Factory, TRL, torchtune, ms-swift or mlx-lm, a shell script with one
    of their commands, or a Python script or notebook of Unsloth or TRL, of which nothing runs. Every key of FILE is
    mapped to a recipe key, or listed in a comment with the reason and an alternative.

    Example: bloomery recipes import axolotl.yml --out mine.yaml
    """
    from bloomery.recipe.importing import import_recipe

    text, program = import_recipe(file)
    if out_path is None:
        echo(text, nl=False)
        return
    _write_new(out_path, text, "choose another --out")
    echo(f"imported   {out_path}, from {file} ({program})", err=True)
    echo(f"next       bloomery plan {out_path}", err=True)


def _write_new(path: Path, text: str, fix: str) -> None:
    """Write a new file. Raises UserError where it exists."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        problem = "the file exists; nothing was overwritten"
        raise UserError(problem, where=str(path), fix=fix) from error
    except OSError as error:
        problem = f"cannot write the recipe: {error.strerror}"
        raise UserError(problem, where=str(path), fix="choose another PATH") from error


@recipes_command.command()
def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    from bloomery.recipe.load import json_schema

    print_json(json_schema())


def _recipe_path(name: str) -> Path:
    from bloomery.recipe.load import packaged

    paths = packaged()
    if name in paths:
        return paths[name]
    try:
        return find_run(name) / "recipe.yaml"
    except UserError:  # its message is about runs
        pass
    fix = did_you_mean(name, paths, "`bloomery recipes list` lists the packaged recipes")
    raise UserError(f"no such packaged recipe or run: {name!r}", fix=fix, code=2)
