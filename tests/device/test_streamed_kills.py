"""Runs whose weights stream, ended by SIGKILL in a copy and in an update: resumed, they are those that nobody ended."""

import os
import random
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, assert_same_tensors, prepared_corpus
from safetensors.torch import load_file

from bloomery.infer.model_folder import newest_valid
from bloomery.plan.types import RunPlan
from device_for_tests import MEMORY_LIMIT
from ranks import Ranks, losses, train, train_here

STEPS = 6
SAVED = 3  # the only checkpoint before the last


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_corpus(tmp_path_factory.mktemp("corpus"))


def streamed_plan(corpus: Path) -> RunPlan:
    """Two micro-batches of a step; one epoch's order of sequences goes on after a resume."""
    return tiny_plan(
        corpus,
        config=CONFIG,
        train={
            "steps": STEPS,
            "device": "cuda",
            "stream": "layers",
            "activation_checkpointing": "full",
        },
        data={"pin_memory": True},
        memory={"limit": MEMORY_LIMIT},
        checkpoint={"every_steps": SAVED, "keep": 3},
    )


def train_until_killed(plan_json: str, folder: str, place: str, count: int) -> list[Any]:
    """SIGKILL at the `count`-th time that the run is at the place, after its checkpoint."""
    from bloomery.parallel.transfers import CopyStream
    from bloomery.train.optim.build import OptimizersContainer

    checkpoint = Path(folder) / "checkpoints" / f"step-{SAVED:08d}"
    visits = 0

    def visit() -> None:
        nonlocal visits
        visits += checkpoint.exists()
        if visits == count:
            os.kill(os.getpid(), signal.SIGKILL)

    if place == "copy":
        run_copy = CopyStream.run_after_work

        def copy_and_visit(self: CopyStream, tensors: Any, copy: Callable[[], object]) -> Any:
            def copy_then_visit() -> None:
                copy()
                visit()

            return run_copy(self, tensors, copy_then_visit)

        CopyStream.run_after_work = copy_and_visit  # type: ignore[method-assign]
    else:
        # Weights have changed, and neither the step counts nor the device know it.
        step = OptimizersContainer.step

        def update_and_visit(
            self: OptimizersContainer, lr_scale: float, *, gradient_factor: float = 1.0
        ) -> None:
            step(self, lr_scale, gradient_factor=gradient_factor)
            visit()

        OptimizersContainer.step = update_and_visit  # type: ignore[method-assign]
    return train_here(plan_json, folder, None, None)


def tensors_of(folder: Path) -> dict[str, Any]:
    return {
        f"{file.stem}/{name}": tensor
        for file in (folder / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.soak
@pytest.mark.parametrize("place", ["copy", "update"])
def test_a_killed_run_resumes_bitwise(corpus: Path, tmp_path: Path, place: str) -> None:
    plan = streamed_plan(corpus)
    whole = train(plan, tmp_path / "whole")
    dice = random.Random(place)
    most = {"copy": 8, "update": 2}[place]
    for number in range(2):
        folder = tmp_path / f"killed-{number}"
        folder.mkdir()
        words = (plan.model_dump_json(), str(folder), place, dice.randint(1, most))
        with closing(Ranks(1)) as doomed, pytest.raises((AssertionError, EOFError)):
            doomed.call(train_until_killed, *words)
        problems: list[str] = []
        checkpoint = newest_valid(folder / "checkpoints", on_damage=problems.append)
        assert problems == [] and checkpoint is not None
        assert checkpoint.name == f"step-{SAVED:08d}"
        rest = train(plan, folder, resume_from=checkpoint)
        expected = {step: loss for step, loss in losses(whole).items() if step > SAVED}
        assert losses(rest) == expected and len(expected) == STEPS - SAVED
        assert_same_tensors(tensors_of(folder), tensors_of(tmp_path / "whole"))
