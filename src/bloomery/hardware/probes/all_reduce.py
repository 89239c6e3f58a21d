"""The all-reduce probe: one process a device, joined by a file. Torch is imported inside functions."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bloomery.core.child import last_words
from bloomery.hardware.probes.checks import Found, best_seconds


def all_reduce(name: str, job: Mapping[str, Any]) -> Found:
    """Every device adds up its numbers: one process each, joined by a file. Two processes on a machine without GPUs."""
    del name
    import torch

    world = 2 if job["device"] == "cpu" else torch.cuda.device_count()
    if world < 2:
        return {"outcome": "absent", "said": f"{world} device is visible to torch"}
    with _ranks(world, job["device"]) as processes:
        answers = [process.communicate()[0].decode(errors="replace").splitlines() for process in processes]
    for process, lines in zip(processes, answers, strict=True):
        if process.returncode != 0:
            return {"outcome": "failed", "said": last_words(lines) or f"a rank ended with {process.returncode}"}
    found: Found = json.loads(answers[0][-1])
    return found


@contextmanager
def _ranks(world: int, where: str) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """They share this process's session, so whoever kills its group kills them."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }  # nothing leaves the machine
        words = [sys.executable, "-m", "bloomery.hardware.probes.all_reduce"]
        ranks = [
            subprocess.Popen(
                [*words, str(rank), str(world), where, f"{folder}/meet"],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
            )
            for rank in range(world)
        ]  # fmt: skip
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def be_rank(rank: int, world: int, where: str, meeting: str) -> None:
    """One rank of `all_reduce`; rank 0 prints what was found."""
    import torch
    from torch import distributed

    device = "cpu" if where == "cpu" else f"cuda:{rank}"
    if where != "cpu":
        torch.cuda.set_device(rank)
    backend = "gloo" if where == "cpu" else "nccl"
    distributed.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world)
    size = 2**22 if where == "cpu" else 2**26
    numbers = torch.full((size // 4,), float(rank + 1), device=device)
    distributed.all_reduce(numbers)
    right = bool((numbers == world * (world + 1) / 2).all())
    seconds = best_seconds(lambda: distributed.all_reduce(numbers), device)
    carried = 2 * (world - 1) / world * size / seconds / 1e9
    facts = {"ranks": str(world), "backend": backend, "gb_per_second": f"{carried:.2f}"}
    said = {} if right else {"said": f"the sum over {world} ranks is not {world * (world + 1) // 2}"}
    if rank == 0:
        print(json.dumps({"outcome": "ok" if right else "wrong", "seconds": seconds, "facts": facts} | said))
    distributed.destroy_process_group()


if __name__ == "__main__":
    be_rank(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5])
