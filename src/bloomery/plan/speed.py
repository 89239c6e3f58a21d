"""How long a step takes, from the table: floating-point operations over the share of the peak that training reaches."""

from dataclasses import dataclass

from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile
from bloomery.hardware.specs import cpu_efficiency
from bloomery.model.config import ModelConfig
from bloomery.model.counting import flops_per_token, parameter_count
from bloomery.plan.memory import kept_layers
from bloomery.plan.types import Estimate

TOKEN_BYTES = 2  # an id below 65,536 in a shard; 4 above
COMPILED_GAIN = 1.15  # measured on CPUs: 10 to 35%


@dataclass(frozen=True, kw_only=True)
class Rate:
    """FLOP/s that a device reaches in training, and the peak that it is a share of."""

    peak: float
    share: tuple[float, float, float]  # low, typical, high

    def at(self, index: int) -> float:
        return self.peak * self.share[index]


def device_rate(profile: Profile, machine: Machine, *, precision: str, width: int, compiled: bool) -> Rate | None:
    """None when the table does not know the device in this precision."""
    dtype = "bfloat16" if precision.startswith("bfloat16") else precision
    if profile.accelerator is not None:
        return _gpu_rate(profile, dtype)
    per_core = profile.cpu.gflops.get(dtype) if profile.cpu else None
    if per_core is None:
        return None
    low, typical, high = cpu_efficiency(width, dtype)
    gain = COMPILED_GAIN if compiled else 1.0
    return Rate(
        peak=per_core * 1e9 * machine.host.cpu_cores, share=(low, min(0.95, typical * gain), min(1.0, high * gain))
    )


def _gpu_rate(profile: Profile, dtype: str) -> Rate | None:
    if profile.gpu is None or profile.arch is None or profile.arch.efficiency is None:
        return None
    peak = profile.gpu.peak_flops(dtype)
    return None if peak is None else Rate(peak=peak, share=profile.arch.efficiency)


def step_seconds(
    config: ModelConfig, rate: Rate | None, *, sequence_length: int, tokens_per_step: int, checkpointing: str
) -> Estimate | None:
    """Seconds of an optimizer step. Recomputed layers cost a third more; the score head's second matmul is counted."""
    if rate is None:
        return None
    model = flops_per_token(config, sequence_length)
    head = 2.0 * config.vocab_size * config.hidden_size
    layers = model - 3 * head
    recomputed = 1 - kept_layers(checkpointing, config.num_layers) / config.num_layers
    flops = (model + layers / 3 * recomputed) * tokens_per_step
    low, typical, high = (flops / rate.at(index) for index in (2, 1, 0))
    return Estimate(value=typical, low=low, high=high, origin="table")


def energy_kwh(board_watts: float | None, seconds: Estimate | None) -> float | None:
    """At the board's rated power all the time; None when either is unknown."""
    return None if board_watts is None or seconds is None else board_watts * seconds.value / 3.6e6


def disk_bytes(
    config: ModelConfig, *, tokens: int | None, optimizer_bytes: float, keep: int, weight: int
) -> dict[str, float]:
    """Shards of the text, and checkpoints: those kept, the best one and the one being written."""
    each = parameter_count(config) * weight + optimizer_bytes
    wide = 1 if config.vocab_size <= 65536 else 2
    disk = {"checkpoint": each, "checkpoints": each * (keep + 2)}
    return disk if tokens is None else {"shards": float(tokens * TOKEN_BYTES * wide)} | disk
