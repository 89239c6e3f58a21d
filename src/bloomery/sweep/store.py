"""The folder of a sweep: its runs, and what each of them scored. Everything else follows from these. No torch.

runs/demo-sweep-1f0c9a2b/
  sweep.json                            what the sweep compares: the settings of each run
  learning_rate-1e-4/                   a run like any other
  scores/learning_rate-1e-4.json        its held-out items
"""

import glob
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole, write_durably
from bloomery.core.run_folder import SWEEP_FILE, RunFolder
from bloomery.core.run_lock import explained_write_errors
from bloomery.core.text import harmless, redact_secrets
from bloomery.evals.statistics import Scores
from bloomery.sweep.points import Point


@final
@dataclass(frozen=True)
class Score:
    """A run's figure for a metric after `step` steps. `scores`: None where only the mean is known."""

    step: int
    value: float
    scores: Scores | None


@final
@dataclass(frozen=True)
class SweepFolder:
    """The paths of a sweep."""

    path: Path

    def run(self, point: Point) -> RunFolder:
        return RunFolder(self.path / point.name)

    def score_file(self, name: str, metric: str, step: int | None = None) -> Path:
        """The file of the run `name`. `step`: of a rung; None: of the finished run."""
        rung = "" if step is None else f".step-{step}"
        words = [] if metric == "eval.loss" else [re.sub(r"[^\w.-]+", "-", metric)]
        return self.path / "scores" / ("-".join([name, *words]) + rung + ".json")

    def rung_scores(self, name: str, metric: str) -> dict[int, Path]:
        """The scores of the run `name` at the rungs that it has reached, by step."""
        stem = self.score_file(name, metric).name.removesuffix(".json")
        found = {}
        for path in (self.path / "scores").glob(f"{glob.escape(stem)}.step-*.json"):
            step = path.name.removesuffix(".json").rpartition("-")[2]
            if step.isdecimal():
                found[int(step)] = path
        return found

    def failure_file(self, name: str) -> Path:
        """Why the run `name` has no score, after its newest try; a text. There is none where the run goes on."""
        return self.path / "failures" / f"{name}.txt"

    def read_failure(self, name: str) -> str:
        """ "" where the run has not failed."""
        try:
            text = read_whole(self.failure_file(name)).decode("utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return redact_secrets(harmless(text).strip())

    def write_failure(self, name: str, reason: str) -> None:
        """`reason`: "" for a run that is tried again. Raises UserError for a full disk and its like."""
        path = self.failure_file(name)
        with explained_write_errors(self.path):
            if reason:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_durably(path, reason + "\n")
            else:
                path.unlink(missing_ok=True)

    def describe(
        self,
        points: Sequence[Point],
        command: Sequence[str],
        *,
        metric: str,
        metric_kind: str,
        lower_is_better: bool,
    ) -> None:
        """Adds the runs of this command to sweep.json, with which `table.read_sweep` finds their settings.

        `command`: the words after `bloomery`. Raises UserError for a full disk and its like.
        """
        path = self.path / SWEEP_FILE
        with explained_write_errors(self.path):
            document = json.loads(read_whole(path))
            runs = document.get("runs", {})
            runs |= {point.name: dict(point.settings) for point in points}
            document |= {
                "metric": metric,
                "metric_kind": metric_kind,
                "lower_is_better": lower_is_better,
                "command": list(command),
                "runs": runs,
            }
            write_durably(path, json.dumps(document, indent=2) + "\n")

    def read_score(self, path: Path, metric: str) -> Score | None:
        """None where it is not there yet. Raises UserError for a file that is no score."""
        try:
            document = json.loads(read_whole(path))
        except FileNotFoundError:
            return None
        except ValueError as error:
            fix = "delete the file; the same command judges the run again"
            raise UserError("not a score of a sweep", where=str(path), fix=fix) from error
        scores = None
        if document["values"] is not None:
            values = np.array(document["values"], np.float64)
            scores = Scores(metric, values, np.array(document["weights"], np.float64))
        return Score(document["step"], document["value"], scores)

    def write_score(self, path: Path, score: Score) -> None:
        """Raises UserError for a full disk and its like."""
        scores = score.scores
        document: dict[str, Any] = {
            "step": score.step,
            "value": score.value,
            "values": None if scores is None else scores.values.tolist(),
            "weights": None if scores is None else scores.weights.tolist(),
        }
        with explained_write_errors(self.path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, json.dumps(document))


def sweep_folder(
    recipe: str, points: Sequence[Point], about: Mapping[str, Any], path: Path | None
) -> SweepFolder:
    """`path`, or the folder below runs/ whose name follows from what is compared: the same command finds it again.

    Sweeps of the same keys of the same recipe share a folder, so that a command with more values finds the runs of one
    with fewer. `about`: what else tells two sweeps apart. Raises UserError when `path` has another sweep.
    """
    keys = list(points[0].settings)
    fixed_keys = points[0].recipe.recipe.model_dump(
        mode="json", exclude_defaults=True, by_alias=True
    )
    for key in keys:
        _remove(fixed_keys, key)
    identity = {**about, "keys": sorted(keys), "recipe": fixed_keys}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    if path is None:
        safe_name = re.sub(r"[^\w.-]+", "-", points[0].recipe.name)[:60].strip("-.") or "recipe"
        path = Path("runs").absolute() / f"{safe_name}-sweep-{digest}"
    folder = SweepFolder(path.absolute())
    file = folder.path / SWEEP_FILE
    with explained_write_errors(folder.path):
        if file.exists():
            _refuse_other_sweep(file, digest)
            return folder
        if folder.path.exists() and any(folder.path.iterdir()):
            fix = "set another --run-dir, or leave it out"
            raise UserError("the folder is not empty", where=str(folder.path), fix=fix)
        folder.path.mkdir(parents=True, exist_ok=True)
        document = {"sweep": digest, "recipe": recipe, **about, "keys": keys}
        write_durably(file, json.dumps(document, indent=2) + "\n")
    return folder


def _remove(sections: dict[str, Any], key: str) -> None:
    """Removes a key such as "adapter.rank"."""
    *names, last_name = key.split(".")
    for name in names:
        sections = sections.get(name) or {}
    sections.pop(last_name, None)


def _refuse_other_sweep(file: Path, digest: str) -> None:
    try:
        stored_digest = json.loads(read_whole(file))["sweep"]
    except (ValueError, KeyError, TypeError):
        stored_digest = None
    if stored_digest != digest:
        problem = "this folder has a sweep of another recipe or other settings"
        fix = "set another --run-dir, or leave it out: its name then follows from the settings"
        raise UserError(problem, where=str(file), fix=fix)
