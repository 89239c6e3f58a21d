"""Bytes and FLOPs of a step's pictures on one device: what a tower's layers hold while they run, and what they keep
where they are trained.

D width of the tower, F inner width of its MLPs. Numbers of a layer were counted by the allocator's record of
transformers' modules; `benchmarks/results/picture_memory.txt` has steps.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from bloomery.facts.optimizers import OPTIMIZERS, USUAL_OPTIMIZER
from bloomery.facts.pictures import is_projector
from bloomery.facts.towers import UNREAD, Shape, Tower, is_linear_map
from bloomery.plan.estimate.activations import checkpointing_interval
from bloomery.plan.estimate.moments import StepMoment
from bloomery.plan.estimate.states import TrainedModel, count_values, weight_bytes_of
from bloomery.plan.estimate.step import StepPictures, StepShape
from bloomery.recipe.schema import VisionParts

# Bytes of a pixel in the mask that SmolVLM's processor makes, which the tower copies with the pixels.
PIXEL_MASK = 8
# Bytes of a pair of tokens while a layer makes the mask in which tokens of a picture attend to those after them, in
# float32 and in half precision: comparisons, their union, and the numbers that attention adds.
SEEN_PAIR = (6.5, 9.2)
TRAINED_FORWARDS = 3  # forward, gradients of inputs, gradients of weights
ADAPTED_FORWARDS = 2  # without the last


@dataclass(frozen=True, kw_only=True)
class _LayerWidths:
    """Numbers of a patch that live at once in a layer, in widths D, without those inside the MLP.

    `attention`, `attention_half`: while scores are computed, in float32 and in bfloat16, where some are float32.
    `mlp`, `mlp_half`: around the inside of the MLP. `kept`, `kept_autocast`: for backward, in the dtype of products;
    with autocast inputs of norms are float32. `projector`: kept there, for each that there is.
    """

    attention: float = 8.0
    attention_half: float = 8.0
    mlp: float = 4.0
    mlp_half: float = 4.0
    kept: float = 8.0
    kept_autocast: float = 12.0
    projector: float = 5.0


_QWEN3 = _LayerWidths(
    attention=11.0, attention_half=20.0, mlp_half=5.0, kept=11.0, kept_autocast=11.0, projector=4.0
)
_WIDTHS: Mapping[str, _LayerWidths] = MappingProxyType(
    {
        "gemma3": _LayerWidths(projector=2.0),
        "gemma4": _LayerWidths(kept=19.0, kept_autocast=35.0),
        # One embedder: both axes' places of a patch before and after padding is masked, or its normed numbers.
        "gemma4_unified": _LayerWidths(
            attention=5.0,
            attention_half=6.0,
            mlp=1.0,
            mlp_half=1.0,
            kept=4.0,
            kept_autocast=7.0,
            projector=1.0,
        ),
        "internvl": _LayerWidths(
            mlp=5.0, mlp_half=5.0, kept=10.0, kept_autocast=14.0, projector=3.0
        ),
        "lfm2_vl": _LayerWidths(),
        "mistral3": _LayerWidths(
            attention=11.0,
            attention_half=12.0,
            mlp=5.0,
            mlp_half=5.0,
            kept=10.0,
            kept_autocast=21.0,
            projector=7.0,
        ),
        "qwen2_5_vl": _LayerWidths(
            attention=10.0,
            attention_half=17.0,
            mlp=3.0,
            mlp_half=3.0,
            kept=13.0,
            kept_autocast=16.0,
        ),
        "qwen3_5": _QWEN3,
        "qwen3_vl": _QWEN3,
        "smolvlm": _LayerWidths(projector=0.5),
    }
)
ROTATING = ("gemma4", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl")
PADDED = ("gemma4", "lfm2_vl")  # a mask of one byte keeps patches from padding


@dataclass(frozen=True)
class TrainedTower:
    """What is trained of a tower and its projector, beside the language model `model`."""

    pictures: StepPictures
    model: TrainedModel
    precision: str

    @cached_property
    def _in_full(self) -> Mapping[str, Shape]:
        tower = self.pictures.tower
        if tower is None:
            return {}
        train = self.pictures.train
        return {name: shape for name, shape in tower.shapes.items() if _is_of(train, tower, name)}

    @cached_property
    def _adapter(self) -> Mapping[str, Shape]:
        """LoRA's matrices."""
        tower = self.pictures.tower
        adapter: dict[str, Shape] = {}
        if tower is None:
            return adapter
        for name, shape in tower.shapes.items():
            if _is_of(self.pictures.adapted, tower, name) and is_linear_map(name, shape):
                adapter[f"{name}.lora_A"] = (self.pictures.rank, shape[1])
                adapter[f"{name}.lora_B"] = (shape[0], self.pictures.rank)
        return adapter

    @cached_property
    def numbers_in_full(self) -> int:
        return count_values(self._in_full.values())

    @cached_property
    def numbers(self) -> int:
        return self.numbers_in_full + count_values(self._adapter.values())

    @property
    def bytes(self) -> float:
        """Of what is trained, or of its gradients."""
        in_full = self.numbers_in_full * weight_bytes_of(self.precision)
        adapter = count_values(self._adapter.values()) * self.model.mode.adapter_bytes
        return float(in_full + adapter)

    def state_bytes(self, optimizer: str) -> float:
        """Optimizer states, with the average of the weights. AdamW updates these parameters where the recipe's
        optimizer has matrices of layers with a rate of their own.
        """
        kind = optimizer if OPTIMIZERS[optimizer].own_rate is None else USUAL_OPTIMIZER
        spec = OPTIMIZERS[kind]
        total = 0.0
        weight_bytes = weight_bytes_of(self.precision)
        groups = ((self._in_full, weight_bytes), (self._adapter, self.model.mode.adapter_bytes))
        for shapes, bytes_of_weight in groups:
            for name, shape in shapes.items():
                value_bytes = (
                    4.0
                    if spec.float32_states
                    else self.model.state_value_bytes(shape, bytes_of_weight)
                )
                total += spec.state_values(name, shape) * value_bytes
        return total + (self.bytes if self.model.mode.ema else 0.0)


@dataclass(frozen=True)
class TowerMemory:
    """Of the tower of a step: bytes on its device."""

    step: StepShape
    pictures: StepPictures

    @cached_property
    def frozen_bytes_per_number(self) -> int:
        """In the dtype of products, but float32 where that is float16."""
        return 4 if self.step.precision == "float16" else self.step.element_bytes

    @cached_property
    def trained(self) -> "TrainedTower":
        return TrainedTower(self.pictures, self.step.model, self.step.precision)

    @property
    def gradient_bytes(self) -> float:
        return self.trained.bytes

    @property
    def weight_bytes(self) -> float:
        frozen = self.pictures.weights - self.trained.numbers_in_full
        frozen += self.pictures.teacher_weights
        return float(frozen * self.frozen_bytes_per_number) + self.gradient_bytes

    @property
    def optimizer_bytes(self) -> float:
        return self.trained.state_bytes(self.step.optimizer)

    @property
    def autocasts(self) -> bool:
        """Whether weights that are trained have more digits than products."""
        return self.trained.numbers > 0 and self.step.mixed

    @property
    def _has_graph(self) -> bool:
        """Whether backward goes through the layers of the tower, and not through the projector alone."""
        parts = (self.pictures.train, self.pictures.adapted)
        return any(part in ("tower", "all") for part in parts)

    @cached_property
    def _widths(self) -> _LayerWidths:
        assert self.pictures.tower is not None
        return _WIDTHS[self.pictures.tower.kind]

    @property
    def _sequences(self) -> float:
        """Of a micro-batch, in those whose pictures were counted."""
        lengths = self.step.sequence_length / self.pictures.sequence_length
        return self.step.micro_batch_size * lengths

    @property
    def inputs(self) -> float:
        """Of the micro-batch on its device; a CPU has those of the whole step, and those that are read ahead."""
        pictures = self.pictures
        of_batch = pictures.fullest.input_bytes * self._sequences
        if self.step.on_gpu:
            return of_batch
        return max(of_batch, pictures.mean.input_bytes * pictures.waiting_sequences)

    @property
    def features(self) -> float:
        tower = self.pictures.tower
        assert tower is not None
        made = self.pictures.fullest.features * self._sequences * tower.out
        return made * self.frozen_bytes_per_number * (1 + tower.deep_features)

    @property
    def _patches(self) -> float:
        return self.pictures.fullest.patches * self._sequences

    @property
    def _beside_layers(self) -> float:
        """Of a patch, what lives from the beginning of the tower to its end: its numbers in the dtype of products, a
        mask, angles.
        """
        tower = self.pictures.tower
        assert tower is not None
        size = self.frozen_bytes_per_number
        total = 0.0
        if size < 4:
            total += tower.patch_values * size
        if tower.kind == "smolvlm":  # only squares that are no padding
            total += tower.patch_values * size + tower.patch_values / 3 * PIXEL_MASK
        if tower.kind in ROTATING:
            total += 2 * tower.head_width * 4
        longest = self.pictures.fullest.longest
        if tower.is_joint:  # of all pieces
            total += self._patches * size
        elif tower.kind in PADDED:
            total += longest
        return total

    @property
    def passing(self) -> float:
        """While a frozen tower computes a layer: its attention or its MLP."""
        tower = self.pictures.tower
        assert tower is not None
        widths = self._widths
        size = self.frozen_bytes_per_number
        attention, mlp = widths.attention, widths.mlp
        if size < 4:
            attention, mlp = widths.attention_half, widths.mlp_half
        inner = tower.inner * (3 if tower.gated else 2) if tower.layers else tower.patch_values
        layer = size * max(attention * tower.width, mlp * tower.width + inner)
        return self._patches * (layer + self._beside_layers)

    @property
    def kept(self) -> float:
        """For backward, of a tower or a projector that is trained."""
        tower = self.pictures.tower
        if tower is None or not self.trained.numbers:
            return 0.0
        projectors = 1 + tower.deep_features
        size = self.frozen_bytes_per_number
        projector = size * self._widths.projector * tower.width * projectors
        if not self._has_graph:
            return self._patches * projector + self._casts
        return self._patches * (projector + self._beside_layers + self._kept_layers) + self._casts

    @property
    def forward(self) -> float:
        """The most while the tower runs. Projectors of inner layers have kept theirs when the last layer begins."""
        tower = self.pictures.tower
        assert tower is not None
        if self._has_graph:
            return max(self.passing, self.kept)
        inner_share = tower.deep_features / (1 + tower.deep_features)
        return max(self.passing + inner_share * self.kept, self.kept)

    @property
    def _casts(self) -> float:
        """Autocast's copies of weights."""
        return 2.0 * self.trained.numbers_in_full if self.autocasts else 0.0

    @property
    def _layer(self) -> float:
        """Of a patch, what a layer keeps without recomputation, or an embedder that is alone."""
        tower = self.pictures.tower
        assert tower is not None
        widths = self._widths
        kept = widths.kept_autocast if self.autocasts else widths.kept
        inner = tower.inner * (4 if tower.gated else 2) if tower.layers else tower.patch_values
        numbers = kept * tower.width + inner
        if tower.is_joint and self.autocasts:  # the mask in the dtype of products
            numbers += self._patches
        return self.frozen_bytes_per_number * numbers

    @property
    def _kept_layers(self) -> float:
        tower = self.pictures.tower
        assert tower is not None
        mode = self.step.checkpointing
        if not tower.layers:
            return self._layer
        if mode == "none":
            return tower.layers * self._layer
        stream = (4 if self.autocasts else self.frozen_bytes_per_number) * tower.width
        if mode == "selective":
            return tower.layers * (stream + self._layer / 2)
        recomputed = math.ceil(tower.layers / checkpointing_interval(mode))
        return recomputed * stream + (tower.layers - recomputed) * self._layer

    @property
    def backward(self) -> float:
        """What passes through a layer in backward, and a recomputed layer."""
        tower = self.pictures.tower
        assert tower is not None
        if not self._has_graph:
            return 0.0
        width = max((5.5 if self.autocasts else 4.0) * tower.width, tower.inner)
        again = 0.0 if self.step.checkpointing == "none" else self._layer
        return self._patches * (self.frozen_bytes_per_number * width + again)


def _is_of(parts: VisionParts, tower: Tower, name: str) -> bool:
    if parts == "none" or name.startswith(UNREAD):
        return False
    return parts == "all" or is_projector(tower.kind, name) == (parts == "projector")


def with_pictures(
    step: StepShape, pictures: StepPictures, moments: Iterable[StepMoment]
) -> Iterator[StepMoment]:
    """The moments of a step with what its pictures hold, and those of the tower: its forward before that of the
    language model, its backward after the embeddings'.
    """
    memory = TowerMemory(step, pictures)
    *passes, update = moments
    gradients = memory.gradient_bytes
    waiting = gradients if step.accumulating else 0.0
    if pictures.tower is None:
        yield from passes
        yield update
        return
    yield StepMoment(
        gradients=waiting + (update.gradients if step.accumulating else 0.0),
        activations=0.0,
        pictures=memory.inputs + memory.forward,
    )
    held = memory.inputs + memory.features + memory.kept
    if pictures.both_ways:
        pairs = step.tokens_per_micro_batch * step.sequence_length
        yield passes[0]._replace(
            gradients=passes[0].gradients + waiting,
            logits=0.0,
            temporaries=pairs * SEEN_PAIR[step.element_bytes < 4],
            pictures=held,
        )
    for moment in passes:
        yield moment._replace(gradients=moment.gradients + waiting, pictures=held)
    if memory.trained.numbers:  # its own gradients come as what it kept goes
        yield StepMoment(
            gradients=update.gradients + waiting,
            activations=0.0,
            pictures=held + memory.backward,
        )
    yield update._replace(gradients=update.gradients + gradients, pictures=memory.inputs)


def tower_flops(pictures: StepPictures, *, sequences: float, checkpointing: str) -> float:
    """Of a step over so many sequences."""
    forwards = 1.0
    if pictures.train in ("tower", "all"):
        forwards = TRAINED_FORWARDS
    elif pictures.adapted in ("tower", "all"):
        forwards = ADAPTED_FORWARDS
    if forwards > 1 and checkpointing != "none":
        forwards += 1
    return pictures.mean.flops * sequences * forwards
