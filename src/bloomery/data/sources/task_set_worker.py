"""The process that loads a task set of verifiers, and answers with its tasks. Does not import torch."""

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bloomery.core.child import accept, reply, requests

Json = dict[str, Any]
_INSTALL = "pip install verifiers, of version 0.4 or later"


class Unreadable(Exception):
    """A task set that is no dataset of prompts. `fix`: what the user can do."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix


def main() -> None:
    job = accept()
    rows: Iterator[Json] | None = None
    for request in requests(job):
        try:
            if rows is None:
                rows = rows_of(task_set_of(load_file(Path(job["path"]))))
            reply(job, {"rows": list(itertools.islice(rows, request["more"]))})
        except Unreadable as error:
            reply(job, {"error": error.problem, "fix": error.fix})
            return


def load_file(path: Path) -> Any:
    """The module of a file. Raises Unreadable."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"task_set_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "verifiers":
            raise Unreadable(f"the file needs verifiers: {error}", _INSTALL) from error
        raise Unreadable(f"the file cannot be loaded: {error}", "install the package") from error
    except Exception as error:
        problem = f"the file cannot be loaded: {type(error).__name__}: {error}"
        raise Unreadable(problem, f"correct {path.name}") from error
    return module


def task_set_of(module: Any) -> Any:
    """The task set of a module. Raises Unreadable for one that has none, or several."""
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise Unreadable("task sets need the package verifiers", _INSTALL) from error
    classes = {
        value.__name__: value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, vf.Taskset) and value is not vf.Taskset
    }
    exported = [name for name in getattr(module, "__all__", ()) if name in classes]
    names = exported or list(classes)
    if not names and hasattr(module, "load_environment"):
        raise Unreadable(
            "load_environment is of verifiers before 0.4",
            "write a Taskset, or give its dataset as rows and its rubric as rewards",
        )
    if len(names) != 1:
        listed_names = ", ".join(names) or "none"
        raise Unreadable(
            f"a file has one task set, and this one has: {listed_names}", "name one in __all__"
        )
    return made(classes[names[0]])


def made(kind: Any) -> Any:
    """A task set of a class, with its defaults. Raises Unreadable."""
    from verifiers.v1.configs.taskset import TasksetConfig
    from verifiers.v1.utils.generic import concrete_type

    config = concrete_type(kind, TasksetConfig) or TasksetConfig
    try:
        return kind(config(id=kind.__name__))
    except Exception as error:
        problem = f"{kind.__name__} cannot be made: {type(error).__name__}: {error}"
        raise Unreadable(problem, "give every field of its config a default") from error


def rows_of(task_set: Any) -> Iterator[Json]:
    """A row for each task. Raises Unreadable for tasks that need more than a prompt and rewards."""
    if not task_set.bounded:
        raise Unreadable("the task set has no end", "yield as many tasks as an epoch has")
    if task_set.toolsets(task_set.config):
        raise _no_tools()
    for task in task_set:
        refuse_needs(task)
        yield row_of(task)


def refuse_needs(task: Any) -> None:
    """Raises Unreadable for a task that runs in a container, has servers of tools, hooks or judges."""
    import inspect

    import verifiers.v1 as vf

    if task.NEEDS_CONTAINER or task.data.image is not None:
        raise Unreadable(
            f"{type(task).__name__} runs in a container, and a harness acts in it",
            "choose tasks of prompts and rewards alone, or write an environment",
        )
    if type(task).toolsets(task.config):
        raise _no_tools()
    for hook in ("setup", "finalize"):
        if getattr(type(task), hook) is not getattr(vf.Task, hook):
            problem = f"{type(task).__name__}.{hook} acts on a machine of its own"
            raise Unreadable(problem, "choose tasks of prompts and rewards alone")
    if task.config.judges:
        raise Unreadable(
            f"{type(task).__name__} asks a judge", "use a reward model: rewards=[{model: ...}]"
        )
    for scoring in (*task.hooks("reward"), *task.hooks("metric")):
        parameter = inspect.signature(scoring).parameters.get("runtime")
        if parameter is not None and parameter.default is parameter.empty:
            problem = f"{type(task).__name__}.{scoring.__name__} acts on a machine of its own"
            raise Unreadable(problem, "choose rewards that read the conversation alone")


def _no_tools() -> Unreadable:
    return Unreadable(
        "the task set brings servers of tools",
        "give its functions as tools=[{python: FILE:FUNCTION}]",
    )


def row_of(task: Any) -> Json:
    """The prompt as messages, the fields of its own, and `task`, all of it. Raises Unreadable."""
    from verifiers.v1.task import TaskData

    data = task.data
    if data.prompt is None:
        raise Unreadable("a task has no prompt: the user opens the conversation", "give it one")
    messages = [] if data.system_prompt is None else [_message("system", data.system_prompt)]
    if isinstance(data.prompt, str):
        messages.append(_message("user", data.prompt))
    else:
        messages += [_message(message.role, message.content) for message in data.prompt]
    all_fields = data.model_dump(mode="json", exclude_none=True)
    added_fields = {
        name: value for name, value in all_fields.items() if name not in TaskData.model_fields
    }
    return {**added_fields, "prompt": messages, "task": all_fields}


def _message(role: str, content: Any) -> Json:
    if not isinstance(content, str):
        raise Unreadable("a prompt has pictures or other parts", "choose prompts of text")
    return {"role": role, "content": content}


if __name__ == "__main__":
    main()
