"""Parts `qlora`, `lora` and `full`: steps of the real shapes under a cap of memory, next to the plan."""

import math
import os
import statistics
from collections.abc import Iterator
from typing import Any

import torch

from bloomery.bench import rig
from bloomery.bench.gpu_check.child import PartJob, rows_of
from bloomery.bench.gpu_check.endurance import planned
from bloomery.bench.gpu_check.probing import QLORA
from bloomery.bench.gpu_check.results import Row
from bloomery.bench.gpu_check.small_runs import machine_of
from bloomery.core.device import is_accelerator
from bloomery.core.units import GIB
from bloomery.hardware.machine import Machine
from bloomery.model.adapters.lora import is_added
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import quantized_weights
from bloomery.plan.resolve import child_environment
from bloomery.plan.types import RunPlan

TARGETS = {"full": 22.0, "lora": 17.0, "qlora": 7.5}  # GiB
RECIPES = {"full": "llama2-7b-full-24gb", "lora": "llama3.1-8b-lora", "qlora": "llama3.1-8b-lora"}
METHOD_OVERRIDES = {"qlora": QLORA}
# The first length at which a slow card takes its micro-batches within the limit of the part, by the plan.
LENGTHS = (2048, 512)
TOKENS_PER_STEP = 8192
MICRO_BATCHES = 14  # of a measurement: warm-up, learning, and the timed ones
START_SECONDS = 25.0  # of a part: importing torch, drawing the weights
TINY_SIZES = (
    "data.sequence_length=64",
    "train.tokens_per_step=128",
    "train.micro_batch_size=auto",
    "train.compile=false",
)
SECONDS = 8.0  # of measuring
TINY_SECONDS = 0.1
# torchtune's README, measured by its authors: packed rows of 2,048 tokens, compiled.
PUBLISHED = {
    "full": "torchtune: RTX 4090 1,650 tokens/s in 18.9 GiB, RTX A6000 2,579 in 37.4",
    "lora": "torchtune: RTX 4090 3,083 tokens/s in 16.2 GiB, RTX A6000 4,699 in 30.3",
    "qlora": "torchtune: RTX 4090 2,413 tokens/s in 7.4 GiB",
}


def qlora(job: PartJob) -> Iterator[Row]:
    yield from rows_of(job, [("qlora", lambda: _measured_row("qlora", job))])


def lora(job: PartJob) -> Iterator[Row]:
    yield from rows_of(job, [("lora", lambda: _measured_row("lora", job))])


def full(job: PartJob) -> Iterator[Row]:
    yield from rows_of(job, [("full", lambda: _measured_row("full", job))])


def capped_plan(method: str, job: PartJob) -> RunPlan:
    """The recipe on this machine as if its card had the target's memory, with random weights, and the cap as limit."""
    machine = machine_of(job.device)
    method_overrides = METHOD_OVERRIDES.get(method, ())
    if job.tiny:
        return planned(f"{RECIPES[method]}-tiny", (*TINY_SIZES, *method_overrides), machine)
    for length in LENGTHS:
        sizes = (f"data.sequence_length={length}", f"train.tokens_per_step={TOKENS_PER_STEP}")
        # What is compared is a model on the card.
        overrides = (*sizes, "parallel.stream=off", *method_overrides)
        plan = planned(RECIPES[method], overrides, capped(machine, TARGETS[method]))
        if planned_seconds(plan) <= job.seconds:
            break
    limit = min(TARGETS[method] * GIB, plan.memory.limit)
    return plan.model_copy(update={"memory": plan.memory.model_copy(update={"limit": limit})})


def planned_seconds(plan: RunPlan) -> float:
    """What measuring the plan should take, with the start of its process; 0 where the plan has no estimate."""
    if plan.step_seconds is None:
        return 0.0
    return START_SECONDS + MICRO_BATCHES * plan.step_seconds.value / plan.train.accumulation


def capped(machine: Machine, gib: float) -> Machine:
    """The machine with so much memory on each card, and as much as its cards have where that is less."""
    cards = [
        card.model_copy(
            update={"memory_bytes": min(card.memory_bytes, int(gib * GIB)), "memory_used_bytes": 0}
        )
        for card in machine.accelerators
    ]
    return machine.model_copy(update={"accelerators": tuple(cards)})


def _measured_row(method: str, job: PartJob) -> Row:
    """Steps of the real loop on random tokens, as `bloomery bench` measures them. They must learn."""
    if not is_accelerator(job.device) and not job.tiny:
        return Row(case=method, outcome="skipped", message="no GPU that PyTorch can use")
    plan = capped_plan(method, job)
    card_bytes = max((card.usable_bytes for card in machine_of(job.device).accelerators), default=0)
    if not job.tiny and card_bytes / GIB < TARGETS[method] and not plan.memory.fits:
        message = f"needs {plan.memory.total / GIB:.1f} GiB, the card has {card_bytes / GIB:.1f}"
        return Row(case=method, outcome="skipped", message=message)
    os.environ.update(child_environment(plan, os.environ))
    measurement = rig.measure(
        {
            "plan": plan.model_dump(mode="json"),
            "seconds": TINY_SECONDS if job.tiny else SECONDS,
            "text": "random",
            "learns": True,
        },
        on_phase=lambda phase: job.begin(f"{method}: {phase}"),
        # On the processor, as a run draws them, 8 billion numbers would take the whole time.
        draw=draw_in_place,
    )
    step_seconds = statistics.median(measurement["step_seconds"])
    on_gpu = is_accelerator(plan.train.device)
    peak_gib = measurement["peak_gib"]
    numbers: dict[str, Any] = {
        "tokens_per_second": plan.train.tokens_per_step / step_seconds,
        "planned_tokens_per_second": plan.step_seconds.inverse(plan.train.tokens_per_step).value
        if plan.step_seconds
        else None,
        "peak_gib": peak_gib,
        "held_gib": measurement["reserved_gib"],
        "planned_gib": (plan.memory.allocated if on_gpu else plan.memory.total) / GIB,
        "cap_gib": plan.memory.limit / GIB,
        "sequence_length": plan.data.sequence_length,
        "micro_batch_size": plan.train.micro_batch_size,
        "accumulation": plan.train.accumulation,
        "checkpointing": plan.train.activation_checkpointing,
        "attention": plan.model.attention,
        "precision": plan.train.precision,
        "optimizer": plan.optimizer.kind,
        "compiled": plan.train.compile,
        "loss_before": measurement["learning"]["loss_before"],
        "loss_after": measurement["learning"]["loss_after"],
    }
    numbers = {name: value for name, value in numbers.items() if value is not None}
    held_gib = measurement["reserved_gib"] if on_gpu else None
    if not numbers["loss_after"] < numbers["loss_before"]:
        message = f"the loss rose from {numbers['loss_before']:.4f} to {numbers['loss_after']:.4f}"
        return Row(case=method, outcome="wrong", message=message, numbers=numbers)
    if held_gib is not None and held_gib > numbers["cap_gib"]:
        message = f"the allocator held {held_gib:.2f} GiB of {numbers['cap_gib']:.2f}"
        return Row(case=method, outcome="wrong", message=message, numbers=numbers)
    return Row(case=method, message="" if job.tiny else PUBLISHED[method], numbers=numbers)


def draw_in_place(model: Decoder, seed: int) -> None:
    """Random weights, drawn where they lie and in pieces: their sizes and places matter, and their numbers do not."""
    std = model.config.initializer_range
    device = model.model.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_added(name):
                continue
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, std, generator=generator)
        for name, weight in quantized_weights(model):
            weight.fill(_pieces(weight, std, generator), name=name)


def _pieces(weight: Any, std: float, generator: torch.Generator) -> Iterator[torch.Tensor]:
    rows = math.ceil(512 / weight.rows_at_once) * weight.rows_at_once
    for first in range(0, weight.outputs, rows):
        shape = min(rows, weight.outputs - first), weight.inputs
        pieces = torch.empty(shape, device=generator.device)
        yield pieces.normal_(0.0, std, generator=generator)
