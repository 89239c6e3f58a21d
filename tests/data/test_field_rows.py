"""Rows of the field's datasets mean what they mean in the tools that they were written for, or are refused by name."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bloomery.core.errors import UserError
from bloomery.data.examples import BadRow, Message
from bloomery.data.sources.documents import ReadStats, open_dataset, peek, read_documents
from bloomery.recipe.schema import Source

ASK = Message("user", "When?")
NINE = Message("assistant", "At nine.")
NO = Message("assistant", "No.")
CLERK = Message("system", "You are a clerk.")
SYSTEM = {"system": "You are a clerk."}
USER = {"role": "user", "content": "When?"}
ANSWER = {"role": "assistant", "content": "At nine."}
OTHER = {"role": "assistant", "content": "No."}
TALK = [USER, ANSWER]
SHARED = [{"from": "human", "value": "When?"}, {"from": "gpt", "value": "At nine."}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path, required_format, **source):
    stats = ReadStats()
    dataset = open_dataset(Source(path=str(path), **source), required_format)
    examples = [d.example or d for d in read_documents(dataset, on_error="stop", stats=stats)]
    return examples, stats.use


def pair(row, prompt, chosen=(NINE,), rejected=(NO,), unread_columns=()):
    return row, "pairs", "pair", prompt, (chosen, rejected), unread_columns


def kto(row, prompt, response=(NINE,), unread_columns=()):
    return row, "kto", "kto", prompt, (response,), unread_columns


def chat(row, *turns, unread_columns=()):
    return row, "sft", "chat", (), (turns,), unread_columns


ROWS = {
    # the system message and the input belong to the prompt
    "intel": pair(
        {**SYSTEM, "question": "When?", "chosen": "At nine.", "rejected": "No."}, (CLERK, ASK)
    ),
    "a system message in another name": pair(
        {
            "system_prompt": CLERK.content,
            "prompt": "When?",
            "chosen": "At nine.",
            "rejected": "No.",
        },
        (CLERK, ASK),
    ),
    "icr": pair(
        {"input": "When?", "chosen": "At nine.", "rejected": "No.", "rating": [9, 2]},
        "When?",
        "At nine.",
        "No.",
        unread_columns=("rating",),
    ),
    "llama-factory pairs": pair(
        {"instruction": "Answer.", "input": "When?", "chosen": "At nine.", "rejected": "No."},
        "Answer.\nWhen?",
        "At nine.",
        "No.",
    ),
    "llama-factory pairs with history": pair(
        {
            "instruction": "When?",
            "history": [["When?", "No."]],
            "chosen": "At nine.",
            "rejected": "No.",
        },
        (ASK, NO, ASK),
    ),
    "argilla": pair(
        {"instruction": "When?", "chosen_response": "At nine.", "rejected_response": "No."},
        "When?",
        "At nine.",
        "No.",
    ),
    "system beside whole conversations": pair(
        {**SYSTEM, "chosen": TALK, "rejected": [USER, OTHER]}, (CLERK, ASK)
    ),
    "system beside a prompt and whole conversations": pair(
        {**SYSTEM, "prompt": "When?", "chosen": TALK, "rejected": [USER, OTHER]}, (CLERK, ASK)
    ),
    "completion": (
        {**SYSTEM, "prompt": "When?", "completion": "At nine."},
        "sft",
        "completion",
        (CLERK, ASK),
        ((NINE,),),
        (),
    ),
    "completion with a context": (
        {"prompt": "When?", "context": "A boat.", "completion": "At nine."},
        "sft",
        "completion",
        "When?\nA boat.",
        ("At nine.",),
        (),
    ),
    "kto": kto(
        {**SYSTEM, "prompt": "When?", "completion": "At nine.", "label": True}, (CLERK, ASK)
    ),
    "a prompt to complete": (
        {**SYSTEM, "prompt": "When?", "answer": "9"},
        "prompts",
        "prompt",
        (CLERK, ASK),
        (),
        (),
    ),
    "messages to complete": (
        {"messages": [USER], "solution": "9"},
        "prompts",
        "prompt",
        (ASK,),
        (),
        (),
    ),
    # one message as a side
    "one message each": pair(
        {"conversations": SHARED[:1], "chosen": SHARED[1], "rejected": OTHER}, (ASK,)
    ),
    "axolotl": pair({"messages": [USER], "chosen": ANSWER, "rejected": OTHER}, (ASK,)),
    "one message as the prompt": pair(
        {"prompt": USER, "chosen": ANSWER, "rejected": OTHER}, (ASK,)
    ),
    "one message as the completion": (
        {"prompt": USER, "completion": ANSWER},
        "sft",
        "completion",
        (ASK,),
        ((NINE,),),
        (),
    ),
    "the chosen response twice": pair(
        {"messages": TALK, "chosen": "At nine.", "rejected": "No."}, (ASK,)
    ),
    # ms-swift's pairs and OpenAI's
    "a rejected response": pair({"messages": TALK, "rejected_response": "No."}, (ASK,)),
    "rejected messages": pair({"messages": TALK, "rejected_messages": [USER, OTHER]}, (ASK,)),
    "a query and a rejected response": pair(
        {"query": "When?", "response": "At nine.", "rejected_response": "No."},
        "When?",
        "At nine.",
        "No.",
    ),
    "preferred output": pair(
        {
            "input": {"messages": [USER], "parallel_tool_calls": True},
            "preferred_output": [ANSWER],
            "non_preferred_output": [OTHER],
        },
        (ASK,),
        unread_columns=("parallel_tool_calls",),
    ),
    # labels
    "labeled messages": kto({"messages": TALK, "label": True}, (ASK,)),
    "labeled conversations": kto({"conversations": SHARED, "kto_tag": True}, (ASK,)),
    "labeled instruction": kto(
        {"instruction": "When?", "output": "At nine.", "kto_tag": True}, "When?", "At nine."
    ),
    "labeled by a number": kto(
        {"question": "When?", "answer": "At nine.", "label": 1}, "When?", "At nine."
    ),
    # conversations
    "a list of another name": chat({"id": "7", "talk": TALK}, ASK, NINE, unread_columns=("id",)),
    "the same system message twice": chat(
        {**SYSTEM, "messages": [{"role": "system", "content": CLERK.content}, *TALK]},
        CLERK,
        ASK,
        NINE,
    ),
    "pairs of turns": chat(
        {"conversation": [{"human": "When?", "assistant": "At nine."}], **SYSTEM}, CLERK, ASK, NINE
    ),
    "ms-swift's query": chat(
        {"query": "When?", "response": "At nine.", "history": [["When?", "No."]]},
        ASK,
        NO,
        ASK,
        NINE,
    ),
    "scores beside an answer": chat(
        {"prompt": "When?", "response": "At nine.", "helpfulness": 3},
        ASK,
        NINE,
        unread_columns=("helpfulness",),
    ),
    "turns with both sides": chat(
        {"conversation": [{"input": "When?", "output": "At nine."}], "source": "a"},
        ASK,
        NINE,
        unread_columns=("source",),
    ),
    "gemini's parts": chat(
        {
            "contents": [
                {"role": "user", "parts": [{"text": "When?"}]},
                {"role": "model", "parts": [{"text": "At nine."}]},
            ]
        },
        ASK,
        NINE,
    ),
    "an instruction and its completion": chat(
        {"instruction": "When?", "completion": "At nine."}, ASK, NINE
    ),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".json"])
@pytest.mark.parametrize("name", ROWS)
def test_a_row_means_what_it_means_in_its_own_tool(name, suffix, tmp_path):
    row, required_format, kind, prompt, responses, unread_columns = ROWS[name]
    (example,), columns_used = read(write(tmp_path / f"rows{suffix}", [row]), required_format)
    assert (example.kind, example.prompt, example.responses) == (kind, prompt, responses)
    assert (
        tuple(columns_used.unread_columns) == unread_columns and not columns_used.unread_turn_keys
    )


GENERATED = {
    "kto_tag": ({"instruction": "When?", "output": "No.", "kto_tag": False}, "kto"),
    "label": ({"messages": TALK, "label": False}, "kto"),
    "rejected": ({"messages": TALK, "rejected_response": "No."}, "preference"),
    "rejected beside an answer": ({"question": "a", "answer": "b", "rejected": "c"}, "preference"),
    "labels": ({"input_ids": [4, 5], "labels": [-100, 5]}, "tokens"),
    "labels that mask nothing": ({"input_ids": [4, 5], "labels": [4, 5]}, None),
    "a class": ({"text": "a", "label": 1}, None),
}


@pytest.mark.parametrize("name", GENERATED)
def test_rows_decide_the_objective_of_a_generated_recipe(name, tmp_path):
    row, format = GENERATED[name]
    format_and_columns = peek(Source(path=str(write(tmp_path / "rows.jsonl", [row]))))
    assert (None if format_and_columns is None else format_and_columns[0]) == format


def masked_row(**keys):
    return {"messages": [USER, {**OTHER, **keys}, USER, ANSWER]}


@pytest.mark.parametrize(
    "keys",
    [
        {"weight": 0},
        {"loss": False},
        {"train": False},
        {"training": False},
        {"masked": True},
        {"mask": True},
        {"loss_weight": 0.0},
        {"loss_scale": 0},
        {"weight": 1, "train": False},
    ],
)
def test_a_turn_is_masked_by_the_keys_of_every_tool(keys, tmp_path):
    (example,), columns_used = read(write(tmp_path / "rows.jsonl", [masked_row(**keys)]), "sft")
    assert [turn.trained_on for turn in example.responses[0]] == [True, False, True, True]
    assert not columns_used.unread_turn_keys


def test_keys_of_turns_that_nothing_reads_are_noted(tmp_path):
    turn = {**ANSWER, "tool_plan": "I will look.", "value": "other", "from": "gpt", "note": None}
    call = {**CALL, "index": 0}
    parts = [{"type": "text", "text": "When?", "cache_control": {"type": "ephemeral"}}]
    rows = [
        {"messages": [{"role": "user", "content": parts}, turn], "tools": [TOOL], "split": "a"},
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]},
    ]
    _, columns_used = read(write(tmp_path / "rows.jsonl", rows), "sft")
    assert list(columns_used.unread_columns) == ["split"]
    assert set(columns_used.unread_turn_keys) == {
        "content.cache_control",
        "tool_plan",
        "value",
        "tool_calls.index",
    }
    assert columns_used.notes()[0] == "split" and columns_used.notes()[1].startswith(
        "in turns: content.cache"
    )


REFUSED = {
    "undesirable": ({"messages": TALK, "label": False}, {"format": "messages"}, "kind=kto"),
    "kto_tag": (
        {"instruction": "a", "output": "b", "kto_tag": 0},
        {"format": "alpaca"},
        "kind=kto",
    ),
    "labeled": ({"messages": TALK, "label": False}, {}, "kind=kto"),
    "spans": (
        masked_row(train_detail=[{"begin_offset": 0, "end_offset": 2, "train": False}]),
        {},
        "remove it",
    ),
    "half a weight": (masked_row(loss_scale=0.5), {}, "write 0 or 1"),
    "a prompt to train on": (
        {"messages": [{**USER, "train": True}, ANSWER]},
        {},
        "data.chat.train_on=all",
    ),
    "videos": ({"messages": TALK, "videos": ["a.mp4"]}, {}, "data.on_error=skip"),
    "videos of a turn": (
        {"messages": [{**USER, "videos": ["a.mp4"]}, ANSWER]},
        {},
        "on_error=skip",
    ),
    "a video of llava": ({"video": "a.mp4", "conversations": SHARED}, {}, "data.on_error=skip"),
    "a picture elsewhere": (
        {"messages": TALK, "images": ["https://example.org/a.png"]},
        {},
        "download it",
    ),
    "a marker": (
        {"messages": [{"role": "user", "content": "<image>\nWhat is it?"}, ANSWER]},
        {},
        "remove <image>",
    ),
    "sound of a question": (
        {"question": "a", "answer": "b", "audio": "a.wav"},
        {},
        "on_error=skip",
    ),
    "videos of another name": (
        {"messages": TALK, "shots": ["a.mp4"]},
        {"columns": {"videos": "shots"}},
        "data.on_error=skip",
    ),
    "two answers": (
        {"instruction": "a", "output": ["b", "c"]},
        {},
        "`chosen`",
    ),
    "other labels": ({"input_ids": [4, 5], "labels": [-100, 7]}, {}, "the tokens themselves"),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_trained_on_are_refused_with_a_fix(name, suffix, tmp_path):
    row, source, fix = REFUSED[name]
    with pytest.raises(UserError) as caught:
        read(write(tmp_path / f"rows{suffix}", [row]), "sft", **source)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    "text",
    [
        "Explain docker run <image>",
        "Write <video src='a'></video> in HTML",
        "<audio>a</audio>",
        "a < image >",
    ],
)
def test_markup_in_a_text_is_not_taken_for_a_picture(text, tmp_path):
    row = {"messages": [{"role": "user", "content": text}, ANSWER]}
    (example,), _ = read(write(tmp_path / "rows.jsonl", [row]), "sft")
    assert example.responses[0][0].content == text


def test_an_explicit_sft_reads_a_conversation_beside_a_rejected_response(tmp_path):
    row = {"messages": TALK, "rejected_response": "No."}
    (example,), columns_used = read(write(tmp_path / "rows.jsonl", [row]), "sft")
    assert example.responses == ((ASK, NINE),) and list(columns_used.unread_columns) == [
        "rejected_response"
    ]


def test_nulls_of_united_schemas_are_left_out(tmp_path):
    """Arrow gives every turn, call and tool the keys of all of them."""
    fly = {"name": "fly", "arguments": {"to": "Rome", "seats": 2}}
    fly_tool = {"name": "fly", "parameters": {"properties": {"to": {"type": "string"}}}}
    rows = [
        {
            "conversations": [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "21 C"},
                ANSWER,
            ],
            "tools": [TOOL],
        },
        {
            "conversations": [
                SHARED[0],
                {
                    "from": "gpt",
                    "value": None,
                    "tool_calls": [{"type": "function", "function": fly}],
                },
            ],
            "tools": [{"type": "function", "function": fly_tool}],
        },
    ]
    plain_examples, _ = read(write(tmp_path / "rows.jsonl", rows), "sft", format="messages")
    united_examples, columns_used = read(
        write(tmp_path / "rows.parquet", rows), "sft", format="messages"
    )
    assert [e.responses for e in plain_examples] == [e.responses for e in united_examples]
    assert [e.tools for e in plain_examples] == [e.tools for e in united_examples]
    assert plain_examples[0].responses[0][1].calls == (CALL,) and not columns_used.unread_turn_keys


def test_the_older_function_call_of_openai_is_read(tmp_path):
    call = {"name": "weather", "arguments": json.dumps({"city": "Oslo"})}
    row = {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "weather", "content": "21 C"},
            ANSWER,
        ],
        "functions": [TOOL["function"]],
    }
    (example,), columns_used = read(write(tmp_path / "rows.jsonl", [row]), "sft")
    calling_turn, result = example.responses[0][1:3]
    assert calling_turn.calls == (CALL,) and (result.role, result.name) == ("tool", "weather")
    assert (
        example.tools == (TOOL,)
        and not columns_used.unread_columns
        and not columns_used.unread_turn_keys
    )


def test_answers_may_be_tool_calls(tmp_path):
    """xLAM's function calling has the calls as text."""
    calls = [{"name": "weather", "arguments": {"city": "Oslo"}}]
    row = {"id": 1, "query": "When?", "answers": json.dumps(calls), "tools": json.dumps([TOOL])}
    path = write(tmp_path / "rows.jsonl", [row])
    assert peek(Source(path=str(path))) == ("alpaca", {"instruction": "query", "output": "answers"})
    (example,), columns_used = read(path, "sft")
    assert example.responses == ((ASK, Message("assistant", "", (CALL,))),)
    assert example.tools == (TOOL,) and list(columns_used.unread_columns) == ["id"]


@pytest.mark.parametrize("version", ["1", 1])
def test_an_object_with_one_list_of_rows_is_a_dataset(version, tmp_path):
    rows = [{"question": "When?", "answer": "At nine."}] * 2
    path = write(tmp_path / "rows.json", {"version": version, "data": rows})
    assert peek(Source(path=str(path))) == (
        "alpaca",
        {"instruction": "question", "output": "answer"},
    )
    assert len(read(path, "sft")[0]) == 2


def test_rows_of_a_list_keep_their_lists(tmp_path):
    rows = [{"title": "a", "steps": [{"do": "b"}], "prompt": "When?", "completion": "At nine."}]
    (example,), columns_used = read(write(tmp_path / "rows.json", rows), "sft")
    assert example.kind == "completion" and list(columns_used.unread_columns) == ["title", "steps"]


AMBIGUOUS = {
    "two texts": (
        {"id": "1", "customer_text": "When?", "agent_text": "At nine.", "date": "2026"},
        "data.format=alpaca data.columns='{instruction: customer_text, output: agent_text}'",
    ),
    "columns of a table": ({"question": ["a", "b"], "answer": ["c", "d"]}, "orient='columns'"),
    "numbered columns": ({"question": {"0": "a"}, "answer": {"0": "c"}}, "orient='columns'"),
    "numbered rows": ({"0": {"question": "a"}, "1": {"question": "b"}}, "orient='index'"),
    "columns and data": (
        {"columns": ["a", "b"], "index": [0, 1], "data": [["c", "d"], ["e", "f"]]},
        "split",
    ),
    "squad": (
        {
            "id": "1",
            "context": "c",
            "question": "q",
            "answers": {"text": ["a"], "answer_start": [0]},
        },
        '"answer": ...',
    ),
    "turns of a tree": (
        {"message_id": "1", "parent_id": None, "text": "a", "role": "prompter", "lang": "en"},
        '{"messages": [...]}',
    ),
    "a transcript": (
        {"system": "SYSTEM: You help.", "chat": "USER: a\n\n\nASSISTANT: b <|endoftext|>"},
        '{"messages": [...]}',
    ),
    "a list of texts": ({"id": "1", "data": ["When is it?", "At nine."]}, '{"role": "user"'),
    "several responses": (
        {"instruction": "a", "completions": [{"response": "b", "score": 1}, {"response": "c"}]},
        '"chosen"',
    ),
    "segments": ({"segments": [{"label": True, "text": "a"}]}, '"completion"'),
    "a number for a response": ({"question": "a", "answer": 7}, "data.columns={text: question}"),
    "two responses": (
        {"prompt": "a", "response_0": "b", "response_1": "c", "better_response_id": 1},
        '"chosen"',
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_rows_are_refused_with_what_to_set(name, tmp_path):
    row, fix = AMBIGUOUS[name]
    path = write(tmp_path / "rows.json", row)
    with pytest.raises(UserError) as caught:
        peek(Source(path=str(path)))
    assert fix in caught.value.fix
    with pytest.raises(UserError) as caught:
        read(path, "sft")
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("row", "columns", "required_format", "kind"),
    [
        (
            {"q": "When?", "a": "At nine.", "good": False},
            {"instruction": "q", "output": "a", "label": "good"},
            "kto",
            "kto",
        ),
        (
            {"q": "When?", "a": "At nine.", "b": "No.", "s": "You help."},
            {"instruction": "q", "chosen": "a", "rejected": "b", "system": "s"},
            "pairs",
            "pair",
        ),
        ({"talk": TALK, "good": 1}, {"messages": "talk", "label": "good"}, "kto", "kto"),
        ({"talk": TALK, "bad": "No."}, {"messages": "talk", "rejected": "bad"}, "pairs", "pair"),
        ({"q": "When?", "c": "A boat."}, {"prompt": "q", "input": "c"}, "prompts", "prompt"),
        (
            {"q": "When?", "a": "At nine.", "t": [TOOL], "h": [["a", "b"]]},
            {"prompt": "q", "completion": "a", "tools": "t", "history": "h"},
            "sft",
            "completion",
        ),
    ],
)
def test_every_role_can_have_a_column_of_another_name(
    row, columns, required_format, kind, tmp_path
):
    path = write(tmp_path / "rows.jsonl", [row])
    (example,), columns_used = read(path, required_format, columns=columns)
    assert example.kind == kind and not columns_used.unread_columns
    example_text = json.dumps([str(example.prompt), str(example.responses), example.tools])
    for name, value in row.items():
        assert isinstance(value, int | list) or value in example_text, name


def test_pictures_beside_a_text_are_refused_and_links_are_not(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "A boat.", "image": {"path": "a.png"}}])
    with pytest.raises(UserError, match="has 'image'"):
        read(path, "any")
    write(path, [{"text": "A boat.", "image": "https://a/b.png"}])
    (document,), columns_used = read(path, "any")
    assert document.text == "A boat." and list(columns_used.unread_columns) == ["image"]


@pytest.mark.parametrize(
    "text",
    ["<image>\nWhat?", "What?\n<image>", "<image><image>Which?", "Look:\n<video> <video>\nNow?"],
)
def test_a_mark_of_a_picture_that_the_row_lacks_is_refused(text, tmp_path):
    for row in (
        {"messages": [{"role": "user", "content": text}, ANSWER]},
        {"prompt": text, "completion": "At nine."},
    ):
        with pytest.raises(
            BadRow, match=r"the row has no pictures|sound and video are not supported"
        ):
            read(write(tmp_path / "rows.jsonl", [row]), "sft")


def test_objects_in_a_row_are_not_taken_for_a_table(tmp_path):
    row = {
        "prompt": {"who": "user", "said": "When?"},
        "completion": {"who": "gpt", "said": "At nine."},
    }
    path = write(tmp_path / "rows.jsonl", [row])
    (example,), _ = read(path, "sft", columns={"role": "who", "content": "said"})
    assert (example.prompt, example.responses) == ((ASK,), ((NINE,),))
    path = write(tmp_path / "pairs.jsonl", [{"translation": {"en": "a", "de": "b"}}])
    with pytest.raises(UserError, match="no column with a usual name"):
        read(path, "sft")


def test_bad_rows_can_be_skipped(tmp_path):
    rows = [{"messages": TALK}, {"messages": TALK, "videos": ["a.mp4"]}, masked_row(loss=2)]
    dataset = open_dataset(Source(path=str(write(tmp_path / "a.jsonl", rows))), "sft")
    stats = ReadStats()
    assert len(list(read_documents(dataset, on_error="skip", stats=stats))) == 1
    assert stats.skipped == 2 and BadRow.__name__ == "BadRow"


@pytest.mark.parametrize("first_context", ["", None])
def test_a_context_that_is_empty_in_the_first_row_is_read_in_later_rows(first_context, tmp_path):
    rows = [
        {"instruction": "Sum up.", "context": context, "response": "They do."}
        for context in (first_context, "Boats leave.")
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    format_and_columns = peek(Source(path=str(path)))
    assert format_and_columns == ("alpaca", {"output": "response", "input": "context"})
    examples, columns_used = read(
        path, "sft", format=format_and_columns[0], columns=format_and_columns[1]
    )
    assert [e.responses[0][0].content for e in examples] == ["Sum up.", "Sum up.\nBoats leave."]
    assert not columns_used.unread_columns


def test_content_parts_of_other_interfaces_are_read(tmp_path):
    parts = [{"type": "input_text", "text": "When"}, {"type": "text", "text": "?"}]
    row = {"messages": [{"role": "user", "content": parts}, ANSWER]}
    (example,), _ = read(write(tmp_path / "rows.jsonl", [row]), "sft")
    assert example.responses == ((ASK, NINE),)
