"""A hook of mkdocs (mkdocs.yml): links out of docs/ stay as written, and the search has the pages of users alone."""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?:src|tests|scripts|benchmarks)/[^)]+)\)")
# Pages for people who change Bloomery. They are in the navigation, under Contributing, and not in the search.
OF_CONTRIBUTORS = ("contributing/", "decisions/", "reference/triton-kernels.md")
# Where pages have the same words, a page of what to do comes before one of why, and a page of another's document last.
BOOSTS = {
    "getting-started/": 2.0,
    "how-to/": 2.0,
    "tutorials/": 1.5,
    "reference/recipe.md": 2.0,
    "reference/events.md": 0.5,
    "guides/": 0.5,
}


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """MkDocs warns of a target that is no page; HTML is not checked. tests/docs checks that these files exist."""
    # As the head of a page would say it, for the theme's search.
    if page.file.src_uri.startswith(OF_CONTRIBUTORS):
        page.meta["search"] = {"exclude": True}
    for place, boost in BOOSTS.items():
        if page.file.src_uri.startswith(place):
            page.meta["search"] = {"boost": boost}
    return OUTSIDE.sub(r'<a href="\2">\1</a>', markdown)
