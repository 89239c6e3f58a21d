"""What an id of the Hub names, where its files are kept, and the token that asks for them. Nothing here asks anybody"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from bloomery.errors import UserError
from bloomery.shell import expanded

Kind = Literal["model", "dataset"]
Part = Literal["model", "config", "tokenizer", "dataset"]  # config: of a model whose weights will be wanted, too
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}(@\w[\w./-]{0,199})?")


@final
@dataclass(frozen=True)
class Named:
    """`ORG/NAME` or `ORG/NAME@REVISION`, a branch, tag or commit."""

    repo: str
    revision: str | None
    kind: Kind

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def command(self) -> str:
        """What a person types to fetch it."""
        return f"bloomery download {self}" + (" --dataset" if self.kind == "dataset" else "")

    @property
    def page(self) -> str:
        site = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
        return f"{site}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of an id, `ORG/NAME` or `ORG/NAME@REVISION`, and nothing of that name lies here."""
    return _ID.fullmatch(name) is not None and ".." not in name and not Path(name).exists()


def parse(name: str, kind: Kind) -> Named:
    """Raises UserError for what is neither a path that exists nor an id."""
    if name.startswith("runs/"):
        remedy = "train it first (runs/demo: `bloomery demo`), or name another model"
        raise UserError("that run is not here, or has no model in this place", where=name, remedy=remedy)
    if not _ID.fullmatch(name) or ".." in name:
        if name and expanded(name).exists():
            problem = "it lies on this machine: there is nothing to fetch"
            raise UserError(problem, where=name, remedy="name it as it is where it is needed")
        what = "model" if kind == "model" else "data set"
        raise UserError(
            f"there is no such folder, and no {what} of the Hub can have this name",
            where=name[:200] or "an empty name",
            remedy="mend the path, or write ORG/NAME as it stands on huggingface.co",
        )  # fmt: skip
    repo, _, revision = name.partition("@")
    return Named(repo, revision or None, kind)


def token() -> str | Literal[False]:
    """HF_TOKEN of the environment; False keeps the library from looking for one in the home folder."""
    return os.environ.get("HF_TOKEN", "").strip() or False


def cache_folder() -> Path:
    """Where the Hub's own tools keep what they fetch: HF_HUB_CACHE, or below HF_HOME."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)
