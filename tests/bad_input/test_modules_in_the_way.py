"""Files of the working folder that are named like modules: no process of Bloomery executes one."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import PATIENCE_SECONDS
from rollouts_for_tests import write_recipe

from bloomery import cli
from bloomery.core.child import python_module
from bloomery.studio.commands import Commands
from bloomery.studio.listening import ListeningProcess
from bloomery.train.rl.rewards import Rewards, WorkerReward

SOURCE = Path(__file__).parents[2] / "src/bloomery"
PACKAGES = """bloomery
    click huggingface_hub jinja2 llguidance numpy peft pyarrow pydantic pynvml rich ruamel safetensors
    sitecustomize starlette sympy tokenizers torch transformers triton usercustomize uvicorn yaml"""
NAMES = sorted(sys.stdlib_module_names | set(PACKAGES.split()))
# Python imports others itself, before the first line of any program that it is to run with `-m`.
NOT_PYTHONS = "click copy json numpy pydantic queue random rich tokenize torch yaml"


def write_decoys(folder: Path, names: list[str] = NAMES) -> None:
    """A module of each name, which leaves a file with its name, and fails."""
    folder.mkdir(exist_ok=True)
    for name in names:
        text = f"open({str(folder / name)!r} + '.EXECUTED', 'w')\nraise SystemExit('{name}.py ran')"
        (folder / f"{name}.py").write_text(text)


def executed(folder: Path) -> list[str]:
    return [path.stem for path in folder.glob("*.EXECUTED")]


def bloomery(
    folder: Path, *words: str, options: tuple[str, ...] = ("-P",)
) -> "subprocess.CompletedProcess[str]":
    """As the command `bloomery`, whose interpreter does not look into the working folder, from nothing."""
    return subprocess.run(
        [sys.executable, *options, "-m", "bloomery", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


# `core/extras.py` writes a command that is shown, and that the user types.
MAY_NAME_MODULES = ("core/child.py", "core/extras.py")


def test_one_function_writes_the_command_of_each_process_that_runs_a_module() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "-m" not in text:
            continue
        tree = ast.parse(text)
        lists = [node for node in ast.walk(tree) if isinstance(node, ast.List)]
        commands = [words for words in lists if len(words.elts) > 1]
        lines = [
            command.lineno
            for command in commands
            if any(isinstance(word, ast.Constant) and word.value == "-m" for word in command.elts)
        ]
        assert not lines or str(path.relative_to(SOURCE)) in MAY_NAME_MODULES, f"{path}: {lines}"
    assert python_module("a.module", "x", options=["-u"])[1:] == ["-P", "-u", "-m", "a.module", "x"]
    for path in SOURCE.rglob("*.jinja"):
        text = path.read_text(encoding="utf-8")
        assert text.count("-m bloomery") == text.count("-P -m bloomery"), path


def test_training_with_rewards_executes_no_file_of_the_working_folder(tmp_path: Path) -> None:
    """The trainer, its readers and the process of the reward, which imports what stands beside its file."""
    folder = tmp_path / "work"
    write_decoys(folder)
    write_recipe(folder)
    (folder / "own_helper.py").write_text("WEIGHT = 2.0\n")
    text = "import json, math, random, re\nimport numpy\nimport own_helper\n"
    text += (
        "def spaces(completions, **_):\n    return numpy.ones(len(completions)) * own_helper.WEIGHT"
    )
    (folder / "my_rewards.py").write_text(text)
    edits = ("train.max_steps=1", "eval.every=none", "train.compile=false", "-d", "cpu")
    words = ("train", "rl.yaml", "--run-dir", "runs/one", *edits)
    done = bloomery(folder, *words)
    assert done.returncode == 0, done.stderr
    assert executed(folder) == []


def test_python_dash_m_imports_nothing_from_the_working_folder(tmp_path: Path) -> None:
    write_decoys(tmp_path, NOT_PYTHONS.split())
    done = bloomery(tmp_path, "recipes", options=())
    assert done.returncode == 0, done.stderr
    assert executed(tmp_path) == []


def test_an_empty_entry_of_pythonpath_reaches_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f":{tmp_path}::/other:")
    monkeypatch.setattr(cli, "_run", lambda arguments, debug: 0)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit):
        cli.main([])
    assert os.environ["PYTHONPATH"] == f"{tmp_path}:/other"


def test_studios_buttons_execute_no_file_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_decoys(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    command = Commands().start("recipes", subject="recipes")
    assert command.process.wait(PATIENCE_SECONDS) == 0, command.text()
    listening = ListeningProcess(
        "serve", "nothing", address="(never)", environment=os.environ, folder=tmp_path
    )
    listening._process.wait(PATIENCE_SECONDS)
    assert "no run 'nothing'" in listening.text()
    assert executed(tmp_path) == []


@pytest.mark.parametrize("name", ["math", "random", "numpy", "datasets", "typing"])
def test_a_reward_may_be_in_a_file_that_is_named_like_a_module(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text(
        "import math, random, typing\nimport numpy\nimport helper\n\n"
        "def score(completions, **_):\n"
        "    return [math.floor(1.5) + helper.ONE + numpy.float32(0)] * len(completions)\n"
    )
    (tmp_path / "helper.py").write_text("ONE = 1\n")
    source = WorkerReward(
        name="score", job={"file": str(tmp_path / f"{name}.py"), "function": "score"}
    )
    with Rewards([source]) as rewards:
        assert rewards.score(["?"], ["a"], [[1]], {}).totals == (2.0,)
