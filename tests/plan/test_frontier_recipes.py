"""The Frontier workbook's run as packaged recipes: its published step times beside the plan's, and a faster layout."""

import re

import pytest
from plan_help import gpu_machine, reported

from bloomery.plan.types import PlanReport
from bloomery.recipe.load import load_recipe

NAMES = ("frontier-llama3.1-8b", "frontier-llama3.1-8b-fast")


def on_64_nodes(name: str, *overrides: str) -> PlanReport:
    return reported(load_recipe(name, overrides), gpu_machine("MI250X"), gpus=8, nodes=64)


def test_the_published_step_times_are_claims_of_their_own():
    report = on_64_nodes("frontier-llama3.1-8b")
    assert report.plan.fits and report.plan.parallel.layout.shard == 512
    step_times = [verdict for verdict in report.claims if verdict.claim.endswith("per step")]
    assert [verdict.claim for verdict in step_times] == [
        "95 s per step",
        "77 s per step",
        "61 s per step",
    ]
    assert all(verdict.verdict == "ok" for verdict in step_times)
    assert f"planned {report.plan.step_seconds.value:.0f} s" in step_times[0].reason


@pytest.mark.parametrize("name", NAMES)
def test_sockets_and_a_rate_of_the_network_are_planned(name):
    """8 GB/s of a node take as long as they must: five eighths of the sockets' 5 GB/s."""
    usual, sockets, own_rate = (
        on_64_nodes(name, *words).plan
        for words in ((), ("parallel.network=tcp",), ("parallel.network=8",))
    )
    assert "TCP sockets: 5 GB/s" in sockets.parallel.network
    assert "your network: 8 GB/s" in own_rate.parallel.network
    assert usual.step_seconds.value < own_rate.step_seconds.value < sockets.step_seconds.value
    at_5, at_8 = (plan.parallel.layout.communication_seconds for plan in (sockets, own_rate))
    assert at_8["shard"] == pytest.approx(at_5["shard"] * 5 / 8, rel=0.05)


def test_the_faster_recipe_is_what_its_comment_says():
    workbook = on_64_nodes("frontier-llama3.1-8b").plan
    report = on_64_nodes("frontier-llama3.1-8b-fast")
    fast = report.plan
    # What saves time and may end in an out-of-memory error is suggested with that.
    (faster,) = report.suggestions
    assert faster.edit == "train.activation_checkpointing=auto"
    assert re.search(r"may not fit: up to [\d.]+ of 58\.9 GiB", faster.saves)
    assert fast.fits and fast.memory.total < 0.9 * fast.memory.limit
    assert fast.train.tokens_per_step == workbook.train.tokens_per_step
    assert f"{fast.step_seconds.value:.0f} instead of {workbook.step_seconds.value:.0f} s" == (
        "69 instead of 76 s"
    )
    inside_a_node = on_64_nodes("frontier-llama3.1-8b-fast", "parallel.shard=8").plan
    assert not inside_a_node.fits
    assert (inside_a_node.memory.total - fast.memory.total) / 2**30 == pytest.approx(13, abs=0.5)
