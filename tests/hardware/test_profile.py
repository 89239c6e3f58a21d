"""What each kind of machine is given, and why."""

import pytest

from bloomery.hardware.machine import Accelerator, Host, Machine, Software
from bloomery.hardware.profile import build_profile
from bloomery.units import GIB


def machine(*devices, flags=("avx2",), build=None, compiler="/usr/bin/g++", environment=None) -> Machine:
    return Machine(
        accelerators=devices,
        host=Host(
            system="Linux", cpu_name="a CPU", cpu_cores=8, cpu_flags=flags, memory_bytes=32 * GIB,
            memory_free_bytes=30 * GIB, disk_free_bytes=100 * GIB, compiler=compiler,
        ),
        software=Software(python="3.12.4", torch="2.13.0", build=build, environment=environment or {}),
    )  # fmt: skip


def amd(arch, index=0, gib=16, integrated=False) -> Accelerator:
    return Accelerator(index=index, vendor="amd", name=arch, arch=arch, memory_bytes=gib * GIB, integrated=integrated)


def nvidia(arch) -> Accelerator:
    return Accelerator(index=0, vendor="nvidia", name=arch, arch=arch, memory_bytes=16 * GIB)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        (("avx2",), "float32"),
        (("avx2", "avx512f"), "float32"),
        (("avx512f", "avx512_bf16"), "bfloat16"),
        (("amx_bf16",), "bfloat16"),
    ],
)
def test_a_processor_gets_bf16_only_in_hardware(flags, dtype):
    assert build_profile(machine(flags=flags)).dtype.value == dtype


@pytest.mark.parametrize(
    ("device", "build", "dtype", "attention", "compiled"),
    [
        (amd("gfx906"), "rocm", "float16", "plain", False),
        (amd("gfx908"), "rocm", "bfloat16", "plain", True),
        (amd("gfx90a"), "rocm", "bfloat16", "fused", True),
        (amd("gfx942"), "rocm", "bfloat16", "fused", True),
        (amd("gfx1031"), "rocm", "float16", "plain", False),
        (amd("gfx1100"), "rocm", "bfloat16", "fused", True),
        (amd("gfx1200"), "rocm", "bfloat16", "fused", True),
        (nvidia("sm_75"), "cuda", "float16", "fused", True),
        (nvidia("sm_90"), "cuda", "bfloat16", "fused", True),
        (amd("gfx1300"), "rocm", "float32", "plain", False),
    ],
    ids=lambda value: getattr(value, "arch", None),
)
def test_each_chip_gets_what_it_can_do(device, build, dtype, attention, compiled):
    profile = build_profile(machine(device, build=build))
    assert profile.device.value == "cuda"
    assert (profile.dtype.value, profile.attention.value, profile.compile.value) == (dtype, attention, compiled)
    assert all(choice.because for choice in (profile.dtype, profile.attention, profile.compile))


def test_a_build_for_the_other_vendor_trains_on_the_processor():
    profile = build_profile(machine(amd("gfx1031"), build="cuda"))
    assert profile.device.value == "cpu"
    assert "needs a rocm one" in profile.device.because


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus_are_not_used(value):
    profile = build_profile(machine(amd("gfx1031"), build="rocm", environment={"HIP_VISIBLE_DEVICES": value}))
    assert profile.device.value == "cpu"
    assert "HIP_VISIBLE_DEVICES" in profile.device.because


def test_processor_graphics_give_way_to_a_card():
    profile = build_profile(machine(amd("gfx1036", 0, 32, integrated=True), amd("gfx1031", 1, 12), build="rocm"))
    assert profile.accelerator.arch == "gfx1031"
    assert profile.environment.value["HIP_VISIBLE_DEVICES"] == "1"


def test_the_users_own_allocator_settings_stay():
    assert "PYTORCH_ALLOC_CONF" in build_profile(machine(amd("gfx1031"), build="rocm")).environment.value
    own = {"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:128"}
    assert (
        "PYTORCH_ALLOC_CONF"
        not in build_profile(machine(amd("gfx1031"), build="rocm", environment=own)).environment.value
    )


def test_experimental_attention_is_switched_on():
    environment = build_profile(machine(amd("gfx1200"), build="rocm")).environment.value
    assert environment["TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"] == "1"


def test_without_a_compiler_nothing_is_compiled():
    assert build_profile(machine(compiler=None)).compile.value is False
    assert build_profile(machine(compiler="/usr/bin/clang++")).environment.value == {"CXX": "/usr/bin/clang++"}
