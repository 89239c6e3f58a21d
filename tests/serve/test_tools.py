"""Tool calls, as OpenAI's own client sees them, in each form in which chat templates write them."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from server_for_tests import LIMITS, Running, grammar_takes, running
from test_serve import client_of, post

from bloomery.core.errors import UserError
from bloomery.data.chat.tool_forms import FORMS, ToolFormat, tool_format
from bloomery.data.chat.tools import ToolParser, calls_in
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.decode import sample_tokens
from bloomery.infer.grammar import JsonGrammars
from bloomery.infer.sampling import Sampling
from bloomery.serve.tools import AnswerRules, answer_grammar
from models_for_tests import make_chat_model
from tool_templates import (
    GLM_TEMPLATE,
    LFM_TEMPLATE,
    MINISTRAL_TEMPLATE,
    OLMO_TEMPLATE,
    QWEN_XML_TEMPLATE,
)

LONG = replace(LIMITS, context=2048, new_tokens=400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("tools") / "chat", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running({"chat": folder}, template="qwen", limits=LONG) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return client_of(server)


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Bern", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TYPED = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "$defs": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
            "properties": {
                "text": {"type": "string"},
                "n": {"$ref": "#/$defs/n"},
                "on": {"type": "boolean"},
                "many": {"type": "array"},
                "either": {"type": ["string", "integer"]},
            },
        },
    },
}
HERMES, QWEN_XML, GLM, MISTRAL, MINISTRAL, LFM, OLMO, LLAMA = (
    FORMS[name][0]
    for name in (
        "Hermes and Qwen up to 3 and Granite 4",
        "Qwen 3.5 and Qwen3-Coder",
        "GLM 4.5 and later",
        "Mistral",
        "Ministral 3",
        "LFM 2.5",
        "Olmo 3",
        "Llama 3.1",
    )
)
GLM_CLOSE = FORMS["GLM 4.5 and later"][1]  # without line breaks
MARKS = ("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]", "<tool_call>", "</tool_call>")
MARKS += ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
MARKS += ("<|tool_call_start|>", "<|tool_call_end|>")
LLAMA_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if tools and loop.first %}{{ tools | tojson }}{% endif %}
{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}
{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MISTRAL_TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.role == "user" %}
{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
[INST] {{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}
{% if c.id | length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif %}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- elif m.role == "tool" %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}{{ eos_token }}
{%- endif %}{% endfor %}"""


def calls_of(chunks: list) -> tuple[str, list[dict], str | None]:
    """Content, calls and reason of a stream."""
    content, calls, reason = "", list[dict](), None
    for chunk in chunks:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.function.name is not None:
                    assert call.index == len(calls) and call.id
                    calls.append({"name": call.function.name, "arguments": ""})
                calls[call.index]["arguments"] += call.function.arguments or ""
    return content, calls, reason


def check_weather(arguments: str) -> None:
    found = json.loads(arguments)
    assert (
        set(found) == {"city", "days"}
        and found["city"] in ("Bern", "Rome")
        and 1 <= found["days"] <= 9
    )


class TestTools:
    TURNS = ({"role": "user", "content": "a"},)

    def test_a_named_tool_is_called_with_arguments_of_its_schema(
        self, client: openai.OpenAI
    ) -> None:
        named = {"type": "function", "function": {"name": "weather"}}
        asked = {
            "model": "chat",
            "messages": self.TURNS,
            "tools": [CLOCK, WEATHER],
            "tool_choice": named,
            "parallel_tool_calls": False,
            "max_tokens": 300,
        }
        for seed in range(4):
            choice = client.chat.completions.create(seed=seed, **asked).choices[0]
            [call] = choice.message.tool_calls
            assert (choice.finish_reason, call.type, call.function.name) == (
                "tool_calls",
                "function",
                "weather",
            )
            assert choice.message.content is None
            check_weather(call.function.arguments)
            content, calls, reason = calls_of(
                list(client.chat.completions.create(seed=seed, stream=True, **asked))
            )
            assert (content, reason) == ("", "tool_calls")
            assert calls == [{"name": "weather", "arguments": call.function.arguments}]

    def test_a_call_and_its_result_go_back_into_the_conversation(
        self, client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = {
            "model": "chat",
            "messages": self.TURNS,
            "tools": [WEATHER],
            "max_tokens": 300,
            "seed": 1,
        }
        message = client.chat.completions.create(tool_choice="required", **asked).choices[0].message
        assert message.tool_calls
        rendered, model = list[str](), server.models[0]
        encode = model.encode_chat
        monkeypatch.setattr(
            model,
            "encode_chat",
            lambda turns, *more: (
                rendered.append(model.form.render(turns, more[0])),
                encode(turns, *more),
            )[1],
        )
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "warm"}
            for call in message.tool_calls
        ]
        turns = [*self.TURNS, message.model_dump(exclude_none=True), *results]
        client.chat.completions.create(**asked | {"messages": turns, "max_tokens": 2})
        call = {
            "name": "weather",
            "arguments": json.loads(message.tool_calls[0].function.arguments),
        }
        assert f"<tool_call>\n{json.dumps(call)}\n</tool_call>" in rendered[0]
        assert (
            "<tool_response>\nwarm\n</tool_response>" in rendered[0]
            and "weather of a city" in rendered[0]
        )

    def test_the_model_may_answer_without_a_call_and_none_hides_the_tools(
        self, client: openai.OpenAI, server: Running
    ) -> None:
        asked = {"model": "chat", "messages": self.TURNS, "temperature": 0.0, "max_tokens": 20}
        plain = client.chat.completions.create(**asked)
        none = client.chat.completions.create(tools=[WEATHER], tool_choice="none", **asked)
        assert none.choices[0].message.content == plain.choices[0].message.content
        assert none.usage.prompt_tokens == plain.usage.prompt_tokens
        auto = client.chat.completions.create(
            tools=[WEATHER], **asked | {"seed": 3, "temperature": 1.0}
        )
        assert auto.usage.prompt_tokens > plain.usage.prompt_tokens
        assert auto.choices[0].finish_reason in ("stop", "length", "tool_calls")

    @pytest.mark.parametrize("seed", range(3))
    def test_a_call_that_begins_in_free_text_follows_its_schema(
        self, server: Running, seed: int
    ) -> None:
        # The model is steered to open a call; all that follows is its own.
        model = server.models[0]
        grammar = model.answer_text(AnswerRules([WEATHER, CLOCK], parallel=True))
        opening, text = model.tokenizer.id_of("<tool_call>"), "so: "
        for token in (*model.tokenizer.encode(text), opening):
            grammar.take(token)
        ids = [*model.tokenizer.encode(text), opening]
        sampling = Sampling(
            max_new_tokens=400, temperature=1.0, seed=seed, stop_ids=model.grammar_ends
        )
        new = list(sample_tokens(model.decoder, ids, sampling, constraint=grammar))
        parser, calls = ToolParser(model.tools), dict[int, list[str]]()
        for part in (*parser.push(model.tokenizer.decode([*ids, *new])), *parser.flush()):
            if part.call is None:
                continue
            calls.setdefault(part.call, ["", ""])
            calls[part.call][0] += part.name or ""
            calls[part.call][1] += part.arguments
        assert calls
        for name, arguments in calls.values():
            assert name in ("weather", "clock")
            check_weather(arguments) if name == "weather" else json.loads(arguments)

    @pytest.mark.parametrize(
        ("template", "form"),
        [
            (LLAMA_TEMPLATE, LLAMA),
            (MISTRAL_TEMPLATE, MISTRAL),
            (QWEN_XML_TEMPLATE, QWEN_XML),
            pytest.param(GLM_TEMPLATE, GLM, marks=pytest.mark.soak),
            (MINISTRAL_TEMPLATE, MINISTRAL),
            (LFM_TEMPLATE, LFM),
            pytest.param(OLMO_TEMPLATE, OLMO, marks=pytest.mark.soak),
        ],
    )
    def test_the_other_forms(self, tmp_path: Path, template: str, form: ToolFormat) -> None:
        folder = make_chat_model(tmp_path / "chat", *MARKS)
        with running({"chat": folder}, template=template, limits=LONG) as server:
            assert server.models[0].tools == form
            client, asked = (
                client_of(server),
                {"model": "chat", "messages": self.TURNS, "tools": [WEATHER]},
            )
            more = {
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "max_tokens": 300,
                "seed": 2,
            }
            choice = client.chat.completions.create(**asked, **more).choices[0]
            [call] = choice.message.tool_calls
            check_weather(call.function.arguments)
            chunks = list(client.chat.completions.create(**asked, **more, stream=True))
            assert calls_of(chunks)[1] == [
                {"name": "weather", "arguments": call.function.arguments}
            ]
            result = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
            turns = [*self.TURNS, choice.message.model_dump(exclude_none=True), result]
            assert client.chat.completions.create(
                **asked | {"messages": turns}, max_tokens=2
            ).choices

    def test_a_named_tool_is_called_once(self, client: openai.OpenAI) -> None:
        asked = {
            "model": "chat",
            "messages": self.TURNS,
            "tools": [CLOCK, WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "clock"}},
            "parallel_tool_calls": True,
            "max_tokens": 100,
        }
        for seed in range(4):
            choice = client.chat.completions.create(seed=seed, **asked).choices[0]
            assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")

    def test_allowed_tools_are_called_and_all_are_written(self, server: Running) -> None:
        named = [{"type": "function", "function": {"name": "clock"}}]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
        asked = {"messages": list(self.TURNS), "tools": [CLOCK, WEATHER], "max_tokens": 100}
        asked["parallel_tool_calls"] = False
        path = "/v1/chat/completions"
        allowed = post(server, path, {**asked, "tool_choice": choice})[1]
        [call] = allowed["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "clock"
        required = post(server, path, {**asked, "tool_choice": "required"})[1]
        assert allowed["usage"]["prompt_tokens"] == required["usage"]["prompt_tokens"]

    def test_with_a_schema_an_answer_is_a_call_or_json(self, client: openai.OpenAI) -> None:
        schema = {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        asked = {
            "model": "chat",
            "messages": self.TURNS,
            "tools": [WEATHER],
            "response_format": form,
            "parallel_tool_calls": False,
            "max_tokens": 300,
            "temperature": 2.0,
        }
        kinds = set()
        for seed in range(12):
            [choice] = client.chat.completions.create(seed=seed, **asked).choices
            content, calls, reason = calls_of(
                list(client.chat.completions.create(seed=seed, stream=True, **asked))
            )
            assert (content or None, reason) == (choice.message.content, choice.finish_reason)
            if choice.message.tool_calls:
                [call] = choice.message.tool_calls
                check_weather(call.function.arguments)
                assert calls[0]["arguments"] == call.function.arguments
                assert choice.finish_reason == "tool_calls"
            else:
                assert isinstance(json.loads(choice.message.content)["ok"], bool)
                assert choice.finish_reason == "stop"
            kinds.add(choice.finish_reason)
        assert kinds == {"tool_calls", "stop"}
        for choice, expected in (("none", "stop"), ("required", "tool_calls")):
            answer = client.chat.completions.create(tool_choice=choice, seed=1, **asked)
            assert answer.choices[0].finish_reason == expected

    def test_keywords_that_the_grammar_lacks_bind_strict_tools_alone(self, server: Running) -> None:
        properties = {
            "tags": {"type": "object", "propertyNames": {"type": "string"}},
            "any": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
            "link": {"type": "string", "format": "no-such-format", "not": {"const": "a"}},
        }
        function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
        body = {"messages": list(self.TURNS), "max_tokens": 2}
        for strict, status in ((None, 200), (False, 200), (True, 400)):
            tool = {"type": "function", "function": {**function, "strict": strict}}
            answer = post(server, "/v1/chat/completions", {**body, "tools": [tool]})
            assert answer[0] == status, answer

    @pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
    @pytest.mark.parametrize(
        ("form", "text", "content", "calls"),
        [
            (
                HERMES,
                'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\" {"}}\n</tool_call>',
                "Let me see.",
                [("f", {"a": '}" {'})],
            ),
            (
                HERMES,
                '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g", '
                '"arguments": {"b": [1, {"c": 2}]}}\n</tool_call>',
                "",
                [("f", {}), ("g", {"b": [1, {"c": 2}]})],
            ),
            (HERMES, "a < b, <tool_ and so on ", "a < b, <tool_ and so on ", []),
            (
                MISTRAL,
                '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
                "",
                [("f", {"a": 1}), ("g", {})],
            ),
            (LLAMA, '{"name": "f", "parameters": {"a": {"b": []}}}', "", [("f", {"a": {"b": []}})]),
            (
                QWEN_XML,
                'So:\n<tool_call>\n<function=f>\n<parameter=text>\n\na < "b"\n<par>\n\n</parameter>\n'
                "<parameter=n>\n3\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n<parameter=many>\n"
                '["x", {"y": null}]\n</parameter>\n<parameter=either>\n12\n</parameter>\n</function>\n</tool_call>'
                "\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
                "So:",
                [
                    (
                        "f",
                        {
                            "text": '\na < "b"\n<par>\n',
                            "n": 3,
                            "on": True,
                            "many": ["x", {"y": None}],
                            "either": 12,
                        },
                    ),
                    ("g", {}),
                ],
            ),
            # No line breaks, and no end of the function.
            (
                QWEN_XML,
                "<tool_call><function=f><parameter=text>3</parameter><parameter=n> 4 </parameter></tool_call> so",
                " so",
                [("f", {"text": "3", "n": 4})],
            ),
            (
                GLM,
                "So:\n<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a\n</arg></arg_value>\n<arg_key>n</arg_key>"
                "\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
                "So:",
                [("f", {"text": "a\n</arg>", "n": 3}), ("g", {})],
            ),
            (
                GLM_CLOSE,
                "<tool_call>g</tool_call><tool_call>f<arg_key>on</arg_key><arg_value>true</arg_value></tool_call>",
                "",
                [("g", {}), ("f", {"on": True})],
            ),
            (
                MINISTRAL,
                'So:[TOOL_CALLS]f[ARGS]{"n": 1, "text": "[ARGS]{"}[TOOL_CALLS]g[ARGS]{}',
                "So:",
                [("f", {"n": 1, "text": "[ARGS]{"}), ("g", {})],
            ),
            (
                LFM,
                """So:<|tool_call_start|>[f(text='a "b" it\\\'s) \\n', n=None, on=True), g(), f("""
                """many=['x', {"y": None}], text="True)"), h(a=-1.5, b = 2)]<|tool_call_end|>""",
                "So:",
                [
                    ("f", {"text": 'a "b" it\'s) \n', "n": None, "on": True}),
                    ("g", {}),
                    ("f", {"many": ["x", {"y": None}], "text": "True)"}),
                    ("h", {"a": -1.5, "b": 2}),
                ],
            ),
            (
                OLMO,
                'So:<function_calls>f(text="a=b, c", on=true)\ng()</function_calls>',
                "So:",
                [("f", {"text": "a=b, c", "on": True}), ("g", {})],
            ),
            (LLAMA, "Hello {you}", "Hello {you}", []),
            (LLAMA, '{"ok": {"a": 1}}', '{"ok": {"a": 1}}', []),
        ],
    )
    def test_calls_are_read_however_the_text_arrives(
        self, form: ToolFormat, text: str, content: str, calls: list, cut: int
    ) -> None:
        parser, found, written = ToolParser(form, [TYPED]), list[list[str]](), ""
        pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
        for part in [part for piece in pieces for part in parser.push(piece)] + parser.flush():
            written += part.content
            if part.name is not None:
                found.append([part.name, ""])
            elif part.call is not None:
                found[part.call][1] += part.arguments
        assert (written.rstrip("\n") if calls else written) == content
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ({"tool_choice": "required"}, "needs tools"),
            ({"tools": [WEATHER, WEATHER]}, "one name"),
            (
                {
                    "tools": [WEATHER],
                    "tool_choice": {"type": "function", "function": {"name": "x"}},
                },
                "no tool of",
            ),
            (
                {"tools": [{"type": "function", "function": {"name": "a b"}}]},
                "tools.0.function.name",
            ),
            (
                {
                    "tools": [
                        {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}
                    ]
                },
                "not supported",
            ),
            ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "'custom' is not supported"),
            ({"messages": [{"role": "tool", "content": "a"}]}, "tool_call_id"),
            ({"messages": [{"role": "assistant"}]}, "neither content nor tool_calls"),
        ],
    )
    def test_what_is_refused(self, server: Running, body: dict, words: str) -> None:
        status, answer = post(server, "/v1/chat/completions", {"messages": list(self.TURNS)} | body)
        assert status == 400 and words in answer["error"]["message"], answer

    def test_a_template_without_tools_is_named(self, folder: Path) -> None:
        with running({"chat": folder}) as server:
            status, answer = post(
                server, "/v1/chat/completions", {"messages": list(self.TURNS), "tools": [WEATHER]}
            )
        assert (
            status == 400
            and answer["error"]["param"] == "tools"
            and "takes no tools" in answer["error"]["message"]
        )
        with pytest.raises(UserError, match="form that is not supported"):
            tool_format(
                lambda turns, tools: f"{tools} {'<call>probe_tool</call>' * (len(turns) - 1)}"
            )

    # Qwen's <tool_call> is an added token, and not special
    @pytest.mark.parametrize("special", [True, False])
    @pytest.mark.parametrize("form", [HERMES, QWEN_XML, GLM, MISTRAL, MINISTRAL, OLMO])
    def test_a_grammar_takes_the_call_as_the_tokenizer_writes_it(
        self, tmp_path: Path, form: ToolFormat, special: bool
    ) -> None:
        folder = make_chat_model(tmp_path / "chat", *MARKS)
        path = folder / "tokenizer.json"
        described = json.loads(path.read_text())
        for entry in described["added_tokens"]:
            entry["special"] = special if entry["content"] in MARKS else entry["special"]
        path.write_text(json.dumps(described))
        tokenizer = load_tokenizer(folder)
        end = tokenizer.id_of("<|im_end|>")
        call = form.written("weather", {"city": "Bern", "days": 2})
        for required, before in ((True, ""), (False, "hello ")):
            rules = AnswerRules([WEATHER], required=required, parallel=True)
            grammar = answer_grammar(rules, form, tokenizer, [end])
            with closing(JsonGrammars(tokenizer, tokenizer.vocab_size, [end])) as grammars:
                follow = grammars.follow(grammar)
            for token in (*tokenizer.encode(before + call), end):
                assert follow.masked(torch.zeros(tokenizer.vocab_size))[token] == 0, (
                    tokenizer.decode([token])
                )
                follow.take(token)

    # Marks that are text, tokens, and tokens without line breaks
    @pytest.mark.parametrize("form", [QWEN_XML, GLM, GLM_CLOSE])
    def test_a_grammar_of_parameters_keeps_to_the_types_of_their_values(
        self, tmp_path: Path, form: ToolFormat
    ) -> None:
        folder = make_chat_model(tmp_path / "chat", *MARKS)
        tokenizer = load_tokenizer(folder)
        end = tokenizer.id_of("<|im_end|>")
        grammar = answer_grammar(
            AnswerRules([TYPED, CLOCK], required=True, parallel=True), form, tokenizer, [end]
        )

        def is_taken(text: str) -> bool:
            return grammar_takes(grammars, grammar, text, tokenizer, end)

        good = {"text": 'a < "b"\n</par>\n', "n": 3, "on": True, "many": ["x"], "either": "12 or"}
        bad = ({"n": "three"}, {"on": "yes"}, {"many": {}}, {"other": 1}, {"on": True, "n": 1})
        with closing(JsonGrammars(tokenizer, tokenizer.vocab_size, [end])) as grammars:
            written = form.written("f", good)
            assert is_taken(f"{written}{form.between}{form.written('clock', {})}")
            assert calls_in(written, form, [TYPED])[1][0].arguments == json.dumps(good)
            for arguments in bad:
                assert not is_taken(form.written("f", arguments)), arguments
            assert not is_taken(form.written("clock", {"zone": "CET"}))

    @pytest.mark.parametrize(
        "ending", ["", "<parameter=n>\n4", "<parameter=n>\n4\n</parameter>\nor </function>"]
    )
    def test_a_call_that_is_cut_off_or_broken_has_arguments_that_are_no_json(
        self, ending: str
    ) -> None:
        text = f"<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n{ending}"
        _, [call] = calls_in(text, QWEN_XML, [TYPED])
        assert call.name == "f" and call.arguments.startswith('{"text": "a"')
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.arguments)

    def test_a_long_text_arrives_while_it_is_written(self) -> None:
        parser = ToolParser(QWEN_XML, [TYPED])
        parser.push("<tool_call>\n<function=f>\n<parameter=text>\n")
        pieces = ["one ", 'two "', "\n</para", "graph>", "\n</parameter>\n"]
        parts = ["".join(part.arguments for part in parser.push(piece)) for piece in pieces]
        assert parts == ["one ", 'two \\"', "", "\\n</paragraph>", '"']

    @pytest.mark.parametrize(
        "parameters",
        [
            {"type": "array"},
            {"type": "object", "properties": 5},
            {"type": "object", "properties": {"a": {}}, "required": 5},
            {"type": "object", "properties": {"a": {"enum": []}}},
            {"type": "object", "properties": {"a": {"type": "no type"}}},
            {"type": "object", "properties": {"a": {"$ref": "#/nowhere", "type": "integer"}}},
        ],
    )
    def test_schemas_that_are_none_are_refused_for_parameters_too(
        self, folder: Path, parameters: dict
    ) -> None:
        tokenizer = load_tokenizer(folder)
        end = tokenizer.id_of("<|im_end|>")
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        with (
            closing(JsonGrammars(tokenizer, tokenizer.vocab_size, [end])) as grammars,
            pytest.raises(UserError, match="not supported"),
        ):
            rules = AnswerRules([tool], required=True)
            grammars.follow(answer_grammar(rules, QWEN_XML, tokenizer, [end]))

    @pytest.mark.parametrize(
        "call", ["f(text='a", "f('a')", "f(text=a b)", "f(n=1, text=[(2])", "f(text='a' n)"]
    )
    def test_a_call_as_in_python_that_is_none_has_arguments_that_are_no_json(
        self, call: str
    ) -> None:
        _, [found] = calls_in(f"<|tool_call_start|>[{call}]<|tool_call_end|>", LFM, [TYPED])
        assert found.name == "f"
        with pytest.raises(json.JSONDecodeError):
            json.loads(found.arguments)

    @pytest.mark.parametrize("form", [LFM, OLMO])
    def test_commas_stand_between_the_arguments_that_are_written(
        self, tmp_path: Path, form: ToolFormat
    ) -> None:
        tokenizer = load_tokenizer(make_chat_model(tmp_path / "chat", *MARKS))
        end = tokenizer.id_of("<|im_end|>")
        opening = form.opening + form.before
        with closing(JsonGrammars(tokenizer, tokenizer.vocab_size, [end])) as grammars:
            rules = AnswerRules([TYPED, CLOCK], required=True)
            grammar = answer_grammar(rules, form, tokenizer, [end])
            for arguments, is_right in (
                ("", True),
                ('text="a"', True),
                ("n=3, on=true", True),
                ('text="a", many=["x"], either=2', True),
                (", n=3", False),
                ("n=3 on=true", False),
                ("n=3, ", False),
                ('n="a"', False),
            ):
                follow, taken = grammars.follow(grammar), True
                for token in (*tokenizer.encode(f"{opening}f({arguments}){form.closing}"), end):
                    taken = bool(follow.masked(torch.zeros(tokenizer.vocab_size))[token] == 0)
                    if not taken:
                        break
                    follow.take(token)
                assert taken == is_right, arguments

    def test_rules_of_a_text_without_quotes_bind_no_strict_tool(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(make_chat_model(tmp_path / "chat"))
        properties = {"a": {"type": "string", "pattern": "b"}}
        function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
        for strict in (False, True):
            tool = {"type": "function", "function": {**function, "strict": strict}}
            rules = AnswerRules([tool], required=True)
            if strict:
                with pytest.raises(UserError, match="rules of a text"):
                    answer_grammar(rules, QWEN_XML, tokenizer, [1])
            else:
                assert "lazy" in answer_grammar(rules, QWEN_XML, tokenizer, [1])
