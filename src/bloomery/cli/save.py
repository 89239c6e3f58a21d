"""`bloomery save RUN`: a running run writes a checkpoint and goes on."""

import click

from bloomery.cli.common import find_run


@click.command()
@click.argument("run")
def command(run: str) -> int:
    """Let RUN (a path, a name under runs/, or `last`) write a checkpoint after its step, and wait until it stands.

    Example: bloomery save last
    """
    from bloomery.cli.stop import waiting
    from bloomery.launch.ask import runner_of, save_run
    from bloomery.launch.supervise import existing
    from bloomery.units import format_bytes

    folder = existing(find_run(run))
    runner = runner_of(folder)
    click.echo(f"asked      process {runner.pid} to save after the step that it is taking")
    with waiting(folder.path) as told:
        saved = save_run(runner, on_event=told)
    click.echo(f"saved      step {saved.step:,}, {format_bytes(saved.bytes)}: {saved.path}")
    return 0
