"""The table of a sweep, best run first: of one that has just ended, and of a folder. No torch.

table = read_sweep(Path("runs/demo-sweep-1f0c9a2b"))
for run in table.runs:
    print(run.settings, run.metric, run.interval, run.stopped_at, run.run)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole
from bloomery.core.run_folder import SWEEP_FILE
from bloomery.core.run_lock import worked_on
from bloomery.sweep.points import value_of
from bloomery.sweep.ranking import Judged, best_first, ranked
from bloomery.sweep.store import SweepFolder


@final
@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep and its figure.

    `settings`: what differs between the runs, as typed. `run`: its folder. `metric`: None where it has no figure yet.
    `interval`: its 95% confidence interval over the held-out items, where that is known. `p_value` and `contender`: as
    in `ranking.Row`. `stopped_at`: the step after which successive halving stopped it; its figure is that of this step.
    `failure`: why it has no figure, where its newest try failed.
    """

    settings: Mapping[str, str]
    run: Path
    metric: float | None = None
    interval: tuple[float, float] | None = None
    p_value: float | None = None
    contender: bool = False
    stopped_at: int | None = None
    failure: str = ""

    @property
    def text(self) -> str:
        """The settings in a line."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items())

    @property
    def values(self) -> dict[str, Any]:
        """The settings as YAML reads them: numbers are numbers."""
        return {key: value_of(text) for key, text in self.settings.items()}

    def document(self) -> dict[str, Any]:
        """The run in a document of --json."""
        document = {
            "settings": self.values,
            "metric": self.metric,
            "interval": None if self.interval is None else list(self.interval),
            "p_value": self.p_value,
            "contender": self.contender,
        }
        if self.stopped_at is not None:
            document["stopped_at"] = self.stopped_at
        return document | {"run": str(self.run)}


@final
@dataclass(frozen=True)
class SweepTable:
    """The runs of a sweep: those trained to their end, best first; those that were stopped; those without a figure,
    of which the failed ones come first.

    `metric`: eval.loss, reward or task. `p_limit`: a run with a smaller p-value is worse than the best. `command`: the
    words after `bloomery` that continue it.
    """

    path: Path
    metric: str
    lower_is_better: bool
    p_limit: float
    runs: tuple[SweepRun, ...]
    recipe: str = ""
    command: tuple[str, ...] = ()

    @property
    def finished(self) -> tuple[SweepRun, ...]:
        """The ranked runs, which were trained to their end."""
        return tuple(run for run in self.runs if run.metric is not None and run.stopped_at is None)

    @property
    def best(self) -> SweepRun | None:
        """The run with the best figure, which the noise need not support."""
        return self.finished[0] if self.finished else None

    @property
    def winner(self) -> SweepRun | None:
        """The best run where every other one is worse beyond the noise. A single run wins nothing."""
        contenders = [run for run in self.finished if run.contender]
        return contenders[0] if len(contenders) == 1 and len(self.finished) > 1 else None

    @property
    def state(self) -> Literal["running", "done", "stopped"]:
        """`stopped` as long as a run has no figure."""
        if worked_on(self.path):
            return "running"
        is_done = self.best is not None and all(run.metric is not None for run in self.runs)
        return "done" if is_done else "stopped"

    @property
    def keys(self) -> list[str]:
        return list(self.runs[0].settings) if self.runs else []

    def document(self) -> dict[str, Any]:
        """The sweep in a document of --json."""
        return {
            "metric": self.metric,
            "folder": str(self.path),
            "winner": None if self.winner is None else str(self.winner.run),
            "p_limit": self.p_limit,
            "runs": [run.document() for run in self.runs],
        }


def table_of(
    folder: SweepFolder,
    settings: Mapping[str, Mapping[str, str]],
    metric: str,
    judged: Sequence[Judged],
    dropped: Sequence[Judged] = (),
    *,
    lower_is_better: bool,
    noise: bool = True,
) -> SweepTable:
    """The judged runs, then the dropped ones in their order. `settings`: of all runs, by their names.

    `noise`: without it the intervals, which take a second for a dozen runs, and the tests are left out.
    """
    runs = []
    p_limit = 0.0
    if noise:
        ranking = ranked(judged, lower_is_better=lower_is_better)
        p_limit = ranking.p_limit
        for row in ranking.rows:
            low, high = row.estimate.low, row.estimate.high
            interval = None if low is None or high is None else (low, high)
            path = folder.path / row.name
            figures = (row.estimate.value, interval, row.p_value, row.contender)
            runs.append(SweepRun(settings[row.name], path, *figures))
    else:
        for run in best_first(judged, lower_is_better=lower_is_better):
            runs.append(SweepRun(settings[run.name], folder.path / run.name, run.value))
    for run in dropped:
        path = folder.path / run.name
        runs.append(SweepRun(settings[run.name], path, run.value, stopped_at=run.step))
    return SweepTable(folder.path, metric, lower_is_better, p_limit, tuple(runs))


def read_sweep(path: Path, *, noise: bool = True) -> SweepTable:
    """The sweep in a folder, by the figure of its last command; it may be under way. `noise`: as in `table_of`.

    Raises UserError where the folder has none, or a file of it is damaged.
    """
    folder = SweepFolder(path.absolute())
    fix = "the command of the sweep writes it again"
    try:
        about = json.loads(read_whole(folder.path / SWEEP_FILE))
        settings: dict[str, dict[str, str]] = about["runs"]
        metric, kind = str(about["metric"]), str(about["metric_kind"])
        lower_is_better = bool(about["lower_is_better"])
        recipe, command = str(about["recipe"]), tuple(about["command"])
    except FileNotFoundError as error:
        raise UserError(
            "not the folder of a sweep", where=str(path), fix="`bloomery runs` lists the sweeps"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        problem = "this file does not describe a sweep"
        raise UserError(problem, where=str(folder.path / SWEEP_FILE), fix=fix) from error

    # A run has a score of its end, or those of the rungs that it has reached.
    judged: list[Judged] = []
    stopped: list[Judged] = []
    waiting: list[str] = []
    for name in settings:
        score = folder.read_score(folder.score_file(name, metric), kind)
        if score is not None:
            judged.append(Judged(name, score.value, score.scores, score.step))
            continue
        rungs = folder.rung_scores(name, metric)
        if not rungs:
            waiting.append(name)
            continue
        step = max(rungs)
        score = folder.read_score(rungs[step], kind)
        assert score is not None, "the file was listed"
        stopped.append(Judged(name, score.value, None, step))
    in_order = best_first(stopped, lower_is_better=lower_is_better)
    in_order.sort(key=lambda run: -run.step)
    table = table_of(
        folder, settings, kind, judged, in_order, lower_is_better=lower_is_better, noise=noise
    )
    unjudged = [
        SweepRun(settings[name], folder.path / name, failure=folder.read_failure(name))
        for name in waiting
    ]
    unjudged.sort(key=lambda run: not run.failure)
    return SweepTable(
        folder.path,
        kind,
        lower_is_better,
        table.p_limit,
        (*table.runs, *unjudged),
        recipe,
        command,
    )
