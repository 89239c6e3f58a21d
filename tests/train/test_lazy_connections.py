"""Many ranks connect when they first send to each other, and open no more files than the system allows."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from plans_for_tests import tiny_config, tiny_plan

import preloaded
from bloomery.parallel.environment import LEAST_FILES, USUAL_FILES, most_sockets
from bloomery.parallel.process_group import join, leave
from bloomery.plan.resolve import plan_environment
from bloomery.plan.types import LAZY_CONNECTIONS, RunPlan
from bloomery.train.loop import run
from ranks import Ranks, on_ranks


def trained(plan_json: str, folder: str, lazy: str) -> tuple[int, int]:
    """One rank of a run. Its sockets before and at the end."""

    def sockets() -> int:
        # A list: the folder's own descriptor is gone when its link is read.
        links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum(
            str(path.readlink()).startswith("socket:") for path in links if path.is_symlink()
        )

    os.environ[LAZY_CONNECTIONS] = lazy
    plan = RunPlan.model_validate_json(plan_json)
    before = sockets()
    mesh = join(plan.train)
    run(plan, run_dir=Path(folder), emit=lambda _: None, stop=lambda: False, mesh=mesh)
    at_end = sockets()
    mesh.any_rank(False)  # a rank that leaves closes its connections, which others still count
    leave(mesh)
    return before, at_end


@pytest.mark.parametrize("copies", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_lazy_connections_train_and_save_the_same_bits_over_fewer_sockets(
    prepared, tmp_path, copies
) -> None:
    plan = tiny_plan(
        prepared,
        config=tiny_config(vocab_size=300),
        train={"micro_batch_size": 2, "accumulation": 4, "tokens_per_step": 256, "steps": 3},
        checkpoint={"every_steps": 2},
    )
    plan = on_ranks(plan, replicate=copies, shard=2)
    counts = {}
    group = Ranks(2 * copies)
    try:
        for lazy in ("0", "1"):
            folder = tmp_path / lazy
            folder.mkdir()
            ends = group.call(trained, plan.model_dump_json(), str(folder), lazy)
            counts[lazy] = [at_end - before for before, at_end in ends]
    finally:
        group.close()
    for rank, (eager, lazy) in enumerate(zip(counts["0"], counts["1"], strict=True)):
        # The ranks of a test meet in a file: there is no store that is connected to.
        assert lazy < eager <= most_sockets(plan.train, rank), counts
    files = sorted(
        path.relative_to(tmp_path / "0") for path in (tmp_path / "0").rglob("*.safetensors")
    )
    assert files
    for file in files:
        assert (tmp_path / "0" / file).read_bytes() == (tmp_path / "1" / file).read_bytes(), file


def test_connections_are_lazy_with_many_ranks_and_no_pipeline(prepared) -> None:
    plan = tiny_plan(prepared, config=tiny_config(vocab_size=300))
    names = {
        size: LAZY_CONNECTIONS
        in plan_environment(on_ranks(plan, replicate=size[0], pipeline=size[1]))
        for size in ((2, 1), (64, 1), (64, 2))
    }
    assert names == {(2, 1): False, (64, 1): True, (64, 2): False}


@pytest.mark.parametrize(
    ("hard", "sockets", "soft_after"),
    [(2000, 1000, 1000 + USUAL_FILES), (1200, 1000, 1200), (1200, 1200 - LEAST_FILES + 1, None)],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(hard, sockets, soft_after) -> None:
    program = (
        "import json, resource, sys; from bloomery.parallel.environment import allow_descriptors;"
        "from bloomery.core.errors import UserError;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
        f"try: allow_descriptors({sockets}, who='rank 0 on node1')\n"
        "except UserError as error: print(json.dumps([error.problem, error.where, error.fix]))\n"
        "else: print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    with preloaded.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        said = json.loads(process.communicate(timeout=60)[0])
    if soft_after is not None:
        assert said == soft_after
        return
    problem, where, fix = said
    assert problem == f"rank 0 on node1 needs {sockets:,} sockets, and may open 1,200 files at most"
    assert "ulimit -Hn" in where and f"{sockets + USUAL_FILES:,}" in fix
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 256, "of that process alone"
