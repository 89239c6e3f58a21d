"""Values of tensors in safetensors files, read straight into memory that is already there; names both ways."""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from io import FileIO
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Self, final

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.core.progress import progress
from bloomery.model.config import ModelConfig
from bloomery.model.io.stored import DTYPES, Stored, places

Spec = tuple[tuple[int, ...], torch.dtype]  # of a tensor
STAGE_BYTES = 16 * 2**20  # of a file, on the way to another dtype or device


@final
class _Stage:
    """Memory between a file and a device; on a GPU pinned, of two one is read into while the other is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer = torch.empty(0, dtype=torch.uint8)
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
class TensorReader:
    """Copies stored tensors into existing ones; keeps one file handle for each file. Used as a context.

    A tensor that needs no cast is read where it belongs, any other through STAGE_BYTES: the host never holds a second
    copy. Files are read and not mapped, as a failing disk under a mapped file kills the process (SIGBUS).
    """

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.files = dict[Path, FileIO]()
        self.stages = dict[torch.device, list[_Stage]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stages.clear()
        self.stack.close()

    def fill(self, target: Tensor, stored: Stored, *, first: int, transposed: bool) -> None:
        """target = rows `first`.. of the stored tensor (columns where it is transposed), cast to the target's dtype."""
        if transposed:
            for start, piece in self.pieces(stored, 0, stored.shape[0], device=target.device):
                target[:, start : start + len(piece)].copy_(
                    piece[:, first : first + len(target)].t()
                )
        elif (
            target.device.type == "cpu" and target.dtype == stored.dtype and target.is_contiguous()
        ):
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
            self.stages.setdefault(
                device, [_Stage(device) for _ in range(2 if device.type == "cuda" else 1)]
            )
        )
        for start in range(0, rows, step):
            stage = next(stages)
            count = min(step, rows - start)
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
                raise UserError(
                    "the file ends too early",
                    where=str(stored.path),
                    fix="download the model again",
                )
            done += count


def write_tensors(path: Path, specs: Mapping[str, Spec], produce: Callable[[str], Tensor]) -> None:
    """A safetensors file, tensor by tensor: each is asked for when the ones before it are written, and then let go."""
    kinds = {known: name for name, known in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in specs.items():
        begin = end
        end = end + dtype.itemsize * math.prod(shape)
        kind = kinds[str(dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(said)) + said)
        for number, (name, (shape, dtype)) in enumerate(specs.items(), 1):
            progress(f"writing tensor {number:,} of {len(specs):,} of {path.name}")
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
            group = []
            total = 0
        group.append(name)
        total += size
    yield group


def to_hf_names(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our tensors as transformers stores them; fused and transposed ones are new, the others are the same tensors.

    `state` may be some of them, but of what is stored fused all parts or none.
    """
    pieces: dict[str, list[str]] = {}
    where = places(config)
    for name, place in where.items():
        if name in state:
            pieces.setdefault(place.name, []).append(name)
    stored = {}
    for target, names in pieces.items():
        # in the order of their rows, as parameter_shapes lists them
        parts = [state[name] for name in names]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        stored[target] = (whole.t() if where[names[0]].transposed else whole).contiguous()
    return stored
