"""`bloomery tokenizer`: make one, and look at what one does to a text."""

from pathlib import Path

import click

from bloomery.cli.common import recipe_argument
from bloomery.core.text import expanded
from bloomery.runs.names import find_run, is_run


@click.group()
def command() -> None:
    """Train the tokenizer of a recipe, or show how one cuts a text.

    Example: bloomery tokenizer inspect last --text "func main() {"
    """


@command.command()
@recipe_argument
def train(recipe: str, overrides: tuple[str, ...]) -> None:
    """Train the tokenizer of RECIPE on its text, once; `prepare` and `train` use the same one."""
    from bloomery.cli.prepare import reporting, tell_tokenizer
    from bloomery.data.prepare.prepare import preparation, prepared_folder
    from bloomery.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides)
    folder = prepared_folder(loaded, Path())
    with reporting() as report, preparation(loaded, folder, report=report) as work:
        _, tokenizer = work.begin()
    tell_tokenizer(loaded, tokenizer.vocab_size, tokenizer.hash)
    click.echo(f"folder     {folder}")


@command.command()
@click.argument("folder")
@click.option("--text", required=True, help="The text to cut.")
def inspect(folder: str, text: str) -> None:
    """Show the tokens of a text: id, bytes and piece, one a line. FOLDER: a run, a tokenizer.json or a .model too."""
    from bloomery.data.prepare.stats import pieces
    from bloomery.data.tokenizer.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(_source(folder))
    ids, sizes = tokenizer.encode(text), tokenizer.token_bytes()
    names = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id, "unk": tokenizer.unk_id}
    special = " · ".join(f"{name} {index}" for name, index in names.items() if index is not None)
    click.echo(f"tokenizer  {tokenizer.vocab_size:,} tokens · {special or 'no special tokens'} · {tokenizer.hash[:12]}")
    click.echo(f"text       {len(text.encode()):,} bytes in {len(ids):,} tokens")
    for index, piece in zip(ids, pieces(ids, tokenizer), strict=True):
        click.echo(f"{index:>8}  {sizes[index]:>3}  {piece!r}")
    if tokenizer.decode(ids) != text:
        click.echo("warning    this tokenizer does not give the same text back")


def _source(name: str) -> Path:
    """The file or folder itself, or the newest checkpoint of the run that is meant. Raises UserError."""
    from bloomery.train.model_folder import model_folder

    path = expanded(name)
    return path if path.exists() and not is_run(path) else model_folder(find_run(name), "last")
