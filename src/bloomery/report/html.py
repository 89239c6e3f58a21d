"""HTML and SVG in which text cannot become markup and secrets cannot hide: whatever is not `Html` is cleaned first."""

from html import escape
from pathlib import Path

from bloomery.core.text import scrub


class Html(str):
    """Markup that was built here."""

    __slots__ = ()


def el(name: str, /, *children: str | None, **attributes: object) -> Html:
    """One element. Of an attribute's name a last `_` is dropped, others become `-`; what is None vanishes."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_clean(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: str | None) -> Html:
    """The children one after the other."""
    return Html("".join(child if isinstance(child, Html) else _clean(child) for child in children if child))


def prose(text: str) -> Html:
    """A sentence in which `code` stands between backticks."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one backtick has no partner: the text is no markup
        return join(text)
    return join(*(el("code", part) if at % 2 else part for at, part in enumerate(parts)))


def _clean(text: str) -> str:
    """Escaped, without secrets and without the path of the home folder."""
    home = str(Path.home())
    text = scrub(text)
    return escape(text.replace(home + "/", "~/") if len(home) > 1 else text)


def table(head: list[str], rows: list[list[str | Html]], **attributes: object) -> Html:
    """A table that scrolls sideways on a narrow screen instead of the page."""
    top = el("thead", el("tr", *(el("th", title, scope="col") for title in head))) if head else None
    body = el("tbody", *(el("tr", *(el("td", cell) for cell in row)) for row in rows))
    return el("div", el("table", top, body, **attributes), class_="scroll")


_VOID = frozenset({"meta", "br", "hr"})
