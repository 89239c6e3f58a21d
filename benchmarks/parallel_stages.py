"""What two stages of a pipeline cost over one rank with the same micro-batches, and how long each of them waits.

    python benchmarks/parallel_cpu.py --stages [--rounds 12] [--out FILE]

Each schedule has three processes: one rank of the 33 M model of `parallel_cpu`, and two stages of it. Both sides take
one step each in turn, A B and B A, of the same eight micro-batches, with the collectives of the loop around it; the
side that does not compute waits on a pipe. Their losses must have the same bits. Cost is the processor time, user and
system, of all threads: that of both stages over that of the one rank. Each rank computes with one thread.

Two busy cores share memory and cache, so that the same work takes each of them more processor time. How much is seen on
a third side: two single ranks that know nothing of each other take the step at the same time. The stages' cost over
theirs is what the pipeline itself costs.

A stage waits while it receives and while the ranks reduce sums; that time over the step's is its bubble. The formula
(P - 1) / (C M + P - 1) is for stages that take equally long; the plan's figure knows the cut. Waiting is in seconds of
the wall: it means something where each stage has a core of its own.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from parallel_cpu import plan_of

RESULTS = Path(__file__).parent / "results" / "parallel_stages.json"
BAR = 0.03
WARM = 2  # rounds that are not counted
STAGES = 2
MICRO_BATCHES = 8
# One device has the same bits only where the two ends share no matrix: that is a sum over ranks.
UNTIED = "model.tie_embeddings=false"
SCHEDULES = ("1f1b", "gpipe", "interleaved")


@dataclass(frozen=True)
class StepFigures:
    """Of one step on one rank."""

    seconds: float
    cpu_seconds: float
    waited_seconds: float
    loss: float


def rank_main(plan_json: str, rank: int, meeting: str, orders: Connection) -> None:
    """Takes a step for each number that arrives, and answers with its figures."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "BLOOMERY_RENDEZVOUS": meeting,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    import torch

    from bloomery.data.order import Cursor
    from bloomery.parallel.process_group import join, leave
    from bloomery.plan.types import RunPlan
    from bloomery.train.batch_source import open_loader
    from bloomery.train.objectives.build import build_objective
    from bloomery.train.state import build_state
    from bloomery.train.step import train_step

    torch.set_num_threads(1)
    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    model_and_optimizer = build_state(plan, mesh=mesh).model_and_optimizer
    objective = build_objective(plan)
    loader = open_loader(plan.data, "train", mesh=mesh, seed=plan.train.seed)
    size = plan.train.micro_batch_size

    def step(number: int) -> StepFigures:
        first = number * plan.train.sequences_per_step
        mesh.barrier()
        mesh.clock.reset()
        start = time.perf_counter()
        cpu_start = time.process_time()
        batches = [
            loader.batch(Cursor(plan.train.seed, first + index * size), size)
            for index in range(plan.train.accumulation)
        ]
        result = train_step(
            model_and_optimizer, batches, objective, plan=plan.train, lr_scale=1.0, position=first
        )
        # what the loop asks after each step: stop, pause, save; memory and time of each rank
        mesh.all_reduce_max(False, False)
        mesh.any_rank(False)
        mesh.all_gather_floats(0.0, 0.0)
        return StepFigures(
            seconds=time.perf_counter() - start,
            cpu_seconds=time.process_time() - cpu_start,
            waited_seconds=mesh.clock.waited_seconds,
            loss=result.loss,
        )

    while (number := orders.recv()) is not None:
        orders.send(step(number))
    leave(mesh)


class Side:
    """The ranks of one plan, which wait for orders."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes
        self.steps: list[list[StepFigures]] = []  # by step and rank

    def __add__(self, other: "Side") -> "Side":
        """Both at the same time."""
        return Side([*self._pipes, *other._pipes])

    def take(self, number: int) -> None:
        for pipe in self._pipes:
            pipe.send(number)
        self.steps.append([pipe.recv() for pipe in self._pipes])

    @property
    def cpu_seconds(self) -> list[float]:
        """By counted step, of all ranks together."""
        return [sum(figures.cpu_seconds for figures in step) for step in self.steps[WARM:]]

    @property
    def losses(self) -> list[float]:
        return [step[0].loss for step in self.steps]

    def waited_share(self, rank: int) -> float:
        """Of its steps' seconds; the median."""
        steps = [step[rank] for step in self.steps[WARM:]]
        return statistics.median(figures.waited_seconds / figures.seconds for figures in steps)


@contextmanager
def started(plan: Any, folder: Path) -> Iterator[Side]:
    """The ranks of the plan, in processes that end with the block."""
    context = get_context("spawn")
    pipes, processes = [], []
    for rank in range(plan.train.ranks):
        own, other = context.Pipe()
        arguments = (plan.model_dump_json(), rank, str(folder / "meeting"), other)
        process = context.Process(target=rank_main, args=arguments)
        process.start()
        other.close()
        pipes.append(own)
        processes.append(process)
    try:
        yield Side(pipes)
        for pipe in pipes:
            pipe.send(None)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join()


def compare(schedule: str, rounds: int, folder: Path) -> dict[str, Any]:
    """One rank and two stages with that schedule, step by step in turn."""
    from bloomery.plan.pipeline import bubble

    def plan(stages: int) -> Any:
        words = [UNTIED, f"parallel.pipeline={stages}"]
        if stages > 1:
            words.append(f"parallel.pipeline_schedule={schedule}")
        return plan_of(folder, gpus=stages, micro_batch_size=1, words=words)

    plans = {"one rank": plan(1), "stages": plan(STAGES), "beside": plan(1), "another": plan(1)}
    assert all(plan.train.accumulation == MICRO_BATCHES for plan in plans.values())
    with ExitStack() as stack:
        sides = {}
        for name, side_plan in plans.items():
            side_folder = folder / f"{schedule}-{name}"
            side_folder.mkdir()
            sides[name] = stack.enter_context(started(side_plan, side_folder))
        sides["two ranks"] = sides.pop("beside") + sides.pop("another")
        for number in range(rounds + WARM):
            for side in list(sides.values())[:: 1 if number % 2 == 0 else -1]:
                side.take(number)

    one_rank, stages = sides["one rank"], sides["stages"]
    assert stages.losses == one_rank.losses, "two stages computed other losses than one rank"
    ratios = [
        cost / alone - 1
        for cost, alone in zip(stages.cpu_seconds, one_rank.cpu_seconds, strict=True)
    ]
    ratios_of_busy_cores = [
        cost / (both / 2) - 1
        for cost, both in zip(stages.cpu_seconds, sides["two ranks"].cpu_seconds, strict=True)
    ]
    train = plans["stages"].train
    layout = plans["stages"].parallel.layout
    return {
        "layers": train.pipeline_layers,
        "overhead": statistics.median(ratios),
        "overheads": ratios,
        "overhead_on_busy_cores": statistics.median(ratios_of_busy_cores),
        "overheads_on_busy_cores": ratios_of_busy_cores,
        "one_rank": [asdict(step[0]) for step in one_rank.steps[WARM:]],
        "stages": [[asdict(figures) for figures in step] for step in stages.steps[WARM:]],
        "waited_share": [stages.waited_share(rank) for rank in range(STAGES)],
        "bubble_formula": bubble(
            stages=STAGES, micro_batches=MICRO_BATCHES, chunks=train.pipeline_chunks
        ),
        "bubble_planned": layout.bubble_seconds / layout.step_seconds.value,
    }


def compare_schedules(rounds: int, out: Path) -> None:
    """All schedules, one after the other; prints a line for each and writes their figures."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    report: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        for schedule in SCHEDULES:
            figures = compare(schedule, rounds, Path(folder))
            report[schedule] = figures
            overhead = figures["overhead"]
            waited = ", ".join(f"{share:.0%}" for share in figures["waited_share"])
            print(
                f"{schedule}, layers {', '.join(map(str, figures['layers']))}: "
                f"two stages {overhead:+.1%} CPU time over one rank (median of {rounds} rounds, "
                f"{min(figures['overheads']):+.1%} to {max(figures['overheads']):+.1%}; "
                f"at most {BAR:.0%}: {'met' if overhead <= BAR else 'NOT MET'}), "
                f"{figures['overhead_on_busy_cores']:+.1%} over one on a machine as busy; "
                f"stages wait {waited} of a step, formula {figures['bubble_formula']:.0%}, "
                f"planned {figures['bubble_planned']:.0%}",
                flush=True,
            )
    out.write_text(json.dumps(report, indent=1) + "\n")
