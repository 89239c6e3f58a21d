"""A teacher over stages and over ranks that share sequences. Oracle: one rank, with the same losses and weights."""

from functools import cache

import pytest
from rollouts_for_tests import metrics, plan_of, write_recipe, write_teacher
from safetensors.torch import load_file
from test_rollout_meshes import LORA, MODEL, SHARED, STAGES
from test_teacher_of_another_tokenizer import write_both
from torch.testing import assert_close

from ranks import fields, losses, on_ranks, train

STEPS = 3
SHORT = (f"train.max_steps={STEPS}", "eval.every=3 steps")
# One completion in each sequence, of which two ranks have a part each. Letters are more tokens.
LENGTHS = {False: "data.sequence_length=24", True: "data.sequence_length=40"}
ON_POLICY = "objective={kind: on_policy_distill, teacher: TEACHER, num_generations: 2, max_completion_length: 8}"
REWARDED = "objective={kind: grpo, teacher: TEACHER, num_generations: 4, max_completion_length: 8, teacher_kl_coef: 5}"
TOLD = "objective.teacher_prompt_template='{answer}! {prompt}'"
WIDE = "model.initializer_range=0.15"  # a prompt makes a difference to larger weights
CASES = {
    "on policy": (ON_POLICY, "rewards=[]"),
    "sampled tokens": (ON_POLICY, "rewards=[]", "objective.estimator=sampled"),
    "jsd, several steps": (
        *(ON_POLICY, "rewards=[]"),
        *("objective.divergence=jsd", "objective.num_iterations=2"),
    ),
    "nf4": (ON_POLICY, "rewards=[]", "objective.teacher_quantize=nf4", LORA),
    "streamed": (ON_POLICY, "rewards=[]", "objective.teacher_stream=layers"),
    "told more": (ON_POLICY, "rewards=[]", TOLD),
    "told more, streamed": (ON_POLICY, "rewards=[]", TOLD, "objective.teacher_stream=layers"),
    "base": (ON_POLICY.replace("TEACHER", "base"), "rewards=[]", TOLD, WIDE, LORA),
    "live": (ON_POLICY.replace("TEACHER", "live"), "rewards=[]", TOLD, WIDE),
    "grpo, cross-entropy": (
        REWARDED,
        "objective.ce_coef=0.1",
        "objective.entropy_coef=0.01",
        "objective.loss_type=grpo",
    ),
    "grpo, base, reference": (
        REWARDED.replace("TEACHER", "base"),
        *(TOLD, WIDE, LORA, "objective.beta=0.1"),
    ),
    "rloo, streamed": (REWARDED.replace("grpo", "rloo"), "objective.teacher_stream=layers"),
    "another tokenizer": (ON_POLICY, "rewards=[]", "objective.estimator=sampled"),
    "another tokenizer, grpo": (
        *(REWARDED, "objective.estimator=sampled"),
        *("objective.teacher_stream=layers", "objective.entropy_coef=0.01"),
    ),
}
QUICK = ("on policy", "told more, streamed", "base", "grpo, cross-entropy", "another tokenizer")


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """The recipe of a teacher with the student's tokenizer, and of one with another."""
    alike = write_recipe(tmp_path_factory.mktemp("alike"), *MODEL, LENGTHS[False])
    write_teacher(alike, *MODEL, LENGTHS[False])
    other = write_both(tmp_path_factory.mktemp("spans"), *MODEL, LENGTHS[True])
    return {False: alike, True: other}


def plan_with(recipes, case, *edits):
    is_other = case.startswith("another tokenizer")
    recipe = recipes[is_other]
    of_case = [edit.replace("TEACHER", str(recipe / "teacher")) for edit in CASES[case]]
    if is_other:
        of_case.append(f"tokenizer={{from: {recipe / 'student'}}}")
    plan = plan_of(recipe, *MODEL, LENGTHS[is_other], *of_case, *SHORT, *edits)
    # With the usual eps an update is the sign of a gradient, and of one of 1e-9 that of its rounding.
    optimizer = plan.optimizer.model_copy(update={"eps": 1e-4})
    return plan.model_copy(update={"optimizer": optimizer})


@pytest.fixture(scope="module")
def alone(recipes, tmp_path_factory):
    """The folder and the events of one rank, by case."""

    @cache
    def run(case):
        folder = tmp_path_factory.mktemp("alone")
        return folder, train(plan_with(recipes, case), folder)

    return run


def assert_trains_as(one, folder, events):
    """Losses and weights to 1e-6, metrics and what held-out prompts say of the teacher."""
    other, expected = one
    assert losses(events).keys() == set(range(1, STEPS + 1))
    assert losses(events) == pytest.approx(losses(expected), rel=1e-6, abs=1e-6)
    for step, of_step in metrics(expected).items():
        assert metrics(events)[step] == pytest.approx(of_step, rel=1e-5, abs=1e-6)
    held_out = [
        [(event["loss"], event["metrics"]) for event in fields(run, "EvalDone")]
        for run in (events, expected)
    ]
    assert held_out[0] and len(held_out[0]) == len(held_out[1])
    for (loss, of_loss), (expected_loss, of_expected) in zip(*held_out, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
        assert of_loss == pytest.approx(of_expected, rel=1e-5, abs=1e-6)
    (file,) = (other / "checkpoints" / f"step-{STEPS:08d}").glob("*model.safetensors")
    weights, expected_weights = (
        load_file(run / file.relative_to(other)) for run in (folder, other)
    )
    assert_close(weights, expected_weights, rtol=0, atol=1e-6)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        pytest.param(
            case,
            mesh,
            marks=[]
            if case in QUICK and mesh in ("two stages", "two copies")
            else [pytest.mark.soak],
        )
        for case in CASES
        for mesh in STAGES | SHARED
    ],
)
def test_ranks_with_a_teacher_train_as_one(recipes, alone, tmp_path, case, mesh):
    plan = on_ranks(plan_with(recipes, case), **(STAGES | SHARED)[mesh])
    assert_trains_as(alone(case), tmp_path, train(plan, tmp_path))


MOVES = {
    "from stages to shared sequences": (STAGES["two stages"], SHARED["two copies"]),
    "from shared sequences to one rank": (SHARED["two copies"], {}),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_run_with_a_teacher_goes_on_over_other_ranks(recipes, alone, tmp_path, move):
    """In the middle of a rollout, on which two steps train."""
    plan = plan_with(recipes, "jsd, several steps")
    first, second = MOVES[move]
    before = train(on_ranks(plan, **first), tmp_path, stop_after=1)
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    after = train(on_ranks(plan, **second), tmp_path, resume_from=checkpoint)
    assert_trains_as(alone("jsd, several steps"), tmp_path, [*before, *after])
