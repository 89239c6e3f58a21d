"""Reads pictures of rows in a child process, which a hostile one may end."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import final

from bloomery.core.child import Child
from bloomery.core.errors import UserError
from bloomery.core.extras import install_extra
from bloomery.data.examples import BadRow
from bloomery.data.pictures.references import encoded_bytes

WALL_SECONDS = 30.0  # for one picture; the child stops itself after ten seconds of a core
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV", "TZ")
_SOURCES = Path(__file__).parents[3]  # where the child finds this package
_FIX = "correct it, or set data.on_error=skip"


@dataclass(frozen=True)
class Picture:
    """`content`: upright, 8 bits, RGB, in a format that every reader has."""

    content: bytes
    width: int
    height: int


@final
class PictureReader:
    """Starts its child with the first picture; `close` ends it.

    `plain`: pictures come as files of nothing but their pixels, so that no other process decodes what strangers sent.
    """

    def __init__(self, *, plain: bool = False) -> None:
        self._plain = plain
        self._child: Child | None = None

    def read(self, reference: str, where: str) -> Picture:
        """A located reference. Raises BadRow, and UserError without pillow."""
        content = encoded_bytes(reference, where)
        child = self._child or self._start()
        answer = child.ask({}, content, seconds=WALL_SECONDS)
        if isinstance(answer, str):
            self.close()
            took = (
                "takes too long to decode"
                if answer == "silent"
                else "ended the process that decodes it"
            )
            raise BadRow(where, f"holds a picture that {took}", _FIX)
        if "refused" in answer:
            raise BadRow(where, f"holds a picture that {answer['refused']}", _FIX)
        # A picture that is fine as it is need not travel back.
        return Picture(answer.get("content", content), answer["width"], answer["height"])

    def close(self) -> None:
        child = self._child
        self._child = None
        if child is not None:
            child.close()

    def _start(self) -> Child:
        """Raises UserError where nothing is installed that decodes pictures."""
        if find_spec("PIL") is None:
            raise UserError(
                "pillow, which decodes pictures, is not installed", fix=install_extra("hf")
            )
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        paths = (str(_SOURCES), os.environ.get("PYTHONPATH", ""))
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUTF8": "1"}
        self._child = Child(
            "bloomery.data.pictures.sandbox_worker", {"plain": self._plain}, environment=environment
        ).start()
        return self._child
