"""Steps recorded in detail: when each operator ran, and what filled memory; by the plan, or when somebody asks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bloomery.data.loader import Batch
from bloomery.monitor.events import Emit, Phase, Warned
from bloomery.plan.types import Plan
from bloomery.train.live_tensors import write_memory
from bloomery.train.losses import LossParts
from bloomery.train.objectives import Objective
from bloomery.train.run import NOT_RECORDED, PROFILE, PROFILE_ASKED, asked_steps
from bloomery.train.step import Trainee

MOST_LISTS = 4  # of full memory, in one process
OPERATORS = 40  # that the table of times holds


@final
class Recorder:
    """Looks at a run without changing it. What cannot be written is warned of, and never ends the run."""

    def __init__(self, run_dir: Path, trainee: Trainee, emit: Emit) -> None:
        self._folder, self._request = run_dir / PROFILE, run_dir / PROFILE_ASKED
        self._trainee, self._emit = trainee, emit
        self._open: _Recording | None = None
        self._lists = 0
        self._request.unlink(missing_ok=True)  # of a process that ended before it heard

    @contextmanager
    def around(self, plan: Plan, step: int) -> Iterator[None]:
        """Around the work of this step: recorded when the plan or somebody's request names it."""
        self._begin(plan, step)
        yield
        if self._open is not None and step >= self._open.last:
            self.close()

    def _begin(self, plan: Plan, step: int) -> None:
        if self._open is not None:
            return
        planned = plan.monitor.trace_steps
        steps = asked_steps(self._request) or (planned[1] - step + 1 if planned and step >= planned[0] else 0)
        if steps <= 0:
            return
        self._request.unlink(missing_ok=True)
        self._emit(Phase(step=step - 1, name="profile", done=0, total=steps))
        self._open = _Recording(plan, step, step + steps - 1)

    def objective(self, objective: Objective) -> Objective:
        """Of this step; while steps are recorded, one that lists memory when the first forward is through."""
        recording = self._open
        if recording is None or recording.listed:
            return objective

        def loss(output: Tensor, batch: Batch) -> LossParts:
            parts = objective.loss(output, batch)
            if not recording.listed:
                recording.listed = True
                moment = f"step {recording.first}, between forward and backward of its first micro-batch"
                self._list(f"{self._name(recording.first)}", moment, recording.device)
            return parts

        return replace(objective, loss=loss)

    def memory_full(self, plan: Plan, step: int, where: str) -> str:
        """Called while all that filled memory is still there; the file's name in the run's folder, "" without one."""
        self._lists += 1
        if self._lists > MOST_LISTS:
            return ""
        name = f"{self._name(step)}-full-{self._lists}"
        told = self._list(name, f"memory ran out in {where}; what was there then", plan.train.device)
        return f"{PROFILE}/{name}.memory.txt" if told else ""

    def close(self) -> None:
        """Ends a recording, if there is one, and writes what it has."""
        recording, self._open = self._open, None
        if recording is None:
            return
        name = self._name(recording.first)
        try:
            recording.write(self._folder, name)
        except (OSError, RuntimeError) as error:
            self._warn(recording.last, error)
            return
        steps = recording.last - recording.first + 1
        self._emit(Phase(step=recording.last, name="profile", done=steps, total=steps))

    def _list(self, name: str, moment: str, device: str) -> bool:
        try:
            write_memory(self._trainee, self._folder / name, moment, device=device)
        except (OSError, RuntimeError, MemoryError) as error:
            self._warn(0, error)
            return False
        return True

    def _warn(self, step: int, error: BaseException) -> None:
        why = error.strerror if isinstance(error, OSError) else None
        self._emit(Warned(step=step, because=f"{NOT_RECORDED}: {why or str(error).strip() or type(error).__name__}"))

    @staticmethod
    def _name(step: int) -> str:
        return f"step-{step:08d}"


@final
class _Recording:
    """torch.profiler from the first step to the last."""

    def __init__(self, plan: Plan, first: int, last: int) -> None:
        self.first, self.last, self.device, self.listed = first, last, plan.train.device, False
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device == "cuda")
        if self.device == "cuda":
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=100_000)
        self._profile = profile(activities=kinds, profile_memory=True)
        self._began = time.perf_counter()
        self._profile.start()

    def write(self, folder: Path, name: str) -> None:
        """The trace as Chrome's and Perfetto's JSON, and a table of the operators. Raises OSError."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        self._profile.stop()
        if self.device == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
        folder.mkdir(exist_ok=True)
        self._profile.export_chrome_trace(str(folder / f"{name}.trace.json.gz"))
        steps = f"steps {self.first} to {self.last}" if self.last > self.first else f"step {self.first}"
        text = table(list(self._profile.key_averages()), f"{steps}, {seconds:.2f} s with the recording", self.device)
        (folder / f"{name}.operators.txt").write_text(text, encoding="utf-8")


def table(operators: list[Any], title: str, device: str) -> str:
    """The operators by the time spent in themselves; `operators` are torch's FunctionEventAvg."""

    def own(operator: Any) -> float:
        return float(operator.self_device_time_total if device == "cuda" else operator.self_cpu_time_total) / 1e6

    whole = sum(map(own, operators)) or 1.0
    lines = [title, "", f"{'operator':<56}{'calls':>8}{'seconds':>10}{'share':>7}"]
    for operator in sorted(operators, key=own, reverse=True)[:OPERATORS]:
        name = operator.key if len(operator.key) < 56 else operator.key[:52] + "..."
        lines.append(f"{name:<56}{operator.count:>8,}{own(operator):>10.3f}{own(operator) / whole:>7.0%}")
    return "\n".join(lines) + "\n"
