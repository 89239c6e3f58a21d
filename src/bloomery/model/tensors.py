"""Tensors in safetensors files: read straight into memory that is already there, and only from inside a folder."""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import FileIO
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bloomery.errors import UserError
from bloomery.model.weight_files import AGAIN, INDEX, SINGLE, inside, weight_map

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
STAGE_BYTES = 16 * 2**20  # of a file, on the way to another dtype or device


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its first byte, dtype and shape."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_tensors(path: Path) -> dict[str, Stored]:
    """What a safetensors file holds. Raises UserError when it is damaged: the safetensors library checks its header."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        problem = f"the file cannot be read as safetensors: {error}"[:200]
        raise UserError(problem, where=str(path), remedy=AGAIN) from error
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length), object_pairs_hook=partial(_each_once, path))
    header.pop("__metadata__", None)
    return {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}


def _each_once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The library keeps one of two entries of a name; which one, each reader decides for itself."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{twice[:80]!r} is in the header twice", where=str(path), remedy=AGAIN)
    return entries


def _stored(path: Path, name: str, entry: dict[str, object], start: int) -> Stored:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    assert isinstance(shape, list) and isinstance(offsets, list)
    if dtype not in DTYPES:
        remedy = f"save it as one of {', '.join(DTYPES)}"
        raise UserError(f"{name} is stored as {dtype}, which Bloomery cannot read", where=str(path), remedy=remedy)
    return Stored(path, start + offsets[0], DTYPES[str(dtype)], tuple(shape))


def find_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a model folder: `model.safetensors`, or the shards that its index names.

    Raises UserError for a missing file, a shard outside the folder, a tensor in two shards, or pickled weights.
    """
    stated = weight_map(folder)
    if stated is None:
        return stored_tensors(inside(folder, SINGLE))
    found: dict[str, Stored] = {}
    for name in sorted(set(stated.values())):
        tensors = stored_tensors(inside(folder, name))
        if twice := found.keys() & tensors.keys():
            raise UserError(f"{min(twice)} is in two shards", where=str(folder / name), remedy=AGAIN)
        found |= tensors
    if missing := stated.keys() - found.keys():
        raise UserError(f"{min(missing)} is in the index but in no shard", where=str(folder / INDEX), remedy=AGAIN)
    return found


def stored_in(folder: Path, name: str) -> dict[str, Stored]:
    """What one file of the folder holds. Raises UserError as `find_tensors` does."""
    return stored_tensors(inside(folder, name))


@final
class _Stage:
    """Memory between a file and a device; on a GPU pinned, of two one is read into while the other is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.buffer = device, torch.empty(0, dtype=torch.uint8)
        self.copied = torch.cuda.Event() if device.type == "cuda" else None

    def memory(self, size: int) -> Tensor:
        """So many bytes, once the last copy out of them is over."""
        if self.copied is not None:
            self.copied.synchronize()
        if len(self.buffer) < size:
            self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self.copied is not None)
        return self.buffer[:size]

    def sent(self, host: Tensor) -> Tensor:
        if self.copied is None:
            return host
        there = host.to(self.device, non_blocking=True)
        self.copied.record(torch.cuda.current_stream(self.device))
        return there


@final
class Reader:
    """Copies stored tensors into existing ones; keeps one file handle for each file. Used as a context.

    A tensor that needs no cast is read where it belongs, any other through STAGE_BYTES: the host never holds a second
    copy. Files are read and not mapped, as a mapped one whose disk fails ends the process without a word (SIGBUS).
    """

    def __init__(self) -> None:
        self.stack, self.files = ExitStack(), dict[Path, FileIO]()
        self.stages = dict[torch.device, list[_Stage]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stages.clear()
        self.stack.close()

    def fill(self, target: Tensor, stored: Stored, *, first: int, transposed: bool) -> None:
        """target = rows `first`.. of the stored tensor (columns where it is transposed), cast to the target's dtype."""
        if transposed:
            for start, piece in self.pieces(stored, 0, stored.shape[0], device=target.device):
                target[:, start : start + len(piece)].copy_(piece[:, first : first + len(target)].t())
        elif target.device.type == "cpu" and target.dtype == stored.dtype and target.is_contiguous():
            self._into(target, stored, first)
        else:
            rows = target if target.ndim else target[None]
            for start, piece in self.pieces(stored, first, len(rows), device=target.device):
                rows[start : start + len(piece)].copy_(piece)

    def pieces(
        self, stored: Stored, first: int, rows: int, *, device: torch.device, multiple: int = 1
    ) -> Iterator[tuple[int, Tensor]]:
        """Rows `first`.. of a stored tensor on the device, as they are stored: (how many came before, a piece of them).

        All but the last piece are of a multiple of `multiple` rows. A piece may only be read until the next is taken.
        """
        width = stored.shape[1:]
        row = stored.dtype.itemsize * int(torch.Size(width).numel())
        step = multiple * max(1, STAGE_BYTES // (row * multiple))
        stages = cycle(
            self.stages.setdefault(device, [_Stage(device) for _ in range(2 if device.type == "cuda" else 1)])
        )
        for start in range(0, rows, step):
            stage, count = next(stages), min(step, rows - start)
            host = stage.memory(count * row).view(stored.dtype).view(count, *width)
            self._into(host, stored, first + start)
            yield start, stage.sent(host)

    def read(self, stored: Stored, first: int, rows: int) -> Tensor:
        """Rows of a stored tensor, as they are stored."""
        shape = (rows, *stored.shape[1:]) if stored.shape else ()
        tensor = torch.empty(shape, dtype=stored.dtype)
        self._into(tensor, stored, first)
        return tensor

    def _into(self, tensor: Tensor, stored: Stored, first: int) -> None:
        if stored.path not in self.files:
            self.files[stored.path] = self.stack.enter_context(stored.path.open("rb", buffering=0))
        file = self.files[stored.path]
        row = stored.dtype.itemsize * int(torch.Size(stored.shape[1:]).numel())
        file.seek(stored.offset + first * row)
        memory = memoryview(tensor.detach().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
        done = 0
        while done < len(memory):
            count = file.readinto(memory[done:])
            if not count:
                raise UserError("the file ends too early", where=str(stored.path), remedy="download the model again")
            done += count


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, produce: Callable[[str], Tensor]
) -> None:
    """A safetensors file, tensor by tensor: each is asked for when the ones before it are written, and then let go."""
    kind = next(name for name, known in DTYPES.items() if known == dtype)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(said)) + said)
        for name, shape in shapes.items():
            tensor = produce(name)
            assert tensor.dtype == dtype and tensor.shape == shape
            flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            file.write(memoryview(flat.numpy()))  # type: ignore[arg-type]  # an array is a buffer


def split_shards(sizes: dict[str, int], limit: int) -> Iterator[list[str]]:
    """Names in order, grouped so that each group stays below `limit` bytes where a single tensor allows it."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group
