"""The table of GPUs: complete, consistent, and never guessing."""

import pytest

from bloomery.errors import UserError
from bloomery.hardware.machine import Accelerator
from bloomery.hardware.specs import arch_spec, cpu_efficiency, find_gpu, gpu_spec, table
from bloomery.units import GIB


def device(name: str, arch: str, gib: float) -> Accelerator:
    return Accelerator(
        index=0, vendor="amd" if arch.startswith("gfx") else "nvidia", name=name, arch=arch, memory_bytes=int(gib * GIB)
    )


@pytest.mark.parametrize("gpu", table().gpu, ids=lambda gpu: gpu.name)
def test_every_row_is_consistent(gpu):
    arch = arch_spec(gpu.arch)
    assert arch is not None
    figures = {"memory", "bandwidth", "peaks", "link", "power"} | ({"achievable"} if gpu.achievable_tflops else set())
    assert set(gpu.sources) == figures
    assert all(gpu.source(figure) for figure in figures)
    assert gpu.peak_tflops["float16"] >= gpu.peak_tflops["float32"]
    assert ("bfloat16" in gpu.peak_tflops) == arch.bf16_matmul
    assert ("float8" in gpu.peak_tflops) == (arch.fp8 != "none")
    rate = {"full": 1.0, "half": 0.5, "none": None}[arch.bf16]
    if rate:
        assert gpu.peak_tflops["bfloat16"] == pytest.approx(rate * gpu.peak_tflops["float16"], rel=0.01)
    if arch.fp8 != "none":
        assert gpu.peak_tflops["float8"] == pytest.approx(2 * gpu.peak_tflops["float16"], rel=0.02)
    if not arch.matrix_units:  # packed float16 and nothing else
        assert gpu.peak_tflops["float16"] == pytest.approx(2 * gpu.peak_tflops["float32"], rel=0.02)
    for dtype, reached in gpu.achievable_tflops.items():
        assert reached < gpu.peak_tflops[dtype]
        assert gpu.achievable_flops(dtype) == reached * 1e12


NAMED = """
gfx906 MI50 MI60 Radeon-VII
gfx908 MI100
gfx90a MI210 MI250 MI250X
gfx942 MI300A MI300X MI325X
gfx950 MI350X MI355X
gfx1032 RX-6600 RX-6600-XT RX-6650-XT
gfx1031 RX-6700 RX-6700-XT RX-6750-XT
gfx1030 RX-6800 RX-6800-XT RX-6900-XT RX-6950-XT
gfx1102 RX-7600 RX-7600-XT
gfx1101 RX-7700-XT RX-7800-XT
gfx1100 RX-7900-GRE RX-7900-XT RX-7900-XTX W7800 W7900
gfx1200 RX-9060-XT
gfx1201 RX-9070 RX-9070-XT R9700
gfx1151 8060S
gfx1150 890M
sm_75 T4
sm_80 A100-40GB A100-80GB
sm_86 RTX-3090
sm_89 RTX-4090 L4 L40S
sm_90 H100-PCIe H100-SXM H200
sm_100 B200
sm_120 RTX-5090
"""


@pytest.mark.parametrize("line", NAMED.strip().splitlines())
def test_every_card_that_people_train_on_is_there(line):
    arch, *names = line.split()
    for name in names:
        words = name.replace("-", " ").lower()
        found = [gpu for gpu in table().gpu if words in " ".join((gpu.name, *gpu.aliases)).lower()]
        assert any(gpu.arch == arch for gpu in found), name


def test_two_dies_of_a_card_are_two_devices():
    card = next(gpu for gpu in table().gpu if "MI250X" in gpu.name)
    assert card.dies_per_card == 2
    assert card.peak_flops("bfloat16") == 191.5e12  # 383 is the card's
    assert [gpu.name for gpu in table().gpu if gpu.dies_per_card > 1] == [
        "Instinct MI250 (one GCD)",
        "Instinct MI250X (one GCD)",
    ]


def test_what_is_reachable_is_known_for_few():
    assert find_spec("Instinct MI300X").achievable_flops("bfloat16") == 708e12
    assert find_spec("Radeon RX 6700 XT").achievable_flops("float16") is None


def find_spec(name):
    return next(gpu for gpu in table().gpu if gpu.name == name)


@pytest.mark.parametrize(
    ("arch", "torch", "kernels"),
    [
        ("gfx1100", "2.9.1+rocm6.4", "wrong"),
        ("gfx1100", "2.13.0+rocm7.2", "yes"),
        ("gfx1151", "2.13.0+rocm10.0.0", "experimental"),
        ("gfx1151", "2.14.0+rocm10.1.0", "yes"),
        ("gfx1103", "2.9.1", "none"),
        ("gfx1103", "2.10.0", "experimental"),
        ("gfx1200", None, "experimental"),
        ("gfx1031", "2.15.0", "none"),
        ("gfx90a", "2.9.0", "yes"),
        ("sm_80", "2.9.0", "yes"),
    ],
)
def test_fused_attention_depends_on_the_release(arch, torch, kernels):
    assert arch_spec(arch).attention_in(torch) == kernels


@pytest.mark.parametrize("arch", table().arch, ids=lambda arch: arch.names[0])
def test_efficiencies_are_ordered_shares(arch):
    if arch.efficiency is not None:
        low, typical, high = arch.efficiency
        assert 0 < low <= typical <= high < 1


def test_no_chip_is_described_twice():
    names = [name for arch in table().arch for name in arch.names]
    assert len(names) == len(set(names))
    assert len({gpu.name for gpu in table().gpu}) == len(table().gpu)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RX 6700 XT", "Radeon RX 6700 XT"),
        ("rx6700xt", "Radeon RX 6700 XT"),
        ("AMD Radeon RX 6700", "Radeon RX 6700"),
        ("MI250X", "Instinct MI250X (one GCD)"),
        ("radeon vii", "Radeon VII"),
        ("H100", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("a100 80gb", "A100 80GB SXM"),
        ("w7900", "Radeon PRO W7900"),
        ("gfx908", "Instinct MI100"),
    ],
)
def test_people_are_understood(text, name):
    assert find_gpu(text).name == name


def test_a_name_with_two_sizes_of_memory_is_asked_for():
    with pytest.raises(UserError, match="how much memory") as error:
        find_gpu("MI50")
    assert error.value.remedy == "write Instinct MI50 16GB or Instinct MI50 32GB"
    assert find_gpu("MI50 32GB").memory_bytes == 32 * GIB


def test_a_misspelt_gpu_gets_its_neighbours():
    with pytest.raises(UserError, match="not in the table") as error:
        find_gpu("RX 6701 XT")
    assert "Radeon RX 6700 XT" in error.value.remedy
    with pytest.raises(UserError) as unlike:
        find_gpu("Frontier")
    assert "--gpu all" in unlike.value.remedy


def test_the_visible_memory_is_the_drivers():
    assert find_gpu("RX 6700 XT").memory_bytes / GIB == pytest.approx(11.98, abs=0.01)


def test_detected_devices_are_recognised():
    assert gpu_spec(device("AMD Radeon RX 6700 XT", "gfx1031", 11.98)).name == "Radeon RX 6700 XT"
    assert gpu_spec(device("AMD Instinct MI60 / MI50", "gfx906", 16)).name == "Instinct MI50"
    assert gpu_spec(device("NVIDIA H100 80GB HBM3", "sm_90", 79.6)).name == "H100 SXM"


@pytest.mark.parametrize(
    "unknown",
    [
        device("AMD Instinct MI60 / MI50", "gfx906", 32),  # both exist with 32 GiB, at different speeds
        device("gfx1031", "gfx1031", 12),
        device("Radeon RX 6700 XT", "gfx1030", 12),
        device("Future Card", "gfx1300", 64),
    ],
    ids=lambda d: f"{d.name}-{d.arch}",
)
def test_the_unknown_stays_unknown(unknown):
    assert gpu_spec(unknown) is None


def test_wider_models_use_a_processor_better():
    shares = [cpu_efficiency(width, "bfloat16")[1] for width in (192, 384, 768, 4096)]
    assert shares == sorted(shares)
