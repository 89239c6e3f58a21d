"""A kernel that touches memory which is not its own: the run ends with the vendor's error, its cause and its cure."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import simulated
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, prepared_corpus

from bloomery.hardware.doctor.symptoms import match
from bloomery.monitor.events import StepDone
from bloomery.train import loop
from changed_machines import machine

SAVED_STEP = 2


@pytest.fixture(autouse=True)
def mended() -> Iterator[None]:
    yield
    simulated.mend()


def test_a_run_ends_with_the_error_of_its_kernel(tmp_path: Path) -> None:
    """Whatever the run does on its way out fails, too: the first error is the one that is told."""
    plan = tiny_plan(
        prepared_corpus(tmp_path),
        config=CONFIG,
        train={"device": "cuda", "steps": 5},
        data={"pin_memory": True},
        checkpoint={"every_steps": SAVED_STEP},
    )
    plan = plan.model_copy(update={"memory": plan.memory.model_copy(update={"limit": 2**30})})
    steps: list[int] = []

    def emit(event: object) -> None:
        if isinstance(event, StepDone):
            steps.append(event.step)
            if event.step == SAVED_STEP + 1:
                simulated.break_kernel("aten::mm")

    with pytest.raises(torch.AcceleratorError) as told:
        loop.run(plan, run_dir=tmp_path, emit=emit, stop=lambda: False)
    assert steps[-1] == SAVED_STEP + 1, "no step of wrong numbers is reported"
    checkpoints = [folder.name for folder in (tmp_path / "checkpoints").iterdir()]
    assert checkpoints == [f"step-{SAVED_STEP:08d}"], "nothing of a lost device is saved"

    vendor = "amd" if torch.version.hip else "nvidia"
    recorded = {"amd": "rx-6700-xt", "nvidia": "rtx-3090-old-driver"}[vendor]
    expected = {"amd": "hip-illegal-access", "nvidia": "cuda-illegal-access"}[vendor]
    symptoms = match(f"AcceleratorError: {told.value}", machine=machine(recorded))
    assert symptoms[0].id == expected
