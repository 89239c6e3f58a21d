"""The HTTP side of the server: OpenAI's endpoints, /health, /metrics and the page."""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar, final

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from bloomery.core.errors import UserError
from bloomery.model.decoding import Sampling, known_ids
from bloomery.runs.generate import JsonText
from bloomery.serve.answers import Answer, Shape, failed
from bloomery.serve.embeddings import MOST_INPUTS, Embedding, EmbeddingsRequest, embedded
from bloomery.serve.engine import End, Engine, Job, Piece, QueueFull
from bloomery.serve.limits import MOST_OPEN_BODIES, RETRY_SECONDS, Refused
from bloomery.serve.requests import (
    MOST_STOPS,
    A,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Json,
    parsed,
    prompts_of,
    schema_of,
)
from bloomery.serve.responses import ResponseShape, ResponsesRequest
from bloomery.serve.served import Served
from bloomery.serve.tokenizing import SHORT_BYTES, Lane, Tokenizing, lane_of
from bloomery.serve.tools import ToolFormat

BODY_SECONDS = 30.0  # for a client to send its request
# of a request that is refused, so that its client reads the answer
DRAIN_SECONDS = 1.0
DRAIN_BYTES = 4 * 2**20
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
Result = TypeVar("Result")


@final
class Server:
    """The endpoints over an engine. `token`: the one that clients must send; None: any local one is served."""

    def __init__(
        self, engine: Engine, *, token: str | None = None, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.defaults = dict(defaults or {})
        self.engine = engine
        self.limits = engine.limits
        self.token = token
        self.begun = int(time.time())
        self.tokenizing = Tokenizing(engine.limits.slots + engine.limits.queue)
        self._body_bytes = 0  # of requests that are read or tokenized
        # model name -> (model, adapter)
        self.models: dict[str, tuple[Served, str | None]] = {}
        for model in engine.models:
            self.models[model.name] = model, None
            for adapter in () if model.adapters is None else model.adapters.names:
                self.models[adapter] = model, adapter

    def app(self, hosts: Sequence[str] = ()) -> ASGIApp:
        """`hosts`: the only ones that requests may name, so that no web page reaches a local server by a name of its
        own; empty: any.
        """
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/responses", self.respond, methods=["POST"]),
            Route("/v1/embeddings", self.embed, methods=["POST"]),
        ]
        handlers: Mapping[Any, Callable[[Request, Exception], Response]] = {
            Refused: _refusal,
            HTTPException: _http_error,
            ClientDisconnect: lambda *_: Response(status_code=499),
        }
        return Guard(
            Starlette(routes=routes, exception_handlers=handlers),
            self.token,
            hosts,
            self.limits.requests,
        )

    def close(self) -> None:
        """Requests that wait to be tokenized end."""
        self.tokenizing.close()

    async def page(self, _: Request) -> Response:
        text = files("bloomery.serve").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(
            text, headers={"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"}
        )

    async def health(self, _: Request) -> Response:
        return JSONResponse(
            {"status": "ok" if self.engine.alive else "closing"}, 200 if self.engine.alive else 503
        )

    async def metrics(self, _: Request) -> Response:
        """In the text format of Prometheus."""
        lines = []
        for name, count in sorted(self.engine.counts.items()):
            ending = name.removeprefix("requests_")
            label = f'{{ended="{ending}"}}' if ending != name else ""
            lines.append(f"bloomery_{'requests' if label else name}_total{label} {count}")
        gauges = {"running": self.engine.running, "waiting": self.engine.waiting}
        lines += [f"bloomery_requests_{name} {value}" for name, value in gauges.items()]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def list_models(self, _: Request) -> Response:
        return JSONResponse(
            {"object": "list", "data": [self._described(name) for name in self.models]}
        )

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not name:
            raise Refused(
                404, "no such model: the name is empty", code="model_not_found", parameter="model"
            )
        self._model(name)
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> Json:
        model, adapter = self.models[name]
        facts = {
            "max_model_len": model.context,
            "parent": model.name if adapter else None,
            "chat": model.form is not None,
        }
        return {
            "id": name,
            "object": "model",
            "created": self.begun,
            "owned_by": "bloomery",
            **facts,
        }

    def _model(self, name: str) -> tuple[Served, str | None]:
        if not name and len(self.engine.models) == 1:
            return self.engine.models[0], None
        if name not in self.models:
            served_names = ", ".join(self.models)
            raise Refused(
                404,
                f"no such model: {name[:80]!r}; served: {served_names}",
                code="model_not_found",
                parameter="model",
            )
        return self.models[name]

    async def chat(self, request: Request) -> Response:
        async with self._read(request, ChatRequest) as params:
            model, adapter, ids, tools = await self._encoded(request, params)
        top = params.top_logprobs if params.logprobs else None
        form = Shape("chat.completion", "chatcmpl-", params.model or model.name, model, top, tools)
        return await self._reply(request, params, form, adapter, ids)

    async def respond(self, request: Request) -> Response:
        async with self._read(request, ResponsesRequest) as response_params:
            params = response_params.chat()
            model, adapter, ids, _ = await self._encoded(request, params)
        return await self._reply(
            request, params, ResponseShape(response_params, model), adapter, ids
        )

    async def _encoded(
        self, request: Request, params: ChatRequest
    ) -> tuple[Served, str | None, list[int], ToolFormat | None]:
        """Model, adapter, token ids of the conversation, and how calls are written where there are tools."""
        model, adapter = self._model(params.model)
        if model.form is None:
            problem = f"{model.name} has no chat template; use /v1/completions, or serve it with --template chatml"
            raise Refused(400, problem, parameter="messages")
        messages = [turn.message() for turn in params.messages]
        offered = params.offered_tools
        num_bytes = sum(len(turn.content.encode()) for turn in messages)
        num_bytes += len(json.dumps([[turn.calls for turn in messages], offered]).encode())
        self._measure(model, num_bytes, "messages")
        lane = lane_of(num_bytes)
        tools = None
        try:
            if offered:
                tools = await self._work(request, "grammar", lambda: model.tools)
        except UserError as error:
            raise Refused(400, f"{error.problem} ({error.fix})", parameter="tools") from error
        try:
            ids = await self._work(
                request, lane, partial(model.encode_chat, messages, offered, lane)
            )
        except UserError as error:
            raise Refused(
                400, f"the chat template refuses this: {error.problem}", parameter="messages"
            ) from error
        return model, adapter, ids, tools

    async def _reply(
        self,
        request: Request,
        params: ChatRequest,
        form: Answer,
        adapter: str | None,
        ids: list[int],
    ) -> Response:
        model = form.model
        assert model.form is not None
        ends = (*model.form.stop_ids, *model.ends)
        texts = model.form.stop_strings
        grammar = None
        if params.callable_tools:
            if schema_of(params) is not None:
                raise Refused(
                    400, "tools and response_format exclude each other", parameter="response_format"
                )
            grammar = partial(
                model.tool_text,
                params.callable_tools,
                required=params.must_call,
                parallel=params.parallel_tool_calls,
            )
        return await self._answer(request, params, form, adapter, [ids], ends, texts, grammar)

    async def complete(self, request: Request) -> Response:
        async with self._read(request, CompletionRequest) as params:
            model, adapter = self._model(params.model)
            prompts_sent = prompts_of(params.prompt)
            self._refuse_many(len(prompts_sent) * params.n)
            prompts = await self._prompts(request, model, prompts_sent, "prompt")
        form = Shape("text_completion", "cmpl-", params.model or model.name, model, params.logprobs)
        return await self._answer(request, params, form, adapter, prompts, model.ends, (), None)

    async def embed(self, request: Request) -> Response:
        async with self._read(request, EmbeddingsRequest) as params:
            model, adapter = self._model(params.model)
            width = model.decoder.config.hidden_size
            if params.dimensions not in (None, width):
                raise Refused(
                    400,
                    f"the embeddings of {model.name} have {width} dimensions",
                    parameter="dimensions",
                )
            texts = prompts_of(params.input)
            if len(texts) > MOST_INPUTS:
                problem = f"{len(texts):,} inputs in one request; at most {MOST_INPUTS}"
                raise Refused(400, problem, parameter="input")
            prompts = await self._prompts(request, model, texts, "input")
        self._refuse_ids(model, prompts, "input", new_tokens=0)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[list[list[float]] | End] = loop.create_future()

        def settle(result: list[list[float]] | End) -> None:
            if not arrived.done():
                arrived.set_result(result)

        def put(result: list[list[float]] | End) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result)

        work = Embedding(model, prompts, adapter, params.pooling, put)
        self._submit(lambda: self.engine.submit_work(work))
        try:
            result = await _unless_gone(request, arrived)
        finally:
            work.canceled = True
        if isinstance(result, End):
            raise failed(result)
        return JSONResponse(
            embedded(result, params, params.model or model.name, sum(map(len, prompts)))
        )

    async def _prompts(
        self, request: Request, model: Served, texts: Sequence[str | list[int]], parameter: str
    ) -> list[list[int]]:
        """The ids of texts, each measured before it is tokenized; ids stay as they are. Raises Refused."""
        for text in texts:
            if isinstance(text, str):
                self._measure(model, len(text.encode()), parameter)
        prompts = list[list[int]]()
        for text in texts:
            if not isinstance(text, str):
                prompts.append(list(text))
                continue
            encode = partial(model.tokenizer.encode_prompt, text)
            try:
                prompts.append(await self._work(request, lane_of(len(text.encode())), encode))
            except UserError as error:
                raise Refused(400, error.problem, parameter=parameter) from error
        return prompts

    def _refuse_ids(
        self, model: Served, prompts: Sequence[Sequence[int]], parameter: str, *, new_tokens: int
    ) -> None:
        """Raises Refused for prompts without tokens, with unknown ones, or that leave less room in the context."""
        for ids in prompts or [[]]:
            if not ids:
                raise Refused(400, f"the {parameter} is empty", parameter=parameter)
            if max(ids) >= model.decoder.config.vocab_size:
                raise Refused(
                    400, f"token {max(ids)} is not in the vocabulary", parameter=parameter
                )
            if len(ids) + new_tokens > model.context:
                problem = f"the {parameter} has {len(ids):,} tokens, which leaves no room in {self._context(model)}"
                raise Refused(400, problem, code="context_length_exceeded", parameter=parameter)

    def _submit(self, submit: Callable[[], None]) -> None:
        """Raises Refused where as many requests wait as may."""
        try:
            submit()
        except QueueFull as error:
            problem = f"{self.engine.waiting} requests are waiting; try again later"
            raise Refused(503, problem, code="queue_full") from error

    @asynccontextmanager
    async def _read(self, request: Request, kind: type[A]) -> AsyncIterator[A]:
        """The request, checked. Its size counts until the end of the block. Raises Refused."""
        if (
            request.headers.get("content-type", "").partition(";")[0].strip().lower()
            != "application/json"
        ):
            raise Refused(415, "the content type must be application/json")
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    async for piece in request.stream():
                        body += piece
                        self._body_bytes += len(piece)
                        if len(body) > self.limits.body_bytes:
                            raise Refused(
                                413, f"the request is larger than {self.limits.body_bytes:,} bytes"
                            )
                        if self._body_bytes > MOST_OPEN_BODIES * self.limits.body_bytes:
                            raise Refused(
                                503, "too many large requests; try again later", code="queue_full"
                            )
            except TimeoutError as error:
                raise Refused(
                    408, f"the request did not arrive within {BODY_SECONDS:g} seconds"
                ) from error
            parse = partial(parsed, kind, bytes(body))
            yield parse() if len(body) <= SHORT_BYTES else await self._work(request, "long", parse)
        finally:
            self._body_bytes -= len(body)

    async def _work(self, request: Request, lane: Lane, call: Callable[[], Result]) -> Result:
        """The result of a call in a thread, unless the client goes away. Raises Refused and ClientDisconnect."""
        return await _unless_gone(request, self.tokenizing.run(lane, call))

    def _measure(self, model: Served, num_bytes: int, parameter: str) -> None:
        """Raises Refused for a text that is too long whatever its tokens are, before it is tokenized."""
        if num_bytes > model.prompt_bytes:
            problem = (
                f"the prompt has {num_bytes:,} bytes, which is more than {self._context(model)}"
            )
            raise Refused(400, problem, code="context_length_exceeded", parameter=parameter)

    def _context(self, model: Served) -> str:
        """The context, and the option that raises it."""
        remark = (
            ", the model's own"
            if model.context == model.longest
            else "; --max-context of the server raises it"
        )
        return f"the context of {model.context:,} tokens{remark}"

    def _refuse_many(self, count: int) -> None:
        """Raises Refused for more completions than can ever wait and decode together."""
        limit = self.limits.slots + self.limits.queue
        if count > limit:
            problem = f"{count:,} completions in one request; this server takes at most {limit:,} (--max-queue)"
            raise Refused(400, problem, parameter="n")

    async def _answer(
        self,
        request: Request,
        params: GenerationRequest,
        form: Answer,
        adapter: str | None,
        prompts: list[list[int]],
        ends: Sequence[int],
        texts: Sequence[str],
        grammar: Callable[[], JsonText] | None,
    ) -> Response:
        model = form.model
        params = params.model_copy(
            update={k: v for k, v in self.defaults.items() if k not in params.model_fields_set}
        )
        must_follow = isinstance(params, ChatRequest) and params.must_call
        parameter = "tools"
        if (schema := schema_of(params)) is not None:
            grammar = partial(model.json_text, schema)
            must_follow = True
            parameter = "response_format"
        if grammar is not None and params.min_tokens:
            raise Refused(400, "min_tokens and JSON exclude each other", parameter="min_tokens")
        stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
        if len(stops) > MOST_STOPS:
            raise Refused(400, f"more than {MOST_STOPS} stop texts", parameter="stop")
        self._refuse_many(len(prompts) * params.n)
        if (max_tokens := params.most_tokens) is not None and max_tokens > self.limits.new_tokens:
            problem = f"max_tokens is {max_tokens:,}; this server generates at most {self.limits.new_tokens:,}"
            raise Refused(400, problem, parameter="max_tokens")
        self._refuse_ids(model, prompts, "prompt", new_tokens=1)
        if grammar is not None:
            ends = model.grammar_ends  # a grammar may end with any of these tokens
        if must_follow:
            texts = ()  # nothing but the grammar ends its text
        seed = secrets.randbits(63) if params.seed is None else params.seed % 2**63
        sampling = Sampling(
            max_new_tokens=params.most_tokens or self.limits.new_tokens,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            no_repeat_ngram_size=params.no_repeat_ngram_size,
            min_new_tokens=params.min_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            stop_ids=known_ids(*ends),
        )
        loop = asyncio.get_running_loop()
        arrived = asyncio.Queue[tuple[int, Piece | End]]()

        def put_at(index: int) -> Callable[[Piece | End], None]:
            def put(event: Piece | End) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(arrived.put_nowait, (index, event))

            return put

        constraints = await self._constraints(request, grammar, len(prompts) * params.n, parameter)
        jobs = [
            Job(
                model,
                ids,
                replace(sampling, seed=(seed + choice) % 2**63),
                (*stops, *texts),
                put_at(number * params.n + choice),
                adapter,
                form.top,
                constraints[number * params.n + choice],
            )
            for number, ids in enumerate(prompts)
            for choice in range(params.n)
        ]
        self._submit(lambda: self.engine.submit(jobs))
        usage = sum(len(ids) for ids in prompts)
        if params.stream:
            with_usage = bool((params.stream_options or {}).get("include_usage"))
            events = form.streamed(_events(arrived, jobs), usage, with_usage=with_usage)
            return StreamingResponse(
                events, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
            )
        try:
            return JSONResponse(
                await _unless_gone(request, form.whole(_events(arrived, jobs), len(jobs), usage))
            )
        finally:
            for job in jobs:
                job.canceled = True

    async def _constraints(
        self, request: Request, grammar: Callable[[], JsonText] | None, count: int, parameter: str
    ) -> "list[JsonText] | list[None]":
        """One for each completion. Raises Refused for a schema that is not supported."""
        if grammar is None:
            return [None] * count
        try:
            constraint = await self._work(request, "grammar", grammar)
        except UserError as error:
            raise Refused(400, error.problem, parameter=parameter) from error
        return [constraint, *(constraint.copy() for _ in range(count - 1))]


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """What the work returns. Raises ClientDisconnect, and cancels it, when its client goes away."""
    disconnect = asyncio.ensure_future(_disconnected(request))
    result = asyncio.ensure_future(work)
    try:
        await asyncio.wait((disconnect, result), return_when=asyncio.FIRST_COMPLETED)
        if result.done():
            return await result
        raise ClientDisconnect
    finally:
        for task in (disconnect, result):
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    arrived: "asyncio.Queue[tuple[int, Piece | End]]", jobs: Sequence[Job]
) -> AsyncIterator[tuple[int, Piece | End]]:
    """The engine's events of each completion. Ending it early frees the slots."""
    jobs_left = len(jobs)
    try:
        while jobs_left:
            index, event = await arrived.get()
            jobs_left -= isinstance(event, End)
            yield index, event
    finally:
        for job in jobs:
            job.canceled = True


def _refused(error: Refused) -> Response:
    later = {"Retry-After": str(RETRY_SECONDS)} if error.status == 503 else None
    return JSONResponse(error.body, error.status, later)


def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(
        error.body,
        error.status,
        headers={"Retry-After": str(RETRY_SECONDS)} if error.status == 503 else None,
    )


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(
        Refused(error.status_code, error.detail).body, error.status_code, headers=error.headers
    )


@final
class Guard:
    """Refuses requests that name another host, lack the token, or are too many at once. The page holds no secret.

    What is refused before its body has arrived ends its connection: nobody reads the rest.
    """

    def __init__(
        self, app: ASGIApp, token: str | None, hosts: Sequence[str], most_requests: int
    ) -> None:
        self.app = app
        self.token = token
        self.hosts = frozenset(hosts)
        self.most = most_requests
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = Body(receive, send)
        # The token comes first: a stranger learns nothing of a server, not even that it is busy.
        refused = self._stranger(scope)
        if refused is None and scope["path"] != "/health" and self.open >= self.most:
            refused = Refused(
                503, f"{self.open} requests are open; try again later", code="queue_full"
            )
        if refused is not None:
            await _refused(refused)(scope, body.receive, body.send)
            return
        self.open += 1
        try:
            await self.app(scope, body.receive, body.send)
        finally:
            self.open -= 1

    def _stranger(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        host = (
            host.rpartition(":")[0]
            if host.rpartition(":")[2].isdecimal() and not host.endswith("]")
            else host
        )
        if self.hosts and host not in self.hosts:
            return Refused(403, f"this server is not {host[:80]!r}")
        if self.token is not None and scope["path"] not in ("/", "/health"):
            client_token = headers.get("authorization", "").removeprefix("Bearer ").encode()
            if not hmac.compare_digest(client_token, self.token.encode()):
                return Refused(401, "wrong or missing token", code="invalid_api_key")
        return None


@final
class Body:
    """The messages of one request. An answer before its body has arrived drops a little of the rest, and closes."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._arrived = False

    async def receive(self) -> Event:
        event = await self._receive()
        if event["type"] != "http.request" or not event.get("more_body", False):
            self._arrived = True
        return event

    async def send(self, event: Event) -> None:
        if event["type"] == "http.response.start" and not self._arrived:
            await self._drain()
            if not self._arrived:
                MutableHeaders(scope=event)["Connection"] = "close"
        await self._send(event)

    async def _drain(self) -> None:
        """A connection that closes on unread data is reset, and its client may lose the answer."""
        dropped = 0
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self._arrived and dropped < DRAIN_BYTES:
                    dropped += len((await self.receive()).get("body", b""))
        except TimeoutError:
            return
