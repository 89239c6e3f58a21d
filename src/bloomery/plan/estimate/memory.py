"""Peak bytes of a step on one device by part: tensors, allocator, runtime."""

import math
from collections.abc import Mapping

from bloomery.core.units import MIB
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import parameter_count
from bloomery.plan.estimate.mode import TrainingMode
from bloomery.plan.estimate.moments import StepMoment, moments
from bloomery.plan.estimate.reference import reference_bytes
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.estimate.streaming import (
    in_full,
    resident_weight_bytes,
    ring_bytes,
    streamed_moments,
    teacher_shape,
)
from bloomery.plan.estimate.towers import TowerMemory, with_pictures
from bloomery.plan.types import MemoryEstimate, Origin

# Half the interval of an estimate from shapes alone.
SPREAD = 0.20
# Of a caching allocator, by whether it has expandable segments.
FRAGMENTATION = {True: 0.05, False: 0.15}

CPU_RUNTIME = 420 * MIB  # interpreter, PyTorch, buffers, malloc: docs/explanation/memory.md
CPU_COMPILER = 110 * MIB  # the modules and graphs of Dynamo and Inductor
CPU_PICTURES = 25 * MIB  # the imports of a tower and an image processor
CPU_PEFT = 60 * MIB  # the imports of PEFT
# Of activations and logits: docs/explanation/memory.md. Where tensors take the memory of freed ones, and where PyTorch
# asks malloc, by whether blocks are compiled.
CPU_FILLED = 0.06
CPU_FRAGMENTATION = {False: 0.45, True: 0.25}
# Of half-precision attention, for each length of a document: model.attention.per_document
CPU_KERNEL_BYTES = 3e6


def estimate_memory(step: StepShape, *, limit: float, origin: Origin = "table") -> MemoryEstimate:
    """Peak bytes of a step by part; the interval is 20% to each side."""
    parts = tensor_bytes(step)
    parts |= overhead_bytes(step, parts)
    return estimate_of(parts, limit=limit, origin=origin)


def estimate_of(
    parts: dict[str, float], *, limit: float, origin: Origin = "table"
) -> MemoryEstimate:
    total = sum(parts.values())
    return MemoryEstimate(
        parts=parts, low=total * (1 - SPREAD), high=total * (1 + SPREAD), limit=limit, origin=origin
    )


def overhead_bytes(step: StepShape, parts: Mapping[str, float]) -> dict[str, float]:
    """Bytes of the allocator and the runtime, in addition to tensors.

    malloc keeps memory that a layer frees between live tensors. Tensors of the next layer do not fit there where they
    are larger, or where PyTorch asks malloc for aligned memory: `model.compiled_memory`.
    """
    if step.on_gpu:
        return {
            "fragmentation": FRAGMENTATION[step.expandable] * sum(parts.values()),
            "context": step.context_bytes,
        }
    runtime = CPU_RUNTIME
    if step.mode.peft:
        runtime += CPU_PEFT
    if step.pictures is not None:
        runtime += CPU_PICTURES
    if step.compiled:
        runtime += CPU_COMPILER
    holes = CPU_FILLED if step.fills_freed else CPU_FRAGMENTATION[step.compiled]
    overhead = {
        "fragmentation": holes * (parts["activations"] + parts["logits"]),
        "runtime": runtime,
    }
    # Attention in half precision is computed document by document, with kernels for each length.
    if step.attention == "per_document" and step.element_bytes < 4:
        overhead["kernels"] = CPU_KERNEL_BYTES * document_lengths(step.sequence_length)
    return overhead


def document_lengths(length: int) -> int:
    """Distinct lengths after `per_document` attention pads documents: steps of 64 up to 1,024, then of an eighth of a
    power of two.
    """
    first_octaves = min(length, 1024)
    octaves = max(0.0, math.log2(max(1, length) / 1024))
    return -(-first_octaves // 64) + math.ceil(8 * octaves)


def tensor_bytes(step: StepShape) -> dict[str, float]:
    """Bytes of live tensors at the peak, without allocator and runtime."""
    all_moments = moments(step) if step.stream == "off" else streamed_moments(step)
    if step.pictures is not None:
        all_moments = with_pictures(step, step.pictures, all_moments)
    return tensors_at(step, max(all_moments, key=lambda moment: moment.total))


def teacher_parts(step: StepShape) -> dict[str, float]:
    """What a device with the head has of the teacher: its weights, and its hidden states where they are kept."""
    teacher_bytes = 0.0 if step.teacher is None else teacher_weight_bytes(step.teacher, step)
    if step.teacher_width is not None:
        teacher_bytes += step.teacher_tokens * step.teacher_width * step.element_bytes
    return {"teacher": teacher_bytes} if teacher_bytes else {}


def teacher_weight_bytes(teacher: ModelConfig, step: StepShape) -> float:
    """All of it in the dtype of matmuls, or with quantized matrices. Of one that streams: its buffers, and all that is
    no layer; of one that scores elsewhere: its output layer, where it has the tokenizer of the model.
    """
    if step.teacher_place == "away":
        return 0.0
    if step.teacher_place == "output":
        return float(teacher.vocab_size * teacher.hidden_size * step.element_bytes)
    if step.teacher_stream:
        streamed = teacher_shape(step, teacher)
        return resident_weight_bytes(streamed) + ring_bytes(streamed)
    if step.teacher_quantize == "none":
        return float(parameter_count(teacher) * step.element_bytes)
    mode = TrainingMode(freezes_model=True, quantize_kind=step.teacher_quantize)
    return TrainedModel(teacher, mode).weight_bytes(step.precision)


def tensors_at(step: StepShape, moment: StepMoment) -> dict[str, float]:
    """All live tensors at a moment."""
    model = step.model
    mode = step.mode
    is_offloaded = mode.offload and step.on_gpu
    parts = {"weights": model.weight_bytes(step.precision)}
    if step.stream != "off":
        is_offloaded = is_offloaded or in_full(step)
        parts = {
            "weights": resident_weight_bytes(step),
            "layer buffers": float(ring_bytes(step)),
        }
    if mode.frozen:
        parts["adapter"] = model.adapter_bytes
    parts["gradients"] = moment.gradients
    parts["optimizer"] = (
        0.0 if is_offloaded else model.optimizer_bytes(step.optimizer, step.precision)
    )
    parts["activations"] = moment.activations
    parts["logits"] = moment.logits
    parts |= teacher_parts(step)
    if step.pictures is not None:
        tower = TowerMemory(step, step.pictures)
        parts["optimizer"] += 0.0 if is_offloaded else tower.optimizer_bytes
        parts |= {"vision tower": tower.weight_bytes, "pictures": moment.pictures}
    if step.reference != "none":
        parts["reference model"] = reference_bytes(step)
    if step.mixed:
        parts["half-precision copies"] = moment.copies
    parts["temporaries"] = moment.temporaries
    return parts
