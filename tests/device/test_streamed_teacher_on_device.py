"""A teacher whose layers stream, in the many orders in which a device may run their copies and its forward."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simulated
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, prepared_corpus
from test_streamed_schedules import ORDERS, QUICK_ORDERS, first_wrong_order, trained

from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.parallel.transfers import CopyUnderWay
from bloomery.plan.types import RunPlan
from bloomery.recipe.objectives import Distill
from bloomery.train.objectives.teacher import TeacherPlan, load_teacher
from device_for_tests import MEMORY_LIMIT

LAYERS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, and a teacher of its tokenizer."""
    folder = tmp_path_factory.mktemp("taught")
    teacher = folder / "teacher"
    load_tokenizer(prepared_corpus(folder)).save(teacher)
    config = replace(CONFIG, num_layers=LAYERS)
    write_model(model_state(fresh_decoder(config, seed=3)), config, teacher)
    return folder


def plan_of(folder: Path, stream: str, **settings: Any) -> RunPlan:
    plan = tiny_plan(
        folder / "prepared",
        config=CONFIG,
        data={"sequence_length": 16, "pin_memory": True},
        memory={"limit": MEMORY_LIMIT},
        train={
            "device": "cuda",
            "micro_batch_size": 1,
            "accumulation": 2,
            "tokens_per_step": 32,
        },
    )
    objective = Distill(
        kind="distill", teacher=str(folder / "teacher"), teacher_stream=stream, **settings
    )
    return plan.model_copy(update={"objective": objective})


@pytest.mark.parametrize("orders", [QUICK_ORDERS, pytest.param(ORDERS, marks=pytest.mark.soak)])
@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_no_order_changes_a_bit(folder: Path, quantize: str, orders: int) -> None:
    expected = trained(plan_of(folder, "off", teacher_quantize=quantize))
    plan = plan_of(folder, "layers", teacher_quantize=quantize)
    load_teacher(TeacherPlan.of(plan))  # its file is read before the recorded steps
    simulated.clear()
    streamed = trained(plan, is_recorded=True)
    assert simulated.report()["problem"] == {}
    assert simulated.recorded() > 1_000  # pieces of work
    assert first_wrong_order(streamed, expected, orders) is None


def layers_are_used_before_they_arrive(patches: pytest.MonkeyPatch) -> None:
    patches.setattr(CopyUnderWay, "finish", lambda _copy: None)


def buffers_are_overwritten_while_they_are_read(patches: pytest.MonkeyPatch) -> None:
    patches.setattr(torch.cuda.Stream, "wait_stream", lambda _stream, _other: None)


@pytest.mark.parametrize(
    "plant", [layers_are_used_before_they_arrive, buffers_are_overwritten_while_they_are_read]
)
def test_a_missing_wait_is_found_within_ten_orders(
    folder: Path,
    plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = trained(plan_of(folder, "off"))
    plan = plan_of(folder, "layers")
    load_teacher(TeacherPlan.of(plan))
    simulated.problem_is_error(False)  # a real device says nothing
    try:
        with monkeypatch.context() as patches:
            plant(patches)
            found = first_wrong_order(trained(plan, is_recorded=True), expected, 10)
    finally:
        torch.cuda.synchronize()
        simulated.problem_is_error(True)
        simulated.clear()
    assert found is not None


def test_its_layers_are_on_the_host(folder: Path) -> None:
    teacher = load_teacher(TeacherPlan.of(plan_of(folder, "layers")))
    assert teacher.device.type == "cuda"
    assert {parameter.device.type for parameter in teacher.model.layers.parameters()} == {"cpu"}
