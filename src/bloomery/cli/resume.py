"""`bloomery resume`: a run goes on where it stopped."""

import click

from bloomery.cli.common import overrides_argument, say
from bloomery.runs.names import find_run


@click.command()
@click.argument("run")
@overrides_argument
@click.option("--from", "step", type=click.IntRange(min=1), metavar="STEP", help="Go back to this step's checkpoint.")
@click.option("-d", "--devices", metavar="LIST", help="The device to train on: its number, or cpu.")
@click.option("--recover", is_flag=True, help="After a crash go on one rung safer, three times at most.")
def command(run: str, overrides: tuple[str, ...], step: int | None, devices: str | None, recover: bool) -> int:
    """Go on with RUN (a path, a name under runs/, or `last`) where it stopped, whatever stopped it.

    Only the length, eval.*, sample.*, checkpoint.* and logging.* may be changed.

    Example: bloomery resume last train.epochs=4
    """
    from bloomery.cli.crash import traceback_file
    from bloomery.cli.train import conclude
    from bloomery.runs.lifecycle import resume

    folder = find_run(run)
    traceback_file.set(folder / "log.txt")
    outcome = resume(folder, step=step, overrides=overrides, devices=devices, recover=recover)
    if outcome.again:
        say(f"This run is done. `bloomery resume {outcome.name} train.epochs=N` makes it longer.")
        return 0
    return conclude(outcome)
