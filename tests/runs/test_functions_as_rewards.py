"""Python functions as rewards: `bloomery.train(recipe, rewards=[...])`. Oracle: the completions that the run wrote."""

import json
import os
import time
from pathlib import Path

import pytest

import bloomery
from bloomery.core.errors import UserError
from bloomery.train.rl import reward_functions
from bloomery.train.rl.reward_functions import served
from bloomery.train.rl.rewards import Rewards, WorkerReward

RECIPE = """
extends: demo
name: rl
model: {hidden_size: 64, intermediate_size: 128, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 32}
tokenizer: {train: {kind: bpe, vocab_size: 300}}
data: {path: prompts.jsonl, sequence_length: 48, validation: 0.3}
objective: {kind: grpo, num_generations: 4, max_completion_length: 8}
sample: {prompts: []}
train: {max_steps: 2, batch_size: 16, micro_batch_size: 2, precision: float32, compile: false}
optimizer: {kind: adamw, learning_rate: 1e-3, schedule: constant}
eval: {every: 2 steps}
"""


def source(name, **settings):
    return WorkerReward(name=name, job={"connect": name}, **settings)


def ask(rewards, completions=("aa", "bbb")):
    return rewards.score(["p"] * len(completions), list(completions), [[1]] * len(completions), {})


def test_a_run_takes_functions_of_this_process_and_again_when_it_is_resumed(tmp_path, monkeypatch):
    rows = [{"prompt": f"def f{number}(x): return", "answer": number} for number in range(60)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rl.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    wanted = "e"  # of this frame: no other process could import the function

    def share(completions, answer, **_):
        assert len(answer) == len(completions)
        return [text.count(wanted) / 8 + os.getpid() for text in completions]

    run = bloomery.train(
        "rl.yaml",
        run_dir="runs/one",
        quiet=True,
        rewards=[
            {"function": share, "weight": 2.0, "name": "share"},
            {"verifier": "length", "max_characters": 4},
        ],
    )
    assert run.code == 0
    (first, _) = sorted((run.folder / "completions").iterdir())
    rows = [json.loads(line) for line in first.read_text().splitlines()]
    for row in rows:
        process, share_of_text = divmod(row["rewards"]["share"], 1)
        assert share_of_text == pytest.approx(row["completion"].count("e") / 8)
        assert row["reward"] == pytest.approx(
            2 * row["rewards"]["share"] + row["rewards"]["length"]
        )
    assert process != os.getpid()
    assert reward_functions.FOLDER not in os.environ

    for again in (
        lambda: run.resume("train.max_steps=4", quiet=True),
        lambda: bloomery.evaluate(run.folder),
    ):
        with pytest.raises(UserError, match="share is a Python function") as refused:
            again()
        assert "run.resume(rewards=[share])" in refused.value.fix
    assert run.resume("train.max_steps=4", quiet=True, rewards=[share]).code == 0
    assert len(list((run.folder / "completions").iterdir())) == 4
    scores = bloomery.evaluate(run.folder, rewards=[share])
    assert scores.rewards.keys() == {"share", "length"}


def test_a_plan_takes_functions_by_their_names(tmp_path, monkeypatch):
    (tmp_path / "rl.yaml").write_text(RECIPE)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 50)
    monkeypatch.chdir(tmp_path)
    report = bloomery.plan("rl.yaml", rewards=[raises, {"function": hangs, "weight": 0.5}])
    assert [(reward.function, reward.weight) for reward in report.plan.rewards] == [
        ("raises", 1.0),
        ("hangs", 0.5),
    ]


def test_a_recipe_that_names_a_function_needs_it(tmp_path, monkeypatch):
    (tmp_path / "rl.yaml").write_text(RECIPE + "rewards: [{function: score}]\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 50)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="the reward score is a Python function"):
        bloomery.train("rl.yaml", quiet=True)


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [([lambda **_: []], "has no name"), ([test_a_recipe_that_names_a_function_needs_it] * 2, "")],
)
def test_names_of_functions(rewards, problem):
    from bloomery.api import _reward_entries

    if not problem:
        assert len(_reward_entries(rewards)[1]) == 1
        return
    with pytest.raises(UserError, match=problem):
        _reward_entries(rewards)


def hangs(**_):
    time.sleep(60)


def raises(**_):
    return [1 / 0]


def dies(**_):
    os._exit(3)


def floods(**_):
    return [len(b"x" * 2**40)]


def wants_a_column(completions, level, **_):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "words", "in_thread"),
    [
        (hangs, "did not answer within 0.5 s", False),
        (raises, "ZeroDivisionError", False),
        (raises, "ZeroDivisionError", True),
        (dies, "ended its process", False),
        (floods, "MemoryError", False),
    ],
)
def test_a_mistake_is_one_sentence(monkeypatch, function, words, in_thread):
    if in_thread:
        monkeypatch.setattr(reward_functions, "why_no_copy", lambda: "of a test")
    notes = []
    with (
        served({"f": function}, notes.append),
        Rewards([source("f", timeout=0.5)]) as rewards,
        pytest.raises(UserError, match=words),
    ):
        ask(rewards)
    assert notes == (
        ["rewards run in this process, without a limit of memory: of a test"] if in_thread else []
    )


def test_a_column_that_the_dataset_lacks_is_told_before_the_first_call():
    with (
        served({"f": wants_a_column}, pytest.fail),
        Rewards([source("f")], columns=["answer"]) as rewards,
        pytest.raises(UserError, match="no column level"),
    ):
        rewards.start()


def test_a_run_that_is_restarted_connects_again(monkeypatch):
    counts = []

    def count(completions, **_):
        counts.append(len(completions))
        return [float(sum(counts))] * len(completions)

    for reason, expected in ((None, []), ("of a test", [2, 2])):
        monkeypatch.setattr(reward_functions, "why_no_copy", lambda reason=reason: reason)
        with served({"count": count}, lambda _: None):
            for total in (2.0, 4.0):  # one copy answers both
                with Rewards([source("count")]) as rewards:
                    assert ask(rewards).totals == (total, total)
        assert counts == expected


def test_nothing_is_left():
    with served({"f": raises}, pytest.fail):
        folder = Path(os.environ[reward_functions.FOLDER])
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()
    assert reward_functions.FOLDER not in os.environ


@pytest.mark.parametrize("length", [60, 74, 120, 200])
def test_a_long_folder_for_temporary_files_is_no_obstacle(tmp_path, monkeypatch, length):
    """Batch systems set such ones; a socket's path ends at 108 bytes."""
    folder = tmp_path / ("t" * max(1, length - len(str(tmp_path))))
    folder.mkdir()
    monkeypatch.setattr(reward_functions.tempfile, "tempdir", str(folder))

    def lengths(completions, **_):
        return [float(len(text)) for text in completions]

    with served({"lengths": lengths}, pytest.fail), Rewards([source("lengths")]) as rewards:
        assert ask(rewards).totals == (2.0, 3.0)
