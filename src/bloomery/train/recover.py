"""What happens when memory runs out: nothing of the attempt is left, and the same work is done in smaller parts."""

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, final

import torch

from bloomery.core.units import GIB, format_bytes
from bloomery.hardware.detect.gpu_processes import Tenant, tenants
from bloomery.plan.fallback import Rung, smaller_evaluation, smaller_micro_batch
from bloomery.plan.types import Plan
from bloomery.train.process import out_of_memory
from bloomery.train.run import MemoryFull
from bloomery.train.state import TrainState, random_states, set_random_states

R = TypeVar("R")


@final
@dataclass(frozen=True)
class Full:
    """An attempt ended because memory ran out; `wanted` is what the allocator was asked for, "" when it did not say.

    `listed`: the file in the run's folder that says what filled memory, "" without one.
    """

    wanted: str
    listed: str = ""

    def __str__(self) -> str:
        return f"memory ran out ({self.wanted} more were wanted)" if self.wanted else "memory ran out"


def attempt(work: Callable[[], R], state: TrainState, listing: Callable[[], str] = str) -> R | Full:
    """What `work` returns; when memory runs out in it, `Full`, and the state is as before.

    `listing` is called while everything that filled memory is still there, and names the file where it wrote that.

    Gradients are dropped, random numbers put back, cached memory is given back to the device. What cannot be undone is
    an update that was cut short: `state.trainee.updating` says so.
    """
    random = random_states()
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        full = Full(_wanted(str(error)), listing())
    # Outside the handler: the traceback held every tensor of the attempt.
    state.trainee.optimizer.zero_grad()
    set_random_states(random)
    give_back()
    return full


def give_back() -> None:
    """Memory that nothing refers to any more goes back to the device; a compiled graph may sit in a cycle."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _wanted(text: str) -> str:
    """Of the allocator's own sentence; the CPU's says bytes, those of GPUs say GiB."""
    found = re.search(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]?i?B)", text, re.IGNORECASE)
    if found is None:
        return ""
    return format_bytes(int(float(found[1]))) if found[2].lower() == "bytes" else f"{found[1]} {found[2]}"


def smaller_step(plan: Plan, full: Full, *, step: int) -> Rung:
    """For the step after `step`. Raises MemoryFull when its micro-batches are single rows, or cannot be cut."""
    rung = smaller_micro_batch(plan, f"{full} in step {step + 1} with {plan.train.micro_batch}")
    if rung is None:
        raise MemoryFull(
            f"{full} in step {step + 1}, with {_rows(plan)} of {plan.data.sequence_length:,} tokens at once"
            + who_else(plan.train.device),
            where=f"train.micro_batch={plan.train.micro_batch}"
            + (f"; what filled memory is listed in {full.listed}" if full.listed else ""),
            remedy=_remedy(plan),
        )
    return rung


def smaller_look(plan: Plan, full: Full, *, step: int) -> Rung | None:
    """For the evaluation after `step`; None when it reads single rows already."""
    return smaller_evaluation(plan, f"{full} in the evaluation after step {step} with {plan.eval.micro_batch}")


def _rows(plan: Plan) -> str:
    rows = plan.train.micro_batch
    return "a single row" if rows == 1 else f"{rows} rows (an optimizer in backward takes them all at once)"


def _remedy(plan: Plan) -> str:
    """The plan's own remedies, cheapest first, and where it saw no need for any what always helps."""
    if plan.train.micro_batch > 1:
        rows = plan.train.micro_batch // 2
        return f"start again with train.micro_batch={rows} train.tokens_per_step={rows * plan.data.sequence_length}"
    edits = [remedy.edit for remedy in plan.remedies if not remedy.edit.startswith("train.micro_batch")]
    if not edits:
        train = plan.train
        edits += ["train.activation_checkpointing=full"] if train.activation_checkpointing != "full" else []
        edits += ["optimizer.kind=adafactor"] if plan.optimizer.kind == "adamw" else []
        edits += ["train.precision=auto"] if train.precision == "float32" and train.device != "cpu" else []
    words = " or ".join(edits) or "a smaller model"
    return (
        f"start again with {words}; `bloomery plan` says what each saves; shorter rows (data.sequence_length) come last"
    )


def who_else(device: str) -> str:
    """How much of this GPU others hold, and who is on GPUs here; "" when nobody does, and on the CPU."""
    if device != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    return told_tenants(tenants(), others=others, total=total)


def told_tenants(found: tuple[Tenant, ...], *, others: int, total: int) -> str:
    """To be added to a sentence. `others` is of one GPU, tenants are those of all.

    A GiB is left out: the driver's own context of this process takes about as much, and belongs to nobody else.
    """
    if others < GIB:
        return ""
    named = ", ".join(f"{tenant.name} (process {tenant.pid}) {format_bytes(tenant.bytes)}" for tenant in found[:3])
    used = f"; others use {format_bytes(others)} of this GPU's {format_bytes(total)}"
    return used + (f" (on the GPUs of this machine: {named})" if named else "")
