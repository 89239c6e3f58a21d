"""/v1/messages, the API of Anthropic: its requests, as those of a chat."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from bloomery.serve.limits import Refused
from bloomery.serve.parameters import Body, Json, validated
from bloomery.serve.requests import (
    MOST_STOPS,
    MOST_TOOLS,
    MOST_TURNS,
    Address,
    ChatRequest,
    Effort,
    FunctionName,
    Text,
    TopK,
    refuse_media,
)

BLOCKS = (
    *("text", "image", "tool_use", "tool_result", "thinking"),
    *("mcp_tool_use", "mcp_tool_result"),
)
SERVER_NAME = (
    "tools"  # of the tools that this server calls, where Anthropic's has the name of an MCP server
)


class TextBlock(Body):
    type: Literal["text"]
    text: Text
    cache_control: Any = None
    citations: Any = None


class Base64Source(Body):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Address

    @property
    def address(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class AddressSource(Body):
    type: Literal["url"]
    url: Address

    @property
    def address(self) -> str:
        return self.url


def known_source(source: object) -> object:
    """Raises ValueError for a source that is not supported, in words that name it."""
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(kind, str) and kind not in ("base64", "url"):
        raise ValueError(f"a source of type {kind[:40]!r} is not supported; send base64")
    return source


class PictureBlock(Body):
    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source | AddressSource, Field(discriminator="type")],
        BeforeValidator(known_source),
    ]
    cache_control: Any = None


Shown = TextBlock | PictureBlock


class CallBlock(Body):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: Json
    cache_control: Any = None
    caller: Any = None


def known_blocks(content: object) -> object:
    """Raises ValueError for a block that is not supported, in words that name it."""
    refuse_media("image")(content)
    for block in content if isinstance(content, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in BLOCKS:
            raise ValueError(f"a block of type {kind[:40]!r} is not supported")
    return content


class ResultBlock(Body):
    """What a called function returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        Text | list[Annotated[Shown, Field(discriminator="type")]] | None,
        BeforeValidator(known_blocks),
    ] = None
    is_error: bool = False
    cache_control: Any = None


class ServerCallBlock(CallBlock):
    """A call that the assistant made and the server answered."""

    type: Literal["mcp_tool_use"]  # type: ignore[assignment]  # another one
    server_name: str = SERVER_NAME


class ServerResultBlock(ResultBlock):
    type: Literal["mcp_tool_result"]  # type: ignore[assignment]  # another one


class ThoughtBlock(Body):
    type: Literal["thinking"]
    thinking: Text
    signature: Any = None


Block = Annotated[
    Shown | CallBlock | ResultBlock | ServerCallBlock | ServerResultBlock | ThoughtBlock,
    Field(discriminator="type"),
]


class MessageTurn(Body):
    """A system message in the middle of a conversation has the role `system`."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Text | list[Block], BeforeValidator(known_blocks)]


def refuse_own_tools(tool: object) -> object:
    """Raises ValueError for a tool of Anthropic's servers, or one whose schema only its models know."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise ValueError(
            f"a tool of type {kind[:40]!r} is not supported; send tools with an input_schema"
        )
    return tool


class MessageTool(Body):
    """`eager_input_streaming`: arguments are streamed as they are written."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: Text | None = None
    input_schema: Json
    strict: bool | None = None
    cache_control: Any = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Json] = Field([], max_length=0)

    def chat(self) -> Json:
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        return {"type": "function", "function": function}


class ToolChoice(Body):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a name belongs to the type tool, and to no other")
        return self

    @property
    def chat(self) -> object:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class Thinking(Body):
    """Only `disabled` reaches the chat template: a template that has thoughts writes them unless it is told not to."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    content: Json = Field(alias="schema")


class OutputConfig(Body):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """Of /v1/messages/count_tokens. Parameters of an answer do not change the count."""

    model: str = ""
    messages: list[MessageTurn] = Field(min_length=1, max_length=MOST_TURNS)
    system: Text | list[TextBlock] | None = None
    tools: list[Annotated[MessageTool, BeforeValidator(refuse_own_tools)]] | None = Field(
        None, max_length=MOST_TOOLS
    )
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: Json | None = None

    def chat(self, **more: Any) -> ChatRequest:
        """The same request of /v1/chat/completions. Raises Refused."""
        if self.messages[-1].role == "assistant":
            problem = (
                "messages: the last message is the assistant's, and this server continues none"
            )
            raise Refused(400, f"{problem}; end with one of the user", parameter="messages")
        turns = list[Json]()
        if self.system:
            turns.append({"role": "system", "content": _text_of(self.system)})
        for message in self.messages:
            turns += _turns_of(message)
        choice = self.tool_choice
        config = self.output_config or OutputConfig()
        form = config.format or self.output_format
        schema = None if form is None else {"name": "answer", "schema": form.content}
        variables = self.chat_template_kwargs or {}
        if self.thinking is not None and self.thinking.type == "disabled":
            variables = {"enable_thinking": False, "thinking": False, **variables}
        request: Json = {
            "model": self.model,
            "messages": turns,
            "tools": None if self.tools is None else [tool.chat() for tool in self.tools],
            "tool_choice": None if choice is None else choice.chat,
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "response_format": schema and {"type": "json_schema", "json_schema": schema},
            "reasoning_effort": config.effort,
            "chat_template_kwargs": variables or None,
        }
        return validated(ChatRequest, request | more)


class MessagesRequest(CountRequest):
    """Of /v1/messages. `min_p` to `repetition_penalty` are not Anthropic's."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[Text] = Field([], max_length=MOST_STOPS)
    stream: bool = False
    temperature: float = Field(1.0, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: TopK = None
    min_p: float = Field(0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0, allow_inf_nan=False)

    def chat_of(self, most_tokens: int) -> ChatRequest:
        """The same request of /v1/chat/completions, of no more tokens than the server generates. Raises Refused.

        Anthropic's clients must send a limit, and most send one that their models can reach alone; an answer that ends
        at the server's limit reports it as `stop_reason: max_tokens`.
        """
        sampling = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")
        sent = {name: getattr(self, name) for name in sampling if name in self.model_fields_set}
        return self.chat(
            max_tokens=min(self.max_tokens, most_tokens),
            stop=self.stop_sequences,
            stream=self.stream,
            **sent,
        )


def _text_of(content: str | Sequence[TextBlock]) -> str:
    """Blocks are paragraphs."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _content_of(content: str | Sequence[Shown]) -> str | list[Json]:
    """Of a turn of a chat: one text, or where there are pictures, parts."""
    if isinstance(content, str):
        return content
    parts = list[Json]()
    for is_text, blocks in groupby(content, lambda block: isinstance(block, TextBlock)):
        if is_text:
            texts = [block for block in blocks if isinstance(block, TextBlock)]
            parts.append({"type": "text", "text": _text_of(texts)})
        else:
            addresses = [
                block.source.address for block in blocks if isinstance(block, PictureBlock)
            ]
            parts += [{"type": "image_url", "image_url": address} for address in addresses]
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return parts[0]["text"] if parts else ""


def _turns_of(message: MessageTurn) -> Iterator[Json]:
    """A message as those of a chat. Results of tools, which Anthropic's users send, are messages of their own, and so
    are those that the server gave within an answer.
    """
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    thoughts = list[str]()
    shown = list[Shown]()
    calls = list[Json]()
    for block in message.content:
        match block:
            case ServerResultBlock():
                if message.role != "assistant":
                    raise Refused(
                        400,
                        "messages: an mcp_tool_result belongs to the assistant",
                        parameter="messages",
                    )
                yield from _turn_of(message.role, shown, thoughts, calls)
                thoughts, shown, calls = [], [], []
                content = _content_of(block.content or "")
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            case ResultBlock():
                if message.role != "user":
                    raise Refused(
                        400, "messages: a tool_result belongs to the user", parameter="messages"
                    )
                content = _content_of(block.content or "")
                if block.is_error:
                    content = _failed(content)
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            case CallBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ThoughtBlock():
                thoughts.append(block.thinking)
            case TextBlock() | PictureBlock():
                shown.append(block)
    if not message.content:
        yield {"role": message.role, "content": ""}
    yield from _turn_of(message.role, shown, thoughts, calls)


def _turn_of(
    role: str, shown: Sequence[Shown], thoughts: Sequence[str], calls: Sequence[Json]
) -> Iterator[Json]:
    """A turn of blocks that follow each other; none of none."""
    if not (shown or calls or thoughts):
        return
    turn: Json = {"role": role, "content": _content_of(shown)}
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = list(calls)
    yield turn


def _failed(content: str | list[Json]) -> str | list[Json]:
    """The result of a call that failed."""
    mark = "error: "
    return (
        mark + content if isinstance(content, str) else [{"type": "text", "text": mark}, *content]
    )
