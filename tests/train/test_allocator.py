"""What PyTorch's allocator holds is told at the pace of vitals; no GPU is here, so its statistics are made up."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run

from bloomery.core.units import GIB
from bloomery.monitor.events import DeviceStats, StepHealth
from bloomery.train import loop, step_report
from bloomery.train.process import allocator_sample, training_device

MACHINES = Path(__file__).parents[1] / "machines"
STATS = {
    "allocated_bytes.all.current": 3 * GIB,
    "allocated_bytes.all.peak": 9 * GIB,
    "reserved_bytes.all.current": 8 * GIB,
    "inactive_split_bytes.all.current": 2 * GIB,
    "num_alloc_retries": 4,
}


def test_what_lies_between_tensors_is_fragmentation_and_a_free_segment_is_not():
    told = allocator_sample(STATS, step=7, device=(1, "RX 6700 XT"))
    assert (told.step, told.device, told.name) == (7, 1, "RX 6700 XT")
    assert (told.allocated_gib, told.reserved_gib, told.fragmentation, told.alloc_retries) == (
        3.0,
        8.0,
        0.25,
        4,
    )
    assert told.memory_gib is None and told.seconds == 0
    assert allocator_sample({}, step=1, device=(0, "")).fragmentation == 0


def test_the_device_is_the_one_that_the_profile_chose(tmp_path):
    assert training_device(tmp_path / "machine.json") == (0, "")
    number, name = training_device(MACHINES / "h200.json")
    assert (number, "H200" in name) == (0, True)


def test_a_run_on_a_gpu_tells_it_beside_each_of_its_vitals(prepared, tmp_path, monkeypatch):
    opened = loop.open_context

    def on_a_gpu(plan, *rest, **settings):
        made = opened(plan, *rest, **settings)
        made.plan = plan.model_copy(
            update={"train": plan.train.model_copy(update={"device": "cuda"})}
        )
        return made

    monkeypatch.setattr(loop, "open_context", on_a_gpu)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: STATS)
    monkeypatch.setattr(step_report, "peak_memory_gib", lambda device: 0.0)
    run = Run(tiny_plan(prepared, config=CONFIG, train={"steps": 4}), tmp_path / "run")
    assert (
        [event.step for event in run.of(DeviceStats)]
        == [event.step for event in run.of(StepHealth)]
        != []
    )
    assert run.of(DeviceStats)[0].reserved_gib == 8.0


def test_on_a_processor_there_is_none(prepared, tmp_path):
    assert (
        Run(tiny_plan(prepared, config=CONFIG, train={"steps": 2}), tmp_path / "run").of(
            DeviceStats
        )
        == []
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[float]:
    """GiB that a process tells of itself: at its start, below one that holds 1 GiB; more with 256 MiB of a file mapped;
    more with 256 MiB held.
    """
    file = tmp_path_factory.mktemp("files") / "mapped"
    file.write_bytes(bytes(2**28))
    code = """
import mmap, sys
from bloomery.train.process import peak_memory_gib
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
before = peak_memory_gib("cpu")
assert sum(mapped[:: mmap.PAGESIZE]) == 0
after = peak_memory_gib("cpu")
held = bytearray(b"x") * 2**28
print(before, after - before, peak_memory_gib("cpu") - before)
"""
    large = bytearray(b"x") * 2**30  # touched, so that this process holds it while the child begins
    said = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True
    ).stdout
    del large
    return [float(word) for word in said.split()]


def test_a_process_does_not_count_the_memory_of_the_one_that_started_it(told):
    assert 0.05 < told[0] < 1


@pytest.mark.skipif(
    not Path("/proc/self/status").is_file(), reason="Linux alone says what pages of files take"
)
def test_pages_of_files_that_the_kernel_can_drop_are_no_memory_of_a_process(told):
    # Of libtorch the kernel maps 80 or 112 MB, by how its cache holds the file.
    _start, mapped, held = told
    assert mapped < 0.1 < 0.24 < held < 0.35
