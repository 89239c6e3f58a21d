"""Parts `kernels` and `attention`: attention backends and Triton's kernels, first compared, then timed."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from bloomery.bench.gpu_check.child import PartJob, rows_of
from bloomery.bench.gpu_check.probing import probe_rows
from bloomery.bench.gpu_check.results import Row
from bloomery.bench.gpu_check.small_runs import SmallRuns, machine_of
from bloomery.check.attention import ROUNDINGS_OF_ATTENTION
from bloomery.check.attention_probes import attention_probe_specs
from bloomery.check.rounding import TF32, bound_in, device_roundoff, tile_error
from bloomery.core.device import can, synchronize
from bloomery.facts.attention import BACKENDS, missing_feature
from bloomery.hardware.profile import build_profile
from bloomery.infer.decoding_kernel import decoding_problem
from bloomery.model.attention.attend import attend, layout_of
from bloomery.model.attention.tile_times import ROUNDS, Clock, Workload, launches, seconds_on_gpu
from bloomery.model.attention.tiles import KERNELS, TileShape, tile_candidates, use_tile
from bloomery.model.attention.triton_attention import KernelLaunch, arch_of
from bloomery.train.process import out_of_memory
from bloomery.train.state import build_state

LENGTHS = (2048, 8192, 512, 4096, 1024)  # what matters most comes first: time may run out
TINY_LENGTHS = (64, 48)
TOKENS = 8192  # of a call
TINY_TOKENS = 96
NUM_HEADS = 8
NUM_KV_HEADS = 4
HEAD_DIM = 64
DOCUMENTS = 6  # of a row
REPEATS = 3
TINY_BACKENDS = ("backend-sdpa", "backend-math", "backend-blockwise")


def right_kernels(job: PartJob) -> Iterator[Row]:
    """A row for each backend in a process of its own, against float64; then Triton's kernel for decoding."""
    specs = attention_probe_specs(machine_of(job.device))
    yield from probe_rows(job, TINY_BACKENDS if job.tiny else ("backend",), specs)
    yield from rows_of(job, [("decoding with triton", partial(_decoding_row, job))])


def _decoding_row(job: PartJob) -> Row:
    case = "decoding with triton"
    if not can(job.device, "triton") or find_spec("triton") is None:
        return Row(case=case, outcome="skipped", message="triton is not installed, or not for this")
    runs = SmallRuns(job.folder, job.device)
    plan = runs.on_device(runs.plan("texts"))
    decoder = build_state(plan).model.eval()
    with torch.inference_mode():
        problem = decoding_problem(decoder)
    return Row(case=case, outcome="wrong" if problem else "ok", message=problem or "")


def timed_kernels(job: PartJob) -> Iterator[Row]:
    """Tiles of Triton's kernels, then each backend in turns: those tiles that were fastest are used."""
    profile = build_profile(machine_of(job.device))
    dtype = getattr(torch, profile.dtype.value)
    names = list(BACKENDS)
    if find_spec("triton") is None:
        names = [name for name in names if name not in ("triton", "flex")]
    else:
        tile_rows = list(timed_tiles(dtype, job.device)) if can(job.device, "triton") else []
        yield from tile_rows
        use_fastest(tile_rows, arch_of(torch.device(job.device)))
    cases = []
    for length in TINY_LENGTHS if job.tiny else LENGTHS:
        for packed in (True, False):
            num_rows = max(1, (TINY_TOKENS if job.tiny else TOKENS) // length)
            kind = "packed" if packed else "one document"
            name = f"{length} tokens, {kind}"
            timed = partial(
                _timed_row, name, names, length, num_rows, dtype, job.device, packed=packed
            )
            cases.append((name, timed))
    yield from rows_of(job, cases)


def packed_rows(num_rows: int, length: int) -> Tensor:
    """Document numbers [B, T]: six documents a row, cut at random."""
    generator = torch.Generator().manual_seed(0)
    documents = torch.zeros(num_rows, length, dtype=torch.int64)
    for row in documents:
        for cut in torch.randperm(length - 1, generator=generator)[: DOCUMENTS - 1] + 1:
            row[cut:] += 1
    return documents


def _timed_row(
    case: str,
    names: list[str],
    length: int,
    num_rows: int,
    dtype: torch.dtype,
    device: str,
    *,
    packed: bool,
) -> Row:
    """Milliseconds of each backend, forward alone and with backward, the median of turns."""
    torch.manual_seed(0)
    documents = packed_rows(num_rows, length).to(device) if packed else None

    def projection(num_heads: int) -> Tensor:
        return torch.randn(num_rows, length, num_heads, HEAD_DIM).to(device, dtype).transpose(1, 2)

    q, k, v = (
        projection(num_heads).requires_grad_()
        for num_heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    upstream = projection(NUM_HEADS)

    def forward(name: str) -> Tensor:
        layout = layout_of(documents, backend=name)
        return attend(
            q,
            k,
            v,
            layout,
            backend=name,
            window=None,
            softcap=None,
            scale=HEAD_DIM**-0.5,
            dropout=0.0,
        )

    def both(name: str) -> tuple[Tensor, ...]:
        out = forward(name)
        return (out, *torch.autograd.grad(out, (q, k, v), upstream))

    # The first call compiles; the second must have its bits, and those of other backends nearly.
    problems: dict[str, str] = {}
    results: dict[str, tuple[Tensor, ...]] = {}
    same_bits: dict[str, bool] = {}
    for name in able_backends(device, packed=packed, dtype=dtype):
        if name not in names:
            continue
        try:
            results[name] = both(name)
            same_bits[name] = all(map(torch.equal, results[name], both(name)))
        except Exception as error:  # a refusal of a compiler is a result: the others go on
            if isinstance(error, torch.AcceleratorError) and not out_of_memory(error):
                raise
            problems[name] = f"{type(error).__name__}: {str(error)[:200]}"

    alone = differing_backends(results, _bound(dtype, device, length))
    results.clear()

    forward_seconds: dict[str, list[float]] = {name: [] for name in same_bits}
    both_seconds: dict[str, list[float]] = {name: [] for name in same_bits}
    for _ in range(REPEATS):
        for name in same_bits:
            with torch.no_grad():
                forward_seconds[name].append(_seconds(partial(forward, name), device))
            both_seconds[name].append(_seconds(partial(both, name), device))
    milliseconds = {
        name: round(statistics.median(seconds) * 1e3, 4) for name, seconds in both_seconds.items()
    }
    ordered = dict(sorted(milliseconds.items(), key=lambda item: item[1]))
    unequal = [name for name, is_equal in same_bits.items() if not is_equal]
    message = "; ".join(
        [
            *(f"{name} {value:.2f} ms" for name, value in ordered.items()),
            *(f"{name} computes what no other backend does" for name in alone),
            *(f"{name} failed" for name in problems),
            *([f"bits differ on repeat: {', '.join(unequal)}"] if unequal else []),
        ]
    )
    return Row(
        case=case,
        outcome="wrong" if alone else "failed" if problems else "ok",
        message=message,
        numbers={
            "forward_and_backward_ms": ordered,
            "forward_ms": {
                name: round(statistics.median(seconds) * 1e3, 4)
                for name, seconds in forward_seconds.items()
            },
            "same_bits": same_bits,
            "problems": problems,
        },
    )


def differing_backends(results: Mapping[str, Sequence[Tensor]], bound: float) -> list[str]:
    """The backends whose output and gradients are those of no other one. Of two that differ, both."""

    def agree(name: str, other: str) -> bool:
        pairs = zip(results[name], results[other], strict=True)
        return all(tile_error(tensor, expected) <= bound for tensor, expected in pairs)

    return [
        name
        for name in results
        if len(results) > 1 and not any(agree(name, other) for other in results if other != name)
    ]


def _bound(dtype: torch.dtype, device: str, length: int) -> float:
    """By how much two right backends may differ: each of them from the exact numbers by its rounding."""
    place = torch.device(device)
    roundoff = device_roundoff(dtype, place, arch=arch_of(place), in_attention=True)
    roundings = ROUNDINGS_OF_ATTENTION
    return 2 * bound_in(dtype, max(roundoff, TF32), roundings=roundings, terms=length)


def able_backends(
    device: str, *, packed: bool, dtype: torch.dtype, dropout: bool = False
) -> list[str]:
    """The backends that compute this on the device. Without documents `mask` is `sdpa`."""
    names = [
        name
        for name in BACKENDS
        if missing_feature(
            name,
            device_type=torch.device(device).type,
            packed=packed,
            window=False,
            softcap=False,
            dropout=dropout,
            float32=dtype == torch.float32,
            torch=torch.__version__,
        )
        is None
    ]
    return names if packed else [name for name in names if name != "mask"]


def _seconds(work: Callable[[], object], device: str) -> float:
    synchronize(device)
    begin_seconds = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin_seconds


def timed_tiles(dtype: torch.dtype, device: str, clock: Clock = seconds_on_gpu) -> Iterator[Row]:
    """A row for each candidate of Triton's kernels on this GPU, at head dims of 64 and 128."""
    place = torch.device(device)
    for head_dim in (64, 128):
        workload = Workload(
            NUM_HEADS, NUM_HEADS // NUM_KV_HEADS, head_dim, 2048, dtype, packed=True
        )
        for launch in launches(workload, place):
            for tile in tile_candidates(launch.kernel, arch=arch_of(place), width=head_dim):
                yield _tile_row(launch, tile, clock)


def _tile_row(launch: KernelLaunch, tile: TileShape, clock: Clock) -> Row:
    """A tile that needs more than the GPU has, or that the compiler refuses, is left out by a run, too."""
    case = f"{launch.kernel} {launch.width} {' x '.join(map(str, tile))}"
    numbers: dict[str, Any] = {
        "kernel": launch.kernel,
        "head_dim": launch.width,
        "tile": list(tile),
    }
    try:
        clock(launch, tile)
        seconds = [clock(launch, tile) for _ in range(ROUNDS)]
    except Exception as error:
        if isinstance(error, torch.AcceleratorError):
            raise
        message = f"{type(error).__name__}: {str(error)[:200]}"
        return Row(case=case, outcome="skipped", message=message, numbers=numbers)
    return Row(case=case, numbers=numbers | {"ms": statistics.median(seconds) * 1e3})


def use_fastest(rows: list[Row], arch: str) -> None:
    """The tiles that a run would compute with, from the rows of `timed_tiles`."""
    for kernel in KERNELS:
        timed_rows = [
            row.numbers
            for row in rows
            if row.numbers["kernel"] == kernel
            and row.numbers["head_dim"] == HEAD_DIM
            and "ms" in row.numbers
        ]
        fastest = min(timed_rows, key=lambda numbers: float(numbers["ms"]), default=None)
        if fastest is not None:
            use_tile(kernel, TileShape(*fastest["tile"]), arch=arch, width=HEAD_DIM)
