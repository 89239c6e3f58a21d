"""Frozen weights that stay in files, of a model that is larger than the host's memory.

Those of the model's own files are read from there where they have the form that the model computes in. What has
another one, as quantized weights or those of another dtype, is in a file of the run, which has no name and so is gone
with the process.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes
from bloomery.facts.limits import aligned_bytes
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import VOCABULARY, StoredModel, base_parameters
from bloomery.parallel.staging import FileBytes

if TYPE_CHECKING:
    from bloomery.parallel.host_memory import HostLayer


@final
class _Mapping(mmap.mmap):
    """A view of a file in this process. It lives as long as a tensor of it does."""


# Linux does not count the mapped bytes as memory that the process could need. Python names it from 3.13 on.
NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def give_files(
    model: Decoder, layers: "Sequence[HostLayer]", source: Path | None, folder: Path
) -> str | None:
    """Files take the place of the host's memory for what is in `layers`, of a model on the meta device.

    Its tensors are views of the files: of the model in `source`, and of one in `folder` for all that has another form.
    Returns what people should know: that weights are kept once more, and where. Raises UserError where there is too
    little space for that.
    """
    model_files = {} if source is None else _in_model_files(model, source)
    num_bytes = 0
    for layer in layers:
        for place in layer.places:
            if place.tensor in model_files:
                layer.in_files[place.start] = model_files[place.tensor]
            else:
                num_bytes += aligned_bytes(place.num_bytes)
    own_file = _file_in(folder, num_bytes) if num_bytes else None

    mappings = dict[FileIO, _Mapping]()
    own_bytes = 0
    for layer in layers:
        for place in layer.places:
            if place.start not in layer.in_files:
                assert own_file is not None
                layer.in_files[place.start] = FileBytes(own_file, own_bytes, place.num_bytes)
                own_bytes += aligned_bytes(place.num_bytes)
            else:
                layer.in_model_files.add(place.start)
            part = layer.in_files[place.start]
            if part.file not in mappings:
                mappings[part.file] = _mapped(part.file, is_written=part.file is own_file)
            tensor = torch.empty(place.shape, dtype=place.dtype)
            if place.num_bytes:
                values = torch.frombuffer(
                    mappings[part.file],
                    dtype=place.dtype,
                    count=place.shape.numel(),
                    offset=part.first,
                )
                tensor = values.view(place.shape)
            if isinstance(place.tensor, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=False)
            place.tensors[place.name] = tensor
    if not num_bytes:
        return None
    return (
        f"{format_bytes(num_bytes)} of frozen weights have another form than in the files of the model: they are in a"
        f" file without a name in {folder}, which goes with the run"
    )


def _in_model_files(model: Decoder, source: Path) -> dict[Tensor, FileBytes]:
    """The parameters whose bytes are rows of a stored tensor, one after the other."""
    found = dict[Tensor, FileBytes]()
    if model.config.transformers_backend is not None:
        return found
    opened = dict[Path, FileIO]()
    # With a seed, as what reads the rest has: a reward model's values head may be missing from a language model.
    stored_model = StoredModel(model.config, source, seed=0)
    for name, parameter in base_parameters(model):
        tensor = stored_model.tensors.get(name)
        if tensor is None or name in VOCABULARY:
            continue
        location = stored_model.locations[name]
        is_converted = (
            location.transposed
            or location.stacked
            or location.interleaved
            or tensor.packing is not None
            or tensor.lines is not None
            or tensor.dtype != parameter.dtype
            or tensor.shape[1:] != tuple(parameter.shape[1:])
        )
        if is_converted:
            continue
        if tensor.path not in opened:
            opened[tensor.path] = tensor.path.open("rb", buffering=0)
        row_bytes = parameter.nbytes // len(parameter) if parameter.ndim else parameter.nbytes
        first = tensor.offset + location.first * row_bytes
        found[parameter] = FileBytes(opened[tensor.path], first, parameter.nbytes)
    return found


def _file_in(folder: Path, num_bytes: int) -> FileIO:
    """A file without a name, whose space is taken: to write to a mapped file on a full disk kills the process."""
    folder.mkdir(parents=True, exist_ok=True)
    file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (it lives as long as the model)
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        file.close()
        raise UserError(
            f"frozen weights take {format_bytes(num_bytes)} on the disk: {error.strerror}",
            where=str(folder),
            fix="free disk space, or put the run on another disk",
        ) from error
    assert isinstance(file, FileIO)
    return file


def _mapped(file: FileIO, *, is_written: bool) -> _Mapping:
    """What is written to the bytes of a model stays in this process."""
    flags = mmap.MAP_SHARED if is_written else mmap.MAP_PRIVATE | NO_RESERVE
    size = os.fstat(file.fileno()).st_size
    return _Mapping(file.fileno(), size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
