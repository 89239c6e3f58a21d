"""`bloomery train`: a recipe becomes a run."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import recipe_argument

if TYPE_CHECKING:
    from bloomery.train.run import Run


@click.command()
@recipe_argument
@click.option("--run-dir", type=click.Path(path_type=Path), help="The run's folder [default: runs/RECIPE-DATE-TIME].")
@click.option("-d", "--devices", metavar="LIST", help="The device to train on: its number, or cpu [default: the best].")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--rehearse", is_flag=True, help="Three real steps, then save, kill, resume, export, each with its time.")
@click.option("--recover", is_flag=True, help="After a crash go on one rung safer, three times at most.")
@click.option("--max-steps", type=click.IntRange(min=1), help='The recipe key train.length="N steps".')
@click.option("--train-epochs", type=click.FloatRange(min=0, min_open=True), help='train.length="N epochs".')
def command(
    recipe: str,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    devices: str | None,
    dry_run: bool,
    rehearse: bool,
    recover: bool,
    max_steps: int | None,
    train_epochs: float | None,
) -> int:
    """Train a recipe: prepare its text when that is missing, plan, train, save.

    Ctrl+C once saves and stops (exit code 75, `bloomery resume` goes on), twice ends at once.

    Example: bloomery train go-coder-tiny data.path=~/code data.glob="*.go" train.length="2 epochs"
    """
    from bloomery.cli.crash import traceback_file
    from bloomery.launch.local import start
    from bloomery.launch.run_folder import propose_folder
    from bloomery.recipe.load import load_recipe

    lengths = {"steps": max_steps, "epochs": train_epochs}
    given = tuple(f"train.length={amount:g} {unit}" for unit, amount in lengths.items() if amount is not None)
    for word in given:
        click.echo(f"this is the recipe key {word}", err=True)
    loaded = load_recipe(recipe, (*overrides, *given))
    if dry_run:
        from bloomery.cli.plan import show_plan

        return show_plan(loaded, devices=devices)
    if rehearse:
        from bloomery.cli.rehearse import rehearse_run

        return rehearse_run(loaded, words=shlex.join((recipe, *overrides, *given)), run_dir=run_dir, devices=devices)
    folder = propose_folder(loaded.name) if run_dir is None else run_dir
    traceback_file.set(folder / "log.txt")
    return conclude(start(loaded, run_dir=folder, devices=devices, recover=recover))


def conclude(run: "Run") -> int:
    """Tell how the run ended and what can be done next; its exit code."""
    lines = {
        0: f"done       {run.folder}\n"
        f'next       bloomery generate {run.name} --prompt "..."\n'
        f"           bloomery report {run.name}",
        75: f"stopped    everything is saved; `bloomery resume {run.name}` goes on",
        130: f"stopped    at once; `bloomery resume {run.name}` goes on from the last checkpoint",
    }
    click.echo(lines[run.code], file=sys.stdout if run.code == 0 else sys.stderr)
    return run.code
