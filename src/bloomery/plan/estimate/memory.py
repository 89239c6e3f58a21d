"""Bytes that a step keeps from forward for backward, layer by layer, and what passes through a layer in backward.

A frozen matrix needs its weight for the gradient of its input, and its input for nothing: an input that only a
gradient of weights reads is kept where the weight is trainable or has an adapter. Of several devices: sharded states,
pipeline stages, and collectives.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from bloomery.core.units import GIB, MIB
from bloomery.model.config import ModelConfig
from bloomery.model.counting import layers, parameter_count, parameter_shapes
from bloomery.model.limits import (
    ATTENTION_BLOCK,
    CPU_SCORES,
    CPU_TILE,
    DEQUANTIZED_ON_CPU,
    DEQUANTIZED_ON_GPU,
    GPU_SCORES,
    PIECE_BYTES,
)
from bloomery.plan.estimate.states import StepShape, TrainedModel, TrainingMode, is_wide, numbers
from bloomery.plan.types import MemoryEstimate, Origin

TILE_BYTES = 15  # a score of a tile in backward: three of float32, 16 random bits and a mask
SHARING = (  # modules with one input
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
INPUT_BYTES = 36  # per token: ids, labels, positions, documents, loss mask
SMALL_BYTES = 44  # per token: loss mask, logits of the labels, sums and gradients


def activation_bytes(step: StepShape) -> float:
    """Bytes that all layers keep for backward."""
    return sum(kept_by_layer(step))


def kept_by_layer(step: StepShape) -> list[float]:
    """Bytes that each layer keeps for backward."""
    mode = step.checkpointing
    whole = layer_bytes(step)
    if mode == "none":
        return [whole] * step.config.num_layers
    stream = float(step.tokens_per_micro_batch * step.config.hidden_size * step.stream)
    if mode == "selective":
        config = step.config  # results of matmuls and attention
        inner = (2 if config.gated_mlp else 1) * config.intermediate_size
        widths = 2 * config.query_width + 2 * config.key_width + 2 * config.hidden_size + inner
        products = step.element * widths + 4 * config.num_heads
        return [stream + step.tokens_per_micro_batch * products] * config.num_layers
    every = 1 if mode == "full" else int(mode.removeprefix("every-"))
    return [whole if layer % every else stream for layer in range(step.config.num_layers)]


def kept_layers(checkpointing: str, num_layers: int) -> int:
    """Layers without recomputation: none for `full`, half of the work for `selective`, all but each n-th."""
    if checkpointing == "none":
        return num_layers
    if checkpointing == "full":
        return 0
    if checkpointing == "selective":
        return num_layers - num_layers // 2
    return num_layers - math.ceil(num_layers / int(checkpointing.removeprefix("every-")))


def layer_bytes(step: StepShape) -> float:
    """Bytes that one layer keeps for backward without recomputation."""
    # added to scores: not booleans
    masks = step.element * step.sequence_length if step.attention == "mask" else 0
    scores = score_matrix_bytes(step) if keeps_scores(step) else 0.0
    return step.tokens_per_micro_batch * (layer_bytes_per_token(step) + masks) + scores


def layer_bytes_per_token(step: StepShape) -> float:
    """Of one layer, without quadratic scores: 38 h for a GPT block with dropout in half precision on a GPU."""
    return _attention_bytes(step) + _norm_bytes(step) + _mlp_bytes(step) + _adapter_bytes(step)


def _norm_bytes(step: StepShape) -> float:
    """Norms keep their inputs and one or two statistics per token; masks of residual dropout are included.

    Inputs are the residual stream before a block's part and its half-precision result after it. A compiled block keeps
    the result of attention and recomputes the second sum of the residual stream.
    """
    config = step.config
    h = step.config.hidden_size
    stats = 8 if config.norm == "layer" else 4
    # torch's kernel widens it
    after = 4 if step.on_gpu and step.mixed and not step.compiled else step.element
    inputs = {
        "before": [step.stream] * 2,
        "after": [after] * 2,
        "both": [step.stream, after, step.stream, after],
    }
    sizes = inputs[config.norm_placement]
    if step.compiled and config.norm_placement == "before":
        sizes = [step.stream, step.element]
    masked = 1 if step.on_gpu or step.compiled else step.element  # the CPU keeps the scaled mask
    return sum(sizes) * h + stats * len(sizes) + (2 * masked * h if config.residual_dropout else 0)


def _attention_bytes(step: StepShape) -> float:
    """Its input, q and attention's output, k and v, a log-sum-exp per head; a norm of q and k keeps its inputs."""
    config = step.config
    total = float(step.element * (2 * config.query_width + 2 * config.key_width))
    total += (
        step.element * config.hidden_size if _keeps_input(step, "q_proj", "k_proj", "v_proj") else 0
    )
    if config.qk_norm != "none":
        wide = 4 if step.on_gpu and step.mixed and not step.compiled else step.element
        total += wide * (config.query_width + config.key_width) + 4 * (
            config.num_heads + config.num_kv_heads
        )
    if not keeps_scores(step):
        total += 4 * config.num_heads
    elif step.attention != "math":  # PyTorch computes it in float32
        total += (4 - step.element) * (config.query_width + 2 * config.key_width)
    return total


def _mlp_bytes(step: StepShape) -> float:
    """Its input, the input and output of the activation, and for a gate the other factor and the product."""
    config = step.config
    inner = 4 if config.gated_mlp else 2
    if config.activation == "relu":  # it is differentiated from its result
        inner -= 1
    if config.gated_mlp and step.compiled:  # the activation is recomputed
        inner = 3
    if not _keeps_input(step, "down_proj") and config.activation != "relu":
        inner -= 1
    enters = config.hidden_size if _keeps_input(step, "gate_proj", "up_proj") else 0
    return step.element * (enters + inner * config.intermediate_size)


def _keeps_input(step: StepShape, *modules: str) -> bool:
    """Whether one of these modules keeps its input for a gradient of weights; after dropout it keeps another."""
    return not step.mode.frozen or not step.model.reading_modules.isdisjoint(modules)


def _adapter_bytes(step: StepShape) -> float:
    """Adapters of a layer keep the values between their two matmuls, and their own inputs after dropout.

    DoRA's scaling keeps the result that it scales. In half precision each PEFT layer casts its input itself;
    native adapters share the cast.
    """
    config = step.config
    mode = step.mode
    e = step.element
    ranks = {name: rank for name, rank in mode.pairs if name.startswith("model.layers.0.")}
    total = 0.0
    for matrix in layers(config)[0].matrices:
        rank = ranks.get(f"model.layers.0.{matrix.name}", 0)
        if rank:
            dropped = (e + (1 if step.on_gpu else e)) * matrix.inputs if mode.dropout else 0
            total += (
                e * rank * (2 if mode.pissa else 1)
                + dropped
                + (e * matrix.outputs if mode.dora else 0)
            )
    if mode.theirs and e < 4:
        sharing = [
            [name for name in group if f"model.layers.0.{name}" in ranks] for group in SHARING
        ]
        total += e * config.hidden_size * sum(len(group) - 1 for group in sharing if group)
    return total


def end_bytes(step: StepShape) -> float:
    """Bytes kept outside the layers: inputs, the last norm's input, inputs of the head, embedding dropout."""
    config = step.config
    masked = 1 if step.on_gpu else step.stream
    dropout = masked * config.hidden_size if config.embedding_dropout else 0
    return last_norm_bytes(step) + step.tokens_per_micro_batch * (
        INPUT_BYTES + SMALL_BYTES + dropout
    )


def last_norm_bytes(step: StepShape) -> float:
    return float(
        step.tokens_per_micro_batch * step.config.hidden_size * (step.stream + step.element)
    )


def backward_bytes(step: StepShape) -> float:
    """Temporary bytes of a layer in backward: first its MLP, then its attention."""
    tokens = step.tokens_per_micro_batch
    config = step.config
    e = step.element
    stream = step.stream * config.hidden_size
    inner = (2 if config.gated_mlp else 1) * config.intermediate_size
    all_sizes = {matrix.name: matrix.size for matrix in layers(config)[0].matrices}
    sizes = {
        name: size
        for name, size in all_sizes.items()
        if f"model.layers.0.{name}.weight" in step.model.trained
    }
    each = step.in_layer + (e if step.in_layer > e else 0)
    fresh = float(max(sizes.values(), default=0) * each)  # a gradient before it is accumulated
    if step.mode.base != "none":
        # a dequantized matrix; while it is made there is no result of the matmul yet
        read = max(all_sizes.values())
        making = PIECE_BYTES * min(read, DEQUANTIZED_ON_GPU if step.on_gpu else DEQUANTIZED_ON_CPU)
        fresh += e * read + max(0.0, making - tokens * e * config.hidden_size)
    mlp = tokens * (stream + e * (config.hidden_size + inner)) + fresh
    behind = sum(size for name, size in sizes.items() if name.startswith("mlp."))
    if step.compiled and sizes:  # a graph returns all gradients of its layer together
        behind = step.model.trained_in_layer
    elif step.accumulating or step.mode.fused_backward:
        behind = 0
    ahead = (
        tokens * (stream + e * 2 * (config.query_width + config.key_width)) + behind * step.in_layer
    )
    return max(mlp, ahead + attention_scratch(step) - tokens * _mlp_bytes(step))


def attention_scratch(step: StepShape) -> float:
    """Temporary bytes of an attention kernel in backward, in addition to gradients."""
    tokens = step.tokens_per_micro_batch
    config = step.config
    if keeps_scores(step):
        # three gradients of the scores, float32
        return float(12 * config.num_heads * step.sequence_length * tokens)
    if step.attention == "blockwise":
        tile = config.num_heads * min(step.sequence_length, ATTENTION_BLOCK) ** 2
        together = min(
            step.micro_batch_size, max(1, (GPU_SCORES if step.on_gpu else CPU_SCORES) // tile)
        )
        copies = (
            step.element * (3 * config.query_width + 2 * config.key_width) + 8 * config.key_width
        )
        return float(together * (TILE_BYTES * tile + step.sequence_length * copies))
    # a gradient for each document, then concatenated
    if step.attention in ("per_document", "mask"):
        return float(step.element * tokens * (config.query_width + 2 * config.key_width))
    if step.attention == "compiled":  # the gradients of keys and values by query head, float32
        return 8.0 * tokens * config.query_width if config.query_width != config.key_width else 0.0
    # flash sums the queries' gradient in float32
    return 4.0 * tokens * config.query_width if step.on_gpu else 0.0


def keeps_scores(step: StepShape) -> bool:
    """Whether attention keeps every score: `math`, and PyTorch's CPU kernel with dropout."""
    fallback = (
        not step.on_gpu and step.config.attention_dropout > 0 and step.attention in ("sdpa", "mask")
    )
    return step.attention == "math" or fallback


def score_matrix_bytes(step: StepShape) -> float:
    """Bytes that attention of a layer keeps with every score in float32: softmax, dropout, their product."""
    dropped = step.config.attention_dropout > 0
    if step.attention != "math":
        each = 12  # PyTorch's: softmax, mask and product, all float32
    elif dropped:
        each = 4 + (1 if step.on_gpu else 4) + step.element
    else:
        each = 4 + (step.element if step.element < 4 else 0)
    return float(each * step.config.num_heads * step.sequence_length * step.tokens_per_micro_batch)


def quadratic_bytes(step: StepShape) -> float:
    """Bytes that PyTorch's GPU fallback keeps per layer: softmax, dropout mask and result, 5 a s^2 b."""
    each = 2 * step.element + 1 if step.config.attention_dropout else step.element
    return float(each * step.config.num_heads * step.sequence_length * step.tokens_per_micro_batch)


SPREAD = 0.20  # of an estimate from shapes alone on a GPU
# of a caching allocator, by whether it has expandable segments
FRAGMENTATION = {True: 0.05, False: 0.15}
# bytes per logit of each model: model.heads.Divergence, uncompiled
FORWARD_DIVERGENCE = 20
BACKWARD_DIVERGENCE = 28
CPU_RUNTIME = 420 * MIB  # interpreter, PyTorch, buffers, malloc: docs/explanation/memory.md
# Of activations and logits, by compiled or not: docs/explanation/memory.md
CPU_FRAGMENTATION = {False: 0.45, True: 0.25}
CPU_COMPILER = 110 * MIB  # Dynamo's and Inductor's modules and graphs
CPU_PEFT = 60 * MIB  # its imports
# of half-precision attention, kept for each length of a document: model.per_document
CPU_KERNELS = 3e6


@dataclass(frozen=True, kw_only=True)
class StepMoment:
    """Live bytes in addition to weights and states."""

    gradients: float
    activations: float
    logits: float = 0.0
    copies: float = 0.0
    temporaries: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.logits + self.copies + self.temporaries


def estimate_memory(step: StepShape, *, limit: float, origin: Origin = "table") -> MemoryEstimate:
    """Peak bytes of a step by part; the interval is 20% to each side."""
    parts = tensor_bytes(step)
    parts |= around(step, parts)
    total = sum(parts.values())
    return MemoryEstimate(
        parts=parts, low=total * (1 - SPREAD), high=total * (1 + SPREAD), limit=limit, origin=origin
    )


def around(step: StepShape, parts: Mapping[str, float]) -> dict[str, float]:
    """Bytes of the allocator and the runtime, in addition to tensors.

    malloc keeps memory that a layer frees between live tensors, and larger tensors of the next layer do not fit there.
    """
    if not step.on_gpu:
        # Attention in half precision is computed document by document, with kernels for each length.
        kernels = step.attention == "per_document" and step.element < 4
        kept = CPU_KERNELS * document_lengths(step.sequence_length)
        runtime = (
            CPU_RUNTIME
            + (CPU_PEFT if step.mode.theirs else 0)
            + (CPU_COMPILER if step.compiled else 0)
        )
        fragmentation = CPU_FRAGMENTATION[step.compiled] * (parts["activations"] + parts["logits"])
        holes = {"fragmentation": fragmentation, "runtime": runtime}
        return holes | ({"kernels": kept} if kernels else {})
    tensors = sum(parts.values())
    return {
        "fragmentation": FRAGMENTATION[step.expandable] * tensors,
        "context": step.context_bytes,
    }


def document_lengths(length: int) -> int:
    """Distinct lengths after `model.per_document` pads documents: steps of 64, then an eighth of a power of two."""
    short = min(length, 1024)
    octaves = max(0.0, math.log2(max(1, length) / 1024))
    return -(-short // 64) + math.ceil(8 * octaves)


def tensor_bytes(step: StepShape) -> dict[str, float]:
    """Bytes of live tensors at the peak, without allocator and runtime."""
    return tensors_at(step, max(moments(step), key=lambda moment: moment.total))


def tensors_at(step: StepShape, moment: StepMoment) -> dict[str, float]:
    """All live tensors at a moment."""
    model = step.model
    mode = step.mode
    states = model.optimizer_bytes(step.optimizer, step.precision)
    parts = {
        "weights": model.held_bytes(step.precision),
        "adapter": model.adapter_bytes,
        "gradients": moment.gradients,
        "optimizer": 0.0 if mode.away and step.on_gpu else states,
        "activations": moment.activations,
        "logits": moment.logits,
    }
    if not mode.frozen:
        parts.pop("adapter")
    if step.teacher is not None:
        parts["teacher"] = float(parameter_count(step.teacher) * step.element)
    if step.mixed:
        parts["half-precision copies"] = moment.copies
    parts["temporaries"] = moment.temporaries
    return parts


def moments(step: StepShape) -> Iterator[StepMoment]:
    """Every moment of a step at which memory can peak, in order."""
    config = step.config
    model = step.model
    mode = step.mode
    by_layer = kept_by_layer(step)
    ends = end_bytes(step)
    if step.offloading:  # the current layer and the next one
        by_layer = [0.0] * (len(by_layer) - 2) + by_layer[-2:]
    whole = model.learning_bytes(step.precision)
    layer = model.layer_learning_bytes(step.precision)
    head = step.outputs * config.hidden_size * step.weight if model.head_learns else 0
    update = model.update_bytes(step.optimizer, step.precision, on_gpu=step.on_gpu)
    if mode.fused_backward:
        whole = model.largest_bytes(step.precision)
        layer = 0.0
    before = whole if step.accumulating else 0.0
    copy = 2.0 * copied_numbers(step)
    kept = kept_layers(step.checkpointing, config.num_layers)
    activations = sum(by_layer) + ends
    logits, in_backward = logit_bytes(step)
    # Autocast keeps its copies until forward ends, then those that backward reads.
    yield StepMoment(
        gradients=before, activations=activations, logits=logits, copies=copy * len(by_layer)
    )
    yield StepMoment(
        gradients=before or head, activations=activations, logits=in_backward, copies=copy * kept
    )
    inside = layer_bytes(step)
    passing = backward_bytes(step)
    last = last_norm_bytes(step)
    before_it = [0.0, *accumulate(by_layer)]
    for done in range(len(by_layer)):
        left = len(by_layer) - done
        reached = before or head + done * layer
        # the head's weight is updated with the next one, each later one immediately
        if mode.fused_backward:
            reached = head if done == 0 else 0.0
        yield StepMoment(
            gradients=reached,
            activations=before_it[left - 1] + inside + ends - last,
            copies=copy * max(1.0, kept * left / len(by_layer)),
            # a gradient is used immediately
            temporaries=max(passing, update) if mode.fused_backward else passing,
        )
    doubled = head if step.accumulating or config.tie_embeddings else 0
    stream = step.tokens_per_micro_batch * config.hidden_size * step.stream
    yield StepMoment(gradients=whole, activations=ends - last, temporaries=stream + doubled)
    yield StepMoment(gradients=whole, activations=0.0, temporaries=update)


def copied_numbers(step: StepShape) -> int:
    """Values per layer that autocast copies to half precision: wider inputs of matmuls."""
    if not step.mode.frozen:
        first = layers(step.config)[0]
        matrices = first.matrices if step.mixed else ()
        experts = sum(
            math.prod(shape) for name, shape in first.shapes if step.mixed and ".experts." in name
        )
        return sum(matrix.size + matrix.outputs * matrix.bias for matrix in matrices) + experts
    wide = [(step.model.trained, step.weight), (step.model.adapter, step.mode.adapter_bytes)]
    return sum(
        math.prod(shape)
        for shapes, size in wide
        for name, shape in shapes.items()
        if size > step.element and ".layers.0." in name and len(shape) == 2
    )


def logit_bytes(step: StepShape) -> tuple[float, float]:
    """Temporary bytes of the output layer in forward and in backward.

    Logits of one tile have the dtype of matmuls. Uncompiled, half-precision logits have a float32 copy, and in forward
    exponentials. Backward sums the gradient of the hidden states in float32, and adds the gradient of the weight to
    the accumulated one; a wider dtype needs the result of the matmul too.
    """
    tokens = step.tokens_per_micro_batch
    h = step.config.hidden_size
    entries = step.outputs if step.on_gpu else min(step.outputs, CPU_TILE)
    logits_at_once = min(step.score_chunk, tokens) * entries
    weights = entries * h
    # More than one chunk: a chunk's logits are freed after the next ones are computed.
    several = entries < step.outputs or step.score_chunk < tokens
    if step.config.head == "values":  # in float32, in one piece
        widened = 4.0 * tokens * h if step.element < 4 else 0.0
        return widened, 2 * widened
    if step.teacher is not None:
        # Distillation: both models' logits of a chunk and their float32 copies, recomputed in backward.
        both = min(step.score_chunk, tokens) * step.config.vocab_size
        hidden = tokens * (h + 2 * step.teacher.hidden_size) * step.element
        return float(FORWARD_DIVERGENCE * both + hidden), float(BACKWARD_DIVERGENCE * both + hidden)
    wide = 4 * logits_at_once if step.element < 4 else 0
    # the plan compiles both passes or neither
    eager = not step.compiled and step.attention != "compiled"
    learning = step.model.head_learns
    widened = (
        step.mixed if learning else step.precision == "float16" and is_wide(step.model.head_name)
    )
    copy = 2 * weights if widened else 0
    capped = 4 * logits_at_once if eager and step.config.final_softcap is not None else 0
    logits = step.element * logits_at_once + copy + capped
    before = step.element * logits_at_once if several else 0
    forward = (
        logits + max(before, wide + 4 * logits_at_once if eager else 0) + tokens * h * step.element
    )
    product = step.element * weights if step.mixed and learning else 0
    backward = logits + max(before, wide if eager else 0, product) + 4 * tokens * h
    return float(forward), float(backward)


# measured on MI250X; ml-engineering, two ranks of CUDA
FIRST_CONTEXT = {"amd": 0.95 * GIB, "nvidia": 1.5 * GIB}
NEXT_CONTEXT = {"amd": 0.65 * GIB, "nvidia": 0.3 * GIB}
BUCKET = 25 * 2**20  # bytes of gradients per all-reduce when weights are replicated
REDUCED = 4  # bytes per value of a reduce-scatter: float32


@dataclass(frozen=True, kw_only=True)
class MeshSplit:
    """How many devices hold copies, shards and stages."""

    replicate: int = 1
    shard: int = 1
    pipeline: int = 1

    @property
    def data_parallel(self) -> int:
        """Ranks with different sequences."""
        return self.replicate * self.shard


ONE_DEVICE = MeshSplit()


def mesh_memory(
    step: StepShape,
    split: MeshSplit,
    *,
    vendor: str,
    limit: float,
    micro_batches: int | None = None,
) -> MemoryEstimate:
    """The device of a layout that needs most; a step has so many micro-batches, or enough to fill every stage."""
    if split.pipeline > 1:
        stages = [
            stage_bytes(step, split.pipeline, index, micro_batches)
            for index in kinds_of_stages(split.pipeline)
        ]
        parts = max(stages, key=lambda stage: sum(stage.values()))
    else:
        parts = (
            _sharded(step, split) if split.shard > 1 else estimate_memory(step, limit=limit).parts
        )
    found = dict(parts)
    # Each process group has a context of the collective library, outside PyTorch's allocator.
    groups = (
        0 if vendor == "cpu" else (split.pipeline > 1) + (split.replicate > 1) + (split.shard > 1)
    )
    found["collectives"] = (
        FIRST_CONTEXT[vendor] + NEXT_CONTEXT[vendor] * (groups - 1) if groups else 0.0
    )
    if split.replicate > 1 and split.shard == 1:
        found["gradient buckets"] = float(2 * BUCKET)
    whole = sum(found.values())
    return MemoryEstimate(
        parts=found,
        low=whole * (1 - SPREAD),
        high=whole * (1 + SPREAD),
        limit=limit,
        origin="table",
    )


def _sharded(step: StepShape, split: MeshSplit) -> dict[str, float]:
    """Shards of weights, gradients and states, and the gathered weights at the peak."""
    peak = max(sharded_moments(step, split.shard), key=lambda moment: moment.total)
    held = step.model.held_bytes(step.precision) + step.model.adapter_bytes
    states = 0.0 if step.mode.away else step.model.optimizer_bytes(step.optimizer, step.precision)
    parts = {
        "weights": held / split.shard,
        "gradients": peak.gradients,
        "optimizer": states / split.shard,
        "activations": peak.activations,
        "logits": peak.logits,
        "gathered layers": peak.copies,
        "temporaries": peak.temporaries,
    }
    return parts | around(step, parts)


def sharded_moments(step: StepShape, shards: int) -> list[StepMoment]:
    """The moments of a step under FSDP2, block by block; `copies` are weights and gradients that are whole meanwhile.

    Weights of layers are gathered in the dtype of matmuls, and so are their gradients. The embeddings and their
    gradient have their own dtype and stay whole from forward to the end of backward. Next to the current layer, the
    prefetched layer and the float32 gradients of the layer in reduce-scatter are alive.
    """
    forward, logits, *layers, embeddings, update = moments(
        replace(step, gathered=True, accumulating=False)
    )
    layer, root = gathered_layers(step)
    learning = step.model.trained_in_layer
    e = step.element
    shard = step.weight / shards
    root_bytes = root * (e if step.mode.frozen else step.weight)
    trained_root = step.model.trained_count - len(layers) * learning
    head = step.config.vocab_size * step.config.hidden_size if step.model.head_learns else 0
    kept = (len(layers) * learning + trained_root) * shard
    before = kept if step.accumulating else 0.0
    blocks = len(layers) * learning * shard
    found = [
        replace(forward, gradients=before, copies=root_bytes + layer * e),
        replace(logits, gradients=before + head * step.weight, copies=root_bytes + layer * e),
    ]
    for done, moment in enumerate(layers):
        ahead = 2 if done < len(layers) - 1 else 1  # nothing is prefetched behind the first layer
        copies = root_bytes + ahead * layer * e + (REDUCED * learning if done else 0)
        reached = max(before, done * learning * shard) + head * step.weight
        found.append(replace(moment, gradients=reached, copies=copies))
    reached = max(before, blocks)
    whole = trained_root * step.weight
    found.append(
        replace(embeddings, gradients=reached + whole, copies=root_bytes + REDUCED * learning)
    )
    summed = root_bytes + trained_root * REDUCED
    found.append(replace(embeddings, gradients=reached, copies=summed, temporaries=0.0))
    return [*found, replace(update, gradients=kept)]


def gathered_layers(step: StepShape) -> tuple[int, int]:
    """Parameters of one layer, and of the embeddings, head and last norm."""
    shapes = parameter_shapes(step.config)
    inside = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name)
    whole = sum(math.prod(shape) for shape in shapes.values())
    return inside // step.config.num_layers, whole - inside


def stage_config(config: ModelConfig, stages: int) -> ModelConfig:
    """That of a stage's layers: no stage has more; over stages a tied head is a matrix of its own."""
    layers = math.ceil(config.num_layers / stages)
    windows = config.sliding_window[:layers]
    rotary = config.rotary_layers[:layers]
    return replace(
        config,
        num_layers=layers,
        sliding_window=windows,
        rotary_layers=rotary,
        tie_embeddings=False,
    )


def kinds_of_stages(stages: int) -> list[int]:
    """The first, the fullest of those between, the last."""
    return sorted({0, 1, stages - 1})


# a plan asks for the same stages thousands of times, and their sums are kept with them
@lru_cache(maxsize=64)
def _stage_models(
    config: ModelConfig, mode: TrainingMode, stages: int, index: int
) -> tuple[TrainedModel, TrainedModel]:
    """The layers of a stage as if it had both ends, and with the ends that it has."""
    layers = TrainedModel(stage_config(config, stages), mode)
    return layers, replace(layers, stage=(index, stages))


def stage_bytes(
    step: StepShape, stages: int, index: int, micro_batches: int | None = None
) -> dict[str, float]:
    """A stage of 1F1B: its layers, and the activations of its micro-batches in flight."""
    layers, held = _stage_models(step.config, step.mode, stages, index)
    whole = held.learning_bytes(step.precision)
    micro_batches = stages + 1 if micro_batches is None else micro_batches
    peak = max(
        _stage_moments(replace(step, model=layers), index, stages, micro_batches, whole),
        key=lambda moment: moment.total,
    )
    parts = {
        "weights": held.held_bytes(step.precision)
        + float(numbers(held.adapter) * step.mode.adapter_bytes),
        "gradients": peak.gradients,
        "optimizer": 0.0
        if step.mode.away
        else held.optimizer_bytes(step.optimizer, step.precision),
        "activations": peak.activations,
        "logits": peak.logits,
        "half-precision copies": peak.copies,
        "temporaries": peak.temporaries,
    }
    return parts | around(step, parts)


def _stage_moments(
    own: StepShape, index: int, stages: int, micro_batches: int, whole: float
) -> Iterator[StepMoment]:
    """Those of the stage; `whole`: bytes of its gradients.

    With more micro-batches than stages, memory peaks with gradients. Otherwise it peaks once, before the first
    gradient.
    """
    full = stages - index
    if micro_batches <= full:
        head = own.config.vocab_size * own.config.hidden_size * own.weight
        first = replace(own, accumulating=False)
        for moment in _stage_with_waiting(first, index, stages, micro_batches - 1):
            reached = moment.gradients - (0 if index == stages - 1 else head)
            yield replace(moment, gradients=max(0.0, min(reached, whole)))
    waiting = min(full, micro_batches - 1) - 1
    for moment in (
        _stage_with_waiting(replace(own, accumulating=True), index, stages, max(0, waiting))
        if micro_batches > 1
        else ()
    ):
        yield replace(moment, gradients=whole)


def _stage_with_waiting(
    own: StepShape, index: int, stages: int, waiting: int
) -> Iterator[StepMoment]:
    """The moments of a stage, with the micro-batches that wait for their backward.

    Each of them keeps its inputs and, under autocast, the half-precision copies of its own forward.
    """
    forward, logits, *layers, embeddings, update = moments(own)
    kept = waiting * (activation_bytes(own) + INPUT_BYTES * own.tokens_per_micro_batch)
    here = (
        [forward, logits, *layers]
        if index == stages - 1
        else [replace(forward, logits=0.0), *layers]
    )
    for moment in [*here, *([embeddings] if index == 0 else [])]:
        copies = moment.copies + waiting * logits.copies
        yield replace(moment, activations=moment.activations + kept, copies=copies)
    yield update
