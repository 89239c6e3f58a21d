"""The production loop on the simulated device, with the CPU's losses beside it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import simulated
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, RECIPE

from bloomery.data.prepare.prepare import prepare
from bloomery.monitor.events import StepDone
from bloomery.recipe.load import load_recipe
from bloomery.train import loop


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("prepared")
    (place / "text").mkdir()
    for number in range(40):
        lines = [
            f"def function_{number}_{i}(value):\n    return value * {i} + {number}\n"
            for i in range(8)
        ]
        (place / "text" / f"{number}.py").write_text("\n".join(lines))
    (place / "tiny.yaml").write_text(RECIPE)
    prepare(load_recipe(place / "tiny.yaml"), place / "prepared")
    return place / "prepared"


@pytest.fixture
def losses(prepared: Path, tmp_path: Path) -> Callable[..., dict[int, float]]:
    def run(device: str, **train: object) -> dict[int, float]:
        plan = tiny_plan(
            prepared,
            config=CONFIG,
            train={"device": device, **train},
            data={"pin_memory": device != "cpu"},
        )
        plan = plan.model_copy(
            update={"memory": plan.memory.model_copy(update={"limit": 4 * 2**30})}
        )
        events: list[object] = []
        run_dir = tmp_path / device
        run_dir.mkdir()
        loop.run(plan, run_dir=run_dir, emit=events.append, stop=lambda: False)
        return {event.step: event.loss for event in events if isinstance(event, StepDone)}

    return run


def test_losses_equal_those_of_the_cpu(losses: Callable[..., dict[int, float]]) -> None:
    simulated.clear()
    on_device = losses("cuda")
    assert simulated.report()["problem"] == {}
    assert simulated.report()["call"]["aten::mm"] > 0
    assert on_device == pytest.approx(losses("cpu"), rel=2e-7)
