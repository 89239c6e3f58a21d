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
from torch.profiler import profile

from bloomery.core.device import (
    is_accelerator,
    memory_blocks,
    memory_stats,
    profiled_activities,
    record_memory_history,
    synchronize,
)
from bloomery.core.units import GIB, format_bytes
from bloomery.data.batch import Batch
from bloomery.monitor.events import Emit, Phase, Warned
from bloomery.train.diagnostics.profile_request import (
    NOT_RECORDED,
    PROFILE,
    PROFILE_ASKED,
    requested_steps,
)
from bloomery.train.objectives.losses import LossParts
from bloomery.train.objectives.objective import Objective
from bloomery.train.process import resident_gib
from bloomery.train.step import ModelAndOptimizer

SAVED = "saved for backward"
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
    # What the model and the optimizer hold has a name; it is counted under that name alone.
    listed_storages: set[int] = set()
    tensors = list(_unlisted(_named(model_and_optimizer), listed_storages))

    # What is left of the reachable tensors is saved for backward, or held by something else.
    reachable = [thing for thing in gc.get_objects() if _is_tensor(thing)]
    if SAVED_TENSORS_READABLE:
        saved = ((SAVED, tensor) for tensor in _saved_in_graphs(reachable))
        tensors += _unlisted(saved, listed_storages)
    tensors += _unlisted(((OTHERS, tensor) for tensor in reachable), listed_storages)
    return tensors


def _is_tensor(thing: object) -> bool:
    """Exactly torch's two types: fake tensors hold no memory, and dead proxies raise."""
    return type(thing) in (Tensor, nn.Parameter)


def _named(model_and_optimizer: ModelAndOptimizer) -> Iterator[tuple[str, Tensor]]:
    parameters = list(model_and_optimizer.model.parameters())
    yield from (("weights", parameter) for parameter in parameters)
    # Quantized weights are buffers.
    yield from (("weights", buffer) for buffer in model_and_optimizer.model.buffers())
    yield from (
        ("gradients", parameter.grad) for parameter in parameters if parameter.grad is not None
    )
    yield from (
        ("optimizer", tensor) for tensor in model_and_optimizer.optimizer.named_tensors().values()
    )


def _unlisted(
    purposes_and_tensors: Iterable[tuple[str, Tensor]], listed_storages: set[int]
) -> Iterator[Live]:
    """The tensors whose storage is not listed yet; it is added to `listed_storages`."""
    for purpose, tensor in purposes_and_tensors:
        if not _is_tensor(tensor) or tensor.device.type == "meta" or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:  # a fake tensor
            continue
        if address and address not in listed_storages:
            listed_storages.add(address)
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield Live(purpose, tuple(tensor.shape), dtype, str(tensor.device), storage.nbytes())


def _saved_in_graphs(reachable: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors that autograd saved in every node of these tensors' graphs."""
    queue = [node for tensor in reachable if (node := tensor.grad_fn) is not None]
    visited = set(queue)
    while queue:
        node = queue.pop()
        yield from _saved_in_node(node)
        next_nodes = [
            next_node
            for next_node, _ in node.next_functions
            if next_node is not None and next_node not in visited
        ]
        visited.update(next_nodes)
        queue += next_nodes


def _saved_in_node(node: Any) -> Iterator[Tensor]:
    """A node's saved tensors, read without the saved-tensor hooks, which would recompute a checkpointed block."""
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            value = getattr(node, name)
            saved_values = value if isinstance(value, tuple | list) else (value,)
            contents = [saved.data for saved in saved_values if saved is not None]
        except RuntimeError:  # freed by backward
            continue
        yield from (content for content in contents if isinstance(content, Tensor))


def memory_page(tensors: list[Live], title: str, device: str) -> str:
    """A table of memory by purpose, then the largest groups of equal tensors."""
    lines = [title, *_totals(device)]
    if not SAVED_TENSORS_READABLE:
        lines.append(f"unknown     tensors {SAVED}: not available in PyTorch {torch.__version__}")

    # By purpose, the largest first.
    lines += ["", f"{'purpose':<{NAME}}{'tensors':>9}{'memory':>13}"]
    purposes = list(dict.fromkeys(live.purpose for live in tensors))
    for purpose in sorted(purposes, key=lambda purpose: -_bytes(tensors, purpose)):
        count = sum(live.purpose == purpose for live in tensors)
        lines.append(f"{purpose:<{NAME}}{count:>9,}{format_bytes(_bytes(tensors, purpose)):>13}")
    lines.append(
        f"{'total':<{NAME}}{len(tensors):>9,}{format_bytes(sum(live.bytes for live in tensors)):>13}"
    )

    # Tensors of one purpose, shape and type are one row: a model has many layers of one kind.
    groups = sorted(Counter(tensors).items(), key=lambda group: -group[0].bytes * group[1])
    lines += [
        "",
        f"{'largest groups of equal tensors':<{NAME}}{'tensors':>9}{'each':>13}{'memory':>13}",
    ]
    for live, count in groups[:GROUPS]:
        name = f"{live.purpose}: {' x '.join(map(str, live.shape)) or 'scalar'} {live.dtype}"
        name += "" if live.device.startswith(device) else f", {live.device}"
        lines.append(
            f"{name:<{NAME}}{count:>9,}{format_bytes(live.bytes):>13}{format_bytes(live.bytes * count):>13}"
        )
    if len(groups) > GROUPS:
        lines.append(f"and {len(groups) - GROUPS:,} smaller groups")
    return "\n".join(lines) + "\n"


def _bytes(tensors: list[Live], purpose: str) -> int:
    return sum(live.bytes for live in tensors if live.purpose == purpose)


def _totals(device: str) -> Iterator[str]:
    """Memory that this process holds by now; on a GPU also its peak."""
    stats = memory_stats(device)
    if stats:
        allocated = stats.get("allocated_bytes.all.current", 0)
        reserved = stats.get("reserved_bytes.all.current", 0)
        peak = stats.get("allocated_bytes.all.peak", 0)
        yield f"allocated   {allocated / GIB:.3f} GiB by tensors, including kernel workspaces"
        yield f"reserved    {reserved / GIB:.3f} GiB by PyTorch's allocator"
        yield f"peak        {peak / GIB:.3f} GiB allocated at most"
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
        memory_page(tensors, title, device), encoding="utf-8"
    )
    blocks = memory_blocks(device)
    if blocks is not None:  # torch's own format is a pickle
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
        self._failed = False  # to begin: the plan's other steps would end in the same warning
        self._lists = 0
        if writes:
            self._request.unlink(missing_ok=True)  # a request to an earlier process

    @contextmanager
    def around(
        self, step: int, *, planned_steps: tuple[int, int] | None, device: str
    ) -> Iterator[None]:
        """Wraps a step; records it if planned or requested."""
        # A request comes before the plan; the plan's steps may have begun before a resume.
        if self._open is None and self._writes:
            steps = requested_steps(self._request)
            if steps == 0 and planned_steps and step >= planned_steps[0] and not self._failed:
                steps = planned_steps[1] - step + 1
            if steps > 0:
                self._request.unlink(missing_ok=True)
                self._begin(device, step, steps)
        yield
        if self._open is not None and step >= self._open.last_step:
            self.close()

    def _begin(self, device: str, step: int, steps: int) -> None:
        try:
            self._open = _Recording(device, step, step + steps - 1)
        except RuntimeError as error:  # such as another profiler that runs already
            self._failed = True
            self._warn(step - 1, error)
        else:
            self._emit(Phase(step=step - 1, name="profile", done=0, total=steps))

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
                step = recording.first_step
                moment = f"step {step}, between forward and backward of its first micro-batch"
                self._list(self._name(step), moment, recording.device)
            return parts

        return replace(objective, loss=loss)

    def record_out_of_memory(self, device: str, step: int, moment: str) -> str:
        """List the tensors before they are freed; the file's name in the run folder, "" without one."""
        self._lists += 1
        if self._lists > MOST_LISTS:
            return ""
        name = f"{self._name(step)}-full-{self._lists}"
        title = f"tensors in memory when {moment} ran out of memory"
        is_written = self._list(name, title, device)
        return f"{PROFILE}/{name}.memory.txt" if is_written else ""

    def close(self) -> None:
        """End and write the current recording, if any."""
        recording = self._open
        self._open = None
        if recording is None:
            return
        last_step = recording.last_step
        try:
            recording.write(self._folder, self._name(recording.first_step))
        except (OSError, RuntimeError) as error:
            self._warn(last_step, error)
            return
        steps = last_step - recording.first_step + 1
        self._emit(Phase(step=last_step, name="profile", done=steps, total=steps))

    def _list(self, name: str, title: str, device: str) -> bool:
        """Whether the list was written: a failure is a warning, and training continues."""
        try:
            write_memory(self._model_and_optimizer, self._folder / name, title, device=device)
        except (OSError, RuntimeError, MemoryError) as error:
            self._warn(0, error)
            return False
        return True

    def _warn(self, step: int, error: BaseException) -> None:
        reason = error.strerror if isinstance(error, OSError) else None
        reason = reason or str(error).strip() or type(error).__name__
        self._emit(Warned(step=step, reason=f"{NOT_RECORDED}: {reason}"))

    @staticmethod
    def _name(step: int) -> str:
        return f"step-{step:08d}"


@final
class _Recording:
    """torch.profiler from the first step to the last."""

    def __init__(self, device: str, first_step: int, last_step: int) -> None:
        self.first_step = first_step
        self.last_step = last_step
        self.device = device
        self.listed = False
        self._profile = profile(activities=profiled_activities(self.device), profile_memory=True)
        self._start_time = time.perf_counter()
        # What is switched on here costs time in every later step until it is switched off, also after an error.
        record_memory_history(self.device, is_on=True)
        try:
            self._profile.start()
        except RuntimeError:
            record_memory_history(self.device, is_on=False)
            raise

    def write(self, folder: Path, name: str) -> None:
        """Write the trace (Chrome, Perfetto) and a table of operators. Raises OSError and RuntimeError."""
        try:
            # The kernels of the last step may still be running.
            synchronize(self.device)
        finally:
            seconds = time.perf_counter() - self._start_time
            try:
                self._profile.stop()
            finally:
                record_memory_history(self.device, is_on=False)

        folder.mkdir(exist_ok=True)
        self._profile.export_chrome_trace(str(folder / f"{name}.trace.json.gz"))
        steps = f"step {self.first_step}"
        if self.last_step > self.first_step:
            steps = f"steps {self.first_step} to {self.last_step}"
        title = f"{steps}, {seconds:.2f} s including profiling"
        text = operator_table(list(self._profile.key_averages()), title, self.device)
        (folder / f"{name}.operators.txt").write_text(text, encoding="utf-8")


def operator_table(operators: list[Any], title: str, device: str) -> str:
    """Operators by self time; `operators`: torch's FunctionEventAvg."""

    def self_seconds(operator: Any) -> float:
        on_device = is_accelerator(device)
        microseconds = (
            operator.self_device_time_total if on_device else operator.self_cpu_time_total
        )
        return float(microseconds) / 1e6

    total_seconds = sum(map(self_seconds, operators)) or 1.0
    lines = [title, "", f"{'operator':<56}{'calls':>8}{'seconds':>10}{'share':>7}"]
    for operator in sorted(operators, key=self_seconds, reverse=True)[:OPERATORS]:
        name = operator.key if len(operator.key) < 56 else operator.key[:52] + "..."
        seconds = self_seconds(operator)
        lines.append(
            f"{name:<56}{operator.count:>8,}{seconds:>10.3f}{seconds / total_seconds:>7.0%}"
        )
    return "\n".join(lines) + "\n"
