"""Which rung of safety a run takes after its training process died, and where that is kept meanwhile. No torch."""

import json
import re
import signal
from dataclasses import dataclass
from typing import final

from pydantic import ValidationError

from bloomery.plan.fallback import Rung, blockwise, plainer, roomier, steadier
from bloomery.plan.store import read_sealed, write_sealed
from bloomery.plan.types import Plan
from bloomery.runs.folder import RunFolder
from bloomery.runs.supervisor import Ending
from bloomery.runs.worker import DIVERGED, FAILED, MEMORY_FULL, UNSOUND

MOST_RESTARTS = 3
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
# What a GPU's runtime, its libraries or the compiler say when a kernel fails, as opposed to a mistake of ours.
KERNEL = re.compile(
    r"(HIP|CUDA) error|\b(hip|cuda)Error\w+|HSA_STATUS_ERROR|Memory access fault|no kernel image|"
    r"\b(CUBLAS|HIPBLAS|ROCBLAS|CUDNN|MIOPEN)_STATUS_(?!ALLOC)|miopenStatus|"
    r"InductorError|BackendCompilerFailed|triton\.\w*[Cc]ompil\w*|PassManager::run failed|AcceleratorError"
)


@final
@dataclass(frozen=True)
class Descent:
    """A rung and why it is taken. `unasked`: training found its own memory full, and the rung costs only time."""

    rung: Rung
    because: str
    unasked: bool = False


def next_rung(plan: Plan, ending: Ending, *, bfloat16: bool = False) -> Descent | None:
    """None where a safer plan would not help: a mistake in the recipe, a full disk, text that is gone.

    `bfloat16`: whether the device multiplies it.
    """
    because = _cause(ending)
    if because is None:
        return None
    if ending.code in (-signal.SIGKILL, MEMORY_FULL):
        rung = roomier(plan, because)
    elif ending.code == DIVERGED:
        rung = steadier(plan, because, bfloat16=bfloat16)
    elif ending.code == UNSOUND:
        rung = blockwise(plan, because) or plainer(plan, because)
    else:
        rung = plainer(plan, because)
    return None if rung is None else Descent(rung, because, unasked=ending.code == MEMORY_FULL and rung.only_time)


def _cause(ending: Ending) -> str | None:
    if ending.stage != "train":
        return None
    if ending.code == -signal.SIGKILL:
        return "the system killed the training process (SIGKILL), as it does when memory runs out"
    if -ending.code in CRASHES:
        return f"the training process died of {signal.Signals(-ending.code).name}"
    if ending.report is not None and ending.code in (MEMORY_FULL, UNSOUND, DIVERGED):
        return str(ending.report["problem"])
    if ending.report is None and ending.code == FAILED:
        return next((line.strip()[:200] for line in reversed(ending.tail) if KERNEL.search(line)), None)
    return None


def keep(folder: RunFolder, descent: Descent) -> None:
    """For `bloomery resume RUN --recover`, which takes this rung before its first step."""
    kept = {"because": descent.because, "action": descent.rung.action, "plan": descent.rung.plan.model_dump_json()}
    write_sealed(folder.path, {folder.safer.name: json.dumps(kept)})


def take_kept(folder: RunFolder) -> Descent | None:
    """The rung that the last attempt left, once; None when there is none, or it is not one of this version."""
    try:
        kept = json.loads(read_sealed(folder.safer, remedy="delete it, and resume without --recover"))
        found = Descent(Rung(Plan.model_validate_json(kept["plan"]), kept["action"]), kept["because"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError, ValidationError):
        found = None
    folder.safer.unlink(missing_ok=True)
    return found
