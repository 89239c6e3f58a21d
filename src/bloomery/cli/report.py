"""`bloomery report RUN`: the page about a run."""

import click

from bloomery.cli.common import find_run


@click.command()
@click.argument("run")
def command(run: str) -> None:
    """Write report.html of RUN (a path, a name under runs/, or `last`): curves, samples, incidents, plan against run.

    The page is one file that works offline; a run that still trains, was killed or failed has one too.

    Example: bloomery report last
    """
    folder = find_run(run)
    from bloomery.report import write_report

    click.echo(write_report(folder))
