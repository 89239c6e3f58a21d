"""A run keeps its attention tiles over a resume; its ranks compute with the same ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import triton_here
from plans_for_tests import tiny_plan

from bloomery.core.errors import UserError
from bloomery.model.attention import tiles
from bloomery.model.attention.tile_times import FILE
from bloomery.model.attention.tiles import KERNELS, TileShape, tile_shape
from bloomery.parallel.mesh import SINGLE_RANK
from bloomery.parallel.process_group import join
from bloomery.plan.store import begin
from bloomery.plan.types import DataPlan, ModelPlan, RunPlan, TrainPlan
from bloomery.train import kernels
from bloomery.train.kernels import settle_tiles
from ranks import on_ranks, ranks

FIRST = TileShape(32, 32, 4)  # of the table, for a device that it does not list


def ignore(_event) -> None:
    """Of tests without a failure."""


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.setattr(tiles, "_in_use", {})
    return tiny_plan(model={"attention": "triton"})


@pytest.fixture
def folder(tmp_path) -> Path:
    begin(tmp_path, {})
    return tmp_path


def sections(plan: RunPlan) -> tuple[ModelPlan, TrainPlan, DataPlan]:
    return plan.model, plan.train, plan.data


def answers(monkeypatch, tile: list[int]) -> None:
    """From now on this is the fastest tile of every kernel."""
    monkeypatch.setattr(kernels, "fastest_tiles_of", lambda *_: dict.fromkeys(KERNELS, tile))


def in_use() -> list[TileShape]:
    return [tile_shape(kernel, arch="any", width=16) for kernel in KERNELS]


def test_the_first_choice_stays(plan, folder, monkeypatch):
    answers(monkeypatch, [64, 16, 8])
    settle_tiles(*sections(plan), folder, SINGLE_RANK, ignore, resumes=False)
    assert in_use() == [TileShape(64, 16, 8)] * 3
    answers(monkeypatch, [16, 16, 4])
    for resumes in (True, False):
        tiles._in_use.clear()
        settle_tiles(*sections(plan), folder, SINGLE_RANK, ignore, resumes=resumes)
        assert in_use() == [TileShape(64, 16, 8)] * 3

    # The file belongs to the run, as its plan does.
    (folder / FILE).write_text(json.dumps({"any": dict.fromkeys(KERNELS, (16, 16, 4))}))
    with pytest.raises(UserError, match="has changed"):
        settle_tiles(*sections(plan), folder, SINGLE_RANK, ignore, resumes=True)


def test_a_run_without_the_file_goes_on_with_the_first_of_the_table(plan, folder, monkeypatch):
    answers(monkeypatch, [16, 16, 4])
    settle_tiles(*sections(plan), folder, SINGLE_RANK, ignore, resumes=True)
    assert in_use() == [FIRST] * 3


def test_a_timing_that_fails_is_reported_once(plan, folder, monkeypatch):
    def fails(_workload, _device, note):
        note("HIP error: unspecified launch failure")
        return dict.fromkeys(KERNELS, FIRST)

    monkeypatch.setattr(kernels, "fastest_tiles_of", fails)
    events = []
    settle_tiles(*sections(plan), folder, SINGLE_RANK, events.append, resumes=False)
    settle_tiles(*sections(plan), folder, SINGLE_RANK, events.append, resumes=True)
    (warned,) = events
    assert "were not timed: HIP error: unspecified launch failure" in warned.reason
    assert in_use() == [FIRST] * 3


def test_without_a_triton_the_first_of_the_table_is_taken(plan, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    reasons = []
    tiles_of_plan = kernels.fastest_tiles_of(
        kernels.tile_workload(*sections(plan)), plan.train.device, reasons.append
    )
    assert tiles_of_plan == dict.fromkeys(KERNELS, FIRST)
    (reason,) = reasons
    assert "cannot be imported" in reason


def test_another_gpu_is_timed_and_both_are_kept(plan, folder, monkeypatch):
    answers(monkeypatch, [64, 16, 8])
    settle_tiles(*sections(plan), folder, SINGLE_RANK, ignore, resumes=False)
    answers(monkeypatch, [16, 16, 4])
    monkeypatch.setattr(kernels, "arch_of", lambda _device: "gfx1030")
    settle_tiles(*sections(plan), folder, SINGLE_RANK, ignore, resumes=True)
    assert tile_shape("forward", arch="gfx1030", width=16) == TileShape(16, 16, 4)
    assert list(json.loads((folder / FILE).read_text())) == ["any", "gfx1030"]


def test_other_attention_leaves_no_file(folder):
    settle_tiles(*sections(tiny_plan()), folder, SINGLE_RANK, ignore, resumes=False)
    assert not (folder / FILE).exists()


def settled(
    plan_json: str, folder: Path, arch_by_rank: list[str]
) -> tuple[list[int], list[TileShape]]:
    """Which rank was asked for tiles, and those that this rank has then; each would choose some of its own."""
    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    rank = mesh.rank
    asked = []

    def choose(*_):
        asked.append(rank)
        return dict.fromkeys(KERNELS, (16 * (rank + 1), 16, 4))

    kernels.fastest_tiles_of = choose
    kernels.arch_of = lambda _device: arch_by_rank[rank]
    tiles._in_use.clear()
    settle_tiles(*sections(plan), folder, mesh, ignore, resumes=False)
    return asked, [tile_shape(kernel, arch=arch_by_rank[rank], width=16) for kernel in KERNELS]


@pytest.mark.parametrize(
    ("archs", "chosen"),
    [(["any", "any"], [16, 16]), (["gfx1030", "gfx906"], [16, 32])],
)
def test_one_rank_of_each_architecture_chooses(plan, folder, archs, chosen):
    results = ranks(2).call(settled, on_ranks(plan, replicate=2).model_dump_json(), folder, archs)
    for rank, (asked, rank_tiles) in enumerate(results):
        assert asked == ([rank] if archs.index(archs[rank]) == rank else [])
        assert rank_tiles == [TileShape(chosen[rank], 16, 4)] * 3
    assert list(json.loads((folder / FILE).read_text())) == list(dict.fromkeys(archs))


@pytest.mark.soak
def test_a_resume_has_the_bits_of_an_undisturbed_run(prepared, tmp_path):
    """In Triton's interpreter: other tiles do change bits, and a resume keeps those of its run."""
    script = Path(__file__).with_name("interpreted_runs.py")
    paths = [str(Path(__file__).parents[1] / name) for name in ("train", "model", ".")]
    environment = triton_here.environment(TRITON_INTERPRET="1")
    environment["PYTHONPATH"] = ":".join([*paths, environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, prepared, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kept"] == {"any": {kernel: list(FIRST) for kernel in KERNELS}}
    assert result["steps"] == [2]
    assert result["tiles_change_bits"]
    assert result["resumed_is_undisturbed"]
    assert result["older_is_undisturbed"]
