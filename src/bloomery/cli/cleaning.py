"""`bloomery runs rm RUN...` and `bloomery runs clean`: delete runs, and what no run uses any more. No torch."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from bloomery.cli.common import echo, json_option, print_json
from bloomery.core.errors import UserError
from bloomery.core.units import counted, format_bytes
from bloomery.runs.cleaning import Leftover, deletable, delete, leftovers
from bloomery.runs.folder import find_run

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

    RUN is a path, a name under runs/, or `last`. Shows first what is lost and how much it is. A run in progress is
    refused. Exports in other folders and prepared datasets stay: `bloomery runs clean` deletes what no run uses.

    Example: bloomery runs rm demo-2 qwen2.5-1.5b-lora-20260101-120000

    Example: bloomery runs rm last --dry-run
    """
    folders = dict.fromkeys(find_run(name).absolute() for name in runs)
    _delete(
        [deletable(_shown(folder)) for folder in folders],
        [],
        yes=yes,
        dry_run=dry_run,
        as_json=as_json,
    )


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
    found, notes = leftovers()
    _delete(found, notes, yes=yes, dry_run=dry_run, as_json=as_json)


def _shown(folder: Path) -> Path:
    """Relative to the working folder where it is below it."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) and folder != here else folder


def _delete(
    found: Sequence[Leftover], notes: Sequence[str], *, yes: bool, dry_run: bool, as_json: bool
) -> None:
    total = sum(one.bytes for one in found)
    for one in found:
        loss = f"; {one.loss}" if one.loss else ""
        echo(f"{one.kind:<17}{one.path}  {format_bytes(one.bytes)}  ({one.reason}{loss})", err=True)
    for note in notes:
        echo(f"{'note':<17}{note}", err=True)
    gone = list[Leftover]()
    if found and not dry_run:
        if not yes:
            _ask(f"delete {counted(len(found), 'items')}, {format_bytes(total)}?")
        gone += delete(found)
    if as_json:
        listed = found if dry_run else gone
        items = [
            {"path": str(one.path), "kind": one.kind, "bytes": one.bytes, "reason": one.reason}
            for one in listed
        ]
        print_json(
            {
                "dry_run": dry_run,
                "deleted": items,
                "bytes": sum(one.bytes for one in listed),
                "notes": list(notes),
            }
        )
    elif not found:
        echo("nothing to delete")
    else:
        verb = "would delete" if dry_run else "deleted"
        echo(f"{verb:<17}{counted(len(found), 'items')}, {format_bytes(total)}")


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        fix = "add --yes, or --dry-run to see it alone"
        raise UserError(
            "nobody can be asked here; nothing was deleted", where="stdin", fix=fix, code=2
        )
    if not click.confirm(question, err=True):
        raise UserError("nothing was deleted", where="your answer", fix="answer y, or add --yes")
