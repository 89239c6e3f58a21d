"""Trainable and frozen parameters, and the bytes of weights, gradients and optimizer states."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

from bloomery.core.errors import UserError
from bloomery.model.adapters.settings import ALL_LINEAR, adaptation, named, targets_of
from bloomery.model.config import ModelConfig
from bloomery.model.counting import Shape, parameter_shapes
from bloomery.model.limits import (
    CPU_PIECE,
    GPU_PIECE,
    INT8_BLOCK,
    INT8_SMALLEST,
    MUON_STACK,
    storage_bytes,
)
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Lora, Peft, Recipe

INT8_STATE = 1.0 + 4 / INT8_BLOCK
RANKS = ("init_r", "r", "rank")  # keys of a rank; init_r is AdaLoRA's first and largest
USUAL_RANKS = {"ADALORA": 12}  # PEFT's AdaLoraConfig.init_r; of the others 8


@dataclass(frozen=True, kw_only=True)
class TrainingMode:
    """The training mode of parameters. The default: all trainable, optimizer states on the device."""

    states: str = "float32"
    away: bool = False  # states are in CPU memory, offloaded
    rounds: bool = False  # stochastic rounding
    fused_backward: bool = False  # a gradient is used and freed immediately
    # target modules and their ranks; none: full fine-tuning
    pairs: tuple[tuple[str, int], ...] = ()
    whole: tuple[str, ...] = ()  # modules_to_save
    dora: bool = False
    pissa: bool = False
    dropout: bool = False
    theirs: bool = False  # PEFT computes the adapter
    adapter_bytes: int = 4  # of a trainable adapter weight
    base: str = "none"
    double: bool = True
    averages: bool = False  # a second copy of the trainable parameters

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
    optimizer = recipe.optimizer
    quantize = recipe.quantize
    mode = TrainingMode(
        states=optimizer.state_dtype,
        away=optimizer.offload,
        rounds=optimizer.stochastic_rounding,
        fused_backward=optimizer.fused_backward,
        base=quantize.kind,
        double=quantize.double_quant,
        averages=recipe.train.ema_decay is not None,
    )
    adapter = (
        counted_as(recipe.adapter, config) if isinstance(recipe.adapter, Peft) else recipe.adapter
    )
    if not isinstance(adapter, Lora):
        return mode
    found = adaptation(config, adapter)
    return replace(
        mode,
        theirs=isinstance(recipe.adapter, Peft),
        pairs=tuple((name, pair.rank) for name, pair in found.pairs.items()),
        whole=found.modules_to_save,
        dora=found.dora,
        pissa=found.pissa,
        dropout=found.dropout > 0,
        adapter_bytes=2 if found.dtype == "bfloat16" else 4,
    )


def counted_as(adapter: Peft, config: ModelConfig) -> Lora:
    """The LoRA with the method's memory and time: of its rank, on its modules."""
    extra: dict[str, Any] = adapter.model_extra or {}
    usual = USUAL_RANKS.get(named(adapter.method), 8)
    rank = next(
        (extra[key] for key in RANKS if isinstance(extra.get(key), int) and extra[key] > 0), usual
    )
    targets = targets_of(adapter, config)
    lora = Lora(
        kind="lora",
        rank=rank,
        target_modules=[targets] if isinstance(targets, str) else list(targets),
    )
    try:
        adaptation(config, lora)
    except UserError:  # a regular expression of PEFT: at most every linear module
        return lora.model_copy(update={"target_modules": [ALL_LINEAR]})
    return lora


def element_of(precision: str) -> int:
    """Bytes of an input or output of matmuls."""
    return 4 if precision == "float32" else 2


def weight_of(precision: str) -> int:
    """Bytes of a trainable weight of the model, and of its gradient."""
    return 2 if precision == "bfloat16-pure" else 4


def is_wide(name: str) -> bool:
    """Whether a frozen parameter is float32 with float16 matmuls, as the residual stream is: train.state."""
    return "norm" in name or ".embed_" in name


def numbers(shapes: Mapping[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def in_layers(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: shape for name, shape in shapes.items() if ".layers." in name}


@dataclass(frozen=True)
class TrainedModel:
    """A model and what training it holds in addition to activations: bytes follow from counts that are made once.

    `stage`: index and number of a pipeline's stages, of which this is one; `config` is then that of the stage.
    """

    config: ModelConfig
    mode: TrainingMode = FULL
    stage: tuple[int, int] | None = None

    @classmethod
    def of(cls, recipe: Recipe | RunPlan, config: ModelConfig) -> "TrainedModel":
        """Raises UserError where an adapter's names match nothing."""
        return cls(config, mode_of(recipe, config))

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Of the model itself. The first stage of a pipeline has the embeddings, the last one the head."""
        shapes = parameter_shapes(self.config)
        if self.stage is None:
            return shapes
        index, stages = self.stage
        ends = {True: index == 0, False: index == stages - 1}
        return {
            name: shape
            for name, shape in shapes.items()
            if ".layers." in name or ends[".embed_" in name]
        }

    @cached_property
    def adapter(self) -> dict[str, Shape]:
        """Trainable parameters that the model itself does not have."""
        found: dict[str, Shape] = {}
        for module, rank in self.mode.pairs:
            if (shape := self.shapes.get(f"{module}.weight")) is None:
                continue  # of a layer on another stage
            found |= {f"{module}.lora_A": (rank, shape[1]), f"{module}.lora_B": (shape[0], rank)}
            if self.mode.dora:
                found[f"{module}.lora_magnitude"] = (shape[0],)
        return found

    @cached_property
    def trained(self) -> dict[str, Shape]:
        """Trainable parameters of the model itself."""
        whole = self.mode.whole
        every = not self.mode.frozen
        return {
            name: shape
            for name, shape in self.shapes.items()
            if every or name.rpartition(".")[0] in whole
        }

    @cached_property
    def frozen(self) -> dict[str, Shape]:
        return {name: shape for name, shape in self.shapes.items() if name not in self.trained}

    @cached_property
    def learning(self) -> dict[str, Shape]:
        return {**self.trained, **self.adapter}

    @cached_property
    def _counts(self) -> list[tuple[int, int, int]]:
        """Of the model itself and of its adapter: trainable numbers, of all, the first layer, the largest parameter."""
        return [
            (
                numbers(shapes),
                numbers({name: shape for name, shape in shapes.items() if ".layers.0." in name}),
                max(map(math.prod, shapes.values()), default=0),
            )
            for shapes in (self.trained, self.adapter)
        ]

    def _bytes(self, which: int, precision: str) -> list[float]:
        """An adapter has its own dtype."""
        sizes = weight_of(precision), self.mode.adapter_bytes
        return [
            float(counts[which] * size) for counts, size in zip(self._counts, sizes, strict=True)
        ]

    @property
    def trained_count(self) -> int:
        return sum(every for every, _, _ in self._counts)

    @property
    def trained_in_layer(self) -> int:
        """Of the first layer."""
        return sum(first for _, first, _ in self._counts)

    @cached_property
    def reading_modules(self) -> frozenset[str]:
        """Modules inside layers, by their last name ("q_proj"), whose unmodified input a gradient of weights reads."""
        found = in_layers(self.trained if self.mode.dropout else self.learning)
        return frozenset(name.split(".")[-2] for name in found)

    @property
    def head_name(self) -> str:
        """The parameter of the output layer."""
        if self.config.head == "values":
            return "score.weight"
        return "model.embed_tokens.weight" if self.config.tie_embeddings else "lm_head.weight"

    @property
    def head_learns(self) -> bool:
        return self.head_name in self.trained

    def learning_bytes(self, precision: str) -> float:
        """Of all trainable parameters, or of their gradients."""
        return sum(self._bytes(0, precision))

    def layer_learning_bytes(self, precision: str) -> float:
        """Of the first layer."""
        return sum(self._bytes(1, precision))

    def largest_bytes(self, precision: str) -> float:
        """Of the largest gradient."""
        return max(self._bytes(2, precision))

    @cached_property
    def _frozen_counts(self) -> tuple[int, int, int]:
        """Bytes of quantized matrices; numbers of frozen embeddings and norms, and of everything else frozen."""
        quantized = 0
        ends = 0
        rest = 0
        for name, shape in self.frozen.items():
            if self.mode.base != "none" and ".layers." in name and len(shape) == 2:
                quantized += storage_bytes(shape, self.mode.base, self.mode.double)
            elif is_wide(name):
                ends += math.prod(shape)
            else:
                rest += math.prod(shape)
        return quantized, ends, rest

    def held_bytes(self, precision: str) -> float:
        """Weights of the model: trainable ones, and frozen ones in the dtype of matmuls or quantized."""
        quantized, ends, rest = self._frozen_counts
        element = element_of(precision)
        frozen = quantized + ends * (4 if precision == "float16" else element) + rest * element
        return self._bytes(0, precision)[0] + frozen

    @cached_property
    def adapter_bytes(self) -> float:
        """PiSSA keeps its initial matrices; DoRA one magnitude per output."""
        magnitudes = numbers(
            {name: shape for name, shape in self.adapter.items() if len(shape) == 1}
        )
        factor = self.mode.adapter_bytes * (2 if self.mode.pissa else 1)
        return float(numbers(self.adapter) * factor + 4 * magnitudes)

    @cached_property
    def _alike(self) -> Counter[tuple[str, Shape, bool]]:
        """How many parameters differ in their layer alone, by name, shape and whether they are an adapter's."""
        return Counter(
            (re.sub(r"\.\d+\.", ".0.", name), shape, name in self.adapter)
            for name, shape in self.learning.items()
        )

    def optimizer_bytes(self, kind: str, precision: str) -> float:
        """Optimizer states, on the device or in CPU memory, with the average of the weights.

        States of bfloat16 weights are bfloat16; those of small parameters are float32 with int8.
        """
        spec = OPTIMIZERS[kind]
        states = self.mode.states
        total = 0.0
        for (name, shape, added), count in self._alike.items():
            size = math.prod(shape)
            each = self.mode.adapter_bytes if added else weight_of(precision)
            half = states == "bfloat16" or (states == "float32" and each == 2)
            one = INT8_STATE if states == "int8" and size >= INT8_SMALLEST else 2 if half else 4
            total += count * spec.state_values(name, shape) * (4 if spec.float32_states else one)
        return total + (self.learning_bytes(precision) if self.mode.averages else 0.0)

    def state_parts(self, kind: str, precision: str) -> dict[str, float]:
        """Bytes that do not depend on the batch. With a fused backward only the largest gradient exists."""
        fused = self.mode.fused_backward
        return {
            "weights": self.held_bytes(precision) + self.adapter_bytes,
            "gradients": self.largest_bytes(precision) if fused else self.learning_bytes(precision),
            "states": self.optimizer_bytes(kind, precision),
        }

    def update_bytes(self, kind: str, precision: str, *, on_gpu: bool) -> float:
        """Temporary bytes of the update: Bloomery's optimizers use float32 pieces of bounded size.

        A fused backward updates one parameter at a time. Muon stacks all matrices of a shape or its transpose, up to a
        bounded size: the step, its stack, and three bfloat16 copies for the orthogonalization.
        """
        spec = OPTIMIZERS[kind]
        mode = self.mode
        if spec.stacks:
            inside = [
                tuple(sorted(shape))
                for shape in in_layers(self.learning).values()
                if len(shape) == 2
            ]
            alike = {
                shape: min(inside.count(shape), max(1, MUON_STACK // math.prod(shape)))
                for shape in set(inside)
            }
            stacked = (math.prod(shape) * count for shape, count in alike.items())
            return (2 * weight_of(precision) + 6) * max(stacked, default=0)
        together = (
            max(largest for _, _, largest in self._counts)
            if mode.fused_backward
            else self.trained_count
        )
        return spec.pieces(mode, on_gpu) * 4.0 * min(together, GPU_PIECE if on_gpu else CPU_PIECE)


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """An optimizer in a plan; its code is in `train.optim.build`.

    `settings`: the memory settings of `optimizer` that it has; `idle`: those without effect, and why; all others are
    refused. `state_values`: of a parameter; `pieces`: of the update on a GPU or not; `own`: never torch's;
    `clips`: its updates, whatever the norm of the gradient.
    """

    name: str
    settings: Collection[str] = ()
    idle: Mapping[str, str] = field(default_factory=dict)
    state_values: Callable[[str, Shape], int]
    pieces: Callable[[TrainingMode, bool], float] = lambda _mode, _on_gpu: 0.0
    stacks: bool = False
    own: bool = False
    float32_states: bool = False
    clips: bool = False


def _adamw_pieces(mode: TrainingMode, on_gpu: bool) -> float:
    """None in a fused AdamW; else five, half a piece more for stochastic rounding on a CPU, and four more for states in
    CPU memory (measured: tests/train/test_lean_scratch.py).
    """
    # a GPU adds random bits without a wider copy
    drawn = (mode.rounds or mode.states == "bfloat16") and not on_gpu
    return 5 + 0.5 * drawn + 4 * (mode.away and on_gpu) if mode.optimizer_memory else 0.0


OPTIMIZERS: Mapping[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(
        name="AdamW",
        settings=("offload", "fused_backward", "stochastic_rounding", "state_dtype"),
        state_values=lambda _, shape: 2 * math.prod(shape),
        pieces=_adamw_pieces,
    ),
    "muon": OptimizerSpec(
        name="Muon",
        state_values=lambda name, shape: (
            math.prod(shape) * (1 if len(shape) == 2 and ".layers." in name else 2)
        ),
        stacks=True,
    ),
    "adafactor": OptimizerSpec(
        name="Adafactor",
        settings=("fused_backward", "stochastic_rounding"),
        idle={
            "offload": "its states are factored and stay on the device",
            "state_dtype": "its factored states are float32",
        },
        state_values=lambda _, shape: sum(shape) if len(shape) == 2 else math.prod(shape),
        # Without a fused backward the random bits fit into the three pieces.
        pieces=lambda mode, on_gpu: 3 + 0.5 * (mode.rounds and mode.fused_backward and not on_gpu),
        own=True,
        float32_states=True,
        clips=True,
    ),
}


def setting_of(
    mode: TrainingMode,
    *,
    extra_forwards: int = 0,
    teacher: ModelConfig | None = None,
    offloading: bool = False,
) -> str:
    """A short hash of the training mode, which a measurement of memory must share; empty: plain full fine-tuning."""
    if (mode, extra_forwards, teacher, offloading) == (FULL, 0, None, False):
        return ""
    return sha256(repr((mode, extra_forwards, teacher, offloading)).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The properties of a step that determine its memory and time."""

    model: TrainedModel
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
    # gradient accumulation: gradients exist from the second micro-batch on
    accumulating: bool = False
    gathered: bool = False  # layers read weights that were gathered in the dtype of matmuls
    offloading: bool = False  # activations are offloaded to CPU memory
    teacher: ModelConfig | None = None  # of distillation
    extra_forwards: int = 0  # of the reference model, by the base without its adapters
    loss_share: float = 1.0  # loss tokens over all tokens: for time; memory assumes all

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def mode(self) -> TrainingMode:
        return self.model.mode

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.micro_batch_size * self.sequence_length

    @property
    def setting(self) -> str:
        mode = self.mode
        teacher = self.teacher
        return setting_of(
            mode, extra_forwards=self.extra_forwards, teacher=teacher, offloading=self.offloading
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
    def in_layer(self) -> int:
        """Bytes of a weight's gradient in a layer before it is accumulated."""
        return self.element if self.gathered else self.weight

    @property
    def stream(self) -> int:
        """Bytes of a value of the residual stream, which has the dtype of the embeddings."""
        embeds = "model.embed_tokens.weight" in self.model.trained
        return self.weight if embeds or self.precision == "float16" else self.element

    @property
    def mixed(self) -> bool:
        """Half-precision matmuls with float32 weights."""
        return self.element < self.weight
