"""The engine of the server: one thread that decodes the requests of all models, as many at once as there are slots."""

import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, final

from bloomery.core.errors import UserError
from bloomery.data.chat.tools import ToolCall
from bloomery.data.pictures.prompts import PicturePrompt
from bloomery.infer.decode import Constraint, RunningText, TextUpdate
from bloomery.infer.grammar import GrammarFailed
from bloomery.infer.sampling import Sampling
from bloomery.infer.text import OutputText
from bloomery.serve.limits import MOST_WAITING_BYTES, Limits
from bloomery.serve.served import Served
from bloomery.train.rl.tools import ToolResult


@dataclass(frozen=True)
class Chance:
    """A token with its log-probability; `spelled`: its bytes, perhaps a part of a character; `top`: the likeliest."""

    token: int
    spelled: bytes
    logprob: float
    top: "tuple[Chance, ...]" = ()

    @property
    def text(self) -> str:
        return self.spelled.decode(errors="replace")


@dataclass(frozen=True)
class Piece:
    """New text of a completion: whole characters, and no part of a stop text."""

    text: str
    chance: Chance | None = None


@dataclass(frozen=True)
class End:
    """`tokens`: how many were generated. `problem`: why there are no more; `refused`: the request is at fault. `stop`:
    the stop text that ended it. `ids`: the tokens, with the one that ended them (`stopped`). `episode`: what the
    server's tools did in an answer of several turns.
    """

    reason: Literal["stop", "length", "error", "timeout", "closed"]
    tokens: int
    problem: str = ""
    refused: bool = False
    stop: str | None = None
    ids: tuple[int, ...] = ()
    stopped: bool = False
    episode: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Step(Piece):
    """A piece without text, behind a turn that called tools of the server: the turn and the results, as messages, and
    each call with its result.
    """

    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    called: tuple[tuple[ToolCall, ToolResult], ...] = ()


Put = Callable[[Piece | End], None]


@final
@dataclass(eq=False)
class Job:
    """One completion of a request. `put` is called in the engine's thread; set `canceled` to free the slot."""

    model: Served
    ids: list[int]
    sampling: Sampling
    stops: tuple[str, ...]
    put: Put
    adapter: str | None = None
    logprobs: int | None = None
    constraint: Constraint | None = None
    canceled: bool = False
    born: float = field(default_factory=time.monotonic)
    first: float | None = None  # when its first token came
    output: OutputText = field(init=False)

    def __post_init__(self) -> None:
        tokens_left = self.model.context - len(self.ids)  # a single slot would grow beyond it
        self.sampling = replace(
            self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, tokens_left)
        )
        self.output = OutputText(self.model.tokenizer, self.ids, self.stops)


class Work(Protocol):
    """What else needs a model, in steps between those of the texts. Set `canceled` to drop it."""

    canceled: bool
    born: float

    def step(self) -> bool:
        """One forward; True when it was the last."""

    def fail(self, end: End) -> None:
        """It ends without a result."""


class QueueFull(Exception):
    """As many requests wait as may."""


@final
class Engine:
    """Use it in a `with` block: its thread ends with the block, and requests with it."""

    def __init__(self, models: Sequence[Served], limits: Limits) -> None:
        self.models = models
        self.limits = limits
        self.counts = Counter[str]()  # requests by how they ended, tokens, seconds
        self._wake = threading.Condition()
        self._waiting = deque[Job]()
        self._running = dict[RunningText, Job]()
        self._works = deque[Work]()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> "Engine":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._thread.join(timeout=30)

    def close(self) -> None:
        """Every request ends."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Raises QueueFull; then none of them is taken."""
        with self._wake:
            is_full = self._left_waiting(jobs) > self.limits.queue
            is_full |= self._waiting_bytes(jobs) > MOST_WAITING_BYTES
            if is_full or not self.alive:
                self.counts["requests_refused"] += len(jobs)
                raise QueueFull
            self._waiting.extend(jobs)
            self.counts["prompt_tokens"] += sum(len(job.ids) for job in jobs)
            self._wake.notify()

    def submit_work(self, work: Work) -> None:
        """Raises QueueFull."""
        with self._wake:
            if len(self._works) >= self.limits.queue + self.limits.slots or not self.alive:
                self.counts["requests_refused"] += 1
                raise QueueFull
            self._works.append(work)
            self._wake.notify()

    def _work(self) -> None:
        """One step of the first work; then the texts have their turn. Each ends before the next begins, so that one
        cache is in memory, and not as many as may wait.
        """
        for work in list(self._works):
            is_late = time.monotonic() - work.born > self.limits.seconds
            if is_late and not work.canceled:
                problem = f"the request took more than {self.limits.seconds:g} seconds"
                work.fail(End("timeout", 0, problem))
            if is_late or work.canceled:
                self._works.remove(work)
        if not self._works:
            return
        work = self._works[0]
        try:
            if work.step():
                self._works.popleft()
        except Exception as error:  # such as out of memory: this request ends, the server does not
            traceback.print_exc(file=sys.stderr)
            problem = (
                error.problem
                if isinstance(error, UserError)
                else f"internal error: {type(error).__name__}"
            )
            self._works.popleft()
            work.fail(End("error", 0, problem))

    def _left_waiting(self, jobs: Sequence[Job]) -> int:
        """How many wait once every free slot is taken."""
        jobs_by_model = Counter(id(job.model) for job in (*self._waiting, *jobs))
        free_slots = {id(model): model.slots - len(model.batch.texts) for model in self.models}
        return sum(max(0, count - free_slots[model]) for model, count in jobs_by_model.items())

    def _waiting_bytes(self, jobs: Sequence[Job]) -> int:
        """Of the pictures of requests that wait; nothing where none does, so that one is always taken."""
        if not self._waiting:
            return 0
        prompts = {id(job.ids): job.ids for job in (*self._waiting, *jobs)}
        return sum(
            prompt.num_bytes for prompt in prompts.values() if isinstance(prompt, PicturePrompt)
        )

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._closing or self._waiting or self._running or self._works):
                    self._wake.wait()
                if self._closing:
                    break
                self._admit()
            self._drop()
            for model in self.models:
                if model.batch.texts:
                    self._step(model)
            if self._works:
                self._work()
        shutdown = End("closed", 0, "the server is shutting down")
        for job in (*self._running.values(), *self._waiting):
            self._end(job, shutdown)
        for work in self._works:
            work.fail(shutdown)

    def _admit(self) -> None:
        """Waiting requests, in their order, go into free slots of their models."""
        still_waiting = deque[Job]()
        for job in self._waiting:
            if self._late(job):
                continue
            if job.model.batch.full:
                still_waiting.append(job)
                continue
            text = job.model.batch.add(
                job.ids,
                job.sampling,
                adapter=job.adapter,
                logprobs=job.logprobs,
                constraint=job.constraint,
            )
            self._running[text] = job
        self._waiting = still_waiting

    def _drop(self) -> None:
        """Frees the slots of requests that are canceled or late."""
        for text, job in list(self._running.items()):
            if self._late(job, len(text.new)):
                job.model.batch.remove(text)
                del self._running[text]

    def _late(self, job: Job, tokens: int = 0) -> bool:
        if job.canceled:
            self._end(job, End("closed", tokens, "canceled"))
            return True
        if time.monotonic() - job.born > self.limits.seconds:
            self._end(
                job,
                End(
                    "timeout", tokens, f"the request took more than {self.limits.seconds:g} seconds"
                ),
            )
            return True
        return False

    def _step(self, model: Served) -> None:
        try:
            for update in model.batch.step():
                self._give(self._running[update.text], update)
        except Exception as error:
            # Such as out of memory: the requests of this model end, the server does not.
            traceback.print_exc(file=sys.stderr)
            problem = (
                error.problem
                if isinstance(error, UserError)
                else f"internal error: {type(error).__name__}"
            )
            of_model = [entry for entry in self._running.items() if entry[1].model is model]
            for text, job in of_model:
                del self._running[text]
                self._end(job, End("error", len(text.new), problem))
            model.reset()

    def _give(self, job: Job, update: TextUpdate) -> None:
        """Text and end of a new token to its request."""
        text = update.text
        spelled = job.model.spelled

        # A token becomes text, unless it may be the beginning of a stop text.
        ending: Literal["stop", "length", "error"] | None = None
        if update.token is not None:
            if job.first is None:
                job.first = time.monotonic()
                self.counts["first_tokens"] += 1
                self.counts["first_token_microseconds"] += round((job.first - job.born) * 1e6)
            self.counts["generated_tokens"] += 1
            chance = None
            if update.logprob is not None:
                top = tuple(Chance(token, spelled(token), value) for token, value in update.top)
                chance = Chance(update.token, spelled(update.token), update.logprob, top)
            piece = job.output.push(update.token)
            if piece or chance is not None:
                job.put(Piece(piece, chance))
            if job.output.stopped:
                ending = "stop"
                job.model.batch.remove(text)

        # The end that decoding found: what was held back is text after all.
        problem = ""
        refused = isinstance(update.ended, GrammarFailed)
        if update.ended is not None and ending is None:
            if isinstance(update.ended, UserError):
                ending = "error"
                problem = update.ended.problem
            else:
                ending = update.ended
                last_text = job.output.finish()
                if last_text:
                    job.put(Piece(last_text))
        if ending is not None:
            del self._running[text]
            stop_ids = () if text.stop_id is None else (text.stop_id,)
            ids = (*text.new, *stop_ids)
            stop = job.output.stop
            end = End(ending, len(text.new), problem, refused, stop, ids, bool(stop_ids))
            self._end(job, end)

    def _end(self, job: Job, end: End) -> None:
        self.counts[f"requests_{'canceled' if job.canceled else end.reason}"] += 1
        job.put(end)
