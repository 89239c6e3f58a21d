"""Mistakes in rewards, prompts and their settings: one sentence with the function and the prompt, or a counted skip."""

import json
import re
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rollouts_for_tests import RECIPE, completions, plan_of, write_recipe

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.data.prepare.prepare import prepare
from bloomery.hardware.detect import detect
from bloomery.plan.gather import gather
from bloomery.plan.resolve import resolve
from bloomery.plan.reward_code import refuse_missing_function
from bloomery.plan.types import RunPlan
from bloomery.plan.unsupported import refuse_recipe
from bloomery.recipe.load import load_recipe
from bloomery.recipe.rewards import PythonReward
from bloomery.train.failures import Diverged
from ranks import fields, ranks, train

FUNCTIONS = """
import math
import os
import sys
import time

def hangs(**_):
    time.sleep(60)

def slow(completions, **_):
    time.sleep(30)
    return [0.0] * len(completions)

def raises(**_):
    return {}["missing"]

def texts(completions, **_):
    return ["good"] * len(completions)

def not_a_number(completions, **_):
    return [math.nan] * len(completions)

def some_are_none_numbers(completions, **_):
    return ["bad", math.inf, *[float(len(text)) for text in completions[2:]]]

def too_few(**_):
    return [1.0]

def abstains(completions, **_):
    return [None] * len(completions)

def leaves(**_):
    sys.exit(7)

def floods_memory(**_):
    return ["x" * 2**40]

def forks(completions, **_):
    os.fork()
    return [float(len(text)) for text in completions]

def shouts(completions, **_):
    for _ in range(100):
        print("x" * 2**20)
        print("y" * 2**20, file=sys.stderr)
    return [float(len(text)) for text in completions]

def wants_level(completions, level, **_):
    return [0.0] * len(completions)
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = write_recipe(tmp_path_factory.mktemp("rl"))
    (folder / "bad.py").write_text(FUNCTIONS)
    return folder


def plan_with(recipe: Path, function: str, *edits: str, timeout: str = "60s") -> RunPlan:
    """Of a run of two steps whose only reward is this function."""
    rewards = [{"python": f"{recipe}/bad.py:{function}", "timeout": timeout}]
    edits = ("train.max_steps=2", "eval.every=none", *edits)
    return plan_of(recipe, f"rewards={json.dumps(rewards)}", *edits)


@pytest.mark.parametrize(
    ("function", "words", "names_prompt"),
    [
        ("hangs", "did not answer within 1 s for 16 completions", True),
        ("raises", "KeyError: 'missing' (line ", True),
        ("texts", "returned str, not a number, for completion 0", True),
        ("not_a_number", "returned nan for completion 0", True),
        ("too_few", "returned 1 numbers for 16 completions", True),
        ("abstains", "returned None: none of 16 completions has a reward", True),
        ("leaves", "ended its process (exit code 7)", True),
        ("floods_memory", "MemoryError", True),
        ("wants_level", "the dataset has no column level", False),
        ("missing", "has no function missing in", False),
    ],
)
def test_a_run_ends_with_one_sentence(recipe, tmp_path, function, words, names_prompt):
    timeout = "1s" if function == "hangs" else "60s"
    with pytest.raises(UserError) as refused:
        train(plan_with(recipe, function, timeout=timeout), tmp_path)
    problem = refused.value.problem
    assert f"reward {function}" in problem or names_prompt is False
    assert words in problem and "\n" not in problem
    assert ("'def f" in problem) == names_prompt
    assert refused.value.fix and refused.value.where.endswith("bad.py")


@pytest.mark.parametrize("function", ["forks", "shouts"])
def test_copies_and_floods_of_output_harm_no_run(recipe, tmp_path, function):
    events = train(plan_with(recipe, function), tmp_path)
    assert len(fields(events, "StepDone")) == 2


def test_values_that_are_no_numbers_are_skipped_and_counted(recipe, tmp_path):
    function = "some_are_none_numbers"
    with pytest.raises(UserError, match=r"data\.on_error=skip"):
        train(plan_with(recipe, function), tmp_path)
    skipping = tmp_path / "recipe"
    skipping.mkdir()
    write_recipe(skipping, "data.on_error=skip")
    (skipping / "bad.py").write_text(FUNCTIONS)
    events = train(plan_with(skipping, function, "data.on_error=skip"), tmp_path / "skips")
    first = fields(events, "Warned")[0]["reason"]
    assert "returned str, not a number, for completion 0, of the prompt 'def f" in first
    assert "(and 1 more completions)" in first
    rows = completions(tmp_path / "skips")["step-00000001.jsonl"]
    assert [row["reward"] is None for row in rows] == [True, True, *[False] * 14]
    assert rows[0]["advantage"] == rows[1]["advantage"] == 0.0


def test_a_file_that_is_missing_is_named(recipe, tmp_path):
    plan = plan_of(recipe, f'rewards=[{{python: "{recipe}/nowhere.py:score"}}]')
    with pytest.raises(UserError, match=r"the reward score has no file .*nowhere\.py"):
        train(plan, tmp_path)


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        (["objective.num_generations=1"], "objective.num_generations"),
        (["train.batch_size=18"], "no multiple of the 4"),
        (["rewards=[]"], "grpo needs rewards"),
        (["objective.kind=sft"], "sft generates none"),
        (["objective.max_completion_length=48"], "max_completion_length"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_prepared(tmp_path, edits, words):
    text = RECIPE
    if edits == ["objective.kind=sft"]:
        text = re.sub(r"objective: .*", "objective: {kind: sft}", text)
    (tmp_path / "rl.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        refuse_recipe(load_recipe(str(tmp_path / "rl.yaml"), edits).recipe)
    assert words in f"{refused.value.problem} {refused.value.where}"
    assert refused.value.fix


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": "def f(x): return " * 40}, "token"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"question": "def f(x):"}, "prompt"),
    ],
)
def test_prompts_that_cannot_be_used_stop_or_are_skipped(tmp_path, row, words):
    good = [{"prompt": f"def f{number}(x): return", "answer": number} for number in range(60)]
    rows = [*good[:30], row, *good[30:]]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "my_rewards.py").write_text("def spaces(**_): ...\n")
    (tmp_path / "rl.yaml").write_text(RECIPE)
    with pytest.raises(UserError) as refused:
        loaded = load_recipe(str(tmp_path / "rl.yaml"), ["data.on_error=stop"])
        prepare(loaded, tmp_path / "stops")
    assert words in refused.value.problem.lower()
    assert "31" in f"{refused.value.problem} {refused.value.where}"
    loaded = load_recipe(str(tmp_path / "rl.yaml"), ["data.on_error=skip"])
    prepare(loaded, tmp_path / "skips")
    resolve(loaded, gather(loaded, detect(), prepared=tmp_path / "skips"))
    assert '"skipped": 1' in (tmp_path / "skips" / "manifest.json").read_text()


def test_logits_that_are_not_finite_end_the_run_as_divergence(recipe, tmp_path, monkeypatch):
    from bloomery.model.compiled_step import CompiledStep

    answer = CompiledStep.__call__

    def damaged(self, *arguments, **named):
        logits = answer(self, *arguments, **named)
        logits[-1, 3] = float("nan")
        return logits

    monkeypatch.setattr(CompiledStep, "__call__", damaged)
    with pytest.raises(Diverged, match="non-finite logits after step 0") as refused:
        train(plan_of(recipe, "eval.every=none"), tmp_path)
    assert "optimizer.learning_rate" in refused.value.fix


# Ctrl+C while a reward runs


def train_and_stop(plan_json: str, folder: str, seconds: float) -> tuple[str, float]:
    """One rank of a run whose second rank is asked to stop after so many seconds; the outcome and when it came."""
    from bloomery.parallel.process_group import join
    from bloomery.train.loop import run

    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    torch.set_num_threads(1)
    start = time.monotonic()

    def stop() -> bool:
        return mesh.any_rank(mesh.rank == 1 and time.monotonic() - start > seconds)

    outcome = run(plan, run_dir=Path(folder), emit=lambda _event: None, stop=stop, mesh=mesh)
    return outcome, time.monotonic() - start


def test_a_stop_reaches_all_ranks_while_one_waits_for_a_reward(recipe, tmp_path):
    from ranks import on_ranks

    plan = on_ranks(plan_with(recipe, "slow"), replicate=2)
    answers = ranks(2).call(train_and_stop, plan.model_dump_json(), str(tmp_path), 4.0)
    assert [outcome for outcome, _ in answers] == ["stopped", "stopped"]
    assert all(seconds < 25 for _, seconds in answers)  # the reward alone would take 30
    assert not (tmp_path / "completions").exists()


FILES = {  # of the function score: whether it may be there
    "def score(completions): ...": True,
    "async def score(completions): ...": True,
    "score = lambda completions: []": True,
    "from elsewhere import score": True,
    "from elsewhere import count as score": True,
    "import score": True,
    "from elsewhere import *": True,
    "globals()['score'] = print": True,
    "try:\n    from fast import score\nexcept ImportError:\n    def score(c): ...": True,
    "if True:\n    def score(c): ...": True,
    "class score: ...": True,
    "for score in (print,): ...": True,
    "scores, score = print, print": True,
    "def scores(completions): ...": False,
    "def outer():\n    def score(c): ...": False,
    "class Rewards:\n    def score(self): ...": False,
    "": False,
}


@pytest.mark.parametrize("code", FILES)
def test_a_plan_looks_for_the_function_and_runs_nothing(tmp_path, code):
    file = tmp_path / "mine.py"
    file.write_text(f"{code}\nraise SystemExit('the file was run')\n")
    reward = PythonReward(python=f"{file}:score")
    if FILES[code]:
        refuse_missing_function(reward)
        return
    with pytest.raises(UserError, match="has no function score in") as refused:
        refuse_missing_function(reward)
    assert refused.value.code == 2 and refused.value.fix.startswith("its functions are: ")


def test_a_file_that_is_no_python_is_named_with_its_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def score(completions):\n    return [\n")
    with pytest.raises(UserError, match=r"SyntaxError: .* \(line 2\)"):
        refuse_missing_function(PythonReward(python=f"{file}:score"))


@pytest.mark.parametrize("command", ["plan", "prepare", "train"])
def test_every_command_names_the_missing_function_before_it_prepares(recipe, monkeypatch, command):
    monkeypatch.chdir(recipe)
    words = [command, "rl.yaml", "rewards=[{python: bad.py:nosuch}]"]
    result = CliRunner().invoke(cli, words)
    assert isinstance(result.exception, UserError)
    assert "the reward nosuch has no function nosuch" in result.exception.problem
