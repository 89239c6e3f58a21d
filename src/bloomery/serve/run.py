"""Serving: load the models, listen, and end cleanly at Ctrl+C or SIGTERM."""

import asyncio
import signal
import socket
import sys
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError
from bloomery.data.chat.render import chat_format
from bloomery.data.tokenizer.templates import own_templates
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.model.adapters.base_model import refuse_other_base
from bloomery.model.adapters.many import Adapters
from bloomery.model.compiled_step import compile_step
from bloomery.model.config import refuse_values
from bloomery.model.decoder import Decoder
from bloomery.serve.engine import Engine, Limits, Served
from bloomery.train.model_folder import find_model, model_folder
from bloomery.train.use import Use, load_used

TOKEN = "BLOOMERY_SERVE_TOKEN"
LOCAL = ("127.0.0.1", "localhost", "::1")
GRACE = 5  # seconds for answers to end


def load_served(
    model: Path, name: str, limits: Limits, stack: ExitStack, *, step: str = "best", use: Use | None = None,
    template: str | None = None, adapters: Mapping[str, Path] | None = None, on_load: Callable[[str], None],
) -> Served:  # fmt: skip
    """A model ready to be served. `stack`: closes the child process of its template. Raises UserError."""
    found = find_model(model, step)
    cached = limits.slots, limits.context
    decoder = load_used(found, use or Use.local(), on_load=on_load, cached=cached)
    refuse_values(decoder.config, where=str(model))
    many = None
    if adapters:
        folders = {key: model_folder(folder) for key, folder in adapters.items()}
        for folder in folders.values():
            refuse_other_base(folder, found.weights)
        many = Adapters(decoder, folders)
    compile_step(decoder, on_load)
    return serve_loaded(decoder, load_tokenizer(found.tokenizer), name, limits, stack, template, many)


def serve_loaded(
    decoder: Decoder, tokenizer: Tokenizer, name: str, limits: Limits, stack: ExitStack, template: str | None = None,
    adapters: Adapters | None = None,
) -> Served:  # fmt: skip
    """Raises UserError for an unknown template."""
    chats = template is not None or bool(own_templates(tokenizer.config))
    form = stack.enter_context(chat_format(tokenizer, template)) if chats else None
    return Served(name, decoder, tokenizer, form, limits, adapters)


def token_for(host: str, environment: Mapping[str, str]) -> str | None:
    """The token that clients must send. Raises UserError for an open address without one."""
    token = environment.get(TOKEN)
    if host not in LOCAL and not token:
        raise UserError(
            f"{host} can be reached from other machines", where="--host", code=2,
            fix=f"set {TOKEN}, which clients send as their API key: export {TOKEN}=$(openssl rand -hex 16)",
        )  # fmt: skip
    if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable()):
        problem, fix = f"{TOKEN} is too short, or not plain ASCII", "use 8 characters or more"
        raise UserError(problem, where="the environment", fix=fix, code=2)
    return token


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Raises UserError for an address that cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            fix = f"choose another: --port {port + 1 if port < 65535 else 0}"
            raise UserError(f"cannot listen: {error.strerror}", where=f"{host}:{port}", fix=fix, code=2) from error
        yield listener


def serve(
    models: Sequence[Served], limits: Limits, *, host: str, port: int, token: str | None = None,
    on_ready: Callable[[str], None] = lambda _: None, show: bool = False, defaults: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Answers requests until SIGINT or SIGTERM. `on_ready` gets the URL; `show` opens it in a browser; `defaults`:
    sampling settings of requests that leave these out.
    """
    import uvicorn

    from bloomery.serve import app

    with _listening(host, port) as listener, Engine(models, limits) as engine:
        hosts = ("127.0.0.1", "localhost", "[::1]") if host in LOCAL else ()
        config = uvicorn.Config(
            app.Server(engine, token=token, defaults=defaults).app(hosts), log_level="warning", access_log=False,
            lifespan="off", timeout_graceful_shutdown=GRACE, timeout_keep_alive=10, server_header=False,
            limit_concurrency=4 * (limits.slots + limits.queue) + 64,
        )  # fmt: skip

        class Server(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # they are handled below: uvicorn would raise them again at its end

        server = Server(config)
        bound = listener.getsockname()[1]
        url = f"http://{f'[{host}]' if ':' in host else host}:{bound}/"

        async def run() -> None:
            loop = asyncio.get_running_loop()

            def stop() -> None:
                server.force_exit = server.should_exit  # a second signal does not wait
                server.should_exit = True
                engine.close()  # answers end, so that connections do

            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop)
            serving = asyncio.create_task(server.serve([listener]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            if server.started:
                on_ready(url)
                if show and not webbrowser.open(url):
                    print(f"open {url} in a browser", file=sys.stderr)
            await serving

        asyncio.run(run())
