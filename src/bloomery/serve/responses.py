"""/v1/responses: its requests, as those of a chat."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

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
