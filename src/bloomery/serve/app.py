"""The HTTP side of the server: OpenAI's chat and completion endpoints, /v1/models, /health, /metrics and the page."""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Annotated, Any, Literal, TypeVar, cast, final

from pydantic import BaseModel, Field, StringConstraints, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bloomery.core.errors import UserError
from bloomery.data.examples import Message, Role
from bloomery.model.decoding import Sampling, known_ids
from bloomery.serve.engine import Chance, End, Engine, Job, Piece, QueueFull, Served

BODY_SECONDS = 30.0  # for a client to send its request
MOST_STOPS, MOST_CHOICES, MOST_TOP = 16, 16, 20
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
Json = dict[str, Any]
Text = Annotated[str, StringConstraints(max_length=2**21)]
Token = Annotated[int, Field(ge=0, lt=2**31)]


class Refused(Exception):
    """An answer other than 200, as OpenAI words it."""

    def __init__(self, status: int, problem: str, *, code: str | None = None, parameter: str | None = None) -> None:
        super().__init__(problem)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": problem, "type": kind, "param": parameter, "code": code}}


class TextFormat(BaseModel, extra="forbid", strict=True):
    type: Literal["text"]


class ObjectFormat(BaseModel, extra="forbid", strict=True):
    type: Literal["json_object"]


class NamedSchema(BaseModel, extra="forbid", strict=True):
    name: str = ""
    description: str | None = None
    content: Json = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(BaseModel, extra="forbid", strict=True):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class Asked(BaseModel, extra="forbid", strict=True):
    """The parameters of both endpoints. `top_k` to `min_tokens` are not OpenAI's, and named as in vLLM."""

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stop: Text | list[Text] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    user: str | None = None
    response_format: TextFormat | ObjectFormat | SchemaFormat | None = Field(None, discriminator="type")
    top_k: int | None = Field(None, ge=1)
    min_p: float = Field(0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0, allow_inf_nan=False)
    no_repeat_ngram_size: int = Field(0, ge=0, le=1000)
    min_tokens: int = Field(0, ge=0)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens


class Part(BaseModel, extra="forbid", strict=True):
    type: Literal["text"]
    text: Text


class Turn(BaseModel, extra="forbid", strict=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part]
    name: str | None = None


class ChatAsked(Asked):
    """Of /v1/chat/completions."""

    messages: list[Turn] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP)

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionAsked(Asked):
    """Of /v1/completions."""

    prompt: Text | list[Text] | list[Token] | list[list[Token]]
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    suffix: None = None


A = TypeVar("A", bound=Asked)


@final
class Server:
    """The endpoints over an engine. `token`: the one that clients must send; None: any local one is served."""

    def __init__(
        self, engine: Engine, *, token: str | None = None, defaults: Mapping[str, Any] | None = None
    ) -> None:  # fmt: skip
        self.defaults = dict(defaults or {})
        self.engine, self.limits, self.token, self.begun = engine, engine.limits, token, int(time.time())
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
            Route("/", self.page), Route("/health", self.health), Route("/metrics", self.metrics),
            Route("/v1/models", self.list_models), Route("/v1/models/{name:path}", self.one_model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
        ]  # fmt: skip
        handlers: Mapping[Any, Callable[[Request, Exception], Response]] = {
            Refused: _refusal, HTTPException: _http_error, ClientDisconnect: lambda *_: Response(status_code=499),
        }  # fmt: skip
        return Guard(Starlette(routes=routes, exception_handlers=handlers), self.token, hosts)

    async def page(self, _: Request) -> Response:
        text = files("bloomery.serve").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"})

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok" if self.engine.alive else "closing"}, 200 if self.engine.alive else 503)

    async def metrics(self, _: Request) -> Response:
        """In the text format of Prometheus."""
        lines = []
        for name, count in sorted(self.engine.counts.items()):
            ended = name.removeprefix("requests_")
            label = f'{{ended="{ended}"}}' if ended != name else ""
            lines.append(f"bloomery_{'requests' if label else name}_total{label} {count}")
        gauges = {"running": self.engine.running, "waiting": self.engine.waiting}
        lines += [f"bloomery_requests_{name} {value}" for name, value in gauges.items()]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def list_models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self.models]})

    async def one_model(self, request: Request) -> Response:
        self._model(request.path_params["name"])
        return JSONResponse(self._described(request.path_params["name"]))

    def _described(self, name: str) -> Json:
        model, adapter = self.models[name]
        facts = {"max_model_len": model.context, "parent": model.name if adapter else None,
                 "chat": model.form is not None}  # fmt: skip
        return {"id": name, "object": "model", "created": self.begun, "owned_by": "bloomery", **facts}

    def _model(self, name: str) -> tuple[Served, str | None]:
        if not name and len(self.engine.models) == 1:
            return self.engine.models[0], None
        if name not in self.models:
            known = ", ".join(self.models)
            raise Refused(404, f"no such model: {name[:80]!r}; served: {known}", code="model_not_found",
                          parameter="model")  # fmt: skip
        return self.models[name]

    async def chat(self, request: Request) -> Response:
        asked = await self._read(request, ChatAsked)
        model, adapter = self._model(asked.model)
        if model.form is None:
            problem = f"{model.name} has no chat template; use /v1/completions, or serve it with --template chatml"
            raise Refused(400, problem, parameter="messages")
        turns = [
            Message(cast(Role, "system" if turn.role == "developer" else turn.role),
                    turn.content if isinstance(turn.content, str) else "".join(part.text for part in turn.content))
            for turn in asked.messages
        ]  # fmt: skip
        try:
            ids = await run_in_threadpool(model.encode_chat, turns)
        except UserError as error:
            raise Refused(400, f"the chat template refuses this: {error.problem}", parameter="messages") from error
        top = asked.top_logprobs if asked.logprobs else None
        form = Shape("chat.completion", "chatcmpl-", asked.model or model.name, model, top)
        ends = (*model.form.stop_ids, *model.ends), model.form.stop_strings
        return await self._answer(request, asked, form, adapter, [ids], *ends)

    async def complete(self, request: Request) -> Response:
        asked = await self._read(request, CompletionAsked)
        model, adapter = self._model(asked.model)
        given = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
        several: list[Any] = [given] if given and isinstance(given[0], int) else given
        prompts = [
            await run_in_threadpool(model.tokenizer.encode_prompt, each) if isinstance(each, str) else list(each)
            for each in several
        ]
        form = Shape("text_completion", "cmpl-", asked.model or model.name, model, asked.logprobs)
        return await self._answer(request, asked, form, adapter, prompts, model.ends, ())

    async def _read(self, request: Request, kind: type[A]) -> A:
        """The request, checked. Raises Refused."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "the content type must be application/json")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for some in request.stream():
                    body += some
                    if len(body) > self.limits.body_bytes:
                        raise Refused(413, f"the request is larger than {self.limits.body_bytes:,} bytes")
        except TimeoutError as error:
            raise Refused(408, f"the request did not arrive within {BODY_SECONDS:g} seconds") from error
        try:
            return kind.model_validate_json(bytes(body))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            # Where a value may have several forms, pydantic names the one that it tried.
            place = ".".join(str(part) for part in first["loc"])[:120]
            unknown = first["type"] == "extra_forbidden"
            problem = f"unknown or unsupported parameter: {place}" if unknown else f"{place or 'body'}: {first['msg']}"
            raise Refused(400, problem, parameter=place or None) from error

    async def _answer(
        self, request: Request, asked: Asked, form: "Shape", adapter: str | None, prompts: list[list[int]],
        ends: Sequence[int], texts: Sequence[str],
    ) -> Response:  # fmt: skip
        model = form.model
        asked = asked.model_copy(update={k: v for k, v in self.defaults.items() if k not in asked.model_fields_set})
        schema: Json | None = None
        match asked.response_format:
            case ObjectFormat():
                schema = {"type": "object"}
            case SchemaFormat(json_schema=named):
                schema = named.content
        if schema is not None and asked.min_tokens:
            raise Refused(400, "min_tokens and JSON exclude each other", parameter="min_tokens")
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        if len(stops) > MOST_STOPS:
            raise Refused(400, f"more than {MOST_STOPS} stop texts", parameter="stop")
        if len(prompts) * asked.n > self.limits.slots + self.limits.queue:
            raise Refused(400, f"{len(prompts) * asked.n} completions in one request", parameter="n")
        if (most := asked.most_tokens) is not None and most > self.limits.new_tokens:
            problem = f"max_tokens is {most:,}; this server generates at most {self.limits.new_tokens:,}"
            raise Refused(400, problem, parameter="max_tokens")
        for ids in prompts or [[]]:
            if not ids:
                raise Refused(400, "the prompt is empty", parameter="prompt")
            if max(ids) >= model.decoder.config.vocab_size:
                raise Refused(400, f"token {max(ids)} is not in the vocabulary", parameter="prompt")
            if len(ids) >= model.context:
                problem = f"the prompt has {len(ids):,} tokens, and the context is {model.context:,}"
                raise Refused(400, problem, code="context_length_exceeded", parameter="prompt")
        seed = secrets.randbits(63) if asked.seed is None else asked.seed % 2**63
        sampling = Sampling(
            max_new_tokens=asked.most_tokens or self.limits.new_tokens, repetition_penalty=asked.repetition_penalty,
            frequency_penalty=asked.frequency_penalty, presence_penalty=asked.presence_penalty,
            no_repeat_ngram_size=asked.no_repeat_ngram_size, min_new_tokens=asked.min_tokens,
            temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, min_p=asked.min_p,
            stop_ids=known_ids(*ends),
        )  # fmt: skip
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece | End]]()

        def put_at(index: int) -> Callable[[Piece | End], None]:
            def put(event: Piece | End) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(arrived.put_nowait, (index, event))

            return put

        try:
            constraints = [
                None if schema is None else await run_in_threadpool(model.json_text, schema)
                for _ in range(len(prompts) * asked.n)
            ]  # fmt: skip
        except UserError as error:
            raise Refused(400, error.problem, parameter="response_format") from error
        jobs = [
            Job(model, ids, replace(sampling, seed=(seed + choice) % 2**63), (*stops, *texts),
                put_at(number * asked.n + choice), adapter, form.top, constraints[number * asked.n + choice])
            for number, ids in enumerate(prompts) for choice in range(asked.n)
        ]  # fmt: skip
        try:
            self.engine.submit(jobs)
        except QueueFull as error:
            problem = f"{self.engine.waiting} requests are waiting; try again later"
            raise Refused(503, problem, code="queue_full") from error
        usage = sum(len(ids) for ids in prompts)
        if asked.stream:
            wanted = bool((asked.stream_options or {}).get("include_usage"))
            events = form.streamed(_events(arrived, jobs), usage if wanted else None)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        gone = asyncio.create_task(_disconnected(request))
        done = asyncio.create_task(form.whole(_events(arrived, jobs), len(jobs), usage))
        try:
            await asyncio.wait((gone, done), return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                return JSONResponse(await done)
            raise ClientDisconnect
        finally:
            for task in (gone, done):
                task.cancel()
            for job in jobs:
                job.canceled = True


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(arrived: "asyncio.Queue[tuple[int, Piece | End]]", jobs: Sequence[Job]) -> AsyncIterator[
    tuple[int, Piece | End]
]:  # fmt: skip
    """The engine's events of each completion. Ending it early frees the slots."""
    left = len(jobs)
    try:
        while left:
            index, event = await arrived.get()
            left -= isinstance(event, End)
            yield index, event
    finally:
        for job in jobs:
            job.canceled = True


@final
class Shape:
    """How an endpoint words its answers. `top`: how many of the likeliest tokens to report; None: no
    log-probabilities.
    """

    def __init__(self, kind: str, prefix: str, name: str, model: Served, top: int | None) -> None:
        self.kind, self.model, self.chat, self.top = kind, model, kind == "chat.completion", top
        self.head = {"id": prefix + secrets.token_hex(12), "created": int(time.time()), "model": name}

    async def whole(self, events: AsyncIterator[tuple[int, Piece | End]], count: int, prompt_tokens: int) -> Json:
        """Raises Refused where a completion failed."""
        pieces: list[list[Piece]] = [[] for _ in range(count)]
        ends: dict[int, End] = {}
        async for index, event in events:
            if isinstance(event, Piece):
                pieces[index].append(event)
                continue
            if event.problem:
                raise _failed(event)
            ends[index] = event
        choices = []
        for index, parts in enumerate(pieces):
            text = "".join(part.text for part in parts)
            chances = [part.chance for part in parts if part.chance is not None]
            choice: Json = {"index": index, "finish_reason": ends[index].reason}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choices.append(choice | {"logprobs": self._logprobs(chances)})
        new = sum(end.tokens for end in ends.values())
        return {**self.head, "object": self.kind, "choices": choices, "usage": _usage(prompt_tokens, new)}

    async def streamed(
        self, events: AsyncIterator[tuple[int, Piece | End]], prompt_tokens: int | None
    ) -> AsyncIterator[str]:  # fmt: skip
        """Server-sent events. `prompt_tokens`: the last event reports the usage."""
        kind = "chat.completion.chunk" if self.chat else self.kind
        new, begun = 0, set[int]()

        def line(choices: list[Json], **more: Any) -> str:
            extra = {"usage": None} if prompt_tokens is not None else {}
            return f"data: {json.dumps({**self.head, 'object': kind, 'choices': choices, **extra, **more})}\n\n"

        async for index, event in events:
            reason, text, chances = None, "", list[Chance]()
            if isinstance(event, End):
                new += event.tokens
                if event.problem:
                    yield f"data: {json.dumps(_failed(event).body)}\n\n"
                    return
                reason = event.reason
            else:
                text, chances = event.text, [event.chance] if event.chance is not None else []
            choice: Json = {"index": index, "finish_reason": reason}
            if self.chat:
                role = {} if index in begun else {"role": "assistant"}
                choice["delta"] = role | ({"content": text} if reason is None else {})
            else:
                choice["text"] = text
            begun.add(index)
            yield line([choice | {"logprobs": self._logprobs(chances) if chances else None}])
        if prompt_tokens is not None:
            yield line([], usage=_usage(prompt_tokens, new))
        yield "data: [DONE]\n\n"

    def _logprobs(self, chances: Sequence[Chance]) -> Json | None:
        if self.top is None:
            return None
        if self.chat:
            return {"content": [_chance(each) | {"top_logprobs": list(map(_chance, each.top))} for each in chances],
                    "refusal": None}  # fmt: skip
        offsets, at = [], 0
        for each in chances:
            offsets.append(at)
            at += len(each.text)
        return {
            "tokens": [each.text for each in chances], "token_logprobs": [each.logprob for each in chances],
            "top_logprobs": [{top.text: top.logprob for top in each.top} for each in chances], "text_offset": offsets,
        }  # fmt: skip


def _chance(each: Chance) -> Json:
    return {"token": each.text, "logprob": max(each.logprob, -9999.0), "bytes": list(each.text.encode())}


def _usage(prompt_tokens: int, new: int) -> Json:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": new, "total_tokens": prompt_tokens + new}


def _failed(end: End) -> Refused:
    status = {"timeout": 408, "closed": 503}.get(end.reason, 500)
    return Refused(status, end.problem, code=end.reason)


def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error.body, error.status, headers={"Retry-After": "2"} if error.status == 503 else None)


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(Refused(error.status_code, error.detail).body, error.status_code, headers=error.headers)


@final
class Guard:
    """Refuses requests without the token, or that name another host. The page itself holds no secret."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: Sequence[str]) -> None:
        self.app, self.token, self.hosts = app, token, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        host = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
        refused = None
        if self.hosts and host not in self.hosts:
            refused = Refused(403, f"this server is not {host[:80]!r}")
        elif self.token is not None and scope["path"] not in ("/", "/health"):
            sent = headers.get("authorization", "").removeprefix("Bearer ").encode()
            if not hmac.compare_digest(sent, self.token.encode()):
                refused = Refused(401, "wrong or missing token", code="invalid_api_key")
        if refused is not None:
            await JSONResponse(refused.body, refused.status)(scope, receive, send)
            return
        await self.app(scope, receive, send)
