"""The tiles of a run's attention kernels: chosen at its start by time, and the same ones after a resume.

A tile decides the order of sums: with another one a resumed run would differ in its last bits.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bloomery.core.device import properties_of
from bloomery.infer.forward import matmul_dtype
from bloomery.model.attention.tile_times import FILE, Gpu, Workload, fastest_tiles
from bloomery.model.attention.tiles import KERNELS, TileShape, tile_candidates, use_tile
from bloomery.model.attention.triton_attention import arch_of
from bloomery.monitor.events import Emit, Warned
from bloomery.parallel.mesh import Mesh
from bloomery.plan.store import read_sealed, write_sealed
from bloomery.plan.types import RunPlan

# By kernel: the numbers of a TileShape, a list where they were JSON.
Tiles = Mapping[str, Sequence[int]]


def settle_tiles(plan: RunPlan, run_dir: Path, mesh: Mesh, emit: Emit, *, resumes: bool) -> None:
    """Makes every rank compute with the tiles of the run, which `run_dir` keeps; of `triton` attention only.

    Warns where they could not be timed: once, as the run keeps those of the table.

    The first rank of each GPU architecture chooses: others would disturb its times, and might choose differently. A
    resumed run without the file computed with the table's first, and goes on with them.
    """
    if plan.model.attention != "triton":
        return
    arch = arch_of(torch.device(plan.train.device))
    archs = mesh.all_gather_json(arch)
    run_tiles: dict[str, Tiles] = mesh.all_gather_json(
        _of_run(run_dir) if mesh.first_rank else None
    )[0]

    # The file says for each architecture: a run may have several, and moves to others.
    chosen: Tiles | None = None
    problem = ""

    def note(reason: str) -> None:
        nonlocal problem
        problem = reason

    if arch not in run_tiles and archs.index(arch) == mesh.rank:
        chosen = first_tiles_of(plan) if resumes and not run_tiles else fastest_tiles_of(plan, note)
    reason = next(filter(None, mesh.all_gather_json(problem)), "")
    if reason:
        warning = f"the tiles of the Triton attention kernels were not timed: {reason}"
        emit(Warned(reason=f"{warning}; the run takes the first of the table"))
    chosen_by_rank: list[Tiles | None] = mesh.all_gather_json(chosen)
    for rank_arch, tiles in zip(archs, chosen_by_rank, strict=True):
        if tiles is not None:
            run_tiles[rank_arch] = tiles
    if mesh.first_rank and any(chosen_by_rank):
        write_sealed(run_dir, {FILE: json.dumps(run_tiles, indent=1) + "\n"})
    use_tiles(plan, run_tiles[arch])


def fastest_tiles_of(
    plan: RunPlan, on_failure: Callable[[str], None] = lambda _reason: None
) -> Tiles:
    """The fastest on this GPU, for the shapes of the plan's layers; the table's first where timing fails."""
    try:
        import triton
    except Exception as error:  # whatever a broken installation raises
        on_failure(f"Triton cannot be imported: {error}")
        return first_tiles_of(plan)

    device = torch.device(plan.train.device)
    config = plan.model.config
    gpu = Gpu(
        arch=arch_of(device),
        name=properties_of(device).name,
        triton=triton.__version__,
        torch=torch.__version__,
    )
    workload = Workload(
        heads=plan.train.micro_batch_size * config.num_heads // plan.train.context,
        heads_per_key=config.num_heads // config.num_kv_heads,
        width=config.head_dim,
        length=plan.data.sequence_length,
        dtype=matmul_dtype(plan.train.precision),
        packed=plan.data.layout == "packed",
        softcap=config.attention_softcap,
        dropout=config.attention_dropout,
    )
    return fastest_tiles(gpu, workload, device, on_failure=on_failure)


def first_tiles_of(plan: RunPlan) -> Tiles:
    """The table's first for this GPU."""
    arch = arch_of(torch.device(plan.train.device))
    width = plan.model.config.head_dim
    return {kernel: tile_candidates(kernel, arch=arch, width=width)[0] for kernel in KERNELS}


def use_tiles(plan: RunPlan, tiles: Tiles) -> None:
    """From now on this process computes with them."""
    arch = arch_of(torch.device(plan.train.device))
    for kernel, numbers in tiles.items():
        use_tile(kernel, TileShape(*numbers), arch=arch, width=plan.model.config.head_dim)


def _of_run(run_dir: Path) -> Any:
    """By architecture; empty before the run's first choice. Raises UserError where the file has changed."""
    try:
        return json.loads(read_sealed(run_dir / FILE))
    except FileNotFoundError:
        return {}
