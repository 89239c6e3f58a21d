"""The HTTP side of the server: the endpoints of OpenAI and Anthropic, /health, /metrics and the page."""

import asyncio
import itertools
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar, final

from starlette.applications import Starlette
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
from starlette.types import ASGIApp

from bloomery.core import look
from bloomery.core.errors import UserError
from bloomery.data.chat.thoughts import answer_marks, has_thought, is_thinking
from bloomery.data.examples import Message
from bloomery.infer.grammar import JsonText
from bloomery.infer.sampling import Sampling, known_ids
from bloomery.serve.answers import Answer, ChatShape, CompletionShape, Events, failed
from bloomery.serve.embeddings import MOST_INPUTS, Embedding, EmbeddingsRequest, embedded
from bloomery.serve.engine import End, Engine, Job, Piece, QueueFull, Work
from bloomery.serve.guard import MESSAGES, Guard, http_error, refused
from bloomery.serve.kept import KeptResponses
from bloomery.serve.limits import Refused
from bloomery.serve.message_blocks import MessageShape
from bloomery.serve.messages import CountRequest, MessagesRequest
from bloomery.serve.parameters import B, Json, parsed
from bloomery.serve.pictures import picture_reference, refuse_count
from bloomery.serve.prompt_scores import PromptScores, Scores
from bloomery.serve.requests import (
    MOST_STOPS,
    MOST_TURNS,
    NAMELESS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    prompts_of,
    schema_of,
)
from bloomery.serve.response_items import ResponseShape
from bloomery.serve.responses import ResponsesRequest
from bloomery.serve.served import Served
from bloomery.serve.server_tools import ServedEpisode, ServerTools, refuse_misfits
from bloomery.serve.thoughts import AnswerForm
from bloomery.serve.tokenizing import SHORT_BYTES, Lane, Tokenizing, lane_of
from bloomery.serve.tools import AnswerRules

MOST_SCORES = 2**18  # log-probabilities of prompts in one answer
PING_SECONDS = 10.0  # of silence in a stream
PROMPT_END = 16  # tokens that show whether a prompt begins a thought
BODY_SECONDS = 30.0  # for a client to send its request
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
Result = TypeVar("Result")


@final
@dataclass(frozen=True)
class Conversation:
    """A conversation for a model: the ids of its prompt, and how the answer is read and restricted."""

    model: Served
    adapter: str | None
    ids: list[int]
    form: AnswerForm
    rules: AnswerRules | None  # None: any text
    episode: ServedEpisode | None = None  # of tools that the server calls

    @property
    def name(self) -> str:
        return self.adapter or self.model.name


@final
class Server:
    """The endpoints over an engine. `token`: the one that clients must send; None: any local one is served."""

    def __init__(
        self,
        engine: Engine,
        *,
        token: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        tools: ServerTools | None = None,
    ) -> None:
        """`tools`: those that conversations use which bring none of their own; they are closed with the server."""
        self.tools = tools
        self.defaults = dict(defaults or {})
        self.engine = engine
        self.limits = engine.limits
        self.token = token
        self.begun = int(time.time())
        self.tokenizing = Tokenizing(engine.limits.slots + engine.limits.queue)
        self.kept = KeptResponses()
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
            Route("/v1/responses/{name}", self.one_response, methods=["GET", "DELETE"]),
            Route(MESSAGES, self.message, methods=["POST"]),
            Route(f"{MESSAGES}/count_tokens", self.count, methods=["POST"]),
            Route("/v1/embeddings", self.embed, methods=["POST"]),
        ]
        handlers: Mapping[Any, Callable[[Request, Exception], Response]] = {
            Refused: refused,
            HTTPException: http_error,
            ClientDisconnect: lambda *_: Response(status_code=499),
        }
        return Guard(
            Starlette(routes=routes, exception_handlers=handlers),
            self.token,
            hosts,
            self.limits.requests,
        )

    def close(self) -> None:
        """Requests that wait to be tokenized end, and so do calls of tools."""
        self.tokenizing.close()
        if self.tools is not None:
            self.tools.close()

    async def page(self, _: Request) -> Response:
        text = files("bloomery.serve").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(
            text.replace("/* tokens */", look.tokens(), 1),
            headers={"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"},
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
        """In OpenAI's form with the fields of Anthropic's: a client reads those that it knows."""
        models = [self._described(name) for name in self.models]
        names = list(self.models)
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": models, **pages})

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
            "input_modalities": ["text"] if model.intake is None else ["text", "image"],
        }
        created = datetime.fromtimestamp(self.begun, UTC).isoformat().replace("+00:00", "Z")
        anthropic = {
            "type": "model",
            "display_name": name,
            "created_at": created,
            "max_input_tokens": model.context,
            "max_tokens": min(self.limits.new_tokens, model.context),
        }
        return {
            "id": name,
            "object": "model",
            "created": self.begun,
            "owned_by": "bloomery",
            **facts,
            **anthropic,
        }

    def _model(self, name: str) -> tuple[Served, str | None]:
        if name in self.models:
            return self.models[name]
        if name in NAMELESS and len(self.engine.models) == 1:
            return self.engine.models[0], None
        served_names = ", ".join(self.models)
        raise Refused(
            404,
            f"no such model: {name[:80]!r}; served: {served_names}",
            code="model_not_found",
            parameter="model",
        )

    async def chat(self, request: Request) -> Response:
        async with self._read(request, ChatRequest) as params:
            uses_tools = self.tools is not None and params.tools is None
            conversation = await self._encoded(request, params, uses_tools=uses_tools)
        top = params.top_logprobs if params.logprobs else None
        is_episode = conversation.episode is not None
        shape = ChatShape(
            conversation.name, conversation.model, top, conversation.form, is_episode=is_episode
        )
        return await self._reply(request, params, shape, conversation)

    async def respond(self, request: Request) -> Response:
        async with self._read(request, ResponsesRequest) as response_params:
            items = self._items(response_params)
            params = response_params.chat(items)
            uses_tools = self.tools is not None and response_params.tools is None
            conversation = await self._encoded(request, params, uses_tools=uses_tools)

        def keep(response: Json) -> None:
            if response_params.store:
                self.kept.keep(response, items)

        shape = ResponseShape(
            response_params,
            conversation.model,
            conversation.form,
            keep,
            is_episode=conversation.episode is not None,
        )
        return await self._reply(request, params, shape, conversation)

    def _items(self, params: ResponsesRequest) -> list[Json]:
        """Every item of the conversation, of earlier responses too. Raises Refused for those that are not kept."""
        earlier = params.previous_response_id
        items = [] if earlier is None else list(self.kept.conversation(earlier))
        for item in params.items:
            refers = item["type"] == "item_reference"
            items.append(self.kept.item(item["id"]) if refers else item)
        if len(items) > MOST_TURNS:
            problem = f"the conversation has {len(items):,} items; at most {MOST_TURNS:,}"
            raise Refused(400, problem, parameter="input")
        return items

    async def one_response(self, request: Request) -> Response:
        """A kept response; DELETE drops it."""
        name = request.path_params["name"]
        response = self.kept.of(name).response
        if request.method == "DELETE":
            self.kept.drop(name)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        return JSONResponse(response)

    async def message(self, request: Request) -> Response:
        async with self._read(request, MessagesRequest) as message_params:
            params = message_params.chat_of(self.limits.new_tokens)
            uses_tools = self.tools is not None and message_params.tools is None
            conversation = await self._encoded(request, params, uses_tools=uses_tools)
        shape = MessageShape(
            conversation.name,
            conversation.model,
            conversation.form,
            message_params.stop_sequences,
            is_episode=conversation.episode is not None,
        )
        return await self._reply(request, params, shape, conversation)

    async def count(self, request: Request) -> Response:
        async with self._read(request, CountRequest) as count_params:
            uses_tools = self.tools is not None and count_params.tools is None
            params = count_params.chat()
            conversation = await self._encoded(request, params, uses_tools=uses_tools)
            if conversation.episode is not None:
                conversation.episode.release()
        return JSONResponse({"input_tokens": len(conversation.ids)})

    async def _encoded(
        self, request: Request, params: ChatRequest, *, uses_tools: bool = False
    ) -> Conversation:
        """`uses_tools`: those of the server are offered."""
        model, adapter = self._model(params.model)
        if model.form is None:
            problem = f"{model.name} has no chat template; use /v1/completions, or serve it with --template chatml"
            raise Refused(400, problem, parameter="messages")
        variables = self._variables(model, params)
        messages = [turn.message() for turn in params.messages]
        messages, num_pictures = self._with_references(model, messages)
        offered = params.offered_tools
        num_bytes = sum(len(turn.content.encode()) for turn in messages)
        others = [[turn.calls for turn in messages], offered, variables]
        num_bytes += len(json.dumps(others).encode())
        num_bytes += sum(len((turn.thinking or "").encode()) for turn in messages)
        self._measure(model, num_bytes, "messages")

        episode = None
        if uses_tools and self.tools is not None and params.tool_choice != "none":
            refuse_misfits(params)
            offered = self.tools.schemas
            row = {"prompt": [turn.model_dump(exclude_none=True) for turn in params.messages]}
            seed = secrets.randbits(63) if params.seed is None else params.seed % 2**63
            begun = self.tools.begin(model, messages, row, seed, seconds=self.limits.seconds)
            episode = await begun
            messages = episode.messages
        try:
            conversation = await self._rendered(
                request,
                params,
                model,
                adapter,
                messages,
                offered,
                variables,
                num_pictures,
                num_bytes,
            )
        except BaseException:  # also where the client has gone, which cancels the request
            if episode is not None:
                episode.release()
            raise
        if episode is not None:
            episode.begin_answer(conversation.ids, variables)
        return replace(conversation, episode=episode)

    async def _rendered(
        self,
        request: Request,
        params: ChatRequest,
        model: Served,
        adapter: str | None,
        messages: Sequence[Message],
        offered: tuple[Json, ...],
        variables: Json,
        num_pictures: int,
        num_bytes: int,
    ) -> Conversation:
        """The conversation as token ids, and how its answer is read."""
        # How the template writes calls is found once, in the thread of grammars.
        lane: Lane = "pictures" if num_pictures else lane_of(num_bytes)
        tools = None
        try:
            if offered:
                tools = await self._work(request, "grammar", lambda: model.tools)
        except UserError as error:
            raise Refused(400, f"{error.problem} ({error.fix})", parameter="tools") from error
        try:
            encode = partial(model.encode_chat, messages, offered, lane, variables)
            ids = await self._work(request, lane, encode)
        except UserError as error:
            subject = "" if num_pictures else "the chat template refuses this: "
            raise Refused(400, subject + error.problem, parameter="messages") from error

        # The end of the prompt shows whether the answer begins within a thought.
        end = model.tokenizer.decode(ids[-PROMPT_END:])
        thoughts = model.thoughts
        if has_thought(end, thoughts):
            thoughts = None
        around = answer_marks(model.template)
        form = AnswerForm(tools, thoughts, is_thinking(end, thoughts), offered, around)
        schema = schema_of(params)
        rules = None
        if params.callable_tools or schema is not None:
            rules = AnswerRules(
                params.callable_tools,
                params.must_call,
                params.may_call_again,
                schema,
                thoughts,
                form.inside,
            )
        return Conversation(model, adapter, ids, form, rules)

    def _with_references(
        self, model: Served, messages: Sequence[Message]
    ) -> tuple[list[Message], int]:
        """The messages with what is read in place of the addresses of their pictures, and how many these are.

        Raises Refused for a model that reads text alone, for too many of them, and for what may not be read.
        """
        count = sum(len(message.pictures) for message in messages)
        if count and model.intake is None:
            problem = (
                f"{model.name} reads text alone: leave images out, or serve a vision-language model"
            )
            raise Refused(400, problem, code="images_not_supported", parameter="messages")
        refuse_count(count, self.limits)
        numbers = itertools.count(1)
        folder = self.limits.media_folder
        return [
            replace(
                message,
                pictures=tuple(
                    picture_reference(address, next(numbers), folder)
                    for address in message.pictures
                ),
            )
            for message in messages
        ], count

    def _variables(self, model: Served, params: ChatRequest) -> Json:
        """What the chat template gets. Raises Refused for a variable that the template does not have.

        `false` asks a template without the variable for nothing.
        """
        for name, value in (params.chat_template_kwargs or {}).items():
            if value is not False and not re.search(rf"\b{re.escape(name)}\b", model.template):
                problem = f"the chat template of {model.name} has no variable {name[:80]!r}"
                raise Refused(400, problem, parameter="chat_template_kwargs")
        return params.template_variables

    async def _reply(
        self, request: Request, params: ChatRequest, shape: Answer, conversation: Conversation
    ) -> Response:
        model = conversation.model
        assert model.form is not None
        rules = conversation.rules
        ends = (*model.form.stop_ids, *model.ends)
        if conversation.form.offered:
            ends = (*ends, *model.call_ends)
        if conversation.episode is not None:
            ends = (*ends, *conversation.episode.ends)
        texts = model.form.stop_strings
        grammar = None
        if rules is not None:
            grammar = partial(model.answer_text, rules)
            # Nothing but the grammar ends an answer that is not free.
            texts = () if rules.required or rules.schema is not None else texts
        parameter = "tools" if params.callable_tools else "response_format"
        try:
            return await self._answer(
                request,
                params,
                shape,
                conversation.adapter,
                [conversation.ids],
                ends,
                texts,
                grammar,
                parameter,
                conversation.episode,
            )
        except BaseException:  # also where the client has gone, which cancels the request
            if conversation.episode is not None:
                conversation.episode.release()
            raise

    async def complete(self, request: Request) -> Response:
        async with self._read(request, CompletionRequest) as params:
            model, adapter = self._model(params.model)
            if self.tools is not None and params.max_tokens != 0:
                problem = (
                    "this server calls tools, which a text without messages cannot name; use /v1/chat/completions,"
                    " /v1/responses or /v1/messages, or serve without --tools and --environment"
                )
                raise Refused(400, problem, parameter="prompt")
            prompts_sent = prompts_of(params.prompt)
            self._refuse_many(len(prompts_sent) * params.completions)
            prompts = await self._prompts(request, model, prompts_sent, "prompt")
        room = 0 if params.max_tokens == 0 else 1
        self._refuse_ids(model, prompts, "prompt", new_tokens=room)
        texts = [
            sent if isinstance(sent, str) else model.tokenizer.decode(sent) if params.echo else ""
            for sent in prompts_sent
        ]
        scores: list[Scores] | None = None
        if params.echo and params.logprobs is not None:
            top = params.logprobs
            num_scores = sum(map(len, prompts)) * params.n * (top + 1)
            if num_scores > MOST_SCORES:
                problem = f"echo with logprobs reports {num_scores:,} log-probabilities; at most {MOST_SCORES:,}"
                raise Refused(400, f"{problem}: send fewer prompts", parameter="logprobs")
            scores = await self._result(
                request, lambda put: PromptScores(model, prompts, adapter, top, put)
            )
        shape = CompletionShape(adapter or model.name, model, params, texts, prompts, scores)
        if params.max_tokens == 0:
            return JSONResponse(shape.unwritten(sum(map(len, prompts))))
        grammar = None
        if (schema := schema_of(params)) is not None:
            grammar = partial(model.json_text, schema)
        return await self._answer(
            request, params, shape, adapter, prompts, model.ends, (), grammar, "response_format"
        )

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
        pooling = params.pooling
        result: list[list[float]] = await self._result(
            request, lambda put: Embedding(model, prompts, adapter, pooling, put)
        )
        return JSONResponse(embedded(result, params, adapter or model.name, sum(map(len, prompts))))

    async def _result(
        self, request: Request, make: Callable[[Callable[[Result | End], None]], Work]
    ) -> Result:
        """What a work of the engine finds. Raises Refused, and ClientDisconnect."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[Result | End] = loop.create_future()

        def settle(result: Result | End) -> None:
            if not arrived.done():
                arrived.set_result(result)

        def put(result: Result | End) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result)

        work = make(put)
        self._submit(lambda: self.engine.submit_work(work))
        try:
            result = await _unless_gone(request, arrived)
        finally:
            work.canceled = True
        if isinstance(result, End):
            raise failed(result)
        return result

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
            # The text of an embedding is whole: what the tokenizer adds at its end belongs to it.
            tokenizer = model.tokenizer
            encoder = tokenizer.encode_whole if parameter == "input" else tokenizer.encode_prompt
            encode = partial(encoder, text)
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
    async def _read(self, request: Request, kind: type[B]) -> AsyncIterator[B]:
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
                        if self._body_bytes > self.limits.open_bytes:
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
        shape: Answer,
        adapter: str | None,
        prompts: list[list[int]],
        ends: Sequence[int],
        texts: Sequence[str],
        grammar: Callable[[], JsonText] | None,
        parameter: str,
        episode: ServedEpisode | None = None,
    ) -> Response:
        """`ends` and `texts` end an answer besides those of the request. `parameter`: the one behind the grammar."""
        model = shape.model
        params = params.model_copy(
            update={k: v for k, v in self.defaults.items() if k not in params.model_fields_set}
        )
        count = params.completions
        if grammar is not None and params.min_tokens:
            raise Refused(400, "min_tokens and JSON exclude each other", parameter="min_tokens")
        stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
        if len(stops) > MOST_STOPS:
            raise Refused(400, f"more than {MOST_STOPS} stop texts", parameter="stop")
        self._refuse_many(len(prompts) * count)
        if (max_tokens := params.most_tokens) is not None and max_tokens > self.limits.new_tokens:
            problem = f"max_tokens is {max_tokens:,}; this server generates at most {self.limits.new_tokens:,}"
            raise Refused(400, problem, parameter="max_tokens")
        self._refuse_ids(model, prompts, "prompt", new_tokens=1)
        if grammar is not None:
            ends = model.grammar_ends  # a grammar may end with any of these tokens
        biases = params.biases
        tokens_named = {
            "logit_bias": [token for token, _ in biases],
            "stop_token_ids": params.stop_token_ids,
        }
        for name, tokens in tokens_named.items():
            if not all(0 <= token < model.decoder.config.vocab_size for token in tokens):
                raise Refused(400, f"{name}: a token is not in the vocabulary", parameter=name)
        seed = secrets.randbits(63) if params.seed is None else params.seed % 2**63
        sampling = Sampling(
            max_new_tokens=params.most_tokens or self.limits.new_tokens,
            logit_bias=biases,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            no_repeat_ngram_size=params.no_repeat_ngram_size,
            min_new_tokens=params.min_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            stop_ids=known_ids(*ends, *params.stop_token_ids),
        )
        loop = asyncio.get_running_loop()
        arrived = asyncio.Queue[tuple[int, Piece | End]]()

        def put_at(index: int) -> Callable[[Piece | End], None]:
            def put(event: Piece | End) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(arrived.put_nowait, (index, event))

            return put

        constraints = await self._constraints(request, grammar, len(prompts) * count, parameter)
        jobs = [
            Job(
                model,
                ids,
                replace(sampling, seed=(seed + choice) % 2**63),
                (*stops, *texts),
                put_at(number * count + choice),
                adapter,
                shape.top,
                constraints[number * count + choice],
            )
            for number, ids in enumerate(prompts)
            for choice in range(count)
        ]
        self._submit(lambda: self.engine.submit(jobs))
        usage = sum(len(ids) for ids in prompts)
        events: Events = _events(arrived, jobs)
        if episode is not None:
            events = episode.events(self.engine, arrived, jobs[0])
        if params.stream:
            with_usage = params.stream_options is not None and params.stream_options.include_usage
            lines = shape.streamed(events, usage, with_usage=with_usage)
            return StreamingResponse(
                lines if shape.ping is None else kept_alive(lines, shape.ping),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-store"},
            )
        try:
            return JSONResponse(await _unless_gone(request, shape.whole(events, len(jobs), usage)))
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


async def kept_alive(lines: AsyncIterator[str], ping: str) -> AsyncIterator[str]:
    """The lines, and a ping in every silence between them, such as that in which a long prompt is read."""
    following = asyncio.ensure_future(_next(lines))
    try:
        while True:
            await asyncio.wait((following,), timeout=PING_SECONDS)
            if not following.done():
                yield ping
                continue
            line = following.result()
            if line is None:
                return
            following = asyncio.ensure_future(_next(lines))
            yield line
    finally:
        # Where the client goes away, what waits for a line ends with it, and frees the slot.
        following.cancel()


async def _next(lines: AsyncIterator[str]) -> str | None:
    return await anext(lines, None)


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
