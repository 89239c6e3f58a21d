"""A table of entries by name, to which installed packages add theirs before the recipe's schema is built. No torch."""

from typing import Any, Literal, TypeVar, final

from bloomery.core.errors import UserError

Entry = TypeVar("Entry")


@final
class OpenTable(dict[str, Entry]):
    """Entries by name, in the order in which pages list them."""

    _is_closed = False

    def add(self, name: str, entry: Entry) -> None:
        """Another entry, before it is closed. Raises UserError for a name that is taken."""
        assert not self._is_closed, f"{name} comes too late: the schema is built"
        if name in self:
            raise UserError(
                f"the name {name} is taken",
                where="an installed package",
                fix="uninstall it, or ask its author to choose another name",
            )
        self[name] = entry

    def close(self) -> None:
        """No entry can be added from now on."""
        self._is_closed = True

    def name_literal(self) -> Any:
        """The names as a Literal, for a key of the recipe; no entry can be added from then on."""
        self.close()
        names = tuple(self)
        return Literal[names]
