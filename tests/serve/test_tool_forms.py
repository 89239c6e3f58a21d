"""Forms of tool calls with tokens of their own: found in templates, read in pieces, kept to by grammars, served."""

import json
from contextlib import closing
from importlib.resources import files
from pathlib import Path

import openai
import pytest
from server_for_tests import grammar_takes, running
from test_serve import client_of, post
from test_tools import LONG, TYPED, WEATHER, calls_of, check_weather

from bloomery.core.errors import UserError
from bloomery.data.chat.channels import ChannelParser
from bloomery.data.chat.render import Renderer, chat_format
from bloomery.data.chat.thoughts import without_thought
from bloomery.data.chat.tool_forms import FORMS, ToolFormat, call_ends, tool_format
from bloomery.data.chat.tools import calls_in, parser_of
from bloomery.data.chat.turns import Turns
from bloomery.data.examples import Message
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.decode import sample_tokens
from bloomery.infer.grammar import JsonGrammars
from bloomery.infer.sampling import Sampling
from bloomery.serve.tools import AnswerRules, answer_grammar
from models_for_tests import make_chat_model
from tool_templates import OTHER_FORMS

FORM = {name: forms[0] for name, forms in FORMS.items()}
TURNS = [{"role": "user", "content": "a"}]


def chat_model(folder: Path, name: str) -> Path:
    """A model whose vocabulary has the tokens of the form."""
    return make_chat_model(folder / "chat", *OTHER_FORMS[name].marks)


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_the_form_and_the_end_of_a_call_are_found_in_a_template(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(chat_model(tmp_path, name))
    template = tmp_path / "chat.jinja"
    template.write_text(OTHER_FORMS[name].template)
    with chat_format(tokenizer, str(template)) as form:
        assert form.render is not None
        found = tool_format(form.render)
        assert found in FORMS[name]
        ends = call_ends(form.render, found, tokenizer)
    assert [tokenizer.decode([end]) for end in ends] == [OTHER_FORMS[name].end]


# Templates of released models, as TRL ships them
@pytest.mark.parametrize(
    ("file", "name", "end"),
    [
        ("gemma4", "Gemma 4", "<|tool_response>"),
        ("gemma4_v2", "Gemma 4", "<turn|>"),
        ("gemma4_v5", "Gemma 4", "<|tool_response>"),
        ("gptoss", "gpt-oss", "<|call|>"),
        ("glm4moe", "GLM 4.5 and later", "<|observation|>"),
        ("lfm2_2_5", "LFM 2.5", "<|im_end|>"),
        ("llama3_2", "Llama 3.1", "<|eot_id|>"),
        ("nemotron_3_nano", "Qwen 3.5 and Qwen3-Coder", "<|im_end|>"),
        ("qwen2_5", "Hermes and Qwen up to 3 and Granite 4", "<|im_end|>"),
        ("qwen3_6", "Qwen 3.5 and Qwen3-Coder", "<|im_end|>"),
    ],
)
def test_templates_of_released_models(tmp_path: Path, file: str, name: str, end: str) -> None:
    pytest.importorskip("trl")
    template = files("trl").joinpath(f"chat_templates/{file}.jinja")
    if not template.is_file():
        pytest.skip("this release of TRL has no such template")
    tokenizer = load_tokenizer(make_chat_model(tmp_path / "chat", end))
    with chat_format(tokenizer, str(template)) as form:
        assert form.render is not None
        found = tool_format(form.render)
        assert found in FORMS[name]
        assert call_ends(form.render, found, tokenizer) == (tokenizer.id_of(end),)


def test_a_template_that_writes_no_calls_is_named() -> None:
    with pytest.raises(UserError, match="writes no tool calls"):
        tool_format(lambda turns, tools: f"{tools}")


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_a_client_gets_calls_and_sends_their_results(tmp_path: Path, name: str) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(OTHER_FORMS[name].template)
    folder = chat_model(tmp_path, name)
    with running({"chat": folder}, template=str(template), limits=LONG) as server:
        client = client_of(server)
        asked = {"model": "chat", "messages": TURNS, "tools": [WEATHER], "seed": 2}
        more = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 350}
        choice = client.chat.completions.create(**asked, **more).choices[0]
        [call] = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert call.function.name == "weather"
        check_weather(call.function.arguments)
        chunks = list(client.chat.completions.create(**asked, **more, stream=True))
        content, calls, reason = calls_of(chunks)
        assert (content, reason) == ("", "tool_calls")
        assert calls == [{"name": "weather", "arguments": call.function.arguments}]

        # The id goes back as the template takes it.
        result = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
        turns = [*TURNS, choice.message.model_dump(exclude_none=True), result]
        answer = client.chat.completions.create(**asked | {"messages": turns}, max_tokens=2)
        assert answer.usage.prompt_tokens > 0
        broken = {**call.model_dump(), "function": {"name": "weather", "arguments": '{"city": "Be'}}
        turns[1] = {"role": "assistant", "tool_calls": [broken]}
        status, refused = post(server, "/v1/chat/completions", {"messages": turns})
        assert status == 400 and "not a JSON object" in refused["error"]["message"]


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_a_call_that_begins_in_free_text_follows_its_schema(tmp_path: Path, name: str) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(OTHER_FORMS[name].template)
    folder = chat_model(tmp_path, name)
    with running({"chat": folder}, template=str(template), limits=LONG) as server:
        model = server.models[0]
        form = model.tools
        rules = AnswerRules([WEATHER], parallel=True, thought=model.thoughts)
        grammar = model.answer_text(rules)
        written = form.written("weather", {}, whole=False, id_="0")
        begun = written.partition("weather")[0]
        ids = model.tokenizer.encode(begun, special=True)
        for token in ids:
            grammar.take(token)
        sampling = Sampling(
            max_new_tokens=400, temperature=1.0, seed=1, stop_ids=model.grammar_ends
        )
        new = list(sample_tokens(model.decoder, ids, sampling, constraint=grammar))
        ends = [model.tokenizer.decode([end]) for end in model.grammar_ends]
        text = model.tokenizer.decode([*ids, *new])
        for end in ends:
            text = text.removesuffix(end)
        _, calls = calls_in(text, form, [WEATHER])
        assert calls
        for call in calls:
            assert call.name == "weather"
            check_weather(call.arguments)


def read(form: ToolFormat, text: str, cut: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, thought and calls of a text that arrives in pieces."""
    parser = parser_of(form, [TYPED])
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    content, thought, calls = "", "", list[list[str]]()
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.flush():
        content += part.content
        thought += part.thought
        if part.name is not None:
            calls.append([part.name, ""])
        elif part.call is not None:
            calls[part.call][1] += part.arguments
    return content.strip(), thought, [(name, arguments) for name, arguments in calls]


GOOD = {"text": 'a, b: {"c"}', "n": -3, "on": True, "many": ["x", {"y": None, "z": [1.5]}]}


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("name", [name for name in FORMS if name != "gpt-oss"])
def test_what_a_template_writes_is_read_however_it_arrives(name: str, cut: int) -> None:
    for form in FORMS[name]:
        first = form.written("f", GOOD, id_="0" if form.id_head or form.is_numbered else "a1b2c3d4e")
        content, _, calls = read(form, ("" if not form.opening else "So:\n") + first, cut)
        assert content == ("So:" if form.opening else "")
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", GOOD)]


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        (
            "Gemma 4",
            'So:<|tool_call>call:f{}<tool_call|><|tool_call>call:g{a:[<|"|>x"}<|"|>,1],b:{c:None}}<tool_call|>',
            "So:",
            [("f", {}), ("g", {"a": ['x"}', 1], "b": {"c": None}})],
        ),
        (
            "DeepSeek V3 and R1",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>\n"
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{"a": "```"}\n```<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>",
            "",
            [("f", {}), ("g", {"a": "```"})],
        ),
        (
            "DeepSeek V3.1",
            "a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g"
            '<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "a",
            [("f", {}), ("g", {"a": 1})],
        ),
        (
            "DeepSeek V3.2",
            'So:\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n'
            '<｜DSML｜invoke name="g">\n'
            '<｜DSML｜parameter name="n" string="true">12</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="text" string="false">["a", {"b": null}]</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="many" string="true">a < "b"\n</x></｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>",
            "So:",
            [("f", {}), ("g", {"n": "12", "text": ["a", {"b": None}], "many": 'a < "b"\n</x>'})],
        ),
        # The attribute is missing, unknown, or does not fit its value.
        (
            "DeepSeek V4",
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="text">1</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="n" string="maybe">2</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="on" string="false">perhaps</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜tool_calls>",
            "",
            [("f", {"text": "1", "n": 2, "on": "perhaps"})],
        ),
        # As in the tests of transformers, with a thought that another parser has taken off.
        (
            "Cohere Command R7B and A",
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "simple_tool", "parameters": '
            '{"temperature_format": "Celsius"}}\n]<|END_ACTION|>',
            "",
            [("simple_tool", {"temperature_format": "Celsius"})],
        ),
        # Two calls, of which the second has no id.
        (
            "Cohere Command R7B and A",
            '<|START_RESPONSE|>So:<|END_RESPONSE|><|START_ACTION|>[{"tool_call_id": "3", "tool_name": "f", '
            '"parameters": {"a": "]<|END_ACTION|>"}}, {"tool_name": "g", "parameters": {}}]<|END_ACTION|>',
            "So:",
            [("f", {"a": "]<|END_ACTION|>"}), ("g", {})],
        ),
        ("Cohere Command R7B and A", "<|START_RESPONSE|>a <b<|END_RESPONSE|>", "a <b", []),
        (
            "Kimi K2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            '<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
            "<|tool_calls_section_end|>",
            "",
            [("f", {}), ("g", {"a": 1})],
        ),
        (
            "MiniMax M2",
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">1</parameter>\n<parameter name="n">2'
            '</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
            "",
            [("f", {"text": "1", "n": 2}), ("g", {})],
        ),
        (
            "Mistral Small 3.2",
            'a[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]b1b2c3d4e[ARGS]{}',
            "a",
            [("f", {"a": 1}), ("g", {})],
        ),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary<|message|>first<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
            '{"a": "<|end"}<|call|>',
            "first",
            [("f", {"a": "<|end"})],
        ),
        (
            "gpt-oss",
            ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
            "",
            [("f", {"a": 1})],
        ),
        ("gpt-oss", "<|channel|>final<|message|>done<|return|>", "done", []),
        ("gpt-oss", "no channel", "no channel", []),
        (
            "Llama 3.2 with calls as in Python",
            '[f(a="x", b=[1, True]), g()]',
            "",
            [("f", {"a": "x", "b": [1, True]}), ("g", {})],
        ),
        ("Llama 3.2 with calls as in Python", "no [list]", "no [list]", []),
    ],
)
def test_calls_are_read_however_the_text_arrives(
    name: str, text: str, content: str, calls: list, cut: int
) -> None:
    found_content, thought, found_calls = read(FORM[name], text, cut)
    assert found_content == content
    assert [(name, json.loads(arguments)) for name, arguments in found_calls] == calls
    assert thought == ("think" if "analysis" in text else "")


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_a_call_that_is_cut_off_has_arguments_that_are_no_json(name: str) -> None:
    other = OTHER_FORMS[name]
    text = (other.call % ("1", "2")).strip()
    cut = text[: text.rindex("2")]
    _, [call] = calls_in(cut, FORM[name], [TYPED])
    assert call.name == "add"
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.arguments)


def test_ids_that_the_model_writes_are_those_of_its_calls() -> None:
    for name, ids in (("Kimi K2", ["functions.add:0"]), ("Mistral Small 3.2", ["a1B2c3D4e"])):
        _, calls = calls_in(OTHER_FORMS[name].call % (1, 2), FORM[name])
        assert [call.id for call in calls] == ids


@pytest.mark.parametrize("name", ["Gemma 4", "FunctionGemma"])
def test_a_grammar_of_bare_names_keeps_to_the_types_of_values(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(chat_model(tmp_path, name))
    form = FORM[name]
    end = tokenizer.id_of("<|im_end|>")
    nested = {
        "type": "object",
        "properties": {"k": {"type": "array", "items": {"type": "string"}}},
        "required": ["k"],
        "additionalProperties": False,
    }
    properties = {**TYPED["function"]["parameters"]["properties"], "deep": nested}
    parameters = {
        **TYPED["function"]["parameters"],
        "properties": properties,
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar = answer_grammar(
        AnswerRules([tool], required=True, parallel=True), form, tokenizer, [end]
    )

    def is_taken(text: str) -> bool:
        return grammar_takes(grammars, grammar, text, tokenizer, end)

    good = (
        {"text": 'a < "b"\n{}', "n": 3, "on": True, "many": ["x", {"y": 1}], "either": "12 or"},
        {"n": None, "deep": {"k": []}},
        {"deep": {"k": ["a", "b"]}},
        {},
    )
    bad = (
        {"n": "three"},
        {"on": "yes"},
        {"many": {}},
        {"other": 1},
        {"deep": {"k": [1]}},
        {"deep": {}},
    )
    with closing(JsonGrammars(tokenizer, tokenizer.vocab_size, [end])) as grammars:
        for arguments in good:
            written = form.written("f", arguments)
            assert is_taken(written), arguments
            assert json.loads(calls_in(written, form)[1][0].arguments) == arguments
        assert is_taken(form.written("f", {}) * 2)
        for arguments in bad:
            assert not is_taken(form.written("f", arguments)), arguments


def test_an_answer_of_channels_is_json_of_a_schema(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(OTHER_FORMS["gpt-oss"].template)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    folder = chat_model(tmp_path, "gpt-oss")
    with running({"chat": folder}, template=str(template), limits=LONG) as server:
        client: openai.OpenAI = client_of(server)
        for seed in range(3):
            reply = client.chat.completions.create(
                model="chat", messages=TURNS, response_format=wanted, seed=seed, max_tokens=350
            )
            [choice] = reply.choices
            assert choice.finish_reason == "stop"
            assert isinstance(json.loads(choice.message.content)["ok"], bool)


def test_a_model_that_writes_no_channels_still_answers() -> None:
    parser = ChannelParser(FORM["gpt-oss"].channels)
    parts = [*parser.push("hello "), *parser.push("you"), *parser.flush()]
    assert "".join(part.content for part in parts) == "hello you"


@pytest.mark.parametrize(
    ("answer", "spoken"),
    [
        (
            "<|channel|>analysis<|message|>6 x 7<|end|><|start|>assistant<|channel|>final<|message|>42",
            "42",
        ),
        ("<|channel|>analysis<|message|>6 x 7", None),
        ("42", "42"),
    ],
)
def test_an_answer_of_channels_is_judged_without_its_thought(
    answer: str, spoken: str | None
) -> None:
    assert without_thought(answer, FORM["gpt-oss"].channels, inside=False) == spoken


# Expected values: the messages below through the program that DeepSeek publishes for V3.2 (`encode_messages` without
# thoughts), and through Cohere's published template of Command R7B.
def test_results_are_written_as_the_published_formats_have_them(tmp_path: Path) -> None:
    calls = [("f", {"a": 1, "b": "x"}), ("g", {})]
    expected = {
        "DeepSeek V3.2": "<｜User｜>q<｜Assistant｜></think>so\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls><｜end▁of▁sentence｜>'
        "\n\n<function_results>\n<result>r1</result>\n<result>r2</result>\n</function_results>\n\n</think>",
        "Cohere Command R7B and A": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": '
        '{"a": 1, "b": "x"}},\n    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>'
        "<|END_OF_TURN_TOKEN|>",
    }
    for name, text in expected.items():
        tokenizer = load_tokenizer(chat_model(tmp_path / name.replace(" ", ""), name))
        template = tmp_path / "chat.jinja"
        template.write_text(OTHER_FORMS[name].template)
        turns = [
            Message("user", "q"),
            Message(
                "assistant",
                "so",
                calls=tuple(
                    {"id": f"c{n}", "type": "function", "function": {"name": f, "arguments": a}}
                    for n, (f, a) in enumerate(calls)
                ),
            ),
            Message("tool", "r1", name="f", call_id="c0"),
            Message("tool", "r2", name="g", call_id="c1"),
        ]
        with chat_format(tokenizer, str(template)) as form:
            assert form.render is not None
            rendered = form.render(turns, (WEATHER,))
        assert text in rendered
        answer = text.partition("</think>")[2] or text
        answer = answer.partition("<｜end▁of")[0].removesuffix("<|END_OF_TURN_TOKEN|>")
        content, found = calls_in(answer, FORM[name])
        assert [(call.name, json.loads(call.arguments)) for call in found] == calls
        assert content == ("so" if "DSML" in text else "")


def test_calls_of_later_turns_are_numbered_on(tmp_path: Path) -> None:
    """Cohere's template counts calls over the conversation: a result names the number of its call."""
    name = "Cohere Command R7B and A"
    tokenizer = load_tokenizer(chat_model(tmp_path, name))
    tokenizer.config["chat_template"] = OTHER_FORMS[name].template
    with Renderer(tokenizer, template=None, train_on="assistant") as renderer:
        turns = Turns(renderer, tokenizer, [WEATHER])
        end = tokenizer.id_of("<|END_OF_TURN_TOKEN|>")
        text = '<|START_ACTION|>[{"tool_call_id": "2", "tool_name": "weather", "parameters": {}}]<|END_ACTION|>'
        _, calls = turns.read_text(text)
        for num_earlier in (0, 2):
            given = tokenizer.decode(turns.given(calls, ["warm"], end, num_earlier=num_earlier))
            assert f'{{"tool_call_id": "{num_earlier}", "results": {{"0": "warm"}}' in given
            assert given.endswith("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>")


@pytest.mark.parametrize("name", ["DeepSeek V3.2", "DeepSeek V4"])
def test_a_grammar_names_the_type_of_each_value(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(chat_model(tmp_path, name))
    form = FORM[name]
    end = tokenizer.id_of("<｜end▁of▁sentence｜>")
    parameters = {**TYPED["function"]["parameters"], "additionalProperties": False}
    parameters["properties"] = {**parameters["properties"], "unit": {"enum": ["C", 1]}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar = answer_grammar(
        AnswerRules([tool], required=True, parallel=True), form, tokenizer, [end]
    )

    def is_taken(text: str) -> bool:
        return grammar_takes(grammars, grammar, text, tokenizer, end)

    good = ({"text": 'a < "b"\n{}', "n": 3, "on": True, "many": ["x"], "unit": "C"}, {"unit": 1}, {})
    bad = ({"n": "three"}, {"on": "yes"}, {"many": {}}, {"other": 1}, {"unit": "K"})
    with closing(JsonGrammars(tokenizer, tokenizer.vocab_size, [end])) as grammars:
        for arguments in good:
            written = form.written("f", arguments)
            assert is_taken(written), arguments
            assert json.loads(calls_in(written, form)[1][0].arguments) == arguments
            assert not arguments or not is_taken(
                written.replace('string="true"', 'string="?"').replace(
                    'string="false"', 'string="true"'
                )
            )
        for arguments in bad:
            assert not is_taken(form.written("f", arguments)), arguments
