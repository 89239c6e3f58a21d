"""Sequences of a step that do not divide among the ranks: those without one take padding of zero weight.

Oracle: one rank. Three ranks are in `make test`; five, six and seven in `make soak`.
"""

from typing import Any

import pytest
from test_ranks_features import CASES, CONFIG, FEATURES, folders, plan_of  # noqa: F401  # folders: a fixture

from bloomery.recipe.objectives import Kto, Preference, Sft
from bloomery.recipe.schema import Lora
from ranks import fields, losses, on_ranks, train

SIXTEEN = {"micro_batch_size": 4, "accumulation": 4, "tokens_per_step": 512}
LORA = Lora(kind="lora", rank=4, alpha=8.0, target_modules=["q_proj", "down_proj"])
DPO, KTO = Preference(kind="dpo", beta=0.5), Kto(kind="kto", beta=0.5)
# By name: kind of data, changes of the plan.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "pretrain": ("text", {}),
    "sft": ("chat", {"objective": Sft(kind="sft")}),
    "dpo": ("pairs", {"objective": DPO}),
    "dpo, lora": ("pairs", {"objective": DPO, "adapter": LORA}),
    "kto": ("kto", {"objective": KTO, "optimizer": {"learning_rate": 0.003}}),
}
MESHES = {"copies": "replicate", "shards": "shard"}
STEPS = 3


@pytest.mark.parametrize("axis", MESHES.values(), ids=MESHES)
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world",
    [3, *(pytest.param(world, marks=pytest.mark.soak) for world in (5, 6, 7))],
    ids="{} ranks".format,
)
@pytest.mark.parametrize(("data", "changes"), RUNS.values(), ids=RUNS)
def test_sixteen_sequences_train_on_any_number_of_ranks(
    folders, tmp_path, data, changes, world, axis
) -> None:
    plan = plan_of(folders, data, changes | {"train": SIXTEEN}, STEPS, shares=False)
    several = on_ranks(plan, **{axis: world})
    assert several.train.sequences_per_step == plan.train.sequences_per_step == 16
    assert several.train.empty_sequences == -16 % world
    alone, many = train(plan, tmp_path / "one"), train(several, tmp_path / "many")
    assert losses(many).keys() == set(range(1, STEPS + 1))
    assert losses(many) == pytest.approx(losses(alone), rel=0, abs=1e-5)
    for name in ("loss_tokens", "tokens"):
        figures = [[event[name] for event in fields(run, "StepDone")] for run in (alone, many)]
        assert figures[0] == figures[1], name
    norms = [[event["grad_norm"] for event in fields(run, "StepDone")] for run in (alone, many)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    scored = [[event["loss"] for event in fields(run, "EvalDone")] for run in (alone, many)]
    assert scored[0] and scored[1] == pytest.approx(scored[0], abs=1e-5)


QUICK = (
    "objective pretrain",
    "objective kto",
    "objective reward",
    "objective distill",
    "layers of transformers",
)
CELLS = [
    pytest.param(
        axis,
        *case,
        id=f"{feature.name}-{axis}-{number}",
        marks=[] if feature.name in QUICK and number == 0 else [pytest.mark.soak],
    )
    for feature in FEATURES
    for axis in MESHES.values()
    if not feature.reason(axis)
    for number, case in enumerate(CASES.get(feature.name, []))
    # Three devices would divide a block of their states: refused, see tests/plan/test_mesh.py.
    if (axis, case[1].get("optimizer")) != ("shard", {"state_dtype": "int8"})
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("axis", "data", "changes", "near"), CELLS)
def test_a_rank_that_never_has_a_sequence_changes_nothing(
    folders, tmp_path, axis, data, changes, near
) -> None:
    """Two sequences per step on three ranks: no collective waits for the third, and no gradient differs."""
    changes = changes | {"train": changes.get("train", {}) | {"micro_batch_size": 1}}
    plan = plan_of(folders, data, changes, STEPS, shares=False)
    two = {
        "micro_batch_size": 1,
        "accumulation": 2,
        "tokens_per_step": 2 * plan.data.sequence_length,
    }
    plan = plan.model_copy(update={"train": plan.train.model_copy(update=two)})
    several = on_ranks(plan, **{axis: 3})
    assert (several.train.empty_sequences, several.train.accumulation) == (1, 1)
    alone, many = train(plan, tmp_path / "one"), train(several, tmp_path / "many")
    assert losses(many) == pytest.approx(losses(alone), rel=0, abs=near)
    norms = [[event["grad_norm"] for event in fields(run, "StepDone")] for run in (alone, many)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4 if near == 1e-5 else 0.1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 1), (3, 1)), ((3, 1), (2, 1)), ((1, 3), (2, 1)), ((3, 1), (1, 3)), ((1, 2), (1, 3))],
    ids=["1-3c", "3c-2c", "3s-2c", "3c-3s", "2s-3s"],
)
def test_a_run_resumes_on_another_number_of_ranks_with_the_next_sequences(
    folders, tmp_path, before, after
) -> None:
    plan = plan_of(folders, "text", {"train": SIXTEEN}, 4, shares=False)
    first, second = (
        on_ranks(plan, replicate=replicate, shard=shard) for replicate, shard in (before, after)
    )
    alone = losses(train(plan, tmp_path / "one"))
    train(first, tmp_path / "many", stop_after=2)
    checkpoint = tmp_path / "many" / "checkpoints" / "step-00000002"
    rest = losses(train(second, tmp_path / "many", resume_from=checkpoint))
    assert rest == pytest.approx(
        {step: loss for step, loss in alone.items() if step > 2}, rel=0, abs=1e-5
    )
