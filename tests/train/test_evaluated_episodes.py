"""`bloomery eval MODEL --environment`: episodes of any model. Oracle: a script, counted by hand."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_episodes import STEP, Policy, write_model_and_tools

import bloomery
from bloomery.cli.eval import command
from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.evals.episodes import pass_at
from bloomery.train.rl import episodes as episodes_module

# Of two prompts two episodes each: 10 passes, a call fails in one of the others.
SCRIPT = {
    (0, 0): [STEP % 7, "done"],
    (0, 1): [STEP % 1, STEP % 1, "done"],
    (1, 0): [STEP % '"x"', "done"],
    (1, 1): ["done"],
}
ROWS = [{"prompt": [{"role": "user", "content": "Count."}], "start": start} for start in (3, 5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model_and_tools(tmp_path_factory.mktemp("episodes") / "chat")


@pytest.fixture
def asked(folder, tmp_path, monkeypatch):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(
        episodes_module, "sample_completions", Policy(load_tokenizer(folder), SCRIPT)
    )
    return folder, f"{folder}/user_tools.py:Counter", data


def test_reward_passes_turns_and_errors_are_those_of_the_script(asked):
    model, environment, data = asked
    scores = bloomery.evaluate_environment(
        model, environment, data, generations=2, max_new_tokens=400, device="cpu"
    )
    assert (scores.prompts, scores.generations) == (2, 2)
    assert scores.reward == pytest.approx((1.0 + 0.5 + 0.5 + 0.5) / 4)
    assert scores.reward_low is not None and scores.reward_low <= scores.reward
    assert (scores.passed_1, scores.passed_all) == (0.25, 0.5)
    assert (scores.turns, scores.calls, scores.failed) == (8 / 4, 4 / 4, 1 / 4)
    assert scores.clipped_ratio == 0


def test_the_command_prints_and_writes_them(asked):
    model, environment, data = asked
    words = [str(model), "--environment", environment, "--data", str(data), "--generations", "2"]
    words += ["--max-new-tokens", "400", "--devices", "cpu"]
    printed = CliRunner().invoke(command, words, catch_exceptions=False)
    assert "pass@1     25.0%" in printed.output and "pass@2     50.0%" in printed.output
    assert "2.00 per episode" in printed.output and "25.0% failed" in printed.output


def test_outputs_are_the_episodes(asked, tmp_path):
    model, environment, data = asked
    outputs = tmp_path / "episodes.jsonl"
    words = [str(model), "--environment", environment, "--data", str(data), "--generations", "2"]
    words += ["--max-new-tokens", "400", "--devices", "cpu", "--outputs", str(outputs), "--json"]
    printed = CliRunner().invoke(command, words, catch_exceptions=False)
    assert "outputs" not in json.loads(printed.stdout)
    episodes = [json.loads(line) for line in outputs.read_text().splitlines()]
    assert [episode["prompt"] for episode in episodes] == [
        ROWS[place // 2]["prompt"] for place in range(4)
    ]
    assert [episode["reward"] for episode in episodes] == [1.0, 0.5, 0.5, 0.5]
    assert [episode["calls"] for episode in episodes] == [1, 2, 1, 0]
    assert [episode["failed"] for episode in episodes] == [0, 0, 1, 0]
    roles = [turn["role"] for turn in episodes[0]["messages"]]
    assert roles == ["assistant", "tool", "assistant"]


REFUSED = {
    "no data": (["--environment", "a.py:B"], "--environment needs --data"),
    "a task": (
        ["--environment", "a.py:B", "--data", "p.jsonl", "--task", "t"],
        "--task does not apply",
    ),
    "shots": (
        ["--environment", "a.py:B", "--data", "p.jsonl", "--shots", "1"],
        "--shots does not apply",
    ),
    "no environment": (["--max-turns", "3"], "--max-turns needs --environment"),
    "no class": (["--environment", "a.py", "--data", "."], "no environment: a.py"),
    "elsewhere": (
        ["--environment", "http://10.0.0.1", "--data", "."],
        "the server of the environment is another machine",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_belong_together_is_refused(asked, case):
    words, problem = REFUSED[case]
    with pytest.raises(UserError, match=problem) as refused:
        CliRunner().invoke(command, [str(asked[0]), *words], catch_exceptions=False)
    assert refused.value.fix and refused.value.code == 2


def test_pass_at_k_by_hand():
    rewards = [1.0, 0.0, 2.0, 0.5]
    assert pass_at(1, rewards) == 0.5
    assert pass_at(2, rewards) == pytest.approx(1 - 1 / 6)  # one of six pairs has no pass
    assert pass_at(4, rewards) == 1.0 and pass_at(2, [0.0, 0.9]) == 0.0
