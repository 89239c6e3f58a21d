"""The facts about each optimizer: the parameters it takes, its rates, its states, its settings. No torch.

`train/optim/NAME.py` has the code of each: its builder, and the exact formula that a device is checked with.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bloomery.facts.counting import Shape, is_layer_matrix
from bloomery.facts.limits import CPU_PIECE, GPU_PIECE, MUON_STACK
from bloomery.facts.rates import Rates
from bloomery.facts.table import OpenTable


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
    """Whether one of these settings has an effect. Then AdamW is Bloomery's own, since torch's has none of them."""
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
    """A second learning rate, of the parameters that an optimizer does not leave to AdamW."""

    # Of the recipe's `optimizer`, and a field of `OptimizerPlan`: the plan and the check of a device set it by name.
    key: str

    # The usual ones of random weights; those of a pretrained model take `learning_rate`.
    of_new_model: Rates


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """An optimizer in recipes and plans. Compulsory are `name`, `state_values` and `update_bytes`."""

    # How people write it: in plans, reasons and refusals.
    name: str

    # (name, shape) of a parameter -> whether it updates it. AdamW updates those that it leaves.
    takes: Callable[[str, Shape], bool] = lambda _name, _shape: True

    # Its usual learning rates, relative to AdamW's: those of the method are multiplied by it.
    rate_factor: float = 1.0

    # The rate of the parameters that it takes, where they have one of their own.
    own_rate: OwnRate | None = None

    # A rate whose update is about as large as weights of 0.02: with it the check of a device compares updates.
    loud_rate: float = 0.01

    # The keys of `PLAIN_SETTINGS` that it has.
    settings: Collection[str] = ()

    # Key of `PLAIN_SETTINGS` -> why it has no effect, which is a warning. A key in neither of the two is refused.
    ineffective_settings: Mapping[str, str] = field(default_factory=dict)

    # (name, shape) of a parameter -> how many values its state has, those that AdamW keeps for what it leaves included.
    state_values: Callable[[str, Shape], int]

    # The update -> temporary bytes on the device while it runs.
    update_bytes: Callable[[Update], float]

    # Shapes of the trainable matrices inside layers -> FLOPs of an update, where they count beside a step's.
    update_flops: Callable[[tuple[Shape, ...]], float] = lambda _layer_matrices: 0.0

    # Torch's own is never used.
    always_native: bool = False

    # Its states are float32, whatever the weights and `state_dtype` are.
    float32_states: bool = False

    # It clips its updates, whatever the norm of the gradient: a fused backward then clips no gradient.
    clips_updates: bool = False

    # Optimizers with fewer states, to suggest where memory is short, each with fewer than the one before: a plan
    # suggests them in this order, a run that is out of memory the last.
    smaller: tuple[str, ...] = ()

    # It is suggested where a device computes another one wrong.
    replaces_others: bool = False

    # Why it does not train over shards; "": it does.
    over_shards: str = ""

    # Key of `PLAIN_SETTINGS` -> why it does not work over shards.
    settings_over_shards: Mapping[str, str] = field(default_factory=dict)

    # The module with its code, of an installed package; "": that of its name in `train/optim/`.
    # `train/optim/registry.py` says which functions it has.
    module: str = ""


def updating_kind(kind: str, name: str, shape: Shape) -> str:
    """The kind of optimizer that updates a parameter: AdamW for what this one leaves."""
    return kind if OPTIMIZERS[kind].takes(name, shape) else USUAL_OPTIMIZER


def _adamw_update_bytes(update: Update) -> float:
    """None in torch's fused AdamW; else five pieces (four where moments are float32), half a piece more for stochastic
    rounding on a CPU, and the moments that are on their way (measured: tests/train/test_optimizer_scratch_memory.py).
    """
    settings = update.settings
    if not saves_memory(settings):
        return update.piece_bytes(0.0)
    is_half = settings.state_dtype == "bfloat16" or update.weight_bytes == 2
    moment_bytes = 1 if settings.state_dtype == "int8" else 2 if is_half else 4
    pieces = 5.0 if moment_bytes < 4 else 4.0  # float32 moments are updated where they are
    # A GPU adds random bits without a wider copy of them.
    rounds = settings.stochastic_rounding or settings.state_dtype == "bfloat16"
    if rounds and not update.on_gpu:
        pieces += 0.5
    if settings.offload and update.on_gpu:
        # Both moments of three pieces: one arrives, two leave. The pieces of other parameters leave too.
        others = max(0, -(-update.values_at_once // GPU_PIECE) - 1)
        moving = 6 if settings.fused_backward else min(6, 2 * others)
        pieces += moving * moment_bytes / 4
    return update.piece_bytes(pieces)


def _muon_update_bytes(update: Update) -> float:
    """Matrices of one shape or its transpose are stacked, up to a bounded size. An iteration holds two stacks and their
    Gram matrices, in bfloat16, or in float32 as on CPUs without bfloat16; then results are made the weights' dtype.
    """
    value_bytes = 2 if update.on_gpu else 4
    widened_bytes = update.weight_bytes if update.weight_bytes != value_bytes else 0
    counts = Counter(tuple(sorted(shape)) for shape in update.layer_matrices)
    most_bytes = 0
    for shape, count in counts.items():
        num_matrices = min(count, max(1, MUON_STACK // math.prod(shape)))
        stack_values = num_matrices * math.prod(shape)
        gram_values = num_matrices * min(shape) ** 2
        iteration_bytes = value_bytes * (2 * stack_values + gram_values)
        most_bytes = max(most_bytes, iteration_bytes, (value_bytes + widened_bytes) * stack_values)
    return float(most_bytes)


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
    # Three pieces. Compiled code draws the bits of stochastic rounding one by one; PyTorch, where there is no compiler,
    # half a piece of them.
    return update.piece_bytes(3.0)


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
            # Of each matrix its rows and columns.
            state_values=lambda _, shape: math.prod(shape[:-2]) * sum(shape[-2:]),
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
