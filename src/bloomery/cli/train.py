"""`bloomery train`: a recipe becomes a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import NewPath, chosen_recipe, recipe_or_model, say
from bloomery.core.errors import UserError
from bloomery.core.text import expanded

if TYPE_CHECKING:
    from bloomery.hardware.machine import Machine
    from bloomery.plan.types import RunPlan
    from bloomery.train.run import Run


@click.command()
@recipe_or_model
@click.option("--run-dir", type=NewPath(), help="The run's folder [default: runs/RECIPE-DATE-TIME].")
@click.option("-d", "--devices", metavar="LIST", help="The device to train on: its number, or cpu [default: the best].")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--rehearse", is_flag=True, help="Three real steps, then save, kill, resume, export, each with its time.")
@click.option("--recover", is_flag=True, help="After a crash go on one rung safer, three times at most.")
@click.option("--max-steps", type=click.IntRange(min=1), help="The recipe key train.max_steps=N.")
@click.option("--train-epochs", type=click.FloatRange(min=0, min_open=True), help="train.epochs=N.")
@click.option("--models-dir", metavar="DIR", help="With --model-name: model.from=DIR/NAME.")
@click.option("--model-name", metavar="NAME", help="model.from=NAME: a folder, or an id on the Hub.")
@click.option("--dataset-proj", metavar="PATH", help="data.path=PATH.")
@click.option("--dataset-config", metavar="GLOB", help="data.glob=GLOB: which files of it.")
@click.option("--chat-template", metavar="FILE", help="data.chat.template=FILE, or the name of a built-in one.")
@click.option("--gradient-checkpointing", is_flag=True, help="train.activation_checkpointing=full.")
@click.option("--log-peak-memory", is_flag=True, help="logging.memory=true: the peak in each printed line.")
@click.option("--safe-load", is_flag=True, help="model.load_with=transformers: transformers loads its layers.")
def command(
    recipe: str | None,
    overrides: tuple[str, ...],
    model: str | None,
    data: str | None,
    run_dir: Path | None,
    devices: str | None,
    dry_run: bool,
    rehearse: bool,
    recover: bool,
    **flags: str | float | bool | None,
) -> int:
    """Train a recipe: prepare its text when that is missing, plan, train, save.

    Ctrl+C once saves and stops (exit code 75, `bloomery resume` goes on), twice ends at once.

    \b
    Example: bloomery train go-coder-tiny data.path=~/code data.glob="*.go" train.epochs=2
             bloomery train --model Qwen/Qwen2.5-0.5B-Instruct --data chats.jsonl
    """
    from bloomery.cli.crash import traceback_file
    from bloomery.runs.folder import propose_folder
    from bloomery.runs.lifecycle import start

    given = keys_of(flags)
    for flag, word in given.items():
        say(f"{flag} -> {word}{_MEANING.get(flag, '')}", err=True)
    loaded, words = chosen_recipe(recipe, (*overrides, *given.values()), model, data, fetch=not dry_run)
    if dry_run:
        from bloomery.cli.plan import show_plan

        return show_plan(loaded, devices=devices, source=words)
    if rehearse:
        from bloomery.cli.smoke_test import rehearse_run

        return rehearse_run(loaded, words=words, run_dir=run_dir, devices=devices)
    trial = time_compiling if loaded.recipe.train.compile == "auto" else None
    folder = propose_folder(loaded.name) if run_dir is None else run_dir
    traceback_file.set(folder / "log.txt")
    return conclude(start(loaded, run_dir=folder, devices=devices, recover=recover, planned=trial))


def time_compiling(plan: "RunPlan", machine: "Machine") -> None:
    """Before a long run on a CPU: measure once whether torch.compile pays for this model."""
    from bloomery.bench.measuring import compile_trial
    from bloomery.bench.page import make_measurement_file
    from bloomery.hardware.specs.calibration import remember

    told = False

    def begun(_phase: str) -> None:
        nonlocal told
        if not told:
            say("compile    timing steps with and without torch.compile, once for this model on this machine", err=True)
        told = True

    rows = compile_trial(plan, machine, on_phase=begun)
    figures = [f"{row.step_seconds:.2f} s" if row.step_seconds else f"failed ({row.message})" for row in rows]
    if rows:
        say(f"compile    step time compiled {figures[0]}, uncompiled {figures[1]}", err=True)
    card = make_measurement_file(rows, machine)
    if card is not None and not any(row.disturbed for row in rows):
        remember(card)


_MEANING = {
    "--safe-load": "    transformers loads the layers that are its own; ours need nothing that files lack",
    "--log-peak-memory": "    events.jsonl has memory_gib of every step in any case",
}


def keys_of(flags: Mapping[str, str | float | bool | None]) -> dict[str, str]:
    """The flags that other trainers have, as overrides by flag. Raises UserError."""
    given = {f"--{name.replace('_', '-')}": value for name, value in flags.items() if value not in (None, False)}
    folder, name = given.pop("--models-dir", None), given.get("--model-name")
    if folder is not None and name is None:
        problem = "--models-dir says where models are, not which one"
        raise UserError(problem, fix="add --model-name NAME, a folder in it", code=2)
    words = {
        "--max-steps": "train.max_steps={}",
        "--train-epochs": "train.epochs={:g}",
        "--model-name": "model.from={}",
        "--dataset-proj": "data.path={}",
        "--dataset-config": "data.glob={}",
        "--chat-template": "data.chat.template={}",
        "--gradient-checkpointing": "train.activation_checkpointing=full",
        "--log-peak-memory": "logging.memory=true",
        "--safe-load": "model.load_with=transformers",
    }
    told = {flag: words[flag].format(value) for flag, value in given.items()}
    if folder is None:
        return told
    told.pop("--model-name")
    place = (expanded(str(folder)) / str(name)).as_posix()
    return {"--models-dir, --model-name": words["--model-name"].format(place)} | told


def conclude(run: "Run") -> int:
    """Tell how the run ended and what can be done next; its exit code."""
    used = _use_of(run) if run.code == 0 else []  # a run that was stopped may have no plan yet
    lines = {
        0: f"done       {run.folder}\nnext       " + "\n           ".join([*used, f"bloomery report {run.name}"]),
        75: f"stopped    everything is saved; `bloomery resume {run.name}` goes on",
        130: f"stopped    at once; `bloomery resume {run.name}` goes on from the last checkpoint",
    }
    say(lines[run.code], err=run.code != 0)
    return run.code


def _use_of(run: "Run") -> list[str]:
    """What one does with the model of a run: a reward model says nothing, one that has learned answers is asked."""
    from bloomery.plan.store import read_plan

    aim = read_plan(run.folder / "plan.json").objective.spec
    if aim.values:
        return []
    return [f'bloomery generate {run.name} --prompt "..."' if aim.reads_text else f"bloomery chat {run.name}"]
