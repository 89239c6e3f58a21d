"""Optimizers, families and objectives of installed packages, added before the recipe's schema is built. No torch."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

from bloomery.core.errors import UserError
from bloomery.core.plugins import Plugin, find_plugin, installed_plugins
from bloomery.facts.families import FAMILIES
from bloomery.facts.family import Family
from bloomery.facts.objectives import OBJECTIVES, ObjectiveSpec
from bloomery.facts.optimizers import OPTIMIZERS, OptimizerSpec
from bloomery.recipe.objectives import OBJECTIVE_SECTIONS, ObjectiveSection


@dataclass(frozen=True)
class ObjectivePlugin:
    """An objective of an installed package: `spec.kind` is its name, and the literal of the section's `kind`."""

    spec: ObjectiveSpec
    section: type[ObjectiveSection]


def _add_objective(name: str, objective: ObjectivePlugin) -> None:
    kinds = get_args(objective.section.model_fields["kind"].annotation)
    if objective.spec.kind != name or kinds != (name,):
        raise UserError(
            f"its spec is of kind {objective.spec.kind!r}, its section of {', '.join(kinds) or 'any'}",
            where=f"the objective {name}",
            fix=f"give the entry point, the spec and the section's kind one name: {name}",
        )
    OBJECTIVES.add(name, objective.spec)
    OBJECTIVE_SECTIONS.add(name, objective.section)


@dataclass(frozen=True)
class _Extension:
    """A kind of plug-in: the type of its object, the names that are taken, and what adds one."""

    entry_type: type
    names: Collection[str]
    add: Callable[[str, Any], None]


_EXTENSIONS: MappingProxyType[str, _Extension] = MappingProxyType(
    {
        "families": _Extension(Family, FAMILIES, FAMILIES.add),
        "optimizers": _Extension(OptimizerSpec, OPTIMIZERS, OPTIMIZERS.add),
        "objectives": _Extension(ObjectivePlugin, OBJECTIVES, _add_objective),
    }
)
_unusable: dict[tuple[str, str], UserError] = {}
_added: set[Plugin] = set()
_usable: set[Plugin] = set()


def add_plugins() -> None:
    """Adds what the installed packages bring, once a process.

    A package that cannot be used is left out, so that recipes without it still work: `refuse_unusable` names it where
    a recipe asks for it, and `bloomery doctor` lists it.
    """
    for plugin in installed_plugins():
        if plugin.kind not in _EXTENSIONS or plugin in _added:
            continue
        _added.add(plugin)
        # A recipe that writes a name of Bloomery's own means that one.
        if plugin.name in _EXTENSIONS[plugin.kind].names:
            continue
        try:
            _add_plugin(plugin)
        except UserError as error:
            _unusable[plugin.kind, plugin.name] = error


def _add_plugin(plugin: Plugin) -> None:
    """Raises UserError for a plug-in that cannot be imported, is of another type, or is brought by two packages."""
    find_plugin(plugin.kind, plugin.name)
    extension = _EXTENSIONS[plugin.kind]
    entry = plugin.load()
    if not isinstance(entry, extension.entry_type):
        type_name = extension.entry_type.__name__
        fix = f"name an instance of {extension.entry_type.__module__}.{type_name}"
        raise plugin.error(f"is no {type_name} but a {type(entry).__name__}", fix=fix)
    try:
        extension.add(plugin.name, entry)
    except UserError as error:
        raise plugin.error(f"cannot be used: {error.problem}", fix=error.fix) from error
    _usable.add(plugin)


def refuse_unusable(kind: str, name: object) -> None:
    """Raises the error of a plug-in that a recipe asks for and that could not be added."""
    error = _unusable.get((kind, name)) if isinstance(name, str) else None
    if error is not None:
        raise error


def unusable(plugin: Plugin) -> UserError | None:
    """Why this plug-in was not added to its table; None where it was."""
    if plugin in _usable:
        return None
    return _unusable.get((plugin.kind, plugin.name), plugin.taken_error())
