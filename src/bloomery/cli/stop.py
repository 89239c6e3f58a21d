"""`bloomery stop RUN`: a running run saves and ends."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from bloomery.cli.common import literal, say
from bloomery.core.errors import UserError
from bloomery.monitor.events import Event, Phase, Saved, StepDone
from bloomery.runs.names import find_run


@click.command()
@click.argument("run")
def command(run: str) -> int:
    """Let RUN (a path, a name under runs/, or `last`) finish its step and save, and wait until it has ended.

    Example: bloomery stop last
    """
    from bloomery.runs.control import runner_of, stop_run
    from bloomery.runs.supervisor import existing
    from bloomery.train.sealed import saved_steps, step_folder

    folder = existing(find_run(run))
    runner = runner_of(folder)
    say(f"asked      process {runner.pid} to save and stop; it ends after the step that it is taking")
    with waiting(folder.path) as told:
        ended = stop_run(runner, on_event=told)
    if ended is None or ended.status == "failed":
        why = "process killed without a final event" if ended is None else ended.error
        fix = f"`bloomery resume {folder.name}` goes on from the last checkpoint"
        raise UserError(f"the run failed before it stopped: {why}", where=str(folder.log), fix=fix)
    steps = saved_steps(folder.checkpoints)
    kept = f"saved in {step_folder(folder.checkpoints, steps[-1])}" if steps else "there was nothing to save yet"
    say(f"{ended.status:<11}after step {ended.step:,}; {kept}")
    if ended.status == "stopped":
        say(f"next       bloomery resume {folder.name}")
    return 0


@contextmanager
def waiting(folder: Path) -> Iterator[Callable[[Event], None]]:
    """On a terminal, a line that says what the run does meanwhile; what is given to it are the run's events."""
    from rich.console import Console

    with Console(stderr=True).status(literal(f"waiting for {folder.name}")) as status:

        def told(event: Event) -> None:
            if isinstance(event, StepDone):
                status.update(literal(f"waiting for {folder.name}: step {event.step:,} is done"))
            elif isinstance(event, Saved):
                status.update(literal(f"waiting for {folder.name}: step {event.step:,} is saved"))
            elif isinstance(event, Phase):
                status.update(literal(f"waiting for {folder.name}: {event.name}"))

        yield told
