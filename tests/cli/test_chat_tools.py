"""`bloomery chat --tools`: calls between the answers to a message, as in training; hostile tools too."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from bloomery.cli.chat import Session, Terminal
from bloomery.core.errors import UserError
from bloomery.core.units import Duration
from bloomery.data.chat.render import chat_format
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.sampling import Sampling
from bloomery.model.io.weights import load_decoder
from bloomery.plan.types import EpisodesPlan
from bloomery.train.rl.live_episodes import LiveEpisode
from models_for_tests import make_chat_model

FILE = '''
import os, time


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def hang():
    """Hang."""
    time.sleep(60)


def flood():
    """Return 10 MB."""
    return "x" * 10_000_000


def end():
    """End the process."""
    os._exit(3)


class Counter:
    def reset(self, **row):
        self.total = 0
        return " (from 0)"

    def step(self, by: int) -> int:
        """Count on."""
        self.total += by
        return self.total
'''


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    marks = ("<tool_call>", "</tool_call>")
    folder = make_chat_model(tmp_path_factory.mktemp("chat") / "chat", *marks)
    (folder / "user_tools.py").write_text(FILE)
    return folder


class Chat:
    """A chat whose model answers by a script. `prompts`: the ids that each answer was given for."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, plan: EpisodesPlan, answers: list[str]
    ) -> None:
        self.tokenizer = load_tokenizer(folder)
        end = self.tokenizer.id_of("<|im_end|>")
        self.answers = [[*self.tokenizer.encode(text, special=True), end] for text in answers]
        self.prompts: list[list[int]] = []
        self.live = LiveEpisode(plan)
        self.lines: list[str] = []
        monkeypatch.setattr("bloomery.infer.decode.sample_token", self.sampled)
        self.decoder = load_decoder(folder)

    def sampled(self, logits, prompt, new, sampling, random) -> int:
        if not new:
            self.prompts.append(list(prompt))
        return self.answers[len(self.prompts) - 1][len(new)]

    def talk(self, *messages: str) -> list[str]:
        """The replies to the messages."""
        with self.session() as session:
            session.on_step = self.lines.append
            return ["".join(session.reply(message)).strip() for message in messages]

    @contextmanager
    def session(self) -> Iterator[Session]:
        sampling = Sampling(max_new_tokens=400)
        with chat_format(self.tokenizer, "qwen") as form:
            try:
                yield Session(
                    self.decoder, self.tokenizer, form, sampling, tools=self.live, template="qwen"
                )
            finally:
                self.live.close()


def plan_of(folder: Path, *tools: str, environment: str | None = None) -> EpisodesPlan:
    file = folder / "user_tools.py"
    places = [f"{file}:{tool}" for tool in tools]
    plan = EpisodesPlan.of_places(places, environment and f"{file}:{environment}", max_turns=4)
    limits = plan.environment.model_copy(update={"timeout": Duration(1.0, "seconds")})
    return plan.model_copy(update={"environment": limits})


def test_calls_are_shown_and_the_conversation_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [f"I add. {call('add', a=1, b=2)}", "It is 3.", "You are welcome."]
    chat = Chat(folder, monkeypatch, plan_of(folder, "add"), answers)
    first, second = chat.talk("1 + 2?", "thanks")
    assert (first, second) == ("I add. It is 3.", "You are welcome.")
    assert chat.lines == ['[add {"a": 1, "b": 2}]', "[add -> 3]"]

    # What was sampled stays as it was; a further message writes the conversation with its call and result.
    first_prompt, second_prompt, third_prompt = chat.prompts
    assert second_prompt[: len(first_prompt)] == first_prompt
    sampled = second_prompt[len(first_prompt) :][: len(chat.answers[0])]
    assert sampled == chat.answers[0]
    text = chat.tokenizer.decode(third_prompt)
    assert call("add", a=1, b=2) in text
    assert "<tool_response>\n3\n</tool_response>" in text and "It is 3." in text


def test_an_environment_keeps_its_state_over_the_conversation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [call("step", by=1), "one", call("step", by=2), "three"]
    chat = Chat(folder, monkeypatch, plan_of(folder, environment="Counter"), answers)
    assert chat.talk("go", "more") == ["one", "three"]
    assert [line for line in chat.lines if "->" in line] == ["[step -> 1]", "[step -> 3]"]
    texts = [chat.tokenizer.decode(ids) for ids in chat.prompts]
    assert "go (from 0)" in texts[0] and "more (from 0)" not in texts[2]


def test_hostile_tools_answer_as_text_and_leave_no_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [call("hang"), "so", call("end"), "so", call("sub"), "so", call("flood")]
    before = set(psutil.Process().children(recursive=True))
    chat = Chat(folder, monkeypatch, plan_of(folder, "hang", "end", "flood"), answers)
    assert chat.talk("a", "b", "c", "d") == ["so", "so", "so", ""]
    results = [line for line in chat.lines if "->" in line]
    assert len(results) == 3
    assert "took longer than 1 s" in results[0]
    assert "ended its process" in results[1]
    assert "there is no tool 'sub'" in results[2]
    assert not set(psutil.Process().children(recursive=True)) - before


def test_a_template_without_tools_is_refused(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    live = LiveEpisode(plan_of(folder, "add"))
    with chat_format(tokenizer, "chatml") as form, pytest.raises(UserError, match="takes no tools"):
        try:
            Session(
                load_decoder(folder),
                tokenizer,
                form,
                Sampling(max_new_tokens=4),
                tools=live,
                template="chatml",
            )
        finally:
            live.close()


def test_steps_stand_on_lines_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [f"I add. {call('add', a=1, b=2)}", "It is 3."]
    chat = Chat(folder, monkeypatch, plan_of(folder, "add"), answers)
    with chat.session() as session:
        Terminal(session)._handle("1 + 2?")
    shown = capsys.readouterr()
    assert shown.out == "I add.\nIt is 3.\n"
    assert shown.err == '[add {"a": 1, "b": 2}]\n[add -> 3]\n'
