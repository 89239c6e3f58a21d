"""The bytes of a GGUF file: header and metadata by the gguf package, then tensors as they are computed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.files import start_writing
from bloomery.core.progress import progress
from bloomery.export.gguf_format import ALIGNMENT, bytes_in_file

WAITING_BYTES = 2**26  # of a file that wait for the disk while the next are computed

# What llama.cpp calls a file of each type (gguf-py, LlamaFileType).
FILE_TYPES = {
    "f32": "ALL_F32",
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
    "q4_0": "MOSTLY_Q4_0",
}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the file, whose bytes are computed when they are written."""

    name: str
    shape: tuple[int, ...]
    kind: str
    chunks: Callable[[], Iterator[memoryview | bytes]]


def write_file(writer: Any, path: Path, tensors: Sequence[PlannedTensor], library: Any) -> None:
    """The library writes header and metadata; its way to write tensors needs each whole, and misses a full disk."""
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name,
            tensor.shape,
            np.dtype(np.float32),
            bytes_in_file(tensor.shape, tensor.kind),
            library.GGMLQuantizationType[tensor.kind.upper()],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        written_out = 0  # bytes that the disk was asked to write
        for number, tensor in enumerate(tensors, 1):
            progress(f"writing tensor {number:,} of {len(tensors):,}")
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            for chunk in tensor.chunks():
                file.write(chunk)
            if file.tell() - written_out > WAITING_BYTES:
                start_writing(file, written_out)
                written_out = file.tell()
        file.write(b"\0" * (-file.tell() % ALIGNMENT))
