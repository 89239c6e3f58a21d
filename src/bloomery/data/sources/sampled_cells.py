"""The first rows of a file as cells: what its columns hold, before anything says what they are for. No torch."""

import zlib
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import Any

from bloomery.core.errors import UserError
from bloomery.data.sources.files import SourceFile
from bloomery.data.sources.plugin_formats import read_rows
from bloomery.data.sources.readers import Value
from bloomery.facts.columns import is_empty

SAMPLED_ROWS = 30


def first_rows(file: SourceFile, format: str, count: int) -> list[dict[str, Any]]:
    """Without those that cannot be read; none of texts, and of files that cannot be read, which reading the dataset
    reports. `format`: as data.format.
    """
    if file.format in ("text", "code"):
        return []
    rows = list[dict[str, Any]]()
    with suppress(UserError, OSError, EOFError, ValueError, zlib.error):
        for value in islice(read_rows(file.path, file.shown, file.format, format=format), count):
            if isinstance(value, Value) and isinstance(value.content, dict):
                rows.append(value.content)
    return rows


def sample_cells(file: SourceFile, format: str) -> dict[str, Any]:
    """The columns of the first rows, each with the longest text that it has there: a first row with empty cells says
    little about its columns. {} where there are no rows.
    """
    return longest_cells(first_rows(file, format, SAMPLED_ROWS))


def longest_cells(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Each column of these rows with its longest text, else the first of its values that is not empty."""
    cells = dict[str, Any]()
    for row in rows:
        for name, cell in row.items():
            longest_cell = cells.setdefault(str(name), cell)
            is_longer = (
                isinstance(longest_cell, str)
                and isinstance(cell, str)
                and len(cell) > len(longest_cell)
            )
            if is_longer or is_empty(longest_cell):
                cells[str(name)] = cell
    return cells
