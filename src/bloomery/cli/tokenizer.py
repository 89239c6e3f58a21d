"""`bloomery tokenizer`: train a tokenizer, print the tokens of a text"""

from pathlib import Path

import click

from bloomery.cli.common import recipe_argument
from bloomery.core.text import expanded
from bloomery.runs.names import find_run, is_run


@click.group()
def command() -> None:
    """Train a tokenizer, or print the tokens of a text.

    Example: bloomery tokenizer inspect last --text "func main() {"
    """


@command.command()
@recipe_argument
def train(recipe: str, overrides: tuple[str, ...]) -> None:
    """Train the tokenizer of RECIPE on its dataset.

    `prepare` and `train` use the same tokenizer.

    Example: bloomery tokenizer train go-coder-tiny data.path=~/code
    """
    from bloomery.cli.prepare import print_tokenizer, reporting
    from bloomery.data.prepare.prepare import preparation, prepared_folder
    from bloomery.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides)
    folder = prepared_folder(loaded, Path())
    with reporting() as report, preparation(loaded, folder, report=report) as work:
        tokenizer = work.begin()
    print_tokenizer(loaded, tokenizer.vocab_size, tokenizer.hash)
    click.echo(f"folder     {folder}")


@command.command()
@click.argument("folder")
@click.option("--text", metavar="TEXT", required=True, help="Tokenize this text.")
def inspect(folder: str, text: str) -> None:
    """Print the tokens of a text: id, bytes and piece.

    FOLDER is a run, a folder with a tokenizer, a tokenizer.json or a .model file.

    Example: bloomery tokenizer inspect last --text "func main() {"
    """
    from bloomery.data.prepare.stats import pieces
    from bloomery.data.tokenizer.tokenizer import load_tokenizer
    from bloomery.train.model_folder import model_folder

    path = expanded(folder)
    tokenizer = load_tokenizer(path if path.exists() and not is_run(path) else model_folder(find_run(folder), "last"))
    ids, sizes = tokenizer.encode(text), tokenizer.token_bytes()
    names = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id, "unk": tokenizer.unk_id}
    special = " · ".join(f"{name} {index}" for name, index in names.items() if index is not None)
    click.echo(f"tokenizer  {tokenizer.vocab_size:,} tokens · {special or 'no special tokens'} · {tokenizer.hash[:12]}")
    click.echo(f"text       {len(text.encode()):,} bytes in {len(ids):,} tokens")
    for index, piece in zip(ids, pieces(ids, tokenizer), strict=True):
        click.echo(f"{index:>8}  {sizes[index]:>3}  {piece!r}")
    if tokenizer.decode(ids) != text:
        click.echo("warning    decoding the tokens returns another text")
