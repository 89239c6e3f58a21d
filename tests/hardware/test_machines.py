"""The recorded and constructed machines under tests/machines: they load, survive JSON and agree with the tables."""

from functools import cache
from pathlib import Path

from bloomery.core.units import GIB
from bloomery.hardware.machine import Machine, read_machine
from bloomery.hardware.profile import install, with_gpu
from bloomery.hardware.specs import arch_spec, find_gpu, gpu_spec

FOLDER = Path(__file__).parent.parent / "machines"
FILES = sorted(FOLDER.glob("*.json"))


@cache
def machines() -> dict[str, Machine]:
    return {path.stem: read_machine(path) for path in FILES}


def test_every_kind_of_machine_is_there():
    assert len(FILES) >= 14
    seen = {device.arch for path in FILES for device in read_machine(path).accelerators}
    assert seen >= {
        "gfx906",
        "gfx908",
        "gfx90a",
        "gfx942",
        "gfx1031",
        "gfx1100",
        "gfx1151",
        "gfx1200",
        "sm_90",
        "xe-hpg",
        "xe2-hpg",
    }


def test_a_machine_loads_and_survives_json():
    for path in FILES:
        machine = read_machine(path)
        assert Machine.model_validate_json(machine.model_dump_json()) == machine, path
        written = machine.model_dump_json(indent=1, exclude_defaults=True) + "\n"
        # a key that the type does not have would be dropped in silence
        assert path.read_text() == written, path


def test_a_machine_says_where_it_comes_from():
    for name, machine in machines().items():
        assert machine.origin.startswith(("constructed from ", "recorded on ")), name


def test_devices_agree_with_the_table():
    for name, machine in machines().items():
        for device in machine.accelerators:
            assert arch_spec(device.arch) is not None, name
            spec = gpu_spec(device)
            # the driver keeps a little of the nominal memory
            if spec is not None and spec.memory_gib:
                nominal = min(spec.memory_gib, key=lambda gib: abs(gib * GIB - device.memory_bytes))
                assert 0.97 * nominal * GIB < device.memory_bytes <= nominal * GIB, name
            if device.vendor == "amd":
                assert device.compute_units > 0, name
                assert device.device_id > 0, name
                assert device.node, name


def test_the_build_agrees_with_the_version():
    for name, machine in machines().items():
        software = machine.software
        local = (software.torch or "").partition("+")[2]
        wanted = (
            "rocm"
            if local.startswith("rocm")
            else "cuda"
            if local.startswith("cu1")
            else "xpu"
            if local == "xpu"
            else "cpu"
        )
        assert software.build == wanted, name
        assert bool(software.hip) == (wanted == "rocm"), name
        assert bool(software.cuda) == (wanted == "cuda"), name


def test_what_the_kernel_shows_fits_together():
    for name, machine in machines().items():
        cards = {device.pci_address for device in machine.accelerators if device.vendor == "amd"}
        assert cards <= {display.address for display in machine.host.displays}, name
        if cards:
            assert machine.host.driver.amdgpu, name
            assert machine.host.access.kfd != "absent", name
        indices = [device.index for device in machine.accelerators]
        assert indices == list(range(len(indices))), name


def test_a_named_gpu_gets_the_build_that_the_doctor_would_install_here():
    here = read_machine(FOLDER / "mi250x-frontier-slurm.json")
    planned = with_gpu(here, find_gpu("MI250X"))
    # the site's own, not what fits a gfx90a elsewhere
    assert planned.software.torch == "2.10.0+rocm7.1"
    assert planned.software.torch in install(here)
    old = read_machine(FOLDER / "h200.json")
    driver = old.host.driver.model_copy(update={"nvidia": "535.183.01"})
    old = old.model_copy(update={"host": old.host.model_copy(update={"driver": driver})})
    assert with_gpu(old, find_gpu("H200")).software.torch == "2.13.0+cu126"
