"""Rewards of completions: functions and verifiers in processes of their own, and how their answers add up.

A reward is code that people try out: it may hang, crash, print or answer nonsense. It runs in a worker whose end is
waited for no longer than its timeout, and every answer is checked; what is wrong is said with the function's name.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

from bloomery.core.child import Channel, Child, Message, Silence
from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.recipe.rewards import (
    AnyReward,
    FunctionReward,
    ModelReward,
    PluginReward,
    PythonReward,
    VerifierReward,
    reward_name,
)
from bloomery.train.failures import Stopped
from bloomery.train.rl.program_answers import longest_seconds
from bloomery.train.rl.reward_functions import connect
from bloomery.train.rl.rewards_worker import prompt_beginning
from bloomery.train.rl.verifiers import SOFT_OVERLONG

WORKER = "bloomery.train.rl.rewards_worker"
START_SECONDS = 60.0  # of a worker, beside the imports of the user's file
MEMORY_BYTES = 4 * GIB  # of a worker: a reward that floods memory fails, and not the run
POLL_SECONDS = 0.2  # between two looks whether the run is to stop


@dataclass(frozen=True, kw_only=True)
class WorkerReward:
    """A reward that a worker computes. `job`: what the worker runs; with `connect` a function that another process has.

    `timeout` in seconds, for all completions of a rollout; `seconds_of` adds to it by how many completions there are.
    """

    name: str
    job: Mapping[str, Any]
    weight: float = 1.0
    timeout: float = 60.0
    seconds_of: Callable[[int], float] = lambda _: 0.0
    memory: int = MEMORY_BYTES


def worker_rewards(rewards: Sequence[AnyReward]) -> list[WorkerReward]:
    """Those that workers compute: functions and verifiers."""
    return [worker_reward(reward) for reward in rewards if not isinstance(reward, ModelReward)]


def worker_reward(
    reward: PythonReward | VerifierReward | FunctionReward | PluginReward,
) -> WorkerReward:
    """What the worker of a reward runs."""
    if isinstance(reward, FunctionReward):
        return WorkerReward(
            name=reward_name(reward),
            job={"connect": reward.function},
            weight=reward.weight,
            timeout=reward.timeout.amount,
            memory=reward.memory,
        )
    if isinstance(reward, PythonReward):
        file, _, function = reward.python.rpartition(":")
        return WorkerReward(
            name=reward_name(reward),
            job={"file": file, "function": function},
            weight=reward.weight,
            timeout=reward.timeout.amount,
            memory=reward.memory,
        )
    if isinstance(reward, PluginReward):
        return WorkerReward(
            name=reward_name(reward),
            job={"plugin": reward.plugin},
            weight=reward.weight,
            timeout=reward.timeout.amount,
            memory=reward.memory,
        )
    program_seconds = reward.program_timeout.amount
    return WorkerReward(
        name=reward_name(reward),
        job={
            "verifier": reward.verifier,
            "settings": {
                "column": reward.column,
                "pattern": reward.pattern,
                "max_characters": reward.max_characters,
                "max_completion_len": reward.max_completion_len,
                "soft_punish_cache": reward.soft_punish_cache,
                "json_schema": reward.json_schema,
                "program_seconds": program_seconds,
                "program_memory": reward.program_memory,
            },
        },
        weight=reward.weight,
        timeout=reward.timeout.amount,
        # A program that never ends is a wrong answer: the reward waits as long as all programs may take.
        seconds_of=partial(longest_seconds, cpu_seconds=program_seconds)
        if reward.verifier == "unit_tests"
        else lambda _: 0.0,
    )


@dataclass(frozen=True)
class ScoredCompletions:
    """`by_name`: of every reward, one number a completion, None where it abstained. `totals`: their weighted sums; NaN
    where every reward abstained. `skipped`: why verifiers could not score some.
    """

    by_name: Mapping[str, Sequence[float | None]]
    totals: tuple[float, ...]
    skipped: tuple[str, ...] = ()


@final
class Rewards:
    """The rewards of a run; used as a context, which ends the workers.

    `columns`: those that the dataset has for rewards, None if unknown. `on_error`: at a row that a verifier cannot
    score, stop or skip it. `stop`: whether the run is to stop, also while a reward is waited for.
    """

    def __init__(
        self,
        sources: Sequence[WorkerReward],
        *,
        columns: Sequence[str] | None = None,
        on_error: Literal["stop", "skip"] = "stop",
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sources = list(sources)
        self._columns = None if columns is None else list(columns)
        self._on_error = on_error
        self._stop = stop
        self._children = dict[str, Child | Channel]()

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_raised: object) -> None:
        while self._children:
            self._children.popitem()[1].close()

    def start(self) -> None:
        """Starts the workers that do not run yet, all at once. Raises UserError for one that cannot be loaded."""
        new_sources = [source for source in self._sources if source.name not in self._children]
        for source in new_sources:
            job = {
                **source.job,
                "name": source.name,
                "memory": source.memory,
                "columns": self._columns,
                "on_error": self._on_error,
            }
            if "connect" in source.job:
                channel = connect(source.job["connect"])
                channel.send(job, seconds=source.timeout)
                self._children[source.name] = channel
            else:
                self._children[source.name] = Child(WORKER, job, environment=os.environ).start()
        for source in new_sources:
            answer = self._next(source, START_SECONDS)
            if answer == "silent":
                problem = f"the reward {source.name} did not load within {START_SECONDS:g} s"
                raise self._failed(source, problem, "move slow work out of the file's top level")
            if answer == "ended":
                ending = self._ending(source)
                raise self._failed(
                    source, f"the reward {source.name} did not load: {ending}", "correct its file"
                )
            assert isinstance(answer, dict)
            if "error" in answer:
                raise self._failed(source, str(answer["error"]), str(answer.get("fix", "")))

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        others: Mapping[str, tuple[float, Sequence[float | None]]] | None = None,
        sampled_ids: Sequence[Sequence[int]] | None = None,
    ) -> ScoredCompletions:
        """Calls each reward once, with one entry a completion. `others`: weights and numbers of further rewards.

        `sampled_ids`: of each completion those that the model sampled, which a verifier of lengths is given; None: all.

        Raises UserError for one that fails, Stopped where the run is to stop meanwhile.
        """
        request = {
            "prompts": list(prompts),
            "completions": list(completions),
            "completion_ids": [list(ids) for ids in completion_ids],
            "columns": {name: list(values) for name, values in columns.items()},
        }

        # All workers are asked before the first is waited for: they run at the same time.
        self.start()
        start_time = time.monotonic()
        for source in self._sources:
            message = request
            if source.job.get("verifier") == SOFT_OVERLONG and sampled_ids is not None:
                message = {**request, "completion_ids": [list(ids) for ids in sampled_ids]}
            self._children[source.name].send(message, seconds=source.timeout)
        by_name: dict[str, Sequence[float | None]] = {}
        skipped: list[str] = []
        for source in self._sources:
            answer = self._answer(source, start_time, request)
            by_name[source.name] = answer["rewards"]
            skipped += answer["skipped"]

        # The weighted sum of those that did not abstain.
        weights = {source.name: source.weight for source in self._sources}
        for name, (weight, rewards) in (others or {}).items():
            by_name[name] = rewards
            weights[name] = weight
        totals = []
        for index in range(len(completions)):
            weighted = [
                weights[name] * reward
                for name, rewards in by_name.items()
                if (reward := rewards[index]) is not None
            ]
            total = sum(weighted) if weighted else math.nan
            if weighted and not math.isfinite(total):
                numbers = ", ".join(
                    f"{weights[name]:g} x {rewards[index]:.3g} of {name}"
                    for name, rewards in by_name.items()
                    if rewards[index] is not None
                )
                raise UserError(
                    f"the sum of the rewards of a completion is no finite number: {numbers}",
                    where="rewards",
                    fix="set a smaller weight of the reward, or divide its numbers by a constant",
                )
            totals.append(total)
        return ScoredCompletions(by_name, tuple(totals), tuple(skipped))

    def _answer(
        self, source: WorkerReward, start_time: float, request: Mapping[str, Any]
    ) -> Message:
        """The checked numbers of one reward, which was asked at `start_time`."""
        count = len(request["completions"])
        first_prompt = f"the first prompt was {prompt_beginning(request, 0)}"
        timeout = source.timeout + source.seconds_of(count)
        deadline = start_time + timeout
        answer = self._next(source, min(POLL_SECONDS, timeout))
        while answer == "silent" and time.monotonic() < deadline:
            if self._stop():
                raise Stopped
            answer = self._next(source, min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        if answer == "silent":
            raise self._failed(
                source,
                f"the reward {source.name} did not answer within {timeout:g} s for"
                f" {count:,} completions; {first_prompt}",
                f"make it faster, or set a longer timeout in rewards (rewards, {source.name})",
            )
        if answer == "ended":
            problem = (
                f"the reward {source.name} ended its process ({self._ending(source)});"
                f" {first_prompt}"
            )
            fix = "correct the function: what it calls ended the process"
            if "SIGKILL" in problem:
                fix = "have the function use less memory: the system ended its process"
            raise self._failed(source, problem, fix)
        assert isinstance(answer, dict)
        if "error" in answer:
            raise self._failed(source, str(answer["error"]), str(answer.get("fix", "")))
        if not _is_answer(answer, count):
            raise self._failed(source, _no_answer(source), _NO_ANSWER_FIX)
        return answer

    def _next(self, source: WorkerReward, seconds: float) -> Message | Silence:
        """The next message of its process. Raises UserError for bytes that are none."""
        try:
            return self._children[source.name].next(seconds)
        except (ValueError, RecursionError) as error:
            raise self._failed(source, _no_answer(source), _NO_ANSWER_FIX) from error

    def _ending(self, source: WorkerReward) -> str:
        child = self._children[source.name]
        return child.ending() if isinstance(child, Child) else "a copy of the one that called train"

    def _failed(self, source: WorkerReward, problem: str, fix: str) -> UserError:
        """The error; the worker is of no more use."""
        child = self._children.pop(source.name, None)
        if child is not None:
            child.close()
        return UserError(problem, where=str(source.job.get("file", "rewards")), fix=fix)


_NO_ANSWER_FIX = (
    "have the function return its numbers; it must not write to open files that it has not opened"
)


def _no_answer(source: WorkerReward) -> str:
    return f"the process of the reward {source.name} answered with something else than its rewards"


def _is_answer(answer: Message, count: int) -> bool:
    """Whether it is what the worker sends: the function runs in its process, and may write in its place."""
    rewards = answer.get("rewards")
    skipped = answer.get("skipped")
    return (
        isinstance(rewards, list)
        and len(rewards) == count
        and all(
            reward is None or (isinstance(reward, float) and math.isfinite(reward))
            for reward in rewards
        )
        and isinstance(skipped, list)
        and all(isinstance(reason, str) for reason in skipped)
    )
