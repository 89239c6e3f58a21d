"""The kernels that a run computes with: C++ is compiled, and the tiles of Triton attention are chosen by time.

A tile decides the order of sums: with another one a resumed run would differ in its last bits.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bloomery.core.device import properties_of
from bloomery.core.errors import UserError
from bloomery.facts.counting import layers
from bloomery.infer.forward import matmul_dtype
from bloomery.model import compiled_pointwise, compiled_scores
from bloomery.model.attention import compiled
from bloomery.model.attention.tile_times import FILE, Gpu, Workload, fastest_tiles
from bloomery.model.attention.tiles import KERNELS, TileShape, tile_candidates, use_tile
from bloomery.model.attention.triton_attention import arch_of
from bloomery.model.mixers import compiled as compiled_mixers
from bloomery.model.native import Uncompiled
from bloomery.monitor.events import Emit, Warned
from bloomery.parallel.mesh import Mesh
from bloomery.plan.store import read_sealed, write_sealed
from bloomery.plan.types import DataPlan, ModelPlan, TrainPlan

# By kernel: the numbers of a TileShape, a list where they were JSON.
Tiles = Mapping[str, Sequence[int]]


def build_kernels(model: ModelPlan) -> float:
    """Compile what the plan computes with C++ of ours; returns the seconds that it took.

    It takes a few seconds once per machine, then the code is read from the cache.
    Raises UserError: the plan names the code of every result, and another would not resume to the same bits.
    """
    began = time.perf_counter()
    try:
        if model.scores == "compiled":
            compiled_scores.build()
        if model.attention == "compiled":
            compiled.build()
            compiled_pointwise.build()
            if {layer.mixer for layer in layers(model.config)} != {"attention"}:
                compiled_mixers.build()
    except Uncompiled as error:
        raise UserError(
            f"the C++ that this plan computes with cannot be compiled: {error}",
            where=f"attention: {model.attention}, log-probabilities: {model.scores}",
            fix=f"{error.fix or 'see the reason above'}; or set train.attention=per_document, which computes both in"
            " PyTorch",
        ) from error
    return time.perf_counter() - began


def tile_workload(model: ModelPlan, train: TrainPlan, data: DataPlan) -> Workload:
    """The attention of the plan's layers on one rank.

    Where heads differ in width it is that of the widest: the kernels of others take the first of the table.
    """
    config = model.config
    widest = max(layers(config), key=lambda layer: layer.head_dim)
    return Workload(
        heads=train.micro_batch_size * widest.num_heads // train.context,
        heads_per_key=widest.num_heads // widest.num_kv_heads,
        width=widest.head_dim,
        length=data.sequence_length,
        dtype=matmul_dtype(train.precision),
        packed=data.layout == "packed",
        softcap=config.attention_softcap,
        dropout=config.attention_dropout,
    )


def settle_tiles(
    model: ModelPlan,
    train: TrainPlan,
    data: DataPlan,
    run_dir: Path,
    mesh: Mesh,
    emit: Emit,
    *,
    resumes: bool,
) -> None:
    """Makes every rank compute with the tiles of the run, which `run_dir` keeps; of `triton` attention only.

    Warns where they could not be timed: once, as the run keeps those of the table.

    The first rank of each GPU architecture chooses: others would disturb its times, and might choose differently. A
    resumed run without the file computed with the table's first, and goes on with them.
    """
    if model.attention != "triton":
        return
    workload = tile_workload(model, train, data)
    device = train.device
    arch = arch_of(torch.device(device))
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
        if resumes and not run_tiles:
            chosen = first_tiles_of(workload, device)
        else:
            chosen = fastest_tiles_of(workload, device, note)
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
    use_tiles(run_tiles[arch], workload, device)


def fastest_tiles_of(
    workload: Workload, device: str, on_failure: Callable[[str], None] = lambda _reason: None
) -> Tiles:
    """The fastest on this GPU; the table's first where timing fails."""
    try:
        import triton
    except Exception as error:  # whatever a broken installation raises
        on_failure(f"Triton cannot be imported: {error}")
        return first_tiles_of(workload, device)

    torch_device = torch.device(device)
    gpu = Gpu(
        arch=arch_of(torch_device),
        name=properties_of(torch_device).name,
        triton=triton.__version__,
        torch=torch.__version__,
    )
    return fastest_tiles(gpu, workload, torch_device, on_failure=on_failure)


def first_tiles_of(workload: Workload, device: str) -> Tiles:
    """The table's first for this GPU."""
    arch = arch_of(torch.device(device))
    return {
        kernel: tile_candidates(kernel, arch=arch, width=workload.width)[0] for kernel in KERNELS
    }


def use_tiles(tiles: Tiles, workload: Workload, device: str) -> None:
    """From now on this process computes with them."""
    arch = arch_of(torch.device(device))
    for kernel, numbers in tiles.items():
        use_tile(kernel, TileShape(*numbers), arch=arch, width=workload.width)


def _of_run(run_dir: Path) -> Any:
    """By architecture; empty before the run's first choice. Raises UserError where the file has changed."""
    try:
        return json.loads(read_sealed(run_dir / FILE))
    except FileNotFoundError:
        return {}
