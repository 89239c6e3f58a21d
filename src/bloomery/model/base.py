"""The model that an adapter adapts, and whether its weights are those that the adapter was trained on. No torch."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bloomery.errors import UserError

BLOCKS, BLOCK = 256, 4096  # of each file of weights: training changes all of a tensor, so that one block shows it


@dataclass(frozen=True)
class Base:
    folder: str
    digest: str

    @property
    def name(self) -> str:
        """The id on the Hub where the folder lies in its cache, else the folder."""
        cached = Path(self.folder).parent.parent.name  # models--x--y/snapshots/<commit>
        return cached.removeprefix("models--").replace("--", "/") if cached.startswith("models--") else self.folder

    def refuse_change(self, digest: str, *, where: str) -> None:
        """Raises UserError when the adapter in `where` was trained on other weights than these."""
        if digest != self.digest:
            raise UserError(
                f"the adapter was trained on other weights than those in {self.folder}", where=where,
                remedy="put the base model back that it was trained on",
            )  # fmt: skip


def base_of(folder: Path) -> Base:
    return Base(str(folder.resolve()), digest(folder))


def digest(folder: Path) -> str:
    """Of the size, the header and evenly spread blocks of every file of weights: seconds for any model."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        total.update(f"{path.name} {path.stat().st_size}\n".encode())
        for piece in _pieces(path):
            total.update(piece)
    return total.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = min(int.from_bytes(file.read(8), "little"), size)
        yield file.read(header)
        for block in range(BLOCKS):
            file.seek(8 + header + (size - 8 - header) * block // BLOCKS)
            yield file.read(BLOCK)
