"""Task sets of verifiers as environments: no tool, and rewards and metrics that read the conversation. No torch.

verifiers 0.4: a `Taskset` yields tasks, whose methods `@reward` and `@metric` score a trace. `data.format: verifiers`
reads the prompts of the same task set.
"""

import asyncio
import sys
from typing import Any, final

from bloomery.data.sources.task_set_worker import Unreadable, made, refuse_needs
from bloomery.train.rl.tool_functions import Json

FIX = "set data.path to the file of the task set, and data.format=verifiers"


def is_task_set(kind: Any) -> bool:
    """Whether a class of the user's is a task set: its file has imported verifiers then."""
    verifiers = sys.modules.get("verifiers.v1")
    return verifiers is not None and isinstance(kind, type) and issubclass(kind, verifiers.Taskset)


@final
class TaskSetEnvironment:
    """One task at a time. `metrics`: those of the last conversation, and each reward without its weight."""

    def __init__(self, kind: Any) -> None:
        try:
            self._task_set = made(kind)
        except Unreadable as error:
            raise ValueError(f"{error.problem}; {error.fix}") from error
        self._task: Any = None
        self._reward = 0.0
        self.metrics: dict[str, float] = {}

    def reset(self, task: Json | None = None, **_row: Any) -> None:
        """Raises ValueError for a row of another dataset, and for a task that needs more than a conversation."""
        if not isinstance(task, dict):
            raise ValueError(f"the row has no column task: {FIX}")
        kind = self._task_set.task_type()
        data = kind.data_type().model_validate(task)
        self._task = kind(data, self._task_set.config.task)
        try:
            refuse_needs(self._task)
        except Unreadable as error:
            raise ValueError(f"{error.problem}; {error.fix}") from error

    def read_conversation(self, messages: list[Json]) -> None:
        """Scores the task's rewards and metrics; an error of one of them is raised."""
        trace = _trace(self._task, messages)
        asyncio.run(self._task.score(trace))
        scored = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        self._reward = sum(reward.value for reward in scored.values())
        measured = {name: value for name, value in trace.metrics.items() if value is not None}
        self.metrics = {
            **{name: float(value) for name, value in measured.items()},
            **{name: float(reward.score) for name, reward in scored.items()},
        }

    def get_reward(self) -> float:
        return self._reward


def _trace(task: Any, messages: list[Json]) -> Any:
    """A conversation as verifiers' rewards read it: one branch, of whose messages the last one was sampled."""
    import verifiers.v1 as vf
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import TraceTask

    trace = vf.Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig(), name="agent"),
    )
    for number, message in enumerate(messages):
        trace.nodes.append(
            MessageNode(
                parent=number - 1 if number else None,
                message={"role": message["role"], "content": message["content"]},
                sampled=number == len(messages) - 1,
            )
        )
    return trace
