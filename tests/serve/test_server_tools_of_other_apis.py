"""Tools that the server calls, for clients of /v1/messages and /v1/responses: the loop of /v1/chat/completions."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_for_tests import Running
from test_serve import client_of, post
from test_server_tools import FILE, TURNS, call, plan_of, tool_server

from bloomery.data.tokenizer.tokenizer import load_tokenizer
from models_for_tests import make_chat_model

ANSWERS = [f"I add. {call('add', a=1, b=2)}", call("add", a=3, b=4) + call("fail"), "It is 3."]
OWN = {"name": "clock", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_chat_model(
        tmp_path_factory.mktemp("tools") / "chat", "<tool_call>", "</tool_call>"
    )
    (folder / "user_tools.py").write_text(FILE)
    return folder


def events_of(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=60) as read:
        lines = [line for line in read.iter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_messages_have_calls_and_results_as_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"model": "chat", "max_tokens": 400, "messages": TURNS}
    answers = [*ANSWERS, *ANSWERS, *ANSWERS, "and?"]
    with tool_server(folder, monkeypatch, plan_of(folder, "add", "fail"), answers) as (server, script):
        client_of(server).chat.completions.create(model="chat", messages=TURNS)
        status, message = post(server, "/v1/messages", asked)
        assert status == 200, message
        events = events_of(server, "/v1/messages", asked)
        assert script.prompts[:3] == script.prompts[3:6] == script.prompts[6:9]

        # The conversation goes on with what came back.
        more = [*TURNS, {"role": "assistant", "content": message["content"]}]
        more.append({"role": "user", "content": "And?"})
        status, _ = post(server, "/v1/messages", {**asked, "messages": more})
        assert status == 200
    content = message["content"]
    kinds = ["text", "mcp_tool_use", "mcp_tool_result"]
    kinds += ["mcp_tool_use", "mcp_tool_use", "mcp_tool_result", "mcp_tool_result", "text"]
    assert [block["type"] for block in content] == kinds
    uses = [block for block in content if block["type"] == "mcp_tool_use"]
    results = [block for block in content if block["type"] == "mcp_tool_result"]
    assert [(use["name"], use["input"]) for use in uses] == [
        ("add", {"a": 1, "b": 2}),
        ("add", {"a": 3, "b": 4}),
        ("fail", {}),
    ]
    assert [use["id"] for use in uses] == [result["tool_use_id"] for result in results]
    assert len({use["id"] for use in uses}) == 3
    assert [result["is_error"] for result in results] == [False, False, True]
    assert [result["content"][0]["text"] for result in results][:2] == ["3", "7"]
    assert (content[0]["text"].strip(), content[-1]["text"]) == ("I add.", "It is 3.")
    assert message["stop_reason"] == "end_turn"
    assert message["episode"] == {"turns": 3, "calls": 3, "failed_calls": 1}

    # A stream has the same blocks.
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == kinds
    places = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert places == list(range(len(kinds)))
    written = [""] * len(kinds)
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            written[event["index"]] += delta.get("text", delta.get("partial_json", ""))
    assert [json.loads(text) for text, kind in zip(written, kinds, strict=True) if "use" in kind] == [
        use["input"] for use in uses
    ]
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert events[-2]["delta"]["episode"] == message["episode"]

    # What was sent back are the turns of the episode, each result behind its call.
    sent = load_tokenizer(folder).decode(script.prompts[-1])
    places = [sent.rindex(part) for part in ("I add.", '"a": 1', "\n3\n", '"a": 3', "\n7\n")]
    places += [sent.rindex(part) for part in ("broken inside", "It is 3.", "And?")]
    assert places == sorted(places)


def test_responses_have_calls_with_their_results_as_items(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [*ANSWERS, *ANSWERS, *ANSWERS, "and?", "and?"]
    with tool_server(folder, monkeypatch, plan_of(folder, "add", "fail"), answers) as (server, script):
        client = client_of(server)
        client.chat.completions.create(model="chat", messages=TURNS)
        response = client.responses.create(model="chat", input=TURNS)
        events = list(client.responses.create(model="chat", input=TURNS, stream=True))
        assert script.prompts[:3] == script.prompts[3:6] == script.prompts[6:9]

        # The conversation goes on, kept by the server or sent back.
        client.responses.create(model="chat", previous_response_id=response.id, input="And?")
        items = [item.model_dump(exclude_none=True) for item in response.output]
        said = {"role": "user", "content": "And?"}
        client.responses.create(model="chat", input=[*TURNS, *items, said])
        assert script.prompts[-1] == script.prompts[-2]
    kinds = ["message", "mcp_call", "mcp_call", "mcp_call", "message"]
    assert [item.type for item in response.output] == kinds
    calls = [item for item in response.output if item.type == "mcp_call"]
    assert [(item.name, json.loads(item.arguments)) for item in calls] == [
        ("add", {"a": 1, "b": 2}),
        ("add", {"a": 3, "b": 4}),
        ("fail", {}),
    ]
    assert [item.output for item in calls] == ["3", "7", None]
    assert [item.status for item in calls] == ["completed", "completed", "failed"]
    assert calls[2].error.type == "mcp_tool_execution_error"
    assert "broken inside" in calls[2].error.content
    assert response.output[-1].content[0].text == "It is 3."
    assert response.status == "completed"
    assert response.episode == {"turns": 3, "calls": 3, "failed_calls": 1}

    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in done] == kinds
    assert [(item.name, item.output) for item in done if item.type == "mcp_call"] == [
        (item.name, item.output) for item in calls
    ]
    written = [event.type for event in events if "mcp_call" in event.type]
    assert written.count("response.mcp_call.completed") == 2
    assert written.count("response.mcp_call.failed") == 1
    assert events[-1].response.output[-1].content[0].text == "It is 3."

    sent = load_tokenizer(folder).decode(script.prompts[-1])
    places = [sent.rindex(part) for part in ("I add.", '"a": 1', "\n3\n", '"a": 3', "\n7\n")]
    places += [sent.rindex(part) for part in ("broken inside", "It is 3.", "And?")]
    assert places == sorted(places)


def test_turns_have_a_limit_in_every_api(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(folder, "add").model_copy(update={"max_turns": 2})
    answers = [call("add", a=1, b=2)] * 4
    with tool_server(folder, monkeypatch, plan, answers) as (server, _):
        asked = {"model": "chat", "max_tokens": 400, "messages": TURNS}
        _, message = post(server, "/v1/messages", asked)
        _, response = post(server, "/v1/responses", {"input": "What is 1 + 2?"})
    assert message["stop_reason"] == "max_tokens"
    assert [block["type"] for block in message["content"]] == ["mcp_tool_use", "mcp_tool_result"]
    assert response["status"] == "incomplete"
    assert [item["type"] for item in response["output"]] == ["mcp_call"]


def test_own_tools_or_none_are_no_tools_of_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = {"type": "function", "name": "clock"}
    asked = {"model": "chat", "max_tokens": 9, "messages": TURNS}
    requests = (
        ("/v1/messages", {**asked, "tools": [OWN]}),
        ("/v1/messages", {**asked, "tool_choice": {"type": "none"}}),
        ("/v1/responses", {"input": "a", "tools": [function]}),
        ("/v1/responses", {"input": "a", "tool_choice": "none"}),
    )
    with tool_server(folder, monkeypatch, plan_of(folder, "add"), ["so"] * 4) as (server, script):
        for path, body in requests:
            status, answer = post(server, path, body)
            assert status == 200 and "episode" not in answer, (path, answer)
        prompts = [load_tokenizer(folder).decode(ids) for ids in script.prompts]
        assert len(prompts) == 4 and not any("Add two" in prompt for prompt in prompts)
        schema = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        for path, body in (
            ("/v1/messages", {**asked, "output_config": schema}),
            ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_object"}}}),
        ):
            status, answer = post(server, path, body)
            assert status == 400 and "tools of the server" in json.dumps(answer)


def test_counted_tokens_are_those_of_the_prompt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"model": "chat", "messages": TURNS}
    plan = plan_of(folder, environment="Counter")
    with tool_server(folder, monkeypatch, plan, ["so"]) as (server, script):
        for _ in range(10):  # each gives its process back
            status, counted = post(server, "/v1/messages/count_tokens", asked)
            assert status == 200
        _, message = post(server, "/v1/messages", {**asked, "max_tokens": 20})
        assert counted["input_tokens"] == message["usage"]["input_tokens"]
        assert counted["input_tokens"] == len(script.prompts[0])


def test_a_text_that_is_continued_has_no_tools(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tool_server(folder, monkeypatch, plan_of(folder, "add"), []) as (server, _):
        status, answer = post(server, "/v1/completions", {"prompt": "a"})
        assert status == 400
        assert answer["error"]["message"].startswith("this server calls tools")
        assert "/v1/chat/completions" in answer["error"]["message"]
        scored = {"prompt": "a b", "max_tokens": 0, "echo": True, "logprobs": 0}
        status, answer = post(server, "/v1/completions", scored)
        assert status == 200, answer
        status, _ = post(server, "/v1/embeddings", {"input": "a"})
        assert status == 200


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [
                    {"role": "user", "content": [{"type": "mcp_tool_result", "tool_use_id": "x"}]}
                ],
            },
            "belongs to the assistant",
        ),
        (
            "/v1/responses",
            {"input": [{"type": "mcp_call", "id": "x", "name": 3}]},
            "input",
        ),
    ],
)
def test_calls_of_the_server_that_cannot_be_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict, problem: str
) -> None:
    with tool_server(folder, monkeypatch, plan_of(folder, "add"), ["so"]) as (server, _):
        status, answer = post(server, path, body)
    assert status == 400 and problem in json.dumps(answer)
