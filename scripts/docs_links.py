"""A hook of mkdocs (mkdocs.yml): links out of docs/ stay as written, and the search has the pages of users alone."""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?:src|tests|scripts|benchmarks)/[^)]+)\)")
# Pages for people who change Bloomery. They are in the navigation, under Contributing, and not in the search.
OF_CONTRIBUTORS = ("contributing/", "decisions/", "reference/triton-kernels.md")


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """MkDocs warns of a target that is no page; HTML is not checked. tests/docs checks that these files exist."""
    if page.file.src_uri.startswith(OF_CONTRIBUTORS):
        page.meta["search"] = {"exclude": True}  # as in the head of a page, for the theme's search
    return OUTSIDE.sub(r'<a href="\2">\1</a>', markdown)
