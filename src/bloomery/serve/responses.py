"""/v1/responses, for text and without a state: every request holds its whole conversation."""

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal, final

from pydantic import BaseModel, BeforeValidator, Field

from bloomery.serve.answers import Events, failed
from bloomery.serve.engine import End, Piece
from bloomery.serve.limits import Refused
from bloomery.serve.requests import (
    MOST_TURNS,
    ChatRequest,
    Json,
    NamedSchema,
    ObjectFormat,
    Part,
    SchemaFormat,
    Text,
    TextFormat,
    Turn,
    refuse_media,
)
from bloomery.serve.served import Served


class ItemPart(BaseModel, extra="ignore", strict=True):
    """Clients send answers back as they came: what else a part holds is no text."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class Item(BaseModel, extra="ignore", strict=True):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text | list[ItemPart], BeforeValidator(refuse_media)]


class FlatSchema(BaseModel, extra="forbid", strict=True):
    """As in `response_format`, but for the level of `json_schema`."""

    type: Literal["json_schema"]
    name: str = ""
    description: str | None = None
    content: Json = Field(alias="schema")
    strict: bool | None = None


class TextSettings(BaseModel, extra="forbid", strict=True):
    format: TextFormat | ObjectFormat | FlatSchema | None = Field(None, discriminator="type")
    verbosity: None = None


def _no_state(value: object) -> object:
    if value is not None:
        raise ValueError(
            "not supported: this server keeps no responses; send the whole conversation as input"
        )
    return value


def _no_tools(value: object) -> object:
    if value:
        raise ValueError("tools are not supported here; use /v1/chat/completions")
    return value


Unkept = Annotated[None, BeforeValidator(_no_state)]


class ResponsesRequest(BaseModel, extra="forbid", strict=True):
    """`seed` to `repetition_penalty` are not OpenAI's."""

    model: str = ""
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MOST_TURNS)]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0.0, le=1.0, allow_inf_nan=False)
    stream: bool = False
    text: TextSettings | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    store: bool | None = None  # nothing is stored, as the answer reports
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: Unkept = None
    conversation: Unkept = None
    tools: Annotated[list[Json] | None, BeforeValidator(_no_tools)] = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    top_k: int | None = Field(None, ge=1)
    min_p: float | None = Field(None, ge=0.0, le=1.0, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0, allow_inf_nan=False)

    def chat(self) -> ChatRequest:
        """The same request of /v1/chat/completions."""
        turns = (
            [] if self.instructions is None else [Turn(role="system", content=self.instructions)]
        )
        for item in (
            [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        ):
            parts = (
                item.content
                if isinstance(item.content, str)
                else [Part(type="text", text=part.text) for part in item.content]
            )
            turns.append(Turn(role=item.role, content=parts))
        shared_names = (
            "model",
            "stream",
            "temperature",
            "top_p",
            "user",
            "seed",
            "top_k",
            "min_p",
            "repetition_penalty",
        )
        shared = {
            name: value for name in shared_names if (value := getattr(self, name)) is not None
        }
        chat_request = ChatRequest(messages=turns, **shared)
        return chat_request.model_copy(
            update={
                "max_completion_tokens": self.max_output_tokens,
                "response_format": self._format(),
            }
        )

    def _format(self) -> TextFormat | ObjectFormat | SchemaFormat | None:
        text_format = None if self.text is None else self.text.format
        if isinstance(text_format, FlatSchema):
            return SchemaFormat(
                type="json_schema",
                json_schema=NamedSchema(name=text_format.name, schema=text_format.content),
            )
        return text_format


@final
class ResponseShape:
    """How /v1/responses words one answer."""

    def __init__(self, params: ResponsesRequest, model: Served) -> None:
        self.params = params
        self.model = model
        self.top: int | None = None  # no log-probabilities
        self.id = f"resp_{secrets.token_hex(24)}"
        self.item_id = f"msg_{secrets.token_hex(24)}"
        self.created = int(time.time())

    async def whole(self, events: Events, count: int, prompt_tokens: int) -> Json:
        """Raises Refused where the completion failed."""
        assert count == 1
        text = ""
        async for _, event in events:
            if isinstance(event, Piece):
                text += event.text
                continue
            if event.problem:
                raise failed(event)
            return self._response(text, event, prompt_tokens)
        raise Refused(500, "the response did not end")

    async def streamed(
        self, events: Events, prompt_tokens: int, *, with_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events, as the `openai` client reads them. The last one always reports the usage."""
        del with_usage
        number = 0
        text = ""

        def line(kind: str, **fields: Any) -> str:
            nonlocal number
            event = {"type": kind, "sequence_number": number, **fields}
            number += 1
            return f"event: {kind}\ndata: {json.dumps(event)}\n\n"

        created = self._response("", None, prompt_tokens)
        yield line("response.created", response=created)
        yield line("response.in_progress", response=created)
        position = {"item_id": self.item_id, "output_index": 0, "content_index": 0}
        yield line(
            "response.output_item.added",
            output_index=0,
            item=self._item("", "in_progress", empty=True),
        )
        yield line("response.content_part.added", **position, part=_part(""))
        async for _, event in events:
            if isinstance(event, Piece):
                text += event.text
                if event.text:
                    yield line(
                        "response.output_text.delta", **position, delta=event.text, logprobs=[]
                    )
                continue
            if event.problem:
                error = failed(event).body["error"]
                details = {"code": "server_error", "message": error["message"]}
                yield line(
                    "response.failed", response={**created, "status": "failed", "error": details}
                )
                return
            response = self._response(text, event, prompt_tokens)
            yield line("response.output_text.done", **position, text=text, logprobs=[])
            yield line("response.content_part.done", **position, part=_part(text))
            yield line("response.output_item.done", output_index=0, item=response["output"][0])
            yield line(f"response.{response['status']}", response=response)

    def _response(self, text: str, end: End | None, prompt_tokens: int) -> Json:
        """`end`: None while it is written."""
        status = "in_progress"
        usage = None
        reason = None
        if end is not None:
            status = "completed" if end.reason == "stop" else "incomplete"
            reason = None if end.reason == "stop" else {"reason": "max_output_tokens"}
            usage = {
                "input_tokens": prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": end.tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt_tokens + end.tokens,
            }
        params = self.params
        form = None if params.text is None or params.text.format is None else params.text.format
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "instructions": params.instructions,
            "metadata": params.metadata or {},
            "model": params.model or self.model.name,
            "max_output_tokens": params.max_output_tokens,
            "output": [] if end is None else [self._item(text, status)],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {
                "format": {"type": "text"} if form is None else form.model_dump(by_alias=True)
            },
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": usage,
            "user": params.user,
        }

    def _item(self, text: str, status: str, *, empty: bool = False) -> Json:
        content = [] if empty else [_part(text)]
        return {
            "id": self.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
