"""Time and memory of each attention backend on packed rows, relative to a causal call that lets documents mix.

    python benchmarks/attention.py [--lengths 256,1024,4096] [--dtype bfloat16] [--dropout 0.0] [--repeats 5]

Forward and backward of one layer, 8,192 tokens a call; sides alternate, the best of the repeats counts.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from memory_tracker import peak_bytes
from torch import Tensor

from bloomery.bench.gpu_check.kernels import able_backends, packed_rows
from bloomery.model.attention.attend import attend, layout_of

HEADS, WIDTH, TOKENS = 6, 64, 8192
SCALE = WIDTH**-0.5


def sides(
    length: int, dtype: torch.dtype, dropout: float, device: str
) -> dict[str, Callable[[], object]]:
    """One function a backend, each a forward and a backward; the first is the un-isolated causal call."""
    documents = packed_rows(max(1, TOKENS // length), length).to(device)
    shape = len(documents), length, HEADS, WIDTH
    q, k, v = (
        torch.randn(shape, dtype=dtype, device=device).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    upstream = torch.randn(shape, dtype=dtype, device=device).transpose(1, 2)

    def differentiated(forward: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), (q, k, v), upstream)

    def isolated(backend: str) -> Tensor:
        options = {"window": None, "softcap": None, "scale": SCALE, "dropout": dropout}
        return attend(q, k, v, layout_of(documents, backend=backend), backend=backend, **options)

    able = able_backends(device, packed=True, dtype=dtype, dropout=dropout > 0)
    causal = differentiated(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)
    )
    return {"causal": causal} | {
        name: differentiated(lambda name=name: isolated(name)) for name in able
    }


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def peak(run: Callable[[], object], device: str) -> int:
    if device == "cpu":
        return peak_bytes(run)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - held


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="256,1024,4096")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {device}, {threads}, {asked.dtype}, dropout {asked.dropout}")
    print(f"{'T':>6} {'backend':<13} {'ms':>9} {'x time':>7} {'MiB':>9} {'x memory':>9}")
    for length in map(int, asked.lengths.split(",")):
        runs = sides(length, getattr(torch, asked.dtype), asked.dropout, device)
        memory = {name: peak(run, device) for name, run in runs.items()}  # warms up, too
        rounds = [{name: seconds(run) for name, run in runs.items()} for _ in range(asked.repeats)]
        best = {name: min(times[name] for times in rounds) for name in runs}
        for name in runs:
            print(
                f"{length:>6} {name:<13} {best[name] * 1e3:>9.1f} {best[name] / best['causal']:>7.2f} "
                f"{memory[name] / 2**20:>9.1f} {memory[name] / memory['causal']:>9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
