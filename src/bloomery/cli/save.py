"""`bloomery save RUN`: a running run writes a checkpoint and goes on."""

import click

from bloomery.cli.common import say
from bloomery.recipe.values import LONGEST_PROFILE
from bloomery.runs.names import find_run


@click.command()
@click.argument("run")
@click.option(
    "--profile",
    "steps",
    type=click.IntRange(1, LONGEST_PROFILE),
    metavar="STEPS",
    help="Instead record the next steps: operators, times, memory.",
)
def command(run: str, steps: int | None) -> int:
    """Let RUN (a path, a name under runs/, or `last`) write a checkpoint after its step, and wait until it stands.

    Example: bloomery save last
    """
    from bloomery.cli.stop import waiting
    from bloomery.core.units import format_bytes
    from bloomery.runs.control import profile_run, runner_of, save_run
    from bloomery.runs.supervisor import existing

    folder = existing(find_run(run))
    runner = runner_of(folder)
    if steps is not None:
        say(f"asked      process {runner.pid} to record its next {steps} steps")
        with waiting(folder.path) as told:
            files = profile_run(runner, steps, on_event=told)
        say(f"recorded   {files}.trace.json.gz, for https://ui.perfetto.dev or chrome://tracing")
        say(f"tables     {files.name}.operators.txt, {files.name}.memory.txt beside it")
        return 0
    say(f"asked      process {runner.pid} to save after the step that it is taking")
    with waiting(folder.path) as told:
        saved = save_run(runner, on_event=told)
    say(f"saved      step {saved.step:,}, {format_bytes(saved.bytes)}: {saved.path}")
    return 0
