"""How the endpoints word their answers, whole or as server-sent events."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, final

from bloomery.serve.engine import Chance, End, Piece
from bloomery.serve.limits import Refused
from bloomery.serve.requests import Json
from bloomery.serve.served import Served


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
                raise failed(event)
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
                    yield f"data: {json.dumps(failed(event).body)}\n\n"
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


def failed(end: End) -> Refused:
    """How a completion without a right end is worded."""
    if end.refused:
        return Refused(400, end.problem, parameter="response_format")
    status = {"timeout": 408, "closed": 503}.get(end.reason, 500)
    return Refused(status, end.problem, code=end.reason)
