"""`bloomery prepare`: text to tokens, and what training will see of it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import recipe_argument

if TYPE_CHECKING:
    from rich.text import Text

    from bloomery.data.preparing import Report
    from bloomery.data.preview import Health, Seen
    from bloomery.data.shards import Manifest
    from bloomery.recipe.load import LoadedRecipe

_NAMES = {"tokenizer": "training the tokenizer", "tokens": "making tokens", "checksums": "checking"}
_COLOURS = ("cyan", "green", "yellow", "magenta")
_SHOWN = 400  # tokens of a previewed document
_WIDTH = 40  # characters of the longest bar


@click.command()
@recipe_argument
@click.option("--preview", "count", type=click.IntRange(1), help="Show so many documents as tokens; make no shards.")
@click.option("--check", is_flag=True, help="Also look for empty, repeated, cut and foreign text.")
def command(recipe: str, overrides: tuple[str, ...], count: int | None, check: bool) -> None:
    """Turn the text of RECIPE into shards of tokens, on all cores. An interrupted run goes on where it stopped.

    Example: bloomery prepare go-coder-tiny data.path=~/code data.glob="*.go" --preview 2
    """
    from bloomery.data.prepare import prepare, prepared_folder
    from bloomery.data.preview import health
    from bloomery.plan.fetched import fetch_text
    from bloomery.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides)
    fetch_text(loaded.recipe)
    data, folder = loaded.recipe.data, prepared_folder(loaded, Path())
    if count is not None:
        _preview(loaded, folder, count)
        return
    with reporting() as report:
        manifest = prepare(loaded, folder, report=report)
    _summarise(manifest, loaded, folder)
    if check:
        _show_health(health(folder, manifest, sequence_length=data.sequence_length, layout=data.layout))


@contextmanager
def reporting() -> Iterator["Report"]:
    """A progress bar on a terminal, else a line when a phase begins; on stderr, so that stdout stays for results."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks = {name: progress.add_task(shown, total=None, visible=False) for name, shown in _NAMES.items()}
        yield lambda phase, done, total: progress.update(
            tasks[phase], completed=done, total=total or None, visible=True
        )


def _lines() -> "Report":
    said: set[str] = set()

    def report(phase: str, done: float, total: float) -> None:
        del done, total
        if phase not in said:
            said.add(phase)
            click.echo(f"{_NAMES[phase]} ...", err=True)

    return report


def _summarise(manifest: "Manifest", loaded: "LoadedRecipe", folder: Path) -> None:
    from bloomery.units import format_count

    train, validation = manifest.train, manifest.validation
    size, tokens = train.bytes + validation.bytes, train.tokens + validation.tokens
    click.echo(
        f"text       {train.documents:,} documents to learn, {validation.documents:,} for validation"
        + (f", {manifest.empty:,} empty" if manifest.empty else "")
        + (f", {manifest.held_back:,} left out because validation holds them" if manifest.held_back else "")
    )
    if manifest.skipped:
        click.echo(f"skipped    {manifest.skipped:,} rows, the first: {manifest.first_skipped}")
    each = f", {size / tokens:.2f} bytes each" if size else ""
    click.echo(
        f"tokens     {format_count(train.tokens)} to learn, {format_count(validation.tokens)} for validation{each}"
    )
    tell_tokenizer(loaded, manifest.vocab_size, manifest.tokenizer_hash)
    click.echo(f"folder     {folder}")


def tell_tokenizer(loaded: "LoadedRecipe", vocab_size: int, fingerprint: str) -> None:
    """Its size and identity, and whether the text was too little for the size asked."""
    asked = loaded.recipe.tokenizer.train
    short = asked is not None and vocab_size < asked.vocab_size
    remark = f" · the text has no more to merge; {asked.vocab_size:,} were asked for" if asked and short else ""
    click.echo(f"tokenizer  {vocab_size:,} tokens · {fingerprint[:12]}{remark}")


def _preview(loaded: "LoadedRecipe", folder: Path, count: int) -> None:
    from rich.console import Console

    from bloomery.data.prepare import working
    from bloomery.data.preview import preview

    data, console = loaded.recipe.data, Console(highlight=False)
    with reporting() as report, working(loaded, folder, report=report) as work:
        shown = list(preview(work, count, sequence_length=data.sequence_length, layout=data.layout))
    for seen in shown:
        where = f"{len(seen.ids):,} tokens · {seen.rows:,} row{'s' * (seen.rows != 1)} of {data.sequence_length:,}"
        cut = f" · {seen.cut:,} tokens cut off" if seen.cut else ""
        console.print(f"[bold]{seen.source}[/bold]  {seen.split} · {where}{cut}", soft_wrap=True)
        console.print(_coloured(seen), soft_wrap=True)
        console.print()


def _coloured(seen: "Seen") -> "Text":
    """Neighbouring tokens in different colours; without colour a bar between them."""
    from rich.console import Console
    from rich.text import Text

    plain, text = Console().color_system is None, Text()
    for index, piece in enumerate(seen.pieces[:_SHOWN]):
        text.append(("|" if plain and index else "") + piece, style=_COLOURS[index % len(_COLOURS)])
    if len(seen.pieces) > _SHOWN:
        text.append(f" ... and {len(seen.pieces) - _SHOWN:,} tokens more", style="dim")
    return text


def _show_health(found: "Health") -> None:
    click.echo(
        f"rows       {found.rows:,}; {found.longer:,} documents are longer than one, {found.cut:,} tokens are cut off"
    )
    click.echo(f"repeated   {found.duplicates:,} of {found.documents:,} documents")
    click.echo(f"unknown    {found.unknown:,} of {found.tokens:,} tokens")
    most = max((count for _, count in found.lengths), default=1)
    for edge, count in found.lengths:
        click.echo(f"  to {edge:>11,} tokens {count:>11,}  {'█' * round(_WIDTH * count / most)}")
    for warning in found.warnings:
        click.echo(f"warning    {warning}")
