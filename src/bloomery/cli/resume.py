"""`bloomery resume RUN`"""

import click

from bloomery.cli.common import echo, overrides_argument, run_argument
from bloomery.runs.names import find_run


@click.command()
@run_argument
@overrides_argument
@click.option("--from", "step", type=click.IntRange(min=1), metavar="STEP", help="Resume from this step's checkpoint.")
@click.option("-d", "--devices", metavar="LIST", help="Train on these devices: 0,1 or cpu [default: the same].")
@click.option("--recover", is_flag=True, help="After a crash, restart with safer settings (3 times).")
def command(run: str, overrides: tuple[str, ...], step: int | None, devices: str | None, recover: bool) -> int:
    """Resume a run from its last checkpoint.

    Only the length, eval.*, sample.*, checkpoint.* and logging.* can be changed.

    Example: bloomery resume last train.epochs=4
    """
    from bloomery.cli.crash import traceback_file
    from bloomery.cli.train import conclude
    from bloomery.runs.lifecycle import resume

    folder = find_run(run)
    traceback_file.set(folder / "log.txt")
    outcome = resume(folder, step=step, overrides=overrides, devices=devices, recover=recover)
    if outcome.again:
        echo(f"done       nothing left to train\nnext       bloomery resume {outcome.name} train.epochs=N")
        return 0
    return conclude(outcome)
