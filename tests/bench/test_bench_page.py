"""The sentences below the table: each follows from the figures above it."""

from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.bench.measuring import (
    Bench,
    BenchResult,
    Largest,
    closing,
    largest_lines,
    line,
    noise_line,
    verdict,
    verdict_lines,
)
from bloomery.hardware.detect import detect
from bloomery.plan.types import Estimate

RECIPE = """
model: {family: llama, hidden_size: 64, num_layers: 2, num_heads: 4, max_positions: 128, vocab_size: 512}
tokenizer: {train: {vocab_size: 512}}
data: {builtin: stdlib-code, sequence_length: 128}
train: {max_steps: 100, tokens_per_step: 1024}
"""


@pytest.fixture
def row(tmp_path, monkeypatch) -> BenchResult:
    """1,024 tokens in 1 s where the plan says 800 to 1,250, and the memory that it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Path("tiny.yaml").write_text(RECIPE)
    plan = Bench(recipe="tiny.yaml", overrides=(), machine=detect()).plan()
    seconds = Estimate(value=1.024, low=0.8192, high=1.28, origin="table")
    plan = plan.model_copy(update={"step_seconds": seconds})
    return BenchResult(
        overrides=(), plan=plan, outcome="ok", step_seconds=1.0, peak_gib=plan.memory.total / 2**30
    )


@pytest.mark.parametrize(("seconds", "place"), [(1.0, "inside"), (0.8, "above"), (1.3, "below")])
def test_speed_is_judged_by_the_interval(row, seconds, place):
    judged = replace(row, step_seconds=seconds)
    assert verdict(judged) == {"speed": place, "memory": "inside"}
    assert ("800 to 1,250 (estimated)" in "".join(verdict_lines(judged))) is True


@pytest.mark.parametrize(("share", "place"), [(1.0, "inside"), (1.5, "above"), (0.5, "below")])
def test_memory_is_judged_by_the_interval(row, share, place):
    assert verdict(replace(row, peak_gib=row.peak_gib * share))["memory"] == place


def test_a_gpu_is_judged_by_what_tensors_hold(row):
    """The allocator's share and the context are in the plan's total, and not in max_memory_allocated."""
    memory = row.plan.memory.model_copy(
        update={"parts": {"weights": 6.0, "fragmentation": 2.0, "context": 2.0}}
    )
    memory = memory.model_copy(update={"low": 8.0, "high": 12.0})
    plan = row.plan.model_copy(
        update={"memory": memory, "train": row.plan.train.model_copy(update={"device": "cuda"})}
    )
    assert verdict(replace(row, plan=plan, peak_gib=6.5 / 2**30))["memory"] == "inside"
    assert verdict(replace(row, plan=plan, peak_gib=8.0 / 2**30))["memory"] == "above"


def test_a_device_that_the_table_does_not_know_has_no_ratio(row):
    unknown = replace(row, plan=row.plan.model_copy(update={"step_seconds": None}))
    assert verdict(unknown)["speed"] == "unknown"
    assert "unknown" in line(unknown)


def test_ratios_are_measured_over_planned(row):
    assert line(row).split()[:5] == ["as", "planned", "1,024", "1,000", "1.02"]


def test_long_names_of_settings_have_a_line_of_their_own(row):
    overrides = ("train.micro_batch_size=16", "train.precision=float32", "adapter.kind=none")
    above, below = line(replace(row, overrides=overrides)).split("\n")
    assert (
        above == "micro_batch_size=16, precision=float32, adapter.kind=none"
        and below.split()[0] == "1,024"
    )
    refused = line(BenchResult(overrides=overrides, plan=None, outcome="refused", message="no"))
    assert refused.split("\n")[1].strip() == "refused: no"


def test_unequal_steps_are_told(row):
    assert not list(noise_line([replace(row, fastest_seconds=0.9)]))
    (text,) = noise_line([replace(row, fastest_seconds=0.4)])
    assert "1 s or more, the fastest 0.4 s" in text


def test_other_programs_on_the_cores_are_told_and_nothing_is_kept(row):
    calm, disturbed = replace(row, core_wait=0.05), replace(row, core_wait=0.43)
    assert not list(noise_line([calm])) and not calm.disturbed
    (text,) = noise_line([calm, disturbed])
    assert "for 43% of a measurement" in text
    assert any(
        "nothing" in line for line in closing(disturbed, remembered=False, source="tiny.yaml")
    )
    assert not any("nothing" in line for line in closing(calm, remembered=True, source="tiny.yaml"))


def test_what_bounds_the_micro_batch_is_said(row):
    def message(**facts) -> str:
        return "".join(largest_lines(Largest(**facts), row.plan))

    found = message(size=12, usable=8, bound="memory", reason="full")
    assert "micro-batch 12, 1,536 tokens; 8 divides the step" in found
    assert "not even micro-batch 1 fits: full" in message(
        size=0, usable=0, bound="memory", reason="full"
    )
