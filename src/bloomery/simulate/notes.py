"""What a simulated figure does not know, in sentences for the plan's page."""

from bloomery.plan.types import Plan
from bloomery.simulate.gpu_kernels import FLASH_LIKE
from bloomery.simulate.shards import Cut


def notes_of(plan: Plan, *, fused: bool, cut: Cut) -> list[str]:
    """What stands in for something else; nothing where the code ran as it is."""
    notes, gpu, attention = [], plan.train.device != "cpu", plan.model.attention
    if gpu and attention in FLASH_LIKE and fused:
        notes.append(f"{attention} attention is counted as FlashAttention-2 keeps it: its kernel needs the GPU")
    elif gpu and attention in FLASH_LIKE | {"mask"}:
        notes.append(f"{attention} attention is counted with every score kept: this GPU has no fused kernel")
    if plan.train.compile:
        notes.append("compiled blocks are counted as torch.compile cuts their graphs, without its kernels")
    if cut.shard > 1:
        notes.append(f"FSDP2 cuts weights, gradients and states over {cut.shard} devices, {_copies(cut)}")
    elif cut.pipeline > 1:
        notes.append(f"stages are simulated one by one, with what 1F1B has under way on each{_beside(cut)}")
    elif cut.replicate > 1:
        notes.append(f"one of {cut.replicate} whole copies; the buckets in which gradients are summed are not in it")
    return notes


def _beside(cut: Cut) -> str:
    return f"; of {cut.replicate} copies one, without the buckets of gradients" if cut.replicate > 1 else ""


def _copies(cut: Cut) -> str:
    whole = "on a process group of that size that is not there"
    return whole if cut.replicate == 1 else f"in {cut.replicate} copies, on a process group that is not there"
