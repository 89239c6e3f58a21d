"""Requests become token ids in threads of their own, so that the event loop, and /health with it, never waits.

What is too long is refused before it is tokenized: a token has at most so many bytes. The rest waits in lanes, one for
short texts, one for long ones, one for grammars and one for pictures, so that none of them holds up the others.
"""

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeVar, final

from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.infer.grammar_trials import STACK_BYTES
from bloomery.serve.limits import Refused

SHORT_BYTES = 32 * 1024  # of text that is tokenized in some milliseconds
NORMALIZED = 4  # bytes that a normalizer makes one byte of, as of a letter in double-struck type
Lane = Literal["short", "long", "grammar", "pictures"]
Result = TypeVar("Result")


def most_bytes(tokenizer: Tokenizer, tokens: int) -> int:
    """The longest text that can be so few tokens."""
    control = max((len(name.encode()) for name in tokenizer.control_tokens()), default=0)
    shrinks = NORMALIZED if tokenizer.normalizes else 1
    return tokens * shrinks * max(control, int(tokenizer.token_bytes().max()))


def lane_of(num_bytes: int) -> Lane:
    return "short" if num_bytes <= SHORT_BYTES else "long"


@final
class Tokenizing:
    """One thread per core, at least one for each lane. `waiting`: calls that may wait in a lane.

    The threads are daemons: a tokenizer cannot be interrupted, and a server that ends does not wait for it.
    """

    def __init__(self, waiting: int) -> None:
        self._waiting = waiting
        self._closed = False
        self._calls: dict[Lane, queue.SimpleQueue[Callable[[], None]]] = {}
        self._pending: dict[Lane, int] = {}
        self._futures = set[asyncio.Future[Any]]()
        several = max(1, (os.cpu_count() or 1) // 2)
        lanes: dict[Lane, int] = {"short": several, "long": several, "grammar": 1, "pictures": 1}
        usual_stack = threading.stack_size(2 * STACK_BYTES)
        for lane, threads in lanes.items():
            self._calls[lane] = queue.SimpleQueue()
            self._pending[lane] = 0
            for _ in range(threads):
                threading.Thread(
                    target=self._serve, args=(lane,), name=f"{lane} requests", daemon=True
                ).start()
        threading.stack_size(usual_stack)

    def _serve(self, lane: Lane) -> None:
        while True:
            self._calls[lane].get()()

    async def run(self, lane: Lane, call: Callable[[], Result]) -> Result:
        """The result of a call in a thread of the lane. Raises Refused (503) where too many wait, or the server ends.

        A call that is canceled before its turn never runs.
        """
        if self._closed:
            raise Refused(503, "the server is shutting down", code="closed")
        if self._pending[lane] >= self._waiting:
            raise Refused(
                503,
                f"{self._pending[lane]} requests wait to be tokenized; try again later",
                code="queue_full",
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(result: Result | None, error: BaseException | None) -> None:
            self._pending[lane] -= 1
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # None only where the call returns None

        def turn() -> None:
            result = None
            error = None
            if not future.done():
                try:
                    result = call()
                except BaseException as raised:  # handed to the request that waits for it
                    error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        self._pending[lane] += 1
        self._futures.add(future)
        self._calls[lane].put(turn)
        try:
            return await future
        finally:
            self._futures.discard(future)

    def close(self) -> None:
        """Requests that wait are refused; what runs is left to end with the process."""
        self._closed = True
        for future in list(self._futures):
            if not future.done():
                future.set_exception(Refused(503, "the server is shutting down", code="closed"))
