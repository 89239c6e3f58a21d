"""`bloomery train RECIPE`, `bloomery resume RUN`"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import (
    NewPath,
    chosen_recipe,
    echo,
    json_option,
    overrides_argument,
    print_json,
    progress_line,
    recipe_or_model,
    run_argument,
    training_devices_option,
    trust_code_option,
)
from bloomery.core.child import python_module
from bloomery.core.errors import UserError
from bloomery.core.run_folder import find_run
from bloomery.core.units import counted

if TYPE_CHECKING:
    from bloomery.hardware.machine import Machine
    from bloomery.plan.types import RunPlan
    from bloomery.recipe.load import LoadedRecipe
    from bloomery.runs.flow import EndedRun
    from bloomery.sweep.scores import Metric


LAUNCHER = "bloomery.launcher"  # key of click's context: the arguments after --, and those before


class WithLauncher(click.Command):
    """A click command that keeps the arguments after `--` apart: torchrun gets them, and starts the ranks."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            separator = args.index("--")
            ctx.meta[LAUNCHER] = (args[separator + 1 :], args[:separator])
            args = args[:separator]
        return super().parse_args(ctx, args)


@click.command(cls=WithLauncher)
@recipe_or_model
@click.option(
    "--run-dir",
    metavar="DIR",
    type=NewPath(),
    help="Use this run folder [default: runs/RECIPE-DATE-TIME].",
)
@training_devices_option
@click.option("--dry-run", is_flag=True, help="Print the plan, then exit.")
@click.option("--smoke-test", is_flag=True, help="Run 3 steps, then test save, resume and export.")
@click.option(
    "--recover", is_flag=True, help="After a crash, restart with safer settings (3 times)."
)
@click.option("--no-check", is_flag=True, help="Do not check a GPU's first step against the CPU.")
@click.option(
    "--for", "budget", metavar="TIME", help="Train for this time, then print one metric: 5m, 2h."
)
@json_option
def command(
    recipe: str | None,
    overrides: tuple[str, ...],
    model: str | None,
    data: str | None,
    run_dir: Path | None,
    devices: str | None,
    dry_run: bool,
    smoke_test: bool,
    recover: bool,
    no_check: bool,
    budget: str | None,
    as_json: bool,
) -> int:
    """Pretrain or fine-tune with a recipe. Tokenizes the dataset first.

    Ctrl+C saves a checkpoint and stops (exit code 75); a second Ctrl+C exits at once. `bloomery resume` continues.
    torchrun, srun, mpirun and accelerate can start the same command. Arguments after -- go to torchrun.

    With --for the run trains for a fixed time, and its held-out loss (or reward) is printed with a 95% interval: for
    experiments that change one thing. --json prints that as one document, also of a run of any other length.

    \b
    Example: bloomery train go-coder-tiny data.path=~/code data.glob="*.go"
             bloomery train demo --for 5m --json optimizer.learning_rate=3e-4
             bloomery train --model Qwen/Qwen3.5-0.8B --data chats.jsonl
    """
    from bloomery.cli.common import traceback_file
    from bloomery.launch.launchers import new_folder
    from bloomery.runs.lifecycle import start

    # A fixed time is the run's length, and its metric must exist.
    if budget is not None:
        overrides = (*overrides, *_of_fixed_time(budget, overrides))
    has_metric = budget is not None or as_json
    if has_metric and (smoke_test or dry_run or _has_launcher()):
        raise UserError(
            "--for and --json print the metric of a run that trains here",
            where="--for" if budget is not None else "--json",
            fix="leave it out, or leave out --dry-run, --smoke-test and the launcher",
            code=2,
        )

    # Arguments after -- replace this process by torchrun, which starts the same command on every rank.
    meta = click.get_current_context().meta
    launcher_arguments, train_arguments = meta.get(LAUNCHER, ((), ()))
    launch = torchrun(launcher_arguments, train_arguments)
    if launch and not dry_run:
        sys.stdout.flush()
        os.execv(launch[0], launch)

    # A dry run downloads nothing.
    loaded_recipe, source = chosen_recipe(recipe, overrides, model, data, fetch=not dry_run)
    if dry_run:
        return _show_dry_run(loaded_recipe, source, devices, launch)
    if smoke_test:
        from bloomery.cli.smoke_test import run_smoke_test

        return run_smoke_test(loaded_recipe, arguments=source, run_dir=run_dir, devices=devices)

    metric = None
    if has_metric:
        from bloomery.sweep.scores import metric_of

        metric = metric_of([loaded_recipe.recipe])

    # A recipe that leaves compilation open is timed before a long run on a CPU.
    trial = time_compiling if loaded_recipe.recipe.train.compile == "auto" else None
    folder = new_folder(loaded_recipe.name) if run_dir is None else run_dir
    traceback_file.set(folder / "log.txt")
    ended_run = start(
        loaded_recipe,
        run_dir=folder,
        devices=devices,
        recover=recover,
        quiet=as_json,
        measure=trial,
        check_step=not no_check,
    )
    if metric is None:
        return conclude(ended_run)
    return _conclude_with(metric, ended_run, devices, as_json=as_json)


def _show_dry_run(
    loaded_recipe: "LoadedRecipe", source: str, devices: str | None, launch: Sequence[str]
) -> int:
    """Prints the plan, and with a launcher what every rank would start with. Returns the exit code."""
    from bloomery.cli.plan import show_plan

    code = show_plan(loaded_recipe, devices=devices, source=source)
    if not launch:
        return code

    from bloomery.hardware.detect import detect
    from bloomery.plan.resolve import local_plan, plan_environment
    from bloomery.runs.devices import narrowed

    plan, _ = local_plan(loaded_recipe, machine=narrowed(detect(), devices))
    variables = [f"{name}={shlex.quote(value)}" for name, value in plan_environment(plan).items()]
    echo(f"environment {' '.join(variables)}")
    echo(f"command    {shlex.join(launch)}")
    return code


def _has_launcher() -> bool:
    """Whether this command line has arguments for torchrun."""
    return LAUNCHER in click.get_current_context().meta


def _of_fixed_time(budget: str, overrides: Sequence[str]) -> list[str]:
    """The overrides of a run that ends after a time, even in its first steps. Raises UserError (code 2)."""
    from bloomery.cli.bench import seconds_of
    from bloomery.recipe.schema import LENGTHS

    seconds = seconds_of(budget, "--for")
    keys = {f"train.{name}" for name in (*LENGTHS, "min_steps")}
    other = next((word for word in overrides if word.partition("=")[0] in keys), None)
    if other is not None:
        problem = f"--for sets the length of the run, and so does {other}"
        raise UserError(problem, where="--for", fix="use one of them", code=2)
    return [f"train.max_time={seconds:g}s", "train.min_steps=null"]


def _conclude_with(metric: "Metric", run: "EndedRun", devices: str | None, *, as_json: bool) -> int:
    """Judges the run on held-out items and prints the figure; returns the exit code. Raises UserError."""
    from bloomery.core.run_folder import RunFolder
    from bloomery.monitor.events import read_events
    from bloomery.sweep.ranking import Judged
    from bloomery.sweep.scores import judge
    from bloomery.view.summary import summary_of

    folder = RunFolder(run.folder)
    summary = summary_of(read_events(folder.events))
    value = None
    interval = None
    step = None
    if run.code == 0:
        with progress_line("eval"):
            score = judge(folder, metric, devices=devices)
            estimate = Judged(run.name, score.value, score.scores).estimate()
        value, step = score.value, score.step
        if estimate.low is not None and estimate.high is not None:
            interval = (estimate.low, estimate.high)
    if as_json:
        document = {
            "metric": metric.kind,
            "value": value,
            "interval": interval,
            "lower_is_better": metric.lower_is_better,
            "step": step,
            "steps": summary.step,
            "tokens": summary.tokens,
            "seconds": summary.seconds,
            "run": str(run.folder),
        }
        print_json(document)
        return run.code
    code = conclude(run)
    if value is not None:
        text = f"{metric.kind} {value:.4f}"
        if interval is not None:
            text += f", 95% interval {interval[0]:.4f} to {interval[1]:.4f}"
        echo(f"{'metric':<11}{text}, after {counted(summary.step, 'steps')}")
    return code


def torchrun(launcher_arguments: Sequence[str], train_arguments: Sequence[str]) -> list[str]:
    """The command that starts the ranks, each with the same `bloomery train ...`; [] without launcher arguments."""
    if not launcher_arguments:
        return []
    rank_arguments = [argument for argument in train_arguments if argument != "--dry-run"]
    # torchrun would start `python -m`, without the option that keeps files of the working folder out.
    rank = python_module("bloomery", "train", *rank_arguments, options=["-u"])
    return python_module("torch.distributed.run", *launcher_arguments, "--no-python", *rank)


def time_compiling(plan: "RunPlan", machine: "Machine") -> None:
    """Before a long run on a CPU: measure once whether torch.compile is faster for this model."""
    from bloomery.bench.measuring import compile_trial, make_measurement_file
    from bloomery.hardware.calibration import store

    announced = False

    def announce(_phase: str) -> None:
        # Called only where something is measured: a known machine begins at once.
        nonlocal announced
        if not announced:
            text = "measuring steps with and without torch.compile (once per model and machine)"
            echo(f"compile    {text}", err=True)
        announced = True

    # Nothing is measured where the answer is known, or where the run is too short to pay for a trial.
    measurements = compile_trial(plan, machine, on_phase=announce)
    if measurements:
        compiled, uncompiled = (
            f"{measurement.step_seconds:.2f} s"
            if measurement.step_seconds
            else f"failed ({measurement.message})"
            for measurement in measurements[:2]
        )
        text = f"step time with torch.compile {compiled}, without {uncompiled}"
        echo(f"compile    {text}", err=True)

    # Other programs on the CPU would make the figures wrong for every later run.
    measurement_file = make_measurement_file(measurements, machine)
    disturbed = any(measurement.disturbed for measurement in measurements)
    if measurement_file is not None and not disturbed:
        store(measurement_file)


def conclude(run: "EndedRun") -> int:
    """Print how the run ended and the next commands; return its exit code. Of several ranks, the first one prints."""
    if run.rank:
        return run.code

    # A run that stopped before its end is resumed; exit code 75 is a stop that was asked for.
    if run.code != 0:
        from bloomery.core.run_folder import RunFolder
        from bloomery.infer.model_folder import saved_steps
        from bloomery.runs.event_hub import last_step

        saved = saved_steps(run.folder / "checkpoints")
        state = "before the first checkpoint: a resumed run starts over"
        if saved and run.code == 75 and saved[-1] >= last_step(RunFolder(run.folder)):
            state = "checkpoint saved"
        elif saved:  # a second Ctrl+C, or ranks that did not answer
            state = f"without a new checkpoint: a resumed run continues from step {saved[-1]}"
        echo(f"stopped    {state}\nnext       bloomery resume {run.name}", err=True)
        return run.code

    from bloomery.plan.store import read_plan

    commands = [f"bloomery report {run.name}"]
    objective = read_plan(run.folder / "plan.json").objective.spec
    if not objective.values:  # a reward model generates no text
        sampling_command = f"bloomery chat {run.name}"
        if objective.reads_text:
            sampling_command = f'bloomery generate {run.name} --prompt "..."'
        commands.insert(0, sampling_command)
    echo(f"done       {run.folder}\nnext       " + "\n           ".join(commands))
    return 0


@click.command()
@run_argument
@overrides_argument
@click.option(
    "--from",
    "step",
    type=click.IntRange(min=1),
    metavar="STEP",
    help="Resume from this step's checkpoint.",
)
@click.option(
    "-d",
    "--devices",
    metavar="LIST",
    help="Train on these devices: 0,1 or cpu [default: the same].",
)
@click.option(
    "--recover", is_flag=True, help="After a crash, restart with safer settings (3 times)."
)
@click.option("--no-check", is_flag=True, help="Do not check a GPU's first step against the CPU.")
@trust_code_option
def resume_command(
    run: str,
    overrides: tuple[str, ...],
    step: int | None,
    devices: str | None,
    recover: bool,
    no_check: bool,
    trust_code: bool,
) -> int:
    """Resume a run from its last checkpoint.

    Only the length, eval.*, sample.*, checkpoint.*, logging.* and parallel.* can be changed.

    Example: bloomery resume last train.epochs=4
    """
    from bloomery.cli.common import traceback_file
    from bloomery.recipe.load import load_recipe
    from bloomery.runs.lifecycle import resume

    folder = find_run(run)
    traceback_file.set(folder / "log.txt")
    outcome = resume(
        folder,
        step=step,
        overrides=overrides,
        devices=devices,
        recover=recover,
        check_step=not no_check,
        trust_code=trust_code,
    )
    if outcome.already_done:
        # Twice as long, by the key that the recipe of the run has.
        train = load_recipe(folder / "recipe.yaml").recipe.train
        seconds = "s" if train.length.unit == "seconds" else ""
        longer = f"train.{train.length_key}={2 * train.length.amount:.15g}{seconds}"
        echo("done       nothing left to train")
        echo(f"next       bloomery resume {outcome.name} {longer}      twice as long")
        return 0
    return conclude(outcome)
