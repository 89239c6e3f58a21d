"""Limits that the runtime obeys and a plan counts with: pieces of work, bytes of quantized weights, and refusals.

A plan is made without torch and below training, so that the limits of optimizers are here too.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from bloomery.core.errors import UserError
from bloomery.facts.config import DeltaNet, ModelConfig

# Entries of the vocabulary whose logits exist at once on a CPU: a thousand rows of them stay in the caches, so that the
# passes between the matmuls cost little, and computing them twice is quicker than reading all 50,000 from memory.
CPU_TILE = 4096

# Logits that a CPU passes over at once where it compares two models: a megabyte each, some of which its caches hold.
CPU_BLOCK = 2**18

# Completions of a rollout that a rank decodes at once: more of them need more KV cache and are hardly faster on a CPU.
ROLLOUT_SLOTS = 64

# Blockwise attention computes tiles of so many queries and keys.
ATTENTION_BLOCK = 256
# Scores of such tiles that exist at once: as many as a CPU's caches hold, or enough to fill a GPU.
CPU_SCORES = 2**20
GPU_SCORES = 2**23

# Values of keys and values that a delta net computes at once. Backward needs 14 float32 numbers for each, for a moment:
# 120 MB on a CPU, 470 on a GPU, which is kept busy by them.
CPU_DELTA_VALUES = 2**21
GPU_DELTA_VALUES = 2**23

# Values that a native optimizer works on at once: 16 million (64 MiB of float32) keep a GPU busy, 128 thousand
# stay in a core's cache.
GPU_PIECE = 2**24
CPU_PIECE = 2**17
# Values of an int8 state that share a scale: arXiv:2110.02861 takes 2048, bitsandbytes 256 today.
INT8_BLOCK = 256
# Parameters with fewer values keep float32 moments, as in bitsandbytes: norms and biases are sensitive to rounding.
INT8_SMALLEST = 4096
# Values of the matrices that Muon orthogonalizes at once: enough to fill a GPU. Scratch: 100 MiB at most in bfloat16.
MUON_STACK = 2**24

# The smallest block of pinned host memory of a buffer for many tensors.
SMALLEST_PINNED_BLOCK = 2**20
PINNED_ALIGNMENT = 64  # bytes, of a tensor in such a block
# Blocks that offloaded activations fill one after the other: a power of two, of which the last alone is not full.
PINNED_CHUNK = 2**24

# Weights that stream: buffers of a layer on the device (one computes, one arrives), and layers whose gradients are
# under way at once, in the device's memory and in staging buffers.
STREAM_BUFFERS = 2
STREAM_STAGED = 2
# Pinned buffers through which weights pass that are not pinned, and the bytes of each: a few milliseconds of a link.
STREAM_STAGING_BUFFERS = 3
STREAM_STAGING_BYTES = 32 * 2**20

# Weights that share a scale (arXiv:2305.14314, section 3; the default of bitsandbytes).
WEIGHTS_BLOCK = 64
# Scales that share a scale of their own under double quantization (the same section).
SCALES_BLOCK = 256
SCALE_BYTES = 4  # float32
# Weights that are dequantized at once, and the scratch bytes of each in addition to its float. On a CPU they stay in
# its caches.
DEQUANTIZED_ON_CPU = 2**17
DEQUANTIZED_ON_GPU = 2**23
DEQUANTIZE_SCRATCH_BYTES = 6

# Implementations of dequantization; the first two are native.
Dequantizer = Literal["torch", "compiled", "bitsandbytes"]


def copies_chosen(num_pairs: int, num_experts: int) -> bool:
    """Whether a forward without a gradient copies the chosen experts of a layer alone, where experts stream.

    So many pairs of a token and an expert choose at most half of all. More of them would copy most, and wait for the
    choice, where the copy of all begins before it.
    """
    return 2 * num_pairs <= num_experts


def delta_net_groups(sizes: DeltaNet, tokens: int, *, on_cpu: bool) -> int:
    """In how many groups of equally many key heads, one after the other, a delta net computes its heads."""
    width = sizes.num_value_heads * (sizes.key_head_dim + sizes.value_head_dim)
    limit = CPU_DELTA_VALUES if on_cpu else GPU_DELTA_VALUES
    fewest = math.ceil(tokens * width / limit)
    divisors = (n for n in range(1, sizes.num_key_heads + 1) if sizes.num_key_heads % n == 0)
    return next((n for n in divisors if n >= fewest), sizes.num_key_heads)


def pinned_bytes(num_bytes: int) -> int:
    """What PyTorch pins for a request: the next power of two (ATen/core/CachingHostAllocator.h, `allocate`)."""
    return 1 << max(0, num_bytes - 1).bit_length()


def pinned_blocks(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Blocks of powers of two that hold tensors of these bytes, and for each tensor its block and its first byte there.

    One request for all would be rounded up to nearly twice as much, so the largest power of two that the rest fills is
    taken first, and so on. Large tensors come first, and small ones go where they leave room. A tensor that is larger
    than that power of two has a block of its own, rounded up.
    """
    blocks = list[int]()
    used = list[int]()
    places = [(0, 0)] * len(sizes)
    rest = sum(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        block = next((i for i, bytes_ in enumerate(blocks) if used[i] + size <= bytes_), None)
        if block is None:
            block = len(blocks)
            filled = 1 << max(0, rest.bit_length() - 1)
            blocks.append(max(SMALLEST_PINNED_BLOCK, filled, pinned_bytes(size)))
            used.append(0)
        places[index] = (block, used[block])
        used[block] += size
        rest -= size
    return blocks, places


def pinned_together(sizes: Sequence[int]) -> int:
    """Bytes that are pinned for tensors of these bytes, which lie in blocks together."""
    return sum(pinned_blocks([aligned_bytes(size) for size in sizes])[0])


def aligned_bytes(num_bytes: int) -> int:
    """Of a tensor in a block: the next one begins at a multiple of PINNED_ALIGNMENT."""
    return -(-num_bytes // PINNED_ALIGNMENT) * PINNED_ALIGNMENT


def pinned_chunks(num_bytes: float) -> int:
    """Bytes of the chunks that tensors of so many bytes fill, over whose ends they go on."""
    return math.ceil(num_bytes / PINNED_CHUNK) * PINNED_CHUNK


def storage_bytes(shape: Sequence[int], kind: str, double_quant: bool) -> int:
    """Bytes of a quantized weight of `shape`: exactly the buffers of `QuantizedWeight`."""
    return sum(buffer_bytes(math.prod(shape), kind, double_quant))


def buffer_bytes(count: int, kind: str, double_quant: bool) -> tuple[int, int, int]:
    """Bytes of the codes of `count` weights, of their scales, and of the scales of those scales (0 unless
    `double_quant`).
    """
    blocks = -(-count // WEIGHTS_BLOCK)
    if kind == "int8":
        return count, blocks * SCALE_BYTES, 0
    assert kind == "nf4"
    codes = -(-count // 2)
    if not double_quant:
        return codes, blocks * SCALE_BYTES, 0
    # One value more than blocks of scales: the mean that was subtracted from every scale.
    return codes, blocks, (-(-blocks // SCALES_BLOCK) + 1) * SCALE_BYTES


def split_int8_block(shapes: Mapping[str, Sequence[int]], shard: int) -> str | None:
    """The first parameter of which a block of an int8 state, whose values share a scale, spans two devices."""
    for name, shape in shapes.items():
        rows_per_device = -(-shape[0] // shard)
        values_per_device = rows_per_device * math.prod(shape[1:])
        if math.prod(shape) >= INT8_SMALLEST and values_per_device % INT8_BLOCK:
            return name
    return None


def refuse_split_int8_blocks(shapes: Mapping[str, Sequence[int]], shard: int) -> None:
    """Raises UserError where a block of an int8 state would span two devices."""
    name = split_int8_block(shapes, shard)
    if name is None:
        return
    raise UserError(
        f"int8 states need {INT8_BLOCK} numbers of a parameter together; "
        f"{shard} devices divide {name} {list(shapes[name])} elsewhere",
        where="optimizer.state_dtype",
        fix="set optimizer.state_dtype=bfloat16, or another parallel.shard",
        code=2,
    )


def refuse_teacher_length(teacher: ModelConfig, sequence_length: int, *, where: str) -> None:
    """Raises UserError when sequences are longer than the teacher's learned positions."""
    if teacher.positions == "learned" and sequence_length > teacher.max_positions:
        raise UserError(
            f"sequence length exceeds the teacher's {teacher.max_positions:,} learned positions: {sequence_length:,}",
            where=where,
            fix=f"set data.sequence_length={teacher.max_positions}, or choose another teacher",
        )


class Vocabulary(Protocol):
    """What two tokenizers are compared by."""

    @property
    def hash(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def decode(self, ids: list[int]) -> str: ...


def tokenizer_difference(teacher: Vocabulary, student: Vocabulary) -> str | None:
    """What an id means to the teacher, where that is another token than to the student; None where all are alike."""
    if teacher.hash == student.hash:
        return None
    shared_ids = range(min(teacher.vocab_size, student.vocab_size))
    different_id = next(
        (id_ for id_ in shared_ids if teacher.decode([id_]) != student.decode([id_])), None
    )
    if different_id is None and teacher.vocab_size == student.vocab_size:
        return None
    difference = f"{teacher.vocab_size:,} ids, not {student.vocab_size:,}"
    if different_id is not None:
        teacher_token = teacher.decode([different_id])
        student_token = student.decode([different_id])
        difference = f"id {different_id} is {teacher_token!r}, not {student_token!r}"
    return difference


def refuse_teacher_tokenizer(
    teacher: Vocabulary,
    student: Vocabulary,
    *,
    where: str,
    fix: str = "choose a teacher of the same family, with the same tokenizer",
) -> None:
    """Raises UserError when an id means another token to the teacher than to the student."""
    difference = tokenizer_difference(teacher, student)
    if difference is not None:
        raise UserError(f"the teacher has another tokenizer: {difference}", where=where, fix=fix)
