"""Rewards of completions: functions and verifiers in processes of their own, and how their answers add up.

A reward is code that people try out: it may hang, crash, print or answer nonsense. It runs in a worker whose end is
waited for no longer than its timeout, and every answer is checked; what is wrong is said with the function's name.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

from bloomery.core.child import Child
from bloomery.core.errors import UserError

WORKER = "bloomery.train.rewards_worker"
START_SECONDS = 60.0  # of a worker, beside the imports of the user's file
MEMORY_BYTES = 4 * 2**30  # of a worker: a reward that floods memory fails, and not the run


@dataclass(frozen=True, kw_only=True)
class RewardSource:
    """One reward. `job`: what the worker runs; `timeout` in seconds, for all completions of a rollout."""

    name: str
    job: Mapping[str, Any]
    weight: float = 1.0
    timeout: float = 60.0


@dataclass(frozen=True)
class ScoredCompletions:
    """`by_name`: of every reward, one number a completion, None where it abstained. `totals`: their weighted sums; NaN
    where every reward abstained.
    """

    by_name: Mapping[str, Sequence[float | None]]
    totals: tuple[float, ...]


@final
class Rewards:
    """The rewards of a run; used as a context, which ends the workers."""

    def __init__(self, sources: Sequence[RewardSource]) -> None:
        self._sources = list(sources)
        self._stack = ExitStack()
        self._children = dict[str, Child]()

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_raised: object) -> None:
        self._children.clear()
        self._stack.close()

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> ScoredCompletions:
        """Calls each reward once, with one entry a completion. Raises UserError for one that fails."""
        request = {
            "prompts": list(prompts),
            "completions": list(completions),
            "completion_ids": [list(ids) for ids in completion_ids],
            "columns": {name: list(values) for name, values in columns.items()},
        }
        by_name = {source.name: self._answer(source, request) for source in self._sources}
        weights = {source.name: source.weight for source in self._sources}
        totals = []
        for index in range(len(completions)):
            weighted = [
                weights[name] * reward
                for name, rewards in by_name.items()
                if (reward := rewards[index]) is not None
            ]
            totals.append(sum(weighted) if weighted else math.nan)
        return ScoredCompletions(by_name, tuple(totals))

    def _answer(self, source: RewardSource, request: Mapping[str, Any]) -> list[float | None]:
        """The checked numbers of one reward."""
        where = f"rewards, {source.name}"
        child = self._worker(source)
        answer = child.ask(request, seconds=source.timeout)
        if answer == "silent":
            raise self._failed(
                source,
                f"the reward {source.name} did not answer within {source.timeout:g} s for"
                f" {len(request['prompts']):,} completions",
                f"make it faster, or set a longer timeout in rewards ({where})",
            )
        if answer == "ended":
            problem = f"the reward {source.name} ended its process: {child.ending()}"
            raise self._failed(source, problem, "correct the function; its last lines are above")
        assert isinstance(answer, dict)
        if "error" in answer:
            raise self._failed(source, answer["error"], answer["fix"])
        rewards: list[float | None] = answer["rewards"]
        return rewards

    def _worker(self, source: RewardSource) -> Child:
        """The running worker of the reward; it has loaded its function."""
        child = self._children.get(source.name)
        if child is not None:
            return child
        job = {**source.job, "name": source.name, "memory": MEMORY_BYTES}
        child = self._stack.enter_context(Child(WORKER, job, environment=os.environ))
        answer = child.next(START_SECONDS)
        if answer == "silent":
            problem = f"the reward {source.name} did not load within {START_SECONDS:g} s"
            raise self._failed(source, problem, "move slow work out of the file's top level")
        if answer == "ended":
            problem = f"the reward {source.name} did not load: {child.ending()}"
            raise self._failed(source, problem, "correct its file")
        assert isinstance(answer, dict)
        if "error" in answer:
            raise self._failed(source, answer["error"], answer["fix"])
        self._children[source.name] = child
        return child

    def _failed(self, source: RewardSource, problem: str, fix: str) -> UserError:
        """The error; the worker is of no more use."""
        child = self._children.pop(source.name, None)
        if child is not None:
            child.close()
        return UserError(problem, where=str(source.job.get("file", "rewards")), fix=fix)
