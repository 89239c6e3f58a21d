"""A hook of mkdocs (mkdocs.yml): links to files of the repository outside docs/ stay as they are written."""

import re

OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?:src|tests|scripts|benchmarks)/[^)]+)\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """MkDocs warns of a target that is no page; HTML is not checked. tests/docs checks that these files exist."""
    return OUTSIDE.sub(r'<a href="\2">\1</a>', markdown)
