"""Measurements that are kept and given: whose device they are of, and what becomes of damaged ones."""

import json

import pytest

from bloomery.core.errors import UserError
from bloomery.hardware import calibration as kept
from bloomery.hardware.calibration import (
    OWN,
    Calibration,
    Point,
    calibrations,
    contributed,
    device_of,
    store,
    write_calibration,
)
from bloomery.hardware.machine import Accelerator, Host, Machine, Software

POINT = Point(
    sequence_length=128, micro_batch_size=4, accumulation=2, precision="bfloat16", attention="mask", compiled=False,
    activation_checkpointing="none", optimizer="adamw", tokens_per_second=1000.0, peak_gib=0.5,
)  # fmt: skip
RX = Accelerator(index=0, vendor="amd", name="AMD Radeon RX 6700 XT", arch="gfx1031", memory_bytes=12 * 2**30)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept.contributed.cache_clear()
    yield
    kept.contributed.cache_clear()


def card(**changes) -> Calibration:
    facts = {
        "device": "a CPU", "arch": "avx2", "cores": 2, "memory_gib": 16.0, "torch": "2.13.0+cpu", "bloomery": "0.1.0",
        "model": {"hidden_size": 64}, "parameters": 1000, "text": "random", "contributor": "Ada", "day": "2026-11-21",
        "points": (POINT,),
    }  # fmt: skip
    return Calibration.model_validate(facts | changes)


def machine(
    *devices: Accelerator, cores: int = 2, flags: tuple[str, ...] = ("avx2",), environment: dict[str, str] | None = None
) -> Machine:
    host = Host(
        system="Linux", cpu_name="a CPU", cpu_cores=cores, cpu_flags=flags, memory_bytes=2**34, memory_free_bytes=2**33,
        disk_free_bytes=2**40,
    )  # fmt: skip
    build = "rocm" if devices else "cpu"
    software = Software(python="3.12.4", torch="2.13.0", build=build, environment=environment or {})
    return Machine(accelerators=devices, host=host, software=software)


def test_a_measurement_is_kept_for_its_device_alone():
    assert store(card())
    (found,) = calibrations(machine())
    assert found.contributor == OWN and found.points == (POINT,)
    assert calibrations(machine(cores=4)) == ()
    assert calibrations(machine(flags=("avx2", "avx512f"))) == ()  # a cloud gives processors of one name and many kinds
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
    assert calibrations(machine()) == (card(),)
    store(card())
    assert [found.contributor for found in calibrations(machine())] == [OWN, "Ada"]


def test_a_card_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(UserError) as caught:
        write_calibration(card(), tmp_path / "nowhere/card.json")
    assert caught.value.fix


def test_the_cards_that_come_with_bloomery_can_be_read():
    paths = sorted(kept.contributed_folder().glob("*.json"))
    assert paths and len(contributed()) == len(paths)
    for path in paths:
        text = path.read_text()
        assert not any(word in text for word in ("/home", "/root", "@", "hostname"))
