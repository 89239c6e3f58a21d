"""The all-reduce probe: one process a device, joined by a file. Torch is imported inside functions."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from bloomery.core.child import Child
from bloomery.hardware.probes.checks import Found, best_seconds

LONGEST_SECONDS = 600.0  # whoever asked for the probe gives it up earlier


def all_reduce(name: str, job: Mapping[str, Any]) -> Found:
    """Every device adds up its numbers: one process each, joined by a file. Two processes on a machine without GPUs."""
    import torch

    world = 2 if job["device"] == "cpu" else torch.cuda.device_count()
    if world < 2:
        return {"outcome": "absent", "said": f"{world} device is visible to torch"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        told = {"names": ["rank"], "world": world, "device": job["device"], "meeting": f"{folder}/meet"}
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # nothing leaves the host
        module = "bloomery.hardware.probes.worker"
        ranks = [
            stack.enter_context(Child(module, told | {"rank": rank}, environment=environment)) for rank in range(world)
        ]
        answers: list[Found] = []
        for rank in ranks:
            answer = rank.next(LONGEST_SECONDS)
            while isinstance(answer, dict) and answer["outcome"] == "started":
                answer = rank.next(LONGEST_SECONDS)
            if not isinstance(answer, dict):
                return {"outcome": "failed", "said": rank.ending() if answer == "ended" else "a rank never answered"}
            answers.append(answer)
    return next((answer for answer in answers if answer["outcome"] != "ok"), answers[0]) | {"name": name}


def be_rank(name: str, job: Mapping[str, Any]) -> Found:
    """What one rank of `all_reduce` finds; it is the same for all."""
    del name
    import torch
    from torch import distributed

    rank, world = job["rank"], job["world"]
    device = "cpu" if job["device"] == "cpu" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(rank)
    backend, size = ("gloo", 2**22) if device == "cpu" else ("nccl", 2**26)
    distributed.init_process_group(backend, init_method=f"file://{job['meeting']}", rank=rank, world_size=world)
    numbers = torch.full((size // 4,), float(rank + 1), device=device)
    distributed.all_reduce(numbers)
    right = bool((numbers == world * (world + 1) / 2).all())
    seconds = best_seconds(lambda: distributed.all_reduce(numbers), device)
    distributed.destroy_process_group()
    carried = 2 * (world - 1) / world * size / seconds / 1e9
    facts = {"ranks": str(world), "backend": backend, "gb_per_second": f"{carried:.2f}"}
    said = {} if right else {"said": f"the sum over {world} ranks is not {world * (world + 1) // 2}"}
    return {"outcome": "ok" if right else "wrong", "seconds": seconds, "facts": facts} | said
