"""The link between a GPU and its host: measured by a run or the probe, else published, else by its PCIe lanes."""

import pytest
from plan_help import gpu_machine, loaded, planned

from bloomery.core.units import GIB
from bloomery.hardware.host_links import HostLink, host_link
from bloomery.hardware.link_rates import store_host_link
from bloomery.hardware.machine import Machine, Probe
from bloomery.hardware.profile import build_profile, with_host_memory
from bloomery.hardware.specs import gpu_table

RATES = {"to_device": 11.9, "from_device": 12.1, "both": 20.0, "pageable": 6.0}


def link_of(machine: Machine) -> HostLink | None:
    return host_link(build_profile(machine), machine)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_every_gpu_with_memory_of_its_own_has_a_rate():
    for spec in gpu_table().gpu:
        if spec.link == "APU" or not spec.memory_gib:
            continue
        link = link_of(gpu_machine(f"{spec.name} {spec.memory_gib[0]}GB"))
        assert link is not None, spec.name
        assert 5 < link.pageable_gbs < link.to_device_gbs < 64
        assert link.both_gbs <= link.to_device_gbs


def test_published_rates_are_those_of_the_table():
    link = link_of(gpu_machine("RX 7900 XTX"))
    assert (link.to_device_gbs, link.from_device_gbs, link.both_gbs) == (28.4, 29.0, 24.1)


def test_a_measured_link_comes_first():
    here = gpu_machine("RTX 4090")
    probe = Probe(name="host-copies", outcome="ok", facts={k: str(v) for k, v in RATES.items()})
    probed = here.model_copy(update={"probes": (probe,)})
    link = link_of(probed)
    assert (link.to_device_gbs, link.both_gbs, link.pageable_gbs) == (11.9, 10.0, 6.0)
    assert link.reason == "measured by `doctor --probe`"

    assert store_host_link(here, RATES | {"to_device": 13.0}, day="2026-11-30")
    link = link_of(probed)
    assert link.to_device_gbs == 13.0 and link.reason == "measured before a run on 2026-11-30"
    # A host that is planned for is another one.
    assert link_of(with_host_memory(here, 64 * GIB)).to_device_gbs == 23.9


def test_a_narrow_slot_needs_more_tokens_per_load():
    sections = {
        "model": {"hidden_size": 2048, "num_layers": 8, "num_heads": 16},
        "parallel": {"stream": "layers"},
    }
    here = gpu_machine("RTX 4090")
    before = planned(loaded(**sections), here).stream.hidden_from
    assert store_host_link(here, RATES, day="2026-11-30")
    stream = planned(loaded(**sections), here).stream
    assert stream.hidden_from > 1.9 * before
    assert stream.link == "11.9 GB/s (measured before a run on 2026-11-30)"
