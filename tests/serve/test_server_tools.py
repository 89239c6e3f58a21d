"""Tools that the server calls itself: the same ids as in training, streamed or not, and hostile ones."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import psutil
import pytest
from server_for_tests import LIMITS, Running, running
from test_serve import client_of, post

from bloomery.core.errors import UserError
from bloomery.core.units import Duration
from bloomery.data.examples import Message
from bloomery.data.prompts import Prompt
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.completions import Completion
from bloomery.infer.sampling import Sampling
from bloomery.model.io.weights import load_decoder
from bloomery.plan.types import EpisodesPlan
from bloomery.serve.limits import Refused
from bloomery.serve.server_tools import ServerTools
from bloomery.train.rl import episodes as episodes_module
from bloomery.train.rl.episodes import EpisodeSampler
from bloomery.train.rl.tools import RecordedCalls
from models_for_tests import make_chat_model

LONG = replace(LIMITS, context=2048, new_tokens=400)
TURNS = [{"role": "user", "content": "What is 1 + 2?"}]
FILE = '''
import os, socket, time


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def fail():
    """Fail."""
    raise RuntimeError("broken inside")


def hang():
    """Hang."""
    time.sleep(60)


def flood():
    """Return 10 MB."""
    return "x" * 10_000_000


def take():
    """Take memory."""
    return str(len(bytearray(4 * 2**30)))


def fork(path: str):
    """Leave a process behind."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(path, "w").write(str(os.getpid()))
            time.sleep(60)
        os._exit(0)
    while not os.path.exists(path):
        time.sleep(0.01)
    return "forked"


def reach():
    """Open a connection."""
    socket.create_connection(("127.0.0.1", 80), timeout=1)


def end():
    """End the process."""
    os._exit(3)


class Counter:
    def reset(self, prompt, **row):
        self.total = 0
        return f" ({len(prompt)} turns)"

    def step(self, by: int) -> int:
        """Count on."""
        self.total += by
        return self.total

    def get_reward(self) -> float:
        return self.total / 4
'''


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_chat_model(
        tmp_path_factory.mktemp("tools") / "chat", "<tool_call>", "</tool_call>"
    )
    (folder / "user_tools.py").write_text(FILE)
    return folder


def plan_of(folder: Path, *tools: str, environment: str | None = None) -> EpisodesPlan:
    file = folder / "user_tools.py"
    places = [f"{file}:{tool}" for tool in tools]
    plan = EpisodesPlan.of_places(places, environment and f"{file}:{environment}", max_turns=4)
    limits = plan.environment.model_copy(update={"timeout": Duration(2.0, "seconds")})
    return plan.model_copy(update={"environment": limits})


class Script:
    """In place of sampling: each text gets the next answer. `prompts`: the ids that each answer was given for."""

    def __init__(self, folder: Path, answers: list[str]) -> None:
        tokenizer = load_tokenizer(folder)
        end = tokenizer.id_of("<|im_end|>")
        self.answers = [[*tokenizer.encode(text, special=True), end] for text in answers]
        self.prompts: list[list[int]] = []

    def __call__(self, logits, prompt, new, sampling, random) -> int:
        if not new:
            self.prompts.append(list(prompt))
        return self.answers[len(self.prompts) - 1][len(new)]


@contextmanager
def tool_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, plan: EpisodesPlan, answers: list[str]
) -> Iterator[tuple[Running, Script]]:
    script = Script(folder, answers)
    monkeypatch.setattr("bloomery.infer.decode.sample_token", script)
    with running({"chat": folder}, template="qwen", limits=LONG, episodes=plan) as server:
        yield server, script


def test_ids_are_those_of_an_episode_in_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [f"I add. {call('add', a=1, b=2)}", call("add", a=3, b=4) * 2, "It is 3."]
    plan = plan_of(folder, "add")
    with tool_server(folder, monkeypatch, plan, answers) as (server, script):
        client = client_of(server)
        reply = client.chat.completions.create(model="chat", messages=TURNS)
        [choice] = reply.choices
        assert (choice.message.content, choice.finish_reason) == ("It is 3.", "stop")
        assert choice.message.tool_calls is None
        steps = choice.message.steps
        served_prompts = list(script.prompts)

        # A stream tells of each turn when its results are there.
        script.prompts.clear()
        chunks = list(client.chat.completions.create(model="chat", messages=TURNS, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        streamed_steps = [step for delta in deltas for step in getattr(delta, "steps", None) or ()]
        assert streamed_steps == steps and script.prompts == served_prompts
        assert "".join(delta.content or "" for delta in deltas).endswith("It is 3.")
        assert not any(delta.tool_calls for delta in deltas)
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert [step["role"] for step in steps] == ["assistant", "tool", "assistant", "tool", "tool"]
    assert [step["content"] for step in steps if step["role"] == "tool"] == ["3", "7", "7"]
    assert choice.message.episode == {"turns": 3, "calls": 3, "failed_calls": 0}

    # The policy of training follows the same script.
    trained_prompts: list[list[int]] = []

    def policy(decoder, prompts, num_generations, sampling, uniforms, **more):
        completion = completion_of(script.answers[len(trained_prompts)])
        trained_prompts.append(list(prompts[0]))
        return [completion]

    monkeypatch.setattr(episodes_module, "sample_completions", policy)
    tokenizer = load_tokenizer(folder)
    prompt = Prompt(np.array([1]), "", TURNS, {})
    sampling = Sampling(max_new_tokens=800, stop_ids=(tokenizer.id_of("<|im_end|>"),))
    with EpisodeSampler(plan, tokenizer, longest=2048, template="qwen") as sampler:
        sampler.sample(
            load_decoder(folder),
            [prompt],
            1,
            sampling,
            lambda place, number: 0,
            slots=1,
            recorded=RecordedCalls(None),
        )
    assert trained_prompts == served_prompts


def completion_of(ids: list[int]) -> Completion:
    completion = Completion(0, 0)
    completion.ids = list(ids)
    completion.logps = [0.0] * len(ids)
    return completion


def test_an_environment_has_a_state_for_each_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [call("step", by=1), call("step", by=2), "done"] * 2
    plan = plan_of(folder, environment="Counter")
    with tool_server(folder, monkeypatch, plan, answers) as (server, script):
        for _ in range(2):
            reply = client_of(server).chat.completions.create(model="chat", messages=TURNS)
            message = reply.choices[0].message
            results = [step["content"] for step in message.steps if step["role"] == "tool"]
            assert results == ["1", "3"]
            assert message.episode == {
                "turns": 3,
                "calls": 2,
                "failed_calls": 0,
                "reward": 0.75,
            }
        # What reset returned ends the user's turn.
        assert "What is 1 + 2? (1 turns)" in load_tokenizer(folder).decode(script.prompts[0])


def test_turns_have_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(folder, "add").model_copy(update={"max_turns": 2})
    answers = [call("add", a=1, b=2)] * 2
    with tool_server(folder, monkeypatch, plan, answers) as (server, _):
        reply = client_of(server).chat.completions.create(model="chat", messages=TURNS)
    [choice] = reply.choices
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert choice.message.episode == {"turns": 2, "calls": 1, "failed_calls": 0}


def test_a_request_may_bring_its_own_tools_or_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"type": "function", "function": {"name": "clock"}}
    with tool_server(folder, monkeypatch, plan_of(folder, "add"), ["so", "so"]) as (server, script):
        for more in ({"tools": [own]}, {"tool_choice": "none"}):
            status, answer = post(server, "/v1/chat/completions", {"messages": TURNS, **more})
            assert status == 200 and "steps" not in answer["choices"][0]["message"]
        assert all("Add two" not in load_tokenizer(folder).decode(ids) for ids in script.prompts)
        for more in ({"n": 2}, {"response_format": {"type": "json_object"}}):
            status, answer = post(server, "/v1/chat/completions", {"messages": TURNS, **more})
            assert status == 400, answer


def test_hostile_tools_answer_as_text_and_leave_no_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "left.txt"
    calls = [
        (call("fail"), "broken inside"),
        (call("hang"), "took longer than 2 s"),
        (call("take"), "error"),
        (call("fork", path=str(path)), "forked"),
        (call("reach"), "error"),
        (call("end"), "ended its process"),
        (call("sub"), "there is no tool 'sub'"),
        ('<tool_call>\n{"name": "fail", "arguments": {"a": 1\n</tool_call>', "no JSON"),
    ]
    # 20,000 characters of 10 MB are left, and leave no room for an answer.
    answers = [call("flood"), *(text for written, _ in calls for text in (written, "so"))]
    names = ("add", "fail", "hang", "flood", "take", "fork", "reach", "end")
    plan = plan_of(folder, *names)
    before = set(psutil.Process().children(recursive=True))
    with tool_server(folder, monkeypatch, plan, answers) as (server, _):
        status, answer = post(server, "/v1/chat/completions", {"messages": TURNS})
        assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
        for written, expected in calls:
            status, answer = post(server, "/v1/chat/completions", {"messages": TURNS})
            assert status == 200, (written, answer)
            message = answer["choices"][0]["message"]
            results = [step for step in message["steps"] if step["role"] == "tool"]
            assert expected in results[0]["content"]
            assert message["content"] == "so"
        # What was forked has ended with its episode.
        assert ended_within(int(path.read_text()), 10.0)
    left = [
        process for process in psutil.Process().children(recursive=True) if process not in before
    ]
    assert not [process for process in left if process.is_running()]


def ended_within(process: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not psutil.pid_exists(process)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_the_call_of_its_tool(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    plan = plan_of(folder, "hang", "add")
    limits = plan.environment.model_copy(update={"timeout": Duration(60.0, "seconds")})
    plan = plan.model_copy(update={"environment": limits})
    answers = [call("hang"), call("add", a=1, b=2), "so"]
    with tool_server(folder, monkeypatch, plan, answers) as (server, script):
        body = {"messages": TURNS, "model": "chat"}
        asked = {**body, "stream": stream}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=3.0)
        assert len(script.prompts) == 1
        # The next request has tools of its own.
        status, answer = post(server, "/v1/chat/completions", body)
        assert status == 200 and answer["choices"][0]["message"]["content"] == "so"


def test_a_request_waits_for_tools_as_long_as_it_may(folder: Path) -> None:
    model = SimpleNamespace(tokenizer=load_tokenizer(folder), template_name="qwen")
    messages = [Message("user", "What is 1 + 2?")]

    async def begin_two() -> None:
        tools = ServerTools(plan_of(folder, "add"), [], most=1)
        try:
            first = await tools.begin(model, messages, {}, 0, seconds=60.0)
            with pytest.raises(Refused, match="other requests had all tools") as refused:
                await tools.begin(model, messages, {}, 0, seconds=0.2)
            assert refused.value.status == 408
            first.release()
            (await tools.begin(model, messages, {}, 0, seconds=60.0)).release()
        finally:
            await asyncio.to_thread(tools.close)

    asyncio.run(begin_two())


def test_a_template_without_tools_and_a_file_that_does_not_load_are_refused(folder: Path) -> None:
    with (
        pytest.raises(UserError, match="takes no tools"),
        running({"chat": folder}, template="chatml", episodes=plan_of(folder, "add")),
    ):
        pass
    with (
        pytest.raises(UserError, match="missing"),
        running({"chat": folder}, template="qwen", episodes=plan_of(folder, "missing")),
    ):
        pass
