"""Kinds of devices of the tables beside AMD's and NVIDIA's: Intel's and Apple's."""

import pytest
from test_profile import amd, machine

from bloomery.core.device import KINDS
from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.facts.attention import missing_feature
from bloomery.hardware.doctor.diagnose import diagnose
from bloomery.hardware.machine import MASKS, Accelerator, Machine, visible_devices
from bloomery.hardware.profile import build_profile
from bloomery.hardware.vendors import VENDORS
from bloomery.runs.devices import chosen_devices


def accelerator(vendor: str, index: int = 0) -> Accelerator:
    return Accelerator(
        index=index, vendor=vendor, name=f"a GPU of {vendor}", arch="new", memory_bytes=16 * GIB
    )


@pytest.mark.parametrize("vendor", VENDORS)
def test_training_runs_on_the_kind_of_its_vendor(vendor):
    recorded = machine(accelerator(vendor), build=VENDORS[vendor].build)
    assert Machine.model_validate_json(recorded.model_dump_json()) == recorded
    profile = build_profile(recorded)
    assert profile.device.value == VENDORS[vendor].device_type
    assert profile.device.value in {kind.type for kind in KINDS}
    # Not in gpus.toml: nothing is guessed of it.
    assert profile.dtype.value == "float32"
    assert profile.gpu is None and profile.arch is None
    assert profile.compile.value is False
    assert profile.pin_memory.value == (vendor != "apple")
    assert not {finding.id for finding in diagnose(recorded)} & {"wrong-build"}


@pytest.mark.parametrize(("vendor", "other"), [("intel", "cuda"), ("amd", "xpu")])
def test_pytorch_of_another_vendor_leaves_the_cpu(vendor, other):
    profile = build_profile(machine(accelerator(vendor), build=other))
    assert profile.device.value == "cpu"
    assert VENDORS[vendor].build in profile.device.reason


def test_each_vendor_has_its_own_mask():
    gpus = (accelerator("intel", 0), accelerator("intel", 1), amd("gfx1030", 2))
    shown = visible_devices(
        machine(*gpus, environment={"ZE_AFFINITY_MASK": "1", "HIP_VISIBLE_DEVICES": ""})
    )
    assert [gpu.index for gpu in shown] == [1]
    assert MASKS[:3] == ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def test_a_device_is_named_by_its_kind():
    intel = machine(accelerator("intel"), build="xpu")
    assert chosen_devices(intel, "xpu:0") == chosen_devices(intel, "xpu") == (intel, 1)
    for name in ("cuda:0", "xpu:1"):
        with pytest.raises(UserError, match=f"no such device: '{name}'"):
            chosen_devices(intel, name)


def test_a_kind_without_training_is_refused_with_what_is_missing():
    for recorded in (machine(amd("gfx1030")), machine(accelerator("apple"), build="cpu")):
        with pytest.raises(UserError, match=r"does not train on GPUs of Apple.*float64.*nf4"):
            chosen_devices(recorded, "mps")


@pytest.mark.parametrize("device", ["xpu", "mps"])
def test_attention_without_kernels_for_the_kind_is_not_chosen(device):
    needs = dict(packed=True, window=False, softcap=False, dropout=False, device_type=device)
    refused = {
        name for name in ("varlen", "flex", "triton", "compiled") if missing_feature(name, **needs)
    }
    assert refused == {"varlen", "flex", "triton", "compiled"}
    assert missing_feature("blockwise", **needs) is None
