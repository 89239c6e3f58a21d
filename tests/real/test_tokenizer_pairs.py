"""Published tokenizers in pairs: any text is in spans that end at the same byte for both, whatever its letters are."""

import pytest

from bloomery.data.chat.render import Renderer, chat_format
from bloomery.data.chat.turns import Turns
from bloomery.data.tokenizer.alignment import continuing_ids
from bloomery.data.tokenizer.templates import find_template
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.train.rl.teacher_episodes import TeacherEpisodes
from bloomery.train.rl.teacher_texts import teacher_texts

TEXTS = {
    "prose": "The furnace isn't hot yet.  It needs 1,200 degrees, doesn't it?\n\n- coal\n- air",
    "code": "func main() {\n\tfor i := 0; i < 10; i++ {\n\t\tfmt.Println(i)\n\t}\n}\n        // end",
    "letters": "Ærlig talt: 世界你好。こんにちは、привет, नमस्ते, שלום, مرحبا, สวัสดี",
    "emoji": "Great 🎈 👩🏽‍🚀🇳🇴 ❤️ 🫠… ™️",
    "spaces": "   a    b\t\tc\n \n  \n\n\nd  ",
}
CHATS = ("smollm2", "qwen3", "llama3", "gemma3", "deepseek-v3")
# A tokenizer beside one of each kind: byte-level BPE, and SentencePiece with and without a space before a text.
PAIRS = (
    ("smollm2", "qwen3"),
    ("smollm2", "llama3"),
    ("smollm2", "gemma3"),
    ("smollm2", "deepseek-v3"),
    ("qwen3", "llama3"),
    ("gemma3", "llama2"),
    ("llama2", "gpt-oss"),
)


def spelled(tokenizer, ids):
    return b"".join(map(tokenizer.spelled, ids))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("both", [*PAIRS, *(pair[::-1] for pair in PAIRS)])
def test_every_token_is_in_a_span(real_tokenizers, both, text):
    student, teacher = map(real_tokenizers, both)
    texts = teacher_texts(student, teacher, turns=False, stop_ids=())
    ids = continuing_ids(student, TEXTS[text])
    completion = texts.read(ids, room=999)
    assert spelled(student, ids) == spelled(teacher, completion.ids) == TEXTS[text].encode()
    assert sum(span.end - span.start for span in completion.spans) == len(ids)
    for span in completion.spans:
        own = spelled(student, ids[span.start : span.end])
        assert own == spelled(teacher, completion.ids[span.other_start : span.other_end]) != b""


@pytest.mark.parametrize("family", [*CHATS, "llama2", "gpt-oss"])
def test_tokens_of_a_text_are_spelled_as_they_are_decoded(real_tokenizers, family):
    tokenizer = real_tokenizers(family)
    for text in TEXTS.values():
        ids = continuing_ids(tokenizer, text)
        assert int(tokenizer.token_bytes()[ids].sum()) == len(text.encode())
        behind = tokenizer.encode("x")
        assert tokenizer.decode([*behind, *ids]).removeprefix("x") == text


@pytest.mark.parametrize("teacher", CHATS)
@pytest.mark.parametrize("student", CHATS)
def test_answers_of_published_chat_templates_begin_and_end_alike(real_tokenizers, student, teacher):
    tokenizers = [real_tokenizers(student), real_tokenizers(teacher)]
    with chat_format(tokenizers[0], None) as form:
        (stop, *_) = form.stop_ids
    texts = teacher_texts(*tokenizers, turns=True, stop_ids=(stop,))
    ids = [*continuing_ids(tokenizers[0], f"{texts.space}{TEXTS['prose']}"), stop]
    completion = texts.read(ids, room=999)
    assert sum(span.end - span.start for span in completion.spans) == len(ids)
    assert completion.ids[-1] == texts.end_id
    with chat_format(tokenizers[1], None) as form:
        assert texts.end_id in form.stop_ids


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def test_an_episode_of_smollm2_as_qwen3_reads_it(real_tokenizers, tmp_path):
    """By the template of Qwen2.5, which SmolLM2 has no tokens for, and by that of Qwen3 without thoughts."""
    teacher = real_tokenizers("qwen3")
    real_tokenizers("smollm2").save(tmp_path)
    student = load_tokenizer(tmp_path)
    student.config["chat_template"] = find_template("qwen", {}).text
    silent = {"enable_thinking": False}
    with (
        Renderer(student, template=None, train_on="assistant") as of_student,
        Renderer(teacher, template=None, train_on="assistant", variables=silent) as of_teacher,
    ):
        turns = [Turns(of_student, student, [ADD]), Turns(of_teacher, teacher, [ADD])]
        end = student.id_of("<|im_end|>")
        texts = teacher_texts(student, teacher, turns=True, stop_ids=(end,), variables=silent)
        episodes = TeacherEpisodes(texts, student=turns[0], teacher=turns[1])
        call_ids = [*continuing_ids(student, CALL), end]
        _, calls = turns[0].read_text(CALL)
        given = turns[0].given(calls, ["3"], end)
        ids = [*call_ids, *given, *continuing_ids(student, "It is 3."), end]
        messages = [{"role": role, "content": "3"} for role in ("assistant", "tool", "assistant")]
        span = [len(call_ids), len(call_ids) + len(given)]
        completion = episodes.read(ids, [span], messages, room=999)
    assert teacher.decode(list(completion.ids)) == (
        f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nIt is 3.<|im_end|>"
    )
    assert len([*call_ids, *ids[span[1] :]]) == sum(
        compared.end - compared.start for compared in completion.spans
    )
    # SmolLM2 writes in letters what is one token of Qwen3.
    first = completion.spans[0]
    assert completion.ids[first.other_start : first.other_end] == (teacher.id_of("<tool_call>"),)
    assert first.end - first.start > 1
