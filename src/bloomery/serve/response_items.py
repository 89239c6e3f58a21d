"""Answers of /v1/responses, whole or as events: their items while they are written."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import final

from bloomery.data.chat.deltas import Delta
from bloomery.data.chat.tools import ToolCall
from bloomery.serve.answers import Events, chat_chance, failed
from bloomery.serve.engine import Chance, End, Piece, Step
from bloomery.serve.limits import Refused
from bloomery.serve.parameters import Body, Json
from bloomery.serve.responses import SERVER_LABEL, FlatFunction, ResponsesRequest
from bloomery.serve.served import Served
from bloomery.serve.server_tools import sent_id
from bloomery.serve.thoughts import AnswerForm
from bloomery.train.rl.tools import ToolResult


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
