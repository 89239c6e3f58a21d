"""Conversations, pairs and chat templates that cannot be learned from: one sentence each, before any training step."""

import json
import re

import pytest
from command_line import assert_clear, here

USER, ANSWER = {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello"}
PAIR = {"prompt": "hi", "chosen": "hello", "rejected": "no"}
GOOD = {"messages": [USER, ANSWER]}


def talks(*turns, **more):
    return {
        "messages": [dict(zip(("role", "content"), turn, strict=True)) for turn in turns],
        **more,
    }


@pytest.fixture
def chats(workshop):
    """A workshop that learns answers in ChatML."""
    for path in (workshop / "text").iterdir():
        path.unlink()
    recipe = (workshop / "tiny.yaml").read_text()
    recipe = recipe.replace("data: {", "objective: {kind: sft}\ndata: {chat: {template: chatml}, ")
    (workshop / "tiny.yaml").write_text(recipe)
    return workshop


def write(folder, *rows):
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (folder / "text/a.jsonl").write_text("\n".join(lines) + "\n")


CASES = {
    "a misspelt role": (
        talks(("user", "a"), ("assitant", "b")),
        ["messages[1].role", "did you mean assistant?"],
    ),
    "an empty turn": (talks(("user", "a"), ("assistant", " ")), ["messages[1]", "empty turn"]),
    "the user last": (
        talks(("user", "a"), ("assistant", "b"), ("user", "c")),
        ["ends with a turn of the user"],
    ),
    "no answer": (talks(("user", "a")), ["no assistant turn"]),
    "no turns": ({"messages": []}, ["has no messages"]),
    "two system messages": (
        talks(("system", "a"), ("system", "b"), ("user", "c"), ("assistant", "d")),
        ["second system"],
    ),
    "a result without a call": (
        talks(("user", "a"), ("tool", "3"), ("assistant", "d")),
        ["without a call"],
    ),
    "NaN": ('{"messages": [{"role": "user", "content": NaN}]}', ["NaN is no JSON value"]),
    "an endless number": (
        '{"messages": [{"role": "user", "content": 1e400}]}',
        ["messages[0].content", "is a number"],
    ),
    "an endless argument": (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", '
        '"tool_calls": [{"function": {"name": "f", "arguments": {"x": 1e400}}}]}]}',
        ["tool_calls[0]", "NaN or infinity"],
    ),
    "NaN in a call's text": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[NaN]"}}],
                },
            ]
        },
        ["tool_calls[0].arguments", "NaN"],
    ),
    "half a character in a call's text": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": '["\\ud800"]'}}],
                },
            ]
        },
        ["tool_calls[0].arguments", "surrogate"],
    ),
    "half a character": (
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
        ["messages[0].content", "surrogate"],
    ),
    "a zero byte": ('{"messages": "\0"}', ["NUL"]),
    "5,000 digits": (
        '{"messages": [{"role": "user", "content": ' + "7" * 5000 + "}]}",
        ["a.jsonl:2"],
    ),
    "100,000 lists": ('{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}", ["nested"]),
    "something behind the object": (json.dumps(GOOD) + " {", ["a.jsonl:2", "not JSON"]),
    "null": ("null", ["null"]),
    "a list": ("[1]", ["a list"]),
    "another column": ({"text": "hi"}, ["messages"]),
    "10 MB": (
        talks(("user", "x" * 10_000_000), ("assistant", "b")),
        ["9.5 MiB", "the limit is 2.0 MiB"],
    ),
    "chatml and tools": (
        talks(
            ("user", "a"),
            ("assistant", "b"),
            tools=[{"type": "function", "function": {"name": "f"}}],
        ),
        ["chatml has no form for tools"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_conversation_that_cannot_be_learned(chats, case):
    row, words = CASES[case]
    write(chats, GOOD, row, GOOD)
    assert_clear(
        here("prepare", "tiny.yaml"),
        mentions=["a.jsonl:2", *words] if case != "a zero byte" else words,
    )
    assert not list(chats.glob("prepared/*/manifest.json"))


@pytest.mark.parametrize(
    "case", ["a misspelt role", "half a character", "10 MB", "chatml and tools"]
)
def test_it_is_left_out_and_counted_where_the_recipe_says_so(chats, case):
    row, _ = CASES[case]
    write(chats, *[talks(("user", f"hi {n}"), ("assistant", f"hello {n}")) for n in range(20)], row)
    done = here("prepare", "tiny.yaml", "data.on_error=skip", "data.sequence_length=128")
    assert done.code == 0, done.err
    assert re.search(r"skipped +1 rows?, the first: text/a.jsonl:21", done.out), done.out


PAIRS = {
    "equal sides": ({**PAIR, "rejected": "hello"}, ["a.jsonl:2", "equal chosen and rejected"]),
    "an empty side": ({**PAIR, "rejected": ""}, ["a.jsonl:2, rejected", "is empty"]),
    "a number": ({**PAIR, "rejected": 3}, ["a.jsonl:2, rejected", "is a number"]),
    "a side that is not there": (
        {"prompt": "hi", "chosen": "hello"},
        ["a.jsonl:2", "no column 'rejected'"],
    ),
    "text and messages": ({**PAIR, "rejected": [ANSWER]}, ["a.jsonl:2", "one side as text"]),
}


@pytest.mark.parametrize("case", PAIRS)
def test_a_pair_that_cannot_be_learned(chats, case):
    row, words = PAIRS[case]
    write(chats, PAIR, row)
    assert_clear(here("prepare", "tiny.yaml", "objective={kind: dpo}"), mentions=words)


EACH = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
TEMPLATES = {
    "a syntax error": ("{% for m in messages %}{{ m", ["line 1", "bad.jinja"]),
    "an endless loop": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
        ["bad.jinja"],
    ),
    "a power of powers": ("{{ 9**(9**9) }}", ["more than 2 seconds", "bad.jinja"]),
    "ten billion letters": ("{{ 'a' * 10**10 }}", ["1 GiB", "bad.jinja"]),
    "a text in the middle": (
        "{{ messages[0].content.center(10**8) }}",
        ["characters", "bad.jinja"],
    ),
    "Python's insides": ("{{ ''.__class__.__mro__ }}", ["forbidden attribute", "bad.jinja"]),
    "recursion": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ["endless recursion", "bad.jinja"],
    ),
    "a missing name": ("{{ messages[0].speaker.name }}", ["undefined value", "bad.jinja"]),
    "its own refusal": (
        EACH + "{{ raise_exception('only on Sundays') }}",
        ["only on Sundays", "a.jsonl:1"],
    ),
    "a lost answer": (EACH.replace("m.content", "m.content[:2]"), ["template", "a.jsonl:1"]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_that_cannot_be_used(chats, case):
    template, words = TEMPLATES[case]
    (chats / "bad.jinja").write_text(template)
    write(chats, GOOD, GOOD)
    assert_clear(here("prepare", "tiny.yaml", "data.chat.template=bad.jinja"), mentions=words)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.chat.template=chatlm", "did you mean chatml?"),
        ("data.chat.template=nowhere.jinja", "nowhere.jinja"),
        ("data.chat.template=null", "the tokenizer has no chat template"),
        ("data.chat.template=text", "text"),
    ],
)
def test_a_template_that_is_not_there(chats, word, said):
    write(chats, GOOD, GOOD)
    assert_clear(here("prepare", "tiny.yaml", word), mentions=["data.chat.template", said])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.columns={mesages: talk}", "mesages"),
        ("data.columns={messages: talk}", "talk"),
        ("data.format=preference", "chosen"),
    ],
)
def test_columns_and_formats_that_do_not_fit(chats, word, said):
    write(chats, GOOD, GOOD)
    assert_clear(here("prepare", "tiny.yaml", word), mentions=[said])


def test_a_template_cannot_command_the_terminal_that_its_refusal_is_told_on(chats):
    (chats / "bad.jinja").write_text(EACH + "{{ raise_exception('\x1b]0;mine\x07\x1b[31mred') }}")
    write(chats, GOOD, GOOD)
    result = here("prepare", "tiny.yaml", "data.chat.template=bad.jinja")
    assert_clear(result, mentions=["mine"])
    assert "\x1b" not in result.err + result.out and "\x07" not in result.err
