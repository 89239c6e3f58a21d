"""Lines of a plan's page about devices, what joins them, and the layouts over several."""

from collections.abc import Iterator

from bloomery.core.units import GIB, counted, format_bytes, two_digits
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile
from bloomery.plan.mesh import undivided
from bloomery.plan.page_text import SHORT_NAMES, joined
from bloomery.plan.types import LayoutPlan, ParallelPlan, RunPlan


def device_lines(plan: RunPlan, profile: Profile, machine: Machine) -> list[str]:
    """The device, and how many of it; of unequal GPUs a line or more each, in the order of ranks."""
    mesh = plan.parallel
    if profile.accelerator is None:
        host = machine.host
        kind = profile.cpu.name if profile.cpu else "no vector instructions of the table"
        memory = f"{format_bytes(host.memory_free_bytes)} of {format_bytes(host.memory_bytes)} free"
        return [f"{host.cpu_cores} cores · {host.cpu_name} · {kind} · {memory}"]
    count = (
        "1"
        if mesh is None
        else f"{mesh.nodes} nodes of {mesh.gpus}"
        if mesh.nodes > 1
        else str(mesh.gpus)
    )
    dtype = profile.dtype.value
    if profile.peers:
        return [line for peer in profile.peers for line in _gpu_lines(peer, dtype, "1")]
    return _gpu_lines(profile, dtype, count)


def link_lines(plan: RunPlan, profile: Profile) -> list[str]:
    """What joins several GPUs, and their nodes."""
    mesh = plan.parallel
    if mesh is None or profile.accelerator is None:
        return []
    network = joined([f"nodes by {mesh.network}"]) if mesh.network else []
    return [*joined([f"joined by {mesh.link}"]), *network]


def _gpu_lines(profile: Profile, dtype: str, count: str) -> list[str]:
    """So many GPUs of one model. `dtype`: of the plan's matmuls."""
    device = profile.accelerator
    gpu = profile.gpu
    arch = profile.arch
    assert device is not None, "a GPU"
    facts = [
        f"{count} x {device.name}",
        device.arch,
        f"{device.usable_bytes / GIB:.2f} GiB".replace(".00 ", " "),
    ]
    if gpu is not None:
        peak = gpu.peak_flops(dtype)
        facts.append(f"{gpu.bandwidth_gbs:,.0f} GB/s")
        rate = "no rate published" if peak is None else f"{peak / 1e12:,.1f} TFLOP/s"
        facts.append(f"{rate} {SHORT_NAMES[dtype]}" if peak is not None else rate)
    facts[-1] += "" if arch is None else f", {arch.matrix_units or 'no matrix units'}"
    return joined(facts)


def mesh_lines(mesh: ParallelPlan, plan: RunPlan) -> Iterator[str]:
    """A line for each layout: split, memory of a device, speed of all, exposed communication; then the reason."""
    yield f"{'':<41}{'micro-batch':>11}{'GiB each':>9}{'tokens/s':>12}{'exposed':>9}{'bubble':>7}"
    for index, layout in enumerate(mesh.layouts):
        yield ("> " if index == mesh.chosen else "  ") + _layout(layout, plan)
    yield f"> {mesh.layouts[mesh.chosen].name}: {mesh.reason}"
    yield from _stage_lines(mesh.layout)
    padding = plan.train.empty_sequences
    sequences = plan.train.sequences_per_step
    if padding:
        yield f"{undivided(sequences, plan.train.readers)}:"
        yield f"{padding:,} of {sequences + padding:,} that they compute are padding, of zero weight"


def _stage_lines(layout: LayoutPlan) -> Iterator[str]:
    """Of a pipeline: the layers of each stage, the micro-batches that go through them, and why layers are uneven."""
    if layout.pipeline == 1:
        return
    by_stage = layout.stage_layers
    groups = f" in {layout.pipeline_chunks} groups each" if layout.pipeline_chunks > 1 else ""
    micro_batches = counted(layout.accumulation, "micro-batches")
    yield from joined(
        [
            f"{layout.pipeline_schedule}: {micro_batches} per step",
            f"stages of {', '.join(map(str, by_stage))} layers{groups}",
            f"stage {layout.fullest_stage + 1} needs most memory",
        ]
    )
    if layout.stage_devices:
        stages = enumerate(layout.stage_devices, start=1)
        yield from joined([f"stage {number} on {name}" for number, name in stages])
        yield "cut by the speed and the memory of each GPU; not run on such hardware"
        return
    if max(by_stage) - min(by_stage) > 1:
        reason = "the first stages hold more micro-batches"
        if by_stage[-1] == min(by_stage):
            reason = "the last stage has the head, too"
        yield f"an uneven cut: {reason}"


def _layout(layout: LayoutPlan, plan: RunPlan) -> str:
    sizes = ((layout.replicate, "copies"), (layout.shard, "shards"), (layout.pipeline, "stages"))
    split = " x ".join(f"{count} {word}" for count, word in sizes if count > 1)
    if min(layout.replicate, layout.shard, layout.pipeline) > 1:
        split = f"{layout.replicate} x {layout.shard} shards x {layout.pipeline} stages"
    if layout.context > 1:
        split += f", context {layout.context}"
    if layout.expert > 1:
        split += f", experts over {layout.expert}"
    head = f"{f'{layout.name} ({split})':<39}{f'{layout.micro_batch_size} x {layout.accumulation}':>11}"
    head += f"{layout.memory.total / GIB:>9.1f}"
    step = layout.step_seconds
    if not layout.memory.fits:
        return f"{head}   does not fit"
    if step is None:
        return f"{head}   speed unknown"
    rate = two_digits(plan.trained_tokens_per_step / step.value)
    return f"{head}{rate:>12}{layout.exposed_seconds / step.value:>9.0%}{layout.bubble_seconds / step.value:>7.0%}"
