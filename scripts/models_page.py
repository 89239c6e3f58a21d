"""Rewrites the table of architectures in docs/reference/models.md: `python scripts/models_page.py`.

The rows are those of scripts/architectures.json, which `scripts/architectures.py --store` measures, beside what
`facts.families` says of the native ones. A test compares the page with this output.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

import architectures
from architectures import Row

from bloomery.facts.families import FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "models.md"
BLOCK = re.compile(r"<!-- architectures -->\n.*?<!-- end -->", re.DOTALL)
PACKED = {
    "positions": "document mask",
    "masks": "document mask",
    "mask": "document mask",
    "rows": "each document a row",
}
# The other kinds of a row: what is said of those that pass, and of those that do not.
KINDS = {
    "multimodal": (
        "Multimodal models whose language model goes the whole way",
        "Multimodal models that do not open as a whole (some language models have a row above)",
    ),
    "decoder of an encoder": (
        "Decoders of an encoder-decoder that go the whole way",
        "Decoders of an encoder-decoder that do not",
    ),
    "part of another model": ("", "Parts of other models, which decode no text by themselves"),
}


def table() -> str:
    """Everything between the two marks."""
    versions = json.loads(architectures.RESULT.read_text(encoding="utf-8"))["versions"]
    rows = list(architectures.stored_rows().values())
    text_rows = [row for row in rows if row.kind in ("dense or hybrid", "experts")]
    dense = [row for row in text_rows if row.kind == "dense or hybrid"]
    mixtures = [row for row in text_rows if row.kind == "experts"]
    summary = (
        f"Of the {len(dense)} dense and hybrid decoders of text of transformers {versions['transformers']},"
        f" {sum(row.passes for row in dense)} go the whole way as tiny random models on a CPU, and of its"
        f" {len(mixtures)} mixtures of experts {sum(row.passes for row in mixtures)}:"
        " logits within 1e-4 of transformers', packed documents within 1e-5 of each alone, a continued text,"
        " three steps of AdamW beside transformers' own, and an export that it opens with equal logits. No real"
        " weights were run."
    )
    lines = [
        *_wrapped(summary),
        "",
        "| `model_type` | layers | packed rows | GGUF | |",
        "|---|---|---|---|---|",
        *(_line(row) for row in text_rows),
        "",
        *_others(rows),
    ]
    return "\n".join(lines)


def _line(row: Row) -> str:
    family = FAMILIES.get(row.name)
    has_graph = family is not None and family.gguf is not None
    gguf = "yes" if has_graph and row.layers == "native" else ""
    verdict = "tested whole" if row.passes else f"not: {row.problem}"
    layers = {"native": "native", "transformers": "transformers'"}.get(row.layers, "")
    return f"| `{row.name}` | {layers} | {PACKED.get(row.documents, '')} | {gguf} | {verdict} |"


def _others(rows: list[Row]) -> Iterator[str]:
    for kind, (passing_title, refused_title) in KINDS.items():
        of_kind = [row for row in rows if row.kind == kind]
        passing = [f"`{row.name}`" for row in of_kind if row.passes]
        refused = [f"`{row.name}`" for row in of_kind if not row.passes]
        if passing:
            yield from _wrapped(f"- {passing_title}: {', '.join(passing)}.")
        if refused:
            yield from _wrapped(f"- {refused_title}: {', '.join(refused)}.")


def _wrapped(paragraph: str) -> list[str]:
    indent = "  " if paragraph.startswith("- ") else ""
    return wrap(paragraph, 118, subsequent_indent=indent, break_on_hyphens=False)


def refreshed(text: str) -> str:
    """The page with the table made anew."""
    return BLOCK.sub(lambda _: f"<!-- architectures -->\n{table()}\n<!-- end -->", text)


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = refreshed(before)
    PAGE.write_text(after, encoding="utf-8")
    sys.stdout.write(f"{PAGE.name}{' is rewritten' if after != before else ''}\n")
