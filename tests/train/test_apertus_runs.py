"""Runs of a model whose activation has numbers of its own: on ranks as on one, resumed, with an adapter."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import assert_same_tensors
from safetensors.torch import load_file
from torch.testing import assert_close

from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.recipe.schema import Lora
from ranks import losses, ranks, train, train_here
from ranks import on_ranks as planned_on_ranks

APERTUS = replace(
    tiny_config(family="apertus", gated_mlp=False, activation="xielu", tie_embeddings=False),
    vocab_size=512,
)
NUMBERS = "model.layers.0.mlp.act_fn."


def plan_of(data: Path, **fields):
    train = {"steps": 4, "tokens_per_step": 128, "micro_batch_size": 1, "accumulation": 4}
    return tiny_plan(
        data,
        config=APERTUS,
        train=train,
        checkpoint={"every_steps": 2},
        model={"source": fields.pop("source", None)},
    ).model_copy(update=fields)


def numbers_of(run: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(run / "checkpoints/step-00000004/model.safetensors")
    names = ("alpha_p", "alpha_n", "beta", "eps")
    return {name: tensors[f"{NUMBERS}{name}"] for name in names}


@pytest.mark.soak
def test_ranks_train_as_one_rank(prepared: Path, tmp_path: Path) -> None:
    plan = plan_of(prepared)
    one = train_here(plan.model_dump_json(), str(tmp_path / "one"), None, None)
    several = planned_on_ranks(plan, shard=2)
    arguments = (several.model_dump_json(), str(tmp_path / "many"), None, None)
    many = ranks(2).call(train_here, *arguments)[0]
    assert losses(many) == pytest.approx(losses(one), rel=0, abs=1e-5)
    numbers = numbers_of(tmp_path / "one")
    assert_close(numbers_of(tmp_path / "many"), numbers, atol=1e-5, rtol=0)


def test_a_resumed_run_is_bitwise_the_undisturbed_one(prepared: Path, tmp_path: Path) -> None:
    plan = plan_of(prepared)
    train(plan, tmp_path / "one")
    numbers = numbers_of(tmp_path / "one")
    # Two are trained, and two are single numbers that stay as they were.
    fresh = fresh_decoder(APERTUS, seed=0).state_dict()
    for name, number in numbers.items():
        change = float((number - fresh[f"{NUMBERS}{name}"]).abs().max())
        assert (change > 1e-4) == name.startswith("alpha"), name
    assert numbers["beta"].shape == numbers["eps"].shape == ()

    stopped = tmp_path / "stopped"
    train(plan, stopped, stop_after=2)
    train(plan, stopped, resume_from=stopped / "checkpoints" / "step-00000002")
    last = "checkpoints/step-00000004"
    files = sorted((tmp_path / "one" / last).rglob("*.safetensors"))
    assert files
    for file in files:
        other = stopped / file.relative_to(tmp_path / "one")
        assert_same_tensors(load_file(file), load_file(other))


def test_an_adapter_trains_beside_frozen_numbers(prepared: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    write_model(model_state(fresh_decoder(APERTUS, seed=3)), APERTUS, base)
    load_tokenizer(prepared).save(base)
    lora = Lora(kind="lora", rank=4, target_modules=["all-linear"])
    run = train(plan_of(prepared, adapter=lora, source=base), tmp_path / "run")
    assert losses(run)[4] < losses(run)[1]
