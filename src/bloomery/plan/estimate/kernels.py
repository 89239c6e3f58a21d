"""Seconds of the Triton attention kernels, by the instructions that a compiler made of them: nobody has timed them."""

from collections.abc import Mapping
from dataclasses import dataclass

from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import head_widths, smallest_window
from bloomery.hardware.profile import Profile
from bloomery.hardware.wheels import torch_with_triton, triton_of
from bloomery.model.attention.tiles import KernelFigures, KernelRun, kernel_figures

# FLOPs of a score per number of its head's width: forward makes two products, the gradients of queries make three, and
# those of keys and values four.
FLOPS_PER_WIDTH = {"forward": 4, "backward_q": 6, "backward_kv": 8}
# Of the longest estimate: waves wait for memory, and for each other, as long as they compute.
WAITING = 2.0


@dataclass(frozen=True, kw_only=True)
class ScoreSeconds:
    """Of one kernel on one GPU: low, typical and high seconds of a score, and the scores of a query beyond the causal
    half, in tiles that the diagonal crosses.
    """

    seconds: tuple[float, float, float]
    extra_scores: float


@dataclass(frozen=True, kw_only=True)
class TiledScores:
    """The scores of a step, and the queries that they belong to, summed over heads and layers."""

    forward: float
    forward_queries: float
    backward: float
    backward_queries: float


def kernel_runs(
    config: ModelConfig, profile: Profile, *, precision: str, length: int
) -> tuple[KernelRun, ...]:
    """The Triton kernels of a run on the profile's GPU, with sequences of `length` tokens: those of each width of its
    heads, the widest first. Empty without a Triton.

    Where that of a GPU that is only planned for cannot compile, the kernels of one that can.
    """
    triton = profile.triton
    arch = profile.arch
    if profile.accelerator is None or arch is None or triton is None:
        return ()
    if profile.triton_compiles.value == "another":
        torch = torch_with_triton(since=arch.triton_from, before=arch.triton_before)
        triton = triton_of(torch) or triton
    window = smallest_window(config)
    return tuple(
        KernelRun(
            triton,
            arch=profile.accelerator.arch,
            width=width,
            precision=precision,
            dropout=config.attention_dropout > 0,
            window=window is not None and window < length,
            softcap=config.attention_softcap is not None,
        )
        for width in head_widths(config)
    )


def score_seconds(profile: Profile, run: KernelRun) -> dict[str, ScoreSeconds] | None:
    """By kernel; None where the GPU's rates or the kernels' instructions are unknown."""
    gpu = profile.gpu
    arch = profile.arch
    figures = kernel_figures(run)
    if gpu is None or arch is None or figures is None:
        return None
    dtype = run.precision.removesuffix("-pure")
    peak = gpu.peak_flops(dtype)
    float32_peak = gpu.peak_flops("float32")
    if peak is None or float32_peak is None:
        return None

    # Slots of vector instructions in a second: a slot of each lane at the boost clock.
    lane_rate = float32_peak / arch.lane_flops
    kernel_rates = {}
    for kernel, of_kernel in figures.items():
        products = 0.0
        if arch.matrix_units:
            products = FLOPS_PER_WIDTH[kernel] * run.width / peak
        kernel_rates[kernel] = _score_seconds(of_kernel, products, lane_rate, arch.lane_registers)
    return kernel_rates


def _score_seconds(
    figures: KernelFigures, products: float, lane_rate: float, lane_registers: int
) -> ScoreSeconds:
    """`products`: seconds of matrix units for a score; 0 where products are vector instructions.

    At best other waves hide all but the vector instructions or the products. Typically as many waves as the registers
    hold share what other units run. At worst nothing is hidden, and memory is waited for.
    """
    waves = max(1, lane_registers // figures.registers)
    vector = figures.vector / lane_rate
    beside = figures.beside / lane_rate
    return ScoreSeconds(
        seconds=(
            max(vector, products),
            vector + products + beside / waves,
            WAITING * (vector + products + beside),
        ),
        extra_scores=max(figures.tile.rows, figures.tile.keys) / 2,
    )


def kernel_seconds(
    scores: TiledScores, rates: Mapping[str, ScoreSeconds]
) -> tuple[float, float, float]:
    """Low, typical and high seconds of all kernels of a step."""

    def of_kernel(kernel: str, bound: int) -> float:
        rate = rates[kernel]
        amount = scores.backward + scores.backward_queries * rate.extra_scores
        if kernel == "forward":
            amount = scores.forward + scores.forward_queries * rate.extra_scores
        return amount * rate.seconds[bound]

    low, typical, high = (sum(of_kernel(kernel, bound) for kernel in rates) for bound in range(3))
    return low, typical, high
