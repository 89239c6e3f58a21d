"""Text that every machine has: the source of the Python that runs this, as code or as questions and answers."""

import os
import platform
import sysconfig
from pathlib import Path

from bloomery.data.files import SourceFile
from bloomery.errors import UserError

# Character tables and documentation topics are data in the shape of code; tests repeat what they test.
_LEFT_OUT = {"encodings", "pydoc_data", "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_files() -> list[SourceFile]:
    """The standard library's .py files, sorted. Raises UserError on an interpreter that ships none (a frozen one)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    names = sorted(path.relative_to(root).as_posix() for path in found)
    if not names:
        raise UserError(
            "this Python ships no source of its library", where=str(root), remedy="set data.path to text of your own"
        )
    return [SourceFile(root / name, name, "code") for name in names]


def identity() -> str:
    """What decides the text: another Python, another corpus."""
    return f"{platform.python_implementation()} {platform.python_version()} in {sysconfig.get_paths()['stdlib']}"
