"""Ranks of one machine for tests: processes forked by `preloaded`, which has torch imported; a pool per world size."""

import contextlib
import dataclasses
import faulthandler
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import preloaded
from bloomery.plan.pipeline import even_groups
from device_for_tests import DEVICE, SIMULATED

SECONDS = 180.0  # for one case, on a crowded machine
COMPILING_SECONDS = 900.0  # more, where every rank compiles before its first step


class Ranks:
    """Runs a function of this test folder on every rank at once; a case is the function and plain arguments."""

    def __init__(self, world: int, variables: Sequence[Mapping[str, str]] = ()) -> None:
        """`variables`: of the environment, by rank, besides those of this process."""
        self.world, self._members = world, []
        paths = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH", "")]))
        for rank in range(world):
            ours, theirs = multiprocessing.Pipe()
            with theirs:
                process = preloaded.Popen(
                    [sys.executable, "-P", "-m", "ranks", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={
                        **os.environ,
                        "PYTHONPATH": paths,
                        **(variables[rank] if variables else {}),
                    },
                )
            self._members.append((process, ours))

    def call(self, function, *arguments, seconds: float = SECONDS) -> list[Any]:
        """The results by rank. Raises AssertionError with the tracebacks of those that failed, or never answered."""
        answers: list[tuple[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            try:
                for rank, (_, pipe) in enumerate(self._members):
                    pipe.send((function, arguments, rank, self.world, folder, seconds))
                end = time.monotonic() + seconds
                for rank, (_, pipe) in enumerate(self._members):
                    silent = ("silent", Path(folder) / f"stack-{rank}")
                    answers.append(
                        pipe.recv() if pipe.poll(max(0.0, end - time.monotonic())) else silent
                    )
            finally:  # a pool whose members may be in different cases is of no more use
                if any(kind != "done" for kind, _ in answers) or len(answers) < self.world:
                    self.close()
            failed = [
                f"rank {rank}: {text if kind == 'failed' else 'silent at ' + text.read_text()}"
                for rank, (kind, text) in enumerate(answers)
                if kind != "done"
            ]
        assert not failed, "\n".join(failed)
        return [result for _, result in answers]

    def close(self) -> None:
        for process, pipe in self._members:
            process.kill()
            process.wait()
            pipe.close()

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process, _ in self._members)


_pools: dict[int, Ranks] = {}


def ranks(world: int) -> Ranks:
    """The pool of this test process; a new one after a failure. Skips a test that needs more devices than there are."""
    # The ranks themselves, which import this file, need neither.
    import pytest

    from bloomery.core.device import num_devices

    if SIMULATED and world > (number := num_devices(DEVICE)):
        pytest.skip(f"{world} ranks: the simulated GPU is there {number} times")
    if world not in _pools or not _pools[world].alive:
        _pools[world] = Ranks(world)
    return _pools[world]


def forget_groups() -> None:
    """Ends the threads of gloo's groups, which wake a hundred times a second for as long as a mesh is remembered.

    DTensor's caches remember every mesh, and with it its groups; a pool would have a hundred such threads in the end.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    gc.collect()


def forget_teacher() -> None:
    """Ranks of a run load one together: in the next case some alone might have it."""
    if "bloomery.train.objectives.teacher" in sys.modules:
        from bloomery.train.objectives import teacher

        teacher._load.cache_clear()


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, rank, world, folder, seconds = pipe.recv()
        except EOFError:
            return
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "GLOO_SOCKET_IFNAME": "lo",
            "BLOOMERY_RENDEZVOUS": f"{folder}/meeting",
        }
        with Path(folder, f"stack-{rank}").open("w") as stack:
            faulthandler.dump_traceback_later(seconds - 10, file=stack)
            try:
                answer = ("done", function(*arguments))
            except BaseException:  # SystemExit too: the case is told, and the pool ends
                answer = ("failed", traceback.format_exc())
            with contextlib.suppress(Exception):
                if dist.is_initialized():
                    dist.destroy_process_group()
            forget_teacher()
            forget_groups()
            faulthandler.cancel_dump_traceback_later()
        # Only now: the answer ends the folder, and a store whose folder goes while it closes waits for 30 minutes.
        pipe.send(answer)
        if answer[0] == "failed":
            return


def on_ranks(
    plan,
    *,
    replicate: int = 1,
    shard: int = 1,
    pipeline: int = 1,
    context: int = 1,
    expert: int = 1,
    schedule: str = "1f1b",
    chunks: int = 1,
):
    """The same training over `pipeline` x `replicate` x `shard` ranks: the same sequences in each step."""
    world = replicate * shard // context
    groups = even_groups(plan.model.config.num_layers, pipeline * chunks) if pipeline > 1 else ()
    sequences = plan.train.accumulation * plan.train.micro_batch_size
    most = -(-sequences // world)  # of one rank
    micro = max(size for size in range(1, plan.train.micro_batch_size + 1) if most % size == 0)
    train = plan.train.model_copy(
        update={
            "replicate": replicate,
            "shard": shard,
            "pipeline": pipeline,
            "context": context,
            "expert": expert,
            "pipeline_schedule": schedule,
            "pipeline_layers": groups,
            "micro_batch_size": micro,
            "accumulation": most // micro,
            "empty_sequences": most * world - sequences,
        }
    )
    return plan.model_copy(update={"train": train})


def seconds_of(plan) -> float:
    """How long a case may take: the first step of a compiled run is as long as its compilation."""
    return SECONDS + (COMPILING_SECONDS if plan.train.compile else 0.0)


def train(
    plan, folder: Path, *, resume_from: Path | None = None, stop_after: int | None = None
) -> list[Any]:
    """Train on the plan's ranks; the events of the first one."""
    world = plan.train.ranks
    folder.mkdir(exist_ok=True)
    if world == 1:
        return train_here(
            plan.model_dump_json(), str(folder), resume_from and str(resume_from), stop_after
        )
    words = (plan.model_dump_json(), str(folder), resume_from and str(resume_from), stop_after)
    return ranks(world).call(train_here, *words, seconds=seconds_of(plan))[0]


def train_here(
    plan_json: str, folder: str, resume_from: str | None, stop_after: int | None
) -> list[Any]:
    """One rank of a run; its events."""
    import torch

    from bloomery.monitor.events import StepDone
    from bloomery.parallel.process_group import join
    from bloomery.plan.types import RunPlan
    from bloomery.train.loop import run

    torch.set_num_threads(1)
    plan, events = RunPlan.model_validate_json(plan_json), []
    mesh = join(plan.train)
    steps = 0

    def emit(event: Any) -> None:
        nonlocal steps
        steps = event.step if isinstance(event, StepDone) else steps
        events.append(event)

    def stop() -> bool:
        return mesh.any_rank(stop_after is not None and steps >= stop_after)

    resume = None if resume_from is None else Path(resume_from)
    run(plan, run_dir=Path(folder), emit=emit, stop=stop, resume_from=resume, mesh=mesh)
    return events


def losses(events: list[Any]) -> dict[int, float]:
    """By step."""
    return {event.step: event.loss for event in events if type(event).__name__ == "StepDone"}


def fields(events: list[Any], kind: str) -> list[dict[str, Any]]:
    return [dataclasses.asdict(event) for event in events if type(event).__name__ == kind]


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
