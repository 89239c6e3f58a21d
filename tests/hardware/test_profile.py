"""What each kind of machine is given, and why."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from bloomery.core.units import GIB
from bloomery.hardware.doctor.diagnose import diagnose
from bloomery.hardware.doctor.settings import idle_settings
from bloomery.hardware.machine import (
    MASKS,
    Accelerator,
    Host,
    Machine,
    Probe,
    Software,
    Surroundings,
    hidden,
    read_machine,
    visible_devices,
    with_devices,
)
from bloomery.hardware.profile import (
    MEMORY_SHARE,
    NODE_LOCAL,
    apply_environment,
    build_profile,
    hidden_integrated,
    with_gpu,
)
from bloomery.hardware.specs import find_gpu
from bloomery.hardware.vendors import ORDERS

RECORDED = Path(__file__).parent.parent / "machines"


def machine(
    *devices,
    flags=("avx2",),
    build=None,
    compiler="/usr/bin/g++",
    environment=None,
    torch="2.13.0",
    around=None,
) -> Machine:
    return Machine(
        accelerators=devices,
        host=Host(
            system="Linux",
            cpu_name="a CPU",
            cpu_cores=8,
            cpu_flags=flags,
            memory_bytes=32 * GIB,
            memory_free_bytes=30 * GIB,
            disk_free_bytes=100 * GIB,
            compiler=compiler,
            around=around or Surroundings(),
        ),
        software=Software(python="3.12.4", torch=torch, build=build, environment=environment or {}),
    )


def amd(arch, index=0, gib=16, integrated=False) -> Accelerator:
    return Accelerator(
        index=index,
        vendor="amd",
        name=arch,
        arch=arch,
        memory_bytes=gib * GIB,
        integrated=integrated,
    )


def nvidia(arch, index=0, gib=16) -> Accelerator:
    return Accelerator(index=index, vendor="nvidia", name=arch, arch=arch, memory_bytes=gib * GIB)


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
        (amd("gfx906"), "rocm", "float32", "plain", False),
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
    assert (profile.dtype.value, profile.attention.value, profile.compile.value) == (
        dtype,
        attention,
        compiled,
    )
    assert all(choice.reason for choice in (profile.dtype, profile.attention, profile.compile))


def test_a_build_for_the_other_vendor_trains_on_the_processor():
    profile = build_profile(machine(amd("gfx1031"), build="cuda"))
    assert profile.device.value == "cpu"
    assert "requires a rocm build" in profile.device.reason


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus_are_not_used(value):
    profile = build_profile(
        machine(amd("gfx1031"), build="rocm", environment={"HIP_VISIBLE_DEVICES": value})
    )
    assert profile.device.value == "cpu"
    assert "HIP_VISIBLE_DEVICES" in profile.device.reason


def test_processor_graphics_give_way_to_a_card():
    profile = build_profile(
        machine(amd("gfx1036", 0, 32, integrated=True), amd("gfx1031", 1, 12), build="rocm")
    )
    assert profile.accelerator.arch == "gfx1031"
    assert profile.environment.value["HIP_VISIBLE_DEVICES"] == "1"


def test_the_users_own_allocator_settings_stay():
    assert (
        "PYTORCH_ALLOC_CONF"
        in build_profile(machine(amd("gfx1031"), build="rocm")).environment.value
    )
    own = {"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:128"}
    assert (
        "PYTORCH_ALLOC_CONF"
        not in build_profile(
            machine(amd("gfx1031"), build="rocm", environment=own)
        ).environment.value
    )


def test_experimental_attention_is_switched_on():
    environment = build_profile(machine(amd("gfx1200"), build="rocm")).environment.value
    assert environment["TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"] == "1"


def test_an_old_chip_gets_the_settings_that_are_called_safe():
    profile = build_profile(read_machine(RECORDED / "mi50-wheel-without-its-kernels.json"))
    assert profile.dtype.value == "float32"
    assert "float16" in profile.dtype.reason  # and is told what else there is
    assert (profile.attention.value, profile.compile.value, profile.pin_memory.value) == (
        "plain",
        False,
        False,
    )


@pytest.mark.parametrize("name", ["mi250x-frontier-slurm", "mi300x-node"])
def test_mi200_and_later_get_bf16_and_flash(name):
    profile = build_profile(read_machine(RECORDED / f"{name}.json"))
    assert (profile.dtype.value, profile.attention.value, profile.compile.value) == (
        "bfloat16",
        "fused",
        True,
    )
    assert profile.pin_memory.value


@pytest.mark.parametrize(
    ("arch", "torch", "attention"),
    [
        ("gfx1100", "2.9.1+rocm6.4", "plain"),
        ("gfx1100", "2.10.0+rocm7.1", "fused"),
        ("gfx1103", "2.9.1", "plain"),
    ],
)
def test_kernels_of_a_bad_release_are_not_used(arch, torch, attention):
    profile = build_profile(machine(amd(arch), build="rocm", torch=torch))
    assert profile.attention.value == attention


def test_what_a_probe_refutes_is_not_chosen():
    sound = machine(amd("gfx90a"), build="rocm")
    bad = Probe(name="matmul-bfloat16", outcome="crashed", message="SIGSEGV")
    profile = build_profile(sound.model_copy(update={"probes": (bad,)}))
    assert profile.dtype.value == "float16"
    assert "SIGSEGV" in profile.dtype.reason
    worse = (
        bad,
        Probe(name="matmul-float16", outcome="wrong"),
        Probe(name="compile", outcome="failed", message="no"),
    )
    profile = build_profile(sound.model_copy(update={"probes": worse}))
    assert (profile.dtype.value, profile.compile.value) == ("float32", False)
    both = tuple(
        Probe(name=f"attention-{kernel}", outcome="wrong") for kernel in ("flash", "efficient")
    )
    assert build_profile(sound.model_copy(update={"probes": both})).attention.value == "plain"
    assert build_profile(sound.model_copy(update={"probes": both[:1]})).attention.value == "fused"


def test_a_probe_without_the_switch_refutes_nothing():
    profile = build_profile(read_machine(RECORDED / "rx-9060-xt-math-attention.json"))
    assert profile.attention.value == "fused"
    assert profile.environment.value["TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"] == "1"


@pytest.mark.parametrize(
    "name", ["user-outside-render", "user-added-to-render-not-logged-in-again"]
)
def test_a_card_that_may_not_be_opened_is_not_used(name):
    profile = build_profile(read_machine(RECORDED / f"{name}.json"))
    assert profile.device.value == "cpu"
    assert "/dev/kfd" in profile.device.reason


def reached(name: str, *, node: str = "open", container: str = "", **access: str) -> Machine:
    """A recorded machine whose devices answer so."""
    here = read_machine(RECORDED / f"{name}.json")
    cards = tuple(device.model_copy(update={"access": node}) for device in here.accelerators)
    around = here.host.around.model_copy(update={"container": container})
    told = {"access": here.host.access.model_copy(update=access), "around": around}
    return here.model_copy(
        update={"accelerators": cards, "host": here.host.model_copy(update=told)}
    )


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (reached("rx-6700-xt", kfd="hung"), "the driver does not respond at /dev/kfd"),
        (reached("rx-6700-xt", node="hung"), "the driver does not respond at /dev/dri/renderD128"),
        (
            reached("rx-6700-xt", kfd="absent", container="docker"),
            "this docker container was started without /dev/kfd",
        ),
        (reached("rx-6700-xt", node="absent"), "missing: /dev/dri/renderD128"),
    ],
)
def test_a_card_that_cannot_be_reached_is_not_used(machine, said):
    profile = build_profile(machine)
    assert profile.device.value == "cpu"
    assert profile.device.reason.endswith(f"is not accessible: {said}")


def test_what_this_machine_may_open_says_nothing_of_a_gpu_that_is_only_named():
    closed = reached("rx-6700-xt", kfd="denied")
    named = with_gpu(closed, find_gpu("RX 7900 XTX"))
    assert build_profile(named).accelerator.arch == "gfx1100"


def test_the_card_is_taken_and_not_the_processor_graphics_before_it():
    profile = build_profile(read_machine(RECORDED / "rx-7900-xtx-behind-an-igpu.json"))
    assert profile.accelerator.arch == "gfx1100"
    assert profile.environment.value["HIP_VISIBLE_DEVICES"] == "1"


IGPU = amd("gfx1036", 0, 2, integrated=True)
BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
TEGRA = nvidia("sm_121", 0).model_copy(update={"integrated": True})


@pytest.mark.parametrize(
    ("devices", "environment", "mask", "hidden_indices"),
    [
        ((IGPU, amd("gfx1100", 1, 24)), {}, {"HIP_VISIBLE_DEVICES": "1"}, [0]),
        (
            (amd("gfx1100", 0, 24), IGPU.model_copy(update={"index": 1})),
            {},
            {"HIP_VISIBLE_DEVICES": "0"},
            [1],
        ),
        # Both discrete GPUs train: the mask shows both.
        (
            (IGPU, amd("gfx1100", 1, 24), amd("gfx1100", 2, 24)),
            {},
            {"HIP_VISIBLE_DEVICES": "1,2"},
            [0],
        ),
        (
            (IGPU, amd("gfx1032", 1, 8), amd("gfx1100", 2, 24)),
            {},
            {"HIP_VISIBLE_DEVICES": "2"},
            [0],
        ),
        ((TEGRA, nvidia("sm_90", 1)), {}, BUS | {"CUDA_VISIBLE_DEVICES": "1"}, [0]),
        # CUDA sees the NVIDIA GPU alone.
        ((IGPU, nvidia("sm_90", 1)), {}, {}, []),
        # The user's mask and the user's order of CUDA stay.
        ((IGPU, amd("gfx1100", 1, 24)), {"ROCR_VISIBLE_DEVICES": "1"}, {}, []),
        ((IGPU, amd("gfx1100", 1, 24)), {"HIP_VISIBLE_DEVICES": "1,0"}, {}, []),
        ((IGPU, amd("gfx1100", 1, 24)), {"CUDA_VISIBLE_DEVICES": "1,0"}, {}, []),
        ((TEGRA, nvidia("sm_90", 1)), {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {}, []),
        ((IGPU,), {}, {}, []),
    ],
)
def test_an_integrated_gpu_next_to_a_discrete_one_is_hidden(
    devices, environment, mask, hidden_indices
):
    build = "rocm" if devices[-1].vendor == "amd" else "cuda"
    here = machine(*devices, build=build, environment=environment)
    profile = build_profile(here)
    assert masked(profile) == mask
    hidden_gpus = hidden_integrated(here, profile.accelerator)
    assert [device.index for device in hidden_gpus] == hidden_indices
    # One line says so, with the way to train on it all the same.
    ways = [f"-d {index} trains on it" for index in hidden_indices]
    assert [way for way in ways if way in profile.device.reason] == ways
    assert ("hidden" in profile.device.reason) == bool(hidden_indices)
    findings = [finding for finding in diagnose(here) if finding.id == "integrated-gpu-hidden"]
    assert [way for way in ways if way in findings[0].what] == ways if ways else findings == []


def test_what_hides_it_from_other_programs_can_be_pasted():
    two = machine(TEGRA, nvidia("sm_90", 1), nvidia("sm_90", 2), build="cuda")
    finding = next(found for found in diagnose(two) if found.id == "integrated-gpu-hidden")
    assert finding.fix[0].startswith(
        "export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1,2  #"
    )


def test_processor_graphics_leave_memory_to_the_machine():
    profile = build_profile(read_machine(RECORDED / "strix-halo.json"))
    assert profile.device.value == "cuda"
    assert profile.memory_share.value < MEMORY_SHARE
    assert profile.pin_memory.value is False
    assert profile.environment.value["TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"] == "1"  # torch 2.13


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_every_machine_gets_a_reason_for_everything(path):
    profile = build_profile(read_machine(path))
    chosen = (
        profile.device,
        profile.dtype,
        profile.attention,
        profile.compile,
        profile.fused_optimizer,
        profile.memory_share,
        profile.workers,
        profile.pin_memory,
        profile.prefetch,
        profile.environment,
    )
    assert all(choice.reason for choice in chosen)


def test_a_torch_for_both_vendors_cards_uses_its_own():
    both = machine(amd("gfx1100", 0, 24), nvidia("sm_86"), build="cuda")
    assert build_profile(both).accelerator.vendor == "nvidia"


def masked(profile) -> dict[str, str]:
    return {
        name: value
        for name, value in profile.environment.value.items()
        if name in (*MASKS, *ORDERS)
    }


def test_of_two_unlike_cards_the_better_one_trains_and_the_reason_says_so():
    two = machine(amd("gfx1032", 0, 8), amd("gfx1031", 1, 12), build="rocm")
    profile = build_profile(two)
    assert profile.accelerator.index == 1
    assert masked(profile) == {"HIP_VISIBLE_DEVICES": "1"}  # without it PyTorch would take device 0
    assert profile.device.reason == "gfx1031 (gfx1031), device 1: most memory of 2 GPUs"
    assert "gfx1031" in profile.environment.reason
    two = machine(nvidia("sm_75", 0, 8), nvidia("sm_86", 1, 24), build="cuda")
    assert masked(build_profile(two)) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "1",
    }


def test_cuda_counts_its_own_cards_alone():
    laptop = machine(amd("gfx1103", 0, 4, integrated=True), nvidia("sm_86", 1, 8), build="cuda")
    assert masked(build_profile(laptop)) == {}  # CUDA sees one device
    asked = build_profile(with_devices(laptop, {1}))
    assert asked.accelerator.vendor == "nvidia"
    # and no other number
    assert masked(asked) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"}
    three = machine(
        amd("gfx1103", 0, 4, integrated=True), nvidia("sm_86", 1), nvidia("sm_86", 2), build="cuda"
    )
    assert masked(build_profile(with_devices(three, {2})))["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_process_that_computes_itself_sees_the_same_device():
    two = machine(amd("gfx1032", 0, 8), amd("gfx1031", 1, 12), build="rocm")
    found = {}
    apply_environment(two, found)
    assert found == build_profile(two).environment.value
    own = {"ROCR_VISIBLE_DEVICES": "0"}
    apply_environment(machine(*two.accelerators, build="rocm", environment=own), own)
    assert masked(SimpleNamespace(environment=SimpleNamespace(value=own))) == {
        "ROCR_VISIBLE_DEVICES": "0"
    }


def test_the_order_in_which_the_user_lets_cuda_count_stays():
    own = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    two = machine(nvidia("sm_75", 0, 8), nvidia("sm_86", 1, 24), build="cuda", environment=own)
    profile = build_profile(two)
    assert masked(profile) == {}  # the numbers of nvidia-smi would name other cards
    assert profile.overridden["CUDA_DEVICE_ORDER"].profile_value == "PCI_BUS_ID"


def test_devices_alike_are_not_masked():
    profile = build_profile(machine(amd("gfx942", 0, 192), amd("gfx942", 1, 192), build="rocm"))
    assert masked(profile) == {}
    assert profile.device.reason.endswith("the first of 2 GPUs of the same model")


def test_the_plan_is_for_the_device_that_the_users_mask_shows_first():
    cards = (amd("gfx1032", 0, 8), amd("gfx1031", 1, 12), amd("gfx1030", 2, 16))
    own = {"ROCR_VISIBLE_DEVICES": "1,0"}
    profile = build_profile(machine(*cards, build="rocm", environment=own))
    assert profile.accelerator.index == 1
    assert masked(profile) == {}
    assert profile.overridden == {}
    assert profile.device.reason.endswith("the first GPU of ROCR_VISIBLE_DEVICES=1,0")
    worse = build_profile(
        machine(*cards, build="rocm", environment={"ROCR_VISIBLE_DEVICES": "0,1"})
    )
    assert worse.accelerator.index == 0
    assert worse.overridden["ROCR_VISIBLE_DEVICES"].profile_value == "1"


def test_a_mask_of_amds_alone_does_not_bind_cuda():
    own = {"HIP_VISIBLE_DEVICES": "0"}
    two = machine(nvidia("sm_75", 0, 8), nvidia("sm_86", 1, 24), build="cuda", environment=own)
    assert masked(build_profile(two))["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_users_mask_decides():
    cards = (amd("gfx1100", 0, 24), amd("gfx1031", 1, 12), amd("gfx1030", 2, 16))

    def seen(**environment):
        return [
            d.index for d in visible_devices(machine(*cards, build="rocm", environment=environment))
        ]

    assert seen() == [0, 1, 2]
    assert seen(HIP_VISIBLE_DEVICES="1") == [1]
    assert seen(CUDA_VISIBLE_DEVICES="2,0") == [2, 0]
    assert seen(HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="2") == [0]
    assert seen(ROCR_VISIBLE_DEVICES="1,2", HIP_VISIBLE_DEVICES="1") == [2]
    assert seen(ROCR_VISIBLE_DEVICES="2", HIP_VISIBLE_DEVICES="2") == []
    assert seen(HIP_VISIBLE_DEVICES="0,-1,2") == [0]
    assert seen(HIP_VISIBLE_DEVICES="1,1") == []
    profile = build_profile(machine(*cards, build="rocm", environment={"HIP_VISIBLE_DEVICES": "1"}))
    assert profile.accelerator.arch == "gfx1031"


def test_a_mask_names_a_die_by_its_identity():
    die = amd("gfx90a").model_copy(update={"unique_id": "0x3c7a91e05b2d4f10"})
    found = machine(die, build="rocm", environment={"ROCR_VISIBLE_DEVICES": "GPU-3c7a91e05b2d4f10"})
    assert visible_devices(found) == (die,)
    assert hidden(found) == ""


def test_a_setting_of_the_user_stays_and_is_told():
    own = {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True", "HIP_VISIBLE_DEVICES": "0,1"}
    cards = (amd("gfx1036", 0, 2, integrated=True), amd("gfx1100", 1, 24))
    profile = build_profile(machine(*cards, build="rocm", environment=own))
    assert profile.environment.value == {}
    theirs, ours, reason = profile.overridden["PYTORCH_HIP_ALLOC_CONF"]
    assert theirs == "expandable_segments:True"
    assert "expandable" not in ours
    assert "HIP" in reason
    assert profile.overridden["HIP_VISIBLE_DEVICES"][:2] == ("0,1", "1")


def test_a_setting_that_agrees_overrides_nothing():
    own = {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"}
    assert build_profile(machine(amd("gfx1200"), build="rocm", environment=own)).overridden == {}


def test_an_older_torch_is_told_by_the_older_name():
    assert (
        "PYTORCH_HIP_ALLOC_CONF"
        in build_profile(
            machine(amd("gfx906"), build="rocm", torch="2.9.1+rocm6.3")
        ).environment.value
    )


def test_a_clusters_caches_stay_on_the_node():
    environment = build_profile(
        read_machine(RECORDED / "mi250x-frontier-slurm.json")
    ).environment.value
    assert all(environment[name].startswith("/tmp/") for name in NODE_LOCAL)
    assert len(set(environment.values())) == len(environment)


def test_nothing_is_wanted_that_does_nothing_here():
    here = read_machine(RECORDED / "mi250x-frontier-slurm.json")
    own = here.software.model_copy(update={"environment": build_profile(here).environment.value})
    told = idle_settings(here.model_copy(update={"software": own}), build_profile(here))
    assert [effect.name for effect in told if effect.kind == "nothing"] == []


def test_cuda_gets_expandable_segments_where_they_exist():
    assert build_profile(machine(nvidia("sm_90"), build="cuda")).environment.value == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True"
    }
    wsl = machine(nvidia("sm_90"), build="cuda", around=Surroundings(wsl=True))
    assert build_profile(wsl).environment.value == {}


def test_compiling_on_a_gpu_needs_triton_and_a_compiler():
    here = read_machine(RECORDED / "mi300x-node.json")
    without_triton = here.model_copy(
        update={"software": here.software.model_copy(update={"triton": None})}
    )
    assert build_profile(without_triton).compile.value is False
    without_compiler = here.model_copy(
        update={"host": here.host.model_copy(update={"compiler": None})}
    )
    assert "compiler" in build_profile(without_compiler).compile.reason
    switched_off = machine(
        nvidia("sm_90"), build="cuda", environment={"TORCH_COMPILE_DISABLE": "1"}
    )
    assert build_profile(switched_off).compile.value is False


def test_without_a_compiler_nothing_is_compiled():
    assert build_profile(machine(compiler=None)).compile.value is False
    assert build_profile(machine(compiler="/usr/bin/clang++")).environment.value == {
        "CXX": "/usr/bin/clang++"
    }
