"""Runs with rewards over ranks that share sequences, and over stages. Oracle: one rank, with the same completions."""

from functools import cache

import pytest
from rollouts_for_tests import (
    STEPS,
    completions,
    metrics,
    plan_of,
    write_recipe,
    write_teacher,
)

from bloomery.model.io.parameters import local
from bloomery.parallel.process_group import join
from bloomery.plan.types import RunPlan
from bloomery.train.rl.sampler import whole_copy
from bloomery.train.state import build_state
from ranks import fields, losses, on_ranks, ranks, train

# A layer for each of four stages, and a head for each of four ranks that share sequences.
MODEL = ("model.num_layers=4", "model.num_heads=4", "model.num_kv_heads=4", "model.head_dim=16")
LORA = "adapter={kind: lora, rank: 4}"
PPO = (
    "objective={kind: ppo, num_generations: 1, max_completion_length: 8, num_iterations: 2}",
    LORA,
)
# Losses of tokens, and those that need all of a completion.
CASES = {
    "grpo": ("objective.num_iterations=2",),
    "grpo, mean of completions, reference": (
        "objective.loss_type=grpo",
        "objective.beta=0.1",
        "objective.entropy_coef=0.01",
    ),
    "gspo, corrected by sequence": (
        "objective.importance_sampling_level=sequence",
        "objective.importance_sampling_correction=true",
        "objective.num_iterations=2",
        LORA,
        "objective.beta=0.1",
    ),
    "rloo, cross-entropy": (
        "objective={kind: rloo, num_generations: 4, max_completion_length: 8, ce_coef: 0.3}",
        LORA,
    ),
    "ppo": PPO,
    "nf4": ("quantize.kind=nf4", LORA),
    "frozen copy in 4 bits": ("objective.beta=0.1", "objective.reference=nf4"),
    "ppo, every weight": (PPO[0], "objective.kl_coef=0.1"),
    "averaged, dynamic sampling": (
        "train.ema_decay=0.5",
        "objective.dynamic_sampling=true",
        "objective.easy_prompts=defer",
        "objective.easy_threshold=0.1",
    ),
}
SAME = ("prompt_ids", "completion_ids", "reward", "truncated")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("rl"), *MODEL)


@pytest.fixture(scope="module")
def alone(recipe, tmp_path_factory):
    """The folder and the events of one rank, by case."""

    @cache
    def run(case):
        folder = tmp_path_factory.mktemp("alone")
        return folder, train(plan_with(recipe, case), folder)

    return run


def plan_with(recipe, case):
    return plan_of(recipe, *MODEL, *CASES[case])


def assert_trains_as(one, folder, events):
    other, expected = one
    assert losses(events).keys() == set(range(1, STEPS + 1))
    assert losses(events) == pytest.approx(losses(expected), rel=0, abs=1e-6)
    norms, expected_norms = (
        [step["grad_norm"] for step in fields(run, "StepDone")] for run in (events, expected)
    )
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    for name, rows in completions(other).items():
        ours = completions(folder)[name]
        assert [[row[key] for key in SAME] for row in ours] == [
            [row[key] for key in SAME] for row in rows
        ]
    ours, expected_metrics = metrics(events), metrics(expected)
    for step, of_step in expected_metrics.items():
        assert ours[step] == pytest.approx(of_step, rel=1e-4, abs=1e-5)
    held_out = [
        [event["metrics"] for event in fields(run, "EvalDone")] for run in (events, expected)
    ]
    assert [of["reward"] for of in held_out[0]] == [of["reward"] for of in held_out[1]]
    for ours_at, expected_at in zip(*held_out, strict=True):
        assert ours_at == pytest.approx(expected_at, rel=1e-5, abs=1e-6)  # as of losses


SHARED = {
    "two copies": {"replicate": 2, "context": 2},
    "two shards": {"shard": 2, "context": 2},
    "four copies": {"replicate": 4, "context": 2},
    "all four": {"replicate": 2, "shard": 2, "context": 4},
}


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        pytest.param(
            case, mesh, marks=[] if mesh == "two copies" or case == "ppo" else [pytest.mark.soak]
        )
        for case in CASES
        for mesh in SHARED
    ],
)
def test_ranks_that_share_sequences_train_as_one(recipe, alone, tmp_path, case, mesh):
    plan = on_ranks(plan_with(recipe, case), **SHARED[mesh])
    assert_trains_as(alone(case), tmp_path, train(plan, tmp_path))


STAGES = {
    "two stages": {"pipeline": 2},
    "interleaved": {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
    "copies of stages": {"pipeline": 2, "replicate": 2},
    "shards of stages": {"pipeline": 2, "shard": 2},
    "four stages": {"pipeline": 4},
}


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        pytest.param(
            case, mesh, marks=[] if mesh == "two stages" or case == "ppo" else [pytest.mark.soak]
        )
        for case in CASES
        for mesh in STAGES
    ],
)
def test_stages_train_as_one_rank(recipe, alone, tmp_path, case, mesh):
    """Each rank samples with a copy of the stages of its pipeline, whatever it trains."""
    plan = on_ranks(plan_with(recipe, case), **STAGES[mesh])
    assert_trains_as(alone(case), tmp_path, train(plan, tmp_path))


PEFT_METHODS = {
    "ia3": "{method: ia3, target_modules: [k_proj, down_proj], feedforward_modules: [down_proj]}",
    "adalora": "{method: adalora, init_r: 6, target_r: 2, tinit: 1, tfinal: 1, deltaT: 1, total_step: 6}",
}
WITHOUT_PARTS = {"copies": {"replicate": 2}, "shared sequences": SHARED["two copies"]}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", WITHOUT_PARTS)
@pytest.mark.parametrize("method", PEFT_METHODS)
def test_methods_of_peft_train_with_rewards_as_one_rank(recipe, tmp_path, method, mesh):
    """With a frozen copy of the start beside them; shards and stages have no whole matrices, and are refused."""
    adapter = PEFT_METHODS[method].replace("{", "{kind: peft, ", 1)
    plan = plan_of(recipe, *MODEL, f"adapter={adapter}", "objective.beta=0.1")
    one = tmp_path / "alone", train(plan, tmp_path / "alone")
    several = train(on_ranks(plan, **WITHOUT_PARTS[mesh]), tmp_path / "several")
    assert_trains_as(one, tmp_path / "several", several)


MIXTURE = ("model.family=qwen3_moe", "model.experts={count: 4, per_token: 2, width: 32}")
DIVIDED = {
    "two copies": {"replicate": 2, "expert": 2},
    "two shards": {"shard": 2, "expert": 2},
    "two stages": {"pipeline": 2, "replicate": 2, "expert": 2},
}


EXPERT_CASES = {
    **{name: CASES[name] for name in ("grpo", "ppo", "grpo, mean of completions, reference")},
    "taught by its base": ("objective.teacher=base", LORA),
    "taught by another mixture": ("objective.teacher=TEACHER",),
}


@pytest.fixture(scope="module")
def alone_with_experts(recipe, tmp_path_factory):
    write_teacher(recipe, *MODEL, *MIXTURE)

    @cache
    def run(case):
        folder = tmp_path_factory.mktemp("alone")
        return folder, train(mixture_plan(recipe, case), folder)

    return run


def mixture_plan(recipe, case):
    edits = [edit.replace("TEACHER", str(recipe / "teacher")) for edit in EXPERT_CASES[case]]
    return plan_of(recipe, *MODEL, *MIXTURE, *edits)


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        pytest.param(case, mesh, marks=[] if mesh == "two copies" else [pytest.mark.soak])
        for case in EXPERT_CASES
        for mesh in DIVIDED
    ],
)
def test_ranks_that_divide_experts_train_as_one(recipe, alone_with_experts, tmp_path, case, mesh):
    plan = on_ranks(mixture_plan(recipe, case), **DIVIDED[mesh])
    assert_trains_as(alone_with_experts(case), tmp_path, train(plan, tmp_path))


MOVES = {
    "from shared sequences": ({"replicate": 2, "context": 2}, {}),
    "to shared sequences": ({}, {"replicate": 2, "context": 2}),
    "from stages": ({"pipeline": 2}, {}),
    "to stages": ({}, {"pipeline": 2}),
    "from stages to shards": ({"pipeline": 2}, {"shard": 2}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["grpo", "ppo", "averaged, dynamic sampling"])
@pytest.mark.parametrize("move", MOVES)
def test_a_run_goes_on_over_other_ranks(recipe, alone, tmp_path, case, move):
    """It is stopped in the middle of a rollout where one is trained on twice. A checkpoint has rollout, value head and
    what is known of the prompts once, whatever wrote it.
    """
    first, second = MOVES[move]
    plan = plan_with(recipe, case)
    before = train(on_ranks(plan, **first), tmp_path, stop_after=3)
    after = train(
        on_ranks(plan, **second), tmp_path, resume_from=tmp_path / "checkpoints" / "step-00000003"
    )
    assert_trains_as(alone(case), tmp_path, [*before, *after])


COPY_AXES = {
    "pipeline": ({"parallel.pipeline": 2}, ()),
    "shard": ({"parallel.shard": 2}, ()),
    "expert": ({"parallel.replicate": 2, "parallel.expert": 2}, MIXTURE),
}


def bytes_of_weights(plan_json):
    """On every rank: the bytes of its part of the model, and of the copy that it samples with."""
    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    state = build_state(plan, mesh=mesh)
    return [
        sum(
            local(tensor).nbytes
            for tensor in {
                id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())
            }.values()
        )
        for model in (state.model, whole_copy(state, plan))
    ]


@pytest.mark.parametrize("axis", COPY_AXES)
@pytest.mark.parametrize("case", ["grpo", "rloo, cross-entropy", "nf4"])
def test_the_plan_counts_the_copy_that_a_rank_samples_with(recipe, axis, case):
    """Exactly, but for numbers that are computed again: of frequencies and masks."""
    sizes, model = COPY_AXES[axis]
    every_size = {f"parallel.{key}": 1 for key in ("replicate", "shard", "pipeline")} | sizes
    edits = [f"{key}={size}" for key, size in every_size.items()]
    plan = plan_of(recipe, *MODEL, *model, *CASES[case], *edits)
    planned = plan.rollout.memory.parts
    of_weights = planned["weights"] + planned.get("adapter", 0.0)
    for own, copy in ranks(2).call(bytes_of_weights, plan.model_dump_json()):
        assert planned["whole copy"] == pytest.approx(copy, rel=0.01)
        assert own <= 1.02 * of_weights  # every shard has all norms
    assert plan.memory.total >= plan.rollout.memory.total
