"""The simulated device as one of Intel's: torch.xpu above it, and what an Arc A has not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import simulated
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run, prepared_corpus, resumed_bitwise

from bloomery.core import device as door
from bloomery.hardware import probe_worker
from bloomery.infer.sampling import Sampling, sample_each_row
from bloomery.model.io.quantized import quantize_scales

OFFLOADED = {"offload_activations": True, "activation_checkpointing": "every-2"}


@pytest.fixture(autouse=True)
def _without_problems() -> Iterator[None]:
    simulated.clear()
    yield
    simulated.has_float64(True)
    assert simulated.report()["problem"] == {}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_corpus(tmp_path_factory.mktemp("prepared"))


def plan_for(prepared: Path, device: str, **sections):
    train = {"device": device, "steps": 6, **sections.pop("train", {})}
    data = {"pin_memory": device != "cpu"}
    plan = tiny_plan(prepared, config=CONFIG, train=train, data=data, **sections)
    return plan.model_copy(update={"memory": plan.memory.model_copy(update={"limit": 2**31})})


def test_the_door_asks_torch_xpu() -> None:
    assert (door.accelerator_type(), door.num_devices("xpu")) == ("xpu", 2)
    assert door.runtime_version() == torch.version.xpu
    assert door.properties_of("xpu:1").name == "Intel(R) Arc(TM) B580 Graphics"
    assert door.multiplies_bfloat16("xpu") and door.computes_float64("xpu")
    assert door.collective_backends("xpu") == "cpu:gloo,xpu:xccl"
    assert torch.profiler.ProfilerActivity.XPU in door.profiled_activities("xpu")

    # Memory: counted, capped, and full with PyTorch's own error.
    tensor = torch.ones(2**20, device="xpu:1")
    assert door.memory_stats("xpu:1")["allocated_bytes.all.current"] == 4 * 2**20
    assert door.memory_stats("xpu:0")["allocated_bytes.all.current"] == 0
    assert door.free_and_total_bytes("xpu:1") == (4 * 2**30 - 4 * 2**20, 4 * 2**30)
    door.cap_memory("xpu:1", 8 * 2**20)
    with pytest.raises(torch.OutOfMemoryError, match="XPU out of memory"):
        tensor.repeat(2)
    door.cap_memory("xpu:1", 4 * 2**30)

    # Order: work of a stream of its own is seen by who waits for its event.
    copies = door.new_stream("xpu:0")
    done = door.new_event("xpu:0", timed=True)
    with door.on_stream("xpu:0", copies):
        ones = torch.ones(3, device="xpu:0")
        done.record()
    door.current_stream("xpu:0").wait_event(done)
    assert (ones + 1).tolist() == [2, 2, 2]

    # Random numbers repeat, and a block restores them.
    door.seed_generators("xpu", 7)
    with door.generators_restored("xpu"):
        first = torch.rand(3, device="xpu")
    assert torch.equal(torch.rand(3, device="xpu"), first)


@pytest.mark.parametrize(
    "sections",
    [{}, {"train": OFFLOADED}, {"optimizer": {"offload": True, "state_dtype": "int8"}}],
    ids=["plain", "offloaded activations", "offloaded int8 states"],
)
def test_losses_equal_those_of_the_cpu(prepared: Path, tmp_path: Path, sections: dict) -> None:
    on_device = Run(plan_for(prepared, "xpu", **sections), tmp_path / "xpu")
    assert simulated.report()["call"]["aten::mm"] > 0
    on_cpu = Run(plan_for(prepared, "cpu", **sections), tmp_path / "cpu")
    assert list(on_device.losses()) == [1, 2, 3, 4, 5, 6]
    assert on_device.losses() == pytest.approx(on_cpu.losses(), rel=2e-7)


def test_a_resumed_run_equals_the_undisturbed_one_bitwise(prepared: Path, tmp_path: Path) -> None:
    plan = plan_for(prepared, "xpu", train={"precision": "bfloat16", "steps": 5})
    resumed_bitwise(plan, tmp_path)


def test_the_doctors_probes_run_on_it() -> None:
    job = {"device": "xpu", "dtype": "bfloat16", "arch": "xe2-hpg"}
    first = probe_worker.device("device", job)
    assert first["outcome"] == "ok"
    assert first["facts"]["devices"] == "2"
    assert first["facts"]["name"] == "Intel(R) Arc(TM) B580 Graphics"
    assert probe_worker.device("device-1", job)["outcome"] == "ok"
    simulated.clear()
    assert probe_worker.checked_matmul("xpu", "float32", size=64)["outcome"] == "ok"
    waited = {operator for operator, _ in simulated.waits()}
    assert "synchronize" in waited  # what is timed is over
    copies = probe_worker.p2p("p2p", job)
    assert copies["outcome"] == "ok" and set(copies["facts"]) == {"0-1", "1-0"}


def test_an_arc_a_trains_samples_and_quantizes_without_float64(
    prepared: Path, tmp_path: Path
) -> None:
    logits_NV = torch.randn(3, 97, generator=torch.Generator().manual_seed(0))
    uniforms_N = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    scales_N = torch.rand(512, generator=torch.Generator().manual_seed(0))
    expected = sample_each_row(logits_NV, uniforms_N, Sampling(temperature=0.8, top_p=0.9))
    expected_codes, expected_means = quantize_scales(scales_N)

    simulated.has_float64(False)
    with pytest.raises(RuntimeError, match="fp64"):
        torch.ones(2, device="xpu").double()
    assert not door.computes_float64("xpu:0")
    on_device = sample_each_row(
        logits_NV.to("xpu"), uniforms_N, Sampling(temperature=0.8, top_p=0.9)
    )
    assert on_device == expected
    codes, means = quantize_scales(scales_N.to("xpu"))
    assert torch.equal(codes.cpu(), expected_codes) and torch.equal(means.cpu(), expected_means)
    assert list(Run(plan_for(prepared, "xpu"), tmp_path / "xpu").losses()) == [1, 2, 3, 4, 5, 6]
