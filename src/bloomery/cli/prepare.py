"""`bloomery prepare` and `bloomery tokenizer`: tokenize and check a dataset, preview loss masks, train a tokenizer"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import chosen_recipe, echo, recipe_argument, recipe_or_model
from bloomery.core.errors import UserError, one_line
from bloomery.core.text import expanded
from bloomery.core.units import counted, format_count
from bloomery.runs.folder import find_run, is_run

if TYPE_CHECKING:
    from rich.text import Text

    from bloomery.data.prepare.pipeline import Report
    from bloomery.data.prepare.stats import DatasetCheck, Preview
    from bloomery.data.shards import Manifest, SplitPart
    from bloomery.recipe.load import LoadedRecipe

_NAMES = {
    "tokenizer": "training the tokenizer",
    "tokens": "tokenizing",
    "checksums": "computing checksums",
}
_COLORS = ("cyan", "green", "yellow", "magenta")
_TRAINED = ("bold green", "bold cyan")
_MASKED = ("dim", "dim italic")
_SHOWN = 400  # tokens of a previewed document
_WIDTH = 40  # characters of the longest bar


@click.command()
@recipe_or_model
@click.option(
    "--preview",
    "count",
    metavar="N",
    type=click.IntRange(1),
    help="Print N documents with their loss mask, then exit.",
)
@click.option("--check", is_flag=True, help="Report empty, repeated and truncated documents.")
def command(
    recipe: str | None,
    overrides: tuple[str, ...],
    model: str | None,
    data: str | None,
    count: int | None,
    check: bool,
) -> None:
    """Tokenize the dataset of RECIPE into shards, on all cores.

    The chat template formats conversations; --preview shows the loss mask, --check the problems of the dataset.
    Run again to continue an interrupted preparation.

    Example: bloomery prepare go-coder-tiny data.path=~/code data.glob="*.go" --preview 2
    """
    from bloomery.data.prepare.prepare import prepare, prepared_folder
    from bloomery.data.prepare.workers import fewer_workers
    from bloomery.plan.gather import fetch_text

    loaded, _ = chosen_recipe(recipe, overrides, model, data, fetch=True)
    fetch_text(loaded.recipe)
    if check:
        from bloomery.plan.resolve import local_facts

        local_facts(loaded)
    folder = prepared_folder(loaded, Path())
    if count is not None:
        _preview(loaded, folder, count)
        return
    if (warning := fewer_workers(loaded.recipe.data.num_proc)) is not None:
        echo(f"warning    {warning}")
    with reporting() as report:
        manifest = prepare(loaded, folder, report=report)
    _summarize(manifest, loaded, folder, check=check)
    if check:
        _check(loaded, folder, manifest)


@contextmanager
def reporting() -> Iterator["Report"]:
    """A progress bar on a terminal, else a line per phase; on stderr, since stdout is for results."""
    if not sys.stderr.isatty():
        begun: set[str] = set()

        def report(phase: str, done: float, total: float) -> None:
            del done, total
            if phase not in begun:
                begun.add(phase)
                echo(f"{_NAMES[phase]} ...", err=True)

        yield report
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks = {
            name: progress.add_task(shown, total=None, visible=False)
            for name, shown in _NAMES.items()
        }
        yield lambda phase, done, total: progress.update(
            tasks[phase], completed=done, total=total or None, visible=True
        )


def _summarize(manifest: "Manifest", loaded: "LoadedRecipe", folder: Path, *, check: bool) -> None:
    from bloomery.data.prepare.split import MEASURABLE_ROWS, file_roles, size_warnings
    from bloomery.data.shards import DOCUMENTS_PER_UNIT
    from bloomery.plan.gather import left_aside

    train = manifest.train
    validation = manifest.validation
    each = DOCUMENTS_PER_UNIT[manifest.kind]
    size = train.bytes + validation.bytes
    tokens = train.tokens + validation.tokens
    echo(
        f"dataset    {_units(manifest, train.parts)} for training"
        + f", {validation.documents // each:,} for validation"
        + (f", {manifest.empty:,} empty" if manifest.empty else "")
        + (
            f", {manifest.held_back:,} left out (also in the validation set)"
            if manifest.held_back
            else ""
        )
    )
    if manifest.formats:
        echo(f"format     {', '.join(manifest.formats)}")
    data = loaded.recipe.data
    required_format = loaded.recipe.objective.spec.data_kind
    title = "sources"
    for source, part in zip(data.sources, train.parts, strict=False):  # those of validation follow
        what = _units(manifest, [part]) + (" of text" if part.plain else "")
        often = f", {part.weight:g} times per epoch" if part.weight != 1 else ""
        place = source.path.removeprefix(f"{Path.cwd()}/")
        echo(f"{title:<11}{place}: {what}, {format_count(part.tokens)} tokens{often}")
        title = ""
    if (roles := file_roles(data, required_format)) is not None:
        echo(f"files      {roles}")
        units = (train.documents + validation.documents) // each
        if roles.share and validation.documents // each > max(2 * roles.share * units, 1):
            share = f"{100 * roles.share:g}%"
            echo(
                f"validation {share} are too few to measure: up to {MEASURABLE_ROWS} rows, or a fifth"
            )
    for line in left_aside(loaded.recipe):
        echo(f"not read   {line}")
    if manifest.skipped:
        echo(
            f"skipped    {counted(manifest.skipped, 'rows')}, the first: {one_line(manifest.first_skipped)}"
        )
    if not check:  # which prints these among its own
        for warning in size_warnings(manifest, sequence_length=data.sequence_length):
            echo(f"warning    {warning}")
    if manifest.padding:
        echo(f"padding    {counted(manifest.padding, 'tokens')} removed")
    counts = f"{format_count(train.tokens)} for training, {format_count(validation.tokens)} for validation"
    echo(f"tokens     {counts}" + (f", {size / tokens:.2f} bytes per token" if size else ""))
    if manifest.kind != "text":
        _print_packing(manifest, loaded, folder)
    print_tokenizer(loaded, manifest.vocab_size, manifest.tokenizer_hash)
    echo(f"folder     {folder}")


def _units(manifest: "Manifest", parts: "Sequence[SplitPart]") -> str:
    """The number of conversations, documents, or both in some sources."""
    from bloomery.data.prepare.stats import UNITS
    from bloomery.data.shards import DOCUMENTS_PER_UNIT

    numbers = dict.fromkeys((manifest.kind_of(part) for part in parts), 0) or {manifest.kind: 0}
    for part in parts:
        kind = manifest.kind_of(part)
        numbers[kind] += part.documents // DOCUMENTS_PER_UNIT[kind]
    return " and ".join(counted(number, UNITS[kind]) for kind, number in numbers.items())


def _print_packing(manifest: "Manifest", loaded: "LoadedRecipe", folder: Path) -> None:
    """Print the share of loss tokens, and how the examples are packed into sequences."""
    from bloomery.data.prepare.stats import UNITS, packing_stats, unit_name
    from bloomery.data.shards import open_split

    train = manifest.train
    data = loaded.recipe.data
    share = (train.loss_tokens or 0) / max(1, train.tokens)
    echo(f"loss on    {share:.1%} of the training tokens; the others are masked")
    fill = packing_stats(
        open_split(folder, "train", manifest),
        sequence_length=data.sequence_length,
        layout=data.layout,
    )
    if fill is None:
        return
    full = fill.positions / max(1, fill.sequences * data.sequence_length)
    units = UNITS[manifest.kind]
    parts = [f"{fill.sequences:,} of {data.sequence_length:,} tokens, {full:.1%} full"]
    if fill.truncated:
        parts.append(
            f"truncated: {counted(fill.truncated, unit_name(manifest))} by {fill.cut:,} tokens"
        )
    if fill.dropped:
        parts.append(f"left out: {counted(fill.dropped, units)}, no loss tokens after truncation")
    if fill.all_masked:
        parts.append(f"left out: {counted(fill.all_masked, units)}, all labels are masked")
    echo(f"sequences  {'; '.join(parts)}")


def print_tokenizer(loaded: "LoadedRecipe", vocab_size: int, fingerprint: str) -> None:
    """Print size and hash, and whether the dataset was too small for the requested size."""
    settings = loaded.recipe.tokenizer.train
    small = settings is not None and vocab_size < settings.vocab_size
    remark = (
        f" · dataset too small for {settings.vocab_size:,} tokens" if settings and small else ""
    )
    echo(f"tokenizer  {vocab_size:,} tokens · {fingerprint[:12]}{remark}")


def _preview(loaded: "LoadedRecipe", folder: Path, count: int) -> None:
    from rich.console import Console
    from rich.text import Text

    from bloomery.data.prepare.prepare import preparation
    from bloomery.data.prepare.stats import preview

    data = loaded.recipe.data
    console = Console(highlight=False)
    with reporting() as report, preparation(loaded, folder, report=report) as work:
        documents = list(
            preview(work, count, sequence_length=data.sequence_length, layout=data.layout)
        )
    for document in documents:
        role = f" ({document.role})" if document.role else ""
        line = f"  {document.split} · " + (f"{document.kind} · " if document.kind else "")
        line += _counts(document, data.sequence_length)
        console.print(
            Text.assemble((f"{document.source}{role}", "bold"), (line, "")), soft_wrap=True
        )
        console.print(_colored(document), soft_wrap=True)
        console.print()
    if any(document.loss_mask is not None for document in documents):
        colors = Text.assemble(("loss on", _TRAINED[0]), (" · masked", _MASKED[0]))
        console.print("loss on: between ⟦ and ⟧" if console.color_system is None else colors)


def _counts(document: "Preview", sequence_length: int) -> str:
    if document.bad_row:
        return f"left out: {_visible(document.bad_row)}"

    cut = f" · {document.cut:,} tokens truncated" if document.cut else ""
    sequences = f"{counted(document.sequences, 'sequences')} of {sequence_length:,} tokens"
    if document.loss_mask is None:
        return f"{len(document.ids):,} tokens · {sequences}{cut}"
    tokens = f"{len(document.ids):,} tokens · loss on {sum(document.loss_mask[1:]):,}{cut}"
    if document.kind == "text":
        return f"{tokens} · {sequences}"
    if document.sequences:
        return tokens
    side = " on one side of the pair" if document.role in ("chosen", "rejected") else ""
    truncated = f"no loss tokens{side} after truncation to {sequence_length:,}"
    return f"{tokens} · left out: {truncated if any(document.loss_mask[1:]) else 'all labels are masked'}"


def _colored(document: "Preview") -> "Text":
    """Adjacent tokens in different colors, loss tokens bright and masked tokens dim. Without color: bars between
    tokens, and brackets around loss tokens.
    """
    from rich.console import Console
    from rich.text import Text

    plain = Console().color_system is None
    text = Text()
    # nothing predicts the first token
    flags = document.loss_mask and [False, *document.loss_mask[1:]]
    for index, piece in enumerate(document.pieces[:_SHOWN]):
        if flags is None:
            text.append(
                ("|" if plain and index else "") + _visible(piece),
                style=_COLORS[index % len(_COLORS)],
            )
            continue
        starts = flags[index] and not flags[index - 1]
        ends = flags[index] and (index + 1 == min(len(flags), _SHOWN) or not flags[index + 1])
        joined = (
            index
            and flags[index] == flags[index - 1]
            and not document.pieces[index - 1].endswith("\n")
        )
        between = "¦" if joined else ""
        shown = (
            f"{between}{'⟦' * starts}{_visible(piece)}{'⟧' * ends}" if plain else _visible(piece)
        )
        text.append(shown, style=(_TRAINED if flags[index] else _MASKED)[index % 2])
    if len(document.pieces) > _SHOWN:
        text.append(f" ... and {len(document.pieces) - _SHOWN:,} more tokens", style="dim")
    return text


def _visible(piece: str) -> str:
    """Control characters as escapes: untrusted text must not control a terminal."""
    return "".join(
        c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in piece
    )


def _check(loaded: "LoadedRecipe", folder: Path, manifest: "Manifest") -> None:
    """Print the health of the dataset, the epochs of the planned run, and whether these are too many."""
    from bloomery.data.prepare.kinds import missing_markup
    from bloomery.data.prepare.stats import check_dataset
    from bloomery.data.tokenizer.tokenizer import load_tokenizer
    from bloomery.hardware.detect import detect
    from bloomery.plan import gather
    from bloomery.plan.lengths import in_epochs, too_many_epochs
    from bloomery.plan.resolve import resolve

    tokenizer = load_tokenizer(folder)
    data = loaded.recipe.data
    missing = missing_markup(tokenizer, data.chat.template) if manifest.kind != "text" else []
    length = data.sequence_length
    layout = data.layout
    _print_health(
        check_dataset(
            folder,
            manifest,
            tokenizer,
            sequence_length=length,
            layout=layout,
            missing_tokens=missing,
        )
    )
    corpus = gather.counted(manifest, data, folder)
    try:
        plan = resolve(loaded, gather.facts_of(loaded, detect(), prepared=folder, dataset=corpus))
    except UserError as error:
        echo(f"epochs     unknown: {error.problem}")
        return
    tokens = f"{plan.train.tokens_per_step:,} tokens per step"
    echo(
        f"epochs     {in_epochs(plan) or 'unknown'}: {corpus.sequences_per_epoch:,} sequences per epoch, {tokens}"
    )
    if (repeated := too_many_epochs(plan)) is not None:
        echo(f"warning    {repeated}")


def _print_health(check: "DatasetCheck") -> None:

    longer = counted(check.longer, check.unit_name)
    echo(f"sequences  {check.sequences:,}; {longer} longer, {check.cut:,} tokens truncated")
    echo(f"repeated   {check.duplicates:,} of {check.units:,} {check.unit_name}")
    echo(f"unknown    {check.unknown:,} of {check.tokens:,} tokens")
    if check.kind != "text":
        echo(f"BOS        {counted(check.double_bos, 'texts')} with two BOS tokens")
        echo(
            f"EOS        {counted(check.missing_eos, 'responses')} without an EOS token in the loss"
        )
    most = max((count for _, count in check.lengths), default=1)
    for edge, count in check.lengths:
        echo(f"  to {edge:>11,} tokens {count:>11,}  {'█' * round(_WIDTH * count / most)}")
    for warning in check.warnings:
        echo(f"warning    {_visible(warning)}")


@click.group()
def tokenizer_command() -> None:
    """Train a tokenizer, or print the tokens of a text.

    Example: bloomery tokenizer inspect last --text "func main() {"
    """


@tokenizer_command.command()
@recipe_argument
def train(recipe: str, overrides: tuple[str, ...]) -> None:
    """Train the tokenizer of RECIPE on its dataset.

    `prepare` and `train` use the same tokenizer.

    Example: bloomery tokenizer train go-coder-tiny data.path=~/code
    """
    from bloomery.data.prepare.prepare import preparation, prepared_folder
    from bloomery.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides)
    folder = prepared_folder(loaded, Path())
    with reporting() as report, preparation(loaded, folder, report=report) as work:
        tokenizer = work.begin()
    print_tokenizer(loaded, tokenizer.vocab_size, tokenizer.hash)
    click.echo(f"folder     {folder}")


@tokenizer_command.command()
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
    tokenizer = load_tokenizer(
        path if path.exists() and not is_run(path) else model_folder(find_run(folder), "last")
    )
    ids = tokenizer.encode(text)
    sizes = tokenizer.token_bytes()
    names = {
        "bos": tokenizer.bos_id,
        "eos": tokenizer.eos_id,
        "pad": tokenizer.pad_id,
        "unk": tokenizer.unk_id,
    }
    special = " · ".join(f"{name} {index}" for name, index in names.items() if index is not None)
    click.echo(
        f"tokenizer  {tokenizer.vocab_size:,} tokens · {special or 'no special tokens'} · {tokenizer.hash[:12]}"
    )
    click.echo(f"text       {len(text.encode()):,} bytes in {len(ids):,} tokens")
    for index, piece in zip(ids, pieces(ids, tokenizer), strict=True):
        click.echo(f"{index:>8}  {sizes[index]:>3}  {piece!r}")
    if tokenizer.decode(ids) != text:
        click.echo("warning    decoding the tokens returns another text")
