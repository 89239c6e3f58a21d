"""Thoughts before an answer: split from it however the text arrives, in every endpoint, with calls and schemas."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from server_for_tests import LIMITS, Running, running
from test_serve import client_of, post
from test_tools import HERMES, WEATHER, check_weather

from bloomery.data.chat.thoughts import (
    COHERE_ANSWER,
    FORMATS,
    ThoughtFormat,
    has_thought,
    is_thinking,
    thought_format,
)
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.grammar import JsonGrammars
from bloomery.serve.thoughts import AnswerForm
from bloomery.serve.tools import AnswerRules, answer_grammar
from models_for_tests import make_chat_model

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
THINK = FORMATS[0]
TURNS = [{"role": "user", "content": "a"}]
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thoughts") / "chat"
    return make_chat_model(folder, "<tool_call>", "</tool_call>", "<think>", "</think>")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    limits = replace(LIMITS, context=2048, new_tokens=400)
    with running({"chat": folder}, template=TEMPLATE, limits=limits) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return client_of(server)


def read(form: AnswerForm, text: str, cut: int) -> tuple[str, str, int]:
    """Thought, content and the number of calls of a text that arrives in pieces."""
    parser = form.parser()
    pieces = [text[start : start + cut] for start in range(0, len(text), cut)]
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    thought = "".join(part.thought for part in parts)
    return thought, "".join(part.content for part in parts), parser.calls


class TestParser:
    @pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
    @pytest.mark.parametrize(
        ("inside", "text", "thought", "content"),
        [
            (False, "<think>\nhm\n\nso\n</think>\n\nYes.", "hm\n\nso", "Yes."),
            (False, "\n<think>hm</think>Yes </think> no", "hm", "Yes </think> no"),
            (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
            (False, "Yes <think> no </think>", "", "Yes <think> no </think>"),
            (False, "<thin", "", "<thin"),
            (False, "  a", "", "  a"),
            (True, "hm\n</think>\n\nYes.\n", "hm", "Yes.\n"),
            (True, "hm </thi", "hm </thi", ""),
            (True, "", "", ""),
        ],
    )
    def test_a_thought_is_split_off_however_it_arrives(
        self, inside: bool, text: str, thought: str, content: str, cut: int
    ) -> None:
        assert read(AnswerForm(None, THINK, inside), text, cut) == (thought, content, 0)

    @pytest.mark.parametrize("cut", [1, 5, 1000])
    def test_a_call_after_a_thought_is_a_call(self, cut: int) -> None:
        call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        text = f"<think>\nno {call} yet\n</think>\n\n{call}"
        thought, content, calls = read(AnswerForm(HERMES, THINK), text, cut)
        assert (thought, content, calls) == (f"no {call} yet", "", 1)

    def test_the_template_shows_the_markup(self) -> None:
        assert thought_format(TEMPLATE) == THINK and thought_format("{{ messages }}") is None
        assert thought_format("{{ '[THINK]' + t + '[/THINK]' }}") == ThoughtFormat(
            "[THINK]", "[/THINK]"
        )
        assert is_thinking("assistant\n<think>\n", THINK) and not is_thinking("a", THINK)
        assert has_thought("assistant\n<think>\n\n</think>\n\n", THINK)


class TestGrammar:
    # The markup is one token, or text.
    @pytest.mark.parametrize("thought", [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
    @pytest.mark.parametrize("inside", [False, True])
    def test_a_thought_may_stand_before_a_call_and_before_json(
        self, folder: Path, thought: tuple[str, str], inside: bool
    ) -> None:
        tokenizer = load_tokenizer(folder)
        end = tokenizer.id_of("<|im_end|>")
        opening, closing_mark = thought
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
        begin = "" if inside else opening
        for answer in (call, '{"ok": true}'):
            rules = AnswerRules(
                [WEATHER],
                parallel=True,
                schema=SCHEMA,
                thought=ThoughtFormat(*thought),
                inside=inside,
            )
            grammar = answer_grammar(rules, HERMES, tokenizer, [end])
            texts = [f"{begin}\nhm\n{closing_mark}\n\n{answer}"] + ([] if inside else [answer])
            with closing(JsonGrammars(tokenizer, tokenizer.vocab_size, [end])) as grammars:
                for text in texts:
                    follow = grammars.follow(grammar)
                    for token in (*tokenizer.encode(text), end):
                        logits = follow.masked(torch.zeros(tokenizer.vocab_size))
                        assert logits[token] == 0, (text, tokenizer.decode([token]))
                        follow.take(token)


class TestEndpoints:
    """The bias ends the thought of a random model after some tokens."""

    def asked(self, server: Running) -> dict:
        bias = {str(server.models[0].tokenizer.id_of("</think>")): 4}
        return {"messages": TURNS, "max_tokens": 300, "seed": 3, "logit_bias": bias}

    def test_chat_has_reasoning_content_streamed_or_not(self, server: Running) -> None:
        form = {"name": "a", "schema": SCHEMA}
        body = self.asked(server) | {
            "response_format": {"type": "json_schema", "json_schema": form}
        }
        status, answer = post(server, "/v1/chat/completions", body)
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        assert isinstance(json.loads(message["content"])["ok"], bool)
        assert message["reasoning_content"] and "</think>" not in message["reasoning_content"]
        chunks = list(client_of(server).chat.completions.create(model="chat", stream=True, **body))
        deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
        thought = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        content = "".join(delta["content"] or "" for delta in deltas)
        assert (thought, content) == (message["reasoning_content"], message["content"])

    def test_a_call_follows_a_thought(self, server: Running) -> None:
        body = self.asked(server) | {"tools": [WEATHER], "tool_choice": "required"}
        body["parallel_tool_calls"] = False
        message = post(server, "/v1/chat/completions", body)[1]["choices"][0]["message"]
        check_weather(message["tool_calls"][0]["function"]["arguments"])
        assert message["reasoning_content"] and message["content"] is None

    def test_responses_have_a_reasoning_item(self, client: openai.OpenAI) -> None:
        # /v1/responses has no bias: with some seed the model ends its thought by itself.
        form = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
        asked = {"model": "chat", "input": "a", "text": form, "max_output_tokens": 400}
        for seed in range(20):
            with client.responses.stream(**asked, extra_body={"seed": seed}) as stream:
                events = list(stream)
            output = events[-1].response.output
            assert output[0].type == "reasoning" and "</think>" not in output[0].content[0].text
            if events[-1].type == "response.completed":
                break
        thought = "".join(
            event.delta for event in events if event.type == "response.reasoning_text.delta"
        )
        assert thought == output[0].content[0].text
        assert isinstance(json.loads(output[1].content[0].text)["ok"], bool)
        assert events[-1].response.usage.output_tokens_details.reasoning_tokens > 0
        again = [*TURNS, *(item.model_dump() for item in output), *TURNS]
        assert client.responses.create(model="chat", input=again, max_output_tokens=1).output

    def test_messages_have_a_thinking_block(self, server: Running) -> None:
        form = {"type": "json_schema", "schema": SCHEMA}
        body = {"messages": TURNS, "max_tokens": 400, "output_config": {"format": form}}
        for seed in range(20):
            status, answer = post(server, "/v1/messages", {**body, "seed": seed})
            assert status == 200 and answer["content"][0]["type"] == "thinking"
            if answer["stop_reason"] == "end_turn":
                break
        thinking, text = answer["content"]
        assert thinking["thinking"] and isinstance(json.loads(text["text"])["ok"], bool)
        again = [*TURNS, {"role": "assistant", "content": answer["content"]}, *TURNS]
        assert post(server, "/v1/messages", {"messages": again, "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_markup_around_an_answer_is_no_part_of_it(cut: int) -> None:
    """Of Cohere's templates, with a thought before it, and without tools."""
    thoughts = ThoughtFormat("<|START_THINKING|>", "<|END_THINKING|>")
    form = AnswerForm(None, thoughts, around=COHERE_ANSWER)
    text = "<|START_THINKING|>I say so.<|END_THINKING|><|START_RESPONSE|>So <|it is|> <|END_RESP<|END_RESPONSE|>"
    assert read(form, text, cut) == ("I say so.", "So <|it is|> <|END_RESP", 0)
    assert read(form, "plain <|START_", cut) == ("", "plain <|START_", 0)
