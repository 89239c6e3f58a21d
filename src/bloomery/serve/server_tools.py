"""Tools that the server calls itself: a request of a chat has an episode of its own, as in training.

Each running request has a process for its tools; a few of them are kept, and further requests wait for one.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, final

from bloomery.core.errors import UserError
from bloomery.data.chat.tool_arguments import Json
from bloomery.data.chat.tool_forms import ToolFormat
from bloomery.data.chat.tools import ToolCall
from bloomery.data.examples import Message
from bloomery.plan.types import EpisodesPlan
from bloomery.serve.engine import End, Engine, Job, Piece, QueueFull, Step
from bloomery.serve.limits import Refused
from bloomery.serve.requests import ChatRequest, schema_of
from bloomery.serve.served import Served
from bloomery.train.failures import Stopped
from bloomery.train.rl.episodes import opening_messages
from bloomery.train.rl.live_episodes import LiveEpisode

Result = TypeVar("Result")
Arrived = asyncio.Queue[tuple[int, Piece | End]]


@final
class ServerTools:
    """The tools of a server. `most`: how many requests use them at once."""

    def __init__(self, plan: EpisodesPlan, models: Sequence[Served], *, most: int) -> None:
        """Raises UserError for tools that cannot be loaded, and for a chat template that takes none."""
        self._plan = plan
        self._idle: list[LiveEpisode] = [LiveEpisode(plan)]
        self._busy = set[LiveEpisode]()
        self._threads = ThreadPoolExecutor(most, "tools")
        self._free = asyncio.Semaphore(most)
        self._ending = threading.Lock()
        self._is_closing = False
        try:
            self.schemas = self._idle[0].schemas
            for model in models:
                if model.form is not None:
                    self._idle[0].use_template(model.tokenizer, model.template_name)
        except UserError:
            self.close()
            raise
        self.notes = self._idle[0].notes

    def close(self) -> None:
        """Calls that are waited for end, and so do all processes."""
        self._is_closing = True
        busy_episodes = list(self._busy)
        for episode in busy_episodes:
            episode.stopped = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        for episode in (*self._idle, *busy_episodes):
            self._end(episode)

    async def begin(
        self, model: Served, messages: Sequence[Message], row: Json, seed: int, *, seconds: float
    ) -> "ServedEpisode":
        """An episode of a request, once one is free, for which it waits `seconds` at most. Raises Refused."""
        try:
            async with asyncio.timeout(seconds):
                await self._free.acquire()
        except TimeoutError as error:
            problem = f"other requests had all tools for {seconds:g} seconds"
            raise Refused(408, problem, code="timeout") from error
        if self._is_closing:
            self._free.release()
            raise Refused(503, "the server is shutting down", code="closed")
        episode = self._idle.pop() if self._idle else LiveEpisode(self._plan)
        self._busy.add(episode)
        served = ServedEpisode(self, episode, model)
        try:
            text = await served.run(partial(served.begun, row, seed))
        except (UserError, Stopped) as error:
            served.release()
            problem = (
                error.problem if isinstance(error, UserError) else "the server is shutting down"
            )
            raise Refused(500, problem, code="tools_failed") from error
        except BaseException:  # the client has gone, and the request was cancelled
            served.release()
            raise
        served.messages = opening_messages(messages, text)
        return served

    async def run(self, call: Callable[[], Result]) -> Result:
        """What the call returns, which waits in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def take_back(self, episode: LiveEpisode, *, is_whole: bool) -> None:
        """`is_whole`: nothing of it is waited for, and it may serve another request."""
        self._busy.discard(episode)
        self._free.release()
        if is_whole and not self._is_closing:
            self._idle.append(episode)
        else:
            self._end(episode)

    def _end(self, episode: LiveEpisode) -> None:
        """A request that ends and a server that ends may both close it."""
        with self._ending:
            episode.close()


@final
class ServedEpisode:
    """The episode of one request. `messages`: its conversation, which the environment may have added to."""

    def __init__(self, tools: ServerTools, episode: LiveEpisode, model: Served) -> None:
        self._tools = tools
        self._episode = episode
        self._model = model
        self._is_running = False  # in a thread
        self._is_released = False
        self._is_whole = True
        self.messages: list[Message] = []
        self.ends: tuple[int, ...] = ()

    def begun(self, row: Json, seed: int) -> str | None:
        self.ends = self._episode.use_template(self._model.tokenizer, self._model.template_name)
        return self._episode.begin(row, seed=seed)

    def begin_answer(self, ids: Sequence[int], variables: Json) -> None:
        """`ids`: of the prompt; `variables`: of the chat template."""
        num_earlier = sum(len(message.calls) for message in self.messages)
        self._episode.begin_answer(ids, variables, num_earlier=num_earlier)

    async def run(self, call: Callable[[], Result]) -> Result:
        """What the call returns, in a thread. A request that has gone lets it end first."""
        self._is_running = True

        def watched_call() -> Result:
            try:
                return call()
            except BaseException:  # whatever ended it, it may have left something behind
                self._is_whole = False
                raise
            finally:
                self._is_running = False

        future = asyncio.ensure_future(self._tools.run(watched_call))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._episode.stopped = True
            future.add_done_callback(self._give_back_after)
            raise

    def release(self) -> None:
        """The request has ended. May be called again."""
        if not self._is_running:
            self._give_back()

    def _give_back_after(self, call: "asyncio.Future[Any]") -> None:
        if not call.cancelled():
            call.exception()  # it was stopped
        self._give_back()

    def _give_back(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        if not self._is_whole or self._episode.stopped:
            self._tools.take_back(self._episode, is_whole=False)
            return

        # The process of the tools ends that of the episode, and is waited for.
        def take_back(ended: "asyncio.Future[None]") -> None:
            is_whole = not ended.cancelled() and ended.exception() is None
            self._tools.take_back(self._episode, is_whole=is_whole)

        ending = asyncio.ensure_future(self._tools.run(self._episode.end))
        ending.add_done_callback(take_back)

    async def events(
        self, engine: Engine, arrived: Arrived, job: Job
    ) -> AsyncIterator[tuple[int, Piece | End]]:
        """The events of all turns. Ending it early frees the slot, and ends what a tool does."""
        num_tokens = 0
        deadline = job.born + engine.limits.seconds
        most_tokens = job.sampling.max_new_tokens
        try:
            while True:
                _, event = await arrived.get()
                if isinstance(event, Piece):
                    yield 0, event
                    continue
                num_tokens += event.tokens
                if event.problem or event.reason not in ("stop", "length"):
                    yield 0, replace(event, tokens=num_tokens)
                    return

                # What the answer calls is called; then the model goes on, or the answer was the last.
                num_messages = len(self._episode.messages)
                try:
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        ids = await self.run(partial(self._go_on, event, num_tokens < most_tokens))
                        summary = None if ids is not None else await self.run(self._episode.summary)
                except TimeoutError:
                    problem = f"the request took more than {engine.limits.seconds:g} seconds"
                    yield 0, End("timeout", num_tokens, problem)
                    return
                except (UserError, Stopped) as error:
                    problem = error.problem if isinstance(error, UserError) else "canceled"
                    yield 0, End("error", num_tokens, problem)
                    return
                if ids is None:
                    reason = "length" if self._episode.is_cut else event.reason
                    yield 0, replace(event, reason=reason, tokens=num_tokens, episode=summary)
                    return
                messages = tuple(self._episode.messages[num_messages:])
                yield 0, Step(messages=messages, called=tuple(self._episode.called))
                sampling = replace(
                    job.sampling,
                    max_new_tokens=most_tokens - num_tokens,
                    seed=(job.sampling.seed + 1) % 2**63,
                )
                job = replace(job, ids=ids, sampling=sampling)
                try:
                    engine.submit([job])
                except QueueFull:
                    yield 0, End("error", num_tokens, "the server is busy: too many requests wait")
                    return
        finally:
            job.canceled = True
            self.release()

    def _go_on(self, event: End, may_answer: bool) -> list[int] | None:
        longest = self._model.context if may_answer else 0
        truncated = not event.stopped
        return self._episode.go_on(event.ids, truncated=truncated, longest=longest)


def sent_id(form: ToolFormat | None, call: ToolCall) -> str:
    """The id of a call that clients see and send back: one that the chat template takes."""
    if form is None:
        return call.id
    writes_ids = form.id_letters and not form.is_numbered
    return call.id if writes_ids else form.id_of(secrets.token_hex(12))


def refuse_misfits(params: ChatRequest) -> None:
    """Raises Refused for what a request with tools of the server cannot have."""
    if params.completions > 1:
        raise Refused(400, "n is 1 where the server calls tools", parameter="n")
    if schema_of(params) is not None:
        problem = "a schema binds no answer that calls tools of the server; send tool_choice: none"
        raise Refused(400, problem, parameter="response_format")
