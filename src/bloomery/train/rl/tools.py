"""The tools and the environment of a run, in a process of their own, and what they have answered before.

An episode is a conversation in which the model may call tools; an environment gives each episode its state and its
reward. Both are code that people try out: what hangs, crashes or floods memory ends its own episode.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from bloomery.core.child import Child
from bloomery.core.errors import UserError
from bloomery.core.text import encodable
from bloomery.data.chat.tool_arguments import Json
from bloomery.data.chat.tools import ToolCall
from bloomery.plan.types import EpisodesPlan
from bloomery.train.failures import Stopped
from bloomery.train.rl.rewards import POLL_SECONDS, START_SECONDS
from bloomery.train.rl.tools_worker import NO_NETWORK

WORKER = "bloomery.train.rl.tools_worker"
FORK_SECONDS = 0.05  # for the process of an episode to start, on a busy machine
SLACK_SECONDS = 30.0  # beyond what the calls may take together


@dataclass(frozen=True)
class ToolResult:
    """The text that the model is told, and whether the call failed."""

    text: str
    failed: bool


@dataclass(frozen=True)
class EpisodeScore:
    """What an environment gives an episode; the reward is None where it is gone."""

    reward: float | None
    metrics: Mapping[str, float]


@final
class Tools:
    """A context, which ends the processes. `stop`: whether the run is to stop, also while a tool is waited for."""

    def __init__(self, plan: EpisodesPlan, *, stop: Callable[[], bool] = lambda: False) -> None:
        self._plan = plan
        self._stop = stop
        self._child: Child | None = None
        self._schemas: list[Json] = []
        self._has_reward = False
        self._reads_conversation = False
        self.notes: list[str] = []

    def __enter__(self) -> "Tools":
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()

    @property
    def schemas(self) -> list[Json]:
        """What templates tell a model of the tools. Raises UserError for a file that cannot be loaded."""
        self.start()
        return self._schemas

    @property
    def has_reward(self) -> bool:
        """Whether the environment rewards episodes. Raises UserError as `schemas` does."""
        self.start()
        return self._has_reward

    def start(self) -> None:
        """Raises UserError for a file that cannot be loaded, and for a tool that a model cannot be told of."""
        if self._child is not None:
            return
        plan = self._plan
        job = {
            "tools": [tool.python.rpartition(":")[::2] for tool in plan.tools],
            "environment": plan.environment.python and plan.environment.python.rpartition(":")[::2],
            "openenv": plan.environment.openenv,
            "memory": plan.environment.memory,
            "seconds": plan.environment.timeout.amount,
        }
        # A process without a network reaches no server of this machine either.
        has_network = plan.environment.network or plan.environment.openenv is not None
        variables = dict(os.environ) | ({} if has_network else {NO_NETWORK: "1"})
        self._child = Child(WORKER, job, environment=variables).start()
        answer = self._child.next(START_SECONDS)
        if isinstance(answer, str):
            ending = "within a minute" if answer == "silent" else f": {self._child.ending()}"
            raise self._failed(f"the tools did not load {ending}", "correct their file")
        if "error" in answer:
            raise self._failed(str(answer["error"]), str(answer["fix"]))
        self._schemas = answer["schemas"]
        self._has_reward = bool(answer["has_reward"])
        self._reads_conversation = bool(answer["reads_conversation"])
        if plan.environment.openenv is not None and not plan.environment.network:
            self.notes.append("tools may reach the network: environment.openenv is a server")
        if answer["network"] is not None:
            self.notes.append(f"tools may reach the network: {answer['network']}")

    def reset(self, rows: Mapping[int, tuple[int, Json]]) -> dict[int, str | None]:
        """Begins episodes: of each its seed, and the row of its prompt. What the user's last turn ends with, or None.

        Raises UserError for an environment that cannot begin.
        """
        request = {"reset": [[number, seed, row] for number, (seed, row) in rows.items()]}
        answers = self._asked(request, calls=1)
        for answer in answers:
            if "error" in answer:
                problem = f"the environment cannot begin an episode: {answer['error']}"
                fix = "correct its __init__, or its reset, which takes the columns of a row"
                raise self._failed(problem, fix)
        texts = [answer["text"] for answer in answers]
        return {
            number: None if text is None else encodable(text)
            for number, text in zip(rows, texts, strict=True)
        }

    def call(self, calls: Mapping[int, Sequence[ToolCall]]) -> dict[int, list[ToolResult]]:
        """The results of the calls of each episode. All episodes work at the same time."""
        request = {
            "calls": [
                [number, [[call.name, call.arguments] for call in of_episode]]
                for number, of_episode in calls.items()
            ]
        }
        most = max(map(len, calls.values()), default=0)
        answers = self._asked(request, calls=most)
        return {
            number: [ToolResult(encodable(str(text)), bool(failed)) for text, failed in of_episode]
            for number, of_episode in zip(calls, answers, strict=True)
        }

    def rewards(self, episodes: Sequence[int]) -> list[float | None]:
        """What the environment gives each; None where it is gone. Raises UserError for a reward that fails."""
        return [score.reward for score in self.scores(dict.fromkeys(episodes))]

    def scores(self, conversations: Mapping[int, Sequence[Json] | None]) -> "list[EpisodeScore]":
        """The reward and the metrics of each episode, by its number; of its messages where the environment reads them.

        Raises UserError for a reward that fails.
        """
        if not self.has_reward:
            return [EpisodeScore(None, {})] * len(conversations)
        read = self._reads_conversation
        rows = [
            [number, list(messages or ()) if read else None]
            for number, messages in conversations.items()
        ]
        answers = self._asked({"rewards": rows}, calls=1)
        for answer in answers:
            if str(answer.get("error", "")).startswith("its get_reward"):
                raise self._failed(f"the environment failed: {answer['error']}", "correct it")
        return [EpisodeScore(answer.get("reward"), answer.get("metrics", {})) for answer in answers]

    def forget(self, episodes: Sequence[int]) -> None:
        """Ends their processes."""
        self._asked({"close": list(episodes)}, calls=0)

    def _asked(self, request: Json, *, calls: int) -> list[Any]:
        """`calls`: how many one episode makes, one after the other. Raises UserError, and Stopped."""
        self.start()
        child = self._child
        assert child is not None
        (entries,) = request.values()
        seconds = (
            self._plan.environment.timeout.amount * max(1, calls)
            + FORK_SECONDS * len(entries)
            + SLACK_SECONDS
        )
        deadline = time.monotonic() + seconds
        sent = child.send(request, seconds=seconds)
        answer = child.next(POLL_SECONDS) if sent else "silent"
        while answer == "silent" and time.monotonic() < deadline:
            if self._stop():
                raise Stopped
            answer = child.next(POLL_SECONDS)
        if isinstance(answer, str):
            ending = f"gave no answer for {seconds:.0f} s" if answer == "silent" else child.ending()
            raise self._failed(
                f"the process of the tools failed: {ending}",
                "correct the tools: what they do at the top of their file ended or held up the process",
            )
        answers: list[Any] = answer["answers"]
        return answers

    def _failed(self, problem: str, fix: str) -> UserError:
        """The error; the process is of no more use."""
        self.close()
        if self._plan.environment.openenv is not None:
            return UserError(problem, where="environment.openenv", fix=fix)
        where = self._plan.environment.python or self._plan.tools[0].python
        return UserError(problem, where=where.rpartition(":")[0], fix=fix)


@final
class RecordedCalls:
    """What stateless tools have answered, in the run folder: a resumed run reads it and does not call them again.

    A line per call: the episode's key, its turn, the call's place in it, what was called and what it answered. A rank
    has a file of each rollout, and reads those of all: before the kill another rank may have played its episodes.
    """

    def __init__(self, folder: Path | None, rollout: str = "", rank: int = 0) -> None:
        """`folder`: None where nothing is kept. `rollout`: what the names of its files begin with."""
        self._path = None if folder is None else folder / f"{rollout}-rank-{rank}.jsonl"
        self._answers: dict[tuple[int, int, int], tuple[str, str, ToolResult]] = {}
        paths = [] if folder is None else folder.glob(f"{rollout}-rank-*.jsonl")
        for path in sorted(paths):
            for line in path.read_bytes().splitlines():
                try:
                    key, turn, place, name, arguments, text, failed = json.loads(line)
                except ValueError:  # the end of a line that a kill cut off
                    continue
                self._answers[key, turn, place] = (name, arguments, ToolResult(text, failed))

    def answer(self, key: int, turn: int, place: int, call: ToolCall) -> ToolResult | None:
        name, arguments, result = self._answers.get((key, turn, place), ("", "", None))
        return result if (name, arguments) == (call.name, call.arguments) else None

    def add(self, answered: Sequence[tuple[int, int, int, ToolCall, ToolResult]]) -> None:
        """Writes them down, durably: they are not called again."""
        if self._path is None or not answered:
            return
        self._path.parent.mkdir(exist_ok=True)
        lines = [
            json.dumps([key, turn, place, call.name, call.arguments, result.text, result.failed])
            for key, turn, place, call, result in answered
        ]
        with self._path.open("ab") as file:
            file.write(b"\n" + "\n".join(lines).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
