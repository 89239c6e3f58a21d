"""Shapes, parameters, FLOPs and cache bytes of a decoder, layer by layer, from its config alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from bloomery.model.config import Experts, ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Matrix:
    """A linear map, by its name inside its layer ("self_attn.q_proj"); `size` are its numbers without the bias."""

    name: str
    outputs: int
    inputs: int
    bias: bool

    @property
    def size(self) -> int:
        return self.outputs * self.inputs


@dataclass(frozen=True)
class Layer:
    """One layer of a model. Nothing that reads this may assume that all of them are alike.

    `shapes`: its parameters by their names inside it, in the order of `Block.named_parameters`.
    """

    name: str  # model.layers.3
    matrices: tuple[Matrix, ...]
    shapes: tuple[tuple[str, Shape], ...]
    idle_parameters: int = 0  # of the experts that a token does not meet
    expert_products: int = 0  # multiply-adds of a token in its experts and their router

    @property
    def total_parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.shapes)

    @property
    def active_parameters(self) -> int:
        """Of these what a token meets."""
        return self.total_parameters - self.idle_parameters

    @property
    def active_products(self) -> int:
        """Multiply-adds of a token in the layer's matrices."""
        return sum(matrix.size for matrix in self.matrices) + self.expert_products


@cache
def layers(config: ModelConfig) -> tuple[Layer, ...]:
    """Every layer of the model, in the order of forward; an architecture of transformers' as it was asked."""
    found = []
    for index in range(config.num_layers):
        name = f"model.layers.{index}"
        if config.transformers_backend is None:
            matrices = tuple(_matrices(config))
            shapes = tuple(_block(config, matrices))
            if (experts := config.experts) is not None:
                idle, products = _unused(config, experts)
                found.append(
                    Layer(name, matrices, (*shapes, *_experts(config, experts)), idle, products)
                )
                continue
        else:
            matrices = tuple(
                Matrix(*raw_config) for raw_config in config.transformers_backend.matrices
            )
            inside = (
                (ours.removeprefix(f"{name}."), ours, shape)
                for ours, _, shape in config.transformers_backend.parameters
            )
            shapes = tuple((leaf, shape) for leaf, ours, shape in inside if leaf != ours)
        found.append(Layer(name, matrices, shapes))
    return tuple(found)


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every parameter by name, in the order of `Decoder.named_parameters`; a tied head is not listed twice."""
    return dict(_shapes(config))


@cache  # a plan asks for the same model thousands of times
def _shapes(config: ModelConfig) -> tuple[tuple[str, Shape], ...]:
    if config.transformers_backend is not None:
        return tuple((name, shape) for name, _, shape in config.transformers_backend.parameters)
    width = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    if config.positions == "learned":
        shapes["model.embed_positions.weight"] = (config.max_positions, width)
    for layer in layers(config):
        shapes |= {f"{layer.name}.{name}": shape for name, shape in layer.shapes}
    shapes |= dict(_norm(config, "model.norm", width))
    if config.head == "values":
        shapes["score.weight"] = (1, width)
    elif not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return tuple(shapes.items())


def _block(config: ModelConfig, matrices: tuple[Matrix, ...]) -> Iterator[tuple[str, Shape]]:
    for name in config.block_norms:
        yield from _norm(config, name, config.hidden_size)
    for matrix in matrices:
        yield f"{matrix.name}.weight", (matrix.outputs, matrix.inputs)
        if matrix.bias:
            yield f"{matrix.name}.bias", (matrix.outputs,)
        if matrix.name == "self_attn.o_proj" and config.qk_norm != "none":
            whole = config.qk_norm == "full"
            yield from _norm(
                config, "self_attn.q_norm", config.query_width if whole else config.head_dim
            )
            yield from _norm(
                config, "self_attn.k_norm", config.key_width if whole else config.head_dim
            )


def _experts(config: ModelConfig, experts: Experts) -> Iterator[tuple[str, Shape]]:
    """Of the router and of all experts, whose matrices are stacked: a plan quantizes and counts them as matrices."""
    width = config.hidden_size
    count = experts.count
    yield "mlp.router.weight", (count, width)
    for name in ("gate_proj", "up_proj"):
        yield f"mlp.experts.{name}.weight", (count * experts.width, width)
    yield "mlp.experts.down_proj.weight", (count * width, experts.width)
    if experts.bias:
        yield "mlp.router.bias", (count,)
        yield "mlp.experts.biases", (count * (2 * experts.width + width),)
    if experts.sinks:
        yield "self_attn.sinks", (config.num_heads,)


def _unused(config: ModelConfig, experts: Experts) -> tuple[int, int]:
    """Parameters of a layer that a token does not meet, and the multiply-adds of those that it meets."""
    matrices = 3 * experts.width * config.hidden_size
    each = matrices + (2 * experts.width + config.hidden_size if experts.bias else 0)
    products = experts.per_token * matrices + experts.count * config.hidden_size
    return (experts.count - experts.per_token) * each, products


def _norm(config: ModelConfig, name: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width,)
    if config.norm == "layer" and config.norm_bias:
        yield f"{name}.bias", (width,)


def _matrices(config: ModelConfig) -> Iterator[Matrix]:
    """The linear maps of a layer of our own decoder, whose layers are alike in that."""
    width = config.hidden_size
    inner = config.intermediate_size
    yield Matrix("self_attn.q_proj", config.query_width, width, config.attention_bias)
    yield Matrix("self_attn.k_proj", config.key_width, width, config.attention_bias)
    yield Matrix("self_attn.v_proj", config.key_width, width, config.attention_bias)
    yield Matrix("self_attn.o_proj", width, config.query_width, config.output_bias)
    if config.experts is not None:
        return
    if config.gated_mlp:
        yield Matrix("mlp.gate_proj", inner, width, config.mlp_bias)
    yield Matrix("mlp.up_proj", inner, width, config.mlp_bias)
    yield Matrix("mlp.down_proj", width, inner, config.mlp_bias)


@cache
def parameter_count(config: ModelConfig) -> int:
    """Numbers that are learned; tied embeddings count once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


@cache
def active_parameter_count(config: ModelConfig) -> int:
    """Numbers that compute a token: all, but for experts that it does not meet."""
    return parameter_count(config) - sum(layer.idle_parameters for layer in layers(config))


def flops_per_token(config: ModelConfig, sequence_length: int, *, backward: bool = True) -> float:
    """Floating-point operations (a multiply-add is two) for each of `sequence_length` tokens of a row.

    Matmuls only. Attention counts all T x T scores, including masked ones: the convention of
    torch's FlopCounterMode and of most published MFU figures (PaLM, appendix B). Backward is
    twice forward; recomputation (activation checkpointing, logits in chunks) does not count.
    """
    products = sum(layer.active_products for layer in layers(config))
    products += (1 if config.head == "values" else config.vocab_size) * config.hidden_size
    attention = config.num_layers * 4 * sequence_length * config.query_width
    return float(2 * products + attention) * (3 if backward else 1)
