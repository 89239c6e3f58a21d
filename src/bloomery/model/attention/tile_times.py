"""The fastest of the candidate tiles of Triton's attention kernels on this GPU: timed once, kept in the cache folder.

The compiler's figures order the candidates (`tiles.toml`); only a GPU says which one is fastest on it.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bloomery.core.device import synchronize
from bloomery.core.files import cache_folder, write_json
from bloomery.model.attention.blockwise import (
    Options,
    QueryDocuments,
    like_projection,
    sums_like,
)
from bloomery.model.attention.tiles import KERNELS, TileShape, padded_width, tile_candidates
from bloomery.model.attention.triton_attention import (
    KernelLaunch,
    backward_launches,
    forward_launch,
)

FILE = "attention-tiles.json"
KEPT = 200  # answers: three for each GPU, width and dtype
ROUNDS = 5
# Of all heads together: about ten milliseconds of a GPU with 3 TFLOPS, so that all candidates take a few hundred.
SCORES = 2**26
MAX_LENGTH = 2**13  # a program's loop is no different in longer sequences

Clock = Callable[[KernelLaunch, TileShape], float]
"""The seconds of a kernel with a tile, its work on the GPU included; raises where the GPU cannot run it."""


@dataclass(frozen=True)
class Gpu:
    """What an answer holds for. `arch`: such as gfx1030; `triton`, `torch`: their versions."""

    arch: str
    name: str
    triton: str
    torch: str


@dataclass(frozen=True)
class Workload:
    """The attention of a model's layers in training. `heads`: of all sequences of a micro-batch."""

    heads: int
    heads_per_key: int
    width: int
    length: int
    dtype: torch.dtype
    packed: bool
    softcap: float | None = None
    dropout: float = 0.0


def seconds_on_gpu(launch: KernelLaunch, tile: TileShape) -> float:
    """The clock of a GPU that is here. The first call with a tile compiles, too."""
    synchronize(launch.device)
    begin_seconds = time.perf_counter()
    launch.run(tile)
    synchronize(launch.device)
    return time.perf_counter() - begin_seconds


def fastest_tiles(
    gpu: Gpu,
    workload: Workload,
    device: torch.device,
    clock: Clock = seconds_on_gpu,
    on_failure: Callable[[str], None] = lambda _reason: None,
) -> dict[str, TileShape]:
    """By kernel: the answers of the cache folder where it has them all, else new ones, which it keeps.

    The table's first where timing fails, and where the folder is not writable: each run would time again, and might
    decide differently. `on_failure` then gets the reason.
    """
    candidates = {
        kernel: tile_candidates(kernel, arch=gpu.arch, width=workload.width) for kernel in KERNELS
    }
    keys = {kernel: _key(kernel, gpu, workload) for kernel in KERNELS}
    answers = _answers()
    kept_tiles = {kernel: _tile(answers.get(keys[kernel])) for kernel in KERNELS}
    # A table of another version has other candidates.
    if all(kept_tiles[kernel] in candidates[kernel] for kernel in KERNELS):
        return {kernel: tile for kernel, tile in kept_tiles.items() if tile is not None}

    first = {kernel: candidates[kernel][0] for kernel in KERNELS}
    try:
        tiles = {
            launch.kernel: fastest(launch, candidates[launch.kernel], clock)
            for launch in launches(workload, device)
        }
    except Exception as error:
        # Out of memory, a lost GPU: the check before the first step, or that step, ends with it.
        on_failure(str(error).strip().partition("\n")[0] or type(error).__name__)
        return first
    for kernel, tile in tiles.items():
        answers.pop(keys[kernel], None)
        answers[keys[kernel]] = tile
    if not write_json(cache_folder() / FILE, dict(list(answers.items())[-KEPT:])):
        on_failure(f"their times cannot be kept in {cache_folder()}")
        return first
    return tiles


def fastest(launch: KernelLaunch, candidates: Sequence[TileShape], clock: Clock) -> TileShape:
    """The candidate with the least median of times; the first where none can run, so that the first step says why.

    Rounds alternate: a GPU that gets warm slows all of them.
    """
    working = []
    for tile in candidates if len(candidates) > 1 else ():
        try:
            clock(launch, tile)
        except Exception:
            # More shared memory than the GPU has, or a refusal of the compiler: neither has one class.
            continue
        working.append(tile)
    if len(working) < 2:
        return working[0] if working else candidates[0]
    rounds = [{tile: clock(launch, tile) for tile in working} for _ in range(ROUNDS)]
    return min(working, key=lambda tile: statistics.median(seconds[tile] for seconds in rounds))


def launches(workload: Workload, device: torch.device) -> Iterator[KernelLaunch]:
    """The three kernels on random numbers, of as many heads as `SCORES` allows and one document in a sequence."""
    length = min(workload.length, MAX_LENGTH)
    heads = max(1, min(workload.heads, SCORES // length**2))
    heads_per_key = min(workload.heads_per_key, heads)
    key_heads = heads // heads_per_key
    heads = key_heads * heads_per_key

    def projection(num_heads: int) -> torch.Tensor:
        numbers = torch.randn(1, length, num_heads, workload.width, device=device)
        return numbers.to(workload.dtype).transpose(1, 2)

    q = projection(heads)
    k = projection(key_heads)
    v = projection(key_heads)
    grad = projection(heads)
    out = like_projection(q)
    sums_BHT = sums_like(q)
    gradients = like_projection(q), like_projection(k), like_projection(v)

    # The variants of the run: other options are other code, whose registers differ.
    first_BT = torch.zeros(1, length, dtype=torch.int64, device=device) if workload.packed else None
    documents = QueryDocuments(first_BT, None, torch.tensor(0) if workload.dropout else None)
    options = Options(None, workload.softcap, workload.width**-0.5, workload.dropout)
    yield forward_launch(q, k, v, out, sums_BHT, documents, options)
    yield from backward_launches(grad, q, k, v, out, sums_BHT, gradients, documents, options)


def _key(kernel: str, gpu: Gpu, workload: Workload) -> str:
    dtype = str(workload.dtype).removeprefix("torch.")
    versions = f"triton {gpu.triton}, torch {gpu.torch}"
    width = padded_width(workload.width)
    return f"{gpu.arch}, {gpu.name}, {versions}, {kernel}, width {width}, {dtype}"


def _tile(numbers: Any) -> TileShape | None:
    """None for anything but three numbers."""
    is_tile = isinstance(numbers, list) and [type(number) for number in numbers] == [int] * 3
    return TileShape(*numbers) if is_tile else None


def _answers() -> dict[str, Any]:
    """By key. A damaged file counts as empty."""
    try:
        content = json.loads((cache_folder() / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
