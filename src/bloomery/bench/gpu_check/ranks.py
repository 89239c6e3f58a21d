"""Part `ranks`: two processes on one card, which the vendor's collectives may refuse."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bloomery.bench.gpu_check.agreement import LOSS_TOLERANCE
from bloomery.bench.gpu_check.child import PartJob, rows_of
from bloomery.bench.gpu_check.results import Row
from bloomery.bench.gpu_check.small_runs import SmallRuns
from bloomery.core.child import last_words, python_module
from bloomery.core.device import device_backend, is_accelerator, num_devices, select_device
from bloomery.core.errors import UserError
from bloomery.launch.supervisor import local_rank_variables
from bloomery.monitor.events import StepDone
from bloomery.parallel.environment import RENDEZVOUS
from bloomery.plan.pipeline import even_groups
from bloomery.plan.types import RunPlan

RANKS = 2
SHARE = 0.45  # of the part's limit, for one pair of ranks
ELEMENTS = 2**16
# What NCCL and RCCL say of two ranks on one card, and PyTorch where it was built without them.
REFUSAL = re.compile(
    r"duplicate gpu|invalid usage|built in|not available|no backend", re.IGNORECASE
)


def two_ranks(job: PartJob) -> Iterator[Row]:
    """A row for a collective of the vendor's library, and one for a pipeline of two stages."""
    cases = [
        ("collectives", partial(_collectives_row, job)),
        ("pipeline", partial(_pipeline_row, job)),
    ]
    yield from rows_of(job, cases)


def _collectives_row(job: PartJob) -> Row:
    try:
        backend = device_backend(job.device) if is_accelerator(job.device) else "gloo"
    except UserError as error:
        return Row(case="collectives", outcome="skipped", message=error.problem)
    folder = job.folder / "collectives"
    folder.mkdir()
    is_shared = not is_accelerator(job.device) or num_devices(job.device) < RANKS
    where = "one card" if is_shared else f"{RANKS} cards"
    try:
        answers = _run_ranks(["collectives", job.device, backend], folder, SHARE * job.seconds)
    except subprocess.TimeoutExpired:
        message = f"{backend} on {where}: no answer within {SHARE * job.seconds:.0f} s"
        return Row(case="collectives", outcome="timeout", message=message)
    except RanksFailed as error:
        # A library that refuses two ranks on one card keeps its promise: it is for several cards.
        outcome = "skipped" if is_shared and REFUSAL.search(error.output) else "failed"
        if "built in" in error.output:
            outcome = "skipped"
        return Row.model_validate(
            {
                "case": "collectives",
                "outcome": outcome,
                "message": f"{backend} on {where}: {error.reason}",
            }
        )
    expected = sum(range(1, RANKS + 1))
    sums = [answer["sum"] for answer in answers]
    message = f"{backend} on {where}: an all-reduce gave {sums}, not {expected}"
    if sums != [expected] * RANKS:
        return Row(case="collectives", outcome="wrong", message=message)
    return Row(case="collectives", message=f"{backend} on {where}")


def _pipeline_row(job: PartJob) -> Row:
    """The losses of a pipeline are those of one rank but for the order of sums."""
    case = "pipeline"
    folder = job.folder / "pipeline"
    folder.mkdir()
    runs = SmallRuns(folder, job.device)
    plan = runs.on_device(
        runs.plan("texts", "train.micro_batch_size=8", "train.deterministic=false")
    )
    one_rank = runs.run(plan)
    stages: dict[str, Any] = {
        "pipeline": RANKS,
        "pipeline_layers": even_groups(plan.model.config.num_layers, RANKS),
        "pipeline_link": "host",
    }
    staged = plan.model_copy(update={"train": plan.train.model_copy(update=stages)})
    (folder / "plan.json").write_text(staged.model_dump_json())
    try:
        answers = _run_ranks(["pipeline", str(folder / "plan.json")], folder, SHARE * job.seconds)
    except subprocess.TimeoutExpired:
        message = f"no end within {SHARE * job.seconds:.0f} s"
        return Row(case=case, outcome="timeout", message=message)
    except RanksFailed as error:
        return Row(case=case, outcome="failed", message=error.reason)
    losses = {int(step): loss for step, loss in answers[0]["losses"].items()}
    loss_error = max(
        abs(losses.get(step, float("inf")) - loss) / loss for step, loss in one_rank.losses.items()
    )
    numbers = {"loss_error": loss_error, "seconds_of_transfers": answers[0]["transfer_seconds"]}
    if loss_error <= LOSS_TOLERANCE[plan.train.precision]:
        return Row(case=case, message=answers[0]["link"], numbers=numbers)
    message = f"losses {list(losses.values())}, of one rank {list(one_rank.losses.values())}"
    return Row(case=case, outcome="wrong", message=message)


class RanksFailed(Exception):
    """A rank ended with an error."""

    def __init__(self, reason: str, output: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.output = output


def _run_ranks(arguments: list[str], folder: Path, seconds: float) -> list[dict[str, Any]]:
    """What each rank wrote. Raises RanksFailed, and subprocess.TimeoutExpired; no rank lives on."""
    deadline = time.monotonic() + seconds
    processes = []
    try:
        for rank in range(RANKS):
            answer = folder / f"rank-{rank}.json"
            log = (folder / f"rank-{rank}.log").open("w")
            variables = local_rank_variables(rank, RANKS, str(folder / "meeting"))
            command = python_module(__name__, str(answer), *arguments)
            # In the session of the part: whatever ends that ends a rank that hangs, too.
            process = subprocess.Popen(
                command, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT
            )
            log.close()
            processes.append(process)
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outputs = [(folder / f"rank-{rank}.log").read_text(errors="replace") for rank in range(RANKS)]
    for rank, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        if code:
            reason = last_words(output.splitlines()) or f"exit code {code}"
            raise RanksFailed(f"rank {rank}: {reason}", "\n".join(outputs))
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


# One rank


def reduce_once(device: str, backend: str) -> dict[str, Any]:
    """The sum that an all-reduce gives this rank."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    place = device
    if is_accelerator(device):
        number = rank % num_devices(device)
        select_device(device, number)
        place = f"{device}:{number}"
    meeting = os.environ[RENDEZVOUS]
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    numbers = torch.full((ELEMENTS,), float(rank + 1), device=place)
    dist.all_reduce(numbers)
    low, high = float(numbers.min()), float(numbers.max())
    dist.destroy_process_group()
    return {"sum": low if low == high else [low, high]}


def train_stage(plan_file: Path) -> dict[str, Any]:
    """One stage of the pipeline: the losses, and the seconds of transfers."""
    from bloomery.parallel.links import try_pipeline_links
    from bloomery.parallel.process_group import join
    from bloomery.train.loop import run
    from bloomery.train.process import set_up_process

    plan = RunPlan.model_validate_json(plan_file.read_text())
    mesh = join(plan.train)
    set_up_process(plan.train, memory_limit=plan.memory.limit)
    trial = try_pipeline_links(mesh, plan.train, [f"rank {rank}" for rank in range(RANKS)])
    events: list[Any] = []
    run_dir = plan_file.parent / "pipeline-run"
    run_dir.mkdir(exist_ok=True)
    run(plan, run_dir=run_dir, emit=events.append, stop=lambda: False, mesh=mesh)
    steps = [event for event in events if isinstance(event, StepDone)]
    return {
        "losses": {event.step: event.loss for event in steps},
        "transfer_seconds": sum(event.communication_seconds["pipeline"] for event in steps),
        "link": str(trial),
    }


if __name__ == "__main__":
    answer_file, work, *arguments = sys.argv[1:]
    is_collective = work == "collectives"
    rank_answer = reduce_once(*arguments) if is_collective else train_stage(Path(arguments[0]))
    Path(answer_file).write_text(json.dumps(rank_answer))
