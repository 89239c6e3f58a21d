"""Renders chat templates in a child process. A template that fails or hangs does not affect this process."""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from bloomery.core.child import Child
from bloomery.core.errors import UserError
from bloomery.data.tokenizer.templates import ChatTemplate

CPU_SECONDS = 2.0  # for one conversation
WALL_SECONDS = 30.0  # plus CPU_SECONDS for every conversation of a batch
_PATIENCE = 3  # conversations that may kill the process; one more per thousand
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV", "TZ")
_FIX = "correct the template, or set data.chat.template to another: chatml, llama2, llama3, qwen, mistral, gemma"
_SOURCES = Path(__file__).parents[3]  # where the child finds this package
Json = dict[str, Any]


@final
class TemplateProcess:
    """Renders batches of conversations with one template. The child starts with the first batch; `close` ends it."""

    def __init__(self, template: ChatTemplate, names: Mapping[str, str], enders: Sequence[str]) -> None:
        self._template, self._names, self._enders = template, dict(names), list(enders)
        self._child: Child | None = None
        self._deaths = self._answered = 0

    def read(self, jobs: Sequence[Json]) -> list[Json]:
        """One answer per job: {"text", "spans"} or {"error"}. Raises UserError for a template that always fails."""
        if not jobs:
            return []
        answers = self._ask(jobs)
        if isinstance(answers, list):
            self._answered += len(answers)
            return answers
        if len(jobs) > 1:  # one of them killed the child: one by one
            return [answer for job in jobs for answer in self.read([job])]
        self._deaths += 1
        if self._deaths >= _PATIENCE + self._answered // 1000:
            raise self.error(answers)
        return [{"error": answers}]

    def error(self, problem: str) -> UserError:
        return UserError(f"the chat template failed: {problem}", where=self._template.origin, fix=_FIX)

    def _ask(self, jobs: Sequence[Json]) -> list[Json] | str:
        """The answers, or the reason why the process ended."""
        child = self._child or self._start()
        answer = child.ask({"jobs": jobs}, seconds=WALL_SECONDS + CPU_SECONDS * len(jobs))
        if isinstance(answer, str):
            return self._ended(answer)
        answers: list[Json] = answer["answers"]
        return answers

    def _start(self) -> Child:
        """Start the child with only the environment variables that Python needs: no token, no key."""
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        paths = (str(_SOURCES), os.environ.get("PYTHONPATH", ""))
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUTF8": "1"}
        settings = {"text": self._template.text, "names": self._names, "enders": self._enders, "seconds": CPU_SECONDS}
        self._child = Child("bloomery.data.chat.sandbox_worker", settings, environment=environment).start()
        ready = self._child.next(WALL_SECONDS + CPU_SECONDS)
        if isinstance(ready, str):
            raise self.error(self._ended(ready))
        if "error" in ready:
            self.close()
            raise self.error(ready["error"])
        return self._child

    def _ended(self, how: str) -> str:
        """The reason why the child ended. Closes it."""
        assert self._child is not None
        code = self._child.code if how == "ended" else -signal.SIGKILL
        self.close()
        if code == -signal.SIGPROF:
            return f"it took more than {CPU_SECONDS:g} seconds for one conversation"
        if code == -signal.SIGKILL:
            return "its process was killed: it took too long, or the machine ran out of memory"
        return f"its process ended with code {code}"

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()
