"""Measurements that are kept and given: whose device they are of, and what becomes of damaged ones."""

import json
from pathlib import Path

import pytest

from bloomery.core.errors import UserError
from bloomery.hardware import calibration as kept
from bloomery.hardware import cpu_check
from bloomery.hardware.calibration import (
    OWN,
    Calibration,
    calibrations,
    contributed,
    device_of,
    store,
    write_calibration,
)
from bloomery.hardware.cpu_check import with_cpu_check, with_known_check
from bloomery.hardware.machine import Accelerator, CpuCheck, Host, Machine, Probe, Software
from points_for_tests import POINT

RX = Accelerator(
    index=0, vendor="amd", name="AMD Radeon RX 6700 XT", arch="gfx1031", memory_bytes=12 * 2**30
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept.contributed.cache_clear()
    yield
    kept.contributed.cache_clear()


def card(**changes) -> Calibration:
    facts = {
        "device": "a CPU",
        "arch": "avx2",
        "cores": 2,
        "memory_gib": 16.0,
        "torch": "2.13.0+cpu",
        "bloomery": "0.1.0",
        "model": {"hidden_size": 64},
        "parameters": 1000,
        "text": "random",
        "contributor": "Ada",
        "day": "2026-11-21",
        "points": (POINT,),
    }
    return Calibration.model_validate(facts | changes)


def machine(
    *devices: Accelerator,
    cores: int = 2,
    flags: tuple[str, ...] = ("avx2",),
    environment: dict[str, str] | None = None,
) -> Machine:
    host = Host(
        system="Linux",
        cpu_name="a CPU",
        cpu_cores=cores,
        cpu_flags=flags,
        memory_bytes=2**34,
        memory_free_bytes=2**33,
        disk_free_bytes=2**40,
    )
    build = "rocm" if devices else "cpu"
    software = Software(python="3.12.4", torch="2.13.0", build=build, environment=environment or {})
    return Machine(accelerators=devices, host=host, software=software)


def test_a_measurement_is_kept_for_its_device_alone():
    assert store(card())
    (found,) = calibrations(machine())
    assert found.contributor == OWN and found.points == (POINT,)
    assert calibrations(machine(cores=4)) == ()
    # a cloud gives processors of one name and many kinds
    assert calibrations(machine(flags=("avx2", "avx512f"))) == ()
    assert calibrations(machine(RX)) == ()


def test_threads_that_the_user_has_bounded_are_the_cores():
    store(card(cores=1))
    assert calibrations(machine(environment={"OMP_NUM_THREADS": "1"}))
    assert calibrations(machine()) == ()


def test_gpus_go_by_the_name_of_the_table():
    assert device_of(machine(RX)) == ("Radeon RX 6700 XT", "gfx1031", 0)
    odd = RX.model_copy(update={"name": "Radeon XYZ", "arch": "gfx9999"})
    assert device_of(machine(odd)) == ("Radeon XYZ", "gfx9999", 0)


def test_a_newer_measurement_of_the_same_replaces_the_older():
    store(card(day="2026-11-20"))
    store(card(day="2026-11-21"))
    store(card(model={"hidden_size": 128}, day="2026-11-22"))
    assert [found.day for found in calibrations(machine())] == ["2026-11-22", "2026-11-21"]


@pytest.mark.parametrize("text", ["", "{", "{}", "[3, {}]"])
def test_a_damaged_file_counts_as_empty(text, tmp_path):
    path = tmp_path / "bloomery/measured.json"
    path.parent.mkdir()
    path.write_text(text)
    assert calibrations(machine()) == ()
    assert store(card()) and len(calibrations(machine())) == 1


def test_a_card_goes_to_a_file_and_back(tmp_path, monkeypatch):
    folder = tmp_path / "cards"
    folder.mkdir()
    write_calibration(card(), folder / "ada.json")
    (folder / "newer.json").write_text(json.dumps({"version": 9}))
    monkeypatch.setattr(kept, "contributed_folder", lambda: folder)
    assert contributed() == (card(),)
    gpu = {"device": "Radeon RX 6700 XT", "arch": "gfx1031", "cores": 0}
    write_calibration(card(**gpu), folder / "gpu.json")
    kept.contributed.cache_clear()
    store(card(**gpu))
    assert [found.contributor for found in calibrations(machine(RX))] == [OWN, "Ada"]


CHECK = CpuCheck(gflops={"float32": 90.0, "bfloat16": 400.0}, copy_gbs=20.0, python_seconds=6e-4)


def test_another_machine_of_the_same_name_counts_as_far_as_its_check_goes(tmp_path, monkeypatch):
    """Virtual machines share a CPU's name: without the figures of both, the speed of one says nothing of another."""
    folder = tmp_path / "cards"
    folder.mkdir()
    monkeypatch.setattr(kept, "contributed_folder", lambda: folder)
    write_calibration(card(cpu_check=CHECK.model_dump()), folder / "ada.json")
    write_calibration(card(contributor="Bo"), folder / "bo.json")
    assert calibrations(machine()) == ()
    slower = CHECK.model_copy(update={"gflops": {"bfloat16": 200.0}, "copy_gbs": 10.0})
    (found,) = calibrations(machine().model_copy(update={"cpu_check": slower}))
    assert found.contributor == "Ada" and found.points[0].tokens_per_second == pytest.approx(500.0)
    assert found.points[0].peak_gib == POINT.peak_gib
    without = CHECK.model_copy(update={"gflops": {"float32": 90.0}})  # the points are in bfloat16
    assert calibrations(machine().model_copy(update={"cpu_check": without})) == ()
    noisy = CHECK.model_copy(update={"copy_gbs": 22.0})
    (found,) = calibrations(machine().model_copy(update={"cpu_check": noisy}))
    assert found.points == (POINT,)


@pytest.mark.skipif(not Path("/proc/sys/kernel/random/boot_id").is_file(), reason="no boot id")
def test_the_check_is_made_once_per_boot_and_instruction_set(monkeypatch):
    monkeypatch.delenv("BLOOMERY_CPU_CHECK", raising=False)
    here = machine()
    checked = with_cpu_check(here).cpu_check
    assert checked is not None and checked.gflops["float32"] > 1 and checked.copy_gbs > 0.1
    monkeypatch.setattr(cpu_check, "probe", lambda *_, **__: pytest.fail("checked twice"))
    assert with_cpu_check(here).cpu_check == checked == with_known_check(here).cpu_check
    assert with_cpu_check(machine(RX)).cpu_check is None  # a GPU trains there
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert with_known_check(here).cpu_check is None


def test_a_check_that_fails_is_not_made_again(monkeypatch):
    monkeypatch.delenv("BLOOMERY_CPU_CHECK", raising=False)
    failures = iter([Probe(name="cpu-check", outcome="crashed")])
    monkeypatch.setattr(cpu_check, "probe", lambda *_, **__: (next(failures),))
    assert (
        with_cpu_check(machine()).cpu_check is None and with_cpu_check(machine()).cpu_check is None
    )


def test_a_card_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(UserError) as caught:
        write_calibration(card(), tmp_path / "nowhere/card.json")
    assert caught.value.fix


def test_the_cards_that_come_with_bloomery_can_be_read():
    paths = sorted(kept.contributed_folder().glob("*.json"))
    assert len(contributed()) == len(paths)
    for path in paths:
        text = path.read_text()
        assert not any(word in text for word in ("/home", "/root", "@", "hostname"))
    # it would count nowhere
    assert all(one.cpu_check is not None for one in contributed() if one.cores)
