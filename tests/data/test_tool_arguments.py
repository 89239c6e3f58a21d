"""Arguments of tool calls reach a template in the form that it takes; transformers, given that form, has the text."""

import json
from typing import Any

import chat_tokenizers
import pytest

from bloomery.data.chat.render import Renderer, as_turn
from bloomery.data.examples import Example, Message

ARGUMENTS = {"city": "Zürich", "days": [1, 2], "exact": True, "unit": None, "box": {"a": 'q"'}}
# How templates write the arguments of a call, and the form that each takes.
WRITERS = {
    "concatenated": ("{{ '{\"arguments\": ' + a + '}' }}", "text"),
    "written as they are": ("{{ a }}", "text"),
    "joined": ("{{ ['x', a] | join(' ') }}", "text"),
    "trimmed": ("{{ a | trim }}", "text"),
    "with tojson": ("{{ a | tojson }}", "object"),
    "the call with tojson": ("{{ call.function | tojson }}", "object"),
    "by key": ("{% for k, v in a.items() %}{{ k }}={{ v | tojson }};{% endfor %}", "object"),
    "by key, with the filter": ("{% for k, v in a|items %}{{ k }}={{ v }};{% endfor %}", "object"),
    "either": ("{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}", "object"),
    "texts alone": (
        "{% if a is not string %}{{ raise_exception('arguments must be text') }}{% endif %}{{ a }}",
        "text",
    ),
    "objects alone": (
        "{% if a is not mapping %}{{ raise_exception('arguments must be an object') }}{% endif %}"
        "{{ a | tojson }}",
        "object",
    ),
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% set a = call.function.arguments %}<call>{{ call.function.name }} WRITER</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}}


def talk(*arguments: Any) -> tuple[Message, ...]:
    calls = tuple(map(call, arguments))
    return (
        Message("user", "hi"),
        Message("assistant", "", calls=calls),
        Message("tool", "2"),
        Message("assistant", "two"),
    )


def text_of_transformers(messages: tuple[Message, ...], template: str, form: str) -> str:
    turns = [as_turn(message) for message in messages]
    for turn in turns if form == "text" else []:
        if "tool_calls" in turn:
            turn["tool_calls"] = [
                call(json.dumps(entry["function"]["arguments"], ensure_ascii=False))
                for entry in turn["tool_calls"]
            ]
    library = chat_tokenizers.theirs("bytes", template)
    text: str = library.apply_chat_template(turns, tokenize=False)
    return text


@pytest.mark.parametrize("writer", WRITERS)
def test_a_template_gets_the_form_that_it_takes(writer):
    body, form = WRITERS[writer]
    template = TEMPLATE.replace("WRITER", body)
    tokenizer = chat_tokenizers.ours()
    talks = [talk(ARGUMENTS), talk({}), talk({"a": 1}, {"b": "x"})]
    with Renderer(tokenizer, template=template, train_on="assistant") as renderer:
        for messages in talks:
            text = text_of_transformers(messages, template, form)
            assert renderer.rendered(messages) == text
            # Training and prompts, too: the call is trained on, the result of the tool is not.
            (sequence,) = renderer.encode(Example("a.jsonl:1", "chat", (), (messages,)))
            assert tokenizer.decode(sequence.ids) == text
            learned_ids = [
                token for token, flag in zip(sequence.ids, sequence.loss_mask, strict=True) if flag
            ]
            first_turn = text.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
            assert tokenizer.decode(learned_ids) == f"{first_turn}<|im_end|>two<|im_end|>"
            prompt = tokenizer.decode(renderer.prompt(messages[:3]))
            assert prompt == text[: text.rindex("two<|im_end|>")]


def test_the_form_is_found_with_the_first_conversation_that_has_a_call():
    """A template that writes no call of the first conversations decides later."""
    template = TEMPLATE.replace("WRITER", "{{ a }}").replace(
        "m.tool_calls or []", "(m.tool_calls or [] if messages[0].content == 'hi' else [])"
    )
    tokenizer = chat_tokenizers.ours()
    talk_without_call = (Message("user", "no"), *talk({"a": 1})[1:])
    with Renderer(tokenizer, template=template, train_on="all") as renderer:
        assert "call" not in renderer.rendered(talk_without_call)
        assert '<call>weather {"a": 1}</call>' in renderer.rendered(talk({"a": 1}))
