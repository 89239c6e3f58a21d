"""A source that is no loader: the loop takes what it returns, and the cursor goes by what it consumed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType

import pytest
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run, assert_same_tensors

from bloomery.data.order import Cursor
from bloomery.train import set_up
from bloomery.train.batch_source import BatchSource, SourceInputs, StepBatches, open_loader
from bloomery.train.checkpoint.saver import read_state

PROMPTS_PER_STEP = 3


class Repeated:
    """Each step trains on micro-batches of the sequences after the cursor, but consumes three of them."""

    def __init__(self, inputs: SourceInputs) -> None:
        self._state = inputs.state
        self._loader = open_loader(inputs.plan.data, "train", seed=inputs.plan.train.seed)

    @contextmanager
    def steps(self, plan) -> Iterator[Iterator[StepBatches]]:
        yield self._steps(plan.train)

    def _steps(self, train) -> Iterator[StepBatches]:
        while True:
            cursor = self._state.cursor
            batches = [
                self._loader.batch(
                    Cursor(cursor.seed, cursor.consumed + number), train.micro_batch_size
                )
                for number in range(train.accumulation)
            ]
            yield StepBatches(batches, PROMPTS_PER_STEP)


@pytest.fixture
def plan(prepared, monkeypatch):
    builder: Callable[[SourceInputs], BatchSource] = Repeated
    monkeypatch.setattr(set_up, "SOURCES", MappingProxyType({"dataset": builder}))
    return tiny_plan(prepared, config=CONFIG, train={"steps": 6}, checkpoint={"every_steps": 3})


def test_the_cursor_advances_by_what_a_source_consumed_and_a_run_resumes(plan, tmp_path):
    whole = Run(plan, tmp_path / "whole")
    assert read_state(whole.checkpoint(6))["cursor"]["consumed"] == 6 * PROMPTS_PER_STEP
    first = Run(plan, tmp_path / "halves", stop_after=3)
    second = Run(plan, tmp_path / "halves", resume_from=first.checkpoint(3))
    assert {**first.losses(), **second.losses()} == whole.losses()
    assert_same_tensors(second.tensors(6), whole.tensors(6))
