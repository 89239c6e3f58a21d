"""How chat and completions word their answers, whole or as server-sent events."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, final

from bloomery.data.chat.channels import ChannelParser
from bloomery.data.chat.deltas import Delta
from bloomery.infer.text import TextStream
from bloomery.serve.engine import Chance, End, Piece, Step
from bloomery.serve.limits import Refused
from bloomery.serve.parameters import Json
from bloomery.serve.prompt_scores import Scores
from bloomery.serve.requests import CompletionRequest
from bloomery.serve.served import Served
from bloomery.serve.thoughts import AnswerForm, AnswerParser, parsed_whole

LOWEST = -9999.0  # of a token that is impossible: JSON has no infinity
Events = AsyncIterator[
    tuple[int, Piece | End | Step]
]  # of each completion of a request, by its index


class Answer(Protocol):
    """How an endpoint words what the engine generates. `top`: how many of the likeliest tokens it reports. `ping`: the
    event of a silent stream; None: the API has none.
    """

    model: Served
    top: int | None
    ping: str | None

    async def whole(self, events: Events, count: int, prompt_tokens: int) -> Json:
        """Raises Refused where a completion failed."""

    def streamed(
        self, events: Events, prompt_tokens: int, *, with_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events."""


async def completed(
    events: Events, count: int, steps: list[Step] | None = None
) -> list[tuple[list[Piece], End]]:
    """The pieces and the end of each completion. Raises Refused where one failed.

    `steps`: gets those of an episode; the pieces are then those of its last answer.
    """
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    ends: dict[int, End] = {}
    async for index, event in events:
        if isinstance(event, Step):
            assert steps is not None, "only chats have episodes"
            steps.append(event)
            pieces[index].clear()
            continue
        if isinstance(event, Piece):
            pieces[index].append(event)
            continue
        if event.problem:
            raise failed(event)
        ends[index] = event
    return [(parts, ends[index]) for index, parts in enumerate(pieces)]


@final
class ChatShape:
    """How /v1/chat/completions words its answers. `top`: how many of the likeliest tokens to report; None: no
    log-probabilities. `form`: how thoughts and calls are written. `is_episode`: the server calls the tools; then the
    content is that of the last answer, and `steps` has the turns before it, with calls and results.
    """

    def __init__(
        self,
        name: str,
        model: Served,
        top: int | None,
        form: AnswerForm,
        *,
        is_episode: bool = False,
    ) -> None:
        self.is_episode = is_episode
        self.model = model
        self.ping: str | None = None
        self.top = top
        self.form = form
        self.head = _head("chatcmpl-", name)

    async def whole(self, events: Events, count: int, prompt_tokens: int) -> Json:
        """Raises Refused where a completion failed."""
        steps = list[Step]()
        completions = await completed(events, count, steps)
        choices = []
        for index, (pieces, end) in enumerate(completions):
            message = _message(parsed_whole(self.form, "".join(piece.text for piece in pieces)))
            if self.is_episode:
                # What the last answer calls is not called: there are no more turns.
                message.pop("tool_calls", None)
                message["steps"] = [turn for step in steps for turn in step.messages]
                message["episode"] = end.episode
            is_call = "tool_calls" in message and end.reason == "stop"
            choices.append(
                {
                    "index": index,
                    "finish_reason": "tool_calls" if is_call else end.reason,
                    "message": message,
                    "logprobs": self._logprobs(_chances(pieces)),
                }
            )
        num_tokens = sum(end.tokens for _, end in completions)
        return {
            **self.head,
            "object": "chat.completion",
            "choices": choices,
            "usage": _usage(prompt_tokens, num_tokens),
        }

    async def streamed(
        self, events: Events, prompt_tokens: int, *, with_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events. `with_usage`: the last one reports the tokens."""
        head = {**self.head, "object": "chat.completion.chunk"}
        num_tokens = 0
        started = set[int]()
        parsers = dict[int, AnswerParser | ChannelParser]()
        async for index, event in events:
            parser = parsers.setdefault(index, self.form.parser())
            reason: str | None = None
            logprobs: Json | None = None
            extra = list[Json]()
            if isinstance(event, End):
                num_tokens += event.tokens
                if event.problem:
                    yield _line(failed(event).body)
                    return
                parts = parser.flush()
                is_call = event.reason == "stop" and parser.calls and not self.is_episode
                reason = "tool_calls" if is_call else event.reason
                if self.is_episode:
                    extra = [{"episode": event.episode}]
            elif isinstance(event, Step):
                parts = parser.flush()
                extra = [{"steps": list(event.messages)}]
                parsers[index] = self.form.parser()
            else:
                parts = parser.push(event.text)
                logprobs = None if event.chance is None else self._logprobs([event.chance])
            if self.is_episode:
                parts = [part for part in parts if part.call is None]
            deltas = [*map(_delta, parts), *extra]
            if reason is not None or (logprobs is not None and not deltas):
                deltas.append({})
            for number, delta in enumerate(deltas, 1):
                is_last = number == len(deltas)
                role = {} if index in started else {"role": "assistant"}
                started.add(index)
                choice = {
                    "index": index,
                    "finish_reason": reason if is_last else None,
                    "delta": role | delta,
                    "logprobs": logprobs if is_last else None,
                }
                yield _chunk(head, [choice], with_usage=with_usage)
        if with_usage:
            yield _line({**head, "choices": [], "usage": _usage(prompt_tokens, num_tokens)})
        yield "data: [DONE]\n\n"

    def _logprobs(self, chances: Sequence[Chance]) -> Json | None:
        if self.top is None:
            return None
        return {"content": [chat_chance(chance) for chance in chances], "refusal": None}


@final
class CompletionShape:
    """How /v1/completions words its answers. `texts`: of the prompts, for `echo`; `scores`: of their tokens."""

    def __init__(
        self,
        name: str,
        model: Served,
        params: CompletionRequest,
        texts: Sequence[str],
        prompts: Sequence[Sequence[int]],
        scores: Sequence[Scores] | None,
    ) -> None:
        self.model = model
        self.ping: str | None = None
        self.params = params
        self.texts = texts
        self.prompts = prompts
        self.scores = scores
        self.top = params.logprobs
        if self.top is None and params.completions > params.n:
            self.top = 0  # the likeliest are chosen
        self.head = {**_head("cmpl-", name), "object": "text_completion"}

    async def whole(self, events: Events, count: int, prompt_tokens: int) -> Json:
        """Raises Refused where a completion failed."""
        completions = await completed(events, count)
        num_of_prompt = self.params.completions
        choices = list[Json]()
        for prompt in range(len(self.prompts)):
            of_prompt = completions[prompt * num_of_prompt : (prompt + 1) * num_of_prompt]
            if num_of_prompt > self.params.n:
                of_prompt.sort(key=lambda entry: -_mean_logprob(entry[0]))
            for pieces, end in of_prompt[: self.params.n]:
                choices.append(self._choice(len(choices), prompt, pieces, end.reason))
        return {
            **self.head,
            "choices": choices,
            "usage": _usage(prompt_tokens, sum(end.tokens for _, end in completions)),
        }

    def unwritten(self, prompt_tokens: int) -> Json:
        """The answer to a request of no new tokens."""
        choices = list[Json]()
        for prompt in range(len(self.prompts)):
            for _ in range(self.params.n):
                choices.append(self._choice(len(choices), prompt, [], "length"))
        return {**self.head, "choices": choices, "usage": _usage(prompt_tokens, 0)}

    async def streamed(
        self, events: Events, prompt_tokens: int, *, with_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events. `with_usage`: the last one reports the tokens."""
        num_tokens = 0
        offsets = dict[int, int]()
        if self.params.echo:
            for index in range(len(self.prompts) * self.params.n):
                text = self.texts[index // self.params.n]
                prompt = {"index": index, "finish_reason": None, "text": text, "logprobs": None}
                yield _chunk(self.head, [prompt], with_usage=with_usage)
        async for index, event in events:
            choice: Json = {"index": index, "finish_reason": None, "text": "", "logprobs": None}
            if isinstance(event, End):
                num_tokens += event.tokens
                if event.problem:
                    yield _line(failed(event).body)
                    return
                choice["finish_reason"] = event.reason
            else:
                choice["text"] = event.text
                offset = offsets.get(index, 0)
                offsets[index] = offset + len(event.text)
                choice["logprobs"] = self._logprobs([event.chance], [offset])
            yield _chunk(self.head, [choice], with_usage=with_usage)
        if with_usage:
            yield _line({**self.head, "choices": [], "usage": _usage(prompt_tokens, num_tokens)})
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, prompt: int, pieces: Sequence[Piece], reason: str) -> Json:
        text = self.texts[prompt] if self.params.echo else ""
        chances = list[Chance | None]()
        offsets = list[int]()
        if self.params.echo and self.scores is not None:
            # The first token has no tokens before it, but a name.
            first = self.prompts[prompt][0]
            chances += [Chance(first, self.model.spelled(first), 0.0), *self.scores[prompt][1:]]
            offsets += _offsets(self.model, self.prompts[prompt], text)
        for piece in pieces:
            if piece.chance is not None:
                chances.append(piece.chance)
                offsets.append(len(text))
            text += piece.text
        logprobs = self._logprobs(chances, offsets)
        if logprobs is not None and self.params.echo and self.scores is not None:
            logprobs["token_logprobs"][0] = None
            logprobs["top_logprobs"][0] = None
        return {"index": index, "finish_reason": reason, "text": text, "logprobs": logprobs}

    def _logprobs(self, chances: Sequence[Chance | None], offsets: Sequence[int]) -> Json | None:
        if self.params.logprobs is None:
            return None
        known = [chance for chance in chances if chance is not None]
        if not known and chances:
            return None
        return {
            "tokens": [_name(chance) for chance in known],
            "token_logprobs": [max(chance.logprob, LOWEST) for chance in known],
            "top_logprobs": [_likeliest(chance) for chance in known],
            "text_offset": list(offsets),
        }


def _offsets(model: Served, ids: Sequence[int], text: str) -> list[int]:
    """Where each token of a prompt begins in its text; a begin token that was added has no part in it."""
    stream = TextStream(model.tokenizer, [])
    lengths = list[int]()
    length = 0
    for token in ids:
        lengths.append(length)
        length += len(stream.push(token))
    added = max(0, length + len(stream.flush()) - len(text))
    return [max(0, length - added) for length in lengths]


def _mean_logprob(pieces: Sequence[Piece]) -> float:
    chances = _chances(pieces)
    return sum(chance.logprob for chance in chances) / max(1, len(chances))


def _chances(pieces: Sequence[Piece]) -> list[Chance]:
    return [piece.chance for piece in pieces if piece.chance is not None]


def _message(parts: Sequence[Delta]) -> Json:
    """The message of an answer: content, thought and calls."""
    content = "".join(part.content for part in parts)
    thought = "".join(part.thought for part in parts)
    calls = list[Json]()
    for part in parts:
        if part.name is not None:
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": part.id, "type": "function", "function": function})
        elif part.call is not None:
            calls[part.call]["function"]["arguments"] += part.arguments
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if not content and (calls or thought):
        message["content"] = None
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _delta(part: Delta) -> Json:
    if part.thought:
        return {"reasoning_content": part.thought}
    if part.call is None:
        return {"content": part.content}
    function = {"arguments": part.arguments} | ({} if part.name is None else {"name": part.name})
    head = {} if part.name is None else {"id": part.id, "type": "function"}
    return {"tool_calls": [{"index": part.call, **head, "function": function}]}


def chat_chance(chance: Chance) -> Json:
    """A token of an answer with the likeliest in its place."""
    return _chance(chance) | {"top_logprobs": [_chance(likely) for likely in chance.top]}


def _chance(chance: Chance) -> Json:
    return {
        "token": chance.text,
        "logprob": max(chance.logprob, LOWEST),
        "bytes": list(chance.spelled),
    }


def _name(chance: Chance) -> str:
    """A token as OpenAI's completions name it: a part of a character by its bytes."""
    try:
        return chance.spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in chance.spelled)


def _likeliest(chance: Chance) -> Json:
    """The likeliest tokens by name, and the one that is there. Of two with one name the likelier counts."""
    logprobs = dict[str, float]()
    for entry in (*chance.top, chance):
        logprobs.setdefault(_name(entry), max(entry.logprob, LOWEST))
    return logprobs


def _head(prefix: str, name: str) -> Json:
    return {"id": prefix + secrets.token_hex(12), "created": int(time.time()), "model": name}


def _line(event: Json) -> str:
    return f"data: {json.dumps(event)}\n\n"


def _chunk(head: Json, choices: list[Json], *, with_usage: bool) -> str:
    extra: dict[str, Any] = {"usage": None} if with_usage else {}
    return _line({**head, "choices": choices, **extra})


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
