"""The engine of the server: one thread that decodes the requests of all models, as many at once as there are slots.

`serve` loads the models, listens, and ends cleanly at Ctrl+C or SIGTERM.
"""

import asyncio
import signal
import socket
import sys
import threading
import time
import traceback
import webbrowser
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from bloomery.core.errors import UserError
from bloomery.data.chat.render import ChatFormat, chat_format
from bloomery.data.examples import Message
from bloomery.data.tokenizer.templates import own_templates
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.model.adapters.many import Adapters
from bloomery.model.adapters.settings import refuse_other_base
from bloomery.model.compiled_step import compile_step
from bloomery.model.config import refuse_values
from bloomery.model.decoder import Decoder
from bloomery.model.decoding import Batch, Constraint, Drawn, Past, Sampling, Text, known_ids
from bloomery.runs.generate import JsonGrammars, Stops, TextStream
from bloomery.train.model_folder import find_model, model_folder
from bloomery.train.use import Use, load_used

PIECE = 256  # tokens of a prompt between two steps of the other texts


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`slots`: texts that are decoded at once, per model. `context`: tokens of prompt and output. `queue`: requests
    that wait. `seconds`: of a request, waiting included. `body_bytes`: of a request.
    """

    slots: int = 8
    context: int = 4096
    new_tokens: int = 2048
    queue: int = 64
    seconds: float = 600.0
    body_bytes: int = 2 * 2**20


@final
class Served:
    """A model with its tokenizer, chat template and slots. `adapters`: by name; None where there are none."""

    def __init__(
        self, name: str, decoder: Decoder, tokenizer: Tokenizer, form: ChatFormat | None, limits: Limits,
        adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        self.name, self.decoder, self.tokenizer, self.form, self.adapters = name, decoder, tokenizer, form, adapters
        self.slots, self.context = limits.slots, min(limits.context, decoder.config.max_positions)
        self.ends = known_ids(tokenizer.eos_id, decoder.config.eos_token_id)
        self._rendering = threading.Lock()
        self._grammars: JsonGrammars | None = None
        self.reset()

    def reset(self) -> None:
        """Empty slots."""
        choose = None if self.adapters is None else self.adapters.choose
        self.batch = Batch(Past(self.decoder, self.slots, self.context, choose), piece=PIECE)

    def json_text(self, schema: dict[str, Any]) -> Constraint:
        """What keeps a text to JSON of the schema. Raises UserError."""
        with self._rendering:
            if self._grammars is None:
                ends = known_ids(*self.ends, *(() if self.form is None else self.form.stop_ids))
                self._grammars = JsonGrammars(self.tokenizer, self.decoder.config.vocab_size, ends)
        return self._grammars.start(schema)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Raises UserError for turns that the template refuses."""
        assert self.form is not None
        with self._rendering:  # a template is rendered in a child process, one conversation at a time
            return self.form.encode(messages)


@dataclass(frozen=True)
class Chance:
    """A token with its log-probability, as text and bytes; `top`: those of the likeliest."""

    token: int
    text: str
    logprob: float
    top: "tuple[Chance, ...]" = ()


@dataclass(frozen=True)
class Piece:
    """New text of a completion: whole characters, and no part of a stop text."""

    text: str
    chance: Chance | None = None


@dataclass(frozen=True)
class End:
    """`tokens`: how many were generated. `problem`: why there are no more."""

    reason: Literal["stop", "length", "error", "timeout", "closed"]
    tokens: int
    problem: str = ""


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
    stream: TextStream = field(init=False)
    held: Stops = field(init=False)

    def __post_init__(self) -> None:
        self.stream, self.held = TextStream(self.model.tokenizer, self.ids), Stops(self.stops)


class QueueFull(Exception):
    """As many requests wait as may."""


@final
class Engine:
    """Use it in a `with` block: its thread ends with the block, and requests with it."""

    def __init__(self, models: Sequence[Served], limits: Limits) -> None:
        self.models, self.limits = models, limits
        self.counts = Counter[str]()  # requests by how they ended, tokens, seconds
        self._wake = threading.Condition()
        self._waiting = deque[Job]()
        self._running = dict[Text, Job]()
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
            free = sum(len(model.batch.texts) < model.slots for model in self.models)
            if len(self._waiting) + len(jobs) > self.limits.queue + free or not self.alive:
                self.counts["requests_refused"] += len(jobs)
                raise QueueFull
            self._waiting.extend(jobs)
            self.counts["prompt_tokens"] += sum(len(job.ids) for job in jobs)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._closing or self._waiting or self._running):
                    self._wake.wait()
                if self._closing:
                    break
                self._admit()
            self._drop()
            for model in self.models:
                if model.batch.texts:
                    self._step(model)
        for job in (*self._running.values(), *self._waiting):
            self._end(job, End("closed", 0, "the server is shutting down"))

    def _admit(self) -> None:
        """Waiting requests, in their order, go into free slots of their models."""
        left = deque[Job]()
        for job in self._waiting:
            if self._late(job):
                continue
            if job.model.batch.full:
                left.append(job)
                continue
            text = job.model.batch.add(
                job.ids, job.sampling, adapter=job.adapter, logprobs=job.logprobs, constraint=job.constraint,
            )  # fmt: skip
            self._running[text] = job
        self._waiting = left

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
            self._end(job, End("timeout", tokens, f"the request took more than {self.limits.seconds:g} seconds"))
            return True
        return False

    def _step(self, model: Served) -> None:
        try:
            for drawn in model.batch.step():
                self._give(self._running[drawn.text], drawn)
        except Exception as error:  # such as out of memory: the requests of this model end, the server does not
            traceback.print_exc(file=sys.stderr)
            problem = error.problem if isinstance(error, UserError) else f"internal error: {type(error).__name__}"
            for text, job in [each for each in self._running.items() if each[1].model is model]:
                del self._running[text]
                self._end(job, End("error", len(text.new), problem))
            model.reset()

    def _give(self, job: Job, drawn: Drawn) -> None:
        """Text and end of a drawn token to its request."""
        text, tokenizer = drawn.text, job.model.tokenizer
        ended: Literal["stop", "length", "error"] | None = None
        if drawn.token is not None:
            if job.first is None:
                job.first = time.monotonic()
                self.counts["first_tokens"] += 1
                self.counts["first_token_microseconds"] += round((job.first - job.born) * 1e6)
            self.counts["generated_tokens"] += 1
            chance = None
            if drawn.logprob is not None:
                top = tuple(Chance(token, tokenizer.decode([token]), value) for token, value in drawn.top)
                chance = Chance(drawn.token, tokenizer.decode([drawn.token]), drawn.logprob, top)
            piece = job.held.push(job.stream.push(drawn.token))
            if piece or chance is not None:
                job.put(Piece(piece, chance))
            if job.held.stopped:
                ended = "stop"
                if drawn.ended is None:
                    job.model.batch.remove(text)
        problem = ""
        if drawn.ended is not None and ended is None:
            if isinstance(drawn.ended, UserError):
                ended, problem = "error", drawn.ended.problem
            else:
                ended = drawn.ended
                last = job.held.push(job.stream.flush()) + job.held.flush()
                if last:
                    job.put(Piece(last))
        if ended is not None:
            del self._running[text]
            self._end(job, End(ended, len(text.new), problem))

    def _end(self, job: Job, end: End) -> None:
        self.counts[f"requests_{'canceled' if job.canceled else end.reason}"] += 1
        job.put(end)


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
