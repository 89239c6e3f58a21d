"""The facts about each optimizer: the parameters it takes, its rates, its states, its settings. No torch.

`train/optim/NAME.py` has the code of each: its builder, and the exact formula that a device is checked with.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bloomery.facts.counting import Shape
from bloomery.facts.limits import CPU_PIECE, GPU_PIECE, MUON_STACK
from bloomery.facts.rates import Rates
from bloomery.facts.table import OpenTable


def is_in_layer(name: str) -> bool:
    """Whether a parameter or module of this name is part of a layer."""
    return ".layers." in name


def is_layer_matrix(name: str, shape: Shape) -> bool:
    """Whether a parameter is a matrix inside a layer: no embedding, head, norm or bias."""
    return len(shape) == 2 and is_in_layer(name)


class MemorySettings(Protocol):
    """The keys of an optimizer that save memory: a recipe, a plan and an estimate have them."""

    @property
    def state_dtype(self) -> str: ...

    @property
    def offload(self) -> bool: ...

    @property
    def stochastic_rounding(self) -> bool: ...

    @property
    def fused_backward(self) -> bool: ...


# The values of those keys without an effect.
PLAIN_SETTINGS: Mapping[str, str | bool] = {
    "state_dtype": "float32",
    "offload": False,
    "fused_backward": False,
    "stochastic_rounding": False,
}


def saves_memory(settings: MemorySettings) -> bool:
    """Whether AdamW is Bloomery's own: torch's has none of the settings that save memory."""
    return any(getattr(settings, key) != value for key, value in PLAIN_SETTINGS.items())


@dataclass(frozen=True, kw_only=True)
class Update:
    """What an optimizer updates.

    `values_at_once`: all trainable values, or with a fused backward those of the largest parameter. `layer_matrices`:
    the shapes of the trainable matrices inside layers.
    """

    settings: MemorySettings
    on_gpu: bool
    weight_bytes: int
    values_at_once: int
    layer_matrices: tuple[Shape, ...]

    def piece_bytes(self, pieces: float) -> float:
        """Bytes of so many float32 pieces of bounded size."""
        return pieces * 4.0 * min(self.values_at_once, GPU_PIECE if self.on_gpu else CPU_PIECE)


@dataclass(frozen=True)
class OwnRate:
    """A second learning rate, of the parameters that an optimizer does not leave to AdamW.

    `key`: of the recipe's optimizer. `of_new_model`: the usual ones of random weights; others take `learning_rate`.
    """

    key: str
    of_new_model: Rates


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """An optimizer in recipes and plans.

    `takes`: whether it updates a parameter, by its name and shape; AdamW updates those that it leaves.
    `rate_factor`: its usual learning rates, relative to AdamW's. `loud_rate`: one whose update is about as large as
    weights of 0.02, for the check of a device. `settings`: the memory settings that it has; `ineffective_settings`:
    those without effect, and why; all others are refused. `state_values`: the values of a parameter's state, by its
    name and shape. `update_bytes`: temporary bytes of the update, `update_flops` its FLOPs where they count.
    `smaller`: the optimizers with fewer states, to suggest where memory is short. `replaces_others`: whether it is
    suggested where a device computes another one wrong. `over_shards`: why it does not train over shards;
    `settings_over_shards`: why one of its settings does not. `module`: with its code; "": that of its name in
    `train/optim/`.
    """

    name: str
    takes: Callable[[str, Shape], bool] = lambda _name, _shape: True
    rate_factor: float = 1.0
    own_rate: OwnRate | None = None
    loud_rate: float = 0.01
    settings: Collection[str] = ()
    ineffective_settings: Mapping[str, str] = field(default_factory=dict)
    state_values: Callable[[str, Shape], int]
    update_bytes: Callable[[Update], float]
    update_flops: Callable[[tuple[Shape, ...]], float] = lambda _layer_matrices: 0.0
    always_native: bool = False  # torch's own is never used
    float32_states: bool = False
    clips_updates: bool = False  # whatever the norm of the gradient
    smaller: tuple[str, ...] = ()
    replaces_others: bool = False
    over_shards: str = ""
    settings_over_shards: Mapping[str, str] = field(default_factory=dict)
    module: str = ""


def updating_kind(kind: str, name: str, shape: Shape) -> str:
    """The kind of optimizer that updates a parameter: AdamW for what this one leaves."""
    return kind if OPTIMIZERS[kind].takes(name, shape) else USUAL_OPTIMIZER


def _adamw_update_bytes(update: Update) -> float:
    """None in torch's fused AdamW; else five pieces, half a piece more for stochastic rounding on a CPU, and four more
    for states in CPU memory (measured: tests/train/test_optimizer_scratch_memory.py).
    """
    settings = update.settings
    if not saves_memory(settings):
        return update.piece_bytes(0.0)
    pieces = 5.0
    # A GPU adds random bits without a wider copy of them.
    rounds = settings.stochastic_rounding or settings.state_dtype == "bfloat16"
    if rounds and not update.on_gpu:
        pieces += 0.5
    if settings.offload and update.on_gpu:
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


# Of Muon's orthogonalization.
NEWTON_SCHULZ_STEPS = 5


def _muon_update_flops(layer_matrices: tuple[Shape, ...]) -> float:
    """In each iteration two products of R x R with R x C, and one of R x R with itself."""
    total_flops = 0.0
    for shape in layer_matrices:
        rows, columns = sorted(shape)
        total_flops += NEWTON_SCHULZ_STEPS * (4.0 * rows**2 * columns + 2.0 * rows**3)
    return total_flops


def _adafactor_update_bytes(update: Update) -> float:
    settings = update.settings
    # Without a fused backward the random bits fit into the three pieces.
    draws_bits = settings.stochastic_rounding and settings.fused_backward and not update.on_gpu
    return update.piece_bytes(3.5 if draws_bits else 3.0)


# The one that a recipe without a choice has; it updates what another one leaves.
USUAL_OPTIMIZER = "adamw"
OPTIMIZERS = OpenTable(
    {
        "adamw": OptimizerSpec(
            name="AdamW",
            settings=("offload", "fused_backward", "stochastic_rounding", "state_dtype"),
            state_values=lambda _, shape: 2 * math.prod(shape),
            update_bytes=_adamw_update_bytes,
            smaller=("muon", "adafactor"),
            replaces_others=True,
        ),
        "muon": OptimizerSpec(
            name="Muon",
            takes=is_layer_matrix,
            # Its updates have the size of AdamW's (arXiv:2502.16982). Matrices of a new model take more.
            own_rate=OwnRate("muon_learning_rate", Rates(2e-3, 5e-2)),
            loud_rate=0.05,
            # One momentum for its matrices, the two moments of AdamW for everything else.
            state_values=lambda name, shape: (
                math.prod(shape) * (1 if is_layer_matrix(name, shape) else 2)
            ),
            update_bytes=_muon_update_bytes,
            update_flops=_muon_update_flops,
            smaller=("adafactor",),
        ),
        "adafactor": OptimizerSpec(
            name="Adafactor",
            rate_factor=25.0,  # its update is relative to the weights (arXiv:1804.04235)
            loud_rate=0.2,
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
            replaces_others=True,
            settings_over_shards={
                "stochastic_rounding": "its random bits follow slices of the rows of one device"
            },
        ),
    }
)
