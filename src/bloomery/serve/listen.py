"""`serve` listens, answers, and ends within seconds at Ctrl+C or SIGTERM, whatever its threads are doing."""

import asyncio
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from bloomery.serve.address import LOCAL, taken, url_of
from bloomery.serve.connections import (
    ACCEPTED_AT_ONCE,
    Waiting,
    most_connections,
    protocol_of,
    quiet_accept,
)
from bloomery.serve.limits import Limits

if TYPE_CHECKING:
    from bloomery.serve.served import Served
    from bloomery.serve.server_tools import ServerTools

GRACE = 5  # seconds for answers to end
# How long the event loop waits for the engine's thread after each call that let go of Python's lock; at the default of
# 5 ms, a large body that arrives in hundreds of pieces keeps /health waiting for seconds.
SWITCH_SECONDS = 0.0005


def uvicorn_config(app: ASGIApp, limits: Limits, **settings: Any) -> uvicorn.Config:
    """Connections of `connections.py`; uvicorn's own limit would count silent ones as requests."""
    waiting = Waiting(most_connections(limits.requests))
    return uvicorn.Config(
        app,
        http=protocol_of(waiting),
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=GRACE,
        timeout_keep_alive=10,
        server_header=False,
        backlog=ACCEPTED_AT_ONCE,
        **{"ws": "none", "lifespan": "off", **settings},
    )


def serve(
    models: "Sequence[Served]",
    limits: Limits,
    listener: socket.socket,
    *,
    host: str,
    token: str | None = None,
    on_ready: Callable[[str], None] = lambda _: None,
    show: bool = False,
    defaults: Mapping[str, Any] | None = None,
    tools: "ServerTools | None" = None,
) -> None:
    """Answers requests until SIGINT or SIGTERM. `on_ready` gets the URL; `show` opens it in a browser; `defaults`:
    sampling settings of requests that leave these out; `tools`: those that the server calls. Raises UserError where the
    listener cannot listen any more.
    """
    from bloomery.serve.app import Server
    from bloomery.serve.engine import Engine

    listen(listener, host)  # another process may have begun to, while models were loaded
    sys.setswitchinterval(SWITCH_SECONDS)
    with Engine(models, limits) as engine:
        endpoints = Server(engine, token=token, defaults=defaults, tools=tools)

        def close() -> None:
            endpoints.close()
            engine.close()  # answers end, so that connections do

        config = uvicorn_config(endpoints.app(hosts_of(host)), limits)
        url = url_of(host, listener.getsockname()[1])
        answer(
            config, listener, url, on_ready=on_ready, on_stop=close, opened=url if show else None
        )


def hosts_of(host: str) -> tuple[str, ...]:
    """The names that requests to a local server may use; empty where it is open to other machines."""
    return ("127.0.0.1", "localhost", "[::1]") if host in LOCAL else ()


def listen(listener: socket.socket, host: str) -> None:
    """Raises UserError where another process listens at the address by now."""
    try:
        listener.listen()
    except OSError as error:
        raise taken(error, host, listener.getsockname()[1]) from error


def answer(
    config: uvicorn.Config,
    listener: socket.socket,
    url: str,
    *,
    on_ready: Callable[[str], None],
    on_stop: Callable[[], None],
    opened: str | None,
) -> None:
    """Runs the server until SIGINT or SIGTERM. `on_ready` gets the URL. `opened`: what a browser opens."""

    class Uvicorn(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are handled below: uvicorn would raise them again at its end

    server = Uvicorn(config)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(quiet_accept())

        def stop() -> None:
            if not server.should_exit:
                _leave_after(GRACE + 1.0)
            server.force_exit = server.should_exit  # a second signal does not wait
            server.should_exit = True
            on_stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            listener.listen(1024)  # asyncio asked for as few as it accepts at once
            on_ready(url)
            if opened is not None:
                _open_page(opened)
        await serving

    asyncio.run(run())


def _leave_after(seconds: float) -> None:
    """End the process even where a thread cannot be interrupted, such as a forward of a large model on a CPU."""

    def leave() -> None:
        print("stopped, before every request had ended", file=sys.stderr, flush=True)
        os._exit(0)  # child processes end with this one

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


def _open_page(url: str) -> None:
    """In a browser with windows: one of a terminal would hold the server up."""
    windows = sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    if not windows or not webbrowser.open(url):
        print(f"open {url} in a browser", file=sys.stderr)
