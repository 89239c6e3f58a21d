"""Runs of a model whose layers share keys and are given inputs: on ranks as on one, recomputed, resumed, adapted."""

from pathlib import Path

import pytest
import torch
from plans_for_tests import sharing_config, tiny_plan
from runs_of_the_loop import assert_resumes_bitwise, saved_base
from safetensors.torch import load_file
from structured_runs import write_answers
from test_ranks_features import write_prompts
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import fresh_decoder
from bloomery.parallel.apply import checkpoint_block
from bloomery.plan.support_matrix import refuse_unsupported
from bloomery.recipe.objectives import Grpo, Preference
from bloomery.recipe.rewards import VerifierReward
from bloomery.recipe.schema import Lora, Quantize, Recipe
from ranks import fields, losses, on_ranks, ranks, train, train_here

E2B = sharing_config()
FOUR_MICRO_BATCHES = {"tokens_per_step": 128, "accumulation": 4}  # two of each of two ranks
DORA = Lora(kind="dora", rank=4, target_modules=["all-linear"])
TOKENS = torch.randint(3, 512, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def base(prepared, tmp_path_factory) -> Path:
    return saved_base(E2B, prepared, tmp_path_factory.mktemp("base"))


def plan_of(data: Path, *, steps: int = 4, source: Path | None = None, **fields):
    train = {"steps": steps, "tokens_per_step": 64, "micro_batch_size": 1, "accumulation": 2}
    return tiny_plan(
        data,
        config=E2B,
        train=train | fields.pop("train", {}),
        checkpoint={"every_steps": max(2, steps // 2)},
        eval={"every_steps": max(2, steps // 2)},
        sample={"prompts": ("def",), "max_new_tokens": 8},
        model={"source": source} | fields.pop("model", {}),
    ).model_copy(update=fields)


@pytest.mark.parametrize(
    "mesh",
    [
        {"shard": 2},
        pytest.param({"shard": 2, "context": 2}, marks=pytest.mark.soak),
        pytest.param({"replicate": 2}, marks=pytest.mark.soak),
    ],
)
def test_ranks_train_as_one_rank(prepared, tmp_path, mesh) -> None:
    plan = plan_of(prepared, train=FOUR_MICRO_BATCHES)
    several = on_ranks(plan, **mesh)
    one = train_here(plan.model_dump_json(), str(tmp_path / "one"), None, None)
    arguments = (several.model_dump_json(), str(tmp_path / "many"), None, None)
    many = ranks(several.train.ranks).call(train_here, *arguments)[0]
    assert losses(many).keys() == {1, 2, 3, 4}
    assert losses(many) == pytest.approx(losses(one), rel=0, abs=1e-5)
    scores = [[event["loss"] for event in fields(run, "EvalDone")] for run in (one, many)]
    assert scores[0] and scores[1] == pytest.approx(scores[0], rel=0, abs=1e-5)


def test_stages_are_refused_with_the_reason() -> None:
    recipe = Recipe.model_validate(
        {"model": {"family": "gemma4_text"}, "train": {"max_steps": 1}, "data": {"path": "x"}}
    )
    with pytest.raises(UserError, match="keys of another") as refused:
        refuse_unsupported(recipe, E2B, pipeline=2)
    assert "parallel.shard=2" in refused.value.fix


@pytest.mark.parametrize("case", ["full", "DoRA", pytest.param("nf4", marks=pytest.mark.soak)])
def test_a_resumed_run_is_bitwise_the_undisturbed_one(prepared, base, tmp_path, case) -> None:
    fields = {
        "full": {},
        "DoRA": {"adapter": DORA, "source": base},
        "nf4": {"adapter": DORA, "source": base, "quantize": Quantize(kind="nf4")},
    }[case]
    plan = plan_of(prepared, **fields)
    files = assert_resumes_bitwise(plan, tmp_path)
    if case == "full":
        scalars = [tensor for name, tensor in load_file(files[0]).items() if "scalar" in name]
        assert all(torch.equal(tensor, torch.ones(1)) for tensor in scalars), "nothing trains them"


def test_preferences_are_learned(prepared, base, tmp_path) -> None:
    answers = write_answers(tmp_path / "prepared", prepared, "pairs")
    dpo = {"objective": Preference(kind="dpo", beta=0.5), "adapter": DORA}
    run = train(plan_of(answers, steps=8, source=base, **dpo), tmp_path / "run")
    assert losses(run)[8] < losses(run)[1]


@pytest.mark.soak
def test_completions_are_sampled_and_rewarded(prepared, tmp_path) -> None:
    """Rows of several lengths in one cache, whose last layers see the keys of others."""
    prompts = write_prompts(tmp_path)
    objective = Grpo(kind="grpo", num_generations=2, max_completion_length=8)
    rewards = (VerifierReward(verifier="length", max_characters=6),)
    run = train(plan_of(prompts, steps=2, objective=objective, rewards=rewards), tmp_path / "run")
    assert losses(run).keys() == {1, 2}


def gradients(decoder: Decoder) -> dict[str, torch.Tensor]:
    decoder(TOKENS).head.square().mean().backward()
    return {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["full", "every-2", "selective"])
def test_recomputed_layers_share_keys_bitwise(mode) -> None:
    expected = gradients(fresh_decoder(E2B, seed=0))
    decoder = fresh_decoder(E2B, seed=0)
    for index, block in enumerate(decoder.model.layers):
        checkpoint_block(block, mode, index=index)
    recomputed = gradients(decoder)
    assert recomputed.keys() == expected.keys()
    for name, gradient in recomputed.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.soak
def test_blocks_compile_without_a_graph_break() -> None:
    torch.compiler.reset()
    expected = gradients(fresh_decoder(E2B, seed=0))
    decoder = fresh_decoder(E2B, seed=0)
    for block in decoder.model.layers:
        block.compile(fullgraph=True, backend="eager")
    for name, gradient in gradients(decoder).items():
        assert_close(gradient, expected[name], atol=1e-5, rtol=1e-3, msg=name)


def test_rows_of_the_embeddings_get_the_gradient_that_autograd_would_give() -> None:
    """Both tables, where compiled code adds the rows of a batch."""
    expected = gradients(fresh_decoder(E2B, seed=0))
    decoder = fresh_decoder(E2B, seed=0)
    decoder.model.adds_rows = True
    for name, gradient in gradients(decoder).items():
        assert_close(gradient, expected[name], atol=1e-7, rtol=1e-5, msg=name)
