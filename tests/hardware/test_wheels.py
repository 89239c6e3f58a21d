"""Which PyTorch fits which machine: the rows of AMD's and PyTorch's release pages."""

import ast
import sys
from pathlib import Path

import pytest

from bloomery.hardware import wheels
from bloomery.hardware.wheels import AMD_INDEX, PYTORCH_INDEX, detect_site, fits, torch_builds

PYTHON = (3, 12)


@pytest.mark.parametrize(
    ("arch", "requirement", "index"),
    [
        ("gfx1031", "torch[device-gfx1031]==2.13.0+rocm10.0.0", AMD_INDEX),
        ("gfx1032", "torch[device-gfx1032]==2.13.0+rocm10.0.0", AMD_INDEX),
        ("gfx1010", "torch[device-gfx1010]==2.13.0+rocm10.0.0", AMD_INDEX),
        ("gfx1151", "torch[device-gfx1151]==2.13.0+rocm10.0.0", AMD_INDEX),
        ("gfx1030", "torch==2.13.0+rocm7.2", PYTORCH_INDEX + "rocm7.2"),
        ("gfx1100", "torch==2.13.0+rocm7.2", PYTORCH_INDEX + "rocm7.2"),
        ("gfx1201", "torch==2.13.0+rocm7.2", PYTORCH_INDEX + "rocm7.2"),
        ("gfx908", "torch==2.13.0+rocm7.2", PYTORCH_INDEX + "rocm7.2"),
        ("gfx90a", "torch==2.13.0+rocm7.2", PYTORCH_INDEX + "rocm7.2"),
        ("gfx942", "torch==2.13.0+rocm7.2", PYTORCH_INDEX + "rocm7.2"),
        ("gfx950", "torch==2.13.0+rocm7.2", PYTORCH_INDEX + "rocm7.2"),
        ("gfx906", "torch==2.9.1+rocm6.3", PYTORCH_INDEX + "rocm6.3"),
        ("gfx900", "torch==2.13.0", PYTORCH_INDEX + "cpu"),
        ("gfx803", "torch==2.13.0", PYTORCH_INDEX + "cpu"),
        ("sm_90", "torch==2.13.0", None),
        ("xe-hpg", "torch==2.13.0+xpu", PYTORCH_INDEX + "xpu"),
        ("xe2-hpg", "torch==2.13.0+xpu", PYTORCH_INDEX + "xpu"),
        ("xe-hpc", "torch==2.13.0+xpu", PYTORCH_INDEX + "xpu"),
        ("sm_70", "torch==2.13.0+cu126", PYTORCH_INDEX + "cu126"),
        (None, "torch==2.13.0", PYTORCH_INDEX + "cpu"),
    ],
)
def test_first_choice(arch, requirement, index):
    best = torch_builds(arch, python=PYTHON)[0]
    assert (best.requirement, best.index) == (requirement, index)


def test_the_command_is_one_that_a_shell_takes():
    command = torch_builds("gfx1031", python=PYTHON)[0].command
    assert (
        command == f"pip install --index-url {AMD_INDEX} 'torch[device-gfx1031]==2.13.0+rocm10.0.0'"
    )


def test_the_override_is_offered_to_its_own_family_only():
    borrowed = [build for build in torch_builds("gfx1031", python=PYTHON) if build.environment]
    assert borrowed[0].environment == (("HSA_OVERRIDE_GFX_VERSION", "10.3.0"),)
    for arch in ("gfx1010", "gfx1103", "gfx1151", "gfx906"):
        assert not any(build.environment for build in torch_builds(arch, python=PYTHON))


def test_native_wheels_forbid_the_override():
    for arch in ("gfx1031", "gfx1100", "gfx1030"):
        assert any("HSA_OVERRIDE" in rule for rule in torch_builds(arch, python=PYTHON)[0].never)


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        ("2.9.1", "rocm6.4"),
        ("2.10.0", "rocm7.1"),
        ("2.12.1", "rocm7.2"),
        ("2.14.1", "rocm7.14"),
        ("2.15.0", "rocm7.14"),
    ],
)
def test_the_index_follows_the_release(torch, expected):
    assert torch_builds("gfx1100", python=PYTHON, torch=torch)[0].index == PYTORCH_INDEX + expected


def test_an_older_torch_has_no_device_wheel_and_borrows():
    build = torch_builds("gfx1031", python=PYTHON, torch="2.9.1")[0]
    assert build.requirement == "torch==2.9.1+rocm6.4"
    assert build.environment


def test_amd_on_windows_takes_amds_wheels():
    build = torch_builds("gfx1100", python=PYTHON, system="Windows", cpu_arch="AMD64")[0]
    assert build.index == AMD_INDEX


def test_arm_and_strange_pythons_fall_back_to_the_cpu_and_say_why():
    assert "aarch64" in torch_builds("gfx1100", python=PYTHON, cpu_arch="aarch64")[0].reason
    assert "3.15" in torch_builds("gfx1100", python=(3, 15))[0].reason
    assert "aarch64" in torch_builds("xe2-hpg", python=PYTHON, cpu_arch="aarch64")[0].reason
    assert "3.15" in torch_builds("xe2-hpg", python=(3, 15))[0].reason


def test_an_old_nvidia_driver_takes_cuda_12():
    assert torch_builds("sm_86", python=PYTHON, driver=550)[0].requirement.endswith("+cu126")
    assert torch_builds("sm_86", python=PYTHON, driver=580)[0].requirement == "torch==2.13.0"


def test_what_is_installed_is_judged_by_its_kernels():
    rocm = {
        "torch": "2.13.0+rocm7.2",
        "hip": "7.2",
        "cuda": None,
        "kernels": ["gfx1030", "gfx90a:sramecc+"],
    }
    assert fits("gfx90a", **rocm) is None
    assert "no kernels for gfx1031" in str(fits("gfx1031", **rocm))
    assert "not a ROCm build" in str(
        fits("gfx1031", torch="2.13.0+cu130", hip=None, cuda="13.0", kernels=["sm_80"])
    )
    sycl = {"torch": "2.13.0+xpu", "hip": None, "cuda": None, "kernels": []}
    assert fits("xe2-hpg", **sycl, xpu="20250302") is None
    assert "not an XPU build" in str(fits("xe2-hpg", **sycl))
    assert fits(None, torch="2.13.0", hip=None, cuda=None, kernels=[]) is None
    assert "older" in str(fits(None, torch="2.6.0", hip=None, cuda=None, kernels=[]))


@pytest.mark.parametrize("arch", ["gfx1150", "gfx1151"])
def test_strix_takes_amds_wheels_first(arch):
    (only,) = torch_builds(arch, python=PYTHON)
    assert only.index == AMD_INDEX
    assert any("rocm7.2 or older" in rule for rule in only.never)
    first, second = torch_builds(arch, python=PYTHON, torch="2.14.0")
    assert (first.index, second.index) == (AMD_INDEX, PYTORCH_INDEX + "rocm7.14")


def test_rdna1_and_2_are_told_where_triton_ends():
    for arch in ("gfx1030", "gfx1031", "gfx1012"):
        assert any("Triton 3.9" in rule for rule in torch_builds(arch, python=PYTHON)[0].never)
    assert not any("Triton" in rule for rule in torch_builds("gfx1100", python=PYTHON)[0].never)


@pytest.mark.parametrize("arch", [None, "gfx90a"])
def test_frontier_has_instructions_of_its_own(arch):
    (build,) = torch_builds(arch, python=PYTHON, site="frontier")
    assert build.requirement == "torch==2.10.0+rocm7.1"
    assert build.before[0].startswith("module load ")
    assert "rocm/7.1.1" in build.before[0]
    assert any("PyPI" in rule for rule in build.never)
    assert any("torchrun" in rule for rule in build.never)
    assert not build.cpu


def test_lumi_has_a_container_that_nothing_is_installed_over():
    (build,) = torch_builds("gfx90a", python=PYTHON, site="lumi")
    assert "lumi-pytorch-rocm" in build.before[0]
    assert any("in LUMI's container" in rule for rule in build.never)


def test_an_asked_for_release_wins_over_the_site():
    assert torch_builds("gfx90a", python=PYTHON, torch="2.12.0", site="frontier")[
        0
    ].requirement.endswith("rocm7.2")
    assert (
        torch_builds("gfx90a", python=PYTHON, site="setonix")[0].requirement
        == "torch==2.13.0+rocm7.2"
    )


def test_a_site_is_known_on_its_login_nodes(tmp_path, monkeypatch):
    for name in ("SLURM_CLUSTER_NAME", "LMOD_SYSTEM_NAME", "PAWSEY_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    assert detect_site(tmp_path) == ""
    (tmp_path / "appl/lumi").mkdir(parents=True)
    assert detect_site(tmp_path) == "lumi"
    monkeypatch.setenv("LMOD_SYSTEM_NAME", "Frontier")
    assert detect_site(tmp_path) == "frontier"


def test_the_table_needs_nothing_but_the_standard_library():
    tree = ast.parse(Path(wheels.__file__).read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert all(name.split(".")[0] in sys.stdlib_module_names for name in imported)
