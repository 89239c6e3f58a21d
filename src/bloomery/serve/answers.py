"""How the endpoints word their answers, whole or as server-sent events."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, final

from bloomery.serve.engine import Chance, End, Piece
from bloomery.serve.limits import Refused
from bloomery.serve.requests import Json
from bloomery.serve.served import Served
from bloomery.serve.tools import Delta, ToolFormat, ToolParser

Events = AsyncIterator[tuple[int, Piece | End]]  # of each completion of a request, by its index


class Answer(Protocol):
    """How an endpoint words what the engine generates. `top`: how many of the likeliest tokens it reports."""

    model: Served
    top: int | None

    async def whole(self, events: Events, count: int, prompt_tokens: int) -> Json:
        """Raises Refused where a completion failed."""

    def streamed(
        self, events: Events, prompt_tokens: int, *, with_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events."""


@final
class Shape:
    """How an endpoint words its answers. `top`: how many of the likeliest tokens to report; None: no
    log-probabilities. `tools`: how calls are written; None: an answer is text.
    """

    def __init__(
        self,
        kind: str,
        prefix: str,
        name: str,
        model: Served,
        top: int | None,
        tools: ToolFormat | None = None,
    ) -> None:
        self.tools = tools
        self.kind = kind
        self.model = model
        self.chat = kind == "chat.completion"
        self.top = top
        self.head = {
            "id": prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": name,
        }

    async def whole(self, events: Events, count: int, prompt_tokens: int) -> Json:
        """Raises Refused where a completion failed."""
        pieces: list[list[Piece]] = [[] for _ in range(count)]
        ends: dict[int, End] = {}
        async for index, event in events:
            if isinstance(event, Piece):
                pieces[index].append(event)
                continue
            if event.problem:
                raise failed(event)
            ends[index] = event
        choices = []
        for index, parts in enumerate(pieces):
            text = "".join(part.text for part in parts)
            chances = [part.chance for part in parts if part.chance is not None]
            choice: Json = {"index": index, "finish_reason": ends[index].reason}
            if self.chat and self.tools is not None:
                choice |= _called(self.tools, text, ends[index].reason)
            elif self.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choices.append(choice | {"logprobs": self._logprobs(chances)})
        num_tokens = sum(end.tokens for end in ends.values())
        return {
            **self.head,
            "object": self.kind,
            "choices": choices,
            "usage": _usage(prompt_tokens, num_tokens),
        }

    async def streamed(
        self, events: Events, prompt_tokens: int, *, with_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events. `with_usage`: the last one reports the tokens."""
        kind = "chat.completion.chunk" if self.chat else self.kind
        num_tokens = 0
        started = set[int]()
        parsers = dict[int, ToolParser]()

        def line(choices: list[Json], **fields: Any) -> str:
            extra = {"usage": None} if with_usage else {}
            return f"data: {json.dumps({**self.head, 'object': kind, 'choices': choices, **extra, **fields})}\n\n"

        async for index, event in events:
            reason: str | None = None
            text = ""
            chances = list[Chance]()
            if isinstance(event, End):
                num_tokens += event.tokens
                if event.problem:
                    yield f"data: {json.dumps(failed(event).body)}\n\n"
                    return
                reason = event.reason
            else:
                text = event.text
                chances = [event.chance] if event.chance is not None else []
            logprobs = self._logprobs(chances) if chances else None
            if not self.chat:
                yield line(
                    [{"index": index, "finish_reason": reason, "text": text, "logprobs": logprobs}]
                )
                continue
            if self.tools is None:
                deltas: list[Json] = [{"content": text}] if reason is None else []
            else:
                parser = parsers.setdefault(index, ToolParser(self.tools))
                parts = parser.push(text) if reason is None else parser.flush()
                deltas = [_delta(part) for part in parts]
                reason = "tool_calls" if reason == "stop" and parser.calls else reason
            if reason is not None or (chances and not deltas):
                deltas.append({})
            for number, delta in enumerate(deltas, 1):
                is_last = number == len(deltas)
                role = {} if index in started else {"role": "assistant"}
                started.add(index)
                choice = {
                    "index": index,
                    "finish_reason": reason if is_last else None,
                    "delta": role | delta,
                }
                yield line([choice | {"logprobs": logprobs if is_last else None}])
        if with_usage:
            yield line([], usage=_usage(prompt_tokens, num_tokens))
        yield "data: [DONE]\n\n"

    def _logprobs(self, chances: Sequence[Chance]) -> Json | None:
        if self.top is None:
            return None
        if self.chat:
            return {
                "content": [
                    _chance(chance) | {"top_logprobs": list(map(_chance, chance.top))}
                    for chance in chances
                ],
                "refusal": None,
            }
        offsets = []
        offset = 0
        for chance in chances:
            offsets.append(offset)
            offset += len(chance.text)
        return {
            "tokens": [chance.text for chance in chances],
            "token_logprobs": [chance.logprob for chance in chances],
            "top_logprobs": [{top.text: top.logprob for top in chance.top} for chance in chances],
            "text_offset": offsets,
        }


def _called(form: ToolFormat, text: str, reason: str) -> Json:
    """The message and the reason of an answer that may hold calls."""
    parser = ToolParser(form)
    calls = list[Json]()
    content = ""
    for part in (*parser.push(text), *parser.flush()):
        content += part.content
        if part.name is not None:
            calls.append(
                {
                    "id": part.id,
                    "type": "function",
                    "function": {"name": part.name, "arguments": ""},
                }
            )
        elif part.call is not None:
            calls[part.call]["function"]["arguments"] += part.arguments
    message: Json = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = calls
    return {
        "message": message,
        "finish_reason": "tool_calls" if calls and reason == "stop" else reason,
    }


def _delta(part: Delta) -> Json:
    if part.call is None:
        return {"content": part.content}
    function = {"arguments": part.arguments} | ({} if part.name is None else {"name": part.name})
    head = {} if part.name is None else {"id": part.id, "type": "function"}
    return {"tool_calls": [{"index": part.call, **head, "function": function}]}


def _chance(chance: Chance) -> Json:
    return {
        "token": chance.text,
        "logprob": max(chance.logprob, -9999.0),
        "bytes": list(chance.text.encode()),
    }


def _usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def failed(end: End) -> Refused:
    """How a completion without a right end is worded."""
    if end.refused:
        return Refused(400, end.problem, parameter="response_format")
    status = {"timeout": 408, "closed": 503}.get(end.reason, 500)
    return Refused(status, end.problem, code=end.reason)
