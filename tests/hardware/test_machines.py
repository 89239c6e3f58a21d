"""The recorded and constructed machines under tests/machines: they load, survive JSON and agree with the tables."""

from pathlib import Path

import pytest

from bloomery.core.units import GIB
from bloomery.hardware.machine import Machine, read_machine
from bloomery.hardware.profile import install, with_gpu
from bloomery.hardware.specs import arch_spec, find_gpu, gpu_spec

FOLDER = Path(__file__).parent.parent / "machines"
FILES = sorted(FOLDER.glob("*.json"))

machines = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_every_kind_of_machine_is_there():
    assert len(FILES) >= 14
    seen = {device.arch for path in FILES for device in read_machine(path).accelerators}
    assert seen >= {"gfx906", "gfx908", "gfx90a", "gfx942", "gfx1031", "gfx1100", "gfx1151", "gfx1200", "sm_90"}


@machines
def test_a_machine_loads_and_survives_json(path):
    machine = read_machine(path)
    assert Machine.model_validate_json(machine.model_dump_json()) == machine
    written = machine.model_dump_json(indent=1, exclude_defaults=True) + "\n"
    assert path.read_text() == written  # a key that the type does not have would be dropped in silence


@machines
def test_a_machine_says_where_it_comes_from(path):
    assert read_machine(path).origin.startswith(("constructed from ", "recorded on "))


@machines
def test_devices_agree_with_the_table(path):
    for device in read_machine(path).accelerators:
        assert arch_spec(device.arch) is not None
        spec = gpu_spec(device)
        if spec is not None and spec.memory_gib:  # the driver keeps a little of the nominal memory
            nominal = min(spec.memory_gib, key=lambda gib: abs(gib * GIB - device.memory_bytes))
            assert 0.97 * nominal * GIB < device.memory_bytes <= nominal * GIB
        if device.vendor == "amd":
            assert device.compute_units > 0
            assert device.device_id > 0
            assert device.node


@machines
def test_the_build_agrees_with_the_version(path):
    software = read_machine(path).software
    local = (software.torch or "").partition("+")[2]
    wanted = "rocm" if local.startswith("rocm") else "cuda" if local.startswith("cu1") else "cpu"
    assert software.build == wanted
    assert bool(software.hip) == (wanted == "rocm")
    assert bool(software.cuda) == (wanted == "cuda")


@machines
def test_what_the_kernel_shows_fits_together(path):
    machine = read_machine(path)
    cards = {device.pci_address for device in machine.accelerators if device.vendor == "amd"}
    assert cards <= {display.address for display in machine.host.displays}
    if cards:
        assert machine.host.driver.amdgpu
        assert machine.host.access.kfd != "absent"
    indices = [device.index for device in machine.accelerators]
    assert indices == list(range(len(indices)))


def test_a_named_gpu_gets_the_build_that_the_doctor_would_install_here():
    here = read_machine(FOLDER / "mi250x-frontier-slurm.json")
    planned = with_gpu(here, find_gpu("MI250X"))
    assert planned.software.torch == "2.10.0+rocm7.1"  # the site's own, not what fits a gfx90a elsewhere
    assert planned.software.torch in install(here)
    old = read_machine(FOLDER / "h200.json")
    driver = old.host.driver.model_copy(update={"nvidia": "535.183.01"})
    old = old.model_copy(update={"host": old.host.model_copy(update={"driver": driver})})
    assert with_gpu(old, find_gpu("H200")).software.torch == "2.13.0+cu126"
