"""A chat: what the model is given, what it forgets, what a person may type, and what reaches the terminal."""

import json

import pytest
from click.testing import CliRunner

from bloomery.cli import chat as verb
from bloomery.cli import cli
from bloomery.cli.chat import Session
from bloomery.cli.sampling import SETTINGS, setting
from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.data.chat.render import ChatFormat, chat_format
from bloomery.data.examples import Message
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.generate import continued, load_model
from bloomery.infer.sampling import Sampling
from models_for_tests import make_model

COLD = Sampling(max_new_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def chatting(model, **rest):
    decoder, tokenizer = model
    form = ChatFormat(
        lambda turns: tokenizer.encode("".join(f"<{t.role}>{t.content}" for t in turns)), (), (), ""
    )
    return Session(decoder, tokenizer, form, COLD, **rest)


def test_each_turn_is_put_to_the_model_with_all_before_it(model):
    decoder, tokenizer = model
    session = chatting(model, system="S")
    first = "".join(session.reply("one"))
    second = "".join(session.reply("two"))
    assert [(turn.role, turn.content) for turn in session.turns] == [
        ("system", "S"),
        ("user", "one"),
        ("assistant", first),
        ("user", "two"),
        ("assistant", second),
    ]
    whole = tokenizer.encode(f"<system>S<user>one<assistant>{first}<user>two")
    assert second == "".join(continued(decoder, tokenizer, whole, COLD))


def test_the_oldest_turns_are_forgotten_and_the_system_prompt_never(model):
    session = chatting(model, system="be brief")
    put = []
    session.form = ChatFormat(
        lambda turns: put.append(turns) or [3] * (10 * len(turns)), (), (), ""
    )
    for number in range(8):
        list(session.reply(f"question {number}"))
    assert session.dropped and session.history[session.dropped].role == "user"
    last = put[-1]
    assert last[0] == Message("system", "be brief") and last[-1].content == "question 7"
    limit = model[0].config.max_positions - COLD.max_new_tokens
    assert 10 * len(last) <= limit < 10 * (len(last) + 2)
    session.reset()
    assert (session.history, session.dropped) == ([], 0)


def test_a_message_that_cannot_fit_is_refused_and_was_not_said(model):
    session = chatting(model)
    with pytest.raises(
        UserError, match=r"message too long: [\d,]+ tokens, and the context with the reply is 128"
    ):
        list(session.reply("word " * 300))
    assert session.history == []
    assert list(session.reply("word"))


def test_an_answer_that_is_broken_off_stays_as_far_as_it_came(model):
    session = chatting(model)
    answer = session.reply("one")
    piece = next(answer)
    answer.close()
    assert session.history[-1] == Message("assistant", piece)


def test_an_answer_ends_where_the_template_ends_a_turn(folder):
    tokenizer = load_tokenizer(folder)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n"
    template += "{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    with chat_format(tokenizer, template) as form:
        assert form.stop_ids == (tokenizer.eos_id,) and form.stop_strings == ()
        assert tokenizer.decode(form.encode([Message("user", "hi")])) == "user: hi\nassistant: "
    with chat_format(tokenizer, "chatml") as form:  # its markup is letters to this tokenizer
        assert form.stop_ids == () and "<|im_end|>" in form.stop_strings


def test_a_template_that_wants_a_system_message_is_talked_to_with_one(folder):
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template += "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    template += "{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    tokenizer = load_tokenizer(folder)
    with chat_format(tokenizer, template) as form:
        assert form.stop_ids == (tokenizer.eos_id,)
        assert (
            tokenizer.decode(form.encode([Message("system", "s"), Message("user", "u")]))
            == "system: suser: u"
        )
        with pytest.raises(UserError, match="no system"):
            form.encode([Message("user", "u")])


def test_a_model_without_a_template_goes_on_with_one_text(folder):
    tokenizer = load_tokenizer(folder)
    with chat_format(tokenizer, None) as form:
        turns = [
            Message("user", "def f"),
            Message("assistant", "(x):"),
            Message("user", "    return"),
        ]
        assert tokenizer.decode(form.encode(turns)[1:]) == "def f(x):\n    return"
        assert form.encode(turns)[0] == tokenizer.bos_id and "no chat template" in form.description


def test_a_pipe_is_a_conversation_with_commands(folder, tmp_path):
    saved = tmp_path / "talk.jsonl"
    lines = [
        "hello",
        "",
        "/set temperature 0",
        "/system Be kind.",
        "//slash",
        f"/save {saved}",
        "/reset",
        "a \\",
        "b",
    ]
    words = ["chat", str(folder), "--max-new-tokens", "5"]
    told = CliRunner().invoke(cli, words, input="\n".join(lines) + "\n")
    assert told.exit_code == 0, told.stderr
    row = json.loads(saved.read_text())
    assert [turn["role"] for turn in row["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert row["messages"][3]["content"] == "/slash"
    assert "temperature 0.0" in told.stderr and "(system prompt: Be kind.)" in told.stderr
    assert "context 128 tokens; no chat template" in told.stderr and "context" not in told.stdout


@pytest.mark.parametrize(
    ("line", "problem", "fix"),
    [
        ("/sytem x", "no such command: /sytem", "did you mean /system?"),
        ("/set temprature 1", "no such setting: 'temprature'", "did you mean temperature?"),
        ("/set temperature hot", "invalid temperature: 'hot'", "/set temperature 0.8"),
        ("/set temperature -1", "invalid temperature: -1", "/set temperature"),
        ("/set top_p nan", "not a finite number: nan", "finite"),
        ("/set top_k", "", ""),
        ("/save", "missing file name", "/save talk.jsonl"),
        ("/save talk.jsonl", "conversation is empty", "send a message first"),
        ("/save 'talk", "unclosed quote", "/save 'my talk.jsonl'"),
        ("hello\n/save /proc/nothing/x", "cannot write the file", "another file"),
    ],
)
def test_wrong_words_are_said_and_the_chat_goes_on(folder, line, problem, fix):
    words = ["chat", str(folder), "--max-new-tokens", "3"]
    told = CliRunner().invoke(cli, words, input=f"{line}\nhello\n", standalone_mode=False)
    assert problem in told.stderr and fix in told.stderr
    assert told.return_value == (1 if problem else 0) and told.stdout.endswith("\n")


def test_settings_are_those_of_the_flags():
    assert set(SETTINGS) < set(Sampling.__dataclass_fields__)
    assert setting("temperature 0.7") == ("temperature", 0.7) and setting("--max-new-tokens=9") == (
        "max_new_tokens",
        9,
    )
    assert setting("top_k off") == ("top_k", None)


def test_text_of_a_model_commands_no_terminal():
    assert (
        harmless("a\x1b]0;owned\x07\x1b[2Jb\x9b31m\r\nc\td\u202e\x7f") == "a]0;owned[2Jb31m\nc\td"
    )
    assert harmless("né 東京 🙂\u200d") == "né 東京 🙂\u200d"


class Interrupted:
    """A session of a person who presses Ctrl+C while it answers."""

    dropped = 0

    def reply(self, text):
        yield "begun"
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("lines", "code", "asked"),
    [("ic", 130, 2), ("cc", 130, 2), ("icq", 130, 2), ("iiq", 0, 3), ("q", 0, 1), ("", 0, 1)],
)
def test_ctrl_c_stops_an_answer_and_twice_leaves(monkeypatch, lines, code, asked):
    """i: a line whose answer is interrupted; c: Ctrl+C instead of a line; q: /quit; then the end of the lines."""
    terminal, typed, count = verb.Terminal(Interrupted()), iter(lines), []

    def read(prompt):
        count.append(prompt)
        key = next(typed, None)
        if key == "c":
            raise KeyboardInterrupt
        return {"i": "hello", "q": "/quit", None: None}[key]

    monkeypatch.setattr(verb.Terminal, "_read", lambda self, prompt: read(prompt))
    terminal.interactive = True
    assert (terminal.talk(), len(count)) == (code, asked)


def test_generate_answers_questions_by_the_template(folder, tmp_path):
    words = [
        "generate",
        str(folder),
        "--prompt",
        "hi",
        "--max-new-tokens",
        "8",
        "--temperature",
        "0",
        "--json",
    ]
    refused = CliRunner().invoke(cli, [*words, "--chat"], standalone_mode=False)
    assert (
        isinstance(refused.exception, UserError) and "no chat template" in refused.exception.problem
    )
    tuned = make_model(tmp_path)
    (tuned / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    told = json.loads(
        CliRunner().invoke(cli, ["generate", str(tuned), *words[2:], "--chat"]).stdout
    )
    decoder, tokenizer = load_model(tuned)
    asked = [*tokenizer.encode("hi"), tokenizer.eos_id]
    expected = "".join(
        continued(decoder, tokenizer, asked, Sampling(max_new_tokens=8, temperature=0.0))
    )
    assert told == {"results": [{"prompt": "hi", "text": expected}]}


def test_eval_on_conversations_names_its_own_flag_for_a_missing_template(folder, tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": turns}))
    words = ["eval", str(folder), "--data", str(tmp_path / "talk.jsonl")]
    told = CliRunner().invoke(cli, words, standalone_mode=False)
    assert isinstance(told.exception, UserError) and told.exception.where == "--template"
    assert "--template chatml" in told.exception.fix
    assert CliRunner().invoke(cli, [*words, "--template", "chatml"]).exit_code == 0


def test_the_help_fits_a_terminal_of_100_columns():
    assert max(map(len, verb.HELP.splitlines())) <= 100
