"""Trainable and frozen parameters, layer by layer, and the bytes of weights, gradients and optimizer states."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from bloomery.facts.config import ModelConfig, Stage
from bloomery.facts.counting import (
    Layer,
    Shape,
    is_layer_matrix,
    is_never_trained,
    is_of_experts,
    layers,
    matrices_in,
    parameter_shapes,
)
from bloomery.facts.limits import INT8_BLOCK, INT8_SMALLEST, SCALE_BYTES, storage_bytes
from bloomery.facts.optimizers import OPTIMIZERS, Update
from bloomery.model.adapters.settings import EMBEDDING, adapter_module, adapter_shapes
from bloomery.plan.estimate.mode import FULL, TrainingMode, mode_of
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Recipe

INT8_STATE_BYTES = 1.0 + 4 / INT8_BLOCK  # a value, and its part of a float32 scale

T = TypeVar("T")
# Of the parameters that have an entry for each of so many experts, and of all others: those of 0.
ValuesByExperts = Counter[int]


def element_bytes_of(precision: str) -> int:
    """Bytes of an input or output of matmuls."""
    return 4 if precision == "float32" else 2


def weight_bytes_of(precision: str) -> int:
    """Bytes of a trainable weight of the model, and of its gradient."""
    return 2 if precision == "bfloat16-pure" else 4


def stays_float32(name: str) -> bool:
    """Whether a frozen parameter is float32 with float16 matmuls, as the residual stream is: train.state."""
    return "norm" in name or ".embed_" in name or is_never_trained(name)


def count_values(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def count_by_experts(shapes: Mapping[str, Shape]) -> ValuesByExperts:
    values = ValuesByExperts()
    for name, shape in shapes.items():
        values[shape[0] if is_of_experts(name) else 0] += math.prod(shape)
    return values


@dataclass(frozen=True, eq=False)
class TrainedLayer:
    """A layer of a model and its trainable parameters, by their names inside the layer.

    `trained`: of the model itself; `adapter`: those that the model does not have.
    """

    layer: Layer
    trained: Mapping[str, Shape]
    adapter: Mapping[str, Shape]

    @cached_property
    def trained_values(self) -> int:
        return count_values(self.trained.values())

    @cached_property
    def adapter_values(self) -> int:
        return count_values(self.adapter.values())

    @property
    def trainable_values(self) -> int:
        return self.trained_values + self.adapter_values

    @property
    def trainable_names(self) -> tuple[str, ...]:
        return (*self.trained, *self.adapter)

    def adapter_rank(self, module: str) -> int:
        """The rank of the adapter of a module or stack ("self_attn.q_proj"); 0: it has none."""
        shape = self.adapter.get(f"{adapter_module(module)}.lora_A")
        return 0 if shape is None else shape[-2]

    def reads_input(self, *modules: str, dropout: bool) -> bool:
        """Whether a gradient of weights reads the unmodified input of one of these modules ("q_proj").

        An adapter behind dropout reads another tensor.
        """
        names = [*self.trained] if dropout else [*self.trained, *self.adapter]
        readers = {name.rpartition(".")[0].rpartition(".")[2] for name in names}
        return not readers.isdisjoint(modules)


@dataclass(frozen=True)
class TrainedModel:
    """A model, or one stage of it, and what training it holds in addition to activations.

    Bytes follow from counts that are made once.
    """

    config: ModelConfig
    mode: TrainingMode = FULL
    stage: Stage | None = None

    @classmethod
    def of(cls, recipe: Recipe | RunPlan, config: ModelConfig) -> "TrainedModel":
        """Raises UserError where an adapter's names match nothing."""
        return cls(config, mode_of(recipe, config))

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The parameters of the model itself."""
        shapes = parameter_shapes(self.config)
        if self.stage is None:
            return shapes
        return {name: shape for name, shape in shapes.items() if self.stage.has(name)}

    @cached_property
    def values_by_experts(self) -> ValuesByExperts:
        """Of the parameters of the model itself."""
        return count_by_experts(self.shapes)

    @cached_property
    def trainable_by_experts(self) -> ValuesByExperts:
        return count_by_experts(self.trainable)

    @cached_property
    def weight_count(self) -> int:
        """Parameters of the model itself."""
        return count_values(self.shapes.values())

    @property
    def embeds(self) -> bool:
        """Whether tokens are embedded here: on the first stage of a pipeline."""
        return self.stage is None or self.stage.embeds

    @property
    def has_head(self) -> bool:
        """Whether losses are computed here: on the last stage of a pipeline."""
        return self.stage is None or self.stage.has_head

    @cached_property
    def adapter(self) -> dict[str, Shape]:
        """Trainable parameters that the model itself does not have."""
        adapter: dict[str, Shape] = {}
        for module, rank in self.mode.target_modules:
            shape = self.shapes.get(f"{module}.weight", self.shapes.get(module))
            if shape is None:  # of a layer on another stage
                continue
            adapter |= adapter_shapes(module, rank, shape)
            if self.mode.dora:
                adapter[f"{module}.lora_magnitude"] = (shape[0],)
        return adapter

    @cached_property
    def trained(self) -> dict[str, Shape]:
        """Trainable parameters of the model itself."""
        shapes = {n: shape for n, shape in self.shapes.items() if not is_never_trained(n)}
        if not self.mode.frozen:
            return shapes
        modules = self.mode.modules_to_save
        return {name: shape for name, shape in shapes.items() if name.rpartition(".")[0] in modules}

    @cached_property
    def frozen(self) -> dict[str, Shape]:
        return {name: shape for name, shape in self.shapes.items() if name not in self.trained}

    @cached_property
    def trainable(self) -> dict[str, Shape]:
        return {**self.trained, **self.adapter}

    @property
    def layer_numbers(self) -> Sequence[int]:
        """Of `layers`, in the whole model."""
        return range(self.config.num_layers) if self.stage is None else self.stage.layers

    @cached_property
    def layers(self) -> tuple[TrainedLayer, ...]:
        """Every layer in the order of forward; layers that are alike are one object."""
        trained = _by_layer(self.trained)
        adapter = _by_layer(self.adapter)
        distinct: dict[object, TrainedLayer] = {}
        trained_layers = []
        model_layers = layers(self.config)
        for number in self.layer_numbers:
            layer = model_layers[number]
            layer_trained = trained.get(layer.name, {})
            layer_adapter = adapter.get(layer.name, {})
            facts = (
                layer.kind,
                tuple(layer_trained.items()),
                tuple(layer_adapter.items()),
            )
            trained_layers.append(
                distinct.setdefault(facts, TrainedLayer(layer, layer_trained, layer_adapter))
            )
        return tuple(trained_layers)

    @cached_property
    def _kinds(self) -> tuple[tuple[TrainedLayer, ...], tuple[int, ...]]:
        """The layers of which none is like another, and for every layer which of them it is."""
        kinds = tuple(dict.fromkeys(self.layers))
        numbers = {layer: number for number, layer in enumerate(kinds)}
        return kinds, tuple(numbers[layer] for layer in self.layers)

    def by_layer(self, measure: Callable[[TrainedLayer], T]) -> list[T]:
        """`measure` of every layer in the order of forward; it is called once for layers that are alike."""
        kinds, numbers = self._kinds
        measures = [measure(layer) for layer in kinds]
        return [measures[number] for number in numbers]

    def by_layer_number(self, measure: Callable[[int], T]) -> list[T]:
        """`measure` of the number of every layer; it is called once for layers that are alike."""
        number_of = dict(zip(reversed(self.layers), reversed(self.layer_numbers), strict=True))
        return self.by_layer(lambda layer: measure(number_of[layer]))

    @cached_property
    def layer_matrices(self) -> tuple[Shape, ...]:
        """The shapes of the trainable matrices inside layers."""
        return tuple(
            matrix
            for name, shape in self.trainable.items()
            if is_layer_matrix(name, shape)
            for matrix in matrices_in(name, shape)
        )

    @cached_property
    def _trained_values(self) -> int:
        return count_values(self.trained.values())

    @cached_property
    def _adapter_values(self) -> int:
        return count_values(self.adapter.values())

    @cached_property
    def _largest_values(self) -> tuple[int, int]:
        """Values of the largest trainable parameter of the model itself, and of the adapter."""
        return (
            max(map(math.prod, self.trained.values()), default=0),
            max(map(math.prod, self.adapter.values()), default=0),
        )

    @property
    def trainable_count(self) -> int:
        return self._trained_values + self._adapter_values

    @property
    def head_name(self) -> str:
        """The parameter of the output layer."""
        if self.config.head == "values":
            return "score.weight"
        return "model.embed_tokens.weight" if self.config.tie_embeddings else "lm_head.weight"

    @property
    def trains_head(self) -> bool:
        return self.has_head and self.head_name in self.trained

    @property
    def trains_embedding(self) -> bool:
        """Whether the embedding of the whole model is trained, on whatever stage it is."""
        return not self.mode.frozen or EMBEDDING in self.mode.modules_to_save

    @property
    def has_layer_inputs(self) -> bool:
        """Whether what each layer is given of a token is made here."""
        return self.embeds and self.config.per_layer_input_size > 0

    @property
    def trains_layer_inputs(self) -> bool:
        """Whether what each layer is given of a token has a gradient: it is made of trainable parameters."""
        makers = ("model.embed_", "model.per_layer_")
        return self.has_layer_inputs and any(name.startswith(makers) for name in self.trainable)

    def trainable_bytes(self, precision: str) -> float:
        """Bytes of all trainable parameters, or of their gradients. An adapter has its own dtype."""
        trained = self._trained_values * weight_bytes_of(precision)
        return float(trained) + float(self._adapter_values * self.mode.adapter_bytes)

    def layer_trainable_bytes(self, layer: TrainedLayer, precision: str) -> float:
        """Bytes of the trainable parameters of one layer, or of their gradients."""
        trained = layer.trained_values * weight_bytes_of(precision)
        return float(trained) + float(layer.adapter_values * self.mode.adapter_bytes)

    def largest_bytes(self, precision: str) -> float:
        """Bytes of the largest gradient."""
        trained, adapter = self._largest_values
        return float(max(trained * weight_bytes_of(precision), adapter * self.mode.adapter_bytes))

    @cached_property
    def _frozen_counts(self) -> tuple[int, int, int]:
        """Bytes of quantized matrices; values of frozen embeddings and norms, and of everything else frozen."""
        mode = self.mode
        quantized_bytes = 0
        float32_values = 0
        other_values = 0
        for name, shape in self.frozen.items():
            if mode.quantize_kind != "none" and is_layer_matrix(name, shape):
                quantized_bytes += storage_bytes(shape, mode.quantize_kind, mode.double_quant)
            elif stays_float32(name):
                float32_values += math.prod(shape)
            else:
                other_values += math.prod(shape)
        return quantized_bytes, float32_values, other_values

    def weight_bytes(self, precision: str) -> float:
        """Weights of the model: trainable ones, and frozen ones in the dtype of matmuls or quantized."""
        quantized_bytes, float32_values, other_values = self._frozen_counts
        element_bytes = element_bytes_of(precision)
        frozen_bytes = (
            quantized_bytes
            + float32_values * (4 if precision == "float16" else element_bytes)
            + other_values * element_bytes
        )
        return float(self._trained_values * weight_bytes_of(precision)) + frozen_bytes

    @cached_property
    def adapter_bytes(self) -> float:
        """Bytes of the adapter's weights. PiSSA keeps its initial matrices, DoRA one magnitude per output."""
        magnitudes = count_values(shape for shape in self.adapter.values() if len(shape) == 1)
        copies = 2 if self.mode.pissa else 1
        return float(self._adapter_values * self.mode.adapter_bytes * copies + 4 * magnitudes)

    @cached_property
    def _parameter_counts(self) -> Counter[tuple[str, Shape, bool]]:
        """How many parameters differ in their layer alone, by name, shape and whether they are an adapter's."""
        return Counter(
            (re.sub(r"\.\d+\.", ".0.", name), shape, name in self.adapter)
            for name, shape in self.trainable.items()
        )

    def optimizer_bytes(self, kind: str, precision: str) -> float:
        """Optimizer states, on the device or in CPU memory, with the average of the weights."""
        spec = OPTIMIZERS[kind]
        total = 0.0
        for (name, shape, is_adapter), count in self._parameter_counts.items():
            weight_bytes = self.mode.adapter_bytes if is_adapter else weight_bytes_of(precision)
            value_bytes = (
                4.0 if spec.float32_states else self.state_value_bytes(shape, weight_bytes)
            )
            total += count * spec.state_values(name, shape) * value_bytes
        return total + (self.trainable_bytes(precision) if self.mode.ema else 0.0)

    def state_sizes(self, kind: str, precision: str, shard: int) -> list[int]:
        """Bytes of each stored tensor of the states of one of `shard` ranks, as the optimizer divides them."""
        spec = OPTIMIZERS[kind]
        sizes = list[int]()
        for (name, shape, is_adapter), count in self._parameter_counts.items():
            weight_bytes = self.mode.adapter_bytes if is_adapter else weight_bytes_of(precision)
            value_bytes = self.state_value_bytes(shape, weight_bytes)
            values = -(-math.prod(shape) // shard)
            if value_bytes == INT8_STATE_BYTES:
                blocks = -(-values // INT8_BLOCK)
                tensors = [blocks * INT8_BLOCK, blocks * SCALE_BYTES]
            else:
                tensors = [round(values * value_bytes)]
            moments = round(spec.state_values(name, shape) / math.prod(shape))
            sizes += count * moments * tensors
        return sizes

    def state_value_bytes(self, shape: Shape, weight_bytes: int) -> float:
        """States of bfloat16 weights are bfloat16; with int8 those of small parameters are float32."""
        state_dtype = self.mode.state_dtype
        if state_dtype == "int8" and math.prod(shape) >= INT8_SMALLEST:
            return INT8_STATE_BYTES
        is_half = state_dtype == "bfloat16" or (state_dtype == "float32" and weight_bytes == 2)
        return 2.0 if is_half else 4.0

    def state_parts(self, kind: str, precision: str) -> dict[str, float]:
        """Bytes that do not depend on the batch. With a fused backward only the largest gradient exists."""
        gradients = (
            self.largest_bytes(precision)
            if self.mode.fused_backward
            else self.trainable_bytes(precision)
        )
        return {
            "weights": self.weight_bytes(precision) + self.adapter_bytes,
            "gradients": gradients,
            "states": self.optimizer_bytes(kind, precision),
        }

    def update_bytes(self, kind: str, precision: str, *, on_gpu: bool) -> float:
        """Temporary bytes of the update. A fused backward updates one parameter at a time."""
        update = Update(
            settings=self.mode,
            on_gpu=on_gpu,
            weight_bytes=weight_bytes_of(precision),
            values_at_once=max(self._largest_values)
            if self.mode.fused_backward
            else self.trainable_count,
            layer_matrices=self.layer_matrices,
        )
        return OPTIMIZERS[kind].update_bytes(update)


def _layer_and_inner_name(name: str) -> tuple[str, str]:
    """ "model.layers.3.mlp.up_proj.weight" is "mlp.up_proj.weight" of "model.layers.3"."""
    model, layers_, index, inner = name.split(".", 3)
    return f"{model}.{layers_}.{index}", inner


def _by_layer(shapes: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """The parameters inside layers by the name of their layer."""
    by_layer: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        if ".layers." in name:
            layer_name, inner_name = _layer_and_inner_name(name)
            by_layer.setdefault(layer_name, {})[inner_name] = shape
    return by_layer
