"""Layouts over several devices, side by side."""

from collections.abc import Iterator

from bloomery.plan.types import LayoutPlan, MeshPlan, Plan
from bloomery.units import GIB


def mesh_lines(mesh: MeshPlan, plan: Plan) -> Iterator[str]:
    """One line a layout: what it splits, memory of a device, speed of all, what waits; then the choice's reason."""
    yield f"{'':<41}{'micro-batch':>11}{'GiB each':>9}{'tokens/s':>12}{'exposed':>9}{'bubble':>7}"
    for index, layout in enumerate(mesh.layouts):
        yield ("> " if index == mesh.chosen else "  ") + _row(layout, plan)
    yield f"> {mesh.layouts[mesh.chosen].name}: {mesh.because}"
    rows, length = plan.train.tokens_per_step // plan.data.sequence_length, plan.data.sequence_length
    if rows < mesh.devices:
        yield f"{rows} rows a step are too few for {mesh.devices:,} devices to read their own:"
        yield f"replicate and shard begin at train.tokens_per_step={mesh.devices * length}"


def _row(layout: LayoutPlan, plan: Plan) -> str:
    split = " x ".join(
        f"{count} {word}"
        for count, word in ((layout.replicate, "copies"), (layout.shard, "shards"), (layout.pipeline, "stages"))
        if count > 1
    )
    head = f"{f'{layout.name} ({split})':<39}{f'{layout.micro_batch} x {layout.accumulation}':>11}"
    head += f"{layout.memory.total / GIB:>9.1f}"
    step = layout.step_seconds
    if not layout.memory.fits:
        return f"{head}   does not fit"
    if step is None:
        return f"{head}   speed unknown"
    rate = float(f"{plan.train.tokens_per_step / step.value:.2g}")
    return f"{head}{rate:>12,.0f}{layout.exposed_seconds / step.value:>9.0%}{layout.bubble_seconds / step.value:>7.0%}"
