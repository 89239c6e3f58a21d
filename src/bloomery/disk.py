"""Files that appear whole or not at all, also after a kill or a power cut. No torch."""

import os
from pathlib import Path


def flush_to_disk(path: Path) -> None:
    """What `path` (a file or a folder) holds survives a power cut from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: str) -> None:
    """The file holds the whole new content or, after a kill or a full disk, the whole old one."""
    draft = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    flush_to_disk(path.parent)
