"""Installed packages, shell files and pip's constraints, read from constructed environments."""

import os
import sys

import pytest

from bloomery.hardware.detect_software import matters, read_software
from kfd_trees import write


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A home folder and a Python environment of their own below a root."""
    root = tmp_path / "root"
    monkeypatch.setenv("HOME", "/home/sam")
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setattr(sys, "prefix", "/home/sam/project/.venv")
    root.mkdir()
    return root


def distribution(folder, name, version, *, metadata="", requested=False, at=1_700_000_000):
    info = folder / f"{name}-{version}.dist-info"
    write(
        info / "METADATA",
        f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{metadata}\nText of the page\n",
    )
    write(info / "RECORD", "")
    os.utime(info / "RECORD", (at, at))
    if requested:
        write(info / "REQUESTED", "")


def test_what_pulled_torch_in_is_seen(environment, tmp_path, monkeypatch):
    site = tmp_path / "site"
    distribution(site, "torch", "2.13.0", at=1_700_000_000)
    distribution(
        site,
        "xformers",
        "0.0.35",
        metadata="Requires-Dist: numpy\nRequires-Dist: torch>=2.10\n",
        requested=True,
    )
    distribution(
        site, "transformers", "5.2", metadata='Requires-Dist: torch>=2.4; extra == "torch"\n'
    )
    distribution(site, "old_style", "1", metadata="Requires-Dist: torch (>=2.0,<3)\n")
    distribution(site, "pytorch_lightning", "1", metadata="Requires-Dist: torchmetrics>0.7\n")
    distribution(site, "amd_torch_device_gfx1031", "2.13.0+rocm10.0.0")
    monkeypatch.setattr(sys, "path", [str(site)])
    software = read_software(environment)
    assert {package.name: package.requires_torch for package in software.packages} == {
        "amd-torch-device-gfx1031": "",
        "old-style": "torch>=2.0,<3",
        "torch": "",
        "xformers": "torch>=2.10",
    }
    torch, xformers = software.packages[2:]
    assert (torch.requested, torch.installed) == (False, 1_700_000_000)
    assert (xformers.requested, xformers.version) == (True, "0.0.35")


def test_lines_that_set_what_matters(environment):
    write(
        environment / "home/sam/.bashrc",
        "alias ll='ls -l'\n# export HSA_OVERRIDE_GFX_VERSION=9.0.0\nexport HSA_OVERRIDE_GFX_VERSION='10.3.0' # old\n"
        "export PATH=$PATH:/opt/bin\nexport NCCL_DEBUG=INFO HIP_VISIBLE_DEVICES=0\nexport HSA_XNACK\n",
    )
    write(environment / "home/sam/.config/fish/config.fish", "set -gx HSA_ENABLE_SDMA 0\n")
    write(
        environment / "etc/environment",
        'PATH="/usr/bin"\nPYTORCH_ALLOC_CONF="expandable_segments:True"\n',
    )
    write(
        environment / "home/sam/project/.venv/conda-meta/state",
        '{"env_vars": {"AMD_LOG_LEVEL": "4"}}',
    )
    write(
        environment / "home/sam/project/.venv/bin/activate",
        "VIRTUAL_ENV=x\nexport TORCH_BLAS_PREFER_HIPBLASLT=0\n",
    )
    found = [(s.file, s.line, s.name, s.value) for s in read_software(environment).settings]
    assert found == [
        ("~/.bashrc", 3, "HSA_OVERRIDE_GFX_VERSION", "10.3.0"),
        ("~/.bashrc", 5, "NCCL_DEBUG", "INFO"),
        ("~/.bashrc", 5, "HIP_VISIBLE_DEVICES", "0"),
        ("~/.config/fish/config.fish", 1, "HSA_ENABLE_SDMA", "0"),
        ("/etc/environment", 2, "PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ("~/project/.venv/bin/activate", 2, "TORCH_BLAS_PREFER_HIPBLASLT", "0"),
        ("~/project/.venv/conda-meta/state", 1, "AMD_LOG_LEVEL", "4"),
    ]


def test_the_pin_that_set_up_writes_is_found(environment):
    prefix = environment / "home/sam/project/.venv"
    assert read_software(environment).pinned == ""
    write(
        prefix / "pip.conf",
        "[install]\nconstraint = file:///home/sam/project/.venv/torch-pin.txt\n",
    )
    write(
        prefix / "torch-pin.txt", "# Chosen for the GPU\ntorchvision==0.28\ntorch==2.13.0+rocm7.2\n"
    )
    assert read_software(environment).pinned == "torch==2.13.0+rocm7.2"


def test_a_pin_of_something_else_is_none(environment, monkeypatch):
    write(environment / "etc/pip.conf", "[global]\nconstraint = /etc/pins.txt\n")
    write(environment / "etc/pins.txt", "torchmetrics==1.4\nnumpy<3\n")
    assert read_software(environment).pinned == ""
    write(environment / "tmp/other.txt", "torch==2.9.1+rocm6.3\n")
    monkeypatch.setenv("PIP_CONSTRAINT", "/tmp/other.txt")
    assert read_software(environment).pinned == "torch==2.9.1+rocm6.3"


def test_variables_that_matter():
    assert matters("HSA_OVERRIDE_GFX_VERSION")
    assert matters("NCCL_SOCKET_IFNAME")
    assert not matters("HF_TOKEN")
    assert not matters("HOME")


def test_a_record_names_no_user(environment, monkeypatch):
    assert read_software(environment).prefix == "~/project/.venv"
