"""What ranks tell each other at a step: two small collectives on the host, which carry the requests to a run."""

import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from plans_for_tests import tiny_config, tiny_plan

from bloomery.monitor.events import StepDone
from bloomery.parallel.process_group import join
from bloomery.plan.types import RunPlan
from bloomery.train.loop import run
from bloomery.train.requests import Request, StepRequests
from ranks import on_ranks, ranks

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier")


def counted_run(
    plan_json: str, folder: str
) -> tuple[str, list[int], list[int], list[float], list[float]]:
    """One rank of a run whose last rank is asked to save after step 3 and to stop after step 6.

    Its outcome, its steps, the collectives of host numbers between two of them, and when it took and emitted each.
    """
    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    steps = list[int]()
    count = 0
    counts = list[int]()
    saves = [mesh.rank == mesh.world - 1]
    taken_at = list[float]()
    emitted_at = list[float]()

    def counting(collective):
        def call(*arguments, **options):
            nonlocal count
            tensors = [part for part in arguments if isinstance(part, torch.Tensor)]
            # Tensors of the model and its losses are float32.
            count += not any(tensor.dtype == torch.float32 for tensor in tensors)
            return collective(*arguments, **options)

        return call

    def emit(event) -> None:
        if isinstance(event, StepDone):
            emitted_at.append(time.monotonic())
            steps.append(event.step)
            counts.append(count)

    def asked() -> Request:
        is_last = mesh.rank == mesh.world - 1
        save = bool(saves[0] and len(steps) >= 3)
        saves[0] &= not save  # a request is taken once
        return Request(stop=is_last and len(steps) >= 6, save=save)

    originals = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, collective in originals.items():
        setattr(dist, name, counting(collective))
    try:
        requests = StepRequests(
            asked, mesh.all_reduce_max, lambda _: taken_at.append(time.monotonic())
        )
        outcome = run(
            plan,
            run_dir=Path(folder),
            emit=emit,
            stop=lambda: requests.now().stop,
            requests=requests,
            mesh=mesh,
        )
    finally:
        for name, collective in originals.items():
            setattr(dist, name, collective)
    return (
        outcome,
        steps,
        [after - before for before, after in pairwise(counts)],
        taken_at,
        emitted_at,
    )


def test_a_step_has_two_collectives_of_host_numbers_and_requests_reach_all_ranks(
    prepared, tmp_path
) -> None:
    plan = tiny_plan(
        prepared,
        config=tiny_config(vocab_size=300),
        train={"micro_batch_size": 2, "accumulation": 2, "tokens_per_step": 128, "steps": 20},
        eval={"every_steps": 100},
        checkpoint={"every_steps": 100},
    )
    (tmp_path / "run").mkdir()
    plan_json = on_ranks(plan, replicate=2).model_dump_json()
    ends = ranks(2).call(counted_run, plan_json, str(tmp_path / "run"))
    # Request while step 4 was reported, and seen after it; in the same way the stop.
    for outcome, steps, counts, _, _ in ends:
        assert outcome == "stopped" and steps == list(range(1, 8))
        assert counts[:2] == [2, 2] and counts[-1] == 2, counts
    # Whoever has seen the event of a step may stop the run: no rank then has yet to take its first step.
    (_, _, _, _, reported_at), (_, _, _, taken_at, _) = ends
    assert len(taken_at) == 7
    assert all(taken < reported for taken, reported in zip(taken_at, reported_at, strict=True))
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*"))
    assert saved == ["step-00000004", "step-00000007"]


def test_requests_of_a_step_answer_once_and_a_save_is_not_lost() -> None:
    asked_again = list[tuple[float, ...]]()

    def all_reduce_max(*numbers: float) -> tuple[float, ...]:
        asked_again.append(numbers)
        return numbers

    requests = StepRequests(lambda: Request(pause=True), all_reduce_max)
    requests.note([Request(), Request(stop=True, save=True)])
    assert requests.now() == Request(stop=True, save=True) and not asked_again
    assert requests.now() == Request(pause=True) and len(asked_again) == 1
    assert requests.take_save() and len(asked_again) == 1, "an evaluation may look before the save"
    requests.note([Request(), Request(stop=True)])
    assert not requests.take_save() and len(asked_again) == 1
    requests.forget()
    assert not requests.now().stop and len(asked_again) == 2
