"""`report.html` of a sweep: the ranked runs, and their figure over each setting. It works offline. No torch."""

import shlex
from pathlib import Path

from markupsafe import Markup

from bloomery.core import __version__
from bloomery.core.errors import UserError
from bloomery.core.files import write_durably
from bloomery.core.progress import progress
from bloomery.core.run_folder import RunFolder, is_run
from bloomery.core.units import counted
from bloomery.report import write_report
from bloomery.report.charts import Dot, dot_chart, render
from bloomery.sweep.table import SweepRun, SweepTable, read_sweep

REPORT = "report.html"


def write_sweep_report(path: Path, *, out: Path | None = None) -> Path:
    """Writes `report.html` into the folder of a sweep, or to `out`, and those of its runs where they are older than the
    runs. Returns the path of the page. Raises UserError where the folder has no sweep, or a place is not writable.
    """
    table = read_sweep(path)
    for number, run in enumerate(table.runs, 1):
        events = RunFolder(run.run).events
        page = run.run / REPORT
        if not is_run(run.run) or not events.is_file():
            continue
        if not page.is_file() or page.stat().st_mtime < events.stat().st_mtime:
            progress(f"drawing run {number} of {len(table.runs)}")
            write_report(run.run)
    target = out or path.absolute() / REPORT
    html = sweep_page(table, target.parent)
    try:
        write_durably(target, html.encode("utf-8", errors="replace").decode())
    except OSError as error:
        problem = f"cannot write the report: {error.strerror}"
        fix = "free disk space or fix the permissions"
        raise UserError(problem, where=str(target), fix=fix) from error
    return target


def sweep_page(table: SweepTable, folder: Path) -> str:
    """The HTML document. `folder`: of the page; links to the runs' reports are relative to it."""
    ranked = [run for run in table.runs if run.metric is not None]
    best = table.best
    cards = [(str(len(table.runs)), "runs"), (str(len(ranked)), "with a figure")]
    if best is not None:
        cards.insert(0, (f"{best.metric:.4f}", f"best {table.metric}"))
    rows = []
    ranks = {id(run): str(rank) for rank, run in enumerate(table.finished, 1)}
    for run in table.runs:
        link = _link(run, folder)
        cells = [ranks.get(id(run), ""), *figures_of(run), *run.settings.values()]
        rows.append({"name": run.run.name, "link": link, "cells": cells})
    return render(
        "sweep.html",
        name=table.path.name,
        written=f"Written by Bloomery {__version__} from the scores of this sweep.",
        state=table.state,
        lead=[table.recipe, f"ranked by {table.metric}"],
        cards=cards,
        verdict=verdict_of(table),
        head=["run", "rank", table.metric, "95% interval", "p", *table.keys],
        rows=rows,
        has_noise=any(run.interval is not None for run in table.runs),
        p_limit=f"{table.p_limit:.2g}",
        charts=charts_of(table),
        command=shlex.join(["bloomery", *table.command]) if table.command else "",
    )


def verdict_of(table: SweepTable) -> str:
    """Which run is best, or that the noise names none."""
    if table.best is None:
        failed = sum(bool(run.failure) for run in table.runs)
        ending = f"; {failed:,} of {counted(len(table.runs), 'runs')} failed" if failed else ""
        return f"No run has been trained to its end yet{ending}."
    if len(table.finished) == 1:
        return f"One run alone has been trained to its end: {table.best.text}."
    if table.winner is not None:
        return f"Best: {table.winner.text}. Every other run is worse beyond the noise."
    contenders = [run for run in table.finished if run.contender]
    others = counted(len(contenders) - 1, "runs")
    return f"No winner: the noise does not separate the first run from {others}."


def charts_of(table: SweepTable) -> list[Markup]:
    """The figure over each setting that has several values."""
    ranked = [run for run in table.runs if run.metric is not None]
    charts = []
    for key in table.keys:
        dots = [_dot(run, key, is_best=run is table.best) for run in ranked]
        if len({dot.setting for dot in dots}) > 1:
            charts.append(dot_chart(key, dots, unit=table.metric))
    return charts


def _dot(run: SweepRun, key: str, *, is_best: bool) -> Dot:
    assert run.metric is not None, "only runs with a figure are drawn"
    low, high = run.interval or (None, None)
    text = f"{run.text}: {run.metric:.4f}"
    if run.stopped_at is not None:
        return Dot(run.settings[key], run.metric, low, high, text, "stopped")
    return Dot(run.settings[key], run.metric, low, high, text, "best" if is_best else "plain")


def figures_of(run: SweepRun) -> list[str]:
    """Figure, interval and p-value as texts."""
    if run.failure:
        return ["", f"failed: {run.failure}", ""]
    if run.metric is None:
        return ["", "not judged yet", ""]
    if run.stopped_at is not None:
        return [f"{run.metric:.4f}", f"stopped at step {run.stopped_at:,}", ""]
    interval = "unknown"
    if run.interval is not None:
        interval = f"{run.interval[0]:.4f} to {run.interval[1]:.4f}"
    return [f"{run.metric:.4f}", interval, "" if run.p_value is None else f"{run.p_value:.2g}"]


def _link(run: SweepRun, folder: Path) -> str:
    """The address of the run's report, relative to the page; "" where there is none."""
    page = run.run / REPORT
    if not page.is_file():
        return ""
    is_below = page.is_relative_to(folder.absolute())
    return page.relative_to(folder.absolute()).as_posix() if is_below else page.as_uri()
