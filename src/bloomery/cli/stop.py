"""`bloomery stop RUN`, `bloomery save RUN`"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from bloomery.cli.common import echo, literal, run_argument
from bloomery.core.errors import UserError
from bloomery.monitor.events import Event, Phase, Saved, StepDone
from bloomery.recipe.values import LONGEST_PROFILE
from bloomery.runs.names import find_run


@click.command()
@run_argument
def command(run: str) -> int:
    """Save a running run after its current step, then stop it.

    Example: bloomery stop last
    """
    from bloomery.runs.control import runner_of, stop_run
    from bloomery.runs.supervisor import existing
    from bloomery.train.sealed import saved_steps, step_folder

    folder = existing(find_run(run))
    runner = runner_of(folder)
    echo(f"requested  process {runner.pid} saves and stops after its current step")
    with waiting(folder.path) as on_event:
        ended = stop_run(runner, on_event=on_event)
    if ended is None or ended.status == "failed":
        reason = "process killed without a final event" if ended is None else ended.error
        fix = f"bloomery resume {folder.name}"
        raise UserError(f"the run failed before it stopped: {reason}", where=str(folder.log), fix=fix)
    steps = saved_steps(folder.checkpoints)
    saved = f"saved in {step_folder(folder.checkpoints, steps[-1])}" if steps else "no checkpoint yet"
    echo(f"{ended.status:<11}at step {ended.step:,}; {saved}")
    if ended.status == "stopped":
        echo(f"next       bloomery resume {folder.name}")
    return 0


@click.command()
@run_argument
@click.option(
    "--profile", "steps", type=click.IntRange(1, LONGEST_PROFILE), metavar="STEPS",
    help="Instead profile the next STEPS steps.",
)  # fmt: skip
def save_command(run: str, steps: int | None) -> int:
    """Save a checkpoint of a running run after its current step.

    Example: bloomery save last
    """
    from bloomery.core.units import format_bytes
    from bloomery.runs.control import profile_run, runner_of, save_run
    from bloomery.runs.supervisor import existing

    folder = existing(find_run(run))
    runner = runner_of(folder)
    if steps is not None:
        echo(f"requested  process {runner.pid} profiles its next {steps} steps")
        with waiting(folder.path) as on_event:
            files = profile_run(runner, steps, on_event=on_event)
        echo(f"trace      {files}.trace.json.gz (open in https://ui.perfetto.dev or chrome://tracing)")
        echo(f"tables     {files}.operators.txt, {files.name}.memory.txt")
        return 0
    echo(f"requested  process {runner.pid} saves after its current step")
    with waiting(folder.path) as on_event:
        saved = save_run(runner, on_event=on_event)
    echo(f"saved      step {saved.step:,}, {format_bytes(saved.bytes)}: {saved.path}")
    return 0


@contextmanager
def waiting(folder: Path) -> Iterator[Callable[[Event], None]]:
    """Inside the block a status line on a terminal shows the run's progress, from the events passed to the callback."""
    from rich.console import Console

    with Console(stderr=True).status(literal(f"waiting for {folder.name}")) as status:

        def on_event(event: Event) -> None:
            if isinstance(event, StepDone | Saved):
                done = "done" if isinstance(event, StepDone) else "saved"
                status.update(literal(f"waiting for {folder.name}: step {event.step:,} {done}"))
            elif isinstance(event, Phase):
                status.update(literal(f"waiting for {folder.name}: {event.name}"))

        yield on_event
