"""A task set, and in place of verifiers a package of the same shape."""

from pathlib import Path

# What Bloomery reads of verifiers 0.4: names, fields and the order of scoring.
MODULES = {
    "__init__.py": "",
    "v1/configs/__init__.py": "",
    "v1/utils/__init__.py": "",
    "v1/configs/taskset.py": """
from pydantic import BaseModel


class TaskConfig(BaseModel):
    judges: list = []


class TasksetConfig(BaseModel):
    id: str = ""
    task: TaskConfig = TaskConfig()
""",
    "v1/utils/generic.py": """
from typing import get_args


def concrete_type(cls, base, origin=None):
    for kind in cls.__mro__:
        for generic in getattr(kind, "__orig_bases__", ()):
            for argument in get_args(generic):
                if isinstance(argument, type) and issubclass(argument, base):
                    return argument
    return None
""",
    "v1/graph.py": """
from typing import Any
from pydantic import BaseModel


class Message(BaseModel):
    role: str
    content: str | None = None


class MessageNode(BaseModel):
    parent: int | None = None
    message: Message
    sampled: bool = False
""",
    "v1/trace.py": """
from typing import Any
from pydantic import BaseModel, SerializeAsAny


class Reward(BaseModel):
    score: float
    weight: float = 1.0

    @property
    def value(self):
        return self.score * self.weight


class TraceTask(BaseModel):
    type: str
    data: SerializeAsAny[BaseModel]
    key: str | None = None
    hash: str | None = None


class AgentConfig(BaseModel):
    pass


class AgentInfo(BaseModel):
    config: AgentConfig
    name: str = ""


class Trace(BaseModel):
    task: TraceTask
    agent: AgentInfo
    nodes: list[Any] = []
    rewards: dict[str, Reward | None] = {}
    metrics: dict[str, float | None] = {}

    @property
    def last_reply(self):
        replies = [node.message for node in self.nodes if node.message.role == "assistant"]
        return (replies[-1].content or "").strip() if replies else ""
""",
    "v1/task.py": """
import asyncio
import inspect
from typing import Any, Generic, TypeVar
from pydantic import BaseModel, ConfigDict
from verifiers.v1.configs.taskset import TaskConfig
from verifiers.v1.trace import Reward
from verifiers.v1.utils.generic import concrete_type


class TaskData(BaseModel):
    model_config = ConfigDict(frozen=True)
    idx: int | None = None
    prompt: str | list[Any] | None = None
    system_prompt: str | None = None
    image: str | None = None


Data = TypeVar("Data", bound=TaskData)


class Task(Generic[Data]):
    NEEDS_CONTAINER = False
    key = "k"
    hash = "h"

    def __init__(self, data, config=None):
        self.data = data
        self.config = config or TaskConfig()

    @classmethod
    def data_type(cls):
        return concrete_type(cls, TaskData) or TaskData

    @classmethod
    def toolsets(cls, config):
        return []

    def hooks(self, kind):
        names = [name for name in dir(type(self)) if hasattr(getattr(type(self), name), kind)]
        return [getattr(self, name) for name in sorted(names)]

    async def setup(self, trace, runtime):
        return None

    async def finalize(self, trace, runtime):
        return None

    async def score(self, trace, runtime=None):
        available = {"task": self.data, "trace": trace}
        for kind in ("metric", "reward"):
            for hook in self.hooks(kind):
                wanted = inspect.signature(hook).parameters
                value = await hook(**{name: available[name] for name in wanted})
                if kind == "metric":
                    trace.metrics[hook.__name__] = value
                else:
                    weight = getattr(hook, "_vf_weight", 1.0)
                    trace.rewards[hook.__name__] = Reward(score=value, weight=weight)
""",
    "v1/__init__.py": """
from typing import Generic, TypeVar
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.task import Task, TaskData
from verifiers.v1.trace import AgentConfig, AgentInfo, Trace
from verifiers.v1.utils.generic import concrete_type

One = TypeVar("One")
Config = TypeVar("Config")


class Taskset(Generic[One, Config]):
    INFINITE = False

    def __init__(self, config):
        self.config = config

    @property
    def bounded(self):
        return not self.INFINITE

    def __iter__(self):
        for index, task in enumerate(self.load()):
            task.data = task.data.model_copy(update={"idx": index})
            yield task

    @classmethod
    def task_type(cls):
        return concrete_type(cls, Task)

    @classmethod
    def toolsets(cls, config):
        return []


def _mark(kind, weight=None):
    def marked(function):
        setattr(function, kind, True)
        if weight is not None:
            function._vf_weight = weight
        return function
    return marked


def reward(function=None, weight=1.0):
    return _mark("reward", weight) if function is None else _mark("reward")(function)


def metric(function):
    return _mark("metric")(function)
""",
}
SUMS = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(str(task.answer) in trace.last_reply)

    @vf.reward
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 10)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            data = SumData(prompt=f"{number} + 1?", system_prompt="Add.", answer=number + 1)
            yield SumTask(data, self.config.task)


__all__ = ["Sums"]
"""


def write_task_set(folder: Path, *, stand_in: bool, text: str = SUMS) -> Path:
    """A file with a task set; `stand_in`: beside it a package of verifiers' shape."""
    file = folder / "sums.py"
    file.write_text(text)
    if stand_in:
        for name, content in MODULES.items():
            path = folder / "verifiers" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    return file
