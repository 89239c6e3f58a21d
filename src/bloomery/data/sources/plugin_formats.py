"""Dataset formats of installed packages: a function makes of a row one that Bloomery reads, such as {"messages": ...}.

The entry point `bloomery.formats` names a function from a dict (a row of the dataset) to a dict.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bloomery.core.plugins import Plugin, find_plugin
from bloomery.data.examples import BadRow, kind_of
from bloomery.data.sources.formats import FORMATS
from bloomery.data.sources.picture_files import (
    CAPTIONED,
    WEBDATASET,
    read_captioned,
    read_webdataset,
)
from bloomery.data.sources.readers import Value, read_values

# Makes of a row of the dataset a row in a format of Bloomery; raises for a row that it cannot read.
RowConverter = Callable[[dict[str, Any]], dict[str, Any]]


@functools.cache
def format_plugin(format: str) -> Plugin | None:
    """The plug-in of a `data.format`; None for formats of Bloomery. Raises UserError where two packages bring it."""
    return None if format in FORMATS else find_plugin("formats", format)


def is_row_format(format: str) -> bool:
    """Whether this `data.format` reads rows, not texts or tokens."""
    return format in FORMATS or format_plugin(format) is not None


def read_rows(
    path: Path, name: str, file_format: str, columns: list[str] | None = None, *, format: str
) -> Iterator[Value | BadRow]:
    """The values of a file as `read_values` reads them; where a plug-in brings `format`, the rows that it makes of
    them. `columns`: those to read of a table; a plug-in reads all.
    """
    plugin = format_plugin(format)
    if plugin is None:
        yield from _values(path, name, file_format, columns)
        return
    converter = plugin.load_function()
    for value in _values(path, name, file_format):
        yield _converted(value, converter, plugin) if isinstance(value, Value) else value


def _values(
    path: Path, name: str, file_format: str, columns: list[str] | None = None
) -> Iterator[Value | BadRow]:
    if file_format == CAPTIONED:
        yield from read_captioned(path, name)
    elif file_format == WEBDATASET:
        yield from read_webdataset(path, name)
    else:
        yield from read_values(path, name, file_format, columns)


def _converted(value: Value, converter: RowConverter, plugin: Plugin) -> Value | BadRow:
    """A row that the plug-in cannot read is an error of this row, as with Bloomery's own formats."""
    fix = f"correct it, set data.on_error=skip, or ask the authors of {plugin.package}"
    if not isinstance(value.content, dict):
        problem = f"is {kind_of(value.content)}, not a row: the format {plugin.name} reads rows"
        return BadRow(value.where, problem, fix)
    try:
        row: Any = converter(dict(value.content))
    except Exception as error:  # a plug-in can raise anything
        reason = f"the format {plugin.name} of {plugin.origin} cannot read this row"
        return BadRow(value.where, f"{reason}: {type(error).__name__}: {error}", fix)
    if not isinstance(row, dict):
        problem = (
            f"the format {plugin.name} of {plugin.origin} made {kind_of(row)} of it, not a row"
        )
        return BadRow(value.where, problem, fix)
    return replace(value, content=row)
