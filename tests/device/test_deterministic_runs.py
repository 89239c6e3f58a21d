"""`train.deterministic=true`: PyTorch refuses what a GPU adds in no fixed order. Oracles: the CPU, a second run."""

from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from rollouts_for_tests import plan_of, write_recipe

from bloomery.infer.sampling import rising_sums
from ranks import losses, train

EVERY_SETTING = [
    "train.deterministic=true",
    "train.max_steps=2",
    "eval.every=1 steps",
    "objective.top_p=0.9",
    "sample.prompts=[def]",  # drawn by evaluations, with a top_p of its own
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("deterministic"))


@pytest.fixture(autouse=True)
def deterministic() -> Generator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "kind", ["grpo", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("rloo", "ppo"))]
)
def test_a_run_on_completions_repeats_bitwise(recipe: Path, tmp_path: Path, kind: str) -> None:
    generations = 1 if kind == "ppo" else 4
    objective = f"{{kind: {kind}, num_generations: {generations}, max_completion_length: 8}}"
    plan = plan_of(recipe, f"objective={objective}", *EVERY_SETTING)
    first = losses(train(plan, tmp_path / "first"))
    assert len(first) == 2
    assert losses(train(plan, tmp_path / "second")) == first


def test_sums_are_those_of_the_cpu_and_rise_only_where_something_is_added() -> None:
    values = torch.rand(3, 5000, dtype=torch.float64)
    values[:, 1000:4000] = 0
    sums = rising_sums(values.cuda()).cpu()
    torch.testing.assert_close(sums, values.cumsum(-1), rtol=0, atol=5000 * 2.0**-44)
    assert (sums[:, 1000:4000] == sums[:, 999:1000]).all()
