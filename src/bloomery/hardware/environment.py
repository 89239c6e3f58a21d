"""Caches of compiled kernels in a folder of the node that nobody else can write to: what lies there is run."""

import os
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import NODE_LOCAL, build_profile


def private_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with its NODE_LOCAL folders' own parent made for this user alone.

    Where somebody else has made that folder first another takes its place; where none can be made none is named.
    """
    named = {name: Path(environment[name]) for name in NODE_LOCAL if name in environment}
    kept = {name: value for name, value in environment.items() if name not in named}
    roots = {path.parent for path in named.values()}
    try:
        ours = {root: root if _made(root) else Path(tempfile.mkdtemp(prefix="bloomery-")) for root in roots}
    except OSError:
        return kept
    return kept | {name: str(ours[path.parent] / path.name) for name, path in named.items()}


def _made(folder: Path) -> bool:
    """Whether it is there and this user's alone. Raises OSError when it can be neither made nor seen."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # a link of somebody else's is not followed
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def adopt(machine: Machine, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets in `environment` what `machine` wants and the user has not, as for a run's child."""
    wanted = private_caches(build_profile(machine).environment.value)
    for name, value in wanted.items():
        environment.setdefault(name, value)
