"""Bytes that a step keeps from forward for backward, layer by layer, and what passes through a layer in backward.

A frozen matrix needs its weight for the gradient of its input, and its input for nothing: what only a gradient of
weights would read is kept where a matrix learns or an adapter stands beside it.
"""

import math

from bloomery.model.counting import layers
from bloomery.plan.estimate.states import learns, reading_modules, trained_in_layer
from bloomery.plan.estimate.step_shape import Occupancy

TILE = 256  # queries and keys of a tile of blockwise attention: model.blockwise
TILE_SCORES = {False: 2**20, True: 2**23}  # scores that exist at once, by on_gpu: model.blockwise
TILE_BYTES = 15  # a score of a tile in backward: three of float32, 16 random bits and a mask
SHARING = (  # products of one input
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"),
)  # fmt: skip
MAKING, GPU_PIECE, CPU_PIECE = 6, 2**23, 2**17  # bytes of a weight that is turned back, and how many at once
INPUT_BYTES = 36  # a token: ids, labels, positions, documents, weight
SMALL_BYTES = 44  # a token: which labels are learned, their scores, sums and gradients


def activation_bytes(load: Occupancy) -> float:
    """What all layers keep for backward, before the first of them runs it."""
    return sum(kept_by_layer(load))


def kept_by_layer(load: Occupancy) -> list[float]:
    """Bytes that each layer keeps for backward."""
    mode, whole = load.checkpointing, layer_bytes(load)
    if mode == "none":
        return [whole] * load.config.num_layers
    stream = float(load.rows * load.config.hidden_size * load.stream)
    if mode == "selective":
        return [stream + load.rows * _product_bytes(load)] * load.config.num_layers
    every = 1 if mode == "full" else int(mode.removeprefix("every-"))
    return [whole if layer % every else stream for layer in range(load.config.num_layers)]


def kept_layers(checkpointing: str, num_layers: int) -> int:
    """Layers that compute nothing again: none under `full`, half of one's work under `selective`, all but each n-th."""
    if checkpointing == "none":
        return num_layers
    if checkpointing == "full":
        return 0
    if checkpointing == "selective":
        return num_layers - num_layers // 2
    return num_layers - math.ceil(num_layers / int(checkpointing.removeprefix("every-")))


def layer_bytes(load: Occupancy) -> float:
    """What one layer keeps for backward when nothing of it is computed again."""
    masks = load.element * load.sequence_length if load.attention == "mask" else 0  # added to scores: not booleans
    scores = score_matrix_bytes(load) if keeps_scores(load) else 0.0
    return load.rows * (layer_bytes_per_token(load) + masks) + scores


def layer_bytes_per_token(load: Occupancy) -> float:
    """Of one layer, without quadratic scores: 38 h for a GPT block with dropout in half precision on a GPU."""
    return _attention_bytes(load) + _norm_bytes(load) + _mlp_bytes(load) + _adapter_bytes(load)


def _norm_bytes(load: Occupancy) -> float:
    """Norms keep their inputs and a number or two a row; what dropout multiplies with stands here too.

    Inputs are the residual stream before a block's part and its half-precision result after it. A compiled block keeps
    the result of attention and computes the second sum of the residual stream again.
    """
    config, h = load.config, load.config.hidden_size
    stats = 8 if config.norm == "layer" else 4
    after = 4 if load.on_gpu and load.mixed and not load.compiled else load.element  # torch's kernel widens it
    inputs = {"before": [load.stream] * 2, "after": [after] * 2, "both": [load.stream, after, load.stream, after]}
    sizes = inputs[config.norm_placement]
    if load.compiled and config.norm_placement == "before":
        sizes = [load.stream, load.element]
    masked = 1 if load.on_gpu or load.compiled else load.element  # the CPU keeps what it multiplies with
    return sum(sizes) * h + stats * len(sizes) + (2 * masked * h if config.residual_dropout else 0)


def _attention_bytes(load: Occupancy) -> float:
    """Its input, q and attention's output, k and v, a log-sum-exp a head; a norm of q and k keeps its inputs."""
    config = load.config
    total = float(load.element * (2 * config.query_width + 2 * config.key_width))
    total += load.element * config.hidden_size if _keeps_input(load, "q_proj", "k_proj", "v_proj") else 0
    if config.qk_norm != "none":
        wide = 4 if load.on_gpu and load.mixed and not load.compiled else load.element
        total += wide * (config.query_width + config.key_width) + 4 * (config.num_heads + config.num_kv_heads)
    if not keeps_scores(load):
        total += 4 * config.num_heads
    elif load.attention != "math":  # PyTorch computes it in float32
        total += (4 - load.element) * (config.query_width + 2 * config.key_width)
    return total


def _mlp_bytes(load: Occupancy) -> float:
    """Its input, what enters and what leaves the activation, and for a gate the other factor and the product."""
    config = load.config
    inner = 4 if config.gated_mlp else 2
    if config.activation == "relu":  # it is differentiated from its result
        inner -= 1
    if config.gated_mlp and load.compiled:  # the activation is computed again
        inner = 3
    if not _keeps_input(load, "down_proj") and config.activation != "relu":
        inner -= 1
    enters = config.hidden_size if _keeps_input(load, "gate_proj", "up_proj") else 0
    return load.element * (enters + inner * config.intermediate_size)


def _keeps_input(load: Occupancy, *modules: str) -> bool:
    """Whether one of these products needs its input for a gradient of weights; behind dropout it keeps another."""
    return not load.way.frozen or not reading_modules(load.config, load.way).isdisjoint(modules)


def _adapter_bytes(load: Occupancy) -> float:
    """A layer's adapters keep what lies between their two products, and inputs that dropout made their own.

    DoRA's scaling keeps the result that it scales. In half precision each of PEFT's layers casts its input for itself,
    where ours share one.
    """
    config, way, e = load.config, load.way, load.element
    ranks = {name: rank for name, rank in way.pairs if name.startswith("model.layers.0.")}
    total = 0.0
    for matrix in layers(config)[0].matrices:
        rank = ranks.get(f"model.layers.0.{matrix.name}", 0)
        if rank:
            dropped = (e + (1 if load.on_gpu else e)) * matrix.inputs if way.dropout else 0
            total += e * rank * (2 if way.pissa else 1) + dropped + (e * matrix.outputs if way.dora else 0)
    if way.theirs and e < 4:
        sharing = [[name for name in group if f"model.layers.0.{name}" in ranks] for group in SHARING]
        total += e * config.hidden_size * sum(len(group) - 1 for group in sharing if group)
    return total


def _product_bytes(load: Occupancy) -> float:
    """Of one layer and token what `selective` keeps: results of products, and of attention."""
    config = load.config
    inner = (2 if config.gated_mlp else 1) * config.intermediate_size
    widths = 2 * config.query_width + 2 * config.key_width + 2 * config.hidden_size + inner
    return load.element * widths + 4 * config.num_heads


def end_bytes(load: Occupancy) -> float:
    """What is kept outside the layers: inputs, the last norm's input, the rows that are scored, the first dropout."""
    config = load.config
    masked = 1 if load.on_gpu else load.stream
    dropout = masked * config.hidden_size if config.embedding_dropout else 0
    return last_norm_bytes(load) + load.rows * (INPUT_BYTES + SMALL_BYTES + dropout)


def last_norm_bytes(load: Occupancy) -> float:
    return float(load.rows * load.config.hidden_size * (load.stream + load.element))


def backward_bytes(load: Occupancy) -> float:
    """What passes through a layer in backward: its MLP, with all that it kept, and then its attention with the rest."""
    config, e = load.config, load.element
    stream = load.stream * config.hidden_size
    inner = (2 if config.gated_mlp else 1) * config.intermediate_size
    all_sizes = {matrix.name: matrix.size for matrix in layers(config)[0].matrices}
    sizes = {
        name: size for name, size in all_sizes.items() if learns(config, load.way, f"model.layers.0.{name}.weight")
    }
    each = load.weight + (e if load.mixed else 0)
    fresh = float(max(sizes.values(), default=0) * each)  # a gradient before it is where it belongs
    if load.way.base != "none":
        read = max(all_sizes.values())  # a matrix while a product reads it; in its making there is no product yet
        making = MAKING * min(read, GPU_PIECE if load.on_gpu else CPU_PIECE)
        fresh += e * read + max(0.0, making - load.rows * e * config.hidden_size)
    mlp = load.rows * (stream + e * (config.hidden_size + inner)) + fresh
    behind = sum(size for name, size in sizes.items() if name.startswith("mlp."))
    if load.compiled and sizes:  # a graph hands all gradients of its layer out together
        behind = trained_in_layer(config, load.way)
    elif load.accumulating or load.way.in_backward:
        behind = 0
    ahead = load.rows * (stream + e * 2 * (config.query_width + config.key_width)) + behind * load.weight
    return max(mlp, ahead + attention_scratch(load) - load.rows * _mlp_bytes(load))


def attention_scratch(load: Occupancy) -> float:
    """What a kernel of attention takes in backward beside its gradients."""
    config = load.config
    if keeps_scores(load):
        return float(12 * config.num_heads * load.sequence_length * load.rows)  # three gradients of the scores, float32
    if load.attention == "blockwise":
        return _tile_bytes(load)
    if load.attention in ("per_document", "mask"):  # a gradient for each document, and then joined
        return float(load.element * load.rows * (config.query_width + 2 * config.key_width))
    return 4.0 * load.rows * config.query_width if load.on_gpu else 0.0  # flash sums the queries' gradient in float32


def _tile_bytes(load: Occupancy) -> float:
    config = load.config
    tile = config.num_heads * min(load.sequence_length, TILE) ** 2
    together = min(load.micro_batch, max(1, TILE_SCORES[load.on_gpu] // tile))  # rows
    copies = load.element * (3 * config.query_width + 2 * config.key_width) + 8 * config.key_width
    return float(together * (TILE_BYTES * tile + load.sequence_length * copies))


def keeps_scores(load: Occupancy) -> bool:
    """Whether attention holds a number for every pair of tokens: `math`, and PyTorch's CPU kernel under dropout."""
    fallback = not load.on_gpu and load.config.attention_dropout > 0 and load.attention in ("sdpa", "mask")
    return load.attention == "math" or fallback


def score_matrix_bytes(load: Occupancy) -> float:
    """What attention of a layer keeps when every score exists, computed in float32: softmax, dropout, their product."""
    dropped = load.config.attention_dropout > 0
    if load.attention != "math":
        each = 12  # PyTorch's: softmax, mask and product, all float32
    elif dropped:
        each = 4 + (1 if load.on_gpu else 4) + load.element
    else:
        each = 4 + (load.element if load.element < 4 else 0)
    return float(each * load.config.num_heads * load.sequence_length * load.rows)


def quadratic_bytes(load: Occupancy) -> float:
    """What PyTorch's fallback on a GPU keeps of a layer: softmax, dropout's mask and result, 5 a s^2 b."""
    each = 2 * load.element + 1 if load.config.attention_dropout else load.element
    return float(each * load.config.num_heads * load.sequence_length * load.rows)
