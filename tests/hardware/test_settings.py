"""What a variable does depends on the machine: the same line is right on one GPU and idle on the next."""

from pathlib import Path

import pytest

from bloomery.hardware.doctor.settings import idle_settings
from bloomery.hardware.machine import read_machine
from bloomery.hardware.profile import build_profile

RECORDED = Path(__file__).parent.parent / "machines"


def effects(name, torch=None, **environment):
    machine = read_machine(RECORDED / f"{name}.json")
    software = machine.software.model_copy(
        update={
            "environment": environment,
            "torch": torch or machine.software.torch,
            "settings": (),
        }
    )
    machine = machine.model_copy(update={"software": software})
    return {effect.name: effect for effect in idle_settings(machine, build_profile(machine))}


CASES = [
    ("rx-6700-xt", "PYTORCH_HIP_ALLOC_CONF", "expandable_segments:True", "harms"),  # torch 2.13
    # torch 2.10
    ("mi250x-frontier-slurm", "PYTORCH_HIP_ALLOC_CONF", "expandable_segments:True", "nothing"),
    ("rx-6700-xt", "PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.6", "works"),
    ("rx-6700-xt", "PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512", "harms"),
    ("h200", "PYTORCH_HIP_ALLOC_CONF", "expandable_segments:True", "nothing"),
    ("h200", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "works"),
    ("laptop-without-a-gpu", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "nothing"),
    ("rx-6700-xt", "TORCH_BLAS_PREFER_HIPBLASLT", "1", "nothing"),
    ("rx-6700-xt", "TORCH_BLAS_PREFER_HIPBLASLT", "0", "nothing"),
    ("mi300x-node", "TORCH_BLAS_PREFER_HIPBLASLT", "1", "nothing"),
    ("mi300x-node", "TORCH_BLAS_PREFER_HIPBLASLT", "0", "works"),
    ("rx-7900-xtx-behind-an-igpu", "TORCH_BLAS_PREFER_HIPBLASLT", "1", "works"),
    ("h200", "TORCH_BLAS_PREFER_HIPBLASLT", "1", "nothing"),
    ("rx-6700-xt", "HSA_OVERRIDE_GFX_VERSION", "10.3.0", "harms"),
    ("rx-6700-xt", "HSA_OVERRIDE_GFX_VERSION", "10.3.1", "nothing"),
    ("strix-halo", "HSA_OVERRIDE_GFX_VERSION", "11.0.0", "harms"),
    ("h200", "HSA_OVERRIDE_GFX_VERSION", "10.3.0", "nothing"),
    ("laptop-without-a-gpu", "HSA_OVERRIDE_GFX_VERSION", "10.3.0", "nothing"),
    ("rx-6700-xt", "NCCL_P2P_DISABLE", "1", "nothing"),
    ("rx-6700-xt", "HSA_FORCE_FINE_GRAIN_PCIE", "1", "nothing"),
    ("rx-9060-xt-math-attention", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "1", "works"),
    ("mi300x-node", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "1", "nothing"),
    ("rx-6700-xt", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "1", "nothing"),
    ("rx-6700-xt", "AMD_SERIALIZE_KERNEL", "3", "slows"),
    ("h200", "CUDA_LAUNCH_BLOCKING", "1", "slows"),
    ("laptop-without-a-gpu", "CUDA_LAUNCH_BLOCKING", "1", "nothing"),
    ("mi300x-node", "HSA_XNACK", "1", "slows"),
    ("rx-6700-xt", "HSA_XNACK", "1", "nothing"),
    ("mi300x-node", "ROCBLAS_INTERNAL_FP16_ALT_IMPL", "1", "nothing"),
    ("rx-6700-xt", "HSA_ENABLE_DXG_DETECTION", "1", "nothing"),
    ("rx-6700-xt", "MIOPEN_USER_DB_PATH", "/tmp/m", "nothing"),
    ("rx-6700-xt", "FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE", "nothing"),
    ("rx-6700-xt", "TORCH_COMPILE_DISABLE", "1", "works"),
    ("rx-6700-xt", "PYTORCH_NO_HIP_MEMORY_CACHING", "1", "slows"),
    ("rx-6700-xt", "AMD_LOG_LEVEL", "4", "slows"),
    ("laptop-without-a-gpu", "CUDA_VISIBLE_DEVICES", "0", "nothing"),
    ("arc-b580", "PYTORCH_HIP_ALLOC_CONF", "expandable_segments:True", "nothing"),
    ("arc-b580", "PYTORCH_ALLOC_CONF", "expandable_segments:True", "works"),
    ("arc-b580", "CUDA_VISIBLE_DEVICES", "0", "nothing"),
    ("h200", "ZE_AFFINITY_MASK", "0", "nothing"),
]


@pytest.mark.parametrize(("machine", "name", "value", "does"), CASES)
def test_what_a_setting_does(machine, name, value, does):
    effect = effects(machine, **{name: value})[name]
    assert (effect.kind, bool(effect.reason)) == (does, True)
    assert str(effect).startswith(f"{name}={value} ")


@pytest.mark.parametrize(
    ("machine", "name", "value"),
    [
        ("mi300x-node", "NCCL_DEBUG", "INFO"),
        ("mi250x-frontier-slurm", "NCCL_SOCKET_IFNAME", "hsn0"),
        ("mi250x-frontier-slurm", "ROCBLAS_INTERNAL_FP16_ALT_IMPL", "1"),
        ("wsl", "HSA_ENABLE_DXG_DETECTION", "1"),
        ("rx-6700-xt", "AMD_SERIALIZE_KERNEL", "0"),
        ("rx-6700-xt", "CXX", "g++"),
    ],
)
def test_what_is_in_its_place_is_not_mentioned(machine, name, value):
    assert effects(machine, **{name: value}) == {}


def test_an_override_that_lends_kernels_works():
    # A PyTorch wheel has no kernels of gfx1031; claiming to be gfx1030 is what makes it run.
    found = effects("rx-6700-xt-wrong-wheel", HSA_OVERRIDE_GFX_VERSION="10.3.0")
    assert found["HSA_OVERRIDE_GFX_VERSION"].kind == "harms"
    machine = read_machine(RECORDED / "rx-6700-xt.json")
    software = machine.software.model_copy(
        update={
            "torch": "2.13.0+rocm7.2",
            "packages": (),
            "environment": {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"},
        }
    )
    lent = machine.model_copy(update={"software": software})
    (effect,) = idle_settings(lent, build_profile(lent))
    assert effect.kind == "works"


def test_two_masks_are_explained():
    found = effects(
        "mi300x-node", ROCR_VISIBLE_DEVICES="0,1", HIP_VISIBLE_DEVICES="1", CUDA_VISIBLE_DEVICES="0"
    )
    assert "ROCR_VISIBLE_DEVICES=0,1" in found["HIP_VISIBLE_DEVICES"].reason
    assert found["CUDA_VISIBLE_DEVICES"].kind == "nothing"
