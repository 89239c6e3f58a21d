"""A run with rewards that SIGKILL ended in a rollout, a reward, an update or a save, and that was resumed.

Oracle: the undisturbed run. Events, completions and weights are equal to the last bit.
"""

import json
import random
from pathlib import Path

import pytest
from killed_runs import Kill, assert_same_run, killed, run_until_killed, was_killed
from runs_of_bloomery import Bloomery

STEPS = 18
RECIPE = f"""
extends: demo
name: rl
model: {{hidden_size: 64, intermediate_size: 128, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 32}}
tokenizer: {{train: {{kind: bpe, vocab_size: 300}}}}
data: {{path: prompts.jsonl, sequence_length: 48, validation: 0.1}}
objective: {{KIND, max_completion_length: 8, num_iterations: 2}}
rewards:
- {{python: "my_rewards.py:share_of_e"}}
- {{verifier: length, max_characters: 12, weight: 0.5}}
sample: {{prompts: []}}
train: {{max_steps: {STEPS}, batch_size: 16, micro_batch_size: 2, precision: float32, compile: false}}
optimizer: {{kind: adamw, learning_rate: 1e-3, warmup: 1 steps}}
eval: {{every: 4 steps}}
checkpoint: {{every: 3 steps, keep: 2, async_save: true}}
"""
KINDS = {"grpo": "kind: grpo, num_generations: 4", "ppo": "kind: ppo, kl_coef: 0"}
REWARDS = """
def share_of_e(completions, **_):
    return [text.count("e") / max(1, len(text)) for text in completions]
"""
# How many places of a kind a process gets to in about four steps.
PLACES = {"rollout": 24, "reward": 8, "update": 36, "save": 24}


def write_workshop(folder: Path, kind: str) -> Bloomery:
    rows = [{"prompt": f"def f{number}(x): return", "answer": number} for number in range(80)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "tiny.yaml").write_text(RECIPE.replace("KIND", KINDS[kind]))
    (folder / "runs").mkdir()
    return Bloomery(folder)


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    """Of the objective."""
    return request.param


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Bloomery:
    bloomery = write_workshop(tmp_path_factory.mktemp("undisturbed"), kind)
    done = bloomery.run(*bloomery.go_on)
    assert done.returncode == 0, done.stderr
    return bloomery


def finish(bloomery: Bloomery, undisturbed: Bloomery) -> None:
    done = bloomery.run(*bloomery.go_on)
    assert done.returncode == 0, done.stderr
    assert_same_run(bloomery, undisturbed)


@pytest.mark.parametrize(
    "kind", ["grpo", pytest.param("ppo", marks=pytest.mark.soak)], indirect=True
)
def test_three_kills_of_a_run_with_rewards_leave_no_trace(
    tmp_path, kind: str, undisturbed: Bloomery
) -> None:
    bloomery = write_workshop(tmp_path, kind)
    for moment, call, victim in (
        ("rollout", 20, "worker"),
        ("update", 30, "launcher"),
        ("save", 9, "worker"),
    ):
        done = run_until_killed(bloomery, Kill(moment, call, victim))
        assert was_killed(done, victim), moment
    finish(bloomery, undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("chain", range(5))
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_forty_kills_of_runs_with_rewards_leave_no_trace(
    chain: int, tmp_path, kind: str, undisturbed: Bloomery
) -> None:
    """In chains of eight, two of each moment; each chain ends equal to the undisturbed run."""
    draw = random.Random(f"rollouts {chain}")
    bloomery = write_workshop(tmp_path, kind)
    for moment in draw.sample([*PLACES, *PLACES], 2 * len(PLACES)):
        victim = draw.choice(("worker", "worker", "launcher"))
        kill = Kill(moment, draw.randint(1, PLACES[moment]), victim)
        killed(bloomery, undisturbed, kill, PLACES[moment], draw)
    finish(bloomery, undisturbed)
