"""Steps of every objective run on fake tensors, and take the memory that real ones take."""

from dataclasses import replace

import pytest
import torch
from memory_tracker import peak_bytes
from steps_for_tests import _batch, counted, simulated, small_plan, some

from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.plan.types import DatasetFacts, StoredScores, TextAlignment
from bloomery.recipe.objectives import (
    Distill,
    Kto,
    OnPolicyDistill,
    OrPo,
    Preference,
    Reward,
    SimPo,
)
from bloomery.recipe.schema import Lora
from bloomery.simulate.step import weights
from bloomery.train.objectives.build import build_objective, with_text_structure
from bloomery.train.state import build_state
from bloomery.train.step import train_step

ASKED = {
    "dpo": Preference(kind="dpo"),
    "simpo": SimPo(kind="simpo"),
    "orpo": OrPo(kind="orpo"),
    "kto": Kto(kind="kto"),
    "reward": Reward(kind="reward"),
}


def of_objective(plan, asked, **changes):
    head = "values" if isinstance(asked, Reward) else "tokens"
    model = plan.model.model_copy(
        update={"config": replace(plan.model.config, head=head), **changes}
    )
    return plan.model_copy(update={"objective": asked, "model": model})


def measured(plan, teacher=None) -> float:
    """As `steps_for_tests.measured`, of the plan's own objective."""
    torch.set_num_threads(1)
    model_and_optimizer, objective = (
        build_state(plan).model_and_optimizer,
        build_objective(plan, lambda _: teacher),
    )
    batches = [
        with_text_structure(_batch(plan), plan) for _ in range(min(2, plan.train.accumulation))
    ]

    def step() -> None:
        train_step(model_and_optimizer, batches, objective, plan=plan.train, lr_scale=1.0)

    step()
    step()
    models = [model_and_optimizer.model] + ([] if teacher is None else [teacher])
    held = [tensor for model in models for tensor in weights(model)]
    held += model_and_optimizer.optimizer.named_tensors().values()
    held += [tensor for batch in batches for tensor in batch.tensors()]
    return sum(tensor.nbytes for tensor in held) + peak_bytes(step)


@pytest.mark.parametrize("kind", some(ASKED, {"dpo"}))
def test_simulated_steps_take_what_measured_ones_do(kind):
    plan = of_objective(small_plan(micro_batches=2), ASKED[kind])
    assert simulated(plan) == pytest.approx(measured(plan), rel=0.05)
    assert counted(plan) == pytest.approx(simulated(plan), rel=0.05)


@pytest.mark.soak
def test_a_reference_without_adapters_takes_no_memory_of_its_own(tmp_path):
    plan = small_plan(micro_batches=2, adapter={"kind": "lora", "rank": 4})
    write_model(model_state(fresh_decoder(plan.model.config, seed=0)), plan.model.config, tmp_path)
    dpo, simpo = (
        of_objective(plan, asked, source=tmp_path)
        for asked in (Preference(kind="dpo"), SimPo(kind="simpo"))
    )
    assert isinstance(dpo.adapter, Lora)
    assert simulated(dpo) == pytest.approx(simulated(simpo), rel=0.02)
    assert simulated(dpo) == pytest.approx(measured(dpo), rel=0.05)


@pytest.mark.soak
def test_a_teacher_is_counted(tmp_path):
    plan = small_plan(micro_batches=2)
    write_model(model_state(fresh_decoder(plan.model.config, seed=0)), plan.model.config, tmp_path)
    asked = Distill(kind="distill", teacher=str(tmp_path))
    plan = of_objective(plan, asked)
    teacher = (
        fresh_decoder(plan.model.config, seed=0, attention=plan.model.attention)
        .eval()
        .requires_grad_(False)
    )
    assert simulated(plan) == pytest.approx(measured(plan, teacher), rel=0.05)
    assert counted(plan) == pytest.approx(simulated(plan), rel=0.08)


LAYERS = 12


def test_of_a_teacher_that_streams_the_buffers_are_counted(tmp_path):
    plan = small_plan(micro_batches=2)
    deep = replace(plan.model.config, num_layers=LAYERS)
    write_model(model_state(fresh_decoder(deep, seed=0)), deep, tmp_path)
    bytes_of = {}
    for stream in ("off", "layers"):
        asked = Distill(kind="distill", teacher=str(tmp_path), teacher_stream=stream)
        streamed = of_objective(plan, asked)
        bytes_of[stream] = simulated(streamed)
        assert counted(streamed) == pytest.approx(bytes_of[stream], rel=0.08)
    blocks = fresh_decoder(deep, seed=0).model.layers
    layer_bytes = sum(parameter.nbytes for parameter in blocks[0].parameters())
    # Three of its layers are on the device at once, and the hidden states of the step.
    assert bytes_of["off"] - bytes_of["layers"] > (LAYERS - 5) * layer_bytes


def test_of_a_teacher_on_another_device_the_output_layer_is_counted(tmp_path):
    plan = small_plan(micro_batches=2)
    deep = replace(plan.model.config, num_layers=LAYERS)
    write_model(model_state(fresh_decoder(deep, seed=0)), deep, tmp_path)
    asked = Distill(kind="distill", teacher=str(tmp_path))
    resident = of_objective(plan, asked)
    train = resident.train.model_copy(update={"scoring_devices": 1})
    scored = resident.model_copy(update={"train": train})
    blocks = fresh_decoder(deep, seed=0).model.layers
    of_layers = sum(parameter.nbytes for parameter in blocks.parameters())
    assert simulated(resident) - simulated(scored) > 0.9 * of_layers
    assert counted(scored) == pytest.approx(simulated(scored), rel=0.08)


def test_a_teacher_of_another_tokenizer_and_stored_scores_are_simulated(tmp_path):
    plan = small_plan(micro_batches=2)
    write_model(model_state(fresh_decoder(plan.model.config, seed=0)), plan.model.config, tmp_path)
    teacher = (
        fresh_decoder(plan.model.config, seed=0, attention=plan.model.attention)
        .eval()
        .requires_grad_(False)
    )
    known = DatasetFacts(
        sequences_per_epoch=1,
        tokens=1,
        vocab_size=None,
        alignment=TextAlignment(tokens=1, aligned=1, alone=1),
        teacher_scores=StoredScores(top=16, token_bytes=128, bytes=0),
    )
    plan = plan.model_copy(update={"dataset": known})
    asked = OnPolicyDistill(kind="on_policy_distill", teacher=str(tmp_path), estimator="sampled")
    spans = of_objective(plan, asked)
    assert simulated(spans) == pytest.approx(measured(spans, teacher), rel=0.05)
    no_spans = known.model_copy(update={"alignment": None})
    stored = of_objective(plan, Distill(kind="distill", teacher_scores="none"))
    stored = stored.model_copy(update={"dataset": no_spans})
    assert simulated(stored) == pytest.approx(measured(stored), rel=0.05)
