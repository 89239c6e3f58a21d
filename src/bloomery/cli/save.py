"""`bloomery save RUN`"""

import click

from bloomery.cli.common import echo, run_argument
from bloomery.recipe.values import LONGEST_PROFILE
from bloomery.runs.names import find_run


@click.command()
@run_argument
@click.option(
    "--profile", "steps", type=click.IntRange(1, LONGEST_PROFILE), metavar="STEPS",
    help="Instead profile the next STEPS steps.",
)  # fmt: skip
def command(run: str, steps: int | None) -> int:
    """Save a checkpoint of a running run after its current step.

    Example: bloomery save last
    """
    from bloomery.cli.stop import waiting
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
