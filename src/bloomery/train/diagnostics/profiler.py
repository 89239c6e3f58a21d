"""Profiles of steps: operator times and tensors in memory, as planned, on request, and when out of memory."""

import gc
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bloomery.core.units import GIB, format_bytes
from bloomery.data.batch import Batch
from bloomery.monitor.events import Emit, Phase, Warned
from bloomery.plan.types import RunPlan
from bloomery.train.losses import LossParts
from bloomery.train.objectives import Objective
from bloomery.train.process import resident_gib
from bloomery.train.run import NOT_RECORDED, PROFILE, PROFILE_ASKED, asked_steps
from bloomery.train.step import ModelAndOptimizer

KEPT = "saved for backward"
OTHERS = "everything else"
GROUPS = 40  # of equal tensors in a list
SAVED_TENSORS_READABLE = hasattr(torch._C._autograd.SavedTensor, "data")  # absent from PyTorch 2.9
NAME = 56  # columns


@final
@dataclass(frozen=True)
class Live:
    """A storage: its purpose and its tensor."""

    purpose: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int


def live_tensors(model_and_optimizer: ModelAndOptimizer) -> list[Live]:
    """Each storage once. Activations are found through the autograd graphs of reachable tensors."""
    seen: set[int] = set()
    found = list(_new(_named(model_and_optimizer), seen))
    reachable = [thing for thing in gc.get_objects() if _is_tensor(thing)]
    found += (
        _new(((KEPT, tensor) for tensor in _kept(reachable)), seen)
        if SAVED_TENSORS_READABLE
        else ()
    )
    found += _new(((OTHERS, tensor) for tensor in reachable), seen)
    return found


def _is_tensor(thing: object) -> bool:
    """Exactly torch's two types: fake tensors hold no memory, and dead proxies raise."""
    return type(thing) in (Tensor, nn.Parameter)


def _named(model_and_optimizer: ModelAndOptimizer) -> Iterator[tuple[str, Tensor]]:
    parameters = list(model_and_optimizer.model.parameters())
    yield from (("weights", parameter) for parameter in parameters)
    # quantized weights
    yield from (("weights", buffer) for buffer in model_and_optimizer.model.buffers())
    yield from (
        ("gradients", parameter.grad) for parameter in parameters if parameter.grad is not None
    )
    yield from (
        ("optimizer", tensor) for tensor in model_and_optimizer.optimizer.named_tensors().values()
    )


def _new(named: Iterable[tuple[str, Tensor]], seen: set[int]) -> Iterator[Live]:
    for purpose, tensor in named:
        if not _is_tensor(tensor) or tensor.device.type == "meta" or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        try:
            place = storage.data_ptr()
        except RuntimeError:  # a fake tensor
            continue
        if place and place not in seen:
            seen.add(place)
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield Live(purpose, tuple(tensor.shape), dtype, str(tensor.device), storage.nbytes())


def _kept(reachable: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors that autograd saved in every node of these tensors' graphs."""
    waiting = [node for tensor in reachable if (node := tensor.grad_fn) is not None]
    visited = set(waiting)
    while waiting:
        node = waiting.pop()
        yield from _saved(node)
        above = [
            other for other, _ in node.next_functions if other is not None and other not in visited
        ]
        visited.update(above)
        waiting += above


def _saved(node: Any) -> Iterator[Tensor]:
    """Without the saved-tensor hooks, which would recompute a checkpointed block."""
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            value = getattr(node, name)
            raw = [
                one.data
                for one in (value if isinstance(value, tuple | list) else (value,))
                if one is not None
            ]
        except RuntimeError:  # freed by backward
            continue
        yield from (one for one in raw if isinstance(one, Tensor))


def page(tensors: list[Live], title: str, device: str) -> str:
    """A table of memory by purpose, then the largest groups of equal tensors."""
    unknown = f"unknown     tensors {KEPT}: not available in PyTorch {torch.__version__}"
    lines = [
        title,
        *_totals(device),
        *([] if SAVED_TENSORS_READABLE else [unknown]),
        "",
        f"{'purpose':<{NAME}}{'tensors':>9}{'memory':>13}",
    ]
    purposes = list(dict.fromkeys(live.purpose for live in tensors))
    for purpose in sorted(purposes, key=lambda purpose: -_bytes(tensors, purpose)):
        count = sum(live.purpose == purpose for live in tensors)
        lines.append(f"{purpose:<{NAME}}{count:>9,}{format_bytes(_bytes(tensors, purpose)):>13}")
    lines.append(
        f"{'total':<{NAME}}{len(tensors):>9,}{format_bytes(sum(live.bytes for live in tensors)):>13}"
    )
    ordered = sorted(Counter(tensors).items(), key=lambda pair: -pair[0].bytes * pair[1])
    lines += [
        "",
        f"{'largest groups of equal tensors':<{NAME}}{'tensors':>9}{'each':>13}{'memory':>13}",
    ]
    for live, count in ordered[:GROUPS]:
        name = f"{live.purpose}: {' x '.join(map(str, live.shape)) or 'scalar'} {live.dtype}"
        name += "" if live.device.startswith(device) else f", {live.device}"
        lines.append(
            f"{name:<{NAME}}{count:>9,}{format_bytes(live.bytes):>13}{format_bytes(live.bytes * count):>13}"
        )
    if len(ordered) > GROUPS:
        lines.append(f"and {len(ordered) - GROUPS:,} smaller groups")
    return "\n".join(lines) + "\n"


def _bytes(tensors: list[Live], purpose: str) -> int:
    return sum(live.bytes for live in tensors if live.purpose == purpose)


def _totals(device: str) -> Iterator[str]:
    """Memory that this process holds by now; on a GPU also its peak."""
    if device == "cuda":
        yield f"allocated   {torch.cuda.memory_allocated() / GIB:.3f} GiB by tensors, including kernel workspaces"
        yield f"reserved    {torch.cuda.memory_reserved() / GIB:.3f} GiB by PyTorch's allocator"
        yield f"peak        {torch.cuda.max_memory_allocated() / GIB:.3f} GiB allocated at most"
    else:
        yield f"resident    {resident_gib():.3f} GiB of the process, including libraries and the prepared dataset"


def write_memory(
    model_and_optimizer: ModelAndOptimizer, path: Path, title: str, *, device: str
) -> None:
    """Write `path`.memory.txt, and on a GPU `path`.memory.json with the allocator's blocks. Raises OSError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inspecting every object triggers deprecation warnings
        tensors = live_tensors(model_and_optimizer)
    path.parent.mkdir(exist_ok=True)
    path.with_name(path.name + ".memory.txt").write_text(
        page(tensors, title, device), encoding="utf-8"
    )
    if device == "cuda":  # torch's own format is a pickle
        blocks = torch.cuda.memory._snapshot()
        path.with_name(path.name + ".memory.json").write_text(
            json.dumps(blocks, default=str), encoding="utf-8"
        )


MOST_LISTS = 4  # memory lists per process
OPERATORS = 40  # in the table of times


@final
class Recorder:
    """Records profiles without changing the run. Failed writes emit warnings."""

    def __init__(
        self,
        run_dir: Path,
        model_and_optimizer: ModelAndOptimizer,
        emit: Emit,
        *,
        writes: bool = True,
    ) -> None:
        """`writes`: whether this rank records; only the first does."""
        self._writes = writes
        self._folder = run_dir / PROFILE
        self._request = run_dir / PROFILE_ASKED
        self._model_and_optimizer = model_and_optimizer
        self._emit = emit
        self._open: _Recording | None = None
        self._lists = 0
        if writes:
            self._request.unlink(missing_ok=True)  # a request to an earlier process

    @contextmanager
    def around(self, plan: RunPlan, step: int) -> Iterator[None]:
        """Wraps a step; records it if planned or requested."""
        planned = plan.logging.profile_steps
        if self._open is None and self._writes:
            steps = asked_steps(self._request) or (
                planned[1] - step + 1 if planned and step >= planned[0] else 0
            )
            if steps > 0:
                self._request.unlink(missing_ok=True)
                self._emit(Phase(step=step - 1, name="profile", done=0, total=steps))
                self._open = _Recording(plan, step, step + steps - 1)
        yield
        if self._open is not None and step >= self._open.last:
            self.close()

    def objective(self, objective: Objective) -> Objective:
        """The objective of this step; while recording, it lists memory after the first forward."""
        recording = self._open
        if recording is None or recording.listed:
            return objective

        def loss(output: Tensor, batch: Batch) -> LossParts:
            """Lists tensors once, where a step holds most: after the first forward."""
            parts = objective.loss(output, batch)
            if not recording.listed:
                recording.listed = True
                moment = (
                    f"step {recording.first}, between forward and backward of its first micro-batch"
                )
                self._list(f"{self._name(recording.first)}", moment, recording.device)
            return parts

        return replace(objective, loss=loss)

    def record_out_of_memory(self, plan: RunPlan, step: int, where: str) -> str:
        """List the tensors before they are freed; the file's name in the run folder, "" without one."""
        self._lists += 1
        if self._lists > MOST_LISTS:
            return ""
        name = f"{self._name(step)}-full-{self._lists}"
        written = self._list(
            name, f"tensors in memory when {where} ran out of memory", plan.train.device
        )
        return f"{PROFILE}/{name}.memory.txt" if written else ""

    def close(self) -> None:
        """End and write the current recording, if any."""
        recording = self._open
        self._open = None
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
        """Whether the list was written: a failure is a warning, and training continues."""
        try:
            write_memory(self._model_and_optimizer, self._folder / name, moment, device=device)
        except (OSError, RuntimeError, MemoryError) as error:
            self._warn(0, error)
            return False
        return True

    def _warn(self, step: int, error: BaseException) -> None:
        why = error.strerror if isinstance(error, OSError) else None
        self._emit(
            Warned(
                step=step,
                reason=f"{NOT_RECORDED}: {why or str(error).strip() or type(error).__name__}",
            )
        )

    @staticmethod
    def _name(step: int) -> str:
        return f"step-{step:08d}"


@final
class _Recording:
    """torch.profiler from the first step to the last."""

    def __init__(self, plan: RunPlan, first: int, last: int) -> None:
        self.first = first
        self.last = last
        self.device = plan.train.device
        self.listed = False
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device == "cuda")
        if self.device == "cuda":
            torch.cuda.memory._record_memory_history(
                context="alloc", stacks="python", max_entries=100_000
            )
        self._profile = profile(activities=kinds, profile_memory=True)
        self._began = time.perf_counter()
        self._profile.start()

    def write(self, folder: Path, name: str) -> None:
        """Write the trace (Chrome, Perfetto) and a table of operators. Raises OSError."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        self._profile.stop()
        if self.device == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
        folder.mkdir(exist_ok=True)
        self._profile.export_chrome_trace(str(folder / f"{name}.trace.json.gz"))
        steps = (
            f"steps {self.first} to {self.last}" if self.last > self.first else f"step {self.first}"
        )
        text = table(
            list(self._profile.key_averages()),
            f"{steps}, {seconds:.2f} s including profiling",
            self.device,
        )
        (folder / f"{name}.operators.txt").write_text(text, encoding="utf-8")


def table(operators: list[Any], title: str, device: str) -> str:
    """Operators by self time; `operators`: torch's FunctionEventAvg."""

    def own(operator: Any) -> float:
        return (
            float(
                operator.self_device_time_total
                if device == "cuda"
                else operator.self_cpu_time_total
            )
            / 1e6
        )

    whole = sum(map(own, operators)) or 1.0
    lines = [title, "", f"{'operator':<56}{'calls':>8}{'seconds':>10}{'share':>7}"]
    for operator in sorted(operators, key=own, reverse=True)[:OPERATORS]:
        name = operator.key if len(operator.key) < 56 else operator.key[:52] + "..."
        lines.append(
            f"{name:<56}{operator.count:>8,}{own(operator):>10.3f}{own(operator) / whole:>7.0%}"
        )
    return "\n".join(lines) + "\n"
