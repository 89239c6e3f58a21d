"""What a measurement makes of the table's estimate: never more than the steps that were measured can carry."""

from dataclasses import asdict, replace

import pytest

import points_for_tests
from bloomery.core.units import GIB
from bloomery.facts.config import ModelConfig
from bloomery.hardware.calibration import OWN, Calibration, Point
from bloomery.plan.estimate.measured import compile_gain, corrected, corrected_memory, nearest
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.types import Estimate, MemoryEstimate

CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    max_positions=128,
)
LOAD = StepShape(
    model=TrainedModel(CONFIG),
    sequence_length=128,
    micro_batch_size=4,
    precision="bfloat16",
    optimizer="adamw",
    attention="mask",
    checkpointing="none",
    compiled=False,
    score_chunk=512,
    context_bytes=0.0,
    on_gpu=False,
)
POINT = points_for_tests.POINT.model_copy(update={"tokens_per_second": 512.0})
PARTS = {
    "matmul": Estimate(value=3.0, low=1.0, high=9.0, origin="table"),
    "attention": Estimate(value=1.0, low=0.5, high=2.0, origin="table"),
}


def card(
    *points: Point, contributor: str = OWN, config: ModelConfig = CONFIG, **changes
) -> Calibration:
    facts = {
        "device": "a CPU",
        "arch": "avx2",
        "cores": 2,
        "memory_gib": 16.0,
        "torch": "2.13.0+cpu",
        "bloomery": "0.1.0",
        "model": asdict(config),
        "parameters": 1000,
        "text": "random",
        "contributor": contributor,
        "day": "2026-11-21",
        "points": points or (POINT,),
    }
    return Calibration.model_validate(facts | changes)


def table(load: StepShape, tokens: int) -> float:
    """A second for 1,024 tokens of this width; twice the width takes four times as long."""
    return tokens / 1024 * (load.config.hidden_size / 64) ** 2


def test_the_same_shape_takes_the_measured_time():
    """The table says 1 s for the card's 1,024 tokens and it took 2: every part doubles, within a tenth."""
    found = corrected(PARTS, LOAD, [card()], seconds=table)
    assert {name: part.value for name, part in found.items()} == {"matmul": 6.0, "attention": 2.0}
    assert all(part.origin == "measured" for part in found.values())
    assert found["attention"].low == pytest.approx(2 / 1.1) and found[
        "attention"
    ].high == pytest.approx(2.2)


def test_another_width_takes_the_tables_ratio_and_a_wider_interval():
    wider = replace(LOAD, model=TrainedModel(replace(CONFIG, hidden_size=128)))
    found = corrected(PARTS, wider, [card()], seconds=table)
    assert found["attention"].value == 2.0 and found["attention"].high == pytest.approx(2 * 1.2)


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "float32"},
        {"compiled": True},
        {"model": TrainedModel(replace(CONFIG, hidden_size=1024))},
    ],
)
def test_another_precision_or_a_far_width_says_nothing(changes):
    assert corrected(PARTS, replace(LOAD, **changes), [card()], seconds=table) == PARTS


def test_no_cards_no_table_and_strange_models_leave_the_table_alone():
    assert corrected(PARTS, LOAD, [], seconds=table) == PARTS
    assert corrected(PARTS, LOAD, [card()], seconds=lambda load, tokens: None) == PARTS
    assert (
        corrected(PARTS, LOAD, [card(model={"hidden_size": 64, "new": 1})], seconds=table) == PARTS
    )
    assert corrected(PARTS, LOAD, [card(model={})], seconds=table) == PARTS


def test_own_measurements_come_before_given_ones_and_near_ones_before_far_ones():
    given, own = card(contributor="Ada"), card(POINT.model_copy(update={"micro_batch_size": 32}))
    known = nearest(LOAD, [given, own])
    assert known is not None and known.own and known.distance == 3.0
    assert (
        nearest(LOAD, [given]).reason
        == "measured by Ada on a CPU on 2026-11-21 with 4 x 128 tokens"
    )
    near = POINT.model_copy(update={"micro_batch_size": 8})
    assert nearest(LOAD, [card(own.points[0], near)]).point == near


def test_a_given_card_is_believed_less():
    found = corrected(PARTS, LOAD, [card(contributor="Ada")], seconds=table)["attention"]
    assert found.high == pytest.approx(2 * 1.25)


def held(load: StepShape) -> MemoryEstimate:
    """A GiB for the weights and a half for each row; on a GPU half a GiB of context besides."""
    parts = {"weights": 1.0 * GIB, "activations": 0.5 * GIB * load.micro_batch_size}
    parts |= {"context": 0.5 * GIB} if load.on_gpu else {}
    total = sum(parts.values())
    return MemoryEstimate(
        parts=parts, low=total * 0.8, high=total * 1.2, limit=20.0 * GIB, origin="table"
    )


def test_memory_takes_the_measured_peak():
    """The table says 3 GiB for 4 rows; 3.6 were measured: a fifth more of everything, within 5%."""
    cards = [card(POINT.model_copy(update={"peak_gib": 3.6}))]
    found = corrected_memory(held(LOAD), LOAD, cards, memory=held)
    assert found.total == pytest.approx(3.6 * GIB) and found.origin == "measured"
    assert found.high == pytest.approx(3.6 * 1.05 * GIB) and found.limit == 20.0 * GIB
    prepared = replace(LOAD, model=TrainedModel(replace(CONFIG, bos_token_id=1)))
    assert corrected_memory(held(prepared), prepared, cards, memory=held) == found
    twice = replace(LOAD, micro_batch_size=8)
    found = corrected_memory(held(twice), twice, cards, memory=held)
    assert found.total == pytest.approx(6.0 * GIB) and found.high == pytest.approx(6.0 * 1.1 * GIB)


def test_memory_of_a_gpu_is_measured_without_its_context():
    load = replace(LOAD, on_gpu=True)
    found = corrected_memory(
        held(load), load, [card(POINT.model_copy(update={"peak_gib": 3.6}))], memory=held
    )
    assert found.parts["context"] == 0.5 * GIB and found.total == pytest.approx(4.1 * GIB)


@pytest.mark.parametrize(
    "load",
    [
        replace(LOAD, micro_batch_size=64),
        replace(LOAD, model=TrainedModel(replace(CONFIG, num_layers=3))),
    ],
    ids=["tokens", "model"],
)
def test_memory_of_another_model_or_of_far_more_tokens_stays_the_tables(load):
    assert corrected_memory(held(load), load, [card()], memory=held) == held(load)


def test_a_cpus_run_is_never_planned_below_the_tables_bytes():
    """A measured step maps no text, examines nothing and copies no checkpoint; a run's process holds all of that."""
    light = [card(POINT.model_copy(update={"peak_gib": held(LOAD).total / GIB / 2}))]
    assert corrected_memory(held(LOAD), LOAD, light, memory=held).total == held(LOAD).total


def test_what_compiling_gains_is_one_cards_best_of_both():
    compiled = POINT.model_copy(update={"compiled": True, "tokens_per_second": 640.0})
    slower = POINT.model_copy(update={"tokens_per_second": 400.0, "micro_batch_size": 1})
    asked = {"model": CONFIG, "precision": "bfloat16", "setting": ""}
    assert compile_gain([card(), card(POINT, slower, compiled)], **asked) == pytest.approx(
        640 / 512
    )
    assert compile_gain([card(), card(compiled)], **asked) is None
    assert compile_gain([card(POINT, compiled)], **asked | {"precision": "float32"}) is None
    assert compile_gain([card(POINT, compiled)], **asked | {"setting": "lora"}) is None
    other = replace(CONFIG, num_layers=3)
    assert compile_gain([card(POINT, compiled)], **asked | {"model": other}) is None
