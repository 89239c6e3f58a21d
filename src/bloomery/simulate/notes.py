"""What a simulated figure does not know, in sentences for the plan's page."""

from bloomery.plan.types import Plan
from bloomery.simulate.gpu_kernels import FLASH_LIKE


def notes_of(plan: Plan, *, fused: bool, shards: int) -> list[str]:
    """What stands in for something else; nothing where the code ran as it is."""
    notes, gpu, attention = [], plan.train.device != "cpu", plan.model.attention
    if gpu and attention in FLASH_LIKE and fused:
        notes.append(f"{attention} attention is counted as FlashAttention-2 keeps it: its kernel needs the GPU")
    elif gpu and attention in FLASH_LIKE | {"mask"}:
        notes.append(f"{attention} attention is counted with every score kept: this GPU has no fused kernel")
    if plan.train.compile:
        notes.append("compiled blocks are counted as torch.compile cuts their graphs, without its kernels")
    if shards > 1:
        cut = f"FSDP2 cuts weights, gradients and states over {shards} devices"
        notes.append(f"{cut}; the network's own buffers are not in it")
    if gpu:
        notes.append("the allocator's fragmentation and the runtime's own memory are not in it")
    return notes
