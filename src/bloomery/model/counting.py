"""Shapes, parameters, FLOPs and cache bytes of a decoder, from its config alone."""

import math
from collections.abc import Iterator
from functools import cache

from bloomery.model.config import ModelConfig

Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every parameter by name, in the order of `Decoder.named_parameters`; a tied head is not listed twice."""
    return dict(_shapes(config))


@cache  # a plan asks for the same model thousands of times
def _shapes(config: ModelConfig) -> tuple[tuple[str, Shape], ...]:
    if config.foreign is not None:
        return tuple((name, shape) for name, _, shape in config.foreign.parameters)
    width = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    if config.positions == "learned":
        shapes["model.embed_positions.weight"] = (config.max_positions, width)
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _block(config)}
    shapes |= dict(_norm(config, "model.norm", width))
    if config.head == "values":
        shapes["score.weight"] = (1, width)
    elif not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return tuple(shapes.items())


def _block(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    for name in config.block_norms:
        yield from _norm(config, name, config.hidden_size)
    for name, rows, columns, bias in matrices(config):
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)
        if name == "self_attn.o_proj" and config.qk_norm != "none":
            whole = config.qk_norm == "full"
            yield from _norm(config, "self_attn.q_norm", config.query_width if whole else config.head_dim)
            yield from _norm(config, "self_attn.k_norm", config.key_width if whole else config.head_dim)


def _norm(config: ModelConfig, name: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width,)
    if config.norm == "layer" and config.norm_bias:
        yield f"{name}.bias", (width,)


def matrices(config: ModelConfig) -> Iterator[tuple[str, int, int, bool]]:
    """The linear maps of one layer: name, outputs, inputs, whether it has a bias."""
    if config.foreign is not None:
        yield from config.foreign.matrices
        return
    width, inner = config.hidden_size, config.intermediate_size
    yield "self_attn.q_proj", config.query_width, width, config.attention_bias
    yield "self_attn.k_proj", config.key_width, width, config.attention_bias
    yield "self_attn.v_proj", config.key_width, width, config.attention_bias
    yield "self_attn.o_proj", width, config.query_width, config.output_bias
    if config.gated_mlp:
        yield "mlp.gate_proj", inner, width, config.mlp_bias
    yield "mlp.up_proj", inner, width, config.mlp_bias
    yield "mlp.down_proj", width, inner, config.mlp_bias


@cache
def parameter_count(config: ModelConfig) -> int:
    """Numbers that are learned; tied embeddings count once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def flops_per_token(config: ModelConfig, sequence_length: int, *, backward: bool = True) -> float:
    """Floating-point operations (a multiply-add is two) for each of `sequence_length` tokens of a row.

    Matrix products only. Attention counts all T x T scores, also those that causality, a window or the end of a
    document hide: the convention of torch's FlopCounterMode and of most published MFU figures (PaLM, appendix B).
    Backward is twice forward; recomputation (activation checkpointing, scores in chunks) does not count.
    """
    weights = config.num_layers * sum(rows * columns for _, rows, columns, _ in matrices(config))
    weights += (1 if config.head == "values" else config.vocab_size) * config.hidden_size
    attention = config.num_layers * 4 * sequence_length * config.query_width
    return float(2 * weights + attention) * (3 if backward else 1)
