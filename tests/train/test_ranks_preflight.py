"""What ranks find out about each other before the first step, and while they train."""

import errno
import os
import random
import shutil
import socket
from pathlib import Path

import pytest
from plans_for_tests import tiny_plan

from bloomery.core.errors import UserError
from bloomery.train.diagnostics.step_health import Stragglers
from ranks import on_ranks, ranks


def checked(plan_json: str, folder: str, break_rank_1: str) -> str:
    """On every rank: the error of the preflight, or its result. Rank 1 is another than the others."""
    import torch

    from bloomery.parallel import preflight
    from bloomery.parallel.mesh import Mesh
    from bloomery.plan.types import RunPlan

    plan, run_dir = RunPlan.model_validate_json(plan_json), Path(folder)
    mesh = preflight.meet(plan.train)
    before, preflight.SHARED_SECONDS = (
        (torch.__version__, Mesh.all_reduce, preflight.read_manifest),
        0.2,
    )
    disk_usage, usage = shutil.disk_usage, shutil.disk_usage(folder)
    # enough for a small model
    preflight.shutil.disk_usage = lambda path: usage._replace(free=900 * 2**20)

    def unreadable(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    try:
        if mesh.rank == 1 and break_rank_1 == "torch":
            torch.__version__ = "1.0"
        if mesh.rank == 1 and break_rank_1 == "folder":
            run_dir = run_dir / "elsewhere"
        if mesh.rank == 1 and break_rank_1 == "dataset":
            preflight.read_manifest = unreadable
        if mesh.rank == 1 and break_rank_1 == "plan":
            plan = plan.model_copy(update={"name": "another"})
        if mesh.rank == 1 and break_rank_1 == "sum":
            Mesh.all_reduce = lambda self, tensor: before[1](self, tensor).add_(1)
        found = preflight.check_ranks(mesh, plan, run_dir)
        return f"{found} {found.seconds:.3f}"
    except UserError as error:
        return str(error)
    finally:
        torch.__version__, Mesh.all_reduce, preflight.read_manifest = before
        preflight.shutil.disk_usage = disk_usage


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("torch", "has torch 1.0, and the other ranks have"),
        ("folder", "does not see what rank 0 writes into the run folder"),
        ("dataset", "cannot read the prepared dataset"),
        ("plan", "has another plan"),
        ("sum", "received a wrong sum of all ranks"),
    ],
)
def test_before_the_first_step_the_rank_at_fault_is_named(prepared, tmp_path, broken, said) -> None:
    plan = on_ranks(tiny_plan(prepared), replicate=2)
    told = ranks(2).call(checked, plan.model_dump_json(), str(tmp_path), broken)
    assert told[0] == told[1]
    assert told[0].startswith("error: rank 1 on ") and said in told[0], told
    assert not list(tmp_path.glob(".tmp-*"))


def test_healthy_ranks_agree_in_a_fifth_of_a_second(prepared, tmp_path) -> None:
    plan = on_ranks(tiny_plan(prepared), replicate=2)
    told = ranks(2).call(checked, plan.model_dump_json(), str(tmp_path), "")
    assert all("2 ranks (2 on " in text and "all-reduce of" in text for text in told)
    assert min(float(text.split()[-1]) for text in told) < 0.2


def exchanged_strings(plan_json: str, strings: list[str]) -> tuple[list[str], str]:
    """On every rank: the strings of all, and that of rank 0."""
    from bloomery.parallel.process_group import join
    from bloomery.plan.types import RunPlan

    mesh = join(RunPlan.model_validate_json(plan_json).train)
    own = strings[mesh.rank]
    return mesh.all_gather_str(own), mesh.broadcast_str(own)


def test_strings_arrive_as_they_were_sent(prepared) -> None:
    plan_json = on_ranks(tiny_plan(prepared), replicate=2).model_dump_json()
    for strings in (["", "größer"], ["größer", ""], ["x" * 5000, "y" * 5000]):
        cut = [string[:1024] for string in strings]
        assert ranks(2).call(exchanged_strings, plan_json, strings) == [(cut, strings[0])] * 2


def meet_at(plan_json: str, port: int) -> str:
    """On rank 0: what it says of a taken port."""
    from bloomery.parallel import preflight
    from bloomery.plan.types import RunPlan

    if os.environ["RANK"] != "0":
        return ""
    os.environ.pop("BLOOMERY_RENDEZVOUS")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        preflight.meet(RunPlan.model_validate_json(plan_json).train)
    except UserError as error:
        return str(error)
    return "joined"


def test_a_taken_port_is_named(prepared) -> None:
    plan = on_ranks(tiny_plan(prepared), replicate=2)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = ranks(2).call(meet_at, plan.model_dump_json(), port)
    assert f"port {port} of 127.0.0.1 is taken" in told[0]


def meet_without_rank_1(plan_json: str, port: int) -> str:
    """On every rank, rank 1 but for: what it says of the missing one."""
    from bloomery.parallel import preflight, process_group
    from bloomery.plan.types import RunPlan

    before, process_group.JOIN_SECONDS = process_group.JOIN_SECONDS, 1.0
    if port:
        os.environ.pop("BLOOMERY_RENDEZVOUS")
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        if os.environ["RANK"] != "1":
            preflight.meet(RunPlan.model_validate_json(plan_json).train)
    except UserError as error:
        return str(error)
    finally:
        process_group.JOIN_SECONDS = before
    return "joined"


@pytest.mark.parametrize("at_a_port", [False, True], ids=["file", "port"])
def test_a_rank_that_never_arrives_is_named(prepared, at_a_port) -> None:
    plan = on_ranks(tiny_plan(prepared), replicate=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = ranks(2).call(meet_without_rank_1, plan.model_dump_json(), port if at_a_port else 0)
    assert told[1] == "joined" and "rank 1 of 2 did not arrive within 1.0 s" in told[0], told


def test_a_straggler_is_named_once_within_a_hundred_steps() -> None:
    stragglers, named = Stragglers(), []
    for step in range(100):
        slow = 1.5 if step % 2 else 1.0
        named += [
            (step, rank, times) for rank, times in stragglers.note([1.0, slow, 1.0, 1.1]).items()
        ]
    assert named == [(99, 1, 1.5)]
    noisy = Stragglers()
    draw = random.Random(0)
    assert not any(noisy.note([draw.uniform(0.9, 1.2) for _ in range(4)]) for _ in range(1000))
