"""Values of tensors in safetensors files: read straight into existing memory, and written tensor by tensor."""

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from io import FileIO
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor

from bloomery.core.device import can, current_stream, new_event
from bloomery.core.errors import UserError
from bloomery.core.progress import progress
from bloomery.facts.config import ModelConfig, TransformersBackend
from bloomery.model.io.lines import Lines
from bloomery.model.io.parameters import unstacked
from bloomery.model.io.stored import (
    DTYPES,
    StoredTensor,
    TensorLocation,
    stored_tensors,
    tensor_locations,
)
from bloomery.model.io.unpacking import open_rows
from bloomery.model.transformers_files import stored_tensors_of

Spec = tuple[tuple[int, ...], torch.dtype]  # of a tensor
STAGE_BYTES = 16 * 2**20  # of a file, on the way to another dtype or device
HASHED_BYTES = 2**20  # of a file that are written and hashed in turn
HF_METADATA = {"format": "pt"}  # without it transformers refuses a file
# That of safetensors, whose enumeration `Dtype` it sorts by, from its end.
TYPE_ORDER = (
    *("int64", "float64", "float32", "int32", "bfloat16", "float16", "int16", "int8", "uint8"),
    "bool",
)


@final
class _Stage:
    """Host memory between a file and a device; pinned for a GPU.

    A GPU uses two in turn: the file is read into one while the other is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.copied = new_event(device) if can(device, "streams") else None

    def memory(self, size: int) -> Tensor:
        """The first `size` bytes, once the last copy out of them is over."""
        if self.copied is not None:
            self.copied.synchronize()
        if len(self.buffer) < size:
            self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self.copied is not None)
        return self.buffer[:size]

    def send(self, host_tensor: Tensor) -> Tensor:
        """The tensor on the device; the copy is queued, and `memory` waits for it."""
        if self.copied is None:
            return host_tensor
        device_tensor = host_tensor.to(self.device, non_blocking=True)
        self.copied.record(current_stream(self.device))
        return device_tensor


@final
class TensorReader:
    """Copies stored tensors into existing ones; keeps one file handle for each file. Used as a context.

    A tensor that needs no cast is read where it belongs, any other through STAGE_BYTES: the host never holds a second
    copy. Files are read and not mapped, as a failing disk under a mapped file kills the process (SIGBUS).
    """

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.files = dict[Path, FileIO]()
        self.stages = dict[torch.device, list[_Stage]]()
        self.held: tuple[StoredTensor, Tensor] | None = None  # the last one that was read across

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stages.clear()
        self.held = None
        self.stack.close()

    def fill(self, target: Tensor, source: StoredTensor, *, first: int, transposed: bool) -> None:
        """target = rows `first`.. of the stored tensor (columns where it is transposed), cast to the target's dtype."""
        if source.packing is not None and not transposed:
            rows = target if target.ndim else target[None]
            for start, piece in self._unpacked(source, first, len(rows)):
                rows[start : start + len(piece)].copy_(piece)
        elif transposed:
            # The columns lie across the file: every row is read, and only its columns are kept.
            for start, piece in self.pieces(source, 0, source.shape[0], device=target.device):
                columns = piece[:, first : first + len(target)]
                target[:, start : start + len(piece)].copy_(columns.t())
        elif (
            target.device.type == "cpu" and target.dtype == source.dtype and target.is_contiguous()
        ):
            self._read_into(target, source, first)
        else:
            rows = target if target.ndim else target[None]
            for start, piece in self.pieces(source, first, len(rows), device=target.device):
                rows[start : start + len(piece)].copy_(piece)

    def pieces(
        self,
        source: StoredTensor,
        first: int,
        rows: int,
        *,
        device: torch.device,
        multiple: int = 1,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields (how many rows came before, the next rows) of rows `first`.. on the device, as they are stored; packed
        ones in float32.

        All but the last piece are of a multiple of `multiple` rows. A piece may only be read until the next is taken.
        """
        if source.packing is not None:
            for start, piece in self._unpacked(source, first, rows, multiple=multiple):
                yield start, piece.to(device)
            return
        # A piece is as large as a stage; a single row may be larger.
        row_shape = source.shape[1:]
        row_bytes = _row_bytes(source)
        rows_per_piece = multiple * max(1, STAGE_BYTES // (row_bytes * multiple))

        # Stages are kept, so that a model of many tensors pins memory once.
        if device not in self.stages:
            num_stages = 2 if can(device, "streams") else 1
            self.stages[device] = [_Stage(device) for _ in range(num_stages)]
        stages = cycle(self.stages[device])
        for start in range(0, rows, rows_per_piece):
            stage = next(stages)
            count = min(rows_per_piece, rows - start)
            host_rows = stage.memory(count * row_bytes).view(source.dtype).view(count, *row_shape)
            self._read_into(host_rows, source, first + start)
            yield start, stage.send(host_rows)

    def _unpacked(
        self, source: StoredTensor, first: int, rows: int, *, multiple: int = 1
    ) -> Iterator[tuple[int, Tensor]]:
        """Rows `first`.. of a packed matrix in float32, on the CPU, at most STAGE_BYTES at a time."""
        unpacked_rows = open_rows(source, self.read)
        row_bytes = 4 * math.prod(source.shape[1:])
        rows_per_piece = multiple * max(1, STAGE_BYTES // (row_bytes * multiple))
        for start in range(0, rows, rows_per_piece):
            count = min(rows_per_piece, rows - start)
            yield start, unpacked_rows(first + start, count)

    def read(self, source: StoredTensor, rows: tuple[int, int] | None = None) -> Tensor:
        """The stored tensor on the CPU, in the dtype of the file; of `rows` (the first one, how many) these alone.

        A packed one is rounded to the dtype that its model computes in.
        """
        if source.packing is not None:
            first, count = rows or (0, source.shape[0])
            result = torch.empty(count, *source.shape[1:], dtype=source.dtype)
            self.fill(result, source, first=first, transposed=False)
            return result
        first = 0
        shape = source.shape
        if rows is not None:
            first, count = rows
            shape = (count, *source.shape[1:])
        tensor = torch.empty(shape, dtype=source.dtype)
        self._read_into(tensor, source, first)
        return tensor

    def _read_into(self, target: Tensor, source: StoredTensor, first: int) -> None:
        """Overwrites a contiguous CPU tensor of the source's dtype with the rows from `first` on."""
        if source.lines is not None:
            target.copy_(self._lines(source, source.lines, first, len(target)))
            return
        if source.path not in self.files:
            self.files[source.path] = self.stack.enter_context(source.path.open("rb", buffering=0))
        file = self.files[source.path]
        file.seek(source.offset + first * _row_bytes(source))
        memory = memoryview(target.detach().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
        # One read may return fewer bytes than it was asked for.
        bytes_read = 0
        while bytes_read < len(memory):
            count = file.readinto(memory[bytes_read:])
            if not count:
                raise UserError(
                    "the file ends too early",
                    where=str(source.path),
                    fix="download the model again",
                )
            bytes_read += count

    def _lines(self, source: StoredTensor, lines: Lines, first: int, rows: int) -> Tensor:
        """Rows `first`.. of a tensor whose rows are lines of a stored matrix, a view of what was read of it."""
        start = lines.first + first * lines.step
        end = start + max(0, rows - 1) * lines.step + min(1, rows)
        if not lines.are_columns:
            stored = replace(source, shape=(lines.count, *source.shape[1:]), lines=None)
            return self.read(stored, (start, end - start))[:: lines.step]
        # Columns lie across the file: all of it is read, once for all that are columns of it.
        stored = replace(source, shape=(*source.shape[1:], lines.count), lines=None)
        if self.held is None or self.held[0] != stored:
            self.held = None
            self.held = (stored, self.read(stored))
        return self.held[1][:, start : end : lines.step].t()


@final
class StoredPart(Mapping[str, Tensor]):
    """Tensors of safetensors files by name, on the CPU, each read when it is asked for. Used as a context.

    Raises UserError for a file that is no safetensors file.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._sources = {name: t for file in files for name, t in stored_tensors(file).items()}
        self._reader = TensorReader()

    def __enter__(self) -> Self:
        self._reader.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._reader.__exit__(*raised)

    def __getitem__(self, name: str) -> Tensor:
        return self._reader.read(self._sources[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def num_rows(self, name: str) -> int:
        return self._sources[name].shape[0]

    def rows(self, name: str, first: int, count: int) -> Tensor:
        return self._reader.read(self._sources[name], (first, count))


def _row_bytes(tensor: StoredTensor) -> int:
    return tensor.dtype.itemsize * math.prod(tensor.shape[1:])


def write_tensors(path: Path, specs: Mapping[str, Spec], produce: Callable[[str], Tensor]) -> None:
    """Writes a safetensors file, tensor by tensor.

    `produce` returns a tensor by name; it is called when the tensors before are written and freed.
    """
    with path.open("wb") as file:
        file.write(_header(specs, HF_METADATA))
        for number, (name, (shape, dtype)) in enumerate(specs.items(), 1):
            progress(f"writing tensor {number:,} of {len(specs):,} of {path.name}")
            tensor = produce(name)
            assert tensor.dtype == dtype and tensor.shape == shape
            file.write(_bytes_of(tensor))


@final
class HashedFile:
    """A safetensors file that is written tensor by tensor and hashed as it is written. Used as a context.

    In `file_order` it has the bytes that safetensors itself writes. Its methods raise OSError.
    """

    def __init__(
        self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Tensors are written in the order of `specs`, by name."""
        self._specs = specs
        self._names = iter(specs)
        self._hash = hashlib.sha256()
        self._size = 0
        self._file = path.open("xb", buffering=0)
        self._write(memoryview(_header(specs, metadata)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def write(self, tensor: Tensor) -> None:
        """The next tensor, with its shape and dtype."""
        shape, dtype = self._specs[next(self._names)]
        assert tensor.dtype == dtype and tensor.shape == shape
        self._write(_bytes_of(tensor))

    def finish(self) -> tuple[str, int]:
        """The SHA-256 of the file and its bytes, once these are on the disk."""
        assert next(self._names, None) is None, "every tensor is written"
        os.fsync(self._file.fileno())
        return self._hash.hexdigest(), self._size

    def _write(self, content: memoryview) -> None:
        # Small enough to be in the cache of a core for the hash. The kernel may take fewer bytes than it is given.
        while len(content):
            count = self._file.write(content[:HASHED_BYTES])
            self._hash.update(content[:count])
            self._size += count
            content = content[count:]


def file_order(name: str, dtype: str) -> tuple[int, str]:
    """The key by which safetensors sorts the tensors of a file: wide types first, so that each is aligned to its type.

    `dtype` is without "torch.".
    """
    return TYPE_ORDER.index(dtype), name


def _header(specs: Mapping[str, Spec], metadata: Mapping[str, str] | None) -> bytes:
    """The length of the header and the header, which comes first: every offset follows from the shapes alone."""
    kinds = {dtype_name: kind for kind, dtype_name in DTYPES.items()}
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    start = 0
    for name, (shape, dtype) in specs.items():
        end = start + dtype.itemsize * math.prod(shape)
        kind = kinds[str(dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        start = end
    header_bytes = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    padding = b" " * (-len(header_bytes) % 8)  # safetensors aligns its tensors to 8 bytes
    header_bytes += padding
    return struct.pack("<Q", len(header_bytes)) + header_bytes


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # an array is a buffer


def split_shards(sizes: dict[str, int], limit: int) -> Iterator[list[str]]:
    """Names in order, grouped so that each group stays below `limit` bytes where a single tensor allows it."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > limit:
            yield group
            group = []
            total = 0
        group.append(name)
        total += size
    yield group


def to_hf_names(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our tensors as transformers stores them; fused and transposed ones are new, the others are the same tensors, or
    views of stacks of experts.

    `state` may be some of them, but of what is stored fused all parts or none.
    """
    locations = tensor_locations(config)
    if (backend := config.transformers_backend) is not None:
        return _converted_tensors(state, backend, locations)
    state = {
        part_name: part
        for name, tensor in state.items()
        for part_name, part in unstacked(name, tensor)
    }
    names_by_stored_name: dict[str, list[str]] = {}
    for name, location in locations.items():
        if name in state:
            names_by_stored_name.setdefault(location.name, []).append(name)
    stored_tensors = {}
    for stored_name, names in names_by_stored_name.items():
        # The parts of a fused tensor are in the order of their rows, as parameter_shapes lists them.
        parts = [state[name] for name in names]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        stored_tensors[stored_name] = as_stored(tensor, locations[names[0]]).contiguous()
    return stored_tensors


def as_stored(rows: Tensor, location: TensorLocation) -> Tensor:
    """All rows of a stored tensor, as they lie in the file."""
    if not location.stacked:
        return rows.t() if location.transposed else rows
    stack = rows.unflatten(0, (location.stacked, -1))
    if location.interleaved:
        stack = stack.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    stored: Tensor = stack.transpose(1, 2) if location.transposed else stack
    return stored


def _converted_tensors(
    state: Mapping[str, Tensor],
    backend: TransformersBackend,
    locations: Mapping[str, TensorLocation],
) -> dict[str, Tensor]:
    """Parameters of transformers' layers under their names in files, or in the form that files have them in."""
    converted = dict[str, Tensor]()
    names = state.keys() & locations.keys()
    for conversion in backend.conversions:
        if names.issuperset(conversion.parameters):
            names.difference_update(conversion.parameters)
            converted |= stored_tensors_of(backend, conversion, state)
    kept = {
        location.name: state[name].contiguous()
        for name, location in locations.items()
        if name in names
    }
    return kept | {name: tensor.contiguous() for name, tensor in converted.items()}
