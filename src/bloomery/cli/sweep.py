"""`bloomery sweep RECIPE key=a,b ...`: a run for each combination of settings, ranked by held-out loss"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from bloomery.core.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from bloomery.plan.types import RunPlan
    from bloomery.sweep.drive import SweepEnd
    from bloomery.sweep.points import Point, Search
    from bloomery.sweep.ranking import Ranking, Row
    from bloomery.sweep.scores import Metric
    from bloomery.sweep.store import SweepFolder


@click.command()
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
    dry_run: bool,
    as_json: bool,
) -> int:
    """Train a recipe with each combination of settings, and rank the runs by held-out loss.

    A key with several values is compared: key=a,b. Commas inside brackets and quotes belong to a value: key=[a,b],[c].
    The runs are ordinary ones, in a folder, one after another. The same command continues a sweep that was stopped or
    killed; with more values it trains only what is missing. No best run is named that the noise of the validation set
    does not support.

    Example: bloomery sweep demo-chat-lora optimizer.learning_rate=1e-4,3e-4 adapter.rank=8,16
    """
    from bloomery.cli.bench import seconds_of
    from bloomery.cli.train import time_compiling
    from bloomery.sweep.drive import Sweep
    from bloomery.sweep.points import points_of
    from bloomery.sweep.ranking import ranked
    from bloomery.sweep.store import sweep_folder

    # What was typed wrong in any combination is refused before the first one trains.
    budget_seconds = None if budget is None else seconds_of(budget, "--budget")
    points = points_of(recipe, overrides, search=search, runs=runs, seed=seed)
    ranked_by = _metric(points, metric, task)
    plans = _show_plans(points, devices)
    expected_seconds = _mean_seconds(plans)
    rungs = _rungs(points, plans) if search == "halving" else None
    if dry_run:
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
        devices=devices,
        budget_seconds=budget_seconds,
        expected_seconds=expected_seconds,
        measure=time_compiling,
    )
    with progress_line("sweep"):
        end = sweep.run() if rungs is None else sweep.halve(rungs)
    ranking = ranked(end.judged, lower_is_better=ranked_by.lower_is_better)
    if as_json:
        print_json(_document(folder, points, ranked_by.kind, ranking, end))
    else:
        for line in _table(folder, points, ranked_by.kind, ranking, end):
            echo(line)
    if end.code in (75, 130):
        echo("next       the same command continues this sweep", err=True)
    return end.code


def _metric(points: "list[Point]", kind: str | None, task: Path | None) -> "Metric":
    """What the runs are ranked by. Raises UserError (code 2) where the runs cannot have it."""
    from bloomery.sweep.scores import Metric

    has_rewards = all(
        point.recipe.recipe.objective.spec.loss_unit == "completion" for point in points
    )
    if task is not None and kind not in (None, "task"):
        problem = f"--task and --metric {kind} exclude each other"
        raise UserError(problem, where="--task", fix="use one of them", code=2)
    if kind == "task" and task is None:
        fix = "add --task FILE, as for `bloomery eval`"
        raise UserError("--metric task needs a task file", where="--metric", fix=fix, code=2)
    if kind == "reward" and not has_rewards:
        problem = "a run of this sweep does not train with rewards"
        fix = "use --metric eval.loss, or --task FILE"
        raise UserError(problem, where="--metric", fix=fix, code=2)
    if task is not None:
        return Metric("task", task)
    return Metric("reward" if has_rewards and kind != "eval.loss" else "eval.loss")


def _show_plans(points: "list[Point]", devices: str | None) -> "list[RunPlan]":
    """Plans every run, and prints what the sweep takes. Raises UserError where a run is refused."""
    from bloomery.plan.resolve import local_plan
    from bloomery.runs.lifecycle import training_devices

    plans = []
    for point in points:
        machine, gpus, hosts = training_devices(point.recipe, devices)
        plans.append(local_plan(point.recipe, machine=machine, gpus=gpus, nodes=hosts)[0])
    text = counted(len(points), "runs")
    expected_seconds = _mean_seconds(plans)
    if expected_seconds is not None:
        text += f", about {format_seconds(expected_seconds * len(points))} of training"
    fullest = max(plans, key=lambda plan: plan.memory.total / plan.memory.limit)
    text += f"; at most {format_bytes(fullest.memory.total)} of {format_bytes(fullest.memory.limit)} memory"
    echo(f"{'plan':<11}{text}", err=True)
    for point, plan in zip(points, plans, strict=True):
        if not plan.memory.fits:
            echo(f"{'warning':<11}may not fit: {point.text}", err=True)
    return plans


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


def _document(
    folder: "SweepFolder", points: "list[Point]", metric: str, ranking: "Ranking", end: "SweepEnd"
) -> dict[str, Any]:
    """The document of --json: the runs with the best first."""
    by_name = {point.name: point for point in points}
    winner = ranking.winner
    return {
        "metric": metric,
        "folder": str(folder.path),
        "winner": None if winner is None else str(folder.path / winner.name),
        "p_limit": ranking.p_limit,
        "runs": [
            {
                "settings": by_name[row.name].values,
                "metric": row.estimate.value,
                "interval": None
                if row.estimate.low is None
                else [row.estimate.low, row.estimate.high],
                "p_value": row.p_value,
                "contender": row.contender,
                "run": str(folder.path / row.name),
            }
            for row in ranking.rows
        ]
        + [
            {
                "settings": by_name[run.name].values,
                "metric": run.value,
                "interval": None,
                "p_value": None,
                "contender": False,
                "stopped_at": run.step,
                "run": str(folder.path / run.name),
            }
            for run in end.dropped
        ],
        "failed": [
            {"settings": failure.point.values, "reason": failure.reason} for failure in end.failures
        ],
        "left_out": [{"settings": point.values} for point in end.left_out],
    }


def _table(
    folder: "SweepFolder", points: "list[Point]", metric: str, ranking: "Ranking", end: "SweepEnd"
) -> list[str]:
    """The ranked runs with their noise, and who is best, if anyone is."""
    by_name = {point.name: point for point in points}
    keys = list(points[0].settings)
    rows = [["rank", metric, "95% interval", "p", *keys]]
    for rank, row in enumerate(ranking.rows, 1):
        rows.append([str(rank), *_figures(row), *by_name[row.name].settings.values()])
    for run in end.dropped:
        stopped = f"stopped at step {run.step:,}"
        rows.append(["-", f"{run.value:.4f}", stopped, "", *by_name[run.name].settings.values()])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for cells in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    lines += [f"{'failed':<11}{failure.point.text}: {failure.reason}" for failure in end.failures]
    if end.left_out:
        lines.append(f"{'left out':<11}{counted(len(end.left_out), 'runs')} not started")
    return [*lines, *_verdict(folder, by_name, ranking)]


def _figures(row: "Row") -> list[str]:
    low, high = row.estimate.low, row.estimate.high
    interval = "unknown" if low is None or high is None else f"{low:.4f} to {high:.4f}"
    return [
        f"{row.estimate.value:.4f}",
        interval,
        "" if row.p_value is None else f"{row.p_value:.2g}",
    ]


def _verdict(folder: "SweepFolder", by_name: "dict[str, Point]", ranking: "Ranking") -> list[str]:
    """The best run, or those that the noise does not separate, and what to do next."""
    if not ranking.rows:
        return []
    best = ranking.rows[0]
    winner = ranking.winner
    limit = f"p below {ranking.p_limit:.2g}"
    if winner is not None:
        verdict = f"{by_name[winner.name].text}: better than every other run ({limit})"
        lines = [f"{'best':<11}{verdict}"]
    else:
        contenders = [row for row in ranking.rows if row.contender]
        others = counted(len(contenders) - 1, "runs")
        verdict = f"the noise does not separate the first run from {others} (that takes {limit})"
        if len(ranking.rows) == 1:
            verdict = "one run alone has been trained to its end"
        lines = [f"{'no winner':<11}{verdict}"]
    lines.append(f"{'next':<11}bloomery chat {shlex.quote(shown_path(folder.path / best.name))}")
    return lines
