"""The planner's simulator of two queues against two threads of this CPU: one copies layers, one multiplies with them.

`python benchmarks/two_queues.py [--rounds 5] [--layers 8] [--into FILE.json]`. The tasks are those of
`plan.estimate.stream_time.stream_tasks`, and each thread runs those of its queue in their order, when the tasks that
they wait for have ended. Two errors of the simulated seconds are printed: with the seconds that tasks took in the run,
which leaves the order of the queues alone, and with those that they take when nothing runs beside them, as a plan knows
them. The second one has what threads of one CPU take from each other, too.
"""

import argparse
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bloomery.hardware.host_links import HostLink
from bloomery.model.configs import build_config
from bloomery.plan.estimate.queues import Queues
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.estimate.stream_time import LayerSeconds, queue_passes
from bloomery.plan.estimate.streaming import streamed_by_layer
from bloomery.recipe.schema import Model

WIDTH = 2048
CACHED = 1024
TOKENS = 64  # of one product, of which a layer has as many as its time takes
FORWARDS = {"copies hide": 1.5, "copies take longer": 0.6}  # of the seconds of a copy
QUEUES = ("to device", "device")


@dataclass(frozen=True)
class Task:
    """Work of a queue. `after`: the numbers of earlier tasks that must have ended before it begins."""

    queue: str
    seconds: float
    after: tuple[int, ...]


class End(float):
    """The second in which a task ends, with the number of the task."""

    number: int


class NotedQueues(Queues):
    """Keeps the tasks that are queued."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[Task] = []

    def run(self, queue: str, seconds: float, *after: float) -> float:
        end = End(super().run(queue, seconds, *after))
        end.number = len(self.tasks)
        numbers = tuple(earlier.number for earlier in after if isinstance(earlier, End))
        self.tasks.append(Task(queue, seconds, numbers))
        return end


def planned_seconds(tasks: Sequence[Task]) -> float:
    queues = Queues()
    ends = list[float]()
    for task in tasks:
        ends.append(queues.run(task.queue, task.seconds, *(ends[number] for number in task.after)))
    return queues.end


@dataclass
class Layers:
    """Host and device, which has two buffers, and what the device multiplies."""

    host: list[Tensor]
    device: list[Tensor]
    x_ND: Tensor
    matrix_DD: Tensor  # of a cache: what computes takes no memory's rate from what copies

    @classmethod
    def of(cls, count: int, tokens: int) -> "Layers":
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(4 * WIDTH, WIDTH, generator=generator) for _ in range(count)]
        buffers = [torch.empty_like(weights[0]) for _ in range(2)]
        x_ND = torch.randn(tokens, CACHED, generator=generator)
        return cls(weights, buffers, x_ND, torch.randn(CACHED, CACHED, generator=generator))

    def copy(self, number: int) -> None:
        self.device[number % 2].copy_(self.host[number % len(self.host)])

    def compute(self, repeats: int) -> None:
        for _ in range(repeats):
            torch.mm(self.x_ND, self.matrix_DD)


def seconds_of(work: Callable[[], object], tries: int = 7) -> float:
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def run(tasks: Sequence[Task], work: Sequence[Callable[[], object]]) -> tuple[float, list[float]]:
    """Seconds of all tasks on a thread per queue, and of each alone."""
    ended = [threading.Event() for _ in tasks]
    seconds = [0.0] * len(tasks)

    def serve(queue: str) -> None:
        for number, task in enumerate(tasks):
            if task.queue != queue:
                continue
            for earlier in task.after:
                ended[earlier].wait()
            start = time.perf_counter()
            work[number]()
            seconds[number] = time.perf_counter() - start
            ended[number].set()

    threads = [threading.Thread(target=serve, args=(queue,)) for queue in QUEUES]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start, seconds


def planned_tasks(num_layers: int, forward: float, backward: float, copy: float) -> list[Task]:
    """Of three passes of a frozen model whose layers take these seconds."""
    shape = {
        "hidden_size": 64,
        "num_layers": num_layers,
        "num_heads": 4,
        "max_positions": 128,
        "vocab_size": 256,
    }
    model = TrainedModel(build_config(Model(family="llama", **shape), vocab_size=256))
    model = replace(model, mode=replace(model.mode, target_modules=(("none", 1),)))
    step = StepShape(
        model=model,
        sequence_length=128,
        micro_batch_size=1,
        precision="bfloat16",
        optimizer="adamw",
        attention="varlen",
        checkpointing="full",
        compiled=False,
        score_chunk=128,
        context_bytes=0.0,
        on_gpu=True,
        stream="layers",
    )
    size = streamed_by_layer(step)[0]
    gbs = size / copy / 1e9
    link = HostLink(
        to_device_gbs=gbs,
        from_device_gbs=gbs,
        both_gbs=gbs,
        pageable_gbs=gbs,
        disk_gbs=gbs,
        host_gbs=1.0,
        host_cores=1,
        host_compiles=True,
        reason="measured",
        spread=1.0,
    )
    times = LayerSeconds(forward=[forward] * num_layers, backward=[backward] * num_layers, head=0.0)
    queues = NotedQueues()
    queue_passes(queues, step, times, 3, link)
    return queues.tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--into", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    layers = Layers.of(arguments.layers, TOKENS)
    layers.copy(0)
    for name, share in FORWARDS.items():
        copy = seconds_of(lambda: layers.copy(0))
        product = seconds_of(lambda: layers.compute(20)) / 20
        products = max(1, round(share * copy / product))
        forward = products * product
        tasks = planned_tasks(arguments.layers, forward, 2 * forward, copy)
        work: list[Callable[[], object]] = []
        for number, task in enumerate(tasks):
            if task.queue == "to device":
                work.append(partial(layers.copy, number))
            else:
                work.append(partial(layers.compute, round(task.seconds / product)))
        in_order, alone, serial = [], [], []
        for _ in range(arguments.rounds):
            measured, seconds = run(tasks, work)
            as_run = [replace(task, seconds=s) for task, s in zip(tasks, seconds, strict=True)]
            in_order.append(planned_seconds(as_run) / measured - 1)
            alone.append(planned_seconds(tasks) / measured - 1)
            serial.append(sum(seconds) / measured - 1)
        row = {
            "case": name,
            "copy_milliseconds": round(1e3 * copy, 3),
            "forward_milliseconds": round(1e3 * forward, 3),
            "tasks": len(tasks),
            "error_with_seconds_of_the_run": round(statistics.median(in_order), 4),
            "error_with_seconds_alone": round(statistics.median(alone), 4),
            "error_of_one_queue": round(statistics.median(serial), 4),
        }
        rows.append(row)
        print(
            f"{name}: {row['error_with_seconds_of_the_run']:+.1%} with the seconds that tasks took,"
            f" {row['error_with_seconds_alone']:+.1%} with those alone;"
            f" one task after the other would be {row['error_of_one_queue']:+.1%}",
            flush=True,
        )
    if arguments.into is not None:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = {
            "cpu": next(line for line in lines if "model name" in line).partition(":")[2].strip(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "rounds": arguments.rounds,
        }
        arguments.into.write_text(json.dumps({"machine": facts, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
