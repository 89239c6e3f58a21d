"""Answers of /v1/messages, whole or as events: their blocks while they are written."""

import json
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import final

from bloomery.data.chat.deltas import Delta
from bloomery.data.chat.tools import ToolCall
from bloomery.serve.answers import Events, failed
from bloomery.serve.engine import End, Piece, Step
from bloomery.serve.guard import anthropic_error
from bloomery.serve.limits import Refused
from bloomery.serve.messages import SERVER_NAME
from bloomery.serve.parameters import Json
from bloomery.serve.served import Served
from bloomery.serve.server_tools import sent_id
from bloomery.serve.thoughts import AnswerForm
from bloomery.train.rl.tools import ToolResult


@final
class MessageShape:
    """How /v1/messages words one answer. `stops`: the stop texts of the request. `is_episode`: the server calls the
    tools; then their calls and results are blocks of the answer, as those of an MCP server.
    """

    def __init__(
        self,
        name: str,
        model: Served,
        form: AnswerForm,
        stops: Sequence[str],
        *,
        is_episode: bool = False,
    ) -> None:
        self.is_episode = is_episode
        self.model = model
        self.ping: str | None = _line({"type": "ping"})
        self.top: int | None = None  # no log-probabilities
        self.name = name
        self.form = form
        self.stops = stops
        self.id = f"msg_{secrets.token_hex(12)}"

    async def whole(self, events: Events, count: int, prompt_tokens: int) -> Json:
        """Raises Refused where the completion failed."""
        assert count == 1
        reader = self._reader()
        async for _, event in events:
            if isinstance(event, Piece):
                list(reader.push(event))
                continue
            if event.problem:
                raise failed(event)
            list(reader.end())
            return self._message(reader.blocks.content, event, prompt_tokens)
        raise Refused(500, "the message did not end")

    async def streamed(
        self, events: Events, prompt_tokens: int, *, with_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events, as the `anthropic` client reads them."""
        del with_usage
        reader = self._reader()
        yield _line({"type": "message_start", "message": self._message([], None, prompt_tokens)})
        yield _line({"type": "ping"})
        async for _, event in events:
            if isinstance(event, Piece):
                for written in reader.push(event):
                    yield _line(written)
                continue
            if event.problem:
                error = anthropic_error(failed(event))
                yield _line(error)
                return
            for written in reader.end():
                yield _line(written)
            message = self._message(reader.blocks.content, event, prompt_tokens)
            names = ("stop_reason", "stop_sequence", "episode")
            delta = {name: message[name] for name in names if name in message}
            yield _line({"type": "message_delta", "delta": delta, "usage": message["usage"]})
            yield _line({"type": "message_stop"})

    def _reader(self) -> "BlockReader":
        return BlockReader(self.form, is_episode=self.is_episode)

    def _message(self, content: list[Json], end: End | None, prompt_tokens: int) -> Json:
        """`end`: None while it is written."""
        reason = None
        stop = None
        if end is not None:
            reason = "max_tokens" if end.reason == "length" else "end_turn"
            if end.reason == "stop" and any(block["type"] == "tool_use" for block in content):
                reason = "tool_use"
            elif end.stop in self.stops:
                reason = "stop_sequence"
                stop = end.stop
        more = {"episode": end.episode} if self.is_episode and end is not None else {}
        return {
            **more,
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": {
                "input_tokens": prompt_tokens,
                "output_tokens": 0 if end is None else end.tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }


@final
class BlockReader:
    """The blocks of an answer while it is written; of several turns, where the server calls tools."""

    def __init__(self, form: AnswerForm, *, is_episode: bool) -> None:
        self.blocks = Blocks()
        self._form = form
        self._is_episode = is_episode
        self._parser = form.parser()

    def push(self, piece: Piece) -> Iterator[Json]:
        """The events of a piece."""
        if not isinstance(piece, Step):
            yield from self.blocks.push(self._written(self._parser.push(piece.text)))
            return
        yield from self.blocks.push(self._written(self._parser.flush()))
        yield from self.blocks.push_called(
            [(sent_id(self._form.tools, call), call, result) for call, result in piece.called]
        )
        self._parser = self._form.parser()

    def end(self) -> Iterator[Json]:
        """The events at the end of the answer."""
        yield from self.blocks.push(self._written(self._parser.flush()))
        yield from self.blocks.end()

    def _written(self, parts: Sequence[Delta]) -> list[Delta]:
        """Without calls that the server makes: they come with their results."""
        return [part for part in parts if part.call is None or not self._is_episode]


@final
class Blocks:
    """Mutable: the content of a message while it is written. The input of a call is read at its end."""

    def __init__(self) -> None:
        self.content = list[Json]()
        self._open = False  # whether the last block is still written
        self._arguments = ""

    def push(self, parts: Sequence[Delta]) -> Iterator[Json]:
        """The events of new parts of the answer."""
        for part in parts:
            if part.name is not None:
                yield from self._close()
                block: Json = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
                yield from self._add(block)
            elif part.call is not None:
                self._arguments += part.arguments
                delta = {"type": "input_json_delta", "partial_json": part.arguments}
                yield self._delta(delta)
            elif part.thought:
                yield from self._begin("thinking", {"thinking": "", "signature": ""})
                self.content[-1]["thinking"] += part.thought
                yield self._delta({"type": "thinking_delta", "thinking": part.thought})
            elif part.content:
                yield from self._begin("text", {"text": ""})
                self.content[-1]["text"] += part.content
                yield self._delta({"type": "text_delta", "text": part.content})

    def push_called(self, called: Sequence[tuple[str, ToolCall, ToolResult]]) -> Iterator[Json]:
        """The events of calls that the server has made, and of their results. Each has the id of its call."""
        for id_, call, _ in called:
            yield from self._close()
            use: Json = {"type": "mcp_tool_use", "id": id_, "name": call.name, "input": {}}
            yield from self._add({**use, "server_name": SERVER_NAME})
            self._arguments = call.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        for id_, _, result in called:
            yield from self._close()
            block: Json = {"type": "mcp_tool_result", "tool_use_id": id_, "is_error": result.failed}
            yield from self._add({**block, "content": [{"type": "text", "text": result.text}]})
        yield from self._close()

    def end(self) -> Iterator[Json]:
        """The events at the end of the answer, which has at least an empty text."""
        if not self.content:
            yield from self._begin("text", {"text": ""})
        yield from self._close()

    def _begin(self, kind: str, empty: Json) -> Iterator[Json]:
        """Opens a block, unless the last one is of the kind."""
        if self._open and self.content[-1]["type"] == kind:
            return
        yield from self._close()
        yield from self._add({"type": kind, **empty})

    def _add(self, block: Json) -> Iterator[Json]:
        self._open = True
        self._arguments = ""
        self.content.append(block)
        yield {
            "type": "content_block_start",
            "index": len(self.content) - 1,
            "content_block": dict(block),
        }

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}

    def _close(self) -> Iterator[Json]:
        if not self._open:
            return
        self._open = False
        block = self.content[-1]
        if block["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        if block["type"] in ("tool_use", "mcp_tool_use"):
            block["input"] = _object(self._arguments)
        yield {"type": "content_block_stop", "index": len(self.content) - 1}


def _object(arguments: str) -> Json:
    """The input of a call; empty where the answer ended within it."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _line(event: Json) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
