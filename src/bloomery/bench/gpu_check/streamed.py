"""Part `stream`: weights that stream from host memory next to weights that stay, and a model that is above the card."""

import gc
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bloomery.bench import rig
from bloomery.bench.gpu_check.agreement import LORA, differences
from bloomery.bench.gpu_check.child import PartJob, rows_of
from bloomery.bench.gpu_check.endurance import planned
from bloomery.bench.gpu_check.results import Row
from bloomery.bench.gpu_check.small_runs import SmallRuns, machine_of
from bloomery.bench.gpu_check.speed import TINY_SIZES, capped
from bloomery.bench.gpu_check.streams import LAYERS
from bloomery.core.device import can, release_cached_memory, reset_peak_memory
from bloomery.core.units import GIB, MIB
from bloomery.hardware.probe_worker import best_seconds
from bloomery.model.adapters.lora import is_added
from bloomery.model.decoder import Decoder
from bloomery.plan.resolve import child_environment
from bloomery.plan.types import RunPlan
from bloomery.train.objectives.build import build_objective
from bloomery.train.process import set_up_process
from bloomery.train.state import build_state
from bloomery.train.step import StepPasses

REPEATS = 3  # of each streamed run whose bits are compared: a missing wait need not show at once
TINY_REPEATS = 1
LINK_BYTES = 256 * MIB
TINY_LINK_BYTES = MIB
SECONDS = 6.0  # of timing one setting
TINY_SECONDS = 0.1

# The model whose steps are timed with weights on the device and without: it fits on a card of 8 GB.
TIMED_RECIPE = "qwen2.5-1.5b-lora"
TIMED_SIZES = (
    "train.precision=bfloat16",
    "train.compile=false",
    "data.sequence_length=2048",
    "train.tokens_per_step=4096",
    "train.micro_batch_size=2",
)
# The model that is trained in full under a cap, in the shapes of Llama-3.1-8B: as many of its layers as the host holds.
LARGE_RECIPE = "llama3.1-8b-lora"
LARGE_CAP_GIB = 12.0
LARGE_SIZES = (
    "adapter.kind=none",
    "train.precision=bfloat16-pure",
    "train.compile=false",
    "optimizer.kind=adamw",
    "optimizer.state_dtype=int8",
    "data.sequence_length=2048",
    "train.tokens_per_step=4096",
    "train.micro_batch_size=2",
)
FULL_BYTES = (
    6.2  # per parameter: weight and gradient in bfloat16, two states of 8 bits with their scales
)
HOST_RESERVE = 4 * GIB  # for the system and the process


def streamed(job: PartJob) -> Iterator[Row]:
    """Rows of bits, of the link, of time next to weights that stay, and of a large model under a cap."""
    if not can(job.device, "streams"):
        yield Row(case="streams", outcome="skipped", message=f"{job.device} has no streams")
        return
    runs = SmallRuns(job.folder, job.device)
    yield from rows_of(
        job,
        [
            ("lora: bits", partial(_lora_row, job, runs)),
            ("full: gradients", partial(_gradients_row, job, runs)),
            ("full: losses", partial(_losses_row, job, runs)),
            ("link", partial(_link_row, job)),
            ("time", partial(_time_row, job)),
            ("8B in full", partial(_large_row, job)),
        ],
    )


def with_stream(plan: RunPlan, stream: str) -> RunPlan:
    """The plan with weights that stream, or that stay; both compute layers again in backward."""
    changes = {"stream": stream, "activation_checkpointing": "full", "compile": False}
    return plan.model_copy(update={"train": plan.train.model_copy(update=changes)})


def _both(runs: SmallRuns, *overrides: str) -> tuple[RunPlan, RunPlan]:
    """The plan of a small model with weights that stay on the device, and with weights that stream."""
    plan = runs.on_device(runs.plan("texts", *LAYERS, "train.micro_batch_size=8", *overrides))
    return with_stream(plan, "off"), with_stream(plan, "layers")


# Bits


def _lora_row(job: PartJob, runs: SmallRuns) -> Row:
    resident_plan, streamed_plan = _both(runs, *LORA)
    resident = runs.run(resident_plan)
    repeats = [runs.run(streamed_plan) for _ in range(TINY_REPEATS if job.tiny else REPEATS)]
    others = [number for number, run in enumerate(repeats, 1) if run.tensors != resident.tensors]
    message = ""
    if others:
        losses = " ".join(f"{loss:.6g}" for loss in repeats[others[0] - 1].losses.values())
        expected = " ".join(f"{loss:.6g}" for loss in resident.losses.values())
        message = f"run {others[0]} of {len(repeats)}: losses {losses}, not streamed {expected}"
    return Row(
        case="lora: bits",
        outcome="wrong" if others else "ok",
        message=message,
        numbers={"repeats": len(repeats), "same_bits": not others},
    )


def _gradients_row(job: PartJob, runs: SmallRuns) -> Row:
    """Of two micro-batches, before an update: the host updates weights with roundings of its own."""
    resident_plan, streamed_plan = _both(runs)
    expected = _gradients(resident_plan)
    num_repeats = TINY_REPEATS if job.tiny else REPEATS
    others = set[str]()
    for _ in range(num_repeats):
        gradients = _gradients(streamed_plan)
        others |= {name for name in expected if not torch.equal(gradients[name], expected[name])}
    message = ""
    if others:
        message = f"{len(others)} of {len(expected)} gradients differ: {min(others)}"
    return Row(
        case="full: gradients",
        outcome="wrong" if others else "ok",
        message=message,
        numbers={"repeats": num_repeats, "tensors": len(expected), "same_bits": not others},
    )


def _gradients(plan: RunPlan) -> dict[str, torch.Tensor]:
    set_up_process(plan.train, memory_limit=plan.memory.limit)
    model_and_optimizer = build_state(plan).model_and_optimizer
    batches = rig.longest_batches(plan, 2)
    passes = StepPasses(
        model_and_optimizer,
        build_objective(plan),
        plan.train,
        position=0,
        lr_scale=1.0,
        scale_factor=1.0,
        num_targets=sum(float(batch.loss_mask.sum()) for batch in batches),
    )
    for number, batch in enumerate(batches):
        passes.backward([passes.forward(number, batch)])
    model = model_and_optimizer.model
    if model.weight_stream is not None:
        model.weight_stream.settle()
    return {
        name: parameter.grad.detach().cpu().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _losses_row(job: PartJob, runs: SmallRuns) -> Row:
    del job
    resident_plan, streamed_plan = _both(runs)
    resident = runs.run(resident_plan)
    run = runs.run(streamed_plan)
    numbers, problem = differences(resident, run, resident_plan.train.precision)
    if problem:
        losses, expected = (
            " ".join(f"{loss:.6g}" for loss in numbers_of.losses.values())
            for numbers_of in (run, resident)
        )
        problem = f"losses {losses}, not streamed {expected}"
    numbers["same_bits"] = run.tensors == resident.tensors
    return Row(
        case="full: losses",
        outcome="wrong" if problem else "ok",
        message=problem,
        numbers=numbers,
    )


# Time


def link_gbs(device: str, num_bytes: int) -> dict[str, float]:
    """GB/s of copies of so many bytes between the host and the device, the best of several."""
    on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    pageable = torch.zeros(num_bytes, dtype=torch.uint8)
    pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    copies = {
        "to_device": (on_device, pinned),
        "from_device": (pinned, on_device),
        "pageable_to_device": (on_device, pageable),
        "pageable_from_device": (pageable, on_device),
    }
    return {
        name: num_bytes
        / best_seconds(partial(target.copy_, source, non_blocking=True), device)
        / 1e9
        for name, (target, source) in copies.items()
    }


def _link_row(job: PartJob) -> Row:
    num_bytes = TINY_LINK_BYTES if job.tiny else LINK_BYTES
    rates = link_gbs(job.device, num_bytes)
    return Row(
        case="link",
        numbers={f"{name}_gb_per_second": rate for name, rate in rates.items()}
        | {"mib": num_bytes / MIB},
    )


def _measured(job: PartJob, plan: RunPlan) -> dict[str, Any]:
    gc.collect()
    release_cached_memory()
    reset_peak_memory(job.device)
    os.environ.update(child_environment(plan, os.environ))
    seconds = TINY_SECONDS if job.tiny else SECONDS
    return rig.measure(
        {
            "plan": plan.model_dump(mode="json"),
            "seconds": seconds,
            "text": "random",
            "learns": False,
        },
        on_phase=lambda phase: job.begin(f"{plan.train.stream}: {phase}"),
        draw=draw_alike,
    )


def _time_row(job: PartJob) -> Row:
    """Of LoRA steps: how much longer they take when frozen weights come over the link in each pass."""
    machine = machine_of(job.device)
    plan = (
        planned(f"{LARGE_RECIPE}-tiny", TINY_SIZES, machine)
        if job.tiny
        else planned(TIMED_RECIPE, TIMED_SIZES, machine)
    )
    numbers: dict[str, Any] = {"tokens": plan.train.tokens_per_step}
    seconds: dict[str, float] = {}
    for stream, name in (("off", "resident"), ("layers", "streamed")):
        measurement = _measured(job, with_stream(plan, stream))
        seconds[name] = statistics.median(measurement["step_seconds"])
        numbers |= {f"{name}_seconds": seconds[name], f"{name}_gib": measurement["peak_gib"]}
    numbers["times_as_long"] = seconds["streamed"] / seconds["resident"]
    return Row(case="time", numbers=numbers)


# A model above the card


def large_plan(job: PartJob) -> RunPlan:
    """Full training in the shapes of Llama-3.1-8B under the cap, with as many layers as the host has memory for."""
    machine = machine_of(job.device)
    if job.tiny:
        plan = planned(f"{LARGE_RECIPE}-tiny", (*TINY_SIZES, "adapter.kind=none"), machine)
        return with_stream(plan, "layers")
    plan = planned(LARGE_RECIPE, LARGE_SIZES, capped(machine, LARGE_CAP_GIB))
    config = plan.model.config
    num_layers = min(config.num_layers, layers_that_fit(plan, machine.host.memory_free_bytes))
    limit = min(LARGE_CAP_GIB * GIB, plan.memory.limit)
    model = plan.model.model_copy(update={"config": replace(config, num_layers=num_layers)})
    memory = plan.memory.model_copy(update={"limit": limit})
    return with_stream(plan.model_copy(update={"model": model, "memory": memory}), "layers")


def layers_that_fit(plan: RunPlan, host_bytes: float) -> int:
    """How many layers the host holds next to the embedding and the head."""
    with torch.device("meta"):
        model = Decoder(plan.model.config)
    in_layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    outside = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if not name.startswith("model.layers.")
    )
    return max(
        0, math.floor((host_bytes - HOST_RESERVE - outside * FULL_BYTES) / (in_layer * FULL_BYTES))
    )


def _large_row(job: PartJob) -> Row:
    case = "8B in full"
    plan = large_plan(job)
    num_layers = plan.model.config.num_layers
    if num_layers < 2:
        return Row(case=case, outcome="skipped", message="too little host memory for two layers")
    measurement = _measured(job, plan)
    step_seconds = statistics.median(measurement["step_seconds"])
    numbers = {
        "layers": num_layers,
        "tokens_per_second": plan.train.tokens_per_step / step_seconds,
        "seconds": step_seconds,
        "peak_gib": measurement["peak_gib"],
        "cap_gib": plan.memory.limit / GIB,
        "held_gib": measurement["reserved_gib"],
    }
    held_gib = measurement["reserved_gib"]
    if held_gib is not None and held_gib > numbers["cap_gib"]:
        message = f"the allocator held {held_gib:.2f} GiB of {numbers['cap_gib']:.2f}"
        return Row(case=case, outcome="wrong", message=message, numbers=numbers)
    return Row(case=case, numbers=numbers)


def draw_alike(model: Decoder, seed: int) -> None:
    """Weights of the right size whose numbers repeat: to draw billions on the host would take minutes."""
    std = model.config.initializer_range
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.empty(2**20).normal_(0.0, std, generator=generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_added(name):
                continue
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
                continue
            values = numbers.to(parameter.device, parameter.dtype)
            for piece in parameter.view(-1).split(values.numel()):
                piece.copy_(values[: piece.numel()])
