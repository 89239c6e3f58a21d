"""Judges a run of a sweep on held-out items, in a child process that ends with this one. No torch."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import numpy as np

from bloomery.core.child import Child
from bloomery.core.errors import UserError
from bloomery.core.files import read_whole
from bloomery.core.progress import progress
from bloomery.core.run_folder import RunFolder
from bloomery.data.shards import read_manifest
from bloomery.evals.statistics import Scores
from bloomery.monitor.events import read_events
from bloomery.plan.store import read_plan
from bloomery.recipe.schema import Recipe
from bloomery.sweep.store import Score
from bloomery.view.summary import summary_of

WORKER = "bloomery.sweep.scoring_worker"
NO_VALIDATION = "no validation set: runs are judged by their held-out loss"
SET_VALIDATION = "set data.validation=5%"
LONGEST_SECONDS = 86_400.0  # without any sign of life of an evaluation


@final
@dataclass(frozen=True)
class Metric:
    """What the runs are ranked by. `task`: the task file, for the share of its items that are right."""

    kind: Literal["eval.loss", "reward", "task"] = "eval.loss"
    task: Path | None = None

    @property
    def lower_is_better(self) -> bool:
        return self.kind == "eval.loss"

    @property
    def name(self) -> str:
        """A task's has a digest of its file: other items are another metric. Raises UserError for a missing file."""
        if self.task is None:
            return self.kind
        digest = hashlib.sha256(read_whole(self.task)).hexdigest()[:8]
        return f"task-{self.task.stem}-{digest}"


def metric_of(
    recipes: Sequence[Recipe], kind: str | None = None, task: Path | None = None
) -> Metric:
    """What runs of these recipes are judged by. `kind`: what the user has chosen; None: the reward of runs that train
    with rewards, else the loss. Raises UserError (code 2) where the runs cannot have it.
    """
    has_rewards = all(recipe.objective.spec.loss_unit == "completion" for recipe in recipes)
    if task is not None and kind not in (None, "task"):
        problem = f"--task and --metric {kind} exclude each other"
        raise UserError(problem, where="--task", fix="use one of them", code=2)
    if kind == "task" and task is None:
        fix = "add --task FILE, as for `bloomery eval`"
        raise UserError("--metric task needs a task file", where="--metric", fix=fix, code=2)
    if kind == "reward" and not has_rewards:
        problem = "a run of this recipe does not train with rewards"
        fix = "use --metric eval.loss, or --task FILE"
        raise UserError(problem, where="--metric", fix=fix, code=2)
    if task is not None:
        return Metric("task", task)
    metric = Metric("reward" if has_rewards and kind != "eval.loss" else "eval.loss")
    for recipe in recipes:
        if metric.kind == "eval.loss" and recipe.data.validation == 0:
            raise UserError(NO_VALIDATION, where="data.validation", fix=SET_VALIDATION, code=2)
    return metric


def judge(
    folder: RunFolder, metric: Metric, *, step: str = "best", devices: str | None = None
) -> Score:
    """A checkpoint on held-out items: the loss in nats per token of each document of the validation set, the reward
    of a completion of each held-out prompt, or the items of a task that are right.

    A loss per pair or response, and one of conversations with pictures, is that of each packed sequence, by the run's
    own objective; where one device cannot compute it, the mean that the run's own evaluation found. Raises UserError
    where the run cannot be judged.
    """
    plan = read_plan(folder.plan)
    manifest = read_manifest(plan.data.prepared)
    is_loss = metric.kind == "eval.loss"
    if is_loss and not manifest.validation.tokens:
        raise UserError(NO_VALIDATION, where="data.validation", fix=SET_VALIDATION, code=2)
    is_own = is_loss and (plan.objective.spec.loss_unit != "token" or manifest.has_pictures)
    if is_own and plan.objective.spec.source != "dataset":
        return _own_evaluation(folder, step)
    job = {
        "run": str(folder.path),
        "prepared": str(plan.data.prepared),
        "metric": "own" if is_own else metric.kind,
        "task": None if metric.task is None else str(metric.task.absolute()),
        "step": step,
        "devices": devices or "auto",
    }
    with Child(WORKER, job, environment=os.environ) as child:
        while True:
            answer = child.next(LONGEST_SECONDS)
            if answer == "ended":
                raise UserError(
                    f"the evaluation failed: {child.ending()}",
                    where=str(folder.path),
                    fix=f"try it alone: bloomery eval {folder.name}",
                )
            if answer == "silent":
                raise UserError(
                    "the evaluation hangs",
                    where=str(folder.path),
                    fix=f"try it alone: bloomery eval {folder.name}",
                )
            assert isinstance(answer, dict)
            if "error" in answer:
                problem, where, fix = answer["error"]
                raise UserError(problem, where=where, fix=fix)
            if "values" in answer:
                break
            progress(answer["doing"])

    if answer["values"] is None:
        return _own_evaluation(folder, step)
    values = np.array(answer["values"], np.float64)
    weights = np.array(answer["weights"], np.float64)
    scores = Scores(metric.kind, values, weights)
    return Score(answer["step"], float(values.sum() / weights.sum()), scores)


def _own_evaluation(folder: RunFolder, step: str) -> Score:
    """The mean of the run's evaluation at `step`, or of its best one. Raises UserError."""
    summary = summary_of(read_events(folder.events))
    evaluation = summary.best if step == "best" else summary.evaluations.get(int(step))
    if evaluation is None or evaluation.loss is None:
        problem = "the run has no evaluation with a finite loss"
        raise UserError(problem, where=str(folder.path), fix="set eval.every=10%")
    return Score(evaluation.step, evaluation.loss, None)
