"""Starts the simulation in a child, so that whoever plans never imports torch, and waits no longer than allowed."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bloomery.errors import UserError
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.plan.types import LayoutPlan, Plan

SECONDS = 300.0  # that a simulation may take; the packaged recipes take under 20
MODULE = "bloomery.simulate.child"


@dataclass(frozen=True)
class Simulated:
    """Bytes of live tensors on one device at the peak of a step, by what holds them; no parts: not simulated."""

    parts: dict[str, float]
    notes: tuple[str, ...]  # what stands in for a kernel, and what is not in the figure
    seconds: float = 0.0  # that it took

    @property
    def peak(self) -> float:
        """What torch.cuda.max_memory_allocated counts and `MemoryEstimate.allocated` foretells."""
        return sum(self.parts.values())


def simulate(
    plan: Plan,
    machine: Machine,
    *,
    seconds: float = SECONDS,
    progress: Callable[[str], None] = lambda _text: None,
) -> Simulated:
    """Runs two steps of the plan's own code on fake tensors for its device, which need not be here; the second's peak.

    Of several devices the first is simulated, in a process group of the layout's size that is not there: where the
    layout shards, FSDP2 cuts weights, gradients and states block by block. `progress` gets a line when a step begins.
    Raises UserError without torch, after `seconds`, and when the simulation fails.
    """
    if find_spec("torch") is None:
        raise UserError(
            "the simulation runs the training code itself, and PyTorch is not installed here",
            remedy="run `bloomery doctor`, which says how to install it; the plan without --simulate needs none",
        )
    layout = None if plan.mesh is None else plan.mesh.layouts[plan.mesh.chosen]
    if layout is not None and layout.pipeline > 1:
        return Simulated({}, ("not yet for a pipeline: the stages of this layout are counted from shapes alone",))
    started = time.monotonic()
    fused = build_profile(machine).attention.value == "fused"
    order = {"plan": plan.model_dump(mode="json"), "fused": fused, "cut": _cut(layout)}
    found: dict[str, Any] = {}
    for answer in _answers(json.dumps(order), seconds):
        if "doing" in answer:
            progress(f"simulating on fake tensors: {answer['doing']}")
        else:
            found = answer
    return Simulated(found["parts"], tuple(found["notes"]), time.monotonic() - started)


def _cut(layout: LayoutPlan | None) -> tuple[int, int]:
    """Copies and shards."""
    return (1, 1) if layout is None else (layout.replicate, layout.shard)


def _answers(order: str, seconds: float) -> Iterator[dict[str, Any]]:
    """The child's lines, as they come. Raises UserError when it dies, of its own alarm clock too."""
    with tempfile.TemporaryDirectory(prefix="bloomery-simulate-") as folder:
        given, errors = Path(folder) / "order.json", Path(folder) / "stderr"
        given.write_text(order, encoding="utf-8")
        words = [sys.executable, "-m", MODULE, str(given), str(seconds)]
        with errors.open("wb") as sink:
            child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=sink, text=True)
        try:
            assert child.stdout is not None
            yield from (json.loads(line) for line in child.stdout if line.startswith("{"))
            code = child.wait()
        finally:
            child.kill()  # nothing, once it has ended
            child.wait()
        if code:
            raise _failure(code, errors.read_text(encoding="utf-8", errors="replace"), seconds)


def _failure(code: int, errors: str, seconds: float) -> UserError:
    if code == -signal.SIGALRM:
        return UserError(
            f"the simulation took longer than {seconds:.0f} s and was ended",
            remedy="plan without --simulate, or simulate fewer layers: model.num_layers=4",
        )
    last = [line.strip() for line in errors.splitlines() if line.strip()][-1:] or [f"it ended with code {code}"]
    return UserError(
        f"the simulation failed: {last[0]}",
        remedy="plan without --simulate: the analytic figure stands without it",
    )
