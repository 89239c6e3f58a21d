"""Seconds of one update of ten million parameters: our lean optimizers beside torch's, in turns, on one thread.

`python benchmarks/optimizer_steps.py [ROUNDS]` prints medians. Nothing else is timed: no forward, no backward.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from bloomery.plan.types import OptimizerPlan
from bloomery.train.optim.build import build_optimizer

WIDTH, INNER, LAYERS, VOCABULARY = 256, 704, 10, 8192
PLAN = OptimizerPlan(
    kind="adamw",
    learning_rate=1e-4,
    muon_learning_rate=1e-4,
    momentum=0.95,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    fused=True,
    schedule="constant",
    min_lr_ratio=0.0,
    warmup_steps=0,
    decay_steps=0,
)
F32, BF16 = torch.float32, torch.bfloat16
ROUNDED = {"stochastic_rounding": True}


def parameters(dtype: torch.dtype) -> nn.ParameterList:
    """A small Llama's, with gradients."""
    layer = [(WIDTH, WIDTH)] * 4 + [(INNER, WIDTH)] * 2 + [(WIDTH, INNER)] + [(WIDTH,)] * 2
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in [(VOCABULARY, WIDTH), *layer * LAYERS]:
        parameter = nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype))
        parameter.grad = (torch.randn(shape, generator=generator) * 1e-3).to(dtype)
        found.append(parameter)
    return nn.ParameterList(found)


def torchs(
    kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, **settings: object
) -> Callable[[], object]:
    return kind(parameters(dtype), lr=1e-4, **settings).step


def ours(dtype: torch.dtype, **settings: object) -> Callable[[], None]:
    optimizer = build_optimizer(parameters(dtype), PLAN.model_copy(update=settings))
    return lambda: optimizer.step(1.0)


def main() -> None:
    torch.set_num_threads(1)
    steps: dict[str, Callable[[], object]] = {
        "torch AdamW, fused, float32": torchs(torch.optim.AdamW, F32, fused=True),
        "torch AdamW, foreach, float32": torchs(torch.optim.AdamW, F32, foreach=True),
        "torch Adafactor, float32": torchs(torch.optim.Adafactor, F32),
        "torch Adafactor, bfloat16": torchs(torch.optim.Adafactor, BF16),
        "adafactor, float32": ours(F32, kind="adafactor"),
        "adafactor, bfloat16": ours(BF16, kind="adafactor"),
        "adafactor, bfloat16, stochastic rounding": ours(BF16, kind="adafactor", **ROUNDED),
        "adamw, states int8, float32": ours(F32, state_dtype="int8"),
        "adamw, states int8, bfloat16, stochastic rounding": ours(
            BF16, state_dtype="int8", **ROUNDED
        ),
        "adamw, states bfloat16, float32": ours(F32, state_dtype="bfloat16"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(int(sys.argv[1]) + 2 if len(sys.argv) > 1 else 22):
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            if turn >= 2:  # the first makes the states
                seconds[name].append(time.perf_counter() - begun)
    count = sum(parameter.numel() for parameter in parameters(F32))
    print(
        f"{count:,} parameters, PyTorch {torch.__version__}, one thread, medians of {len(seconds[name])}"
    )
    for name, took in seconds.items():
        print(f"{name:<52}{statistics.median(took) * 1e3:7.1f} ms")


if __name__ == "__main__":
    main()
