"""Task sets of verifiers as rows: a file of Python with a `Taskset`, which a process of its own loads.

A row has the prompt as messages, the fields of the task's own data as columns, and `task`: all of its data.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bloomery.core.child import Child
from bloomery.core.errors import UserError
from bloomery.recipe.schema import Source

TASK_SETS = "verifiers"  # `data.format`
WORKER = "bloomery.data.sources.task_set_worker"
SECONDS = 600.0  # to load the file, or for further tasks: it may download a dataset
TASKS = 256  # of an answer


def runs_code(sources: Iterable[Source]) -> bool:
    """Whether reading these runs a file of the recipe's: plans do not, and know such a dataset once it is prepared."""
    return any(source.format == TASK_SETS for source in sources)


def task_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The tasks of the only task set in a file. Raises UserError for a file that has none or cannot be loaded, and for
    tasks that need more than a prompt and rewards.
    """
    child = Child(WORKER, {"path": str(path)}, environment=os.environ).start()
    try:
        while True:
            answer = child.ask({"more": TASKS}, seconds=SECONDS)
            if isinstance(answer, str):
                ending = "took too long" if answer == "silent" else child.ending()
                problem = f"the task set was not read: {ending}"
                raise UserError(problem, where=str(path), fix="correct its load")
            if "error" in answer:
                raise UserError(answer["error"], where=str(path), fix=answer["fix"])
            yield from answer["rows"]
            if not answer["rows"]:
                return
    finally:
        child.close()
