"""What fills memory at one moment: every tensor that Python or autograd can reach, by what it is for and by size."""

import gc
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from bloomery.train.process import resident_gib
from bloomery.train.step import Trainee
from bloomery.units import GIB, format_bytes

KEPT, OTHERS = "kept for backward", "everything else"
GROUPS = 40  # of equal tensors that are listed
TELLS_KEPT = hasattr(torch._C._autograd.SavedTensor, "data")  # absent from PyTorch 2.9
NAME = 56  # columns


@final
@dataclass(frozen=True)
class Live:
    """One piece of memory: what it is for, and the tensor that stands in it."""

    purpose: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int


def live_tensors(trainee: Trainee) -> list[Live]:
    """Each storage once. Activations are found through the graphs that reachable tensors hang on."""
    seen: set[int] = set()
    found = list(_new(_named(trainee), seen))
    reachable = [thing for thing in gc.get_objects() if _is_tensor(thing)]
    found += _new(((KEPT, tensor) for tensor in _kept(reachable)), seen) if TELLS_KEPT else ()
    found += _new(((OTHERS, tensor) for tensor in reachable), seen)
    return found


def _is_tensor(thing: object) -> bool:
    """Of torch's own two types: a compiler's fake tensors hold no memory, and a half-dead proxy may not be asked."""
    return type(thing) in (Tensor, nn.Parameter)


def _named(trainee: Trainee) -> Iterator[tuple[str, Tensor]]:
    parameters = list(trainee.model.parameters())
    yield from (("weights", parameter) for parameter in parameters)
    yield from (("weights", buffer) for buffer in trainee.model.buffers())  # quantised ones
    yield from (("gradients", parameter.grad) for parameter in parameters if parameter.grad is not None)
    yield from (("optimizer", tensor) for tensor in trainee.optimizer.named_tensors().values())


def _new(named: Iterable[tuple[str, Tensor]], seen: set[int]) -> Iterator[Live]:
    for purpose, tensor in named:
        if not _is_tensor(tensor) or tensor.device.type == "meta" or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        try:
            place = storage.data_ptr()
        except RuntimeError:  # what a compiler left of a fake tensor: it has no memory
            continue
        if place and place not in seen:
            seen.add(place)
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield Live(purpose, tuple(tensor.shape), dtype, str(tensor.device), storage.nbytes())


def _kept(reachable: Iterable[Tensor]) -> Iterator[Tensor]:
    """What autograd saved in every node above these tensors; of a graph half gone backward, what is left."""
    waiting = [node for tensor in reachable if (node := tensor.grad_fn) is not None]
    visited = set(waiting)
    while waiting:
        node = waiting.pop()
        yield from _saved(node)
        above = [other for other, _ in node.next_functions if other is not None and other not in visited]
        visited.update(above)
        waiting += above


def _saved(node: Any) -> Iterator[Tensor]:
    """Never through the hooks that may hang on it: asking those would compute a checkpointed block again."""
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            value = getattr(node, name)
            raw = [one.data for one in (value if isinstance(value, tuple | list) else (value,)) if one is not None]
        except RuntimeError:  # freed by the backward that went through it
            continue
        yield from (one for one in raw if isinstance(one, Tensor))


def page(found: list[Live], title: str, device: str) -> str:
    """For people: what the memory is for, then the largest groups of equal tensors."""
    untold = f"unknown     what is {KEPT}: this PyTorch ({torch.__version__}) does not tell"
    lines = [
        title,
        *_totals(device),
        *([] if TELLS_KEPT else [untold]),
        "",
        f"{'what':<{NAME}}{'tensors':>9}{'memory':>13}",
    ]
    purposes = list(dict.fromkeys(live.purpose for live in found))
    for purpose in sorted(purposes, key=lambda purpose: -_bytes(found, purpose)):
        count = sum(live.purpose == purpose for live in found)
        lines.append(f"{purpose:<{NAME}}{count:>9,}{format_bytes(_bytes(found, purpose)):>13}")
    lines.append(f"{'together':<{NAME}}{len(found):>9,}{format_bytes(sum(live.bytes for live in found)):>13}")
    ordered = sorted(Counter(found).items(), key=lambda pair: -pair[0].bytes * pair[1])
    lines += ["", f"{'largest groups of equal tensors':<{NAME}}{'tensors':>9}{'each':>13}{'memory':>13}"]
    for live, count in ordered[:GROUPS]:
        name = f"{live.purpose}: {' x '.join(map(str, live.shape)) or 'scalar'} {live.dtype}"
        name += "" if live.device.startswith(device) else f", {live.device}"
        lines.append(f"{name:<{NAME}}{count:>9,}{format_bytes(live.bytes):>13}{format_bytes(live.bytes * count):>13}")
    if len(ordered) > GROUPS:
        lines.append(f"and {len(ordered) - GROUPS:,} smaller groups")
    return "\n".join(lines) + "\n"


def _bytes(found: list[Live], purpose: str) -> int:
    return sum(live.bytes for live in found if live.purpose == purpose)


def _totals(device: str) -> Iterator[str]:
    if device == "cuda":
        yield f"allocated   {torch.cuda.memory_allocated() / GIB:.3f} GiB by tensors, kernels' work space among them"
        yield f"reserved    {torch.cuda.memory_reserved() / GIB:.3f} GiB by PyTorch's allocator"
        yield f"peak        {torch.cuda.max_memory_allocated() / GIB:.3f} GiB were allocated at most so far"
    else:
        yield f"resident    {resident_gib():.3f} GiB of the whole process, libraries and prepared text among them"


def write_memory(trainee: Trainee, path: Path, title: str, *, device: str) -> None:
    """`path`.memory.txt, and on a GPU `path`.memory.json with every block of the allocator. Raises OSError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at every object wakes deprecations of modules that nobody uses
        found = live_tensors(trainee)
    path.parent.mkdir(exist_ok=True)
    path.with_name(path.name + ".memory.txt").write_text(page(found, title, device), encoding="utf-8")
    if device == "cuda":  # torch's own way of writing it down is a pickle
        blocks = torch.cuda.memory._snapshot()
        path.with_name(path.name + ".memory.json").write_text(json.dumps(blocks, default=str), encoding="utf-8")
