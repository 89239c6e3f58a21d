"""Runs of models with delta nets or short convolutions: on ranks and stages as on one, resumed, adapted, with pairs."""

from pathlib import Path

import pytest
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import assert_resumes_bitwise, saved_base
from structured_runs import write_answers

from bloomery.facts.config import DeltaNet, ShortConvolution
from bloomery.recipe.objectives import Preference, Reward
from bloomery.recipe.schema import Lora, Quantize
from ranks import fields, losses, on_ranks, ranks, train, train_here

HYBRID = {
    "family": "qwen3_5_text",
    "vocab_size": 512,
    "norm": "rms_unit_offset",
    "attention_gate": True,
    "rotary_share": 0.25,
    "num_layers": 4,
    "mixers": ("delta_net", "attention", "delta_net", "delta_net"),
    "delta_net": DeltaNet(
        num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=12, kernel=4
    ),
}
CONVOLUTIONS = {
    "family": "lfm2",
    "vocab_size": 512,
    "num_layers": 4,
    "mixers": ("short_convolution", "attention", "short_convolution", "short_convolution"),
    "short_convolution": ShortConvolution(kernel=3),
    "tie_embeddings": True,
}
# Queries, keys and values apart, and norms that follow the mixer.
SEPARATE = {
    "family": "olmo_hybrid",
    "vocab_size": 512,
    "tie_embeddings": False,
    "norm_eps": 1e-6,
    "norm_placement": "by_mixer",
    "qk_norm": "full",
    "rotary_layers": (False,) * 4,
    "num_layers": 4,
    "mixers": ("delta_net", "attention", "delta_net", "delta_net"),
    "delta_net": DeltaNet(
        num_key_heads=2,
        num_value_heads=4,
        key_head_dim=8,
        value_head_dim=12,
        projections="separate",
        negative_eigenvalues=True,
        norm_eps=1e-5,
    ),
}
CONFIG = tiny_config(**HYBRID)
CONVOLVING = tiny_config(**CONVOLUTIONS)
APART = tiny_config(**SEPARATE)
CONFIGS = [
    CONFIG,
    *(pytest.param(config, marks=pytest.mark.soak) for config in (CONVOLVING, APART)),
]
FOUR_MICRO_BATCHES = {"tokens_per_step": 128, "accumulation": 4}  # two of each of two ranks
DORA = Lora(kind="dora", rank=4, target_modules=["all-linear"])
DPO = Preference(kind="dpo", beta=0.5)


@pytest.fixture(scope="module")
def bases(prepared, tmp_path_factory) -> dict[str, Path]:
    return {
        config.family: saved_base(config, prepared, tmp_path_factory.mktemp(config.family))
        for config in (CONFIG, CONVOLVING, APART)
    }


def family_of(config) -> str:
    return config.family


def plan_of(data: Path, *, config=CONFIG, steps: int = 4, source: Path | None = None, **fields):
    train = {"steps": steps, "tokens_per_step": 64, "micro_batch_size": 1, "accumulation": 2}
    return tiny_plan(
        data,
        config=config,
        train=train | fields.pop("train", {}),
        checkpoint={"every_steps": max(2, steps // 2)},
        eval={"every_steps": max(2, steps // 2)},
        sample={"prompts": ("def",), "max_new_tokens": 8} if config.head == "tokens" else {},
        model={"source": source},
    ).model_copy(update=fields)


@pytest.mark.parametrize("config", CONFIGS, ids=family_of)
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ({"shard": 2}, {}),
        ({"pipeline": 2}, {"activation_checkpointing": "full"}),
        pytest.param({"pipeline": 2, "shard": 2}, {}, marks=pytest.mark.soak),
    ],
)
def test_ranks_and_stages_train_as_one_rank(prepared, tmp_path, mesh, settings, config) -> None:
    plan = plan_of(prepared, config=config, train=FOUR_MICRO_BATCHES | settings)
    several = on_ranks(plan, **mesh)
    one = train_here(plan.model_dump_json(), str(tmp_path / "one"), None, None)
    arguments = (several.model_dump_json(), str(tmp_path / "many"), None, None)
    many = ranks(several.train.ranks).call(train_here, *arguments)[0]
    assert losses(many).keys() == {1, 2, 3, 4}
    assert losses(many) == pytest.approx(losses(one), rel=0, abs=1e-5)
    scores = [[event["loss"] for event in fields(run, "EvalDone")] for run in (one, many)]
    assert scores[0] and scores[1] == pytest.approx(scores[0], rel=0, abs=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        "full",
        "DoRA",
        pytest.param("nf4", marks=pytest.mark.soak),
        pytest.param("bfloat16-pure", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("config", CONFIGS, ids=family_of)
def test_a_resumed_run_is_bitwise_the_undisturbed_one(
    prepared, bases, tmp_path, case, config
) -> None:
    base = bases[config.family]
    fields = {
        "full": {},
        "bfloat16-pure": {"train": {"precision": "bfloat16-pure"}},
        "DoRA": {"adapter": DORA, "source": base},
        "nf4": {"adapter": DORA, "source": base, "quantize": Quantize(kind="nf4")},
    }[case]
    plan = plan_of(prepared, config=config, **fields)
    assert_resumes_bitwise(plan, tmp_path)


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        ("pairs", {"objective": DPO, "adapter": DORA}),
        pytest.param(
            "pairs",
            {"objective": DPO, "adapter": DORA, "config": CONVOLVING},
            marks=pytest.mark.soak,
        ),
        pytest.param("pairs", {"objective": DPO}, marks=pytest.mark.soak),
        ("pairs", {"objective": Reward(kind="reward")}),
    ],
)
def test_preferences_are_learned(prepared, bases, tmp_path, data, fields) -> None:
    answers = write_answers(tmp_path / "prepared", prepared, data)
    config = CONFIG if fields["objective"] is DPO else tiny_config(**HYBRID, head="values")
    fields = {"config": config, **fields}
    source = bases[fields["config"].family] if "adapter" in fields else None
    run = train(plan_of(answers, steps=8, source=source, **fields), tmp_path / "run")
    assert losses(run)[8] < losses(run)[1]
