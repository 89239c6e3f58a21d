"""The doctor's findings: a table of machines, and what each rule does beyond them."""

import re
import subprocess

import pytest

from bloomery.core.units import GIB, MIB
from bloomery.hardware.doctor.diagnose import diagnose, ready
from bloomery.hardware.doctor.software import reported_arch
from bloomery.hardware.machine import Accelerator, Display, Package, Probe, ShellSetting
from bloomery.hardware.wheels import torch_builds
from changed_machines import AMD_WHEEL, MACHINES, changed_part, ids, machine, only

PIN = "bloomery doctor --fix {}"
FRONTIER = torch_builds("gfx90a", python=(3, 12), site="frontier")[0].before
# machine -> (finding, the first command of its fix), in their order
EXPECTED = {
    "arc-a770-nothing-installed": [
        ("not-in-group", "sudo usermod -a -G render,video $LOGNAME"),
        ("level-zero-missing", "sudo apt install libze1 libze-intel-gpu1"),
        (
            "wrong-build",
            "pip install --force-reinstall --index-url https://download.pytorch.org/whl/xpu torch==2.13.0+xpu",
        ),
    ],
    "arc-b580": [],
    "container-without-kfd": [
        ("container-without-gpu", "bloomery doctor --docker"),
        (
            "shm-small",
            "docker run --ipc=host ...",
        ),
        ("torch-not-pinned", PIN.format(3)),
    ],
    "h200": [],
    "laptop-without-a-gpu": [("no-gpu", "bloomery demo")],
    "mi100-two-without-iommu-pt": [
        (
            "iommu-not-passthrough",
            """sudo sed -i.bak 's/^GRUB_CMDLINE_LINUX="/&amd_iommu=on iommu=pt /' /etc/default/grub""",
        ),
        ("torch-not-pinned", PIN.format(2)),
    ],
    "mi250x-frontier-old-module": [
        (
            "amd-driver-old",
            "# ask the cluster's administrators for amdgpu 30.20 or newer",
        ),
        ("rocm-mixed", FRONTIER[0]),
        ("torch-not-pinned", PIN.format(3)),
    ],
    "mi250x-frontier-slurm": [("torch-not-pinned", PIN.format(1))],
    "mi300x-node": [
        (
            "numa-balancing",
            "sudo sysctl kernel.numa_balancing=0",
        ),
        ("torch-not-pinned", PIN.format(2)),
    ],
    "mi50-wheel-without-its-kernels": [
        (
            "wheel-unfit",
            "pip install --force-reinstall --index-url https://download.pytorch.org/whl/rocm6.3 torch==2.9.1+rocm6.3",
        ),
        ("amd-driver-inbox", "bloomery doctor --probe"),
        ("torch-not-pinned", PIN.format(3)),
    ],
    "rtx-3090-old-driver": [
        (
            "cuda-too-new",
            "pip install --force-reinstall --index-url https://download.pytorch.org/whl/cu126 torch==2.13.0+cu126",
        ),
    ],
    "rtx-5070-ti-cuda-12.6-wheel": [
        ("cuda-too-old", "pip install --force-reinstall torch==2.13.0")
    ],
    "rx-6700-xt": [],
    "rx-6700-xt-override": [
        ("override-harms", "unset HSA_OVERRIDE_GFX_VERSION"),
        ("torch-not-pinned", PIN.format(2)),
    ],
    "rx-6700-xt-wrong-wheel": [("wrong-build", AMD_WHEEL), ("torch-not-pinned", PIN.format(2))],
    "rx-6700-xt-wrong-wheel-override": [
        ("wrong-build", AMD_WHEEL),
        ("override-harms", "unset HSA_OVERRIDE_GFX_VERSION"),
        ("torch-not-pinned", PIN.format(3)),
    ],
    "rx-6800-driver-blacklisted": [
        (
            "driver-blacklisted",
            "sudo sed -i.bak -E '/^ *(blacklist|install) +amdgpu( |$)/d' /etc/modprobe.d/vfio.conf",
        ),
        ("torch-not-pinned", PIN.format(2)),
    ],
    "rx-7900-xt-cuda-wheel": [
        (
            "wrong-build",
            "pip install --force-reinstall --index-url https://download.pytorch.org/whl/rocm7.2 torch==2.13.0+rocm7.2",
        ),
        ("torch-not-pinned", PIN.format(2)),
    ],
    "rx-7900-xtx-old-driver": [
        (
            "amd-driver-old",
            "sudo apt install amdgpu-dkms && sudo reboot",
        ),
        (
            "rocm-mixed",
            """export LD_LIBRARY_PATH=$(echo "$LD_LIBRARY_PATH" | tr ':' '\\n' | grep -v rocm | paste -sd:)""",
        ),
        ("torch-not-pinned", PIN.format(3)),
    ],
    "rx-7900-xtx-behind-an-igpu": [
        ("integrated-gpu-hidden", "export HIP_VISIBLE_DEVICES=1"),
        ("torch-not-pinned", PIN.format(2)),
    ],
    "rx-9060-xt-math-attention": [
        ("attention-is-math", "export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1"),
        ("torch-not-pinned", PIN.format(2)),
    ],
    "strix-halo": [
        (
            "shared-memory-gpu",
            "# to raise the limit, set amdgpu.gttsize or ttm.pages_limit on the kernel command line",
        ),
        ("torch-not-pinned", PIN.format(2)),
    ],
    "two-zen-4-cores": [("no-gpu", "bloomery demo")],
    "user-added-to-render-not-logged-in-again": [
        ("login-again", "newgrp render"),
        ("amd-driver-inbox", "bloomery doctor --probe"),
        ("torch-not-pinned", PIN.format(3)),
    ],
    "user-outside-render": [
        ("not-in-group", "sudo usermod -a -G render,video $LOGNAME"),
        ("amd-driver-inbox", "bloomery doctor --probe"),
        ("torch-not-pinned", PIN.format(3)),
    ],
    "wsl": [
        ("wsl-detection-off", "export HSA_ENABLE_DXG_DETECTION=1"),
        ("torch-not-pinned", PIN.format(2)),
    ],
}
READY = {
    "arc-b580",
    "h200",
    "laptop-without-a-gpu",
    "mi100-two-without-iommu-pt",
    "mi250x-frontier-slurm",
    "mi300x-node",
    "rx-6700-xt",
    "rx-7900-xtx-behind-an-igpu",
    "rx-9060-xt-math-attention",
    "strix-halo",
    "two-zen-4-cores",
}


def test_every_recorded_machine_has_a_diagnosis():
    assert {path.stem for path in MACHINES.glob("*.json")} == EXPECTED.keys()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_machine_gets_exactly_these_findings_and_commands(name):
    found = diagnose(machine(name))
    commands = [re.split("  # |: the driver", finding.fix[0])[0] for finding in found]
    assert list(zip([finding.id for finding in found], commands, strict=True)) == EXPECTED[name]
    assert ready(found) == (name in READY)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_what_mends_can_be_pasted_into_a_shell(name):
    for finding in diagnose(machine(name)):
        script = "\n".join((*finding.fix, finding.verify))
        done = subprocess.run(
            ["bash", "-n"], input=script, text=True, capture_output=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), finding.fix
        assert finding.what and finding.evidence


def test_who_brought_the_wrong_wheel_is_named():
    found = only(machine("rx-6700-xt-wrong-wheel"), "wrong-build")
    assert found.what == "PyTorch finds no GPU: CUDA build installed"
    assert re.search("NVIDIA.*GPU is AMD", found.headline)
    assert found.evidence.startswith("torch.version.hip is None; installed on ")
    assert "not requested by name" in found.evidence
    assert "xformers 0.0.35, which requires torch>=2.10" in found.evidence
    assert "requested by name" in only(machine("rx-7900-xt-cuda-wheel"), "wrong-build").evidence


def test_the_line_that_sets_the_override_is_named():
    found = only(machine("rx-6700-xt-override"), "override-harms")
    assert found.evidence == "~/.bashrc line 118"
    assert (
        found.fix == ("unset HSA_OVERRIDE_GFX_VERSION  # and delete that line",) and not found.run
    )
    assert "has kernels for gfx1031" in found.what


@pytest.mark.parametrize(
    ("name", "torch", "value", "expected"),
    [
        ("rx-6700-xt", "2.13.0+rocm7.2", "10.3.0", "override-helps"),  # the wheel has gfx1030 alone
        ("rx-6700-xt", "2.13.0+rocm7.2", "", "arch-not-in-wheel"),
        ("rx-6700-xt", "2.13.0+rocm10.0.0", "10.3.0", "device-package-missing override-harms"),
        # another family
        ("rx-6700-xt", "2.13.0+rocm7.2", "11.0.0", "arch-not-in-wheel override-harms"),
        ("rx-9060-xt-math-attention", "2.13.0+rocm7.2", "12.0.0", "override-needless"),
        ("rx-9060-xt-math-attention", "2.13.0+rocm7.2", "12.0.1", "override-harms"),
        # the iGPU would claim it, too
        ("rx-7900-xtx-behind-an-igpu", "2.13.0+rocm7.2", "11.0.0", "override-harms"),
        ("strix-halo", "2.13.0+rocm7.2", "", "wheel-unfit"),
        ("mi300x-node", "2.9.1+rocm6.4", "", None),
        ("mi300x-node", "2.13.0a0+git1234", "", None),  # nobody wrote down what it brings
    ],
)
def test_kernels_and_override(name, torch, value, expected):
    environment = {"HSA_OVERRIDE_GFX_VERSION": value} if value else {}
    one = machine(
        name,
        software__torch=torch,
        software__environment=environment,
        software__packages=(),
        software__settings=(),
    )
    found = " ".join(id for id in ids(one) if re.match("override|arch|wheel|device-package", id))
    assert found == (expected or "")


def test_of_two_ways_amds_wheel_comes_first():
    found = only(
        machine(software__torch="2.13.0+rocm7.2", software__packages=()), "arch-not-in-wheel"
    )
    assert found.fix[0].endswith(AMD_WHEEL.removeprefix("pip install --force-reinstall "))
    assert found.fix[1].startswith("export HSA_OVERRIDE_GFX_VERSION=10.3.0  # or")


def test_amds_wheel_without_the_package_of_this_chip():
    packages = (Package(name="amd-torch-device-gfx1100", version="2.13.0+rocm10.0.0"),)
    assert "device-package-missing" in ids(machine(software__packages=packages))
    assert "device-package-missing" in ids(machine(software__packages=()))


@pytest.mark.parametrize(
    ("value", "chip"),
    [("10.3.0", "gfx1030"), ("9.0.10", "gfx90a"), ("11.5.1", "gfx1151"), ("x", "")],
)
def test_what_an_override_claims(value, chip):
    assert reported_arch(value) == chip


def test_a_pin_of_the_old_build_does_not_hold_up_the_mending_command():
    one = machine("rx-6700-xt-wrong-wheel", software__pinned="torch==2.13.0+cpu")
    assert only(one, "wrong-build").fix[0] == "PIP_CONSTRAINT=/dev/null " + AMD_WHEEL
    assert "torch==2.13.0+cpu" in only(one, "torch-not-pinned").evidence


def test_no_torch_and_an_old_one():
    assert only(machine(software__torch=None, software__build=None), "no-torch").level == "blocks"
    assert (
        only(machine(software__torch="2.5.1+rocm6.2", software__packages=()), "torch-too-old").level
        == "blocks"
    )


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"HIP_VISIBLE_DEVICES": "-1"}, "all-gpus-hidden"),
        ({"ROCR_VISIBLE_DEVICES": "1"}, "all-gpus-hidden"),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"}, "two-maskings"),
        ({"ROCR_VISIBLE_DEVICES": "0"}, None),
        ({"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}, "expandable-segments"),
        ({"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8"}, None),
    ],
)
def test_variables(environment, found):
    assert ids(machine(software__environment=environment)) == ([found] if found else [])


def test_two_maskings_stop_only_where_the_second_reaches_beyond_the_first():
    within = machine(
        "mi300x-node",
        software__environment={"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,1"},
    )
    assert only(within, "two-maskings").level == "note"
    beyond = machine(
        "mi300x-node",
        software__environment={"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"},
    )
    assert only(beyond, "two-maskings").level == "blocks"


def test_masked_gpus_are_not_broken():
    found = only(machine(host__around__masked_gpus=3), "masked-gpus")
    assert found.level == "note"
    assert found.what.startswith("3 more GPUs")


def test_a_container_wants_the_hosts_number_of_the_group():
    one = machine("user-outside-render", host__around__container="docker")
    assert only(one, "container-group").fix[0].startswith("docker run --group-add 992 ")


def test_selinux_is_thought_of_where_it_is():
    one = machine(
        "user-outside-render",
        host__distribution="fedora 42",
        host__access__groups=("sam", "render"),
    )
    assert "ausearch" in only(one, "access-denied").fix[0]
    assert (
        "ausearch"
        not in only(
            machine("user-outside-render", host__access__groups=("render",)), "access-denied"
        ).fix[0]
    )


def test_drivers_that_are_not_loaded():
    plain = machine("rx-6800-driver-blacklisted", host__driver__blacklisted="")
    assert only(plain, "driver-not-loaded").fix[0].startswith("sudo modprobe amdgpu")
    nvidia = machine("h200", accelerators=(), host__driver__nvidia="")
    assert only(nvidia, "nvidia-driver-missing").level == "blocks"


def test_an_intel_gpu_without_a_driver_is_named_and_graphics_of_a_processor_are_not():
    laptop = machine("laptop-without-a-gpu")

    def with_display(device_id: int, driver: str) -> list[str]:
        display = {"address": "0000:03:00.0", "vendor": 0x8086, "device_id": device_id}
        return ids(changed_part(laptop, ["host", "displays"], (Display(**display, driver=driver),)))

    assert "intel-driver-missing" in with_display(0xE20B, "")
    assert "no-gpu" not in with_display(0xE20B, "")
    assert "intel-driver-missing" in with_display(0xE20B, "vfio-pci")
    assert "intel-driver-missing" not in with_display(0xE20B, "xe")
    assert "intel-driver-missing" not in with_display(0x4680, "")  # UHD 770
    assert "no-gpu" in with_display(0x4680, "i915")


@pytest.mark.parametrize(
    ("says", "distribution", "before", "after", "again"),
    [
        (
            "/etc/modprobe.d/a.conf",
            "ubuntu 24.04",
            "blacklist amdgpu\nblacklist nouveau\n",
            "blacklist nouveau\n",
            "sudo update-initramfs -u && sudo reboot",
        ),
        (
            "/etc/modprobe.d/a.conf",
            "fedora 43",
            "install amdgpu /bin/false\n",
            "",
            "sudo dracut --force && sudo reboot",
        ),
        (
            "modprobe.blacklist=amdgpu in /proc/cmdline",
            "debian 13",
            'LINUX="quiet modprobe.blacklist=amdgpu"\n',
            'LINUX="quiet modprobe.blacklist="\n',
            "sudo update-grub && sudo reboot",
        ),
        (
            "module_blacklist=nouveau,amdgpu in /proc/cmdline",
            "rhel 9.6",
            'L="module_blacklist=nouveau,amdgpu quiet"\n',
            'L="module_blacklist=nouveau, quiet"\n',
            "sudo grub2-mkconfig -o /boot/grub2/grub.cfg && sudo reboot",
        ),
    ],
)
def test_what_keeps_the_driver_out_is_taken_out_where_it_stands(
    says, distribution, before, after, again, tmp_path
):
    found = machine("rx-6800-driver-blacklisted")
    host = found.host.model_copy(
        update={
            "distribution": distribution,
            "driver": found.host.driver.model_copy(update={"blacklisted": says}),
        }
    )
    finding = only(found.model_copy(update={"host": host}), "driver-blacklisted")
    file = says if says.startswith("/") else "/etc/default/grub"
    assert finding.fix[-1] == again and file in finding.fix[0] and "/proc" not in finding.fix[0]
    (tmp_path / "file").write_text(before)
    command = finding.fix[0].removeprefix("sudo ").replace(file, str(tmp_path / "file"))
    subprocess.run(command, shell=True, check=True)
    assert (tmp_path / "file").read_text() == after


def test_slurm_jobs_and_login_nodes():
    frontier = machine("mi250x-frontier-slurm", accelerators=())
    assert "slurm-without-gpu" in ids(frontier)
    login = machine(
        "mi250x-frontier-slurm", accelerators=(), host__around__slurm={}, host__displays=()
    )
    assert "login-node" in ids(login)
    one_each = machine("mi250x-frontier-slurm")
    one_each = changed_part(one_each, ["accelerators"], one_each.accelerators[:1])
    assert only(one_each, "slurm-shows-fewer").level == "note"


def test_the_machine_around_the_gpu():
    debian, fedora = (
        machine("h200", host__compiler=None, host__distribution=name)
        for name in ("debian 12", "fedora 42")
    )
    assert only(debian, "no-compiler").fix == ("sudo apt install g++",)
    assert only(fedora, "no-compiler").fix[0].startswith("sudo dnf")
    assert only(machine(host__disk_free_bytes=5 * GIB), "little-disk").level == "note"
    assert only(machine(host__disk_free_bytes=100 * MIB), "little-disk").level == "blocks"
    # one card, no container
    assert "shm-small" not in ids(machine(host__around__shared_memory_bytes=64 * MIB))
    assert (
        only(machine("mi300x-node", host__around__shared_memory_bytes=64 * MIB), "shm-small").level
        == "blocks"
    )


def test_memory_that_others_hold():
    one = machine()
    busy = one.accelerators[0].model_copy(update={"memory_used_bytes": 5 * GIB})
    found = only(changed_part(one, ["accelerators"], (busy,)), "gpu-memory-used")
    assert "5.0 of 12.0 GiB" in found.what
    assert found.fix[0].startswith("fuser -v /dev/kfd /dev/dri/renderD128")


@pytest.mark.parametrize(
    ("name", "version", "found"),
    [
        ("rx-6700-xt", "0.49.2", "bitsandbytes-old"),
        ("rx-6700-xt", "0.50.2", None),
        ("h200", "0.49.2", None),
    ],
)
def test_bitsandbytes(name, version, found):
    one = machine(name)
    packages = (*one.software.packages, Package(name="bitsandbytes", version=version))
    assert ids(changed_part(one, ["software", "packages"], packages)) == ([found] if found else [])


def test_bitsandbytes_has_to_be_built_for_an_old_chip():
    one = machine(
        "mi50-wheel-without-its-kernels",
        software__packages=(Package(name="bitsandbytes", version="0.50.2"),),
    )
    assert "-DBNB_ROCM_ARCH=gfx906" in only(one, "bitsandbytes-without-arch").fix[1]


def test_companions_of_another_index():
    one = machine(
        "mi300x-node", software__packages=(Package(name="torchvision", version="0.28.0"),)
    )
    assert only(one, "companions-mismatch").fix[0].startswith("pip uninstall torchvision")
    same = machine(
        "mi300x-node", software__packages=(Package(name="torchvision", version="0.28.0+rocm7.2"),)
    )
    assert "companions-mismatch" not in ids(same)


@pytest.mark.parametrize(
    ("driver", "arch", "blocks"),
    [("560.35.03", "sm_90", True), ("580.82.07", "sm_90", False), ("580.82.07", "sm_70", True)],
)
def test_cuda_13_needs_a_new_driver_and_turing(driver, arch, blocks):
    one = machine("h200", host__driver__nvidia=driver)
    card = one.accelerators[0].model_copy(update={"arch": arch})
    found = [
        f for f in diagnose(changed_part(one, ["accelerators"], (card,))) if f.id == "cuda-too-new"
    ]
    assert bool(found) == blocks
    assert all("whl/cu126" in finding.fix[0] for finding in found)


def test_a_line_in_a_shell_file_counts_though_this_shell_is_older():
    setting = ShellSetting(
        name="HSA_OVERRIDE_GFX_VERSION", value="10.3.0", file="~/.bashrc", line=3
    )
    assert "override-harms" in ids(machine(software__settings=(setting,)))


def test_an_unknown_chip_gets_no_made_up_advice():
    card = Accelerator(index=0, vendor="amd", name="new", arch="gfx1399", memory_bytes=16 * GIB)
    one = changed_part(machine("mi300x-node"), ["accelerators"], (card,))
    found = only(one, "arch-not-in-wheel")
    assert "  # for the CPU: no PyTorch" in found.fix[0]
    assert not any("OVERRIDE" in step for step in found.fix)


def test_ids_are_words():
    assert all(re.fullmatch(r"[a-z0-9-]+", id) for table in EXPECTED.values() for id, _ in table)


def test_no_compiler_is_said_where_one_would_be_used():
    assert only(machine("h200", host__compiler=None), "no-compiler").level == "slows"
    # never compiled there
    assert "no-compiler" not in ids(machine("rx-6700-xt", host__compiler=None))


@pytest.mark.parametrize(
    ("driver", "torch", "found"),
    [
        ("6.14.14", "2.10.0+rocm7.1", None),  # 30.10 of September 2025 under a ROCm of October
        ("6.12.12", "2.13.0+rocm7.2", None),  # nine months, three releases
        # AMD lists 30.30's ROCm and 6.3 as tested, 13 months apart
        ("6.10.5", "2.13.0+rocm7.2", None),
        ("6.8.5", "2.10.0+rocm7.1", "amd-driver-old blocks"),
        ("6.8.5", "2.9.1+rocm6.4", None),  # two releases
        ("5.18.13", "2.9.1+rocm6.4", "amd-driver-old blocks"),
        ("6.19.14.31400000", "2.13.0+rocm7.2", None),
        ("6.19.14.31400000", "2.9.1+rocm6.3", "amd-driver-newer note"),
        ("6.19.14.31400000", "2.14.0+rocm10.1.0", None),
    ],
)
def test_amds_driver_is_compared_with_the_rocm_of_the_wheel(driver, torch, found):
    one = machine(
        "mi300x-node", host__driver__amdgpu_version=driver, software__torch=torch, software__hip=""
    )
    told = [
        f"{finding.id} {finding.level}"
        for finding in diagnose(one)
        if finding.id.startswith("amd-driver")
    ]
    assert told == ([found] if found else [])


def test_an_old_driver_that_works_is_a_note_and_the_build_that_fits_it_is_named():
    old = machine("rx-7900-xtx-old-driver")
    found = only(old, "amd-driver-old")
    assert re.search(
        r"amdgpu 6\.8\.5 .* ROCm 6\.2, torch 2\.13\.0\+rocm7\.2 .* ROCm 7\.2", found.evidence
    )
    assert "torch==2.9.1+rocm6.4" in found.fix[-1]  # of September's driver 6.4 is two releases away
    assert found.run and found.run in found.fix[-1]
    probed = old.model_copy(update={"probes": (Probe(name="matmul-float32", outcome="ok"),)})
    assert only(probed, "amd-driver-old").level == "note"


@pytest.mark.parametrize(
    ("kernel", "torch", "found"),
    [
        ("6.8.0-60-generic", "2.13.0+rocm7.2", True),
        ("6.8.0-60-generic", "2.9.1+rocm6.4", False),
        ("6.11.0-29-generic", "2.13.0+rocm7.2", False),
    ],
)
def test_the_kernels_own_driver_is_compared_with_linux(kernel, torch, found):
    one = machine(
        "mi300x-node",
        host__driver__kernel=kernel,
        host__driver__amdgpu_version="",
        software__torch=torch,
        software__hip="",
    )
    assert ("amd-driver-inbox" in ids(one)) == found


@pytest.mark.parametrize(
    ("modules", "path", "found"),
    [
        (("rocm/7.1.1",), "", None),
        (("rocm/6.0.0",), "", "rocm-mixed blocks"),
        (("rocm/7.0.2",), "", "rocm-mixed note"),
        (("PrgEnv-gnu/8.7.0",), "/opt/rocm-6.2.4/lib:/usr/lib", "rocm-mixed blocks"),
        ((), "", "site-modules-missing note"),
        ((), "/opt/cray/lib", "site-modules-missing note"),
    ],
)
def test_loaded_libraries_are_compared_with_those_of_the_wheel(modules, path, found):
    one = machine(
        "mi250x-frontier-slurm",
        host__around__modules=modules,
        software__environment={"LD_LIBRARY_PATH": path},
    )
    told = [
        f"{f.id} {f.level}" for f in diagnose(one) if f.id in ("rocm-mixed", "site-modules-missing")
    ]
    assert told == ([found] if found else [])
    if found:
        finding = only(one, found.split()[0])
        assert finding.fix == FRONTIER  # the site's own line


def test_a_cluster_is_told_what_to_load_before_its_wheel_is_installed():
    bare = machine(
        "mi250x-frontier-slurm", software__torch=None, software__build=None, software__hip=""
    )
    assert only(bare, "no-torch").fix[:3] == (
        *FRONTIER,
        "pip install --index-url https://download.pytorch.org/whl/rocm7.1 torch==2.10.0+rocm7.1",
    )


def test_rocm_path_matters_for_what_is_compiled_here_alone():
    one = machine("mi300x-node", software__environment={"ROCM_PATH": "/opt/rocm"})
    assert only(one, "rocm-path-other").level == "note"
    assert "rocm-path-other" not in ids(machine("mi300x-node"))
    wheel = machine(
        "mi300x-node", host__driver__rocm="7.1.0", software__environment={"ROCM_PATH": "/opt/rocm"}
    )
    assert "rocm-path-other" not in ids(wheel)


@pytest.mark.parametrize(
    ("driver", "cuda", "arch", "found"),
    [
        ("535.183.01", "12.6", "sm_86", None),
        ("470.256.02", "12.6", "sm_86", "cuda-too-new"),
        ("570.133.07", "12.8", "sm_120", None),
        ("565.57.01", "12.8", "sm_120", "cuda-too-new"),
        ("580.82.07", "12.6", "sm_120", "cuda-too-old"),
        ("580.82.07", "13.0", "sm_120", None),
        ("", "13.0", "sm_86", None),
    ],
)
def test_nvidias_driver_is_compared_with_the_cuda_of_the_wheel(driver, cuda, arch, found):
    local = "cu" + cuda.replace(".", "")
    one = machine(
        "rtx-3090-old-driver",
        host__driver__nvidia=driver,
        software__cuda=cuda,
        software__torch=f"2.10.0+{local}",
    )
    card = one.accelerators[0].model_copy(update={"arch": arch})
    one = changed_part(one, ["accelerators"], (card,))
    assert [id for id in ids(one) if id.startswith("cuda-")] == ([found] if found else [])
    if driver.startswith("470"):  # no build of CUDA 12 runs on it, either
        assert only(one, "cuda-too-new").fix == (
            "sudo apt install nvidia-driver-525 && sudo reboot",
        )
