"""`bloomery sweep RECIPE key=a,b ...`: a run for each combination of settings, ranked by held-out loss"""

import sys
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import (
    NewPath,
    echo,
    json_option,
    print_json,
    progress_line,
    recipe_argument,
    shown_path,
    training_devices_option,
)
from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder, resume_argument
from bloomery.core.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from bloomery.plan.types import PlanReport, RunPlan
    from bloomery.sweep.points import Point, Search
    from bloomery.sweep.table import SweepRun, SweepTable

WORDS = "bloomery.words"  # key of click's context: the arguments as typed
WIDTH = 100  # without a terminal
NARROWEST_PICTURE, WIDEST_PICTURE = 16, 40


class WithWords(click.Command):
    """A click command that keeps what was typed: a sweep stores the command that continues it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = [word for word in args if word != "--json"]
        return super().parse_args(ctx, args)


@click.command(cls=WithWords)
@recipe_argument
@click.option(
    "--metric",
    type=click.Choice(["eval.loss", "reward", "task"]),
    help="Rank by this [default: eval.loss, or reward if trained with rewards].",
)
@click.option(
    "--task",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Rank by the items of this task file that are right.",
)
@click.option(
    "--search",
    type=click.Choice(["grid", "random", "halving"]),
    default="grid",
    show_default=True,
    help="Run all combinations, draw some, or stop worse ones early.",
)
@click.option(
    "--runs", type=click.IntRange(2), metavar="N", help="Draw N combinations. [default: 10]"
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the draw.")
@click.option("--budget", metavar="TIME", help="Start no run that would end later: 2h, 30m.")
@click.option(
    "--run-dir",
    metavar="DIR",
    type=NewPath(),
    help="Use this folder [default: runs/RECIPE-sweep-ID].",
)
@training_devices_option
@click.option(
    "--per-device/--together",
    "per_device",
    default=None,
    help="Train one run per device, or each on all [default: if it fits].",
)
@click.option("--dry-run", is_flag=True, help="Print the runs and what they take, then exit.")
@json_option
def command(
    recipe: str,
    overrides: tuple[str, ...],
    metric: str | None,
    task: Path | None,
    search: "Search",
    runs: int | None,
    seed: int,
    budget: str | None,
    run_dir: Path | None,
    devices: str | None,
    per_device: bool | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Train a recipe with each combination of settings, and rank the runs by held-out loss.

    A key with several values is compared: key=a,b. Commas inside brackets and quotes belong to a value: key=[a,b],[c].
    From a range, key=1e-5..1e-3, --search random and halving draw. The runs are ordinary ones in a folder, one after
    another, or one per GPU where each fits one. The same command continues a sweep that was stopped or killed; with
    more values it trains only what is missing. No best run is named that the noise of the validation set does not
    support.

    Example: bloomery sweep demo-chat-lora optimizer.learning_rate=1e-4,3e-4 adapter.rank=8,16
    """
    from bloomery.cli.bench import seconds_of
    from bloomery.cli.train import time_compiling
    from bloomery.recipe.axes import axes_of
    from bloomery.runs.held_sources import held_sources
    from bloomery.sweep.drive import Sweep
    from bloomery.sweep.points import EXAMPLE, WHERE, points_of, ranges_of
    from bloomery.sweep.scores import metric_of
    from bloomery.sweep.store import sweep_folder
    from bloomery.sweep.table import table_of

    # What was typed wrong in any combination is refused before the first one trains.
    budget_seconds = None if budget is None else seconds_of(budget, "--budget")
    points = points_of(recipe, overrides, search=search, runs=runs, seed=seed)
    recipes = [point.recipe.recipe for point in points]
    click.get_current_context().with_resource(held_sources(*recipes))
    ranked_by = metric_of(recipes, metric, task)
    slots, reports = _slots(points, devices, per_device)
    plans = [report.plan for report in reports]
    expected_seconds = _mean_seconds(plans)
    _show_plans(points, reports, slots)
    rungs = _rungs(points, plans) if search == "halving" else None
    if dry_run:
        for key, drawn in ranges_of(axes_of(overrides, where=WHERE, example=EXAMPLE)).items():
            echo(f"{'draws':<11}{key}: {drawn.text}")
        for point in points:
            echo(f"{'run':<11}{point.text}")
        return 0
    if rungs is not None and budget is not None:
        fix = "name fewer values, or leave out --budget"
        raise UserError("--search halving takes no --budget", where="--budget", fix=fix, code=2)

    folder = sweep_folder(recipe, points, {}, run_dir)
    echo(f"{'folder':<11}{shown_path(folder.path)}", err=True)
    sweep = Sweep(
        folder=folder,
        points=points,
        metric=ranked_by,
        on_line=lambda title, text: echo(f"{title:<11}{text}", err=True),
        slots=slots,
        budget_seconds=budget_seconds,
        expected_seconds=expected_seconds,
        measure=time_compiling if len(slots) == 1 else None,
        command=["sweep", *click.get_current_context().meta[WORDS]],
    )
    with progress_line("sweep"):
        end = sweep.run() if rungs is None else sweep.halve(rungs)
    table = table_of(
        folder,
        {point.name: point.settings for point in points},
        ranked_by.kind,
        end.judged,
        end.dropped,
        lower_is_better=ranked_by.lower_is_better,
    )
    if as_json:
        failed = [
            {"settings": failure.point.values, "reason": failure.reason} for failure in end.failures
        ]
        left_out = [{"settings": point.values} for point in end.left_out]
        print_json(table.document() | {"failed": failed, "left_out": left_out})
    else:
        for line in table_lines(table):
            echo(line)
        for failure in end.failures:
            echo(f"{'failed':<11}{failure.point.text}: {failure.reason}")
        if end.left_out:
            echo(f"{'left out':<11}{counted(len(end.left_out), 'runs')} not started")
        for line in verdict_lines(table):
            echo(line)
    if end.code in (75, 130):
        echo("next       the same command continues this sweep", err=True)
    return end.code


def _slots(
    points: "list[Point]", devices: str | None, per_device: bool | None
) -> "tuple[list[str | None], list[PlanReport]]":
    """Where the runs train, each as `-d` names devices, and their plans there. Raises UserError.

    Of several GPUs each trains a run of its own, where every run fits one and none asks for more; `per_device`: what
    the user has chosen. Several CPU devices share the cores: only where that is asked.
    """
    from bloomery.hardware.detect import detect
    from bloomery.plan.mesh import fewest_devices
    from bloomery.runs.devices import chosen_devices

    machine, count = chosen_devices(detect(), devices)
    names = [str(accelerator.index) for accelerator in machine.accelerators][:count]
    if not names:
        names = ["cpu"] * count
    if per_device and count < 2:
        problem = "there is one device: nothing trains beside anything"
        fix = "leave out --per-device, or name several devices: -d 0,1"
        raise UserError(problem, where="--per-device", fix=fix, code=2)
    one_each = per_device is not False and count > 1
    if per_device is None and not machine.accelerators:
        one_each = False
    needs_several = [point for point in points if fewest_devices(point.recipe.recipe.parallel) > 1]
    if per_device and needs_several:
        fix = "leave out --per-device, or the sizes of parallel"
        where = f"parallel ({needs_several[0].text})"
        raise UserError("a run asks for several devices", where=where, fix=fix, code=2)
    if one_each and not needs_several:
        reports = _plans(points, names[0])
        if per_device or all(report.plan.memory.fits for report in reports):
            return [*names], reports
    return [devices], _plans(points, devices)


def _plans(points: "list[Point]", devices: str | None) -> "list[PlanReport]":
    """Of every run. Raises UserError where one is refused."""
    from bloomery.plan.advise import advise
    from bloomery.plan.resolve import local_plan
    from bloomery.runs.lifecycle import training_devices

    reports = []
    for point in points:
        machine, gpus, hosts = training_devices(point.recipe, devices)
        plan, facts = local_plan(point.recipe, machine=machine, gpus=gpus, nodes=hosts)
        reports.append(advise(point.recipe, plan, facts))
    return reports


def _show_plans(
    points: "list[Point]", reports: "list[PlanReport]", slots: "list[str | None]"
) -> None:
    """Prints what the sweep takes: time, memory, disk, and which runs may not fit."""
    plans = [report.plan for report in reports]
    text = counted(len(points), "runs")
    if len(slots) > 1:
        text += f", {len(slots)} at a time, one per device"
    expected_seconds = _mean_seconds(plans)
    if expected_seconds is not None:
        seconds = expected_seconds * len(points) / len(slots)
        text += f", about {format_seconds(seconds)} of training"
    fullest = max(plans, key=lambda plan: plan.memory.total / plan.memory.limit)
    text += f"; at most {format_bytes(fullest.memory.total)} of {format_bytes(fullest.memory.limit)} memory"
    echo(f"{'plan':<11}{text}", err=True)

    # The checkpoints of all runs stay; the dataset is the same one, unless a setting changes it.
    checkpoints = sum(report.disk.get("checkpoints", 0.0) for report in reports)
    disk = f"{format_bytes(checkpoints)} of checkpoints"
    shards = {str(report.plan.data.prepared): report.disk.get("shards", 0.0) for report in reports}
    if any(shards.values()):
        disk += (
            f", {format_bytes(sum(shards.values()))} in {counted(len(shards), 'prepared datasets')}"
        )
    echo(f"{'disk':<11}{disk}", err=True)
    for point, plan in zip(points, plans, strict=True):
        if not plan.memory.fits:
            echo(f"{'warning':<11}may not fit: {point.text}", err=True)


def _rungs(points: "list[Point]", plans: "list[RunPlan]") -> dict[str, list[int]]:
    """The steps after which successive halving compares the runs, for each; printed. Raises UserError."""
    from bloomery.sweep.points import REDUCTION, rungs_of

    rungs = {}
    for point, plan in zip(points, plans, strict=True):
        if plan.train.steps is None:
            problem = "successive halving divides a number of steps, and this run has none yet"
            fix = "set train.max_steps, or count the dataset first: bloomery prepare RECIPE"
            raise UserError(problem, where=f"train ({point.text})", fix=fix, code=2)
        rungs[point.name] = rungs_of(plan.train.steps, len(points))
    runs = len(points)
    parts = []
    steps = 0
    reached = 0
    for step in rungs[points[0].name]:
        parts.append(f"{counted(runs, 'runs')} to step {step:,}")
        steps += runs * (step - reached)
        reached = step
        runs = max(1, runs // REDUCTION)
    share = steps / (len(points) * reached)
    echo(f"{'halving':<11}{', '.join(parts)}: {share:.0%} of all these steps", err=True)
    return rungs


def _mean_seconds(plans: "list[RunPlan]") -> float | None:
    """Of a run; None where the plan of any does not know."""
    seconds = [plan.seconds.value for plan in plans if plan.seconds is not None]
    return sum(seconds) / len(seconds) if len(seconds) == len(plans) else None


def table_lines(table: "SweepTable") -> list[str]:
    """The ranked runs with their noise; with a picture of it where the terminal is wide enough."""
    from bloomery.view.plot import interval_strips

    shown = [run for run in table.runs if run.metric is not None]
    rows = [["rank", table.metric, "95% interval", "p", *table.keys]]
    for rank, run in enumerate(shown, 1):
        rows.append([*_figures(rank, run), *run.settings.values()])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    # A picture of the intervals, where the terminal is wide enough for it.
    width = sum(widths) + 2 * len(widths)
    space = get_terminal_size((WIDTH, 24)).columns - width
    pictures = [""] * len(shown)
    if space >= NARROWEST_PICTURE and len(shown) > 1:
        plain = (sys.stdout.encoding or "ascii").lower() not in ("utf-8", "utf8")
        figures = [(run.metric or 0.0, *(run.interval or (None, None))) for run in shown]
        pictures = interval_strips(figures, width=min(space, WIDEST_PICTURE), plain=plain)
    lines = []
    for cells, picture in zip(rows, ["", *pictures], strict=True):
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([*padded, picture]).rstrip())
    return lines


def _figures(rank: int, run: "SweepRun") -> list[str]:
    """Rank, figure, interval and p-value of a run as texts."""
    assert run.metric is not None, "runs without a figure are not ranked"
    if run.stopped_at is not None:
        return ["-", f"{run.metric:.4f}", f"stopped at step {run.stopped_at:,}", ""]
    interval = "unknown"
    if run.interval is not None:
        interval = f"{run.interval[0]:.4f} to {run.interval[1]:.4f}"
    p_value = "" if run.p_value is None else f"{run.p_value:.2g}"
    return [str(rank), f"{run.metric:.4f}", interval, p_value]


def verdict_lines(table: "SweepTable") -> list[str]:
    """The best run, or those that the noise does not separate, and what to do next."""
    if table.best is None:
        return []
    limit = f"p below {table.p_limit:.2g}"
    if table.winner is not None:
        lines = [f"{'best':<11}{table.winner.text}: better than every other run ({limit})"]
    else:
        contenders = [run for run in table.finished if run.contender]
        others = counted(len(contenders) - 1, "runs")
        verdict = f"the noise does not separate the first run from {others} (that takes {limit})"
        if len(table.finished) == 1:
            verdict = "one run alone has been trained to its end"
        lines = [f"{'no winner':<11}{verdict}"]
    lines.append(f"{'next':<11}bloomery chat {RunFolder(table.best.run).name}")
    lines.append(f"{'':<11}bloomery report {resume_argument(table.path)}")
    return lines
