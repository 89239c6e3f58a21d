"""Embeddings and responses, as OpenAI's own client sees them."""

import base64
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import openai
import pytest
import torch
from server_for_tests import LIMITS, Running, running
from test_serve import client_of, idle, post
from test_tools import WEATHER, check_weather
from transformers import AutoModelForCausalLM

from bloomery.serve.kept import KeptResponses
from bloomery.serve.limits import Refused
from models_for_tests import make_chat_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(
        tmp_path_factory.mktemp("endpoints") / "chat", "<tool_call>", "</tool_call>"
    )


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(
        {"chat": folder}, template="qwen", limits=replace(LIMITS, context=2048, new_tokens=400)
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return client_of(server)


class TestEmbeddings:
    TEXTS = ("def f(x):", "für Größe, naïve café, 東京", "a")

    @pytest.mark.parametrize("pooling", ["mean", "last"])
    def test_they_are_pooled_hidden_states_of_transformers(
        self,
        client: openai.OpenAI,
        server: Running,
        folder: Path,
        pooling: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(
            "bloomery.serve.served.PIECE", 5
        )  # tokens of a text are read in several forwards
        reference, tokenizer = (
            AutoModelForCausalLM.from_pretrained(folder),
            server.models[0].tokenizer,
        )
        answer = client.embeddings.create(
            model="chat", input=list(self.TEXTS), extra_body={"pooling": pooling}
        )
        assert [entry.index for entry in answer.data] == [0, 1, 2]
        for text, entry in zip(self.TEXTS, answer.data, strict=True):
            ids = torch.tensor([tokenizer.encode_prompt(text)])
            with torch.no_grad():
                hidden = reference(ids, output_hidden_states=True).hidden_states[-1][0]
            pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
            expected = torch.nn.functional.normalize(pooled, dim=0)
            torch.testing.assert_close(torch.tensor(entry.embedding), expected, atol=1e-5, rtol=0)
        assert answer.usage.prompt_tokens == sum(
            len(tokenizer.encode_prompt(text)) for text in self.TEXTS
        )

    def test_ids_and_both_encodings_give_the_same(self, server: Running) -> None:
        ids = server.models[0].tokenizer.encode_prompt("def f")
        asked = [
            {"input": "def f"},
            {"input": ids},
            {"input": [ids]},
            {"input": "def f", "encoding_format": "base64"},
        ]
        found = []
        for body in asked:
            status, answer = post(server, "/v1/embeddings", body)
            assert status == 200, answer
            vector = answer["data"][0]["embedding"]
            if isinstance(vector, str):
                raw = base64.b64decode(vector)
                vector = list(struct.unpack(f"<{len(raw) // 4}f", raw))
            found.append(vector)
        assert all(vector == pytest.approx(found[0], abs=1e-6) for vector in found)
        assert math.hypot(*found[0]) == pytest.approx(1, abs=1e-5)

    @pytest.mark.parametrize(
        ("body", "parameter"),
        [
            ({"input": ""}, "input"),
            ({"input": []}, "input"),
            ({"input": ["a"] * 257}, "input"),
            ({"input": "a", "dimensions": 7}, "dimensions"),
            ({"input": "x " * 5000}, "input"),
            ({"input": [99999]}, "input"),
            ({"input": "a", "pooling": "max"}, "pooling"),
        ],
    )
    def test_what_is_refused(self, server: Running, body: dict, parameter: str) -> None:
        status, answer = post(server, "/v1/embeddings", body)
        if body["input"] == "":  # BOS alone, where the tokenizer has one
            assert status in (200, 400)
            return
        assert (status, answer["error"]["param"]) == (400, parameter)
        assert idle(server)


class TestResponses:
    def test_a_response_is_that_of_chat(self, client: openai.OpenAI) -> None:
        settings = {"model": "chat", "temperature": 0.0}
        turns = [{"role": "system", "content": "b"}, {"role": "user", "content": "für"}]
        reply = client.chat.completions.create(messages=turns, max_tokens=30, **settings).choices[0]
        items = [{"role": "user", "content": [{"type": "input_text", "text": "für"}]}]
        for given in ("für", items):
            response = client.responses.create(
                input=given, instructions="b", max_output_tokens=30, **settings
            )
            assert response.output_text == reply.message.content
            assert response.status == (
                "completed" if reply.finish_reason == "stop" else "incomplete"
            )
            assert (
                response.usage.total_tokens
                == response.usage.input_tokens + response.usage.output_tokens
            )
        again = [
            *items,
            *(item.model_dump() for item in response.output),
            {"role": "user", "content": "a"},
        ]
        assert (
            client.responses.create(input=again, max_output_tokens=5, **settings).output[0].role
            == "assistant"
        )

    def test_events_are_those_that_the_client_assembles(self, client: openai.OpenAI) -> None:
        settings = {"model": "chat", "input": "für", "temperature": 0.0, "max_output_tokens": 30}
        whole = client.responses.create(**settings)
        with client.responses.stream(**settings) as stream:
            events = list(stream)
            final = events[-1].response
        text = "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        )
        assert text == final.output_text == whole.output_text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == f"response.{final.status}" and final.usage == whole.usage

    def test_json_schema(self, client: openai.OpenAI) -> None:
        schema = {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
        form = {
            "format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
        }
        answer = client.responses.create(model="chat", input="a", text=form, max_output_tokens=60)
        assert answer.status == "completed" and isinstance(
            json.loads(answer.output_text)["ok"], bool
        )

    TOOL: ClassVar = {"type": "function", **WEATHER["function"], "strict": True}

    @pytest.mark.parametrize(
        "choice",
        [
            "required",
            {"type": "function", "name": "weather"},
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "weather"}],
            },
        ],
    )
    def test_a_call_is_an_item_streamed_or_not(self, client: openai.OpenAI, choice: object) -> None:
        settings = {
            "model": "chat",
            "input": "a",
            "tools": [{"type": "function", "name": "clock"}, self.TOOL],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "max_output_tokens": 300,
            "extra_body": {"seed": 1},
        }
        whole = client.responses.create(**settings)
        [call] = whole.output
        assert (whole.status, call.type, call.status) == (
            "completed",
            "function_call",
            "completed",
        )
        if choice != "required":
            check_weather(call.arguments)
        with client.responses.stream(**settings) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[:3] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
        ]
        assert kinds[-3:] == [
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert set(kinds[3:-3]) == {"response.function_call_arguments.delta"}
        text = "".join(event.delta for event in events[3:-3])
        assert text == events[-3].arguments == final.output[0].arguments == call.arguments
        added = events[2].item
        assert (added.name, added.arguments, added.status) == (call.name, "", "in_progress")

    def test_results_go_back_with_the_conversation_an_id_or_references(
        self, client: openai.OpenAI, server: Running
    ) -> None:
        asked = {"model": "chat", "tools": [self.TOOL], "temperature": 0.0}
        first = client.responses.create(
            **asked, input="a", tool_choice="required", max_output_tokens=300
        )
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "warm"}
            for item in first.output
        ]
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        turn = {"role": "user", "content": "a"}
        inputs = (
            {"input": [turn, *first.output, *results]},
            {"input": results, "previous_response_id": first.id},
            {"input": [turn, *references, *results]},
        )
        answers = [
            client.responses.create(**asked, **body, max_output_tokens=20) for body in inputs
        ]
        assert len({answer.output_text for answer in answers}) == 1
        assert len({answer.usage.input_tokens for answer in answers}) == 1
        # The same conversation in the words of a chat.
        calls = [
            {
                "id": item.call_id,
                "type": "function",
                "function": {"name": item.name, "arguments": item.arguments},
            }
            for item in first.output
        ]
        turns = [turn, {"role": "assistant", "tool_calls": calls}]
        turns += [
            {"role": "tool", "tool_call_id": item.call_id, "content": "warm"}
            for item in first.output
        ]
        body = {"messages": turns, "tools": [WEATHER], "temperature": 0.0, "max_tokens": 20}
        body["tools"] = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]
        usage = post(server, "/v1/chat/completions", body)[1]["usage"]
        assert usage["prompt_tokens"] == answers[0].usage.input_tokens

        assert client.responses.retrieve(first.id).output[0].arguments == first.output[0].arguments
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
            client.responses.create(**asked, **inputs[1])
        unkept = client.responses.create(**asked, input="a", store=False, max_output_tokens=2)
        assert not unkept.store
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(unkept.id)

    def test_with_a_schema_an_answer_is_a_call_or_json(self, client: openai.OpenAI) -> None:
        schema = {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
        form = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
        for choice, kind in (("none", "message"), ("required", "function_call")):
            response = client.responses.create(
                model="chat",
                input="a",
                text=form,
                tools=[self.TOOL],
                tool_choice=choice,
                max_output_tokens=300,
                extra_body={"seed": 1},
            )
            assert response.output[0].type == kind and response.status == "completed"

    def test_log_probabilities_are_those_of_chat(self, client: openai.OpenAI) -> None:
        turns = [{"role": "user", "content": "a"}]
        asked = {"model": "chat", "temperature": 0.0, "top_logprobs": 2}
        reply = client.chat.completions.create(
            messages=turns, logprobs=True, max_tokens=8, **asked
        ).choices[0]
        response = client.responses.create(
            input="a", include=["message.output_text.logprobs"], max_output_tokens=8, **asked
        )
        entries = response.output[0].content[0].logprobs
        expected_entries = reply.logprobs.content[: len(entries)]
        assert [entry.token for entry in entries] == [entry.token for entry in expected_entries]
        # The second request reads one token after the past of the first, which a matmul of PyTorch may round otherwise.
        for entry, expected in zip(entries, expected_entries, strict=True):
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-5)
            assert [top.token for top in entry.top_logprobs] == [
                top.token for top in expected.top_logprobs
            ]
            for top, expected_top in zip(entry.top_logprobs, expected.top_logprobs, strict=True):
                assert top.logprob == pytest.approx(expected_top.logprob, abs=1e-5)
        assert entries

    def test_parameters_that_ask_for_nothing_are_taken(self, server: Running) -> None:
        body = {
            "input": "a",
            "max_output_tokens": 1,
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "text": {"verbosity": "low"},
            "truncation": "auto",
            "service_tier": "auto",
            "max_tool_calls": 3,
            "prompt_cache_key": "a",
            "safety_identifier": "b",
            "stream_options": {"include_obfuscation": False},
            "background": False,
        }
        status, answer = post(server, "/v1/responses", body)
        assert status == 200, answer
        assert answer["reasoning"]["effort"] == "low" and answer["prompt_cache_key"] == "a"

    def test_kept_responses_have_a_bound(self) -> None:
        kept = KeptResponses(most_bytes=3000)
        for number in range(50):
            item = {"id": f"msg_{number}", "type": "message", "content": "a" * 500}
            kept.keep({"id": f"resp_{number}", "output": [item]}, [])
        assert kept.item("msg_49")["id"] == "msg_49"
        for gone in (kept.of, kept.conversation):
            with pytest.raises(Refused):
                gone("resp_0")
        with pytest.raises(Refused):
            kept.item("msg_0")
        large = {"id": "msg_x", "type": "message", "content": "a" * 5000}
        kept.keep({"id": "resp_x", "output": [large]}, [])
        with pytest.raises(Refused):
            kept.of("resp_x")

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ({"previous_response_id": "resp_1"}, "no such response"),
            ({"tools": [{"type": "web_search"}]}, "'web_search' is not supported"),
            (
                {
                    "input": [
                        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
                    ]
                },
                "reads text alone",
            ),
            ({"temperature": 3}, "temperature"),
            ({"input": []}, "input"),
            ({"background": True}, "background"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"include": ["wishes"]}, "include"),
            ({"input": [{"type": "computer_call", "id": "x"}]}, "computer_call"),
            ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "no such item"),
            ({"tools": [TOOL, TOOL]}, "one name"),
            ({"tool_choice": "required"}, "needs tools"),
        ],
    )
    def test_what_is_refused(self, server: Running, body: dict, words: str) -> None:
        status, answer = post(server, "/v1/responses", {"model": "chat", "input": "a"} | body)
        assert status == 400 and words in answer["error"]["message"], answer
