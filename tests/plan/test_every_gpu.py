"""Every packaged recipe on every card of the table: a plan that is sound, or a sentence that says why there is none."""

import cProfile
import math
import pstats
from itertools import product
from pathlib import Path

import pytest
from plan_help import machine, reported

from bloomery.hardware.profile import build_profile, with_gpu
from bloomery.hardware.specs import find_gpu
from bloomery.plan.compared_gpus import devices
from bloomery.plan.page import page
from bloomery.plan.page_time import dtype_of, reached_flops
from bloomery.recipe.load import load_recipe, packaged

ROOT = Path(__file__).parents[2]
EVERY = list(devices())
# Cards of one architecture and one memory size differ in their rates alone: the fastest stands for them.
CARDS = list({(card.arch, card.memory_bytes): card for card in EVERY}.values())
# these go on with a run
RECIPES = sorted(
    name for name in packaged() if not name.startswith("demo-chat") and name != "demo-rl"
)
HUGE = ("model.hidden_size=8192", "model.num_heads=64", "model.num_layers=80", "train.max_steps=10")


def ordered(estimate) -> bool:
    return 0 < estimate.low <= estimate.value <= estimate.high < math.inf


def sound(report, where) -> None:
    plan = report.plan
    memory = plan.memory
    assert all(part >= 0 and math.isfinite(part) for part in memory.parts.values()), memory.parts
    assert memory.low <= memory.total <= memory.high
    assert memory.limit > 0
    assert plan.fits == (memory.total <= memory.limit)
    computed = plan.train.micro_batch_size * plan.train.accumulation * replicas(plan)
    assert (
        computed - plan.train.empty_sequences
    ) * plan.data.sequence_length == plan.train.tokens_per_step
    if report.max_length is not None:
        assert 0 <= report.max_length.as_planned <= report.max_length.checkpointed
        if plan.fits and plan.train.activation_checkpointing == "none":
            assert report.max_length.as_planned >= plan.data.sequence_length - 256
    gpu = build_profile(where).gpu
    if plan.step_seconds is not None:
        assert ordered(plan.step_seconds)
        assert all(0 <= part.low <= part.value <= part.high for part in report.step_parts.values())
        assert sum(part.value for part in report.step_parts.values()) == pytest.approx(
            plan.step_seconds.value
        )
    if plan.step_seconds is not None and gpu is not None and gpu.peak_flops(dtype_of(plan)):
        best = reached_flops(plan) * plan.step_seconds.value / plan.step_seconds.low
        assert 0 < best < gpu.peak_flops(dtype_of(plan)), "nobody reaches the peak"
    assert report.energy_kwh is None or report.energy_kwh > 0
    for verdict in report.claims:
        assert verdict.reason


def replicas(plan) -> int:
    """Ranks that read rows of their own."""
    if plan.parallel is None:
        return 1
    layout = plan.parallel.layout
    return layout.replicate * layout.shard


# In `make test` every eighth recipe has every sixteenth card; in `make soak` each has each.
SOME = [
    pytest.param(name, CARDS[number % 16 :: 16], id=name) for number, name in enumerate(RECIPES)
]
EACH = [pytest.param(name, EVERY, id=f"{name} on each", marks=pytest.mark.soak) for name in RECIPES]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("recipe", "cards"), [*SOME, *EACH])
def test_one_of_every_card(recipe, cards):
    loaded = load_recipe(recipe)
    for device in cards:
        where = with_gpu(machine(), device)
        report = reported(loaded, where)
        sound(report, where)
        lines = page(report, where, source=recipe, commands=["train", "bench"])
        assert max(map(len, lines)) <= 100, device.name


def test_hundreds_of_gib_stay_within_the_width():
    where = with_gpu(machine(), next(device for device in EVERY if device.name == "H200 SXM"))
    recipe = load_recipe("llama2-70b-lora-8gpu", ["parallel.stream=off"])
    lines = page(reported(recipe, where), where, source="x", commands=["train"])
    assert any("139.7 of 129.7 GiB: too much" in line for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "device", CARDS[::8], ids=lambda device: f"{device.name} {device.memory_bytes >> 30}"
)
def test_several_of_a_card_in_several_nodes(device):
    where, loaded = (
        with_gpu(machine(), device),
        load_recipe("go-coder-125m", ["train.tokens_per_step=524288"]),
    )
    for gpus, nodes in product((2, 8), (1, 4)):
        report = reported(loaded, where, gpus=gpus, nodes=nodes)
        sound(report, where)
        for layout in report.plan.parallel.layouts:
            assert layout.replicate * layout.shard * layout.pipeline == gpus * nodes
            assert layout.step_seconds is None or ordered(layout.step_seconds)
            assert layout.exposed_seconds >= 0
            assert layout.bubble_seconds >= 0
        assert max(map(len, page(report, where, source="go-coder-125m", commands=[]))) <= 100


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "device", CARDS[::10], ids=lambda device: f"{device.name} {device.memory_bytes >> 30}"
)
def test_a_model_that_is_far_too_large(device):
    where = with_gpu(machine(), device)
    report = reported(load_recipe("go-coder-125m", HUGE), where)
    assert not report.plan.fits
    sound(report, where)
    for fix in report.suggestions:
        assert "saves -" not in fix.saves


@pytest.mark.soak
def test_the_longest_search_is_short():
    """Eight billion parameters that fit nowhere: every layout, micro-batch and remedy is planned.

    Of calls, not of seconds: a busy machine takes longer for the same. Six million are 2 s of a slow core.
    """
    words = (
        "model.family=llama",
        "model.hidden_size=4096",
        "model.intermediate_size=14336",
        "model.num_layers=32",
        "model.num_heads=32",
        "model.max_positions=8192",
        "data.sequence_length=8192",
        "train.max_tokens=1T",
        "train.tokens_per_step=16777216",
        "model.vocab_size=128256",
    )
    loaded = load_recipe(str(ROOT / "benchmarks" / "retrodiction" / "base.yaml"), words)
    where = with_gpu(machine(), find_gpu("RX 6700 XT"))
    profile = cProfile.Profile()
    report = profile.runcall(reported, loaded, where, gpus=8, nodes=2)
    assert pstats.Stats(profile).total_calls < 7_000_000
    assert not report.plan.fits


@pytest.mark.parametrize("gpus", [3, 5, 7, 1024])
def test_numbers_of_devices_that_divide_nothing(gpus):
    where = with_gpu(machine(), CARDS[0])
    report = reported(load_recipe("go-coder-125m"), where, gpus=gpus)
    sound(report, where)
    assert 0 < report.plan.train.empty_sequences < gpus


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "words",
    [
        ("data.sequence_length=256",),
        ("train.precision=float32", "train.attention=math"),
        ("train.precision=bfloat16-pure",),
        ("optimizer.kind=muon",),
        ("optimizer.kind=adafactor", "train.activation_checkpointing=full"),
        ("train.micro_batch_size=1", "train.tokens_per_step=1048576"),
        ("train.max_time=8h",),
        ("train.max_steps=1",),
        ("train.compile=true", "train.activation_checkpointing=every-3"),
    ],
)
def test_what_a_recipe_may_ask_for_on_old_new_and_odd_cards(words):
    loaded = load_recipe("go-coder-125m", words)
    for device in CARDS[::6]:
        where = with_gpu(machine(), device)
        report = reported(loaded, where)
        sound(report, where)
        assert page(report, where, source="x", commands=[])
