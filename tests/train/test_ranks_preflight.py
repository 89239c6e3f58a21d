"""What ranks find out about each other before the first step, and while they train."""

import errno
import os
import random
import re
import shutil
import socket
import time
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from plans_for_tests import tiny_config, tiny_plan

from bloomery.core.errors import UserError
from bloomery.monitor.events import Warned
from bloomery.parallel import preflight, process_group
from bloomery.parallel.environment import hosts_at_fault, without_host
from bloomery.parallel.links import neighbor_rounds
from bloomery.train.diagnostics.stragglers import Straggler, Stragglers, worked_seconds
from ranks import on_ranks, ranks

# Longer than a transfer of 1 MiB takes on a crowded machine (0.15 s was seen); a slow one takes over three times that.
SILENT_SECONDS = 2.0
SLOW_SECONDS = 1.0


def checked(plan_json: str, folder: str, break_rank_1: str, hosts: tuple[str, ...] = ()) -> str:
    """On every rank: the error of the preflight, or its result. Rank 1 is another than the others.

    `hosts`: pretended ones, by rank.
    """
    import torch
    import torch.distributed as dist

    from bloomery.check import products
    from bloomery.parallel import preflight
    from bloomery.parallel.mesh import Mesh
    from bloomery.plan.types import RunPlan

    plan, run_dir = RunPlan.model_validate_json(plan_json), Path(folder)
    mesh = preflight.meet(plan.train)
    before = (torch.__version__, Mesh.all_reduce, preflight.read_manifest)
    reading_problem = preflight._reading_problem
    preflight.SHARED_SECONDS = 0.2
    if hosts:
        os.environ["SLURMD_NODENAME"] = hosts[mesh.rank]
    disk_usage, usage = shutil.disk_usage, shutil.disk_usage(folder)
    # enough for a small model
    preflight.shutil.disk_usage = lambda path: usage._replace(free=900 * 2**20)

    def unreadable(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    def little_disk(path: Path) -> object:
        return usage._replace(free=2**20)

    def broken_driver(device: str, dtype: torch.dtype) -> int:
        raise RuntimeError("HIP error: unspecified launch failure\nmore of it")

    wrong_rows = products.wrong_rows_of_product
    matmul = torch.Tensor.__matmul__
    all_to_all = dist.all_to_all_single

    def one_wrong_entry(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = matmul(left, right)
        if right.ndim == 2 and right.dtype == torch.float32:
            product[3, 5] += 1
        return product

    try:
        if mesh.rank == 1 and break_rank_1 == "disk":
            preflight.shutil.disk_usage = little_disk
        if mesh.rank == 1 and break_rank_1 == "driver":
            products.wrong_rows_of_product = broken_driver
        if mesh.rank == 1 and break_rank_1 == "product":
            torch.Tensor.__matmul__ = one_wrong_entry
        if mesh.rank == 1 and break_rank_1 == "torch":
            torch.__version__ = "1.0"
        if mesh.rank == 1 and break_rank_1 == "folder":
            run_dir = run_dir / "elsewhere"
        if mesh.rank == 1 and break_rank_1 == "dataset":
            preflight.read_manifest = unreadable
        if mesh.rank == 1 and break_rank_1 == "long path":
            preflight._reading_problem = lambda prepared: "資" * 1000 + ": No such file"
        if mesh.rank == 1 and break_rank_1 == "plan":
            plan = plan.model_copy(update={"name": "another"})
        if mesh.rank == 1 and break_rank_1 == "sum":
            errors = iter((1, 0, 0))  # a link that is wrong now and then
            Mesh.all_reduce = lambda self, tensor: before[1](self, tensor).add_(next(errors))
        if mesh.rank == 1 and break_rank_1 == "rows":

            def last_row_is_lost(received: torch.Tensor, *numbers: object, **group: object) -> None:
                all_to_all(received, *numbers, **group)
                received[-1] = 0

            dist.all_to_all_single = last_row_is_lost
        found = preflight.check_ranks(mesh, plan, run_dir, product_problem=products.product_problem)
        return f"{found} {found.seconds:.3f}"
    except UserError as error:
        return str(error)
    finally:
        torch.__version__, Mesh.all_reduce, preflight.read_manifest = before
        preflight._reading_problem = reading_problem
        preflight.shutil.disk_usage = disk_usage
        products.wrong_rows_of_product = wrong_rows
        torch.Tensor.__matmul__ = matmul
        dist.all_to_all_single = all_to_all
        os.environ.pop("SLURMD_NODENAME", None)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("torch", "has torch 1.0, and the other ranks have"),
        ("folder", "does not see what rank 0 writes into the run folder"),
        ("dataset", "cannot read the prepared dataset"),
        ("long path", f"where: {'資' * 1000}: No such file"),
        ("plan", "has another plan"),
        ("sum", "received a wrong sum of all ranks"),
        ("disk", "has 1.0 MiB of disk for temporary files"),
        ("product", "computes wrong float32 products: 1 of 256 rows"),
        ("driver", "fails: HIP error: unspecified launch failure\n"),
        ("rows", "received wrong rows for its experts"),
    ],
)
def test_before_the_first_step_the_rank_at_fault_is_named(prepared, tmp_path, broken, said) -> None:
    plan = on_ranks(tiny_plan(prepared), replicate=2, expert=2 if broken == "rows" else 1)
    told = ranks(2).call(checked, plan.model_dump_json(), str(tmp_path), broken, ("n1", "n2"))
    assert told[0] == told[1]
    assert "rank 1 on n2 " in told[0].partition("\n")[0] and said in told[0], told
    assert "rank 0" not in told[0].partition("\n")[0].replace("what rank 0 writes", "")
    assert told[0].endswith("leave the host out: start the ranks on other hosts than n2")
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize(
    ("hosts", "wrong_ranks", "at_fault"),
    [
        (["n1", "n1", "n2", "n3"], [2], "n2"),
        (["n1", "n1", "n2", "n3"], [3, 0, 1], "n3,n1"),
        # None would be left, and where all ranks are on one host.
        (["n1", "n1", "n2"], [0, 2], ""),
        (["n1", "n1"], [1], ""),
        ([], [1], ""),
    ],
)
def test_the_hosts_of_wrong_ranks(hosts, wrong_ranks, at_fault) -> None:
    assert hosts_at_fault(hosts, wrong_ranks) == at_fault


def test_under_slurm_the_line_that_excludes_the_host_is_printed(monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    line = without_host("n2")
    assert "`#SBATCH --exclude=n2`" in line and "`sbatch --exclude=n2`" in line
    assert "bloomery slurm RECIPE --exclude n2" in line


def test_the_only_host_is_not_left_out(prepared, tmp_path) -> None:
    plan = on_ranks(tiny_plan(prepared), replicate=2)
    told = ranks(2).call(checked, plan.model_dump_json(), str(tmp_path), "product", ("n1", "n1"))
    assert "rank 1 on n1 computes wrong float32 products" in told[0]
    assert "leave" not in told[0]


@pytest.mark.parametrize(
    "hosts",
    [
        ["a"] * 2,
        ["a"] * 5,
        ["a", "b"],
        ["a", "b", "c"],
        ["a"] * 3 + ["b"] * 2 + ["c"],
        ["a", "b"] * 3,
        [f"n{rank // 8}" for rank in range(512)],
    ],
    ids=lambda hosts: f"{len(hosts)} on {len(set(hosts))}",
)
def test_every_pair_inside_a_host_and_every_neighbor_is_tried_once(hosts) -> None:
    tried = [pair for pairs in neighbor_rounds(hosts) for pair in pairs]
    world = len(hosts)
    inside = {pair for pair in combinations(range(world), 2) if hosts[pair[0]] == hosts[pair[1]]}
    ring = {tuple(sorted((rank, (rank + 1) % world))) for rank in range(world)}
    assert len(tried) == len(set(tried)) and set(tried) == inside | ring
    for pairs in neighbor_rounds(hosts):
        partners = [rank for pair in pairs for rank in pair]
        assert len(partners) == len(set(partners))
    assert len(neighbor_rounds(hosts)) <= max(Counter(hosts).values()) + 3


def links_with_a_fault(plan_json: str, hosts: list[str], fault: str, faulty_rank: int) -> str:
    """On every rank: what is said of the links where those of one rank between hosts, or inside, fail."""
    import torch.distributed as dist

    from bloomery.parallel import links
    from bloomery.parallel.links import try_neighbors
    from bloomery.parallel.process_group import join
    from bloomery.plan.types import RunPlan

    mesh = join(RunPlan.model_validate_json(plan_json).train)
    send, patience = dist.isend, links.LINK_SECONDS

    class Sent:
        def wait(self) -> None:
            pass

    def faulty_send(tensor, partner, tag=0):
        crosses = hosts[mesh.rank] != hosts[partner]
        if mesh.rank == faulty_rank and crosses == fault.endswith("between"):
            if fault.startswith("silent"):
                return Sent()
            if fault.startswith("slow"):
                time.sleep(SLOW_SECONDS)
                return send(tensor, partner, tag=tag)
            tensor = tensor + 1
        return send(tensor, partner, tag=tag)

    try:
        dist.isend = faulty_send
        if fault.startswith("silent"):
            links.LINK_SECONDS = SILENT_SECONDS
        rates = try_neighbors(mesh, hosts, "cpu")
        return "\n".join([str(rates), *rates.slow_links()])
    except UserError as error:
        return f"{error}\nhost: {error.host}"
    finally:
        dist.isend, links.LINK_SECONDS = send, patience


@pytest.mark.parametrize(
    ("fault", "faulty_rank", "problem", "host"),
    [
        # Both neighbors of rank 2 miss its numbers: its host, and neither of theirs, is at fault.
        (
            "wrong between",
            2,
            "rank 2 on n2 and rank 3 on n3 fails, and 1 other: wrong numbers",
            "n2",
        ),
        (
            "silent between",
            2,
            "rank 2 on n2 and rank 3 on n3 fails, and 1 other: no answer",
            "n2",
        ),
        ("wrong inside", 3, "between ranks 2 and 3 on n2 fails: wrong numbers", "n2"),
    ],
)
def test_the_host_whose_links_fail_is_named(prepared, fault, faulty_rank, problem, host) -> None:
    plan = on_ranks(tiny_plan(prepared), replicate=4)
    hosts = ["n0", "n1", "n2", "n3"] if fault.endswith("between") else ["n1", "n1", "n2", "n2"]
    told = ranks(4).call(links_with_a_fault, plan.model_dump_json(), hosts, fault, faulty_rank)
    assert set(told) == {told[0]}
    assert problem in told[0] and told[0].endswith(f"\nhost: {host}"), told[0]
    assert f"start the ranks on other hosts than {host}" in told[0]


def test_a_slow_link_between_hosts_is_reported(prepared) -> None:
    plan = on_ranks(tiny_plan(prepared), replicate=4)
    hosts = ["n0", "n1", "n2", "n3"]
    told = ranks(4).call(links_with_a_fault, plan.model_dump_json(), hosts, "slow between", 3)
    slow = told[0].splitlines()[1:]
    assert len(slow) == 2 and all("rank 3 on n3" in line for line in slow), told[0]


def test_healthy_ranks_agree_in_half_a_second(prepared, tmp_path) -> None:
    plan = on_ranks(tiny_plan(prepared), replicate=2)
    words = (plan.model_dump_json(), str(tmp_path), "")
    # The best of three, on a crowded machine.
    told = [text for _ in range(3) for text in ranks(2).call(checked, *words)]
    assert all("2 ranks (2 on " in text and "all-reduce of" in text for text in told)
    assert all("products are exact; the link between ranks 0 and 1 on " in text for text in told)
    assert min(float(text.split()[-1]) for text in told) < 0.5


def checked_pipeline(plan_json: str, folder: str, fault: str) -> str:
    """On every rank: the error of a pipeline's preflight, or its result. The first or the last rank is at fault."""
    from bloomery.check.products import product_problem
    from bloomery.parallel import links, preflight
    from bloomery.parallel.pipeline import DeviceTransport, HostTransport
    from bloomery.parallel.process_group import edge_groups
    from bloomery.plan.types import RunPlan

    plan = RunPlan.model_validate_json(plan_json)
    mesh = preflight.meet(plan.train)
    faulty_class = DeviceTransport if fault.startswith("device") else HostTransport
    send, receive, patience = faulty_class.send, faulty_class.receive, links.LINK_SECONDS
    if faulty_class is DeviceTransport:
        groups = edge_groups(plan.train, mesh.rank, backend="gloo")
        mesh = replace(mesh, groups=replace(mesh.groups, edges=groups))
    try:
        if fault.endswith("wrong") and mesh.rank == mesh.world - 1:
            faulty_class.receive = lambda self, empty, *way: receive(self, empty, *way).add_(1)
        if fault.endswith("swapped"):  # two edges share a queue, and each gets what the other sent
            faulty_class.send = lambda self, tensor, rank, edge, way: send(self, tensor, rank, 0, 0)
            faulty_class.receive = lambda self, empty, rank, edge, way: receive(
                self, empty, rank, 0, 0
            )
        if fault.endswith("silent"):
            links.LINK_SECONDS = SILENT_SECONDS
            if mesh.rank == 0:
                faulty_class.send = lambda self, tensor, *way: None
        found = preflight.check_ranks(mesh, plan, Path(folder), product_problem=product_problem)
        return f"{found.link.transport}: {found}"
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        faulty_class.send, faulty_class.receive = send, receive
        links.LINK_SECONDS = patience


def pipeline_plan(prepared, *, chunks: int = 1, **train):
    plan = tiny_plan(prepared, config=tiny_config(num_layers=4))
    several = on_ranks(plan, pipeline=2, chunks=chunks)
    return several.model_copy(update={"train": several.train.model_copy(update=train)})


FIRST, SECOND = (rf"rank {rank} \(layers {rank} and {rank + 2}\) on \S+" for rank in (0, 1))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("wrong", rf"{SECOND} received wrong numbers from {FIRST}\n"),
        ("swapped", rf"({FIRST}|{SECOND}) received wrong numbers from ({FIRST}|{SECOND})\n"),
        ("silent", rf"{SECOND} got no answer from {FIRST}: waited {SILENT_SECONDS} s\n"),
    ],
)
def test_a_neighbor_whose_link_fails_is_named_with_this_rank(prepared, tmp_path, fault, expected):
    plan = pipeline_plan(prepared, chunks=2)
    start = time.monotonic()
    told = ranks(2).call(checked_pipeline, plan.model_dump_json(), str(tmp_path), fault)
    assert time.monotonic() - start < 30
    assert told[0] == told[1]
    assert re.match(f"UserError: error: {expected}", told[0]), told
    assert "doctor --probe" in told[0]


@pytest.mark.parametrize("fault", ["device wrong", "device silent"])
@pytest.mark.parametrize("link", ["auto", "device"])
def test_gpus_that_cannot_send_to_each_other_have_a_fallback(prepared, tmp_path, fault, link):
    plan = pipeline_plan(prepared, pipeline_link=link)
    told = ranks(2).call(checked_pipeline, plan.model_dump_json(), str(tmp_path), fault)
    assert told[0] == told[1]
    assert told[0].startswith("LinkFailed" if link == "auto" else "UserError"), told
    assert "rank 1 (layers 2 to 3) on " in told[0] and "rank 0 (layers 0 to 1) on " in told[0]
    assert "set parallel.pipeline_link=host" in told[0] and "iommu=pt" in told[0]


@pytest.mark.parametrize("link", ["auto", "device", "host"])
def test_both_links_of_a_pipeline_are_tried_and_one_is_taken(prepared, tmp_path, link):
    plan = pipeline_plan(prepared, chunks=2, pipeline_link=link)
    told = ranks(2).call(checked_pipeline, plan.model_dump_json(), str(tmp_path), "device")
    taken = [text.partition(":")[0] for text in told]
    assert taken[0] == taken[1] and (link == "auto" or taken[0] == link), told
    assert re.search(r"slowest edge rank [01] to [01] at [\d.]+ [KMG]iB/s; ", told[0]), told


def test_the_slowest_edge_of_all_copies_is_named(prepared, tmp_path):
    plan = on_ranks(tiny_plan(prepared, config=tiny_config(num_layers=4)), pipeline=2, replicate=2)
    told = ranks(4).call(slow_link, plan.model_dump_json(), str(tmp_path))
    assert all("slowest edge rank 3 to 1 at" in text for text in told), told


def slow_link(plan_json: str, folder: str) -> str:
    """On every rank: the result of the preflight, where the way from rank 3 to rank 1 is slow."""
    from bloomery.check.products import product_problem
    from bloomery.parallel import preflight
    from bloomery.parallel.pipeline import HostTransport
    from bloomery.plan.types import RunPlan

    plan = RunPlan.model_validate_json(plan_json)
    mesh = preflight.meet(plan.train)
    receive = HostTransport.receive

    def slow(self, empty, rank, edge, direction):
        if (mesh.rank, rank) == (1, 3):
            time.sleep(0.3)
        return receive(self, empty, rank, edge, direction)

    HostTransport.receive = slow
    try:
        return str(preflight.check_ranks(mesh, plan, Path(folder), product_problem=product_problem))
    finally:
        HostTransport.receive = receive


def exchanged_strings(plan_json: str, strings: list[str]) -> tuple[list[str], str]:
    """On every rank: the strings of all, and that of rank 0."""
    from bloomery.parallel.process_group import join
    from bloomery.plan.types import RunPlan

    mesh = join(RunPlan.model_validate_json(plan_json).train)
    own = strings[mesh.rank]
    return mesh.all_gather_json(own), mesh.broadcast_json(own)


def test_strings_arrive_as_they_were_sent(prepared) -> None:
    plan_json = on_ranks(tiny_plan(prepared), replicate=2).model_dump_json()
    for strings in (["", "größer"], ["größer", ""], ["x" * 5000, "y" * 5000]):
        assert ranks(2).call(exchanged_strings, plan_json, strings) == [(strings, strings[0])] * 2


def test_a_rank_without_a_device_is_named(prepared, monkeypatch) -> None:
    plan = on_ranks(tiny_plan(prepared), replicate=2)
    plan = plan.model_copy(update={"train": plan.train.model_copy(update={"device": "cuda"})})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for join in (process_group.join, preflight.meet):
        with pytest.raises(UserError, match=r"rank 1 on .* sees no GPU"):
            join(plan.train)


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
        named += [(step, straggler) for straggler in stragglers.note([1.0, slow, 1.0, 1.1])]
    assert named == [(99, Straggler((1,), "", 1.5))]
    # The second of two stages has more layers, and one of its ranks is slow.
    uneven, named = Stragglers(stages=2), []
    for _ in range(100):
        named += uneven.note([1.0, 1.0, 1.0, 2.0, 2.0, 3.0])
    assert named == [Straggler((5,), "", 1.5)]
    noisy = Stragglers()
    draw = random.Random(0)
    assert not any(noisy.note([draw.uniform(0.9, 1.2) for _ in range(4)]) for _ in range(1000))


def test_a_slow_host_is_told_from_a_slow_rank() -> None:
    hosts = ["n0"] * 4 + ["n1"] * 4
    # All four ranks of n1 compute slowly, each a little late or early: one warning names the host.
    stragglers, draw, named = Stragglers(hosts=hosts), random.Random(0), []
    for _ in range(200):
        named += stragglers.note(
            [draw.uniform(0.95, 1.05) * (1.6 if host == "n1" else 1.0) for host in hosts]
        )
    ((ranks_of_n1, host, times),) = [(each.ranks, each.host, each.times) for each in named]
    assert (ranks_of_n1, host) == ((4, 5, 6, 7), "n1") and 1.5 < times < 1.7
    # Two of the four are slow: these are named by themselves.
    stragglers, named = Stragglers(hosts=hosts), []
    for _ in range(200):
        named += stragglers.note([1.0] * 4 + [1.0, 1.6, 1.0, 1.6])
    assert named == [Straggler((5,), "", 1.6), Straggler((7,), "", 1.6)]
    # On one host alone there is no slow host.
    stragglers, named = Stragglers(hosts=["n0"] * 3), []
    for _ in range(100):
        named += stragglers.note([1.0, 1.0, 1.6])
    assert named == [Straggler((2,), "", 1.6)]


def test_on_gpus_the_rank_that_waits_least_in_collectives_has_worked_longest() -> None:
    # Every step takes 1.0 s on all ranks: three of them wait 0.4 s of it for the last one.
    worked = worked_seconds([1.0] * 4, [0.5, 0.5, 0.5, 0.1])
    assert worked == pytest.approx([0.6, 0.6, 0.6, 1.0])
    assert worked_seconds([1.0, 2.0], [0.0, 0.0]) == [1.0, 2.0]


def warnings_of_a_slow_host(plan_json: str, folder: str, hosts: list[str], slow: list[int]) -> str:
    """On every rank: what a run warns of whose ranks `slow` need 0.2 s more for each step."""
    from bloomery.parallel.process_group import join
    from bloomery.plan.types import RunPlan
    from bloomery.train import loop
    from bloomery.train.diagnostics import stragglers

    plan, events = RunPlan.model_validate_json(plan_json), []
    mesh = replace(join(plan.train), hosts=tuple(hosts))
    step, slow_steps = loop.train_step, stragglers.SLOW_STEPS

    def slow_step(*words, **settings):
        time.sleep(0.2)
        return step(*words, **settings)

    try:
        stragglers.SLOW_STEPS = 8
        if mesh.rank in slow:
            loop.train_step = slow_step
        loop.run(plan, run_dir=Path(folder), emit=events.append, stop=lambda: False, mesh=mesh)
    finally:
        loop.train_step, stragglers.SLOW_STEPS = step, slow_steps
    return "\n".join(event.reason for event in events if isinstance(event, Warned))


@pytest.mark.parametrize(
    ("slow", "named"),
    [
        ([2, 3], "host n2, with 2 ranks from 2 to 3, takes"),
        pytest.param([2], "rank 2 on n2 takes", marks=pytest.mark.soak),
    ],
)
def test_a_run_names_its_slow_host_or_rank(prepared, tmp_path, slow, named) -> None:
    small = tiny_plan(prepared, config=tiny_config(vocab_size=300), train={"steps": 12})
    plan = on_ranks(small, replicate=4)
    hosts = ["n1", "n1", "n2", "n2"]
    told = ranks(4).call(
        warnings_of_a_slow_host, plan.model_dump_json(), str(tmp_path), hosts, slow
    )
    # On a crowded machine one of the others may be slow, too.
    waiting = [line for line in told[0].splitlines() if "the others wait" in line and "n2" in line]
    assert len(waiting) == 1 and waiting[0].startswith(named), told[0]
    assert waiting[0].endswith("to leave it out: start the ranks on other hosts than n2")
