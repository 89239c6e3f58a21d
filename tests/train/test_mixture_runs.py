"""Runs of hybrid mixtures: resumed, on ranks, adapted, with pairs and rollouts; choices keep their float32."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import assert_resumes_bitwise, saved_base
from safetensors.torch import load_file
from structured_runs import write_answers
from test_ranks_features import write_prompts

from bloomery.facts.config import DeltaNet, Experts, ShortConvolution
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.recipe.objectives import Grpo, Preference
from bloomery.recipe.rewards import VerifierReward
from bloomery.recipe.schema import Lora
from ranks import losses, on_ranks, ranks, train, train_here

EXPERTS = Experts(count=4, per_token=2, width=16, normalize=True)
QWEN = tiny_config(
    family="qwen3_5_moe_text",
    vocab_size=512,
    intermediate_size=16,
    norm="rms_unit_offset",
    attention_gate=True,
    rotary_share=0.25,
    num_layers=4,
    mixers=("delta_net", "attention", "delta_net", "delta_net"),
    delta_net=DeltaNet(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=12),
    experts=replace(EXPERTS, shared_width=16, shared_gate=True),
)
LFM = tiny_config(
    family="lfm2_moe",
    vocab_size=512,
    num_layers=3,
    mixers=("short_convolution", "attention", "short_convolution"),
    short_convolution=ShortConvolution(kernel=3),
    experts=replace(
        EXPERTS, scores="sigmoid", least_sum=1e-6, choice_bias=True, layers=(False, True, True)
    ),
)
ERNIE = tiny_config(
    family="ernie4_5_moe",
    vocab_size=512,
    qk_norm="none",
    rope_interleave=True,
    experts=replace(
        EXPERTS,
        least_sum=1e-12,
        clamps_sum=True,
        choice_bias=True,
        boxed_choice_bias=True,
        float32_router=True,
        shared_width=32,
        layers=(False, True),
    ),
)
FOUR_MICRO_BATCHES = {"tokens_per_step": 128, "accumulation": 4}  # two of each of two ranks
LORA = Lora(kind="lora", rank=4, target_modules=["all-linear"])
DPO = Preference(kind="dpo", beta=0.5)


@pytest.fixture(scope="module")
def base(prepared, tmp_path_factory) -> Path:
    return saved_base(QWEN, prepared, tmp_path_factory.mktemp("base"))


def plan_of(data: Path, *, config=QWEN, steps: int = 4, source: Path | None = None, **fields):
    train = {"steps": steps, "tokens_per_step": 64, "micro_batch_size": 1, "accumulation": 2}
    return tiny_plan(
        data,
        config=config,
        train=train | fields.pop("train", {}),
        checkpoint={"every_steps": max(2, steps // 2)},
        eval={"every_steps": max(2, steps // 2)},
        sample={"prompts": ("def",), "max_new_tokens": 8},
        model={"source": source},
    ).model_copy(update=fields)


def with_biases(config, prepared: Path, folder: Path) -> Path:
    """A base whose biases of the choice bfloat16 would round to others."""
    state = model_state(fresh_decoder(config, seed=3))
    numbers = torch.Generator().manual_seed(5)
    for name, tensor in state.items():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(1 + 1e-4 * torch.randn(tensor.shape, generator=numbers))
    folder.mkdir()
    saved_base(config, prepared, folder)
    write_model(state, config, folder)
    return folder


@pytest.mark.parametrize("case", ["full", "LoRA"])
def test_a_resumed_run_is_bitwise_the_undisturbed_one(prepared, base, tmp_path, case) -> None:
    fields = {"full": {}, "LoRA": {"adapter": LORA, "source": base}}[case]
    assert_resumes_bitwise(plan_of(prepared, **fields), tmp_path)


@pytest.mark.parametrize("config", [LFM, ERNIE], ids=["lfm2_moe", "ernie4_5_moe"])
@pytest.mark.parametrize("precision", ["bfloat16-pure", "bfloat16"])
def test_checkpoints_keep_what_chooses_in_float32(prepared, tmp_path, config, precision) -> None:
    source = with_biases(config, prepared, tmp_path / "base")
    plan = plan_of(prepared, config=config, source=source, train={"precision": precision})
    files = assert_resumes_bitwise(plan, tmp_path)
    (model,) = [file for file in files if file.name == "model.safetensors"]
    tensors = load_file(model)
    before = load_file(source / "model.safetensors")
    biases = [name for name in tensors if "expert_bias" in name or "correction_bias" in name]
    assert biases
    for name in biases:
        assert torch.equal(tensors[name], before[name])
    routers = [name for name in tensors if name.endswith("gate.weight")]
    dtypes = {tensors[name].dtype for name in routers}
    is_half = precision == "bfloat16-pure" and config is LFM
    assert dtypes == {torch.bfloat16 if is_half else torch.float32}
    embedding = tensors["model.embed_tokens.weight"]
    assert (embedding.dtype == torch.bfloat16) == (precision == "bfloat16-pure")


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        (QWEN, "float32"),
        pytest.param(ERNIE, "bfloat16-pure", marks=pytest.mark.soak),
        pytest.param(LFM, "bfloat16", marks=pytest.mark.soak),
    ],
    ids=["qwen3_5_moe", "ernie4_5_moe", "lfm2_moe"],
)
def test_shards_train_as_one_rank(prepared, tmp_path, config, precision) -> None:
    plan = plan_of(prepared, config=config, train=FOUR_MICRO_BATCHES | {"precision": precision})
    several = on_ranks(plan, shard=2)
    one = train_here(plan.model_dump_json(), str(tmp_path / "one"), None, None)
    arguments = (several.model_dump_json(), str(tmp_path / "many"), None, None)
    many = ranks(2).call(train_here, *arguments)[0]
    limit = 1e-5 if precision == "float32" else 0.02
    assert losses(many) == pytest.approx(losses(one), rel=0, abs=limit)
    names = [
        {name: (tuple(t.shape), t.dtype) for name, t in load_file(file).items()}
        for file in (
            tmp_path / run / "checkpoints/step-00000004/model.safetensors"
            for run in ("one", "many")
        )
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize("adapted", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_pairs_are_learned(prepared, base, tmp_path, adapted) -> None:
    answers = write_answers(tmp_path / "prepared", prepared, "pairs")
    fields = {"adapter": LORA} if adapted else {}
    run = train(plan_of(answers, steps=8, source=base, objective=DPO, **fields), tmp_path / "run")
    assert losses(run)[8] < losses(run)[1]


def test_rollouts_go_through_the_cache(prepared, tmp_path) -> None:
    objective = Grpo(kind="grpo", num_generations=2, max_completion_length=8)
    rewards = (VerifierReward(verifier="length", max_characters=6),)
    plan = plan_of(write_prompts(tmp_path), steps=2, objective=objective, rewards=rewards)
    assert losses(train(plan, tmp_path / "run")).keys() == {1, 2}
