"""Layouts over links that an earlier run or the probe of copies measured, instead of those of the tables."""

from itertools import pairwise

import pytest
from plan_help import gpu_machine, planned

from bloomery.core import files
from bloomery.core.units import GIB
from bloomery.hardware.link_rates import MeasuredLinks, store_links
from bloomery.hardware.machine import Probe
from bloomery.parallel.links import LinkRates, PipelineTrial, Transfer
from bloomery.parallel.preflight import Preflight, links_of
from bloomery.recipe.load import load_recipe

GPU = "RX 7900 XTX"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_folder().is_relative_to(tmp_path)


def found(*, hosts, gbs, pair_gbs=None, stage_gbs=None) -> Preflight:
    """What ranks on these hosts find where every link carries as much."""
    pairs = [pair for pair in pairwise(range(len(hosts))) if pair_gbs is not None]
    link = None
    if stage_gbs is not None:
        link = PipelineTrial("host", Transfer(0, 0, 0, 1), bytes_per_second=stage_gbs * 1e9)
    return Preflight(
        hosts=hosts,
        bytes_per_second=gbs * 1e9,
        reduced_bytes=2**26,
        planned_gbs=None,
        rates=LinkRates(dict.fromkeys(pairs, (pair_gbs or 0.0) * 1e9), hosts),
        free_bytes=100 * GIB,
        seconds=1.0,
        link=link,
    )


def measure(**figures) -> MeasuredLinks:
    result = links_of(found(**figures), gpu_machine(GPU), day="2026-11-29")
    assert store_links(result)
    return result


def plan_of(*edits: str, gpu: str = GPU, gpus: int = 2, nodes: int = 1, machine=None):
    recipe = load_recipe("go-coder-125m", [*edits])
    return planned(recipe, machine or gpu_machine(gpu), gpus=gpus, nodes=nodes)


def test_an_all_reduce_that_ranks_measured_replaces_the_tables():
    by_tables = plan_of().parallel
    measure(hosts=("n1", "n1"), gbs=0.25)
    measured = plan_of().parallel
    assert (measured.bus_gbs, by_tables.bus_gbs) == (pytest.approx(0.25, abs=0.05), 20.0)
    assert "measured before a run on 2026-11-29" in measured.link
    assert "measured" not in by_tables.link
    copies, slow_copies = (plan.layouts[0] for plan in (by_tables, measured))
    assert (copies.name, slow_copies.name) == ("replicate", "replicate")
    ratio = (
        slow_copies.communication_seconds["replicate"] / copies.communication_seconds["replicate"]
    )
    assert ratio == pytest.approx(20 / 0.25, rel=0.05)

    # Other devices, another number of them, and another host keep the tables.
    assert plan_of(gpu="RTX 4090").parallel.link.count("measured") == 0
    assert plan_of(gpus=4).parallel.link.count("measured") == 0
    elsewhere = gpu_machine(GPU)
    host = elsewhere.host.model_copy(update={"cpu_name": "another CPU"})
    elsewhere = elsewhere.model_copy(update={"host": host})
    assert plan_of(machine=elsewhere).parallel.link == by_tables.link


def test_layouts_are_ranked_by_what_was_measured():
    """Where a ring is slow and neighbors are not, a pipeline, which sends little, overtakes copies."""
    edits = ("train.tokens_per_step=65536",)
    assert plan_of(*edits, gpus=4).parallel.layout.name == "replicate"
    measure(hosts=("n1",) * 4, gbs=0.05, pair_gbs=20.0, stage_gbs=20.0)
    assert plan_of(*edits, gpus=4).parallel.layout.name == "pipeline"


def test_a_pipeline_takes_the_edge_that_was_measured_and_a_later_run_without_one_keeps_it():
    edits = ("parallel.pipeline=2",)
    by_tables = plan_of(*edits).parallel.layout.communication_seconds["pipeline"]
    measure(hosts=("n1", "n1"), gbs=20.0, pair_gbs=20.0, stage_gbs=2.0)
    measure(hosts=("n1", "n1"), gbs=20.0, pair_gbs=20.0)
    slow = plan_of(*edits).parallel.layout.communication_seconds["pipeline"]
    assert slow == pytest.approx(10 * by_tables, rel=0.05)


def test_a_network_is_measured_by_the_all_reduce_of_its_nodes():
    by_tables = plan_of(gpus=2, nodes=2).parallel
    assert by_tables.network.startswith("10 Gb/s Ethernet: 1 GB/s")
    # Two nodes of two: a ring of four over a network of N GB/s a node has a bus bandwidth of 3/4 x 2 N.
    measure(hosts=("n1", "n1", "n2", "n2"), gbs=4.5)
    measured = plan_of(gpus=2, nodes=2).parallel
    assert measured.network == "10 Gb/s Ethernet: 3 GB/s (measured before a run on 2026-11-29)"
    assert measured.bus_gbs == 4.5
    named = plan_of("parallel.network=7", gpus=2, nodes=2).parallel
    assert named.network == "your network: 7 GB/s (parallel.network)"


def test_the_slowest_copy_of_the_probe_bounds_a_ring():
    facts = {"0-1": "3.0 GB/s, through CPU memory", "1-0": "6.5 GB/s, through CPU memory"}
    probed = gpu_machine(GPU).model_copy(
        update={"probes": (Probe(name="p2p", outcome="ok", facts=facts),)}
    )
    assert plan_of(machine=probed).parallel.bus_gbs == 3.0
    assert "bloomery doctor --probe" in plan_of(machine=probed).parallel.link
    failed = probed.model_copy(
        update={"probes": (Probe(name="p2p", outcome="wrong", facts=facts),)}
    )
    assert plan_of(machine=failed).parallel.bus_gbs == 20.0


def test_a_damaged_file_is_no_measurement():
    result = measure(hosts=("n1", "n1"), gbs=0.25)
    path = files.cache_folder() / "links.json"
    path.write_text('[{"device": 1}, ' + result.model_dump_json() + "]")
    assert plan_of().parallel.bus_gbs == pytest.approx(0.25, abs=0.05)
    path.write_text("[{")
    assert plan_of().parallel.bus_gbs == 20.0
