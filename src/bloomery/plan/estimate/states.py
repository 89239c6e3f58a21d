"""Trainable and frozen parameters, and the bytes of weights, gradients and optimizer states."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256

from bloomery.model.config import ModelConfig
from bloomery.model.counting import Shape, parameter_shapes
from bloomery.model.limits import CPU_PIECE, GPU_PIECE, INT8_BLOCK, INT8_SMALLEST, MUON_STACK
from bloomery.model.quantization.sizes import storage_bytes
from bloomery.plan.rules.adapters import adapted, counted_as
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Lora, Peft, Recipe

INT8_STATE = 1.0 + 4 / INT8_BLOCK


@dataclass(frozen=True, kw_only=True)
class TrainingMode:
    """The training mode of parameters. The default: all trainable, optimizer states on the device."""

    states: str = "float32"
    away: bool = False  # states are in CPU memory, offloaded
    rounds: bool = False  # stochastic rounding
    fused_backward: bool = False  # a gradient is used and freed immediately
    pairs: tuple[tuple[str, int], ...] = ()  # target modules and their ranks; none: full fine-tuning
    whole: tuple[str, ...] = ()  # modules_to_save
    dora: bool = False
    pissa: bool = False
    dropout: bool = False
    theirs: bool = False  # PEFT computes the adapter
    adapter_bytes: int = 4  # of a trainable adapter weight
    base: str = "none"
    double: bool = True

    @property
    def optimizer_memory(self) -> bool:
        """Whether AdamW is Bloomery's own."""
        return self.states != "float32" or self.away or self.rounds or self.fused_backward

    @property
    def frozen(self) -> bool:
        """Whether the base weights are frozen."""
        return self.pairs != ()


FULL = TrainingMode()


def mode_of(recipe: Recipe | RunPlan, config: ModelConfig) -> TrainingMode:
    """Raises UserError where an adapter's names match nothing."""
    optimizer, quantize = recipe.optimizer, recipe.quantize
    mode = TrainingMode(
        states=optimizer.state_dtype,
        away=optimizer.offload,
        rounds=optimizer.stochastic_rounding,
        fused_backward=optimizer.fused_backward,
        base=quantize.kind,
        double=quantize.double_quant,
    )
    adapter = counted_as(recipe.adapter, config) if isinstance(recipe.adapter, Peft) else recipe.adapter
    if not isinstance(adapter, Lora):
        return mode
    found = adapted(config, adapter.model_dump_json())
    return replace(
        mode,
        theirs=isinstance(recipe.adapter, Peft),
        pairs=tuple((name, pair.rank) for name, pair in found.pairs.items()),
        whole=found.whole,
        dora=found.dora,
        pissa=found.pissa,
        dropout=found.dropout > 0,
        adapter_bytes=2 if found.dtype == "bfloat16" else 4,
    )


@dataclass(frozen=True)
class Parameters:
    """Shapes by name: of the adapter, and of the model's trainable and frozen parameters."""

    adapter: Mapping[str, Shape]
    trained: Mapping[str, Shape]
    frozen: Mapping[str, Shape]

    @property
    def learning(self) -> Mapping[str, Shape]:
        return {**self.trained, **self.adapter}


@cache
def parameters(config: ModelConfig, mode: TrainingMode) -> Parameters:
    """Every parameter of the model and of the adapter."""
    shapes = parameter_shapes(config)
    if not mode.frozen:
        return Parameters({}, shapes, {})
    adapter: dict[str, Shape] = {}
    for module, rank in mode.pairs:
        if (shape := shapes.get(f"{module}.weight")) is None:
            continue  # of a layer on another stage
        adapter |= {f"{module}.lora_A": (rank, shape[1]), f"{module}.lora_B": (shape[0], rank)}
        if mode.dora:
            adapter[f"{module}.lora_magnitude"] = (shape[0],)
    trained = {name: shape for name, shape in shapes.items() if name.rpartition(".")[0] in mode.whole}
    frozen = {name: shape for name, shape in shapes.items() if name not in trained}
    return Parameters(adapter, trained, frozen)


def numbers(shapes: Mapping[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def in_layers(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: shape for name, shape in shapes.items() if ".layers." in name}


@cache
def trained_count(config: ModelConfig, mode: TrainingMode) -> int:
    return numbers(parameters(config, mode).learning)


@cache
def trained_in_layer(config: ModelConfig, mode: TrainingMode) -> int:
    """Of the first layer."""
    learning = parameters(config, mode).learning
    return sum(math.prod(shape) for name, shape in learning.items() if ".layers.0." in name)


@cache
def reading_modules(config: ModelConfig, mode: TrainingMode) -> frozenset[str]:
    """Modules inside layers, by their last name ("q_proj"), whose unmodified input a gradient of weights reads."""
    found = parameters(config, mode)
    return frozenset(name.split(".")[-2] for name in in_layers(found.trained if mode.dropout else found.learning))


@cache
def learns(config: ModelConfig, mode: TrainingMode, name: str) -> bool:
    """Whether a parameter of the model itself is trained."""
    return name in parameters(config, mode).trained


def head_learns(config: ModelConfig, mode: TrainingMode) -> bool:
    return learns(config, mode, head_name(config))


def head_name(config: ModelConfig) -> str:
    """The parameter of the output layer."""
    if config.head == "values":
        return "score.weight"
    return "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"


def element_of(precision: str) -> int:
    """Bytes of an input or output of matmuls."""
    return 4 if precision == "float32" else 2


def weight_of(precision: str) -> int:
    """Bytes of a trainable weight of the model, and of its gradient."""
    return 2 if precision == "bfloat16-pure" else 4


def each(name: str, mode: TrainingMode, precision: str) -> int:
    """Bytes of a trainable parameter, and of its gradient: an adapter has its own dtype."""
    return mode.adapter_bytes if name.rpartition(".")[2].startswith("lora_") else weight_of(precision)


def gradient_bytes(shapes: Mapping[str, Shape], mode: TrainingMode, precision: str) -> float:
    return float(sum(math.prod(shape) * each(name, mode, precision) for name, shape in shapes.items()))


@cache
def learning_bytes(config: ModelConfig, mode: TrainingMode, precision: str) -> float:
    """Of all trainable parameters, or of their gradients."""
    return gradient_bytes(parameters(config, mode).learning, mode, precision)


@cache
def layer_learning_bytes(config: ModelConfig, mode: TrainingMode, precision: str) -> float:
    """Of the first layer."""
    learning = parameters(config, mode).learning
    return gradient_bytes({n: shape for n, shape in learning.items() if ".layers.0." in n}, mode, precision)


@cache
def held_bytes(config: ModelConfig, mode: TrainingMode, precision: str) -> float:
    """Weights of the model: trainable ones, and frozen ones in the dtype of matmuls or quantized.

    With float16 matmuls, frozen embeddings and norms are float32, as the residual stream is: train.state.
    """
    found = parameters(config, mode)
    total = gradient_bytes(found.trained, mode, precision)
    for name, shape in found.frozen.items():
        matrix = ".layers." in name and len(shape) == 2
        if matrix and mode.base != "none":
            total += storage_bytes(shape, mode.base, mode.double)
        else:
            total += math.prod(shape) * frozen_element(name, precision)
    return total


def frozen_element(name: str, precision: str) -> int:
    """Bytes of a frozen parameter that is not quantized."""
    outside = "norm" in name or ".embed_" in name
    return 4 if precision == "float16" and outside else element_of(precision)


def adapter_bytes(config: ModelConfig, mode: TrainingMode) -> float:
    """PiSSA keeps its initial matrices; DoRA one magnitude per output."""
    found = parameters(config, mode).adapter
    sequences = numbers({name: shape for name, shape in found.items() if len(shape) == 1})
    return float(numbers(found) * mode.adapter_bytes * (2 if mode.pissa else 1) + 4 * sequences)


@cache
def largest(config: ModelConfig, mode: TrainingMode, precision: str) -> float:
    """Bytes of the largest gradient."""
    learning = parameters(config, mode).learning
    return max((math.prod(shape) * each(name, mode, precision) for name, shape in learning.items()), default=0.0)


@cache
def optimizer_bytes(config: ModelConfig, mode: TrainingMode, kind: str, precision: str) -> float:
    """Optimizer states, on the device or in CPU memory."""
    return state_bytes(parameters(config, mode).learning, kind, mode, precision)


def state_bytes(shapes: Mapping[str, Shape], kind: str, mode: TrainingMode, precision: str) -> float:
    """AdamW: two values per parameter; Muon: one for matrices of blocks; Adafactor: rows and columns of matrices.

    States of bfloat16 weights are bfloat16; Adafactor's are float32, and so are those of small parameters with int8.
    """
    total = 0.0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if kind == "adafactor":
            total += 4 * (sum(shape) if len(shape) == 2 else size)
            continue
        half = mode.states == "bfloat16" or (mode.states == "float32" and each(name, mode, precision) == 2)
        one = INT8_STATE if mode.states == "int8" and size >= INT8_SMALLEST else 2 if half else 4
        total += (1 if kind == "muon" and len(shape) == 2 and ".layers." in name else 2) * size * one
    return total


@cache
def update_bytes(config: ModelConfig, mode: TrainingMode, kind: str, precision: str, *, on_gpu: bool) -> float:
    """Temporary bytes of the update: none in a fused AdamW; Bloomery's optimizers use float32 pieces of bounded size.

    Adafactor takes three pieces and AdamW five, half a piece more for stochastic rounding on a CPU, and four more for
    states in CPU memory (measured: tests/train/test_lean_scratch.py). A fused backward updates one parameter at a time.
    """
    shapes = parameters(config, mode).learning
    sizes = [math.prod(shape) for shape in shapes.values()]
    together = max(sizes, default=0) if mode.fused_backward else sum(sizes)
    piece = 4.0 * min(together, GPU_PIECE if on_gpu else CPU_PIECE)
    if kind == "muon":  # the step, its stack, and three bfloat16 copies for the orthogonalization
        inside = [shape for name, shape in shapes.items() if ".layers." in name and len(shape) == 2]
        kinds, own = {tuple(sorted(shape)) for shape in inside}, weight_of(precision)
        return max(((2 * own + 6) * _stacked(shape, inside) for shape in kinds), default=0.0)
    if kind == "adafactor":  # without a fused backward the random bits fit into the three pieces
        return (3 + 0.5 * (mode.rounds and mode.fused_backward and not on_gpu)) * piece
    drawn = (mode.rounds or mode.states == "bfloat16") and not on_gpu  # a GPU adds random bits without a wider copy
    return (5 + 0.5 * drawn + 4 * (mode.away and on_gpu)) * piece if mode.optimizer_memory else 0.0


def _stacked(shape: Shape, inside: Sequence[Shape]) -> int:
    """Values of all matrices of a shape or its transpose, up to the size of one stack."""
    size, alike = math.prod(shape), sum(sorted(other) == sorted(shape) for other in inside)
    return size * min(alike, max(1, MUON_STACK // size))


@cache
def setting_of(
    mode: TrainingMode, *, extra_forwards: int = 0, teacher: ModelConfig | None = None, offloading: bool = False
) -> str:
    """A short hash of the training mode."""
    if (mode, extra_forwards, teacher, offloading) == (FULL, 0, None, False):
        return ""
    return sha256(repr((mode, extra_forwards, teacher, offloading)).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The properties of a step that determine its memory and time."""

    config: ModelConfig
    sequence_length: int
    micro_batch_size: int
    precision: str
    optimizer: str
    attention: str
    checkpointing: str
    compiled: bool
    score_chunk: int
    context_bytes: float  # the runtime's own; 0: not a GPU
    on_gpu: bool
    expandable: bool = False  # the allocator's segments
    accumulating: bool = False  # gradient accumulation: gradients exist from the second micro-batch on
    mode: TrainingMode = FULL
    offloading: bool = False  # activations are offloaded to CPU memory
    teacher: ModelConfig | None = None  # of distillation
    extra_forwards: int = 0  # of the reference model, by the base without its adapters
    loss_share: float = 1.0  # loss tokens over all tokens: for time; memory assumes all

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_size * self.sequence_length

    @property
    def setting(self) -> str:
        """The mode that a measurement of memory must share; empty: plain full fine-tuning."""
        return setting_of(
            self.mode, extra_forwards=self.extra_forwards, teacher=self.teacher, offloading=self.offloading
        )

    @property
    def outputs(self) -> int:
        """Outputs of the head: one of a reward model."""
        return 1 if self.config.head == "values" else self.config.vocab_size

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return element_of(self.precision)

    @property
    def weight(self) -> int:
        """Bytes of a trainable weight of the model, and of its gradient."""
        return weight_of(self.precision)

    @property
    def stream(self) -> int:
        """Bytes of a value of the residual stream, which has the dtype of the embeddings."""
        embeds = learns(self.config, self.mode, "model.embed_tokens.weight")
        return self.weight if embeds or self.precision == "float16" else self.element

    @property
    def mixed(self) -> bool:
        """Half-precision matmuls with float32 weights."""
        return self.element < self.weight
