"""Task sets of verifiers: their prompts are a dataset, their rewards and metrics those of episodes."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from task_sets_for_tests import SUMS, write_task_set
from test_episodes import Policy

import bloomery
from bloomery.core.errors import UserError
from bloomery.data.prompts import Prompt
from bloomery.data.sources.readers import read_values
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.evals.rewards import read_prompts
from bloomery.infer.sampling import Sampling
from bloomery.plan.types import EpisodesPlan
from bloomery.train.rl import episodes as episodes_module
from bloomery.train.rl.episodes import EpisodeSampler
from bloomery.train.rl.live_episodes import LiveEpisode
from bloomery.train.rl.rollout_records import _of_tools
from bloomery.train.rl.tools import RecordedCalls, Tools
from models_for_tests import make_chat_model

PACKAGES = ["stand-in", *(["verifiers"] if find_spec("verifiers") else [])]


@pytest.fixture(params=PACKAGES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_task_set(tmp_path, stand_in=request.param == "stand-in")


def plan_of(file: Path) -> EpisodesPlan:
    return EpisodesPlan.of_environment(f"{file}:Sums", max_turns=1)


def test_tasks_are_rows_of_a_dataset(file: Path) -> None:
    rows = list(read_values(file, file.name, "verifiers"))
    assert [row.where for row in rows] == [f"sums.py, task {number}" for number in range(1, 5)]
    first = rows[0].content
    assert first["prompt"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "0 + 1?"},
    ]
    assert first["answer"] == 1 and first["task"]["answer"] == 1 and first["task"]["idx"] == 0


def test_rewards_and_metrics_are_those_of_the_task(file: Path) -> None:
    rows = [row.content for row in read_values(file, file.name, "verifiers")]
    with Tools(plan_of(file)) as tools:
        assert tools.schemas == [] and tools.has_reward
        tools.reset({number: (number, row) for number, row in enumerate(rows)})
        answers = ["1", "it is the number 2", "no", "so many words and none of them right"]
        conversations = {
            number: [*row["prompt"], {"role": "assistant", "content": answer}]
            for number, (row, answer) in enumerate(zip(rows, answers, strict=True))
        }
        scores = tools.scores(conversations)
        # Two for the right number, one for fewer than ten letters.
        assert [score.reward for score in scores] == [3.0, 2.0, 1.0, 0.0]
        assert [score.metrics["length"] for score in scores] == [len(text) for text in answers]
        assert [score.metrics["right"] for score in scores] == [1.0, 1.0, 0.0, 0.0]
        with pytest.raises(UserError, match="no column task"):
            tools.reset({0: (1, {"prompt": "x"})})


def test_an_episode_of_a_task_is_one_answer(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This template has no form for tools: there are none.
    tokenizer = load_tokenizer(make_chat_model(tmp_path / "chat"))
    prompts = read_prompts(file, tokenizer, None, template="chatml")
    assert len(prompts) == 4 and isinstance(prompts[0], Prompt)
    policy = Policy(tokenizer, {(0, 0): ["1"], (1, 0): ["a long and wrong answer"]})
    monkeypatch.setattr(episodes_module, "sample_completions", policy)
    monkeypatch.setattr(episodes_module, "past_of_turns", lambda *_: None)
    end = tokenizer.id_of("<|im_end|>")
    with EpisodeSampler(plan_of(file), tokenizer, longest=200, template="chatml") as sampler:
        completions = sampler.sample(
            None,
            prompts[:2],
            1,
            Sampling(max_new_tokens=60, stop_ids=(end,)),
            lambda prompt, number: prompt,
            slots=2,
            recorded=RecordedCalls(None),
        )
    episodes = [completion.episode for completion in completions]
    assert [episode.reward for episode in episodes] == [3.0, 0.0]
    assert [(episode.turns, episode.calls) for episode in episodes] == [(1, 0), (1, 0)]
    assert _of_tools(episodes)["environment/length"] == np.mean([1, 23])


def test_a_plan_does_not_run_the_file(tmp_path: Path) -> None:
    folder = make_chat_model(tmp_path / "chat")
    mark = tmp_path / "ran"
    text = f"open({str(mark)!r}, 'w').close()\n" + SUMS
    file = write_task_set(tmp_path, stand_in=True, text=text)
    report = bloomery.plan(
        {
            "model": {"from": str(folder)},
            "data": {"path": str(file), "format": "verifiers", "sequence_length": 128},
            "objective": {"kind": "grpo", "num_generations": 4, "max_completion_length": 16},
            "environment": {"python": f"{file}:Sums"},
            "train": {"max_steps": 1},
        },
    )
    assert report is not None and not mark.exists()
    next(read_values(file, file.name, "verifiers"))
    assert mark.exists()


def test_a_chat_with_a_task_set_is_refused(file: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_chat_model(tmp_path / "chat"))
    live = LiveEpisode(plan_of(file))
    with pytest.raises(UserError, match="has no tool"):
        live.use_template(tokenizer, "qwen")
    live.close()


REFUSED = {
    "image='python:3'": ("prompt=f", "image='python:3', prompt=f", "runs in a container"),
    "no prompt": ('prompt=f"{number} + 1?", ', "", "no prompt"),
    "no end": ("    def load", "    INFINITE = True\n\n    def load", "no end"),
    "a hook": (
        "class SumTask(vf.Task[SumData]):",
        "class SumTask(vf.Task[SumData]):\n    async def setup(self, trace, runtime): ...\n",
        "machine of its own",
    ),
    "a runtime": ("async def short(self, trace)", "async def short(self, runtime)", "machine of"),
    "tools": (
        "    def load",
        "    @classmethod\n    def toolsets(cls, config): return [1]\n\n    def load",
        "servers of tools",
    ),
    "none": ("vf.Taskset[SumTask, vf.TasksetConfig]", "object", "this one has: none"),
    "an error": ("import verifiers.v1 as vf", "import verifiers.v1 as vf\n1 / 0", "ZeroDivision"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_dataset_of_prompts_is_refused(tmp_path: Path, name: str) -> None:
    old, new, problem = REFUSED[name]
    text = SUMS.replace(old, new).replace('__all__ = ["Sums"]', "")
    file = write_task_set(tmp_path, stand_in=True, text=text)
    with pytest.raises(UserError, match=problem) as told:
        list(read_values(file, file.name, "verifiers"))
    assert told.value.where == str(file) and told.value.fix


def test_environments_of_older_verifiers_and_a_missing_package_are_named(tmp_path: Path) -> None:
    text = "def load_environment(): ..."
    file = write_task_set(tmp_path, stand_in=True, text=text)
    with pytest.raises(UserError, match=r"before 0\.4"):
        list(read_values(file, file.name, "verifiers"))
    if find_spec("verifiers") is None:
        (tmp_path / "without").mkdir()
        file = write_task_set(tmp_path / "without", stand_in=False)
        with pytest.raises(UserError, match="needs verifiers"):
            list(read_values(file, file.name, "verifiers"))
