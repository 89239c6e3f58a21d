"""The package of docs/how-to/write-a-plug-in.md, installed by pip: all that it brings works and is listed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models_for_tests import make_chat_model

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "write-a-plug-in.md"
FILE_AND_TEXT = re.compile(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", re.DOTALL)


def installed(project: Path, site: Path) -> dict[str, str]:
    """The environment in which the package of `project` is installed, below `site`."""
    words = "-m pip install --quiet --no-index --no-deps --no-build-isolation --target".split()
    subprocess.run([sys.executable, *words, str(site), str(project)], check=True)
    return {**os.environ, "PYTHONPATH": str(site)}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plug-in")
    project = folder / "project"
    project.mkdir()
    files = FILE_AND_TEXT.findall(PAGE.read_text(encoding="utf-8"))
    assert len(files) == 3
    for name, text in files:
        (project / name).write_text(text, encoding="utf-8")
    return installed(project, folder / "site")


def bloomery(arguments, environment, folder, code=0):
    words = [sys.executable, "-m", "bloomery", *arguments]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def threads(tmp_path_factory):
    """A folder with rows of the forum's format, and a small model."""
    folder = tmp_path_factory.mktemp("threads")
    rows = [{"question": f"How much is {n} + 1?", "answers": [str(n + 1)]} for n in range(64)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "threads.jsonl").write_text(text)
    make_chat_model(folder / "model")
    return folder


def test_doctor_lists_all_that_the_package_brings(environment, tmp_path):
    lines = bloomery(["doctor", "--json"], environment, tmp_path).splitlines()
    plugins = json.loads("\n".join(lines))["plugins"]
    assert {(plugin["kind"], plugin["name"]) for plugin in plugins} == {
        ("commands", "threads"),
        ("formats", "forum"),
        ("rewards", "brevity"),
        ("optimizers", "forum_lion"),
    }
    assert {plugin["problem"] for plugin in plugins} == {None}


@pytest.mark.soak
def test_its_command_runs_and_is_in_the_help(environment, threads):
    assert bloomery(["threads", "threads.jsonl"], environment, threads) == "64 threads\n"
    assert "Of the package bloomery-forum" in bloomery(["--help"], environment, threads)


RECIPE = """
model: {from: model}
data: {path: threads.jsonl, format: forum, validation: 0, sequence_length: 64}
objective: sft
optimizer: {kind: forum_lion, learning_rate: 1e-3}
train: {max_steps: 6, micro_batch_size: 2, batch_size: 4, precision: float32}
logging: {trackers: []}
"""
WITH_REWARD = """
model: {from: model}
data: {path: prompts.jsonl, validation: 0}
objective: {kind: grpo, num_generations: 2, max_completion_length: 8}
rewards: [{plugin: brevity}]
train: {max_steps: 2, batch_size: 4, precision: float32}
logging: {trackers: []}
"""


def events_of(run: Path) -> list[dict]:
    return list(map(json.loads, (run / "events.jsonl").read_text().splitlines()))


def test_its_format_and_optimizer_train(environment, threads):
    (threads / "forum.yaml").write_text(RECIPE)
    bloomery(["train", "forum.yaml", "name=forum", "-d", "cpu"], environment, threads)
    (run,) = (threads / "runs").glob("forum*")
    losses = [event["loss"] for event in events_of(run) if event["event"] == "StepDone"]
    assert len(losses) == 6 and losses[-1] < losses[0]


@pytest.mark.soak
def test_its_reward_scores_completions(environment, threads):
    rows = [{"prompt": f"Say {n}."} for n in range(8)]
    (threads / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (threads / "brief.yaml").write_text(WITH_REWARD)
    bloomery(["train", "brief.yaml", "name=brief", "-d", "cpu"], environment, threads)
    (run,) = (threads / "runs").glob("brief*")
    steps = [event for event in events_of(run) if event["event"] == "StepDone"]
    assert len(steps) == 2 and all(step["metrics"]["reward"] > 0 for step in steps)
    assert all("rewards/brevity/mean" in step["metrics"] for step in steps)


def test_a_package_that_is_broken_is_named_where_it_is_used(tmp_path, threads):
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "broken"\nversion = "2.0"\n'
        '[project.entry-points."bloomery.optimizers"]\nsgd = "broken:SGD"\nadamw = "broken:SGD"\n'
        '[project.entry-points."bloomery.objectives"]\nother = "broken:OBJECTIVE"\n'
        '[project.entry-points."bloomery.commands"]\nbreak = "broken:nothing"\n'
        '[tool.setuptools]\npy-modules = ["broken"]\n'
    )
    (project / "broken.py").write_text(
        "from bloomery.facts.objectives import OBJECTIVES\n"
        "from bloomery.recipe.objectives import Sft\n"
        "from bloomery.recipe.plugins import ObjectivePlugin\n"
        "SGD = 'no spec'\nOBJECTIVE = ObjectivePlugin(OBJECTIVES['sft'], Sft)\n"
    )
    environment = installed(project, tmp_path / "site")
    document = json.loads(bloomery(["doctor", "--json"], environment, tmp_path))
    problems = {(row["kind"], row["name"]): row["problem"] for row in document["plugins"]}
    assert "taken" in problems["optimizers", "adamw"]
    assert "no OptimizerSpec but a str" in problems["optimizers", "sgd"]
    assert "cannot be imported" in problems["commands", "break"]
    assert "its spec is of kind 'sft', its section of sft" in problems["objectives", "other"]
    # A recipe with Bloomery's own optimizer of that name is planned; one with the broken package says which it is.
    words = ["plan", "demo", "--json"]
    bloomery([*words, "optimizer.kind=adamw"], environment, tmp_path)
    text = bloomery([*words, "optimizer.kind=sgd"], environment, tmp_path, code=1)
    assert "broken 2.0" in text


OBJECTIVE_AND_FAMILY = """
from dataclasses import replace
from typing import Literal

from pydantic import Field

from bloomery.facts.families import FAMILIES
from bloomery.facts.objectives import OBJECTIVES
from bloomery.recipe.objectives import ObjectiveSection
from bloomery.recipe.plugins import ObjectivePlugin


class Halved(ObjectiveSection):
    kind: Literal["halved"] = Field(description="Half of the cross-entropy of the responses.")
    share: float = Field(0.5, description="Share of the loss.")


HALVED = ObjectivePlugin(
    replace(OBJECTIVES["sft"], kind="halved", builder="more_code:build"), Halved
)
COUSIN = replace(FAMILIES["llama"], architecture="CousinForCausalLM")
"""
CODE_OF_THE_OBJECTIVE = """
from dataclasses import replace

from bloomery.train.objectives.build import likelihood


def build(inputs):
    whole = likelihood(inputs.scoring)

    def halved(scores, batch):
        parts = whole.loss(scores, batch)
        return parts._replace(total=parts.total * inputs.objective.share)

    return replace(whole, loss=halved)
"""


@pytest.mark.soak
def test_an_objective_and_a_family_of_a_package_train(tmp_path, threads):
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "more"\nversion = "1.0"\n'
        '[project.entry-points."bloomery.objectives"]\nhalved = "more:HALVED"\n'
        '[project.entry-points."bloomery.families"]\ncousin = "more:COUSIN"\n'
        '[tool.setuptools]\npy-modules = ["more", "more_code"]\n'
    )
    (project / "more.py").write_text(OBJECTIVE_AND_FAMILY)
    (project / "more_code.py").write_text(CODE_OF_THE_OBJECTIVE)
    environment = installed(project, tmp_path / "site")

    # The same weights under the name of the new family.
    shutil.copytree(threads / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"model_type": "cousin", "architectures": ["CousinForCausalLM"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    rows = [{"prompt": f"{n} + 1 =", "completion": str(n + 1)} for n in range(64)]
    (tmp_path / "threads.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses = {}
    for name in ("halved", "sft"):
        text = (
            RECIPE.replace(", format: forum", "")
            .replace("sft", name)
            .replace("forum_lion", "adamw")
        )
        (tmp_path / f"{name}.yaml").write_text(text.replace("max_steps: 6", "max_steps: 1"))
        bloomery(["train", f"{name}.yaml", f"name={name}", "-d", "cpu"], environment, tmp_path)
        (run,) = (tmp_path / "runs").glob(f"{name}*")
        (step,) = [event for event in events_of(run) if event["event"] == "StepDone"]
        losses[name] = step["loss"]
    assert losses["halved"] == pytest.approx(losses["sft"] / 2, rel=1e-6)
