"""Plug-ins on the command line: their commands, and what `bloomery doctor` says of each."""

from dataclasses import dataclass
from typing import Any

import click

from bloomery.cli import COMMANDS
from bloomery.core.errors import UserError
from bloomery.core.plugins import Plugin, find_plugin, installed_plugins


def plugin_command(name: str) -> click.Command | None:
    """The command that an installed package brings; None without one. Raises UserError where it is unusable."""
    plugin = find_plugin("commands", name)
    return None if plugin is None else checked_command(plugin)


def checked_command(plugin: Plugin) -> click.Command:
    """Raises UserError for an object that is no click command."""
    command = plugin.load()
    if not isinstance(command, click.Command):
        raise plugin.error(
            f"is no click command but a {type(command).__name__}",
            fix="write @click.command() above its function",
        )
    return command


@dataclass(frozen=True)
class PluginState:
    """A plug-in and why it cannot be used; `problem` is None where it can."""

    plugin: Plugin
    problem: UserError | None


def plugin_states() -> list[PluginState]:
    """Each installed plug-in, imported and checked as it is where it is used."""
    return [PluginState(plugin, _problem(plugin)) for plugin in installed_plugins()]


def _problem(plugin: Plugin) -> UserError | None:
    from bloomery.recipe.plugins import unusable
    from bloomery.recipe.schema import FORMAT_NAMES

    try:
        find_plugin(plugin.kind, plugin.name)  # another package may bring it, too
        if plugin.name in {"commands": COMMANDS, "formats": FORMAT_NAMES}.get(plugin.kind, ()):
            raise plugin.taken_error()
        match plugin.kind:
            case "commands":
                checked_command(plugin)
            case "formats" | "rewards":
                plugin.load_function()
            case _:  # they were added to their tables when the schema of recipes was built
                return unusable(plugin)
    except UserError as error:
        return error
    return None


def plugin_lines() -> list[str]:
    """A line for each plug-in, for the page of `bloomery doctor`."""
    lines = []
    for state in plugin_states():
        plugin = state.plugin
        problem = "" if state.problem is None else f": {state.problem.problem}"
        lines.append(f"{plugin.kind} {plugin.name} of {plugin.package} {plugin.version}{problem}")
    return lines


def plugin_documents() -> list[dict[str, Any]]:
    """The same as JSON: `problem` is null where the plug-in can be used."""
    return [
        {
            "kind": state.plugin.kind,
            "name": state.plugin.name,
            "package": state.plugin.package,
            "version": state.plugin.version,
            "problem": None if state.problem is None else state.problem.problem,
        }
        for state in plugin_states()
    ]
