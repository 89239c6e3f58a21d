"""What a plan knows about each optimizer: its settings, its states, the temporary bytes of its update. No torch.

`train/optim/build.py` has the builder of each.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from bloomery.facts.counting import Shape
from bloomery.facts.limits import CPU_PIECE, GPU_PIECE, MUON_STACK
from bloomery.plan.estimate.mode import TrainingMode


@dataclass(frozen=True, kw_only=True)
class Update:
    """What an optimizer updates.

    `values_at_once`: all trainable values, or with a fused backward those of the largest parameter. `layer_matrices`:
    the shapes of the trainable matrices inside layers.
    """

    mode: TrainingMode
    on_gpu: bool
    weight_bytes: int
    values_at_once: int
    layer_matrices: tuple[Shape, ...]

    def piece_bytes(self, pieces: float) -> float:
        """Bytes of so many float32 pieces of bounded size."""
        return pieces * 4.0 * min(self.values_at_once, GPU_PIECE if self.on_gpu else CPU_PIECE)


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """An optimizer in a plan.

    `settings`: the memory settings of `optimizer` that it has; `ineffective_settings`: those without effect, and why;
    all others are refused. `state_values`: the values of a parameter's state, by its name and shape. `update_bytes`:
    temporary bytes of the update.
    """

    name: str
    settings: Collection[str] = ()
    ineffective_settings: Mapping[str, str] = field(default_factory=dict)
    state_values: Callable[[str, Shape], int]
    update_bytes: Callable[[Update], float]
    always_native: bool = False  # torch's own is never used
    float32_states: bool = False
    clips_updates: bool = False  # whatever the norm of the gradient


def _adamw_update_bytes(update: Update) -> float:
    """None in torch's fused AdamW; else five pieces, half a piece more for stochastic rounding on a CPU, and four more
    for states in CPU memory (measured: tests/train/test_optimizer_scratch_memory.py).
    """
    mode = update.mode
    if not mode.saves_optimizer_memory:
        return update.piece_bytes(0.0)
    pieces = 5.0
    # A GPU adds random bits without a wider copy of them.
    if (mode.stochastic_rounding or mode.state_dtype == "bfloat16") and not update.on_gpu:
        pieces += 0.5
    if mode.offload and update.on_gpu:
        pieces += 4
    return update.piece_bytes(pieces)


def _muon_update_bytes(update: Update) -> float:
    """Matrices of one shape or its transpose are stacked, up to a bounded size: the step, its stack, and three bfloat16
    copies for the orthogonalization.
    """
    counts = Counter(tuple(sorted(shape)) for shape in update.layer_matrices)
    stack_values = [
        math.prod(shape) * min(count, max(1, MUON_STACK // math.prod(shape)))
        for shape, count in counts.items()
    ]
    return (2 * update.weight_bytes + 6) * max(stack_values, default=0)


def _adafactor_update_bytes(update: Update) -> float:
    mode = update.mode
    # Without a fused backward the random bits fit into the three pieces.
    draws_bits = mode.stochastic_rounding and mode.fused_backward and not update.on_gpu
    return update.piece_bytes(3.5 if draws_bits else 3.0)


OPTIMIZERS: Mapping[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(
        name="AdamW",
        settings=("offload", "fused_backward", "stochastic_rounding", "state_dtype"),
        state_values=lambda _, shape: 2 * math.prod(shape),
        update_bytes=_adamw_update_bytes,
    ),
    "muon": OptimizerSpec(
        name="Muon",
        # One momentum for matrices inside layers, the two moments of AdamW for everything else.
        state_values=lambda name, shape: (
            math.prod(shape) * (1 if len(shape) == 2 and ".layers." in name else 2)
        ),
        update_bytes=_muon_update_bytes,
    ),
    "adafactor": OptimizerSpec(
        name="Adafactor",
        settings=("fused_backward", "stochastic_rounding"),
        ineffective_settings={
            "offload": "its states are factored and stay on the device",
            "state_dtype": "its factored states are float32",
        },
        state_values=lambda _, shape: sum(shape) if len(shape) == 2 else math.prod(shape),
        update_bytes=_adafactor_update_bytes,
        always_native=True,
        float32_states=True,
        clips_updates=True,
    ),
}
