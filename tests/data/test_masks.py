"""Spans of what the assistant wrote, under every template that TRL ships, for talks of every shape."""

import re
from pathlib import Path

import pytest
from chat_tokenizers import SPECIAL
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.data.chat.masks import Refused, Unclear, loss_tokens
from bloomery.data.chat.sandbox_worker import Template

trl = pytest.importorskip("trl")
FILES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
SEES_PICTURES = {"idefics3", "smolvlm", "llava_next"}  # want contents as lists of parts
PLAIN = [
    path for path in FILES if not path.stem.endswith("_training") and path.stem not in SEES_PICTURES
]
ENDERS = re.compile(
    "|".join(re.escape(name) for name in (*SPECIAL, "<|return|>", "<|call|>", "<turn|>", "<|eot|>"))
)
EDGES = st.sampled_from(["", " ", "\n", "  \n"])


@st.composite
def talks(draw):
    """Turns whose contents occur nowhere else: w0w, w1w, ..."""
    count = iter(range(100))

    def content():
        word = f"w{next(count)}w"
        return (
            draw(EDGES)
            + word
            + draw(st.sampled_from(["", " and more", "\nline", "!"]))
            + draw(EDGES)
        )

    turns = [{"role": "system", "content": content()}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns.append({"role": "user", "content": content()})
        if draw(st.integers(0, 3)) == 0:
            call = {
                "type": "function",
                "id": "abcdefghi",
                "function": {"name": f"f{next(count)}f", "arguments": {"x": 1}},
            }
            turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
            turns.append(
                {
                    "role": "tool",
                    "content": content(),
                    "name": call["function"]["name"],
                    "tool_call_id": "abcdefghi",
                }
            )
        answer = {"role": "assistant", "content": content()}
        if draw(st.integers(0, 3)) == 0:
            answer |= {"reasoning_content": "hmm", "thinking": "hmm"}
        turns.append(answer)
    return turns


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_each_span_holds_its_turn_and_no_other(path):
    template = Template(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"}, ENDERS)
    has_calls_of_talks = []

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(turns=talks())
    def check(turns):
        learned_turns = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
        tools = [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": "d",
                    "parameters": {
                        "type": "object",
                        "properties": {"x": {"type": "integer", "description": "x"}},
                    },
                },
            }
        ]
        has_calls = any(turn["role"] == "tool" for turn in turns)
        try:
            rendering = template.read(
                {"messages": turns, "tools": tools if has_calls else [], "train_on": learned_turns}
            )
        except (Refused, Unclear):
            return
        has_calls_of_talks.append(has_calls)
        span_texts = [rendering["text"][start:end] for start, end in rendering["spans"]]
        if template.marks_itself and len(span_texts) != len(learned_turns):
            return  # several blocks a turn
        assert len(span_texts) == len(learned_turns)
        for span, index in zip(span_texts, learned_turns, strict=True):
            (word,) = re.findall(r"[wf]\d+[wf]", str(turns[index]))
            assert re.findall(r"[wf]\d+[wf]", span) in ([word], [word, word])
            assert turns[index]["content"].strip() in span
            assert not span.startswith(("<|im_start|>", "<start_of_turn>", "<|start_header_id|>"))

    check()
    assert has_calls_of_talks, "every talk was refused"


def test_a_token_with_one_learned_character_is_learned():
    offsets = [(0, 3), (3, 5), (5, 5), (5, 9), (9, 12), (12, 13)]
    assert loss_tokens(offsets, [(4, 6), (12, 13)]) == [False, True, False, True, False, True]
    assert loss_tokens(offsets, []) == [False] * 6
    # one character in two tokens
    assert loss_tokens([(0, 1), (0, 1), (1, 2)], [(0, 1)]) == [True, True, False]
