"""The table of GPUs: complete, consistent, and never guessing."""

import pytest

from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.hardware.machine import Accelerator
from bloomery.hardware.specs import (
    arch_spec,
    counted_gpu,
    cpu_efficiency,
    find_gpu,
    gpu_spec,
    gpu_table,
    named_gpus,
)


def device(name: str, arch: str, gib: float) -> Accelerator:
    return Accelerator(
        index=0,
        vendor=arch_spec(arch).vendor if arch_spec(arch) else "amd",
        name=name,
        arch=arch,
        memory_bytes=int(gib * GIB),
    )


def test_every_row_is_consistent():
    for gpu in gpu_table().gpu:
        try:
            assert_consistent(gpu)
        except AssertionError as fault:
            fault.add_note(gpu.name)
            raise


def assert_consistent(gpu):
    arch = arch_spec(gpu.arch)
    assert arch is not None
    figures = {"memory", "bandwidth", "peaks", "link", "power"} | (
        {"achievable"} if gpu.achievable_tflops else set()
    )
    figures |= {"host"} if gpu.host_gbs else set()
    assert set(gpu.sources) == figures
    assert all(gpu.source(figure) for figure in figures)
    assert ("float16" in gpu.peak_tflops) == (not arch.float16_rate)
    if arch.float16_rate:
        return
    assert gpu.peak_tflops["float16"] >= gpu.peak_tflops["float32"]
    assert ("bfloat16" in gpu.peak_tflops) == (arch.bf16 != "none")
    assert ("float8" in gpu.peak_tflops) == (arch.fp8 != "none")
    rate = {"full": 1.0, "half": 0.5, "none": None}[arch.bf16]
    if rate:
        assert gpu.peak_tflops["bfloat16"] == pytest.approx(
            rate * gpu.peak_tflops["float16"], rel=0.01
        )
    if arch.fp8 != "none":
        assert gpu.peak_tflops["float8"] == pytest.approx(2 * gpu.peak_tflops["float16"], rel=0.02)
    if not arch.matrix_units:  # packed float16 and nothing else
        assert gpu.peak_tflops["float16"] == pytest.approx(2 * gpu.peak_tflops["float32"], rel=0.02)
    for dtype, reached in gpu.achievable_tflops.items():
        assert reached < gpu.peak_tflops[dtype]
        assert gpu.achievable_flops(dtype) == reached * 1e12


# Cores and boost clock in GHz. Left out: matrix rates (CDNA) and RDNA 3 and later, which pair float32.
SHADERS = """
RTX 2060 6GB: 1920 1.680; RTX 2060 SUPER: 2176 1.650; RTX 2070: 2304 1.620; RTX 2080 Ti: 4352 1.545
RTX 3050 8GB: 2560 1.777; RTX 3060 12GB: 3584 1.777; RTX 3070: 5888 1.725; RTX 3080 10GB: 8704 1.710
RTX 3090: 10496 1.695; RTX 3090 Ti: 10752 1.860; RTX 4060: 3072 2.460; RTX 4070: 5888 2.475; RTX 4080: 9728 2.505
RTX 4090: 16384 2.520; RTX 5060 Ti: 4608 2.572; RTX 5070: 6144 2.512; RTX 5080: 10752 2.617; RTX 5090: 21760 2.407
GTX 1080 Ti: 3584 1.582; V100 SXM: 5120 1.530; Tesla T4: 2560 1.590; A40: 10752 1.740; RTX A6000: 10752 1.800
L4: 7424 2.040; RX 5700 XT: 2560 1.905; RX 6600: 1792 2.491; RX 6700 XT: 2560 2.581; RX 6800: 3840 2.105
RX 6950 XT: 5120 2.310; Instinct MI50: 3840 1.725
"""


@pytest.mark.parametrize(
    "card", [card.strip() for card in SHADERS.replace("\n", ";").split(";") if card.strip()]
)
def test_float32_is_two_operations_a_core_and_clock(card):
    name, figures = card.split(": ")
    cores, gigahertz = map(float, figures.split())
    spec = find_gpu(
        f"{name} 16GB" if name in ("V100 SXM", "RTX 5060 Ti", "Instinct MI50") else name
    )
    assert find_spec(spec.name).peak_tflops["float32"] == pytest.approx(
        2 * cores * gigahertz / 1e3, rel=0.02
    )


# TFLOP/s that NVIDIA's whitepapers and datasheets and AMD's product pages publish: float16 with float32 accumulation.
# Of Intel's half of the TOPS with INT8: 262, 229, 197; 233, 203, 197; 1,678 of two stacks.
PUBLISHED = """
RTX 2070: 29.9; RTX 2080 Ti: 53.8; Tesla T4: 65; RTX 3060 12GB: 25.6; RTX 3070: 40.6; RTX 3080 10GB: 59.5
RTX 3090: 71.2; RTX 3090 Ti: 80; A10: 125; A40: 149.7; RTX A6000: 154.8; RTX 4070: 58.3; RTX 4080: 97.5; RTX 4090: 165.2
RTX 6000 Ada Generation: 364.2; L4: 121; RTX 5070: 61.7; RTX 5070 Ti: 87.9; RTX 5080: 112.6; RTX 5090: 209.5
RTX PRO 6000 Blackwell: 503.8; V100 SXM 32GB: 125; V100 PCIe 32GB: 112; A100 80GB SXM: 312; A30: 165; MI250X: 191.5
MI300X: 1307.4; MI355X: 2516.6; RX 7900 XTX: 122.8; RX 7800 XT: 74.6; RX 9070 XT: 194.6; RX 9060 XT 16GB: 102.6
RX 6900 XT: 46.1; W7900: 122.6
A770 16GB: 131; A750: 114.5; A580: 98.5; B580: 116.5; B570: 101.5; Arc Pro B60: 98.5; Max 1550: 419.5
"""


@pytest.mark.parametrize(
    "card", [card.strip() for card in PUBLISHED.replace("\n", ";").split(";") if card.strip()]
)
def test_computed_rates_are_those_that_the_vendor_publishes(card):
    name, tera = card.split(": ")
    spec = find_spec(find_gpu(name).name)
    assert spec.peaks_estimated
    assert spec.peak_tflops["float16"] == pytest.approx(float(tera), rel=0.02)


NAMED = """
sm_61 GTX-1060 GTX-1080-Ti
sm_70 V100-SXM V100-PCIe
gfx1010 RX-5700 RX-5700-XT
gfx906 MI50 MI60 Radeon-VII
gfx908 MI100
gfx90a MI210 MI250 MI250X
gfx942 MI300A MI300X MI325X
gfx950 MI350X MI355X
gfx1032 RX-6600 RX-6600-XT RX-6650-XT
gfx1031 RX-6700 RX-6700-XT RX-6750-XT
gfx1030 RX-6800 RX-6800-XT RX-6900-XT RX-6950-XT W6800
gfx1102 RX-7600 RX-7600-XT
gfx1101 RX-7700-XT RX-7800-XT
gfx1100 RX-7900-GRE RX-7900-XT RX-7900-XTX W7800 W7900
gfx1200 RX-9060-XT
gfx1201 RX-9070 RX-9070-XT R9700
gfx1151 8060S
gfx1150 890M
gfx1103 780M
sm_75 T4 RTX-2060 RTX-2060-SUPER RTX-2070 RTX-2070-SUPER RTX-2080 RTX-2080-SUPER RTX-2080-Ti
sm_80 A100-40GB A100-80GB-SXM A100-80GB-PCIe
sm_86 RTX-3050 RTX-3060-8GB RTX-3060-12GB RTX-3060-Ti RTX-3070 RTX-3070-Ti RTX-3080-10GB RTX-3080-12GB RTX-3080-Ti
sm_86 RTX-3090 RTX-3090-Ti A10 A10G A40 A6000 RTX-3050-Laptop-GPU RTX-3060-Laptop-GPU RTX-3080-Ti-Laptop-GPU
sm_89 RTX-4060 RTX-4060-Ti RTX-4070 RTX-4070-SUPER RTX-4070-Ti RTX-4070-Ti-SUPER RTX-4080 RTX-4080-SUPER RTX-4090
sm_89 L4 L40S RTX-6000-Ada RTX-4050-Laptop-GPU RTX-4060-Laptop-GPU RTX-4070-Laptop-GPU RTX-4090-Laptop-GPU
sm_90 H100-PCIe H100-SXM H200
sm_100 B200
xe-hpg A380 A750 A770
xe2-hpg B570 B580 Arc-Pro-B50 Arc-Pro-B60
xe-hpc Max-1100 Max-1550
sm_120 RTX-5060 RTX-5060-Ti RTX-5070 RTX-5070-Ti RTX-5080 RTX-5090 RTX-5070-Ti-Laptop-GPU RTX-5090-Laptop-GPU
"""


@pytest.mark.parametrize("line", NAMED.strip().splitlines())
def test_every_card_that_people_train_on_is_there(line):
    arch, *names = line.split()
    for name in names:
        words = name.replace("-", " ").lower()
        found = [
            gpu for gpu in gpu_table().gpu if words in " ".join((gpu.name, *gpu.aliases)).lower()
        ]
        assert any(gpu.arch == arch for gpu in found), name


def test_two_dies_of_a_card_are_two_devices():
    card = next(gpu for gpu in gpu_table().gpu if "MI250X" in gpu.name)
    assert card.dies_per_board == 2
    assert card.peak_flops("bfloat16") == 191.5e12  # 383 is the card's
    assert [gpu.name for gpu in gpu_table().gpu if gpu.dies_per_board > 1] == [
        "Instinct MI250 (one GCD)",
        "Instinct MI250X (one GCD)",
        "Data Center GPU Max 1550 (one stack)",
    ]


def test_what_is_reachable_is_known_for_few():
    assert find_spec("Instinct MI300X").achievable_flops("bfloat16") == 708e12
    assert find_spec("Radeon RX 6700 XT").achievable_flops("float16") is None


def find_spec(name):
    return next(gpu for gpu in gpu_table().gpu if gpu.name == name)


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


@pytest.mark.parametrize("arch", gpu_table().arch, ids=lambda arch: arch.names[0])
def test_efficiencies_are_ordered_shares(arch):
    if arch.efficiency is not None:
        low, typical, high = arch.efficiency
        assert 0 < low <= typical <= high < 1


def test_no_chip_is_described_twice():
    names = [name for arch in gpu_table().arch for name in arch.names]
    assert len(names) == len(set(names))
    assert len({gpu.name for gpu in gpu_table().gpu}) == len(gpu_table().gpu)


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
        ("4090", "GeForce RTX 4090"),
        ("gtx1080ti", "GeForce GTX 1080 Ti"),
        ("3060 12gb", "GeForce RTX 3060 12GB"),
        ("3080 12GB", "GeForce RTX 3080 12GB"),
        ("4070 ti super", "GeForce RTX 4070 Ti SUPER"),
        ("4070tis", "GeForce RTX 4070 Ti SUPER"),
        ("2080s", "GeForce RTX 2080 SUPER"),
        ("RTX 3070 mobile", "GeForce RTX 3070 Laptop GPU"),
        ("4090 laptop", "GeForce RTX 4090 Laptop GPU"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "GeForce RTX 4060 Laptop GPU"),
        ("a6000", "RTX A6000"),
        ("RTX 6000 Ada", "RTX 6000 Ada Generation"),
        ("A10", "A10"),
        ("7900xtx", "Radeon RX 7900 XTX"),
        ("9070", "Radeon RX 9070"),
        ("a100 40", "A100 40GB"),
        ("h200", "H200 SXM"),
        ("b580", "Arc B580"),
        ("intel arc a750", "Arc A750"),
        ("Intel(R) Arc(TM) B580 Graphics", "Arc B580"),
        ("GPU Max 1550", "Data Center GPU Max 1550 (one stack)"),
        ("m4 max 64gb", "M4 Max"),
        ("Apple M1 8GB", "M1"),
    ],
)
def test_people_are_understood(text, name):
    assert find_gpu(text).name == name


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("8xMI300X", "Instinct MI300X", 8),
        ("MI300X x 8", "Instinct MI300X", 8),
        ("MI300X x8", "Instinct MI300X", 8),
        ("2x4090", "GeForce RTX 4090", 2),
        ("4090x2", "GeForce RTX 4090", 2),
        ("2 x RTX 3090", "GeForce RTX 3090", 2),
        ("8 * H200", "H200 SXM", 8),
        ("4x MI50 32GB", "Instinct MI50", 4),
        ("MI50 32GB x 4", "Instinct MI50", 4),
        ("RX 6700 XT", "Radeon RX 6700 XT", None),
        ("RX 6600", "Radeon RX 6600", None),
        ("4090", "GeForce RTX 4090", None),
    ],
)
def test_a_number_of_gpus_is_read_with_their_name(text, name, count):
    product, counted = counted_gpu(text)
    assert (find_gpu(product).name, counted) == (name, count)


def test_every_name_of_the_table_is_one_gpu():
    for spec in gpu_table().gpu:
        for name in (spec.name, spec.short_name, *spec.aliases):
            assert counted_gpu(name) == (name, None)


@pytest.mark.parametrize("text", ["0xMI300X", "MI300X x 2000"])
def test_a_number_of_gpus_is_one_to_1024(text):
    with pytest.raises(UserError, match="not a number of GPUs per node") as error:
        counted_gpu(text)
    assert "8xMI300X" in error.value.fix


def test_two_numbers_of_gpus_must_agree():
    assert named_gpus(["8xMI300X"], None) == (("MI300X",), 8)
    assert named_gpus(["8xMI300X"], 8) == (("MI300X",), 8)
    assert named_gpus(["MI300X", "H200"], 4) == (("MI300X", "H200"), 4)
    assert named_gpus([], None) == ((), 1)
    for texts, gpus in ((["8xMI300X"], 4), (["8xMI300X", "4xH200"], None)):
        with pytest.raises(UserError, match="different numbers") as error:
            named_gpus(texts, gpus)
        assert "8xMI300X" in error.value.where and error.value.code == 2


def test_a_misspelt_name_with_a_number_gets_its_neighbors():
    with pytest.raises(UserError, match="unknown GPU: 'MI301X'") as error:
        find_gpu(counted_gpu("8xMI301X")[0])
    assert "MI300X" in error.value.fix


def test_a_name_with_two_sizes_of_memory_is_asked_for():
    with pytest.raises(UserError, match="several memory sizes") as error:
        find_gpu("MI50")
    assert error.value.fix == '--gpu "Instinct MI50 16GB" or --gpu "Instinct MI50 32GB"'
    assert find_gpu("MI50 32GB").memory_bytes == 32 * GIB


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("A100", ["A100 40GB", "A100 80GB SXM", "A100 80GB PCIe"]),
        ("3060", ["GeForce RTX 3060 8GB", "GeForce RTX 3060 12GB"]),
        ("RTX 3080", ["GeForce RTX 3080 10GB", "GeForce RTX 3080 12GB"]),
        ("V100 32GB", ["V100 SXM", "V100 PCIe"]),
        ("RTX 6000", ["Quadro RTX 6000", "RTX 6000 Ada Generation"]),
    ],
)
def test_a_name_of_several_cards_lists_them(text, names):
    with pytest.raises(UserError) as error:
        find_gpu(text)
    assert error.value.problem.endswith(f"several GPUs: {', '.join(names)}")
    assert error.value.code == 2


def test_every_card_is_found_by_the_name_it_is_listed_under_and_by_its_drivers():
    for spec, size in [(gpu, size) for gpu in gpu_table().gpu for size in gpu.memory_gib]:
        several = len(spec.memory_gib) > 1
        assert find_gpu(f"{spec.name} {size}GB" if several else spec.name).name == spec.name, (
            spec.name
        )
        seen = device(spec.aliases[0] if spec.aliases else spec.name, spec.arch, size)
        assert gpu_spec(seen) in (spec, None), spec.name
        if not (spec.arch == "gfx906" and size == 32):  # MI50 and MI60 share a driver's name
            assert gpu_spec(device(spec.name, spec.arch, size)) == spec, spec.name


def test_processor_graphics_are_planned_in_a_machine_of_a_size():
    with pytest.raises(UserError, match="shares system memory") as error:
        find_gpu("Strix Halo")
    assert error.value.fix == '--gpu "Strix Halo 32GB"'
    found = find_gpu("Strix Halo 128GB")
    assert (found.integrated, found.usable_bytes) == (True, 64 * GIB)
    assert gpu_spec(found).name == find_spec(found.name).name


def test_an_apple_chip_lets_its_gpu_have_three_quarters_of_the_memory():
    with pytest.raises(UserError, match="shares system memory"):
        find_gpu("M4 Max")
    found = find_gpu("M4 Max 64GB")
    assert (found.vendor, found.integrated, found.usable_bytes) == ("apple", True, 48 * GIB)
    assert gpu_spec(found).peak_flops("float32") is None
    assert gpu_spec(find_gpu("M1 Max 32GB")).peak_flops("float32") == 10.4e12


def test_a_misspelt_gpu_gets_its_neighbours():
    with pytest.raises(UserError, match="unknown GPU") as error:
        find_gpu("RX 6701 XT")
    assert "Radeon RX 6700 XT" in error.value.fix
    with pytest.raises(UserError) as unlike:
        find_gpu("Frontier")
    assert "--gpu all" in unlike.value.fix


def test_the_visible_memory_is_the_drivers():
    assert find_gpu("RX 6700 XT").memory_bytes / GIB == pytest.approx(11.98, abs=0.01)


def test_detected_devices_are_recognised():
    assert gpu_spec(device("AMD Radeon RX 6700 XT", "gfx1031", 11.98)).name == "Radeon RX 6700 XT"
    assert gpu_spec(device("AMD Instinct MI60 / MI50", "gfx906", 16)).name == "Instinct MI50"
    assert gpu_spec(device("NVIDIA H100 80GB HBM3", "sm_90", 79.6)).name == "H100 SXM"


@pytest.mark.parametrize(
    "unknown",
    [
        # both exist with 32 GiB, at different speeds
        device("AMD Instinct MI60 / MI50", "gfx906", 32),
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
