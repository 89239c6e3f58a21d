"""`bloomery prepare`: text to tokens, and what training will see of it."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import chosen_recipe, recipe_or_model, say

if TYPE_CHECKING:
    from rich.text import Text

    from bloomery.data.prepare.pipeline import Report
    from bloomery.data.prepare.stats import DatasetCheck, Preview
    from bloomery.data.shards.format import Manifest, SplitPart
    from bloomery.recipe.load import LoadedRecipe

_NAMES = {"tokenizer": "training the tokenizer", "tokens": "making tokens", "checksums": "checking"}
_COLOURS = ("cyan", "green", "yellow", "magenta")
_LEARNED = ("bold green", "bold cyan")
_MASKED = ("dim", "dim italic")
_SHOWN = 400  # tokens of a previewed document
_WIDTH = 40  # characters of the longest bar


@click.command()
@recipe_or_model
@click.option("--preview", "count", type=click.IntRange(1), help="Show so many documents as tokens; make no shards.")
@click.option("--check", is_flag=True, help="Also look for empty, repeated, cut and foreign text.")
def command(
    recipe: str | None, overrides: tuple[str, ...], model: str | None, data: str | None, count: int | None, check: bool
) -> None:
    """Turn the text of RECIPE into shards of tokens, on all cores. An interrupted run goes on where it stopped.

    Example: bloomery prepare go-coder-tiny data.path=~/code data.glob="*.go" --preview 2
    """
    from bloomery.data.prepare.prepare import prepare, prepared_folder
    from bloomery.data.prepare.workers import fewer_workers
    from bloomery.plan.gather import fetch_text

    loaded, _ = chosen_recipe(recipe, overrides, model, data, fetch=True)
    fetch_text(loaded.recipe)
    if check:
        from bloomery.plan.local import local_facts

        local_facts(loaded)
    folder = prepared_folder(loaded, Path())
    if count is not None:
        _preview(loaded, folder, count)
        return
    if (told := fewer_workers(loaded.recipe.data.num_proc)) is not None:
        say(f"warning    {told}")
    with reporting() as report:
        manifest = prepare(loaded, folder, report=report)
    _summarise(manifest, loaded, folder)
    if check:
        _check(loaded, folder, manifest)


@contextmanager
def reporting() -> Iterator["Report"]:
    """A progress bar on a terminal, else a line when a phase begins; on stderr, so that stdout stays for results."""
    if not sys.stderr.isatty():
        said: set[str] = set()

        def report(phase: str, done: float, total: float) -> None:
            del done, total
            if phase not in said:
                said.add(phase)
                say(f"{_NAMES[phase]} ...", err=True)

        yield report
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks = {name: progress.add_task(shown, total=None, visible=False) for name, shown in _NAMES.items()}
        yield lambda phase, done, total: progress.update(
            tasks[phase], completed=done, total=total or None, visible=True
        )


def _summarise(manifest: "Manifest", loaded: "LoadedRecipe", folder: Path) -> None:
    from bloomery.core.errors import one_line
    from bloomery.core.units import counted, format_count
    from bloomery.data.chat.formats import ROW_FORMATS, required_format_of
    from bloomery.data.prepare.split import validation_datasets
    from bloomery.data.shards.format import DOCUMENTS_PER_UNIT
    from bloomery.data.sources.documents import sources_of
    from bloomery.data.sources.files import other_splits
    from bloomery.plan.gather import left_aside

    train, validation, each = manifest.train, manifest.validation, DOCUMENTS_PER_UNIT[manifest.kind]
    size, tokens = train.bytes + validation.bytes, train.tokens + validation.tokens
    say(
        f"text       {_units(manifest, train.parts)} to learn"
        + f", {validation.documents // each:,} for validation"
        + (f", {manifest.empty:,} empty" if manifest.empty else "")
        + (f", {manifest.held_back:,} left out because validation holds them" if manifest.held_back else "")
    )
    if manifest.formats:
        say(f"format     {', '.join(manifest.formats)}")
    data, required_format, title = loaded.recipe.data, required_format_of(loaded.recipe), "sources"
    for source, part in zip(data.sources, train.parts, strict=False):  # those of validation follow
        what = _units(manifest, [part]) + (" of text" if part.plain else "")
        often = f", {part.weight:g} times an epoch" if part.weight != 1 else ""
        place = source.path.removeprefix(f"{Path.cwd()}/")
        say(f"{title:<11}{place}: {what}, {format_count(part.tokens)} tokens{often}")
        title = ""
    held_out = validation_datasets(data, required_format)
    for corpus in held_out:
        say(f"validation {one_line(corpus.path)}")
    read = {file.path for corpus in held_out for file in corpus.files}
    others = [
        split
        for source in sources_of(data)
        for split in other_splits(source, rows=required_format in ROW_FORMATS).values()
    ]
    if aside := [file.shown for files in others for file in files if file.path not in read]:
        say(f"aside      {counted(len(aside), 'files')} of other splits than train, such as {aside[0]}")
    for line in left_aside(loaded.recipe):
        say(f"aside      {line}")
    if manifest.skipped:
        say(f"skipped    {counted(manifest.skipped, 'rows')}, the first: {one_line(manifest.first_skipped)}")
    if manifest.padding:
        say(f"padding    {counted(manifest.padding, 'tokens')} left out, as attention_mask or the padding token says")
    counts = f"{format_count(train.tokens)} to learn, {format_count(validation.tokens)} for validation"
    say(f"tokens     {counts}" + (f", {size / tokens:.2f} bytes each" if size else ""))
    if manifest.kind != "text":
        _tell_rows(manifest, loaded, folder)
    tell_tokenizer(loaded, manifest.vocab_size, manifest.tokenizer_hash)
    say(f"folder     {folder}")


def _units(manifest: "Manifest", parts: "Sequence[SplitPart]") -> str:
    """How many conversations or documents some sources gave; conversations and documents where there are both."""
    from bloomery.core.units import counted
    from bloomery.data.prepare.stats import UNITS
    from bloomery.data.shards.format import DOCUMENTS_PER_UNIT

    numbers = dict.fromkeys((manifest.kind_of(part) for part in parts), 0) or {manifest.kind: 0}
    for part in parts:
        kind = manifest.kind_of(part)
        numbers[kind] += part.documents // DOCUMENTS_PER_UNIT[kind]
    return " and ".join(counted(number, UNITS[kind]) for kind, number in numbers.items())


def _tell_rows(manifest: "Manifest", loaded: "LoadedRecipe", folder: Path) -> None:
    """What of it is learned, and how it fits into rows."""
    from bloomery.core.units import counted
    from bloomery.data.prepare.stats import UNITS, packing_stats, unit_name
    from bloomery.data.shards.format import open_split

    train, data = manifest.train, loaded.recipe.data
    share = (train.loss_tokens or 0) / max(1, train.tokens)
    say(f"learned    {share:.1%} of the tokens to learn; the others are read")
    fill = packing_stats(
        open_split(folder, "train", manifest), sequence_length=data.sequence_length, layout=data.layout
    )
    if fill is None:
        return
    full = fill.positions / max(1, fill.rows * data.sequence_length)
    units = UNITS[manifest.kind]
    lost = (
        (fill.truncated, f"cut short: {counted(fill.truncated, unit_name(manifest))} by {fill.cut:,} tokens"),
        (fill.dropped, f"left out: {counted(fill.dropped, units)} with nothing to learn within a row"),
        (fill.all_masked, f"left out: {counted(fill.all_masked, units)} with nothing to learn"),
    )
    told = [what for count, what in lost if count]
    say(f"rows       {'; '.join([f'{fill.rows:,} of {data.sequence_length:,}, {full:.1%} full', *told])}")


def tell_tokenizer(loaded: "LoadedRecipe", vocab_size: int, fingerprint: str) -> None:
    """Its size and identity, and whether the text was too little for the size asked."""
    asked = loaded.recipe.tokenizer.train
    short = asked is not None and vocab_size < asked.vocab_size
    remark = f" · the text has no more to merge; {asked.vocab_size:,} were asked for" if asked and short else ""
    say(f"tokenizer  {vocab_size:,} tokens · {fingerprint[:12]}{remark}")


def _preview(loaded: "LoadedRecipe", folder: Path, count: int) -> None:
    from rich.console import Console
    from rich.text import Text

    from bloomery.data.prepare.prepare import preparation
    from bloomery.data.prepare.stats import preview

    data, console = loaded.recipe.data, Console(highlight=False)
    with reporting() as report, preparation(loaded, folder, report=report) as work:
        shown = list(preview(work, count, sequence_length=data.sequence_length, layout=data.layout))
    for seen in shown:
        role = f" ({seen.role})" if seen.role else ""
        facts = _facts(seen, data.sequence_length, pair=seen.role in ("chosen", "rejected"))
        facts = f"{seen.kind} · {facts}" if seen.kind else facts
        console.print(
            Text.assemble((f"{seen.source}{role}", "bold"), (f"  {seen.split} · {facts}", "")), soft_wrap=True
        )
        console.print(_coloured(seen), soft_wrap=True)
        console.print()
    if any(seen.loss_mask is not None for seen in shown):
        plain = Console().color_system is None
        console.print(
            "learned: between ⟦ and ⟧" if plain else Text.assemble(("learned", _LEARNED[0]), (" · masked", _MASKED[0]))
        )


def _facts(seen: "Preview", sequence_length: int, *, pair: bool) -> str:
    if seen.bad_row:
        return f"left out: {_visible(seen.bad_row)}"
    from bloomery.core.units import counted

    cut = f" · {seen.cut:,} tokens cut off" if seen.cut else ""
    if seen.loss_mask is None:
        return f"{len(seen.ids):,} tokens · {counted(seen.rows, 'rows')} of {sequence_length:,}{cut}"
    learned = f"{len(seen.ids):,} tokens · {sum(seen.loss_mask[1:]):,} learned{cut}"
    if seen.kind == "text":
        return f"{learned} · {counted(seen.rows, 'rows')} of {sequence_length:,}"
    if seen.rows:
        return learned
    where = f"in a row of {sequence_length:,} nothing learned is left" + (" of a side" if pair else "")
    return f"{learned} · left out: " + (where if any(seen.loss_mask[1:]) else "it holds nothing to learn")


def _coloured(seen: "Preview") -> "Text":
    """Neighbouring tokens in different colours, learned ones bright and the others dim; without colour bars between
    tokens, and brackets around what is learned.
    """
    from rich.console import Console
    from rich.text import Text

    plain, text = Console().color_system is None, Text()
    flags = seen.loss_mask and [False, *seen.loss_mask[1:]]  # nothing predicts the first token
    for index, piece in enumerate(seen.pieces[:_SHOWN]):
        if flags is None:
            text.append(("|" if plain and index else "") + _visible(piece), style=_COLOURS[index % len(_COLOURS)])
            continue
        starts = flags[index] and not flags[index - 1]
        ends = flags[index] and (index + 1 == min(len(flags), _SHOWN) or not flags[index + 1])
        joined = index and flags[index] == flags[index - 1] and not seen.pieces[index - 1].endswith("\n")
        between = "¦" if joined else ""
        shown = f"{between}{'⟦' * starts}{_visible(piece)}{'⟧' * ends}" if plain else _visible(piece)
        text.append(shown, style=(_LEARNED if flags[index] else _MASKED)[index % 2])
    if len(seen.pieces) > _SHOWN:
        text.append(f" ... and {len(seen.pieces) - _SHOWN:,} tokens more", style="dim")
    return text


def _visible(piece: str) -> str:
    """Control characters as escapes: text of strangers must not steer a terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in piece)


def _check(loaded: "LoadedRecipe", folder: Path, manifest: "Manifest") -> None:
    from bloomery.data.prepare.kinds import missing_markup
    from bloomery.data.prepare.stats import check_dataset
    from bloomery.data.tokenizer.tokenizer import load_tokenizer

    tokenizer, data = load_tokenizer(folder), loaded.recipe.data
    missing = missing_markup(tokenizer, data.chat.template) if manifest.kind != "text" else []
    length, layout = data.sequence_length, data.layout
    _show_check(check_dataset(folder, manifest, tokenizer, sequence_length=length, layout=layout, missing=missing))
    _tell_epochs(loaded, folder, manifest)


def _tell_epochs(loaded: "LoadedRecipe", folder: Path, manifest: "Manifest") -> None:
    """How often the planned run reads the text, and whether that is too often."""
    from bloomery.core.errors import UserError
    from bloomery.hardware.detect.detect import detect
    from bloomery.plan.gather import counted, facts_of
    from bloomery.plan.lengths import in_epochs, too_many_epochs
    from bloomery.plan.resolve import resolve

    corpus = counted(manifest, loaded.recipe.data, folder)
    try:
        plan = resolve(loaded, facts_of(loaded, detect(), prepared=folder, dataset=corpus))
    except UserError as error:
        say(f"epochs     unknown: {error.problem}")
        return
    tokens = f"{plan.train.tokens_per_step:,} tokens per step"
    say(f"epochs     {in_epochs(plan) or 'unknown'}: {corpus.sequences_per_epoch:,} sequences per epoch, {tokens}")
    if (repeated := too_many_epochs(plan)) is not None:
        say(f"warning    {repeated}")


def _show_check(found: "DatasetCheck") -> None:
    from bloomery.core.units import counted

    units = found.unit_name
    say(f"rows       {found.rows:,}; longer than one: {counted(found.longer, units)}, {found.cut:,} tokens are cut off")
    say(f"repeated   {found.duplicates:,} of {found.units:,} {units}")
    say(f"unknown    {found.unknown:,} of {found.tokens:,} tokens")
    if found.kind != "text":
        say(f"begin      {counted(found.double_bos, 'texts')} with two begin tokens")
        say(f"end        {counted(found.missing_eos, 'answers')} that teach no end")
    most = max((count for _, count in found.lengths), default=1)
    for edge, count in found.lengths:
        say(f"  to {edge:>11,} tokens {count:>11,}  {'█' * round(_WIDTH * count / most)}")
    for warning in found.warnings:
        say(f"warning    {_visible(warning)}")
