"""One setting a child: what it reaches, and that a child which dies of memory or a driver is a row that says so."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bloomery.bench import measuring
from bloomery.bench.measuring import BenchResult, Learning, search
from bloomery.bench.rig import longest_batches, rounds

HERE = Path(__file__).parent
WIDE = ("model.hidden_size=256", "model.num_layers=4", "train.tokens_per_step=16384")
# few rows fill the memory
LONG = ("data.sequence_length=256", "model.max_positions=256", "train.tokens_per_step=8192")


def resident_bytes_of_torch() -> int:
    """Builds for NVIDIA hold half a GiB before the first tensor, those for CPUs less than half of that."""
    code = "import torch; print(*(line for line in open('/proc/self/status') if line.startswith('VmRSS')))"
    message = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return int(message.split()[1]) * 1024


def silent(phase: str) -> None:
    del phase


def test_a_setting_is_measured_and_leaves_nothing_behind(bench, tmp_path):
    phases: list[str] = []
    row = bench().point("train.micro_batch_size=4", on_phase=phases.append)
    assert row.outcome == "ok", row.message
    assert row.plan is not None and row.plan.train.accumulation == 4
    assert row.tokens_per_second == pytest.approx(2048 / row.step_seconds)
    assert 0.1 < row.peak_gib < 3 and row.planned_gib == row.plan.memory.total / 2**30
    assert phases == ["starting", "building the model", "warming up", "learning", "measuring"]
    assert row.learning.loss_after < row.learning.loss_before and row.learning.grad_norm > 0
    # The cache keeps kernels that were compiled for this CPU.
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == {"tiny.yaml"}


@pytest.mark.soak
def test_memory_that_runs_out_is_a_row(bench):
    """The planned limit becomes the process's own: 128 rows of this model need well over half a GiB."""
    row = bench(*WIDE, limit=resident_bytes_of_torch() + 0.33 * 2**30).point(
        "train.micro_batch_size=128", on_phase=silent
    )
    assert row.outcome == "memory" and row.message, row
    assert row.tokens_per_second is None


@pytest.mark.soak
def test_the_largest_micro_batch_is_found_by_running_out_of_memory(bench):
    bounded = bench(*WIDE, *LONG, limit=resident_bytes_of_torch() + 0.33 * 2**30)
    rows: list[BenchResult] = []
    found = search(
        lambda number: bounded.trial(number, on_phase=silent), full_step=32, on_row=rows.append
    )
    assert found.bound == "memory" and 4 <= found.size < 32
    assert {row.micro_batch_size for row in rows if row.outcome == "ok"} >= {1, 2, 4, found.size}
    assert min(row.micro_batch_size for row in rows if row.outcome == "memory") > found.size
    assert 32 % found.usable == 0


@pytest.mark.parametrize(
    ("fault", "outcome", "message"),
    [
        ("segfault", "crashed", "SIGSEGV"),
        ("raises", "crashed", "RuntimeError: HIP error: invalid device function"),
        ("killed", "memory", "the system killed the process"),
        ("hangs", "hung", "no message for 3 s"),
    ],
)
def test_a_child_that_dies_is_a_row_that_says_so(bench, monkeypatch, fault, outcome, message):
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(measuring, "CHILD", "faulty_bench")
    monkeypatch.setattr(measuring, "SILENCE_SECONDS", 3.0)
    begun = time.monotonic()
    row = bench().point(on_phase=silent)
    assert row.outcome == outcome and message in row.message
    assert time.monotonic() - begun < 30


def test_steps_that_learn_nothing_are_no_measurement(bench):
    """Published speeds exist of steps that changed no weight."""
    row = bench().point("optimizer.learning_rate=1e-30", on_phase=silent)
    assert row.outcome == "failed"
    assert "did not fall" in row.message and row.step_seconds is not None


def test_a_gradient_of_zero_is_named():
    assert (
        Learning(steps=5, loss_before=2.0, loss_after=1.0, grad_norm=0.0).problem
        == "the gradient norm is 0"
    )
    assert not Learning(steps=5, loss_before=2.0, loss_after=1.9, grad_norm=0.5).problem
    assert Learning(steps=5, loss_before=2.0, loss_after=float("nan"), grad_norm=0.5).problem


def test_what_the_recipe_refuses_is_a_row_that_says_why(bench):
    row = bench().point("train.micro_batch_size=5", on_phase=silent)
    assert (row.outcome, row.plan) == ("refused", None) and "micro-batch size" in row.message


def trial_of(bench, capacity: int, seconds: float = 0.1):
    plan = bench().plan()

    def trial(rows: int) -> BenchResult:
        train = plan.train.model_copy(update={"micro_batch_size": rows, "accumulation": 1})
        own = plan.model_copy(update={"train": train})
        if rows > capacity:
            return BenchResult(overrides=(), plan=own, outcome="memory", message="full")
        return BenchResult(
            overrides=(), plan=own, outcome="ok", step_seconds=seconds * rows, peak_gib=1.0
        )

    return trial


@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 7, 8, 9, 40, 63, 100, 255, 256, 1000])
def test_doubling_and_bisection_find_the_edge_to_an_eighth(bench, capacity):
    tried: list[BenchResult] = []
    found = search(trial_of(bench, capacity), full_step=256, on_row=tried.append, slowest=1e9)
    edge = min(capacity, 256)
    assert found.size <= edge and edge - found.size <= max(0, found.size // 8)
    assert len(tried) <= 13
    assert found.bound == ("step" if capacity >= 256 else "memory")
    assert found.usable == max(
        (rows for rows in range(1, found.size + 1) if 256 % rows == 0), default=0
    )


def test_micro_batches_that_nobody_waits_for_are_not_tried(bench):
    tried: list[BenchResult] = []
    found = search(
        trial_of(bench, 1000, seconds=3.0), full_step=256, on_row=tried.append, slowest=30.0
    )
    assert (found.size, found.bound) == (8, "time")
    assert [row.micro_batch_size for row in tried] == [1, 2, 4, 8]


def test_the_search_ends_with_its_time(bench):
    tried: list[BenchResult] = []
    found = search(
        trial_of(bench, 1000),
        full_step=256,
        on_row=tried.append,
        slowest=1e9,
        time_left=lambda: len(tried) < 3,
    )
    assert (found.size, found.bound, [row.micro_batch_size for row in tried]) == (
        4,
        "time",
        [1, 2, 4],
    )


def test_a_round_that_took_far_too_long_is_the_only_one(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("bloomery.bench.rig.time.perf_counter", lambda: clock[0])

    def step(number: int) -> float:
        clock[0] += 10.0
        return 10.0

    assert len(list(rounds(step, 1, seconds=2.0))) == 1  # 10 s are more than four times 2 s
    clock[0] = 0.0
    assert len(list(rounds(step, 1, seconds=8.0))) == 2


def test_a_step_of_many_micro_batches_is_made_of_two(monkeypatch):
    asked: list[int] = []

    def step(number: int) -> float:
        asked.append(number)
        return 1.0 + 2.0 * number  # the optimizer takes 1 s, a micro-batch 2 s

    assert list(rounds(step, 10, seconds=0.0)) == [21.0, 21.0]
    assert asked == [1, 2, 1, 2]
    assert list(rounds(step, 2, seconds=0.0)) == [5.0, 5.0]


def test_the_longest_batches_are_whole_rows_that_are_learned_everywhere(bench):
    plan = bench().plan("train.micro_batch_size=4")
    one, two = longest_batches(plan, 2)
    assert one.tokens.shape == (4, 128) and one.loss_mask.min() == 1 and one.documents.max() == 0
    assert torch.equal(one.tokens[:, 1:], one.labels[:, :-1])
    assert one.tokens.max() < 512 and not torch.equal(one.tokens, two.tokens)


def test_a_long_run_times_both_ways_once_and_the_plan_follows_the_faster(
    bench, monkeypatch, capsys
):
    """On this machine compiled steps are slower (as if): a run that would have compiled no longer does."""
    from bloomery.cli.train import time_compiling

    def measured(plan, overrides, *, seconds: float, on_phase) -> BenchResult:
        on_phase("starting")
        took = 2.0 if plan.train.compile else 1.6
        return BenchResult(
            overrides=overrides,
            plan=plan,
            outcome="ok",
            step_seconds=took,
            peak_gib=0.5,
            core_wait=0.0,
        )

    monkeypatch.setattr(measuring, "measure_plan", measured)
    long = bench("train.compile=auto", "train.max_steps=4000000")
    assert long.plan().train.compile
    time_compiling(bench("train.compile=auto", "train.max_steps=20").plan(), long.machine)
    time_compiling(bench("train.compile=false", "train.max_steps=4000000").plan(), long.machine)
    assert capsys.readouterr().err == ""
    time_compiling(long.plan(), long.machine)
    assert "2.00 s, without 1.60 s" in capsys.readouterr().err
    assert not long.plan().train.compile
    time_compiling(long.plan(), long.machine)
    assert capsys.readouterr().err == ""
