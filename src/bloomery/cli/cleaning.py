"""`bloomery runs rm RUN...` and `bloomery runs clean`: delete runs, and what no run uses any more. No torch."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from bloomery.cli.common import echo, json_option, print_json
from bloomery.core.errors import UserError
from bloomery.core.run_folder import find_run, find_sweep
from bloomery.core.units import counted, format_bytes
from bloomery.runs.cleaning import Leftover, deletable, delete, leftovers

yes_option = click.option("-y", "--yes", is_flag=True, help="Delete without asking.")
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Show what would be deleted, then exit."
)


@click.command("rm")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@yes_option
@dry_run_option
@json_option
def rm_command(runs: tuple[str, ...], yes: bool, dry_run: bool, as_json: bool) -> None:
    """Delete runs with their checkpoints.

    RUN is a path, a name under runs/, or `last`; a sweep is deleted with all its runs. Shows first what is lost and how
    much it is. A run in progress is refused. Exports in other folders and prepared datasets stay: `bloomery runs clean`
    deletes what no run uses.

    Example: bloomery runs rm demo-2 qwen2.5-1.5b-lora-20260101-120000

    Example: bloomery runs rm last --dry-run
    """
    folders = dict.fromkeys((find_sweep(name) or find_run(name)).absolute() for name in runs)
    items = [deletable(_relative(folder)) for folder in folders]
    _delete(items, [], yes=yes, dry_run=dry_run, as_json=as_json)


@click.command("clean")
@yes_option
@dry_run_option
@json_option
def clean_command(yes: bool, dry_run: bool, as_json: bool) -> None:
    """Delete datasets, drafts and caches that no run uses.

    A dataset is used by the runs in runs/ that were trained on it: they need it to resume. Runs in other folders are
    not known here. Drafts are of processes that were killed. Caches are compiled functions and measurements of this
    machine that were not used for 30 days.

    Example: bloomery runs clean --dry-run
    """
    items, notes = leftovers()
    _delete(items, notes, yes=yes, dry_run=dry_run, as_json=as_json)


def _relative(folder: Path) -> Path:
    """The folder relative to the working folder where it is below that."""
    cwd = Path.cwd()
    return folder.relative_to(cwd) if folder.is_relative_to(cwd) and folder != cwd else folder


def _delete(
    items: Sequence[Leftover], notes: Sequence[str], *, yes: bool, dry_run: bool, as_json: bool
) -> None:
    """Print what is lost with the items, ask unless `yes`, delete them, and print what was deleted."""
    for item in items:
        loss = f"; {item.loss}" if item.loss else ""
        size = format_bytes(item.bytes)
        echo(f"{item.kind:<17}{item.path}  {size}  ({item.reason}{loss})", err=True)
    for note in notes:
        echo(f"{'note':<17}{note}", err=True)

    total = f"{counted(len(items), 'items')}, {format_bytes(sum(item.bytes for item in items))}"
    deleted_items = list[Leftover]()
    if items and not dry_run:
        if not yes:
            _confirm(f"delete {total}?")
        deleted_items += delete(items)

    # With --dry-run, "deleted" lists what would be.
    if as_json:
        listed_items = items if dry_run else deleted_items
        documents = [
            {"path": str(item.path), "kind": item.kind, "bytes": item.bytes, "reason": item.reason}
            for item in listed_items
        ]
        document = {
            "dry_run": dry_run,
            "deleted": documents,
            "bytes": sum(item.bytes for item in listed_items),
            "notes": list(notes),
        }
        print_json(document)
    elif not items:
        echo("nothing to delete")
    else:
        verb = "would delete" if dry_run else "deleted"
        echo(f"{verb:<17}{total}")


def _confirm(question: str) -> None:
    """Raises UserError where the user declines, and (code 2) where stdin is not a terminal."""
    if not sys.stdin.isatty():
        problem = "nobody can be asked here; nothing was deleted"
        fix = "add --yes, or --dry-run to see it alone"
        raise UserError(problem, where="stdin", fix=fix, code=2)
    if not click.confirm(question, err=True):
        raise UserError("nothing was deleted", where="your answer", fix="answer y, or add --yes")
