"""Rows of every format to examples, and a clear flaw for each that is none."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.data.examples import BadRow, Example, Message
from bloomery.data.sources.detection import detect_format
from bloomery.data.sources.formats import FORMATS, read_example

USER, ANSWER, OTHER = (
    {"role": role, "content": text}
    for role, text in (("user", "hi"), ("assistant", "yo"), ("assistant", "no"))
)
HI, YO, NO = Message("user", "hi"), Message("assistant", "yo"), Message("assistant", "no")
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "c1"}


def read(row, columns=None):
    format = detect_format(row, columns)
    assert format is not None
    return format, example_or_flaw(row, format, columns or {})


def example_or_flaw(row, format, columns):
    try:
        return read_example(row, format=format, columns=columns, where="a.jsonl:3")
    except BadRow as bad_row:
        return bad_row


def chat(*messages, **fields):
    return Example("a.jsonl:3", "chat", (), (messages,), **fields)


def pair(prompt, chosen, rejected):
    return Example("a.jsonl:3", "pair", prompt, (chosen, rejected))


GOOD = {
    "openai": ({"messages": [USER, ANSWER]}, "messages", chat(HI, YO)),
    "parts": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
                },
                ANSWER,
            ]
        },
        "messages",
        chat(HI, YO),
    ),
    "nulls of a parquet file": (
        {"messages": [{**USER, "tool_calls": None, "name": None}, ANSWER], "tools": None},
        "messages",
        chat(HI, YO),
    ),
    "weight": (
        {"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]},
        "messages",
        chat(HI, Message("assistant", "yo", trained_on=False), HI, YO),
    ),
    "developer": (
        {"messages": [{"role": "developer", "content": "be kind"}, USER, ANSWER]},
        "messages",
        chat(Message("system", "be kind"), HI, YO),
    ),
    "thinking": (
        {"messages": [USER, {**ANSWER, "reasoning_content": "hm"}]},
        "messages",
        chat(HI, Message("assistant", "yo", thinking="hm")),
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        "sharegpt",
        chat(HI, YO),
    ),
    "sharegpt with a system column": (
        {
            "system": "be kind",
            "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}],
        },
        "sharegpt",
        chat(Message("system", "be kind"), HI, YO),
    ),
    "openai under sharegpt's name": ({"conversations": [USER, ANSWER]}, "messages", chat(HI, YO)),
    "alpaca": ({"instruction": "hi", "input": "", "output": "yo"}, "alpaca", chat(HI, YO)),
    "alpaca with an input": (
        {"instruction": "h", "input": "i", "output": "yo"},
        "alpaca",
        chat(Message("user", "h\ni"), YO),
    ),
    "alpaca with a history": (
        {"instruction": "hi", "output": "yo", "history": [["hi", "no"]], "system": "be kind"},
        "alpaca",
        chat(Message("system", "be kind"), HI, NO, HI, YO),
    ),
    "completion": (
        {"prompt": "a", "completion": "b"},
        "completion",
        Example("a.jsonl:3", "completion", "a", ("b",)),
    ),
    "completion of messages": (
        {"prompt": [USER], "completion": [ANSWER]},
        "completion",
        Example("a.jsonl:3", "completion", (HI,), ((YO,),)),
    ),
    "kto": (
        {"prompt": "a", "completion": "b", "label": False},
        "kto",
        Example("a.jsonl:3", "kto", "a", ("b",), desirable=False),
    ),
    "pair": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", pair("a", "b", "c")),
    "pair of messages": (
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        "preference",
        pair((HI,), (YO,), (NO,)),
    ),
    "pair of whole conversations": (
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        "preference",
        pair((HI,), (YO,), (NO,)),
    ),
    "prompt repeated in both sides": (
        {"prompt": "hi", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        "preference",
        pair((HI,), (YO,), (NO,)),
    ),
    "prompt as a text, answers as messages": (
        {"prompt": "hi", "chosen": [ANSWER], "rejected": [OTHER]},
        "preference",
        pair((HI,), (YO,), (NO,)),
    ),
    "texts that share a beginning": (
        {"chosen": "Human: hi\n\nAssistant: yes", "rejected": "Human: hi\n\nAssistant: yet"},
        "preference",
        replace(pair("Human: hi\n\nAssistant:", " yes", " yet"), implicit=True),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_row_is_recognised_and_read(name):
    row, format, expected = GOOD[name]
    assert read(row) == (format, expected)


def test_calls_of_tools_are_read_with_their_arguments_as_an_object():
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    _, example = read({"messages": [USER, CALLING, RESULT, ANSWER], "tools": json.dumps([tool])})
    calling_turn, result = example.responses[0][1:3]
    assert calling_turn.calls == (
        {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}},
    )
    assert calling_turn.content == "" and result == Message("tool", "2", call_id="c1")
    assert example.tools == (tool,)


def test_sharegpt_writes_calls_as_turns_of_their_own():
    turns = [
        ("human", "hi"),
        ("function_call", '{"name": "add", "arguments": {"a": 1}}'),
        ("observation", "2"),
        ("gpt", "yo"),
    ]
    _, example = read({"conversations": [{"from": role, "value": text} for role, text in turns]})
    roles = [message.role for message in example.responses[0]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert example.responses[0][1].calls[0]["function"] == {"name": "add", "arguments": {"a": 1}}


def test_columns_of_other_names_are_mapped():
    row = {"dialog": [{"who": "human", "said": "hi"}, {"who": "gpt", "said": "yo"}]}
    assert read(row, {"messages": "dialog", "role": "who", "content": "said"})[1] == chat(HI, YO)
    row = {"question": "a", "answer": "b"}
    column_names = {"prompt": "question", "completion": "answer"}
    assert read(row, column_names) == (
        "completion",
        Example("a.jsonl:3", "completion", "a", ("b",)),
    )
    row = {"q": "a", "good": "b", "bad": "c"}
    assert read(row, {"prompt": "q", "chosen": "good", "rejected": "bad"})[1] == pair("a", "b", "c")


@pytest.mark.parametrize(
    "row", [{"text": "a"}, {"input_ids": [1]}, {"messages": "a"}, {"prompt": "a"}, {}]
)
def test_text_and_tokens_are_no_examples(row):
    assert detect_format(row) is None


def turns(*messages):
    return {"messages": list(messages)}


FLAWS = {
    "a misspelt role": (
        turns(USER, {"role": "assitant", "content": "yo"}),
        "messages[1].role",
        "did you mean assistant?",
    ),
    "an unknown role": (
        turns(USER, {"role": "xyzzy", "content": "yo"}),
        "messages[1].role",
        "known are system, user",
    ),
    "no role": (
        turns(USER, {"content": "yo"}),
        "messages[1]",
        "has no role or from; it has: content",
    ),
    "no content": (turns(USER, {"role": "assistant"}), "messages[1].content", "is missing"),
    "an empty turn": (
        turns(USER, {"role": "assistant", "content": " \n"}),
        "messages[1]",
        "an empty turn of the assistant",
    ),
    "the user last": (turns(USER, ANSWER, USER), "messages", "ends with a turn of the user"),
    "no answer": (turns(USER), "messages", "no assistant turn"),
    "no turns": (turns(), "messages", "has no messages"),
    "a text for turns": ({"messages": "hi"}, "messages", "is a text, not a list of messages"),
    "a list for a turn": (turns(USER, []), "messages[1]", "is a list, not a message"),
    "a number for a text": (
        turns({"role": "user", "content": 7}, ANSWER),
        "messages[0].content",
        "is a number",
    ),
    "NaN for a text": (
        turns({"role": "user", "content": float("nan")}, ANSWER),
        "messages[0].content",
        "is a number",
    ),
    "NaN in a call": (
        turns(
            USER,
            {**CALLING, "tool_calls": [{"function": {"name": "f", "arguments": float("nan")}}]},
        ),
        "messages[1].tool_calls[0]",
        "NaN",
    ),
    "half a character": (
        turns({"role": "user", "content": "a\ud800"}, ANSWER),
        "messages[0].content",
        "surrogate",
    ),
    "half a character in a tool": (
        {**turns(USER, ANSWER), "tools": [{"name": "\ud800"}]},
        "tools",
        "surrogate",
    ),
    "a video": (
        turns({"role": "user", "content": [{"type": "video_url"}]}, ANSWER),
        "content[0]",
        "only texts and pictures are supported",
    ),
    "a result without a call": (
        turns(USER, ANSWER, RESULT, ANSWER),
        "messages[2]",
        "without a call",
    ),
    "a result first": (turns(RESULT, ANSWER), "messages[0]", "without a call"),
    "a result of another call": (
        turns(USER, CALLING, {**RESULT, "tool_call_id": "c9"}, ANSWER),
        "messages[2]",
        "the calls are: c1",
    ),
    "a call of nothing": (
        turns(USER, {**CALLING, "tool_calls": [{}]}),
        "tool_calls[0]",
        "names a function",
    ),
    "two system messages": (
        turns({"role": "system", "content": "a"}, {"role": "system", "content": "b"}, USER, ANSWER),
        "messages[1]",
        "second system message",
    ),
    "a late system message": (
        turns(USER, ANSWER, {"role": "system", "content": "a"}, USER, ANSWER),
        "messages[2]",
        "after the first",
    ),
    "a strange weight": (turns(USER, {**ANSWER, "weight": 0.5}), "messages[1].weight", "neither 0"),
    "50 MB": (
        turns({"role": "user", "content": "x" * 50_000_000}, ANSWER),
        "messages",
        "47.7 MiB; the limit is 2.0 MiB",
    ),
    "equal sides": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "a.jsonl:3", "equal chosen"),
    "equal sides of messages": (
        {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
        "a.jsonl:3",
        "equal chosen",
    ),
    "sides that share nothing": (
        {"chosen": "b", "rejected": "c"},
        "a.jsonl:3",
        "no common beginning",
    ),
    "one side begins the other": (
        {"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, ANSWER]},
        "a.jsonl:3",
        "is the beginning",
    ),
    "a text and messages": (
        {"prompt": "a", "chosen": "b", "rejected": [OTHER]},
        "a.jsonl:3",
        "one side as text",
    ),
    "a label of NaN": (
        {"prompt": "a", "completion": "b", "label": float("nan")},
        "label",
        "is NaN",
    ),
    "a label in words": (
        {"prompt": "a", "completion": "b", "label": "good"},
        "label",
        "is a text, not true",
    ),
    "an empty completion": ({"prompt": "a", "completion": ""}, "completion", "is empty"),
    "an alpaca without an answer": ({"instruction": "a", "output": " "}, "output", "is empty"),
    "an alpaca of numbers": ({"instruction": "a", "output": 3}, "output", "is a number"),
}


@pytest.mark.parametrize("name", FLAWS)
def test_a_row_that_cannot_be_learned_says_where_and_why(name):
    row, where, problem = FLAWS[name]
    _, bad_row = read(row) if detect_format(row) else ("", example_or_flaw(row, "messages", {}))
    assert isinstance(bad_row, BadRow)
    assert where in bad_row.where and bad_row.where.startswith("a.jsonl:3")
    assert problem in bad_row.problem
    assert bad_row.fix


@pytest.mark.parametrize("row", [None, 3, [], "text"])
def test_a_row_that_is_no_object_is_a_bad_row(row):
    bad_row = example_or_flaw(row, "messages", {})
    assert isinstance(bad_row, BadRow) and "not an object" in bad_row.problem


def test_a_column_that_is_not_there_is_named():
    bad_row = example_or_flaw({"text": "a"}, "preference", {"chosen": "good"})
    assert isinstance(bad_row, BadRow)
    assert (
        "has no column 'good'; it has: text" in bad_row.problem
        and "data.columns={chosen: NAME}" in bad_row.fix
    )


def test_a_mapping_for_other_data_is_not_taken_for_a_missing_column():
    row = {"instruction": "a", "output": "b"}
    bad_row = example_or_flaw(row, "alpaca", {"output": "response"})
    assert (
        isinstance(bad_row, BadRow)
        and "has no column 'response'" in bad_row.problem
        and "data.columns={}" in bad_row.fix
    )


KEYS = [
    "messages",
    "conversations",
    "role",
    "content",
    "from",
    "value",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "label",
    "tools",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "instruction",
    "output",
    "input",
    "history",
    "system",
    "type",
    "text",
    "weight",
    "thinking",
    "tool_call_id",
    "id",
]
TEXTS = [
    "user",
    "assistant",
    "tool",
    "system",
    "gpt",
    "function_call",
    "",
    " ",
    "hi",
    "\ud800",
    "{",
    '{"name": "f"}',
    "[]",
]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(TEXTS)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    row=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5),
    format=st.none() | st.sampled_from(sorted(FORMATS)),
)
def test_any_row_becomes_an_example_or_a_bad_row(row, format):
    result = example_or_flaw(row, format or detect_format(row) or "messages", {})
    assert isinstance(result, Example | BadRow)
    if isinstance(result, BadRow):
        assert (
            result.where.startswith("a.jsonl:3")
            and result.problem
            and result.fix
            and "\n" not in result.problem
        )


TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": LEAVES}
)


@settings(max_examples=200, deadline=None)
@given(turns=st.lists(TURN, max_size=5))
def test_whatever_is_read_is_a_conversation(turns):
    result = example_or_flaw({"messages": turns}, "messages", {})
    if isinstance(result, BadRow):
        return
    (messages,) = result.responses
    assert [message.content for message in messages] == [turn["content"] for turn in turns]
    assert messages[-1].role == "assistant" and all(
        message.content.strip() or message.role == "tool" for message in messages
    )
    assert [message.role for message in messages].count("system") <= 1
