"""/v1/messages, in the shapes that Anthropic's clients send and read."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, ClassVar

import pytest
from server_for_tests import LIMITS, Running, running
from test_serve import post
from test_tools import WEATHER, check_weather

from bloomery.data.examples import Message
from bloomery.serve.app import kept_alive
from models_for_tests import make_chat_model

PATH = "/v1/messages"
TURNS = [{"role": "user", "content": "a"}]
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": WEATHER["function"]["parameters"],
    "cache_control": {"type": "ephemeral"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("messages") / "chat"
    return make_chat_model(folder, "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    limits = replace(LIMITS, context=2048, new_tokens=400)
    with running({"chat": folder}, template="qwen", limits=limits) as server:
        yield server


def events_of(server: Running, body: dict) -> list[dict]:
    """The data of a stream, after a check of the names of its events."""
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    data = json.dumps({**body, "stream": True})
    connection.request("POST", f"{PATH}?beta=true", data, headers)
    lines = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    events = []
    for block in filter(None, lines):
        name, content = block.split("\n")
        events.append(json.loads(content.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def assembled(events: list[dict]) -> dict:
    """The message that a client builds of a stream."""
    message = events[0]["message"]
    arguments = dict[int, str]()
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "text_delta":
                    block["text"] += delta["text"]
                if delta["type"] == "input_json_delta":
                    index = event["index"]
                    arguments[index] = arguments.get(index, "") + delta["partial_json"]
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    return message


class TestMessages:
    def test_a_message_is_a_reply_of_chat_streamed_or_not(self, server: Running) -> None:
        system = [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
        system.append({"type": "text", "text": "c"})
        blocks = [{"type": "text", "text": "für"}, {"type": "text", "text": "a"}]
        body = {
            "model": "chat",
            "system": system,
            "messages": [{"role": "user", "content": blocks}],
            "max_tokens": 30,
            "temperature": 0.0,
            "metadata": {"user_id": "someone"},
            "thinking": {"type": "disabled"},
            "service_tier": "auto",
        }
        status, message = post(server, PATH, body)
        assert status == 200, message
        turns = [{"role": "system", "content": "b\nc"}, {"role": "user", "content": "für\na"}]
        asked = {"messages": turns, "max_tokens": 30, "temperature": 0.0}
        reply = post(server, "/v1/chat/completions", asked)[1]
        choice = reply["choices"][0]
        assert message["content"] == [{"type": "text", "text": choice["message"]["content"]}]
        assert (message["type"], message["role"], message["model"]) == (
            "message",
            "assistant",
            "chat",
        )
        reasons = {"stop": "end_turn", "length": "max_tokens"}
        assert message["stop_reason"] == reasons[choice["finish_reason"]]
        assert message["usage"]["input_tokens"] == reply["usage"]["prompt_tokens"]
        assert message["usage"]["output_tokens"] == reply["usage"]["completion_tokens"]

        events = events_of(server, body)
        kinds = [event["type"] for event in events]
        assert kinds[:3] == ["message_start", "ping", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[3:-3]) == {"content_block_delta"}
        streamed = assembled(events)
        assert {**streamed, "id": 0} == {**message, "id": 0}

    def test_a_stop_sequence_is_named(self, server: Running) -> None:
        body = {"messages": TURNS, "max_tokens": 40, "temperature": 0.0}
        text = post(server, PATH, body)[1]["content"][0]["text"]
        stop = text[4:6]
        message = post(server, PATH, {**body, "stop_sequences": ["§§", stop]})[1]
        assert message["content"][0]["text"] == text[: text.index(stop)]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)

    def test_more_tokens_than_the_server_generates_are_no_error(self, server: Running) -> None:
        message = post(server, PATH, {"messages": TURNS, "max_tokens": 64_000})[1]
        assert message["usage"]["output_tokens"] <= 400

    def test_the_count_is_that_of_the_message(self, server: Running) -> None:
        body = {"messages": TURNS, "system": "b", "tools": [TOOL]}
        status, count = post(server, f"{PATH}/count_tokens", body)
        message = post(server, PATH, {**body, "max_tokens": 1})[1]
        assert status == 200 and count == {"input_tokens": message["usage"]["input_tokens"]}

    def test_a_silent_stream_has_pings_and_ends_with_its_client(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("bloomery.serve.app.PING_SECONDS", 0.05)
        ended = list[str]()

        async def lines() -> AsyncIterator[str]:
            try:
                yield "a"
                await asyncio.sleep(0.2)
                yield "b"
            finally:
                ended.append("lines")

        async def read(most: int) -> list[str]:
            received = list[str]()
            stream = kept_alive(lines(), "ping")
            async for line in stream:
                received.append(line)
                if len(received) == most:
                    break
            await stream.aclose()
            await asyncio.sleep(0.01)
            return received

        received = asyncio.run(read(100))
        assert received[0] == "a" and received[-1] == "b" and received.count("ping") >= 2
        assert asyncio.run(read(2)) == ["a", "ping"] and ended == ["lines", "lines"]


class TestTools:
    @pytest.mark.parametrize(
        "choice",
        [
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "weather"},
        ],
    )
    def test_a_call_is_a_block_streamed_or_not(self, server: Running, choice: dict) -> None:
        body = {
            "messages": TURNS,
            "tools": [TOOL],
            "tool_choice": choice,
            "max_tokens": 300,
            "seed": 1,
        }
        status, message = post(server, PATH, body)
        assert status == 200, message
        [block] = message["content"]
        assert (block["type"], block["name"], message["stop_reason"]) == (
            "tool_use",
            "weather",
            "tool_use",
        )
        check_weather(json.dumps(block["input"]))
        streamed = assembled(events_of(server, body))
        assert [entry["input"] for entry in streamed["content"]] == [block["input"]]

    def test_calls_and_results_are_turns_of_the_template(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        turns = list[tuple[Message, ...]]()
        model = server.models[0]
        encode = model.encode_chat

        def noted(messages: Any, *more: Any) -> list[int]:
            turns.append(tuple(messages))
            return encode(messages, *more)

        monkeypatch.setattr(model, "encode_chat", noted)
        call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
        said = [{"type": "thinking", "thinking": "hm", "signature": "x"}]
        said += [{"type": "text", "text": "I look."}, call, {**call, "id": "toolu_2"}]
        results = [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "12 C"},
            {
                "type": "tool_result",
                "tool_use_id": "toolu_2",
                "content": [{"type": "text", "text": "no such city"}],
                "is_error": True,
            },
            {"type": "text", "text": "So?"},
        ]
        conversation = [
            *TURNS,
            {"role": "assistant", "content": said},
            {"role": "user", "content": results},
        ]
        body = {"messages": conversation, "tools": [TOOL], "max_tokens": 1}
        status, answer = post(server, PATH, body)
        assert status == 200, answer
        user, assistant, first, second, last = turns[0]
        assert (assistant.content, assistant.thinking) == ("I look.", "hm")
        assert [entry["function"] for entry in assistant.calls] == [
            {"name": "weather", "arguments": {"city": "Bern"}}
        ] * 2
        assert (first.role, first.call_id, first.content) == ("tool", "toolu_1", "12 C")
        assert second.content == "error: no such city"
        assert (user.role, last.role, last.content) == ("user", "user", "So?")


class TestErrors:
    IMAGE: ClassVar = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
    }
    FILE: ClassVar = {"type": "image", "source": {"type": "file", "file_id": "file_1"}}

    @pytest.mark.parametrize(
        ("body", "status", "kind", "words"),
        [
            ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
            ({"model": "claude"}, 404, "not_found_error", "no such model"),
            (
                {"messages": [{"role": "user", "content": [IMAGE]}]},
                400,
                "invalid_request_error",
                "reads text alone",
            ),
            (
                {"messages": [{"role": "user", "content": [FILE]}]},
                400,
                "invalid_request_error",
                "a source of type 'file' is not supported",
            ),
            (
                {"messages": [*TURNS, {"role": "assistant", "content": "{"}]},
                400,
                "invalid_request_error",
                "end with one of the user",
            ),
            (
                {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
                400,
                "invalid_request_error",
                "web_search_20250305",
            ),
            ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "needs tools"),
            ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "name"),
            (
                {"messages": [{"role": "user", "content": "x " * 5000}]},
                400,
                "invalid_request_error",
                "context",
            ),
            ({"wishes": 1}, 400, "invalid_request_error", "wishes"),
        ],
    )
    def test_refusals_have_the_form_of_anthropic(
        self, server: Running, body: dict, status: int, kind: str, words: str
    ) -> None:
        answer = post(server, PATH, {"messages": TURNS, "max_tokens": 1, **body})
        assert (answer[0], answer[1]["type"], answer[1]["error"]["type"]) == (
            status,
            "error",
            kind,
        )
        assert words in answer[1]["error"]["message"] and answer[1]["request_id"]

    def test_a_client_that_asks_for_a_thread_learns_to_go_on_without(self, server: Running) -> None:
        body = {"messages": TURNS, "max_tokens": 1, "thread": {"type": "create"}}
        status, answer = post(server, PATH, body)
        details = answer["error"]["details"]
        assert (status, details["error_code"]) == (400, "thread_unsupported_request")

    def test_other_paths_keep_their_form(self, server: Running) -> None:
        assert post(server, f"{PATH}/batches", {})[1]["error"]["type"] == "not_found_error"
        assert "param" in post(server, "/v1/nowhere", {})[1]["error"]

    def test_the_key_may_come_in_a_header_of_its_own(self, folder: Path) -> None:
        body = {"messages": TURNS, "max_tokens": 1}
        with running({"chat": folder}, template="qwen", token="a secret") as server:
            assert post(server, PATH, body, **{"x-api-key": "a secret"})[0] == 200
            for headers in ({}, {"x-api-key": "other"}, {"Authorization": "Bearer other"}):
                status, answer = post(server, PATH, body, **headers)
                assert (status, answer["error"]["type"]) == (401, "authentication_error")
