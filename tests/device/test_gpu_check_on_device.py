"""The parts of `bloomery doctor --gpu-check` on the simulated device: what they say of it, and of one with a fault.

Parts that start processes, or take minutes, run in `make soak`.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import simulated
import torch

from bloomery.bench import rig
from bloomery.bench.gpu_check import kernels, use
from bloomery.bench.gpu_check.child import PartJob
from bloomery.bench.gpu_check.parts import PARTS
from bloomery.bench.gpu_check.results import Outcome, Row, outcome_of, read_result
from bloomery.model.decoder import Decoder
from bloomery.parallel.transfers import CopyUnderWay
from bloomery.train import process
from bloomery.train.optim.build import OptimizersContainer

pytestmark = pytest.mark.usefixtures("own_cache")
WRONG_OPERATOR = ("aten::mm", 1.1)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A device with a fault must not be remembered as one without, nor the other way round."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    place = Path.cwd()
    variables = dict(os.environ)
    yield
    # A part sets the variables of its plan in its process, which here is that of the tests.
    os.environ.clear()
    os.environ.update(variables)
    simulated.faulty("", 1.0)
    simulated.problem_is_error(True)
    # The part out-of-memory caps the allocator of its process.
    torch.cuda.set_per_process_memory_fraction(1.0)
    simulated.clear()
    os.chdir(place)


@pytest.fixture
def rows_of_part(tmp_path) -> Callable[[str], list[Row]]:
    num_parts = 0

    def run(name: str) -> list[Row]:
        nonlocal num_parts
        num_parts += 1
        folder = tmp_path / f"part-{num_parts}"
        folder.mkdir()
        part = next(part for part in PARTS if part.name == name)
        module, _, function = part.function.partition(":")
        job = PartJob(
            tiny=True, folder=folder, device="cuda", seconds=400.0, begin=lambda _case: None
        )
        return list(getattr(import_module(f"bloomery.bench.gpu_check.{module}"), function)(job))

    return run


# Faults, each in one property of a device or of the code that drives it.


def wrong_operator(_monkeypatch) -> None:
    simulated.faulty(*WRONG_OPERATOR)


def wrong_operator_in_children(monkeypatch) -> None:
    operator, factor = WRONG_OPERATOR
    monkeypatch.setenv("BLOOMERY_SIMULATED_FAULT", f"{operator},{factor}")


def wrong_operator_in_completions(monkeypatch) -> None:
    """Of the command line's: what trains, evaluates and serves is right."""
    python_module = use.python_module
    fault = "BLOOMERY_SIMULATED_FAULT"

    def program(*words: str) -> list[str]:
        if "generate" in words:
            monkeypatch.setenv(fault, "{},{}".format(*WRONG_OPERATOR))
        else:
            monkeypatch.delenv(fault, raising=False)
        return python_module(*words)

    monkeypatch.setattr(use, "python_module", program)


def wrong_batched_product_in_children(monkeypatch) -> None:
    # Attention multiplies matrices of heads.
    monkeypatch.setenv("BLOOMERY_SIMULATED_FAULT", "aten::bmm,1.1")


def wait_in_each_forward(monkeypatch) -> None:
    forward = Decoder.forward

    def waiting(self, *inputs, **options):
        next(self.parameters()).sum().item()
        return forward(self, *inputs, **options)

    monkeypatch.setattr(Decoder, "forward", waiting)


def copies_are_not_waited_for(monkeypatch) -> None:
    # A real device says nothing: it computes with what is there.
    simulated.problem_is_error(False)
    monkeypatch.setattr(CopyUnderWay, "finish", lambda _copy: None)


def states_are_not_restored(monkeypatch) -> None:
    load = OptimizersContainer.load

    def load_nothing(self, _states, _scalars, **stages):
        load(self, {}, {}, **stages)

    monkeypatch.setattr(OptimizersContainer, "load", load_nothing)


def tensor_is_kept(monkeypatch) -> None:
    build = rig.Rig.__init__

    def building(self, plan, *draw):
        build(self, plan, *draw)
        self.kept = torch.zeros(2**24, device=plan.train.device)  # 64 MiB

    monkeypatch.setattr(rig.Rig, "__init__", building)


def cap_is_ignored(monkeypatch) -> None:
    monkeypatch.setattr(process, "cap_memory", lambda _device, _limit_bytes: None)


def backend_is_wrong(monkeypatch) -> None:
    attend = kernels.attend

    def wrong(*inputs, backend, **options):
        out = attend(*inputs, backend=backend, **options)
        return 1.1 * out if backend == "blockwise" else out

    monkeypatch.setattr(kernels, "attend", wrong)


def nothing_is_learned(monkeypatch) -> None:
    monkeypatch.setattr(rig, "LEARNING_LR_SCALE", 0.0)


def very_wrong_operator(_monkeypatch) -> None:
    # No norm follows the product of the head.
    simulated.faulty("aten::mm", 100.0)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Outcome]] = {
    "probes": (wrong_operator_in_children, "wrong"),
    "step": (wrong_operator, "wrong"),
    "same": (wrong_operator, "wrong"),
    "races": (copies_are_not_waited_for, "wrong"),
    "waits": (wait_in_each_forward, "wrong"),
    "resume": (states_are_not_restored, "wrong"),
    "rollout": (wrong_operator, "wrong"),
    "kernels": (wrong_batched_product_in_children, "wrong"),
    "ranks": (wrong_operator_in_children, "wrong"),
    "memory": (tensor_is_kept, "wrong"),
    "out-of-memory": (cap_is_ignored, "wrong"),
    "stream": (copies_are_not_waited_for, "wrong"),
    "use": (wrong_operator_in_completions, "wrong"),
    "attention": (backend_is_wrong, "wrong"),
    "qlora": (nothing_is_learned, "wrong"),
    "lora": (nothing_is_learned, "wrong"),
    "full": (nothing_is_learned, "wrong"),
    "theirs-qlora": (very_wrong_operator, "wrong"),
    "theirs-lora": (very_wrong_operator, "wrong"),
    "theirs-full": (very_wrong_operator, "wrong"),
}
QUICK = ("attention",)
NAMES = [
    pytest.param(part.name, marks=[] if part.name in QUICK else pytest.mark.soak) for part in PARTS
]


def test_each_part_has_a_fault():
    assert list(FAULTS) == [part.name for part in PARTS]


@pytest.mark.parametrize("name", NAMES)
def test_a_part_finds_its_fault_and_nothing_without_it(name, rows_of_part, monkeypatch):
    rows = rows_of_part(name)
    healthy = outcome_of(rows)
    assert healthy in ("ok", "skipped"), [
        row for row in rows if row.outcome not in ("ok", "skipped")
    ]
    if healthy == "skipped":
        pytest.skip(rows[0].message)
    plant, outcome = FAULTS[name]
    plant(monkeypatch)
    bad_rows = rows_of_part(name)
    assert outcome_of(bad_rows) == outcome, [row.message for row in bad_rows]


@pytest.mark.soak
def test_a_run_that_refuses_the_device_is_wrong_and_the_rest_is_not_tried(
    rows_of_part, monkeypatch
):
    wrong_operator_in_children(monkeypatch)
    refused, *others = rows_of_part("use")
    assert refused.outcome == "wrong" and "computes wrong results" in refused.message
    assert {row.outcome for row in others} == {"skipped"}


# Faults that one part alone can see.
LOCAL = ("waits", "resume", "memory", "out-of-memory", "attention", "qlora")


@pytest.mark.soak
@pytest.mark.parametrize("name", LOCAL)
def test_a_fault_of_one_part_fails_that_part_alone(name, rows_of_part, monkeypatch):
    FAULTS[name][0](monkeypatch)
    messages = {}
    for other in LOCAL:
        rows = rows_of_part(other)
        if outcome_of(rows) not in ("ok", "skipped"):
            messages[other] = [row.message for row in rows]
    assert list(messages) == [name], messages


@pytest.mark.soak
def test_the_whole_check_on_the_simulated_device(tmp_path):
    """Every part in its child, as a user starts it; the file is one of a card that was not there."""
    command = [sys.executable, "-m", "bloomery", "doctor", "--gpu-check", "--tiny", "--yes"]
    ended = subprocess.run(
        [*command, "--limit", "2h"], cwd=tmp_path, capture_output=True, text=True
    )
    result = read_result(tmp_path / "gpu-check.json")
    bad_rows = [
        (part.part, row) for part in result.parts for row in part.rows if row.outcome == "wrong"
    ]
    assert ended.returncode == 0, (bad_rows, result.failed, ended.stdout)
    assert [part.part for part in result.parts] == [part.name for part in PARTS]
    assert result.card.device == "cuda" and result.card.is_simulated
    print({part.part: part.seconds for part in result.parts})
