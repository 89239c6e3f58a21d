"""AdamW on a CPU in parameters per second: compiled code, the same update in PyTorch, and torch's fused AdamW.

`OMP_WAIT_POLICY=passive python benchmarks/host_optimizer.py [--rounds 9] [--into FILE.json]`. The sides take turns, the
one that begins changes, and updates are counted by the processor time that they took, of all threads: other programs of
the machine disturb that less than the clock. Weights, gradients and states are larger than a cache. The update alone is
measured: as of a model whose weights live in the host's memory.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from optimizer_steps import PLAN
from torch import nn

from bloomery.train.optim import adamw, common
from bloomery.train.optim.build import build_optimizer

SHAPES = [(4096, 4096)] * 3
F32, BF16 = torch.float32, torch.bfloat16
FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    # `offload` moves nothing on a CPU: it makes float32 states ours.
    "float32 weights, float32 states": (F32, {"offload": True}),
    "float32 weights, int8 states": (F32, {"state_dtype": "int8"}),
    "bfloat16 weights at random, bfloat16 states": (
        BF16,
        {"state_dtype": "bfloat16", "stochastic_rounding": True},
    ),
    "bfloat16 weights at random, int8 states": (
        BF16,
        {"state_dtype": "int8", "stochastic_rounding": True},
    ),
}


def parameters(dtype: torch.dtype) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(0)
    made = nn.ParameterList()
    for shape in SHAPES:
        parameter = nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype))
        parameter.grad = (torch.randn(shape, generator=generator) * 1e-3).to(dtype)
        made.append(parameter)
    return made


def ours(dtype: torch.dtype, settings: dict[str, Any], *, compiled: bool) -> Callable[[], object]:
    optimizer = build_optimizer(parameters(dtype), PLAN.model_copy(update=settings))
    (member,) = optimizer.members
    assert isinstance(member, adamw.ChunkedAdamW)
    member._compiled = compiled

    def step() -> None:
        agrees = common.compiled_rounding_agrees
        common.compiled_rounding_agrees = lambda: compiled
        optimizer.step(1.0)
        common.compiled_rounding_agrees = agrees

    return step


def processor_seconds(
    steps: dict[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        names = list(steps) if turn % 2 else list(reversed(steps))
        for name in names:
            begun = time.process_time()
            steps[name]()
            if turn:  # the first makes the states
                seconds[name].append(time.process_time() - begun)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--into", type=Path)
    arguments = parser.parse_args()
    assert adamw.compiled_code_agrees(), "compiled code is not used on this machine"

    count = sum(rows * width for rows, width in SHAPES)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, (dtype, settings) in FORMATS.items():
            fused = torch.optim.AdamW(parameters(dtype), lr=1e-4, weight_decay=0.1, fused=True)
            seconds = processor_seconds(
                {
                    "torch's fused AdamW, rounded to nearest": fused.step,
                    "compiled": ours(dtype, settings, compiled=True),
                    "in PyTorch": ours(dtype, settings, compiled=False),
                },
                arguments.rounds,
            )
            torchs = seconds["torch's fused AdamW, rounded to nearest"]
            for side, own in seconds.items():
                ratios = [other / mine for other, mine in zip(torchs, own, strict=True)]
                row = {
                    "format": name,
                    "threads": threads,
                    "side": side,
                    "million_parameters_per_processor_second": round(
                        count / statistics.median(own) / 1e6
                    ),
                    "of_torch_fused": round(statistics.median(ratios), 3),
                    "least_and_most": [round(min(ratios), 3), round(max(ratios), 3)],
                }
                results.append(row)
                print(
                    f"{threads} threads, {name}, {side}:"
                    f" {row['million_parameters_per_processor_second']} million a second,"
                    f" {row['of_torch_fused']} of torch's fused",
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
            "parameters": count,
            "rounds": arguments.rounds,
        }
        arguments.into.write_text(
            json.dumps({"machine": facts, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
