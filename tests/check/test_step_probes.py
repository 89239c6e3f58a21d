"""The probes of the doctor and of scripts/gpu_check.sh: one training step in a child process."""

import os
from pathlib import Path

import pytest
from faulty_devices import (
    DEVICE_NAME,
    FAULTS,
    plan_of,
)

from bloomery.check import step_probes
from bloomery.hardware.machine import Probe, read_machine
from bloomery.hardware.probes import ProbeSpec, probe

pytestmark = pytest.mark.usefixtures("own_cache")

MACHINES = Path(__file__).parents[1] / "machines"


def test_a_probe_names_the_part_and_the_way_out(sides):
    FAULTS["swapped heads"][0](sides)
    result = step_probes.examined(plan_of())
    assert result["outcome"] == "wrong"
    assert result["message"] == (
        f"this {DEVICE_NAME} computes wrong results in attention with float32: use blockwise attention"
    )
    assert result["facts"]["fix"] == "train.attention=blockwise"
    assert Probe.model_validate(result | {"name": "step-float32"}).outcome == "wrong"


@pytest.mark.soak
def test_probes_in_their_child_process():
    """The child of a doctor on a GPU, here with the CPU in its place."""
    kinds = ("float32", "bfloat16", "compiled")
    specs = [
        ProbeSpec(name=f"step-{kind}", module=step_probes.__name__, seconds=200) for kind in kinds
    ]
    job = {"device": "cpu", "dtype": "float32", "arch": "", "recipe": "go-coder-tiny"}
    results = probe(specs, job, environment=dict(os.environ))
    assert [result.outcome for result in results] == ["ok", "ok", "ok"], results
    assert [result.facts["precision"] for result in results] == ["float32", "bfloat16", "float32"]


def test_a_gpu_is_probed_in_each_precision_and_a_cpu_not_at_all():
    gpu = read_machine(MACHINES / "mi300x-node.json")
    assert [spec.name for spec in step_probes.step_probe_specs(gpu)] == [
        "step-float32",
        "step-float16",
        "step-bfloat16",
        "step-compiled",
    ]
    cpu = read_machine(MACHINES / "laptop-without-a-gpu.json")
    assert step_probes.step_probe_specs(cpu) == ()
