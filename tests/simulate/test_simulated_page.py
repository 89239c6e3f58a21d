"""`bloomery plan --simulate`: the figure beside the plan's own, as a page and as JSON."""

import json

import pytest
from click.testing import CliRunner
from plan_help import gpu_machine, loaded, planned, reported

from bloomery.cli import cli
from bloomery.core.units import GIB
from bloomery.plan.page import page
from bloomery.simulate.run import Simulated, SimulationResult, simulate

TINY = [
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.num_heads=2",
    "data.sequence_length=128",
]
UNCOMPILED = "train.compile=false"  # tests/simulate/test_agreement.py has compiled steps


def invoke(*words):
    return CliRunner().invoke(cli, ["plan", "go-coder-tiny", *TINY, *words])


def test_json_has_parts_and_peak_and_stderr_the_progress():
    result = invoke("--gpu", "MI300X", "--simulate", "--json", UNCOMPILED)
    assert result.exit_code == 0, result.output
    assert "the second of two steps" in result.stderr
    simulated = json.loads(result.stdout)["simulated"]
    assert simulated["peak"] == pytest.approx(sum(simulated["parts"].values()))
    assert simulated["counted"] == pytest.approx(simulated["peak"], rel=0.08)
    assert simulated["total"] > simulated["peak"]
    assert simulated["fits"] is True


def test_all_cards_at_once_are_refused():
    result = invoke("--gpu", "all", "--simulate")
    assert "MI300X --simulate" in result.exception.fix


def beside(peak_gib):
    plan = planned(loaded(), gpu_machine("MI300X"))
    return SimulationResult(plan, Simulated({"weights": peak_gib * GIB}, ()))


@pytest.mark.parametrize("recipe", ["qwen2.5-1.5b-grpo-tiny", "llama2-7b-rlhf-tiny"])
def test_a_run_with_rewards_is_refused_in_one_sentence(recipe):
    result = CliRunner().invoke(cli, ["plan", recipe, "--gpu", "MI300X", "--simulate"])
    assert "cannot simulate a run with rewards" in result.exception.problem


def test_a_simulated_peak_that_does_not_fit_is_told():
    small, large = beside(100), beside(190)
    assert small.fits
    assert not large.fits
    assert large.lines()[-1].endswith(": too much")


def test_what_the_plan_adds_to_its_own_tensors_is_added_to_the_simulated_ones():
    told = beside(1).plan.memory
    same = SimulationResult(beside(1).plan, Simulated({"all": told.allocated}, ()))
    assert same.total == pytest.approx(told.total)
    assert "the same" in same.lines()[0]


def test_the_page_shows_it_below_memory():
    simulated = beside(1)
    report = reported(loaded(), gpu_machine("MI300X"))
    lines = page(
        report, gpu_machine("MI300X"), source="small", commands=[], simulated=simulated.lines()
    )
    (line,) = [line for line in lines if line.startswith("simulated")]
    assert line.startswith("simulated 1.0 GiB of tensors at the peak of the second step")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_every_optimizer_is_simulated_over_shards(optimizer):
    here = gpu_machine("MI300X")
    plan = planned(loaded(optimizer={"kind": optimizer}, train={"compile": False}), here, gpus=2)
    (index,) = [
        index for index, layout in enumerate(plan.parallel.layouts) if layout.name == "shard"
    ]
    chosen = plan.model_copy(
        update={"parallel": plan.parallel.model_copy(update={"chosen": index})}
    )
    simulated = SimulationResult(chosen, simulate(chosen, here))
    assert simulated.document()["peak"] > 0
    assert simulated.simulated.parts["optimizer"] > 0
