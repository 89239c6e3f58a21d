"""/v1/responses: its requests, as those of a chat, and its answers, whole or as events."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, final

from pydantic import BaseModel, BeforeValidator, Field

from bloomery.data.chat.deltas import Delta
from bloomery.data.chat.tools import ToolCall
from bloomery.serve.answers import Events, chat_chance, failed
from bloomery.serve.engine import Chance, End, Piece, Step
from bloomery.serve.limits import Refused
from bloomery.serve.parameters import Body, Json, validated
from bloomery.serve.requests import (
    MOST_TOOLS,
    MOST_TOP,
    MOST_TURNS,
    Address,
    ChatRequest,
    Detail,
    Effort,
    FunctionName,
    ObjectFormat,
    Text,
    TextFormat,
    TopK,
    Verbosity,
    refuse_media,
    refuse_other_tools,
)
from bloomery.serve.served import Served
from bloomery.serve.server_tools import sent_id
from bloomery.serve.thoughts import AnswerForm
from bloomery.train.rl.tools import ToolResult

ITEMS = (
    *("message", "function_call", "function_call_output", "mcp_call"),
    *("reasoning", "item_reference"),
)
SERVER_LABEL = (
    "tools"  # of the tools that this server calls, where OpenAI's has the label of an MCP server
)
LOGPROBS = "message.output_text.logprobs"
# What answers may include of tools that this server does not have, or of what it never writes.
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)


def refuse_file(value: object) -> object:
    if value is not None:
        raise ValueError("files are not kept; send the picture as a data URL in image_url")
    return value


class ItemPart(BaseModel, extra="ignore", strict=True):
    """Clients send answers back as they came: what else a part holds is no text."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: Text = ""
    refusal: Text = ""


class ItemPicture(Body):
    type: Literal["input_image"]
    image_url: Address
    detail: Detail | None = None
    file_id: Annotated[None, BeforeValidator(refuse_file)] = None


Parts = Annotated[
    Text | list[Annotated[ItemPart | ItemPicture, Field(discriminator="type")]],
    BeforeValidator(refuse_media("input_image")),
]


class MessageItem(BaseModel, extra="ignore", strict=True):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts


class CallItem(BaseModel, extra="ignore", strict=True):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: Text = ""


class OutputItem(BaseModel, extra="ignore", strict=True):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ServerCallError(BaseModel, extra="ignore", strict=True):
    content: Any = None


class ServerCallItem(BaseModel, extra="ignore", strict=True):
    """A call that the assistant made, and what the server answered. Calls of one `turn` were made together."""

    type: Literal["mcp_call"]
    id: str
    name: FunctionName
    arguments: Text = ""
    output: Text | None = None
    error: Text | ServerCallError | None = None
    turn: int | None = None


class ReasoningText(BaseModel, extra="ignore", strict=True):
    text: Text


class ReasoningItem(BaseModel, extra="ignore", strict=True):
    """A thought of the assistant."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None


class ReferenceItem(BaseModel, extra="ignore", strict=True):
    """An item of a response that the server keeps."""

    type: Literal["item_reference"]
    id: str


def typed_item(value: object) -> object:
    """The item with its type, which a message may leave out. Raises ValueError for other items, by name."""
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind is None:
        return {**value, "type": "message" if "role" in value else "item_reference"}
    if isinstance(kind, str) and kind not in ITEMS:
        raise ValueError(f"an item of type {kind[:40]!r} is not supported")
    return value


Item = Annotated[
    Annotated[
        MessageItem | CallItem | OutputItem | ServerCallItem | ReasoningItem | ReferenceItem,
        Field(discriminator="type"),
    ],
    BeforeValidator(typed_item),
]


class FlatSchema(Body):
    """As in `response_format`, but for the level of `json_schema`."""

    type: Literal["json_schema"]
    name: str = ""
    description: str | None = None
    content: Json = Field(alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    format: TextFormat | ObjectFormat | FlatSchema | None = Field(None, discriminator="type")
    verbosity: Verbosity | None = None


class FlatFunction(Body):
    """As in `tools` of a chat, but for the level of `function`."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: Json | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: Any = None  # of the result, which the client makes

    def chat(self) -> Json:
        function = self.model_dump(
            include={"name", "description", "parameters", "strict"}, exclude_none=True
        )
        return {"type": "function", "function": function}


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1, max_length=MOST_TOOLS)


class Reasoning(Body):
    """Hints, which the chat template gets: thoughts are never summarized."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Any = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool = False


class ResponsesRequest(Body):
    """`seed` to `repetition_penalty` are not OpenAI's."""

    model: str = ""
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MOST_TURNS)]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0.0, le=1.0, allow_inf_nan=False)
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP)
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    tools: list[Annotated[FlatFunction, BeforeValidator(refuse_other_tools)]] | None = Field(
        None, max_length=MOST_TOOLS
    )
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = (
        None
    )
    parallel_tool_calls: bool = True
    include: list[Literal[INCLUDABLE]] | None = None  # type: ignore[valid-type]  # a constant
    metadata: dict[str, str] | None = None
    user: str | None = None
    store: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    top_k: TopK = None
    min_p: float | None = Field(None, ge=0.0, le=1.0, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0, allow_inf_nan=False)
    chat_template_kwargs: Json | None = None

    @property
    def reports_logprobs(self) -> bool:
        return self.top_logprobs > 0 or LOGPROBS in (self.include or ())

    @property
    def items(self) -> list[Json]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [item.model_dump() for item in self.input]

    def chat(self, conversation: Sequence[Json]) -> ChatRequest:
        """The same request of /v1/chat/completions, after the items of a conversation. Raises Refused."""
        turns = turns_of(conversation)
        if self.instructions is not None:
            turns.insert(0, {"role": "system", "content": self.instructions})
        if not turns:
            raise Refused(400, "input: the conversation has no message", parameter="input")
        request: Json = {
            "messages": turns,
            "logprobs": self.reports_logprobs,
            "top_logprobs": self.top_logprobs,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._format(),
            "tools": None if self.tools is None else [tool.chat() for tool in self.tools],
            "tool_choice": self._choice(),
            "verbosity": None if self.text is None else self.text.verbosity,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        shared_names = (
            "model",
            "stream",
            "temperature",
            "top_p",
            "parallel_tool_calls",
            "seed",
            "top_k",
            "min_p",
            "repetition_penalty",
            "chat_template_kwargs",
        )
        return validated(
            ChatRequest, request | {name: getattr(self, name) for name in shared_names}
        )

    def _format(self) -> Json | None:
        form = None if self.text is None else self.text.format
        if isinstance(form, FlatSchema):
            schema = {"name": form.name, "schema": form.content, "strict": form.strict}
            return {"type": "json_schema", "json_schema": schema}
        return None if form is None else form.model_dump()

    def _choice(self) -> object:
        match self.tool_choice:
            case NamedFunction(name=name):
                return {"type": "function", "function": {"name": name}}
            case AllowedFunctions(mode=mode, tools=tools):
                named = [{"type": "function", "function": {"name": tool.name}} for tool in tools]
                return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        return self.tool_choice


def turns_of(items: Sequence[Json]) -> list[Json]:
    """Items as the messages of a chat: a thought, a message and calls that follow each other are one turn."""
    turns = list[Json]()
    thought: str | None = None
    last_turn: int | None = None  # of calls that the server answered
    calling: Json = {}
    for item in items:
        if item["type"] != "mcp_call":
            last_turn = None
        match item["type"]:
            case "mcp_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["id"], "type": "function", "function": function}
                if last_turn is None or item.get("turn") != last_turn:
                    if thought is not None or not turns or turns[-1]["role"] != "assistant":
                        turns.append({"role": "assistant", "reasoning_content": thought})
                        thought = None
                    calling = turns[-1]
                    last_turn = item.get("turn")
                calling.setdefault("tool_calls", []).append(call)
                content = item.get("output")
                if content is None:
                    content = _error_text(item.get("error"))
                turns.append({"role": "tool", "tool_call_id": item["id"], "content": content})
            case "reasoning":
                parts = item.get("content") or item.get("summary") or []
                thought = (thought or "") + "".join(part["text"] for part in parts)
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                if thought is not None or not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant", "reasoning_content": thought})
                    thought = None
                turns[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = _content_of(item["output"])
                turns.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
            case _:
                turn = {"role": item["role"], "content": _content_of(item["content"])}
                if item["role"] == "assistant" and thought is not None:
                    turn["reasoning_content"] = thought
                thought = None
                turns.append(turn)
    return turns


def _content_of(content: str | list[Json]) -> str | list[Json]:
    """Of a turn of a chat: one text, or where there are pictures, parts."""
    if isinstance(content, str):
        return content
    if not any(part["type"] == "input_image" for part in content):
        return "".join(map(_text_of, content))
    return [
        {"type": "image_url", "image_url": part["image_url"]}
        if part["type"] == "input_image"
        else {"type": "text", "text": _text_of(part)}
        for part in content
    ]


def _error_text(error: str | Json | None) -> str:
    content = error.get("content") if isinstance(error, dict) else error
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _text_of(part: Json) -> str:
    return part.get("text") or part.get("refusal") or ""


@final
class ResponseShape:
    """How /v1/responses words one answer. `keep`: gets the response at its end. `is_episode`: the server calls the
    tools; then their calls and results are items of the answer, as those of an MCP server.
    """

    def __init__(
        self,
        params: ResponsesRequest,
        model: Served,
        form: AnswerForm,
        keep: Callable[[Json], None],
        *,
        is_episode: bool = False,
    ) -> None:
        self.is_episode = is_episode
        self.params = params
        self.model = model
        self.ping: str | None = None
        self.form = form
        self.keep = keep
        self.top = params.top_logprobs if params.reports_logprobs else None
        self.id = f"resp_{secrets.token_hex(24)}"
        self.created = int(time.time())

    async def whole(self, events: Events, count: int, prompt_tokens: int) -> Json:
        """Raises Refused where the completion failed."""
        assert count == 1
        async for event in self._written(events, prompt_tokens):
            if isinstance(event, End):
                raise failed(event)
            if event["type"] in ("response.completed", "response.incomplete"):
                response: Json = event["response"]
                return response
        raise Refused(500, "the response did not end")

    async def streamed(
        self, events: Events, prompt_tokens: int, *, with_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events, as the `openai` client reads them. The last one always reports the usage."""
        del with_usage
        number = 0
        created = self._response([], None, prompt_tokens)
        async for event in self._written(events, prompt_tokens):
            if isinstance(event, End):
                error = failed(event).body["error"]
                details = {"code": "server_error", "message": error["message"]}
                response = {**created, "status": "failed", "error": details}
                event = {"type": "response.failed", "response": response}
            numbered = {**event, "sequence_number": number}
            number += 1
            yield f"event: {event['type']}\ndata: {json.dumps(numbered)}\n\n"

    async def _written(self, events: Events, prompt_tokens: int) -> AsyncIterator[Json | End]:
        """Every event of the answer in turn; the end of a completion that failed."""
        created = self._response([], None, prompt_tokens)
        yield {"type": "response.created", "response": created}
        yield {"type": "response.in_progress", "response": created}
        parser = self.form.parser()
        output = Output()
        async for _, event in events:
            if isinstance(event, Step):
                called = [
                    (sent_id(self.form.tools, call), call, result) for call, result in event.called
                ]
                rest = self._shown(parser.flush())
                for written in (*output.push(rest, None), *output.push_called(called)):
                    yield written
                parser = self.form.parser()
                continue
            if isinstance(event, Piece):
                parts = self._shown(parser.push(event.text))
                for written in output.push(parts, event.chance):
                    yield written
                continue
            if event.problem:
                yield event
                return
            for written in output.push(self._shown(parser.flush()), None):
                yield written
            status = "completed" if event.reason == "stop" else "incomplete"
            for written in output.end(status):
                yield written
            response = self._response(output.items, event, prompt_tokens)
            self.keep(response)
            yield {"type": f"response.{status}", "response": response}

    def _shown(self, parts: Sequence[Delta]) -> list[Delta]:
        """Without calls that the server makes: they come with their results."""
        return [part for part in parts if part.call is None or not self.is_episode]

    def _response(self, output: Sequence[Json], end: End | None, prompt_tokens: int) -> Json:
        """`end`: None while it is written."""
        status = "in_progress"
        usage = None
        reason = None
        if end is not None:
            status = "completed" if end.reason == "stop" else "incomplete"
            reason = None if end.reason == "stop" else {"reason": "max_output_tokens"}
            usage = {
                "input_tokens": prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": end.tokens,
                "output_tokens_details": {"reasoning_tokens": self._thought_tokens(output)},
                "total_tokens": prompt_tokens + end.tokens,
            }
        params = self.params
        text: Json = {"format": {"type": "text"}}
        if params.text is not None:
            text |= params.text.model_dump(by_alias=True, exclude_none=True)
        reasoning = None if params.reasoning is None else params.reasoning.model_dump()
        choice = params.tool_choice
        more = {"episode": end.episode} if self.is_episode and end is not None else {}
        return {
            **more,
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None if end is None else int(time.time()),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "instructions": params.instructions,
            "max_output_tokens": params.max_output_tokens,
            "max_tool_calls": None,
            "metadata": params.metadata or {},
            "model": params.model or self.model.name,
            "output": list(output),
            "parallel_tool_calls": params.parallel_tool_calls,
            "previous_response_id": params.previous_response_id,
            "prompt_cache_key": params.prompt_cache_key,
            "reasoning": reasoning or {"effort": None, "summary": None},
            "safety_identifier": params.safety_identifier,
            "service_tier": "default",
            "store": params.store,
            "temperature": params.temperature,
            "text": text,
            "tool_choice": choice.model_dump() if isinstance(choice, Body) else choice or "auto",
            "tools": [_described(tool) for tool in params.tools or ()],
            "top_logprobs": params.top_logprobs,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": params.user,
        }

    def _thought_tokens(self, output: Sequence[Json]) -> int:
        thoughts = [item["content"][0]["text"] for item in output if item["type"] == "reasoning"]
        return sum(len(self.model.tokenizer.encode(thought)) for thought in thoughts)


def _described(tool: FlatFunction) -> Json:
    fields = {"type", "name", "description", "parameters", "strict"}
    return tool.model_dump(include=fields)


@final
class Output:
    """Mutable: the items of a response while they are written."""

    def __init__(self) -> None:
        self.items = list[Json]()
        self._open = False  # whether the last item is still written
        self._chances = list[Chance]()  # of text that is held back
        self._turns = 0  # that the server answered

    def push(self, parts: Sequence[Delta], chance: Chance | None) -> Iterator[Json]:
        """The events of new parts of the answer. `chance`: of the token that they came with."""
        if chance is not None:
            self._chances.append(chance)
        for part in parts:
            if part.name is not None:
                yield from self._begin_call(part)
            elif part.call is not None:
                yield from self._continue_call(part.arguments)
            elif part.thought:
                yield from self._begin("reasoning", "rs_")
                yield from self._continue_text(part.thought)
            elif part.content:
                yield from self._begin("message", "msg_")
                yield from self._continue_text(part.content)

    def push_called(self, called: Sequence[tuple[str, ToolCall, ToolResult]]) -> Iterator[Json]:
        """The events of calls of one turn that the server has made, with their results. Each has an id."""
        self._turns += 1
        self._chances.clear()
        for id_, call, result in called:
            yield from self._close("completed")
            fields: Json = {"server_label": SERVER_LABEL, "name": call.name, "turn": self._turns}
            results: Json = {"arguments": "", "output": None, "error": None}
            begun = {"id": id_, "type": "mcp_call", "status": "in_progress"}
            yield from self._add({**begun, **fields, **results})
            self._open = False
            item = self.items[-1]
            place = {"item_id": id_, "output_index": len(self.items) - 1}
            yield {"type": "response.mcp_call.in_progress", **place}
            item["arguments"] = call.arguments
            arguments = {"type": "response.mcp_call_arguments.delta", "delta": call.arguments}
            yield {**arguments, **place}
            done = {"type": "response.mcp_call_arguments.done", "arguments": call.arguments}
            yield {**done, **place}
            if result.failed:
                item["error"] = {"type": "mcp_tool_execution_error", "content": result.text}
            else:
                item["output"] = result.text
            item["status"] = "failed" if result.failed else "completed"
            yield {"type": f"response.mcp_call.{item['status']}", **place}
            yield {
                "type": "response.output_item.done",
                "output_index": place["output_index"],
                "item": item,
            }

    def end(self, status: str) -> Iterator[Json]:
        """The events at the end of the answer, which has at least an empty message."""
        if not self.items:
            yield from self._begin("message", "msg_")
        yield from self._close(status)

    def _begin(self, kind: str, prefix: str) -> Iterator[Json]:
        """Opens a message or a thought, unless the last item is one."""
        if self._open and self.items[-1]["type"] == kind:
            return
        yield from self._close("completed")
        item: Json = {"id": prefix + secrets.token_hex(24), "type": kind, "status": "in_progress"}
        fields: Json = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        yield from self._add({**item, **fields, "content": []})
        part = _part(kind)
        self.items[-1]["content"].append(part)
        yield {"type": "response.content_part.added", **self._place(), "part": dict(part)}

    def _begin_call(self, part: Delta) -> Iterator[Json]:
        yield from self._close("completed")
        self._chances.clear()
        item = {
            "id": f"fc_{secrets.token_hex(24)}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": part.id,
            "name": part.name,
            "arguments": "",
        }
        yield from self._add(item)

    def _add(self, item: Json) -> Iterator[Json]:
        self._open = True
        self.items.append(item)
        copy: Json = {**item, "content": []} if "content" in item else dict(item)
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": copy,
        }

    def _continue_text(self, text: str) -> Iterator[Json]:
        item = self.items[-1]
        part = item["content"][0]
        part["text"] += text
        delta = {**self._place(), "delta": text}
        if item["type"] == "reasoning":
            self._chances.clear()
            yield {"type": "response.reasoning_text.delta", **delta}
            return
        logprobs = [chat_chance(chance) for chance in self._chances]
        self._chances.clear()
        part["logprobs"] += logprobs
        yield {"type": "response.output_text.delta", **delta, "logprobs": logprobs}

    def _continue_call(self, arguments: str) -> Iterator[Json]:
        self._chances.clear()
        item = self.items[-1]
        item["arguments"] += arguments
        yield {
            "type": "response.function_call_arguments.delta",
            "item_id": item["id"],
            "output_index": len(self.items) - 1,
            "delta": arguments,
        }

    def _close(self, status: str) -> Iterator[Json]:
        """Ends the item that is still written, if there is one."""
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item["status"] = status
        output_index = len(self.items) - 1
        if item["type"] == "function_call":
            yield {
                "type": "response.function_call_arguments.done",
                "item_id": item["id"],
                "output_index": output_index,
                "name": item["name"],
                "arguments": item["arguments"],
            }
        else:
            part = item["content"][0]
            done = {**self._place(), "text": part["text"]}
            if item["type"] == "reasoning":
                yield {"type": "response.reasoning_text.done", **done}
            else:
                yield {"type": "response.output_text.done", **done, "logprobs": part["logprobs"]}
            yield {"type": "response.content_part.done", **self._place(), "part": part}
        yield {"type": "response.output_item.done", "output_index": output_index, "item": item}

    def _place(self) -> Json:
        return {
            "item_id": self.items[-1]["id"],
            "output_index": len(self.items) - 1,
            "content_index": 0,
        }


def _part(kind: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
