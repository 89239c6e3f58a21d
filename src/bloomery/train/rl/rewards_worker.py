"""The process of one reward: loads a function of the user's file, or a verifier, and answers requests.

Does not import torch. What the function prints goes to the parent's log of this process.
"""

import copy
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, final

from bloomery.core.child import accept, reply, requests
from bloomery.core.errors import UserError
from bloomery.core.plugins import find_plugin
from bloomery.train.rl.verifiers import Unscored, verifier_of

Reward = Callable[..., Any]
ARGUMENTS = ("prompts", "completions", "completion_ids")  # of every reward, next to the columns
SHOWN = 80  # characters of a prompt in a message
# Modules that a file beside a reward never replaces: the library's, and those that this process and its parent need.
OWN_MODULES = sys.stdlib_module_names | set(
    "bloomery click huggingface_hub jinja2 llguidance numpy peft pyarrow pydantic pynvml rich ruamel safetensors"
    " starlette tokenizers torch transformers triton uvicorn yaml".split()
)


class Unusable(Exception):
    """A function that cannot be loaded or called, or whose answer is no list of numbers."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix


def main() -> None:
    job = accept()
    limit_memory(job["memory"])
    try:
        function = loaded(job)
    except Unusable as error:
        reply(job, {"error": error.problem, "fix": error.fix})
        return
    serve_rewards(function, job, requests(job))


def serve_rewards(
    function: Reward, job: Mapping[str, Any], messages: Iterable[Mapping[str, Any]]
) -> None:
    """Answers the messages; `job["socket"]` is where the answers go."""
    name = job["name"]
    try:
        refuse_missing_columns(function, job)
    except Unusable as error:
        reply(job, {"error": error.problem, "fix": error.fix})
        return
    reply(job, {"loaded": True})
    worker = os.getpid()
    for request in messages:
        try:
            rewards, skipped = answered(function, request, name, skip=job["on_error"] == "skip")
            answer = {"rewards": rewards, "skipped": skipped}
        except Unusable as error:
            answer = {"error": error.problem, "fix": error.fix}
        if os.getpid() != worker:  # the function forked: its copies have no answer of their own
            os._exit(0)
        reply(job, answer)


def limit_memory(num_bytes: int) -> None:
    """Beyond this an allocation raises MemoryError, where the system supports it."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))


def loaded(job: Mapping[str, Any]) -> Reward:
    """The verifier, or the function of the file. Raises Unusable."""
    if "verifier" in job:
        return verifier_of(job["verifier"], job.get("settings", {}))
    if "plugin" in job:
        return plugin_reward(job["plugin"])
    reward: Reward = named_in_file(
        Path(job["file"]), job["function"], what=f"the reward {job['name']}"
    )
    return reward


def named_in_file(path: Path, name: str, *, what: str, kind: str = "function") -> Any:
    """The function or class of that name in a file of Python, which is executed. `what`: in errors. Raises Unusable."""
    if not path.is_file():
        raise Unusable(f"{what} has no file {path}", "write its path relative to the recipe")
    # The file of a reward may be called like a module that it imports itself: math.py, datasets.py.
    module_name = path.stem
    if (
        module_name in OWN_MODULES
        or module_name in sys.modules
        or PathFinder.find_spec(module_name) is not None
    ):
        module_name = f"reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, "a file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    find_neighbors(path)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        fix = f"correct {path}"
        if hidden := hidden_packages(path.parent):
            fix = f"rename {path.parent / hidden[0]}.py, which hides the package {hidden[0]}; or {fix}"
        raise Unusable(f"the file of {what} cannot be loaded: {error_text(error)}", fix) from error
    found = getattr(module, name, None)
    if not callable(found):
        is_kind = inspect.isclass if kind == "class" else inspect.isfunction
        names = ", ".join(
            name_in_file
            for name_in_file, value in vars(module).items()
            if is_kind(value) and value.__module__ == module.__name__
        )
        raise Unusable(
            f"{what} has no {kind} {name} in {path}",
            f"its {'classes' if kind == 'class' else 'functions'} are: {names or 'none'}",
        )
    return found


def plugin_reward(name: str) -> Reward:
    """The function that an installed package brings. Raises Unusable."""
    plugin = find_plugin("rewards", name)
    if plugin is None:
        problem = f"no installed package brings the reward {name}"
        raise Unusable(problem, "install it here; `bloomery doctor` lists what is installed")
    try:
        reward: Reward = plugin.load_function()
    except UserError as error:
        raise Unusable(error.problem, error.fix) from error
    return reward


@final
class NeighborFinder:
    """Finds the modules beside the file of a reward, for its own imports, before those of installed packages."""

    def __init__(self, file: Path) -> None:
        self._folder = str(file.parent)
        self._others = OWN_MODULES | {file.stem}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of a module of OWN_MODULES, of the file itself and inside a package None: the next finder is asked."""
        if path is not None or name in self._others:
            return None
        spec = PathFinder.find_spec(name, [self._folder], target)
        # A folder without __init__.py is what Python takes last, wherever it is: `wandb/` has no library.
        return None if spec is None or spec.loader is None else spec


def find_neighbors(file: Path) -> None:
    """Lets this process import the modules beside `file`, as a script could, but none in place of OWN_MODULES."""
    sys.meta_path.insert(sys.meta_path.index(PathFinder), NeighborFinder(file))
    sys.path.append(str(file.parent))


def hidden_packages(folder: Path) -> list[str]:
    """The imported modules of `folder` that have the name of an installed package."""
    others = [entry for entry in sys.path if Path(entry) != folder]
    return [
        path.stem
        for path in sorted(folder.glob("*.py"))
        if getattr(sys.modules.get(path.stem), "__file__", None) == str(path)
        and PathFinder.find_spec(path.stem, others) is not None
    ]


def refuse_missing_columns(function: Reward, job: Mapping[str, Any]) -> None:
    """Raises Unusable where the reward needs a column that the dataset lacks, and for a column that is named like an
    argument of every reward. `job["columns"]`: None if unknown.
    """
    columns = job["columns"]
    if columns is None:
        return
    if taken_columns := [column for column in columns if column in ARGUMENTS]:
        raise Unusable(
            f"the dataset has a column {taken_columns[0]}, which is what rewards are called with",
            f"rename the column {taken_columns[0]} in the dataset: all columns are arguments of the reward, too",
        )
    known_columns = {*ARGUMENTS, *columns}
    needed_columns = [job.get("settings", {}).get("column")]
    if "verifier" not in job:
        parameters = inspect.signature(function).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        needed_columns = [
            parameter.name
            for parameter in parameters
            if parameter.default is inspect.Parameter.empty and parameter.kind in kinds
        ]
    missing_columns = [
        column for column in needed_columns if column is not None and column not in known_columns
    ]
    if missing_columns:
        raise Unusable(
            f"the dataset has no column {missing_columns[0]}, which the reward {job['name']} needs",
            f"its columns for rewards are: {', '.join(columns) or 'none'}",
        )


def answered(
    function: Reward, request: Mapping[str, Any], name: str, *, skip: bool
) -> tuple[list[float | None], list[str]]:
    """One number or None a completion, and why some were skipped: at a row that a verifier cannot score it abstains
    where `skip` is set. Raises Unusable.
    """
    # Copies: what the function does to its lists is not done to those that its answer is compared with.
    count = len(request["completions"])
    try:
        answer = function(
            prompts=copy.deepcopy(request["prompts"]),
            completions=copy.deepcopy(request["completions"]),
            completion_ids=[list(ids) for ids in request["completion_ids"]],
            **copy.deepcopy(request["columns"]),
        )
    except UserError as error:  # of a verifier
        raise Unusable(error.problem, error.fix) from error
    except Exception as error:
        columns = ", ".join(request["columns"]) or "none"
        raise Unusable(
            f"the reward {name} failed: {error_text(error)}; the first prompt was"
            f" {prompt_beginning(request, 0)}",
            "correct the function; it takes prompts, completions, completion_ids and the columns"
            f" of the dataset, each a list; the columns are: {columns}",
        ) from error

    # What a verifier cannot score is a mistake in the dataset, with its prompt.
    unscored = [
        (index, value.problem)
        for index, value in enumerate(answer if isinstance(answer, list) else ())
        if isinstance(value, Unscored)
    ]
    for index, problem in unscored:
        if not skip:
            raise Unusable(
                f"the reward {name} cannot score the prompt {prompt_beginning(request, index)}: {problem}",
                "correct the row, or set data.on_error=skip",
            )
        answer[index] = None
    skipped = [
        f"the reward {name} cannot score the prompt {prompt_beginning(request, index)}: {problem}"
        for index, problem in unscored
    ]
    rewards, problems = checked_rewards(answer, request, name, skip=skip, count=count)
    return rewards, skipped + problems


def prompt_beginning(request: Mapping[str, Any], index: int) -> str:
    """The beginning of a prompt; of messages, of the last one."""
    prompt = request["prompts"][index]
    text = prompt if isinstance(prompt, str) else prompt[-1].get("content", "")
    return repr(str(text)[:SHOWN])


def checked_rewards(
    answer: Any, request: Mapping[str, Any], name: str, *, skip: bool = False, count: int
) -> tuple[list[float | None], list[str]]:
    """The numbers, and why some are None that were none: with `skip` a value that is no finite number is left out.

    `count`: of the completions, as they were before the function could change their list. Raises Unusable for anything
    but a list with a finite number, or None, for each completion.
    """
    fix = f"return a list of {count:,} numbers, None where the function has no opinion"
    first_prompt = (
        f"the first prompt was {prompt_beginning(request, 0)}" if count else "there was no prompt"
    )
    if isinstance(answer, str | bytes | bytearray | memoryview) or (
        not isinstance(answer, Sequence) and not hasattr(answer, "tolist")
    ):
        problem = f"the reward {name} returned {type(answer).__name__}, not a list; {first_prompt}"
        raise Unusable(problem, fix)
    try:
        values = answer if isinstance(answer, Sequence) else answer.tolist()  # numpy, torch
    except Exception as error:  # of the user's own class
        kind = type(answer).__name__
        problem = f"the reward {name} returned {kind}, whose tolist() failed: {error_text(error)}"
        raise Unusable(f"{problem}; {first_prompt}", fix) from error
    if not isinstance(values, Sequence) or len(values) != count:
        size = len(values) if isinstance(values, Sequence) else 1
        problem = f"the reward {name} returned {size:,} numbers for {count:,} completions"
        raise Unusable(f"{problem}; {first_prompt}", fix)

    rewards: list[float | None] = []
    problems: list[str] = []
    for index, value in enumerate(values):
        number, what = _number_in(value)
        if what is None:
            rewards.append(number)
            continue
        problem = (
            f"the reward {name} returned {what} for completion {index}, of the prompt"
            f" {prompt_beginning(request, index)}"
        )
        if not skip:
            raise Unusable(problem, f"{fix}, or set data.on_error=skip")
        rewards.append(None)
        problems.append(problem)
    if count and all(reward is None for reward in rewards):
        problem = problems[0] if problems else f"the reward {name} returned None"
        raise Unusable(
            f"{problem}: none of {count:,} completions has a reward; {first_prompt}",
            "return a number for those that it can score",
        )
    return rewards, problems


def _number_in(value: Any) -> tuple[float | None, str | None]:
    """The number, None for no opinion, and else what the value is in place of a finite number."""
    try:
        number = value.item() if hasattr(value, "item") else value  # numpy, torch
    except Exception as error:  # of the user's own class
        return None, f"{type(value).__name__}, whose item() failed ({error_text(error)}),"
    if number is None:
        return None, None
    if not isinstance(number, int | float):
        return None, f"{type(number).__name__}, not a number,"
    try:
        finite = float(number)
    except OverflowError:
        return None, "an integer beyond 1e308"
    return (finite, None) if math.isfinite(finite) else (None, str(finite))


def error_text(error: BaseException) -> str:
    """The error, and the line of the user's file where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name})" if frames else ""
    try:
        text = str(error)[:200]
    except Exception:  # a __str__ of the user's own
        text = "its text cannot be read"
    return f"{type(error).__name__}: {text}{location}"


if __name__ == "__main__":
    main()
