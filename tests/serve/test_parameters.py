"""Which parameters of a request are taken: one rule for null, one table for values that ask for nothing."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
from pydantic import BaseModel
from server_for_tests import LIMITS, Running, running
from test_serve import client_of, post

from bloomery.serve.embeddings import EmbeddingsRequest
from bloomery.serve.limits import Refused
from bloomery.serve.messages import CountRequest, MessagesRequest
from bloomery.serve.parameters import NO_EFFECT, parsed
from bloomery.serve.requests import ChatRequest, CompletionRequest
from bloomery.serve.responses import ResponsesRequest
from models_for_tests import make_chat_model

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TURNS = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ENDPOINTS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    CHAT: (ChatRequest, {"messages": TURNS, "max_tokens": 1}),
    TEXT: (CompletionRequest, {"prompt": "a", "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "a", "max_output_tokens": 1}),
    "/v1/messages": (MessagesRequest, {"messages": TURNS, "max_tokens": 1}),
    "/v1/messages/count_tokens": (CountRequest, {"messages": TURNS}),
    "/v1/embeddings": (EmbeddingsRequest, {"input": "a"}),
}
VARIABLE_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}quick {{ reasoning_effort }}{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parameters") / "chat"
    return make_chat_model(folder, "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    limits = replace(LIMITS, context=2048, new_tokens=400)
    with running({"chat": folder}, template="qwen", limits=limits) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return client_of(server)


def error_of(answer: dict) -> dict:
    return answer["error"]


class TestNull:
    @pytest.mark.parametrize("path", ENDPOINTS)
    def test_null_is_a_parameter_that_was_left_out(self, server: Running, path: str) -> None:
        kind, body = ENDPOINTS[path]
        names = {field.alias or name for name, field in kind.model_fields.items()}
        nulls = dict.fromkeys((names | set(NO_EFFECT)) - set(body))
        status, answer = post(server, path, {**nulls, **body})
        assert status == 200, answer

    def test_inside_of_messages_tools_and_formats_too(self, server: Running) -> None:
        call = {
            "id": "a",
            "type": None,
            "function": {"name": "f", "arguments": "{}"},
            "index": None,
        }
        assistant = {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [call],
        }
        result = {"role": "tool", "tool_call_id": "a", "content": "b", "name": None}
        tool = {"type": "function", "function": {**TOOL["function"], "strict": None}}
        schema = {"type": "object", "properties": {"a": {"const": None}}}
        schema |= {"required": ["a"], "additionalProperties": False}
        named = {"name": "x", "description": None, "schema": schema, "strict": None}
        body = {
            "messages": [*TURNS, assistant, result],
            "tools": [tool],
            "tool_choice": "none",
            "response_format": {"type": "json_schema", "json_schema": named},
            "stream_options": {"include_usage": None},
            "max_tokens": 40,
        }
        status, answer = post(server, CHAT, body)
        assert status == 200, answer
        # Nulls of a schema are the client's.
        assert json.loads(answer["choices"][0]["message"]["content"])["a"] is None

    def test_a_required_parameter_is_missing(self, server: Running) -> None:
        status, answer = post(server, CHAT, {"messages": None})
        assert (status, error_of(answer)["param"]) == (400, "messages")


class TestValuesWithoutEffect:
    TAKEN: ClassVar = {
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "default",
        "modalities": ["text"],
        "user": "a",
        "safety_identifier": "a",
        "prompt_cache_key": "a",
        "prompt_cache_retention": "24h",
        "functions": [],
        "ignore_eos": False,
        "skip_special_tokens": True,
        "add_generation_prompt": True,
        "length_penalty": 1.0,
        "typical_p": 1,
        "use_beam_search": False,
        "documents": [],
        "priority": 0,
        "prediction": {"type": "content", "content": "a"},
    }
    REFUSED: ClassVar = {
        "metadata": "a",
        "store": True,
        "service_tier": "priority",
        "modalities": ["text", "audio"],
        "functions": [{"name": "f"}],
        "ignore_eos": True,
        "priority": False,
        "length_penalty": True,
        "web_search_options": {},
        "guided_regex": "a+",
        "truncate_prompt_tokens": 3,
        "thread": {"type": "create"},
    }

    @pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/messages"])
    def test_all_are_taken_together(self, server: Running, path: str) -> None:
        status, answer = post(server, path, {**ENDPOINTS[path][1], **self.TAKEN})
        assert status == 200, answer

    @pytest.mark.parametrize(("name", "value"), REFUSED.items())
    def test_a_value_that_asks_for_more_is_refused_by_name(self, name: str, value: object) -> None:
        for kind, body in ENDPOINTS.values():
            if name in kind.model_fields:
                continue
            with pytest.raises(Refused, match=name) as caught:
                parsed(kind, json.dumps({**body, name: value}).encode())
            assert error_of(caught.value.body)["param"] == name

    @pytest.mark.parametrize("name", NO_EFFECT)
    def test_no_entry_takes_everything(self, name: str) -> None:
        taken = [
            value
            for value in (True, 7, "?", ["?"], {"?": ["?"]}, None)
            if NO_EFFECT[name][0](value)
        ]
        assert len(taken) <= 2 and NO_EFFECT[name][1]

    def test_an_unknown_parameter_is_refused_by_name(self, server: Running) -> None:
        for path, (_, body) in ENDPOINTS.items():
            status, answer = post(server, path, {**body, "wishes": 1})
            assert status == 400 and "wishes" in error_of(answer)["message"]

    def test_no_limit_of_top_k(self, client: openai.OpenAI) -> None:
        asked = {"model": "chat", "prompt": "def", "max_tokens": 20, "seed": 1}
        free = client.completions.create(**asked).choices[0].text
        for value in (-1, 0, None):
            same = client.completions.create(**asked, extra_body={"top_k": value}).choices[0].text
            assert same == free
        greedy = client.completions.create(**asked, extra_body={"top_k": 1}).choices[0].text
        assert greedy != free

    @pytest.mark.parametrize("name", ["", "dummy", "tgi", None])
    def test_a_model_without_a_name_is_the_only_one(
        self, server: Running, name: str | None
    ) -> None:
        status, answer = post(server, CHAT, {"model": name, "messages": TURNS, "max_tokens": 1})
        assert (status, answer["model"]) == (200, "chat")


class TestTokens:
    def test_logit_bias_makes_tokens_certain_or_impossible(
        self, client: openai.OpenAI, server: Running
    ) -> None:
        [token] = server.models[0].tokenizer.encode("a")
        asked = {"model": "chat", "prompt": "def", "max_tokens": 8, "seed": 1}
        certain = client.completions.create(**asked, logit_bias={str(token): 100})
        assert certain.choices[0].text == "a" * 8
        greedy = client.completions.create(**asked, temperature=0.0, logprobs=0).choices[0]
        [first] = server.models[0].tokenizer.encode(greedy.logprobs.tokens[0])
        other = client.completions.create(
            **asked, temperature=0.0, logprobs=0, logit_bias={str(first): -100}
        )
        assert greedy.logprobs.tokens[0] not in other.choices[0].logprobs.tokens

    def test_stop_token_ids_end_the_text(self, client: openai.OpenAI, server: Running) -> None:
        [token] = server.models[0].tokenizer.encode("a")
        asked = {"model": "chat", "prompt": "def", "max_tokens": 8}
        body = {"logit_bias": {str(token): 100}, "stop_token_ids": [token]}
        choice = client.completions.create(**asked, extra_body=body).choices[0]
        assert (choice.text, choice.finish_reason) == ("", "stop")

    @pytest.mark.parametrize("body", [{"logit_bias": {"99999": 1}}, {"stop_token_ids": [99999]}])
    def test_unknown_tokens_are_refused(self, server: Running, body: dict) -> None:
        status, answer = post(server, TEXT, {"prompt": "a", "max_tokens": 1, **body})
        assert (status, error_of(answer)["param"]) == (400, next(iter(body)))


class TestTemplate:
    def test_variables_reach_the_template_and_unknown_ones_are_refused(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running({"chat": folder}, template=VARIABLE_TEMPLATE) as server:
            model = server.models[0]
            prompts = list[str]()
            encode = model.encode_chat

            def noted(*arguments: Any) -> list[int]:
                ids = encode(*arguments)
                prompts.append(model.tokenizer.decode(ids))
                return ids

            monkeypatch.setattr(model, "encode_chat", noted)
            asked = {"messages": TURNS, "max_tokens": 1}
            quiet = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
            for body in (quiet, {"reasoning_effort": "none"}, {}):
                assert post(server, CHAT, {**asked, **body})[0] == 200
            assert prompts[0].endswith("quick low") and prompts[1].endswith("quick none")
            assert prompts[2].endswith("assistant\n")
            # A thought that is sent back reaches the template.
            thought = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
            assert post(server, CHAT, {**asked, "messages": [*TURNS, thought, *TURNS]})[0] == 200
            assert "b[hm]<|im_end|>" in prompts[3]
            other = {"chat_template_kwargs": {"thinking_budget": 3}}
            status, answer = post(server, CHAT, {**asked, **other})
            assert (status, error_of(answer)["param"]) == (400, "chat_template_kwargs")
            # What the template lacks may be switched off.
            off = {"chat_template_kwargs": {"thinking": False, "messages": False}}
            assert post(server, CHAT, {**asked, **off})[0] == 200
            assert prompts[4] == prompts[2]


class TestMessagesSentBack:
    @pytest.mark.parametrize(
        "extra",
        [
            {"parsed": {"a": 1}},
            {"refusal": None, "annotations": [], "audio": None},
            {"reasoning": "hm", "provider_specific_fields": {"a": 1}},
            {"content": [{"type": "text", "text": "b", "annotations": []}]},
            {"content": [{"type": "refusal", "refusal": "no"}]},
            {"content": None, "refusal": "no"},
            {"content": None, "reasoning_content": "hm"},
        ],
    )
    def test_an_answer_is_taken_as_it_came(self, server: Running, extra: dict) -> None:
        turn = {"role": "assistant", "content": "b", **extra}
        body = {"messages": [*TURNS, turn, *TURNS], "max_tokens": 1}
        status, answer = post(server, CHAT, body)
        assert status == 200, answer

    @pytest.mark.parametrize("arguments", ["", "{}", {}, '{"a": 1}', {"a": 1}])
    def test_calls_are_taken_as_they_came(self, server: Running, arguments: object) -> None:
        function = {"name": "f", "arguments": arguments, "parsed_arguments": {"a": 1}}
        call = {"id": "a", "type": "function", "index": 0, "function": function}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "a", "content": "b"}
        body = {"messages": [*TURNS, turn, result], "tools": [TOOL], "max_tokens": 1}
        status, answer = post(server, CHAT, body)
        assert status == 200, answer

    @pytest.mark.parametrize(
        ("turn", "words"),
        [
            ({"role": "assistant", "function_call": {"name": "f"}}, "send tool_calls"),
            ({"role": "assistant", "content": "a", "audio": {"id": "b"}}, "audio"),
            ({"role": "assistant", "content": "a", "wishes": 1}, "wishes"),
        ],
    )
    def test_what_has_a_meaning_is_refused(self, server: Running, turn: dict, words: str) -> None:
        status, answer = post(server, CHAT, {"messages": [*TURNS, turn, *TURNS], "max_tokens": 1})
        assert status == 400 and words in error_of(answer)["message"]


class TestFormats:
    @pytest.mark.parametrize(
        "form",
        [
            {"type": "json", "value": SCHEMA},
            {"type": "json_object", "value": SCHEMA},
            {"type": "json_schema", "value": {"name": "a", "schema": SCHEMA}},
        ],
    )
    def test_a_schema_of_text_generation_inference(self, server: Running, form: dict) -> None:
        body = {"messages": TURNS, "max_tokens": 60, "response_format": form}
        status, answer = post(server, CHAT, body)
        assert status == 200, answer
        assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["ok"], bool)

    def test_a_regular_expression_is_refused(self, server: Running) -> None:
        form = {"type": "regex", "value": "a+"}
        status, answer = post(server, CHAT, {"messages": TURNS, "response_format": form})
        assert status == 400 and "regex is not supported" in error_of(answer)["message"]
