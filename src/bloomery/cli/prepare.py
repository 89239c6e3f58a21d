"""`bloomery prepare` and `bloomery tokenizer`: tokenize and check a dataset, preview loss masks, train a tokenizer"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import chosen_recipe, echo, recipe_argument, recipe_or_model
from bloomery.core.errors import UserError, one_line
from bloomery.core.files import write_durably
from bloomery.core.run_folder import find_run, is_run
from bloomery.core.text import expanded
from bloomery.core.units import counted, format_count

if TYPE_CHECKING:
    from rich.text import Text

    from bloomery.data.prepare.pipeline import Report
    from bloomery.data.prepare.stats import DatasetCheck, Preview
    from bloomery.data.shards import Manifest, SplitPart
    from bloomery.recipe.load import LoadedRecipe

_PHASE_TITLES = {
    "tokenizer": "training the tokenizer",
    "tokens": "tokenizing",
    "checksums": "computing checksums",
}
_COLORS = ("cyan", "green", "yellow", "magenta")
_LOSS_STYLES = ("bold green", "bold cyan")
_MASKED_STYLES = ("dim", "dim italic")
_MAX_BAR_WIDTH = 40  # characters


@click.command()
@recipe_or_model
@click.option(
    "--preview",
    "num_previews",
    metavar="N",
    type=click.IntRange(1),
    help="Print N documents with their loss mask, then exit.",
)
@click.option(
    "--html",
    "page",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --preview: write a page, with pictures.",
)
@click.option("--check", is_flag=True, help="Report empty, repeated and truncated documents.")
def command(
    recipe: str | None,
    overrides: tuple[str, ...],
    model: str | None,
    data: str | None,
    num_previews: int | None,
    page: Path | None,
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
    from bloomery.plan.reward_code import refuse_missing_reward_files
    from bloomery.runs.held_sources import held_sources

    if page is not None and num_previews is None:
        problem = "--html writes what --preview shows"
        fix = f"add --preview 3: bloomery prepare RECIPE --preview 3 --html {page}"
        raise UserError(problem, where="--html", fix=fix, code=2)
    # --check plans the run after the preparation: what would stop the plan is raised before the long part.
    loaded_recipe, _ = chosen_recipe(recipe, overrides, model, data, fetch=True)
    refuse_missing_reward_files(loaded_recipe.recipe.rewards)
    fetch_text(loaded_recipe.recipe)
    if check:
        from bloomery.plan.resolve import local_facts

        local_facts(loaded_recipe)

    # A preview tokenizes the first documents alone, and writes nothing but a tokenizer that does not exist yet.
    folder = prepared_folder(loaded_recipe, Path())
    if num_previews is not None:
        _preview(loaded_recipe, folder, num_previews, page)
        return

    if (warning := fewer_workers(loaded_recipe.recipe.data.num_proc)) is not None:
        echo(f"warning    {warning}")
    with reporting() as report, held_sources(loaded_recipe.recipe):
        manifest = prepare(loaded_recipe, folder, report=report)
    _summarize(manifest, loaded_recipe, folder, check=check)
    if check:
        _check(loaded_recipe, folder, manifest)


@contextmanager
def reporting() -> Iterator["Report"]:
    """A progress bar on a terminal, else a line per phase; on stderr, since stdout is for results."""
    if not sys.stderr.isatty():
        printed_phases: set[str] = set()

        def print_phase(phase: str, completed: float, total: float) -> None:
            del completed, total
            if phase not in printed_phases:
                printed_phases.add(phase)
                echo(f"{_PHASE_TITLES[phase]} ...", err=True)

        yield print_phase
        return

    # A bar appears with the first report of its phase; a total of 0 is unknown, and gives a bar without an end.
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
            phase: progress.add_task(title, total=None, visible=False)
            for phase, title in _PHASE_TITLES.items()
        }
        yield lambda phase, completed, total: progress.update(
            tasks[phase], completed=completed, total=total or None, visible=True
        )


def _summarize(
    manifest: "Manifest", loaded_recipe: "LoadedRecipe", folder: Path, *, check: bool
) -> None:
    """Print what was prepared: units, sources, tokens, packing, and the warnings of the dataset's size."""
    from bloomery.data.prepare.split import MEASURABLE_ROWS, file_roles, size_warnings
    from bloomery.data.shards import DOCUMENTS_PER_UNIT
    from bloomery.plan.gather import left_out_parts, unread_columns, unread_data_notes

    # A preference pair is one unit of two documents; users count pairs.
    train = manifest.train
    validation = manifest.validation
    documents_per_unit = DOCUMENTS_PER_UNIT[manifest.kind]
    validation_units = validation.documents // documents_per_unit
    line = f"{_units(manifest, train.parts)} for training, {validation_units:,} for validation"
    if manifest.empty:
        line += f", {manifest.empty:,} empty"
    if manifest.held_back:
        line += f", {manifest.held_back:,} left out (also in the validation set)"
    echo(f"dataset    {line}")
    if manifest.formats:
        echo(f"format     {', '.join(manifest.formats)}")

    # The sources of the recipe come first among the parts; those of a validation dataset follow.
    data = loaded_recipe.recipe.data
    title = "sources"
    for source, part in zip(data.sources, train.parts, strict=False):
        path = source.path.removeprefix(f"{Path.cwd()}/")
        units = _units(manifest, [part]) + (" of text" if part.plain else "")
        repeats = f", {part.weight:g} times per epoch" if part.weight != 1 else ""
        echo(f"{title:<11}{path}: {units}, {format_count(part.tokens)} tokens{repeats}")
        title = ""

    # Files: which ones train, which validate, and which were not read although they may be data. A small dataset
    # gives more to validation than the recipe's share, because a few rows measure nothing.
    roles = file_roles(data, loaded_recipe.recipe.objective.spec.data_kind)
    if roles is not None:
        echo(f"files      {roles}")
        num_units = (train.documents + validation.documents) // documents_per_unit
        if roles.share and validation_units > max(2 * roles.share * num_units, 1):
            limit = f"up to {MEASURABLE_ROWS} rows, or a fifth"
            echo(f"validation {100 * roles.share:g}% are too few to measure: {limit}")
    for remark in unread_data_notes(loaded_recipe.recipe):
        echo(f"not read   {remark}")
    for columns in unread_columns(loaded_recipe.recipe, manifest):
        echo(f"not read   {columns}")
    if manifest.template:
        echo(f"template   {manifest.template}")
    for note in left_out_parts(loaded_recipe.recipe, manifest):
        echo(f"template   {note}")
    if manifest.skipped:
        first_reason = one_line(manifest.first_skipped)
        echo(f"skipped    {counted(manifest.skipped, 'rows')}, the first: {first_reason}")
    if not check:  # --check prints these warnings among its own
        for warning in size_warnings(manifest, sequence_length=data.sequence_length):
            echo(f"warning    {warning}")

    # Tokens: padding, the size of both splits, and how examples share sequences.
    if manifest.padding:
        echo(f"padding    {counted(manifest.padding, 'tokens')} removed")
    line = f"{format_count(train.tokens)} for training, "
    line += f"{format_count(validation.tokens)} for validation"
    num_bytes = train.bytes + validation.bytes
    if num_bytes:
        line += f", {num_bytes / (train.tokens + validation.tokens):.2f} bytes per token"
    echo(f"tokens     {line}")
    if manifest.kind == "prompts":
        _print_columns(folder)
    elif manifest.kind != "text":
        _print_packing(manifest, loaded_recipe, folder)
    print_tokenizer(loaded_recipe, manifest.vocab_size, manifest.tokenizer_hash)
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


def _print_packing(manifest: "Manifest", loaded_recipe: "LoadedRecipe", folder: Path) -> None:
    """Print the share of loss tokens, and how the examples are packed into sequences."""
    from bloomery.data.prepare.stats import UNITS, packing_stats, unit_name
    from bloomery.data.shards import open_split

    train = manifest.train
    loss_share = (train.loss_tokens or 0) / max(1, train.tokens)
    echo(f"loss on    {loss_share:.1%} of the training tokens; the others are masked")

    # Packing: how full the sequences are, and what did not fit into one.
    data = loaded_recipe.recipe.data
    sequence_length = data.sequence_length
    split = open_split(folder, "train", manifest)
    stats = packing_stats(split, sequence_length=sequence_length, layout=data.layout)
    if stats is None:
        return
    fill = stats.positions / max(1, stats.sequences * sequence_length)
    units = UNITS[manifest.kind]
    parts = [f"{stats.sequences:,} of {sequence_length:,} tokens, {fill:.1%} full"]
    if stats.truncated:
        truncated_units = counted(stats.truncated, unit_name(manifest))
        parts.append(f"truncated: {truncated_units} by {stats.cut:,} tokens")
    if stats.dropped:
        parts.append(f"left out: {counted(stats.dropped, units)}, no loss tokens after truncation")
    if stats.uncut:
        parts.append(f"left out: {counted(stats.uncut, units)} with pictures, which do not fit")
    if stats.all_masked:
        parts.append(f"left out: {counted(stats.all_masked, units)}, all labels are masked")
    echo(f"sequences  {'; '.join(parts)}")


def _print_columns(folder: Path) -> None:
    """Print the columns that rewards are given, by the first prompt."""
    from bloomery.data.prompts import Prompts

    first_prompt = next(iter(Prompts(folder, seed=0)))
    echo(f"columns    {', '.join(map(one_line, first_prompt.columns)) or 'none but the prompt'}")


def print_tokenizer(loaded_recipe: "LoadedRecipe", vocab_size: int, fingerprint: str) -> None:
    """Print size and hash, and whether the dataset was too small for the requested size."""
    settings = loaded_recipe.recipe.tokenizer.train
    remark = ""
    if settings is not None and vocab_size < settings.vocab_size:
        remark = f" · dataset too small for {settings.vocab_size:,} tokens"
    echo(f"tokenizer  {vocab_size:,} tokens · {fingerprint[:12]}{remark}")


def _preview(
    loaded_recipe: "LoadedRecipe", folder: Path, num_documents: int, page: Path | None
) -> None:
    """Print the first documents, each with its loss mask; or write them as a page."""
    from rich.console import Console
    from rich.text import Text

    from bloomery.plan.gather import left_out_parts, unread_columns
    from bloomery.report.previews import (
        counts_of,
        first_rows,
        picture_text,
        preview_page,
        shown_document,
    )

    length = loaded_recipe.recipe.data.sequence_length
    console = Console(highlight=False)
    with reporting() as report:
        documents = first_rows(loaded_recipe, folder, num_documents, report=report)

    for columns in unread_columns(loaded_recipe.recipe):
        echo(f"not read   {columns}")
    for note in left_out_parts(loaded_recipe.recipe):
        echo(f"template   {note}")

    if page is not None:
        text = preview_page(
            loaded_recipe.name, [shown_document(each, length) for each in documents]
        )
        try:
            write_durably(page, text.encode("utf-8", errors="replace"))
        except OSError as error:
            problem = f"cannot write the page: {error.strerror}"
            fix = "choose another file"
            raise UserError(problem, where=str(page), fix=fix) from error
        echo(f"page       {page}: {counted(len(documents), 'documents')}")
        return

    # Lines are not wrapped: a copied preview has the line breaks of the dataset.
    for document in documents:
        role = f" ({document.role})" if document.role else ""
        kind = f"{document.kind} · " if document.kind else ""
        title = f"{document.source}{role}"
        counts = f"  {document.split} · {kind}{counts_of(document, length)}"
        console.print(Text.assemble((title, "bold"), (counts, "")), soft_wrap=True)
        for number, picture in enumerate(document.pictures, start=1):
            echo(f"picture {number}  {picture_text(picture)}")
        if document.ids:
            console.print(_colored(document), soft_wrap=True)
        console.print()
    if any(document.loss_mask is not None for document in documents):
        legend = Text.assemble(("loss on", _LOSS_STYLES[0]), (" · masked", _MASKED_STYLES[0]))
        console.print("loss on: between ⟦ and ⟧" if console.color_system is None else legend)


def _colored(document: "Preview") -> "Text":
    """The tokens of a document: neighbors in different colors, loss tokens bright and masked tokens dim.

    A console without colors gets bars between tokens, and brackets around loss tokens.
    """
    from rich.console import Console
    from rich.text import Text

    from bloomery.report.previews import MOST_TOKENS, visible, with_short_pictures

    colorless = Console().color_system is None
    text = Text()
    # The first token has no loss: nothing predicts it.
    loss_mask = None if document.loss_mask is None else [False, *document.loss_mask[1:]]
    all_pieces, loss_mask = with_short_pictures(document, loss_mask)
    pieces = all_pieces[:MOST_TOKENS]
    for index, piece in enumerate(pieces):
        if loss_mask is None:
            bar = "|" if colorless and index else ""
            text.append(bar + visible(piece), style=_COLORS[index % len(_COLORS)])
            continue

        styles = _LOSS_STYLES if loss_mask[index] else _MASKED_STYLES
        if not colorless:
            text.append(visible(piece), style=styles[index % 2])
            continue

        # Brackets stand at the ends of a stretch of loss tokens, bars between the tokens of any stretch.
        starts = loss_mask[index] and not loss_mask[index - 1]
        ends = loss_mask[index] and (index + 1 == len(pieces) or not loss_mask[index + 1])
        continues = index and loss_mask[index] == loss_mask[index - 1]
        bar = "¦" if continues and not pieces[index - 1].endswith("\n") else ""
        text.append(f"{bar}{'⟦' * starts}{visible(piece)}{'⟧' * ends}", style=styles[index % 2])
    num_hidden = len(all_pieces) - len(pieces)
    if num_hidden:
        text.append(f" ... and {num_hidden:,} more tokens", style="dim")
    return text


def _check(loaded_recipe: "LoadedRecipe", folder: Path, manifest: "Manifest") -> None:
    """Print the health of the dataset, the epochs of the planned run, and whether these are too many."""
    from bloomery.data.prepare.kinds import missing_markup
    from bloomery.data.prepare.stats import check_dataset
    from bloomery.data.tokenizer.tokenizer import load_tokenizer
    from bloomery.hardware.detect import detect
    from bloomery.plan import gather
    from bloomery.plan.lengths import in_epochs, too_many_epochs
    from bloomery.plan.resolve import resolve

    data = loaded_recipe.recipe.data
    tokenizer = load_tokenizer(folder)
    missing_tokens = []
    if manifest.kind != "text":
        missing_tokens = missing_markup(tokenizer, data.chat.template)
    check = check_dataset(
        folder,
        manifest,
        tokenizer,
        sequence_length=data.sequence_length,
        layout=data.layout,
        missing_tokens=missing_tokens,
    )
    _print_health(check)

    # The epochs need a plan; a recipe that this machine cannot plan still has a dataset worth checking.
    dataset = gather.prepared_facts(manifest, loaded_recipe.recipe, folder)
    try:
        facts = gather.facts_of(loaded_recipe, detect(), prepared=folder, dataset=dataset)
        plan = resolve(loaded_recipe, facts)
    except UserError as error:
        echo(f"epochs     unknown: {error.problem}")
        return
    sequences = f"{dataset.sequences_per_epoch:,} sequences per epoch"
    tokens = f"{plan.train.tokens_per_step:,} tokens per step"
    if plan.rollout is not None:
        sequences = f"{dataset.prompts:,} prompts"
        tokens = f"{plan.train.sequences_per_step:,} completions per step"
    echo(f"epochs     {in_epochs(plan) or 'unknown'}: {sequences}, {tokens}")
    if (warning := too_many_epochs(plan)) is not None:
        echo(f"warning    {warning}")


def _print_health(check: "DatasetCheck") -> None:
    from bloomery.report.previews import visible

    if check.kind != "prompts":
        longer = counted(check.longer, check.unit_name)
        echo(f"sequences  {check.sequences:,}; {longer} longer, {check.cut:,} tokens truncated")
    echo(f"repeated   {check.duplicates:,} of {check.units:,} {check.unit_name}")
    echo(f"unknown    {check.unknown:,} of {check.tokens:,} tokens")
    if check.kind != "text":
        echo(f"BOS        {counted(check.double_bos, 'texts')} with two BOS tokens")
    if check.kind not in ("text", "prompts"):
        responses = counted(check.missing_eos, "responses")
        echo(f"EOS        {responses} without an EOS token in the loss")

    # A histogram of lengths: a bar for the units of at most so many tokens.
    max_count = max((count for _, count in check.lengths), default=1)
    for max_length, count in check.lengths:
        bar = "█" * round(_MAX_BAR_WIDTH * count / max_count)
        echo(f"  to {max_length:>11,} tokens {count:>11,}  {bar}")
    for warning in check.warnings:
        echo(f"warning    {visible(warning)}")


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
    from bloomery.runs.held_sources import held_sources

    loaded_recipe = load_recipe(recipe, overrides)
    folder = prepared_folder(loaded_recipe, Path())
    with (
        reporting() as report,
        held_sources(loaded_recipe.recipe),
        preparation(loaded_recipe, folder, report=report) as preparing,
    ):
        tokenizer = preparing.begin()
    print_tokenizer(loaded_recipe, tokenizer.vocab_size, tokenizer.hash)
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
    from bloomery.infer.held_model import held_folder

    # A folder that is a run means the tokenizer of its last checkpoint.
    path = expanded(folder)
    if not path.exists() or is_run(path):
        with held_folder(find_run(folder), "last") as checkpoint:
            tokenizer = load_tokenizer(checkpoint)
    else:
        tokenizer = load_tokenizer(path)

    ids = tokenizer.encode(text)
    bytes_of_token = tokenizer.token_bytes()
    special_ids = {
        "bos": tokenizer.bos_id,
        "eos": tokenizer.eos_id,
        "pad": tokenizer.pad_id,
        "unk": tokenizer.unk_id,
    }
    specials = [f"{name} {token}" for name, token in special_ids.items() if token is not None]
    special_text = " · ".join(specials) or "no special tokens"
    size = f"{tokenizer.vocab_size:,} tokens"
    click.echo(f"tokenizer  {size} · {special_text} · {tokenizer.hash[:12]}")
    click.echo(f"text       {len(text.encode()):,} bytes in {len(ids):,} tokens")
    for token, piece in zip(ids, pieces(ids, tokenizer), strict=True):
        click.echo(f"{token:>8}  {bytes_of_token[token]:>3}  {piece!r}")
    if tokenizer.decode(ids) != text:
        click.echo("warning    decoding the tokens returns another text")
