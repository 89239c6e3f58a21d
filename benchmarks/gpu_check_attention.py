"""The attention part of gpu_check.py: backends that passed their probe in turns, and tiles of Triton's kernels."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attention import packed_rows
from torch import Tensor

from bloomery.facts.attention import BACKENDS, missing_feature
from bloomery.model.attention.attend import attend, layout_of
from bloomery.model.attention.tile_times import ROUNDS, Clock, Workload, launches, seconds_on_gpu
from bloomery.model.attention.tiles import KERNELS, TileShape, tile_candidates, use_tile
from bloomery.model.attention.triton_attention import KernelLaunch, arch_of

Found = dict[str, Any]
LENGTHS = (2048, 8192, 512, 4096, 1024)  # what matters most comes first: time may run out
TINY_LENGTHS = (64, 48)
TOKENS, TINY_TOKENS = 8192, 96  # of a call
HEADS, KEY_HEADS, WIDTH = 8, 4, 64
REPEATS = 3
TIMING_SECONDS = 80.0


def timed_backends(names: list[str], dtype: torch.dtype, device: str, *, tiny: bool) -> list[Found]:
    """A row for each length, packed and not: milliseconds of each backend, forward alone and with backward."""
    began = time.perf_counter()
    rows = []
    for length in TINY_LENGTHS if tiny else LENGTHS:
        for packed in (True, False):
            if time.perf_counter() - began > TIMING_SECONDS:
                rows.append({"length": length, "packed": packed, "skipped": "time limit reached"})
                continue
            sequences = max(1, (TINY_TOKENS if tiny else TOKENS) // length)
            rows.append(
                {"length": length, "packed": packed, "sequences": sequences}
                | _row(names, length, sequences, dtype, device, packed=packed)
            )
    return rows


def _row(
    names: list[str], length: int, sequences: int, dtype: torch.dtype, device: str, *, packed: bool
) -> Found:
    torch.manual_seed(0)
    documents = packed_rows(sequences, length).to(device) if packed else None

    def projection(heads: int) -> Tensor:
        return torch.randn(sequences, length, heads, WIDTH).to(device, dtype).transpose(1, 2)

    q, k, v = (projection(heads).requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    upstream = projection(HEADS)

    def attention(name: str) -> Tensor:
        options = {"window": None, "softcap": None, "scale": WIDTH**-0.5, "dropout": 0.0}
        return attend(q, k, v, layout_of(documents, backend=name), backend=name, **options)

    def both(name: str) -> tuple[Tensor, ...]:
        out = attention(name)
        return (out, *torch.autograd.grad(out, (q, k, v), upstream))

    # The first call compiles; the second must have its bits.
    problems = {}
    same_bits = {}
    for name in names:
        if name not in able(device, packed=packed, dtype=dtype):
            continue
        try:
            first = both(name)
            same_bits[name] = all(map(torch.equal, first, both(name)))
        except (
            Exception
        ) as error:  # out of memory, or a refusal of a compiler: the other backends go on
            problems[name] = f"{type(error).__name__}: {str(error)[:200]}"

    forward: dict[str, list[float]] = {name: [] for name in same_bits}
    whole: dict[str, list[float]] = {name: [] for name in same_bits}
    for _ in range(REPEATS):
        for name in same_bits:
            with torch.no_grad():
                forward[name].append(_seconds(lambda name=name: attention(name), device))
            whole[name].append(_seconds(lambda name=name: both(name), device))
    return {
        "forward_ms": {name: statistics.median(times) * 1e3 for name, times in forward.items()},
        "forward_and_backward_ms": {
            name: statistics.median(times) * 1e3 for name, times in whole.items()
        },
        "to_the_best": ratios(whole),
        "repeats_have_equal_bits": same_bits,
        "problems": problems,
    }


def able(device: str, *, packed: bool, dtype: torch.dtype) -> list[str]:
    """The backends that compute this on the device. Without documents `mask` is `sdpa`."""
    needs = {"device_type": device, "packed": packed, "dropout": False}
    build = {"float32": dtype == torch.float32, "torch": torch.__version__}
    names = [
        name
        for name in BACKENDS
        if missing_feature(name, window=False, softcap=False, **needs, **build) is None
    ]
    return names if packed else [name for name in names if name != "mask"]


def ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """Each backend's median relative to the least one."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {name: round(median / min(medians.values()), 3) for name, median in medians.items()}


def _seconds(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin_seconds = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin_seconds


def timed_tiles(dtype: torch.dtype, device: str, clock: Clock = seconds_on_gpu) -> list[Found]:
    """Every candidate of Triton's kernels on this GPU, at head widths of 64 and 128."""
    place = torch.device(device)
    rows = []
    for width in (64, 128):
        workload = Workload(HEADS, HEADS // KEY_HEADS, width, 2048, dtype, packed=True)
        for launch in launches(workload, place):
            candidates = tile_candidates(launch.kernel, arch=arch_of(place), width=width)
            rows += list(_tile_rows(launch, candidates, clock))
    return rows


def _tile_rows(
    launch: KernelLaunch, candidates: tuple[TileShape, ...], clock: Clock
) -> Iterator[Found]:
    for tile in candidates:
        row: Found = {"kernel": launch.kernel, "width": launch.width, "tile": list(tile)}
        try:
            clock(launch, tile)
            seconds = [clock(launch, tile) for _ in range(ROUNDS)]
        except Exception as error:  # more than the GPU has, or a refusal of the compiler
            yield row | {"problem": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        yield row | {"ms": statistics.median(seconds) * 1e3}


def use_fastest(rows: list[Found], arch: str) -> None:
    """The tiles that a run would compute with, from the times of `timed_tiles`."""
    for kernel in KERNELS:
        timed = [row for row in rows if row["kernel"] == kernel and row["width"] == WIDTH]
        fastest = min(
            (row for row in timed if "ms" in row), key=lambda row: row["ms"], default=None
        )
        if fastest is not None:
            use_tile(kernel, TileShape(*fastest["tile"]), arch=arch, width=WIDTH)
