"""`bloomery report RUN`: one HTML page about a run or a sweep."""

from pathlib import Path

import click

from bloomery.cli.common import progress_line
from bloomery.core.errors import UserError
from bloomery.core.run_folder import find_run, find_sweep, is_run
from bloomery.core.text import expanded


@click.command()
@click.argument("run")
@click.option(
    "--out",
    "out_path",
    type=click.Path(path_type=Path),
    help="Write to this file [default: RUN/report.html].",
)
def command(run: str, out_path: Path | None) -> None:
    """Write report.html about a run or a sweep: one page that works offline.

    RUN is a run, finished or not, or a checkpoint or export in its folder. The page has training curves, evaluations,
    samples, events, and planned and measured figures. Of a sweep the page ranks the runs, shows their figure over each
    setting, and links to the pages of its runs, which are written, too.

    Example: bloomery report last
    """
    from bloomery.report import refuse_occupied, write_report

    sweep_folder = find_sweep(run)
    if sweep_folder is not None:
        from bloomery.sweep.page import REPORT, write_sweep_report

        page = (sweep_folder / REPORT if out_path is None else expanded(out_path)).absolute()
        refuse_occupied(page)
        with progress_line("report"):
            write_sweep_report(sweep_folder, out=page)
        click.echo(page)
        return
    run_folder = _run_of(run)
    page = (run_folder / "report.html" if out_path is None else expanded(out_path)).absolute()
    refuse_occupied(page)
    with progress_line("report"):
        write_report(run_folder, out=page)
    click.echo(page)


def _run_of(name: str) -> Path:
    """The run `name`, or the run whose folder has this checkpoint or export. Raises UserError (code 2)."""
    folder = expanded(name)
    if name == "last" or is_run(Path("runs") / name) or is_run(folder) or not folder.is_dir():
        return find_run(name)
    # Only a folder with events is a run here: a folder above may hold a recipe and models of yours.
    for parent in folder.resolve().parents:
        if is_run(parent) and (parent / "events.jsonl").is_file():
            return parent
    fix = f"to evaluate a model: bloomery eval {name} --data FILE"
    raise UserError("this folder is not a run", where=str(folder), fix=fix, code=2)
