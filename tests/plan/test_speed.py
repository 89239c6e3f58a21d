"""Times against hand computation and published figures."""

import pytest
from plan_help import gpu_machine, machine

from bloomery.hardware.profile import build_profile
from bloomery.model.presets import preset
from bloomery.plan.resolve import resolve
from bloomery.plan.speed import device_rate, disk_bytes, energy_kwh, step_seconds
from bloomery.plan.types import Estimate
from bloomery.recipe.load import load_recipe
from bloomery.units import GIB

FLOPS = 6 * (12 * 12 * 768**2 + 50_000 * 768) + 12 * 12 * 1024 * 768  # a token of the Go coder: 8.53e8


def test_the_rx_6700_xt_by_hand():
    """20% of 26.43 TFLOP/s."""
    plan = resolve(load_recipe("go-coder-125m"), gpu_machine("RX 6700 XT"))
    assert plan.step_seconds.value == pytest.approx(16384 * FLOPS / (0.20 * 26.43e12), rel=1e-6)
    assert plan.step_seconds.low == pytest.approx(16384 * FLOPS / (0.30 * 26.43e12), rel=1e-6)
    assert plan.seconds.value / 86400 == pytest.approx(6.0, abs=0.05)
    assert plan.energy_kwh == pytest.approx(0.230 * plan.seconds.value / 3600)


@pytest.mark.parametrize(("gpu", "published"), [("RX 7900 XTX", 42_200), ("RTX 4090", 105_000)])
def test_published_rates_of_gpt2_fall_inside(gpu, published):
    """PyTorch 2.4 on one RX 7900 XTX (anthonix/llm.c) and nanoGPT on one RTX 4090 (its issue 182)."""
    where = gpu_machine(gpu)
    rate = device_rate(build_profile(where), where, precision="bfloat16", width=768, compiled=True)
    seconds = step_seconds(
        preset("go-coder-small"), rate, sequence_length=1024, tokens_per_step=1024, checkpointing="none"
    )
    found = seconds.inverse(1024)
    assert found.low <= published <= found.high


@pytest.mark.parametrize(("precision", "measured"), [("float32", 196), ("bfloat16", 341)])
def test_measured_rates_of_a_processor_fall_inside(precision, measured):
    """GPT-2 124M, uncompiled, two Zen 4 cores."""
    where = machine()
    rate = device_rate(build_profile(where), where, precision=precision, width=768, compiled=False)
    seconds = step_seconds(
        preset("go-coder-small"), rate, sequence_length=1024, tokens_per_step=2048, checkpointing="none"
    )
    found = seconds.inverse(2048)
    assert found.low <= measured <= found.high
    assert found.value == pytest.approx(measured, rel=0.10)


def test_recomputing_costs_a_third_of_the_layers():
    where = gpu_machine("RX 6700 XT")
    rate = device_rate(build_profile(where), where, precision="float16", width=768, compiled=False)
    times = [
        step_seconds(
            preset("go-coder-small"), rate, sequence_length=1024, tokens_per_step=1024, checkpointing=mode
        ).value
        for mode in ("none", "full")
    ]
    head = 6 * 50_000 * 768
    assert times[1] / times[0] == pytest.approx((FLOPS + (FLOPS - head) / 3) / FLOPS)


def test_an_unknown_device_has_no_speed():
    where = machine(flags=())
    assert device_rate(build_profile(where), where, precision="float32", width=768, compiled=False) is None
    where = gpu_machine("RX 6700 XT")
    assert device_rate(build_profile(where), where, precision="bfloat16", width=768, compiled=False) is None


def test_disk_and_energy():
    disk = disk_bytes(preset("go-coder-small"), tokens=1_064_960_000, optimizer_bytes=8 * 124_242_432, keep=3, weight=4)
    assert disk["shards"] / GIB == pytest.approx(1.98, abs=0.01)
    assert disk["checkpoint"] / GIB == pytest.approx(1.39, abs=0.01)
    assert disk["checkpoints"] == 5 * disk["checkpoint"]
    assert energy_kwh(None, Estimate(value=1, low=1, high=1, origin="table")) is None
