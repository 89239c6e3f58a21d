"""Weights that stream, in the many orders in which a device may run their copies and the layers' work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import simulated
import torch
from steps_on_device import CASES, LAYERS, batches_of, streamed_plan

from bloomery.model.io.parameters import local
from bloomery.parallel.staging import Piece, StagedCopy, StagingRing
from bloomery.parallel.streamed import LayerRing, StreamedWeights, in_backward
from bloomery.parallel.transfers import CopyStream, CopyUnderWay
from bloomery.plan.types import RunPlan
from bloomery.train.objectives.build import build_objective
from bloomery.train.state import build_state
from bloomery.train.step import train_step

STEPS = 2
QUICK_ORDERS = 10
ORDERS = 200


@dataclass(frozen=True)
class Trained:
    """What two steps leave behind."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]

    def same_bits(self, other: "Trained") -> bool:
        return (
            self.losses == other.losses
            and self.grad_norms == other.grad_norms
            and all(torch.equal(self.weights[name], other.weights[name]) for name in other.weights)
        )


def trained(plan: RunPlan, *, is_recorded: bool = False) -> Trained:
    state = build_state(plan).model_and_optimizer
    objective = build_objective(plan)
    if is_recorded:
        simulated.record()
    results = [
        train_step(state, batches_of(step, plan), objective, plan=plan.train, lr_scale=1.0)
        for step in range(STEPS)
    ]
    torch.cuda.synchronize()
    return Trained(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        {
            name: local(parameter).detach().cpu().clone()
            for name, parameter in state.model.named_parameters()
            if parameter.requires_grad
        },
    )


@pytest.fixture(scope="module")
def resident() -> Callable[[str], Trained]:
    results: dict[str, Trained] = {}

    def of(case: str) -> Trained:
        if case not in results:
            results[case] = trained(streamed_plan(case, stream="off"))
        return results[case]

    return of


def first_wrong_order(streamed: Trained, expected: Trained, orders: int) -> int | None:
    """The recorded order, which is that of latest copies, is the first of them. None: all have the expected bits."""
    if not streamed.same_bits(expected):
        return 1
    return next((seed + 1 for seed in range(1, orders) if simulated.replay(seed)), None)


@pytest.mark.parametrize(
    ("case", "orders"),
    [
        ("full", QUICK_ORDERS),
        ("lora", QUICK_ORDERS),
        ("full, two per load", QUICK_ORDERS),
        ("full, staged", QUICK_ORDERS),
        *(pytest.param(case, ORDERS, marks=pytest.mark.soak) for case in CASES),
    ],
)
def test_no_order_changes_a_bit(case: str, orders: int, resident: Callable[[str], Trained]) -> None:
    expected = resident(case)
    simulated.clear()
    streamed = trained(streamed_plan(case), is_recorded=True)
    assert simulated.report()["problem"] == {}
    assert simulated.recorded() > 5_000  # pieces of work
    assert first_wrong_order(streamed, expected, orders) is None


# One wait less


def layers_are_used_before_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyUnderWay, "finish", lambda _copy: None)


def buffers_are_overwritten_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda _stream, _other: None)


def gradients_are_read_before_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyUnderWay, "wait", lambda _copy: None)


def sums_are_used_before_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyStream, "synchronize", lambda _copies: None)


def gradients_are_freed_while_they_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = CopyUnderWay.__init__

    def begin_without(self: CopyUnderWay, _tensors: object, end: object, work: object) -> None:
        begin(self, (), end, work)

    monkeypatch.setattr(CopyUnderWay, "__init__", begin_without)


def the_last_layer_is_taken_for_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the buffer of the layer before it, where backward begins."""
    find = LayerRing._with

    def find_wrong(ring: LayerRing, index: int) -> Any:
        return find(ring, index - 1 if index == LAYERS - 1 and in_backward() else index)

    monkeypatch.setattr(LayerRing, "_with", find_wrong)


def nobody_says_that_weights_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamedWeights, "weights_changed", lambda _weights: None)


def updated_layers_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerRing, "forget", lambda _ring: None)


def staged_layers_are_used_before_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(copy: StagedCopy) -> None:
        if copy._queued is not None:
            copy._queued.result()
            copy._queued = None

    monkeypatch.setattr(StagedCopy, "finish", finish)


def buffers_are_filled_while_the_work_before_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = StagingRing._queue

    def queue_at_once(ring: StagingRing, pieces: Sequence[Piece], work_before: Any) -> Any:
        return queue(ring, pieces, torch.cuda.Event())  # of nothing

    monkeypatch.setattr(StagingRing, "_queue", queue_at_once)


FAULTS: dict[str, Sequence[Callable[[pytest.MonkeyPatch], None]]] = {
    "full": (
        layers_are_used_before_they_arrive,
        buffers_are_overwritten_while_they_are_read,
        gradients_are_read_before_they_arrive,
        sums_are_used_before_they_arrive,
        gradients_are_freed_while_they_leave,
        the_last_layer_is_taken_for_one_that_is_there,
        nobody_says_that_weights_changed,
        updated_layers_are_not_forgotten,
    ),
    "full, staged": (
        staged_layers_are_used_before_they_arrive,
        buffers_are_filled_while_the_work_before_reads_them,
        gradients_are_read_before_they_arrive,
    ),
    "lora": (
        layers_are_used_before_they_arrive,
        buffers_are_overwritten_while_they_are_read,
        the_last_layer_is_taken_for_one_that_is_there,
    ),
}


@pytest.mark.parametrize(
    ("case", "plant"),
    [
        pytest.param(
            case,
            plant,
            id=f"{case}, {plant.__name__}",
            marks=pytest.mark.soak if case == "lora" else [],
        )
        for case, faults in FAULTS.items()
        for plant in faults
    ],
)
def test_a_missing_wait_is_found_within_ten_orders(
    case: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    resident: Callable[[str], Trained],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = resident(case)
    simulated.problem_is_error(False)  # a real device says nothing
    try:
        with monkeypatch.context() as patches:
            plant(patches)
            streamed = trained(streamed_plan(case), is_recorded=True)
            found = first_wrong_order(streamed, expected, 10)
    finally:
        torch.cuda.synchronize()
        simulated.problem_is_error(True)
        simulated.clear()
    assert found is not None
