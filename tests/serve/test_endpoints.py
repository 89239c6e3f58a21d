"""Embeddings and responses, as OpenAI's own client sees them."""

import base64
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from server_for_tests import LIMITS, Running, running
from test_serve import client_of, idle, post
from transformers import AutoModelForCausalLM

from bloomery.serve import embeddings
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
        monkeypatch.setattr(embeddings, "PIECE", 5)  # tokens of a text are read in several forwards
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

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ({"previous_response_id": "resp_1"}, "no such response"),
            ({"tools": [{"type": "web_search"}]}, "tools"),
            (
                {
                    "input": [
                        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
                    ]
                },
                "images",
            ),
            ({"temperature": 3}, "temperature"),
            ({"input": []}, "input"),
            ({"background": True}, "background"),
        ],
    )
    def test_what_is_refused(self, server: Running, body: dict, words: str) -> None:
        status, answer = post(server, "/v1/responses", {"model": "chat", "input": "a"} | body)
        assert status == 400 and words in answer["error"]["message"], answer
