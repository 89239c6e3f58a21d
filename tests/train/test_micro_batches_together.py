"""Micro-batches that share each copy of a layer: a step has the bits of one after the other, on the device."""

from dataclasses import replace

import pytest
import torch
from plans_for_tests import sharing_config, tiny_config, tiny_plan
from test_hybrid_runs import CONVOLUTIONS, HYBRID
from test_step import OBJECTIVE, batch

from bloomery.facts.config import Experts
from bloomery.model.heads import ScoreSettings
from bloomery.parallel.offload import offload_activations
from bloomery.parallel.streamed import StreamedWeights
from bloomery.plan.types import RouterPlan
from bloomery.recipe.schema import Lora
from bloomery.train.objectives.objective import BaseScores
from bloomery.train.state import build_state
from bloomery.train.step import StepResult, train_step

LORA = Lora(kind="lora", rank=4, alpha=8.0, target_modules=["q_proj", "down_proj"], dropout=0.1)
CONVOLVED = LORA.model_copy(update={"target_modules": ["all-linear"]})
UNTIED = tiny_config(tie_embeddings=False, residual_dropout=0.1, embedding_dropout=0.1)
MIXTURE = tiny_config(
    family="qwen3_moe",
    tie_embeddings=False,
    experts=Experts(count=4, per_token=2, width=16, normalize=True),
)
CASES = {
    "full": {"config": UNTIED},
    "float16": {"config": UNTIED, "train": {"precision": "float16"}},
    "bfloat16-pure": {
        "config": UNTIED,
        "train": {"precision": "bfloat16-pure"},
        "optimizer": {"fused": False},
    },
    "lora": {"config": tiny_config(residual_dropout=0.1), "adapter": LORA},
    "lora, trained head": {
        "config": UNTIED,
        "adapter": LORA.model_copy(update={"modules_to_save": ["lm_head", "embed_tokens"]}),
    },
    "mixture": {"config": MIXTURE, "train": {"router": RouterPlan(loss=0.5, z_loss=0.25)}},
    "keys of another layer": {"config": replace(sharing_config(), tie_embeddings=False)},
    "keys of another layer, lora": {"config": sharing_config(), "adapter": LORA},
    "delta nets": {"config": tiny_config(**HYBRID | {"tie_embeddings": False})},
    "short convolutions, lora": {"config": tiny_config(**CONVOLUTIONS), "adapter": CONVOLVED},
    "mixture, counts of micro-batches": {
        "config": MIXTURE,
        "train": {"router": RouterPlan(loss=0.5, counts="micro_batch")},
    },
}
BATCHES = [batch(2, seed) for seed in range(5)]


def steps_of(case: dict, *, together: int | None, num_steps: int = 2, offload: bool = False):
    """The results of some steps, the trained tensors, and the weights that streamed; `together`: None streams none."""
    sections = dict(case)
    adapter = sections.pop("adapter", None)
    train = {"activation_checkpointing": "full", **sections.pop("train", {})}
    if together is not None:
        train |= {"stream": "layers", "stream_micro_batches": together}
    plan = tiny_plan(train=train, **sections)
    if adapter is not None:
        plan = plan.model_copy(update={"adapter": adapter})
    state = build_state(plan)
    if offload:
        offload_activations(state.model.model, threshold=1)
    results: list[StepResult] = []
    for position in range(num_steps):
        results.append(
            train_step(
                state.model_and_optimizer,
                BATCHES,
                OBJECTIVE,
                plan=plan.train,
                lr_scale=1.0,
                position=position,
            )
        )
    tensors = {
        name: parameter.detach().cpu()
        for name, parameter in state.model.named_parameters()
        if parameter.requires_grad
    }
    return results, tensors, state.model.weight_stream


@pytest.mark.parametrize(
    "together",
    [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(5, marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_bits_of_one_micro_batch_after_the_other(name: str, together: int) -> None:
    results, tensors, _ = steps_of(CASES[name], together=together)
    expected_results, expected, _ = steps_of(CASES[name], together=None)
    assert results == expected_results
    assert expected_results[0].grad_norm > 0
    assert [n for n in expected if not torch.equal(tensors[n], expected[n])] == []


def test_a_reference_scores_as_many_micro_batches_for_each_load() -> None:
    config = replace(UNTIED, num_layers=5)
    plan = tiny_plan(config=config, train={"stream": "layers"}).model_copy(update={"adapter": LORA})
    settings = ScoreSettings(chunk=64)
    scores = {}
    num_loads = {}
    for together in (1, 5):
        model = build_state(plan).model
        stream = model.weight_stream
        assert isinstance(stream, StreamedWeights)
        completed = BaseScores(settings, "float32", together=together)(model, BATCHES)
        scores[together] = [batch.extras["reference"] for batch in completed]
        num_loads[together] = stream.ring.num_loads
    assert all(map(torch.equal, scores[1], scores[5]))
    assert num_loads[5] <= 5 + 1 < 4 * 5 < num_loads[1]  # the next forward begins with the first


def test_borders_of_layers_wait_on_the_host() -> None:
    case = CASES["full"]
    results, tensors, _ = steps_of(case, together=5, num_steps=1, offload=True)
    expected_results, expected, _ = steps_of(case, together=None, num_steps=1)
    assert results == expected_results
    assert [n for n in expected if not torch.equal(tensors[n], expected[n])] == []


def test_a_trained_tied_matrix_differs_by_rounding_alone() -> None:
    """Its gradients as head come first, then those as embedding: two micro-batches change places."""
    case = {"config": replace(UNTIED, tie_embeddings=True)}
    results, tensors, _ = steps_of(case, together=5, num_steps=1)
    expected_results, expected, _ = steps_of(case, together=None, num_steps=1)
    assert results[0].loss == expected_results[0].loss
    assert results[0].grad_norm == pytest.approx(expected_results[0].grad_norm, rel=1e-5)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["full", "lora"])
def test_loads_are_counted_by_group(name: str) -> None:
    """2L - 2 of the first group, whose backward begins with the two layers that are there; so does what follows it."""
    config = replace(CASES[name]["config"], num_layers=5)
    case = CASES[name] | {"config": config}
    num_loads = {}
    for together in (1, 2, 5):
        _, _, stream = steps_of(case, together=together, num_steps=1)
        assert isinstance(stream, StreamedWeights)
        num_loads[together] = stream.ring.num_loads
    first, later = 2 * 5 - 2, 2 * 5 - 4
    assert num_loads == {1: first + 4 * later, 2: first + 2 * later, 5: first}
