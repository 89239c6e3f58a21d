"""Entry points of installed packages: commands, families, optimizers, objectives, rewards and dataset formats.

A package is listed without being imported. Its code runs when something of it is used by name.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError

# What a package can bring, each as an entry point of the group `bloomery.KIND`. Who reads them: `cli/plugins.py`
# (commands, and what doctor says of all), `recipe/plugins.py` (families, optimizers, objectives),
# `data/sources/plugin_formats.py`, and `train/rl/rewards_worker.py`.
KINDS = ("commands", "families", "optimizers", "objectives", "rewards", "formats")


@dataclass(frozen=True)
class Plugin:
    """An entry point: `kind` is one of KINDS, `target` the object's place as MODULE:NAME."""

    kind: str
    name: str
    target: str
    package: str
    version: str

    @property
    def origin(self) -> str:
        """The package with its version, as pip writes it."""
        return f"{self.package}=={self.version}"

    def load(self) -> Any:
        """The object of the entry point. Raises UserError where importing it fails, whatever the package raises."""
        import importlib.metadata

        entry_point = importlib.metadata.EntryPoint(self.name, self.target, f"bloomery.{self.kind}")
        try:
            return entry_point.load()
        except Exception as error:  # its module can raise anything
            raise self.error(
                f"cannot be imported: {type(error).__name__}: {error}",
                fix=f"update or uninstall it: pip install --upgrade {self.package}",
            ) from error

    def load_function(self) -> Callable[..., Any]:
        """The object of the entry point. Raises UserError for one that cannot be called, too."""
        function = self.load()
        if not callable(function):
            problem = f"is no function but a {type(function).__name__}"
            raise self.error(problem, fix=f"correct {self.target} of {self.package}")
        loaded: Callable[..., Any] = function
        return loaded

    def taken_error(self) -> UserError:
        """The error of a name that Bloomery or another package has already."""
        fix = f"uninstall it: pip uninstall {self.package}"
        return self.error("has a name that is taken", fix=fix)

    def error(self, problem: str, *, fix: str) -> UserError:
        """An error that names the package, as the user may not know which one brings `name`."""
        where = f"{self.package} {self.version}, entry point bloomery.{self.kind}: {self.name}"
        return UserError(f"the plug-in {self.name} {problem}", where=where, fix=fix)


def _any_is_declared() -> bool:
    """Whether an installed package names one of the groups. Without any, as nearly everywhere, `bloomery --help` is
    spared the import of importlib.metadata, a quarter of its time.
    """
    for entry in map(Path, sys.path):
        if entry.is_file():  # an archive, which importlib.metadata reads
            return True
        for file in entry.glob("*-info/entry_points.txt"):
            if b"[bloomery." in file.read_bytes():
                return True
    return False


@functools.cache
def installed_plugins() -> tuple[Plugin, ...]:
    """Every entry point of Bloomery's groups, by kind and name. Imports none of them; takes some milliseconds."""
    if not _any_is_declared():
        return ()
    import importlib.metadata

    entry_points = importlib.metadata.entry_points()
    plugins = [
        Plugin(kind, entry.name, entry.value, entry.dist.name, entry.dist.version)
        for kind in KINDS
        for entry in entry_points.select(group=f"bloomery.{kind}")
        if entry.dist is not None
    ]
    return tuple(sorted(plugins, key=lambda plugin: (KINDS.index(plugin.kind), plugin.name)))


def plugin_names(kind: str) -> list[str]:
    """The names that installed packages bring of a kind, each once."""
    return list(dict.fromkeys(plugin.name for plugin in installed_plugins() if plugin.kind == kind))


def find_plugin(kind: str, name: str) -> Plugin | None:
    """The plug-in of that name; None where no package brings one. What Bloomery itself has by that name comes first, so
    the caller looks there before. Raises UserError where two packages bring it: which is meant cannot be told.
    """
    plugins = [
        plugin for plugin in installed_plugins() if (plugin.kind, plugin.name) == (kind, name)
    ]
    if len(plugins) > 1:
        packages = " and ".join(plugin.package for plugin in plugins)
        fix = f"uninstall one of them: pip uninstall {plugins[-1].package}"
        raise plugins[0].error(f"is brought by {packages}", fix=fix)
    return plugins[0] if plugins else None
