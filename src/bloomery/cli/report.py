"""`bloomery report RUN`: the page about a run."""

from pathlib import Path

import click

from bloomery.cli.common import expanded, find_run, is_run
from bloomery.errors import UserError

_MODEL_FILES = ("config.json", "adapter_config.json")


@click.command()
@click.argument("run")
def command(run: str) -> None:
    """Write report.html of RUN (a path, a name under runs/, or `last`): curves, samples, incidents, plan against run.

    The page is one file that works offline; a run that still trains, was killed or failed has one too. A checkpoint
    or an export inside a run's folder, alone or as BASE+ADAPTER, stands for its run.

    Example: bloomery report last
    """
    folder = _run_of(run)
    from bloomery.report import write_report

    click.echo(write_report(folder))


def _run_of(name: str) -> Path:
    """The run that is named, or that made what is named. Raises UserError (code 2)."""
    whole = expanded(name)
    made = whole if whole.is_dir() else expanded(name.rpartition("+")[2])
    if not made.is_dir() or is_run(made):
        return find_run(name)
    for above in made.resolve().parents:
        if is_run(above):
            return above
    if any((made / file).is_file() for file in _MODEL_FILES):
        problem = f"{name} is a model, and a report is about a run: how one was trained"
        remedy = f"name the run that made it (`bloomery runs` lists them), or try `bloomery eval {name} --data FILE`"
        raise UserError(problem, remedy=remedy, code=2)
    return find_run(name)
