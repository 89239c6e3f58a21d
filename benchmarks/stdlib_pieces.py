"""The functions and classes of the standard library as documents: short, long and real, on every machine."""

import ast
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bloomery.data.sources.builtin import stdlib_files


def pieces() -> Iterator[str]:
    """The source of each function and class that stands at the top of a module, with its decorators."""
    for file in stdlib_files():
        source = file.path.read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            body = ast.parse(source).body
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                yield "".join(lines[first - 1 : node.end_lineno])


def write_pieces(path: Path) -> None:
    """JSON lines with the column `text`."""
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in pieces()), encoding="utf-8"
    )


def described(lengths: np.ndarray, *, sequence_length: int) -> dict[str, float]:
    """The distribution of document lengths in tokens, and what padding makes of it."""
    kept = np.minimum(lengths, sequence_length)
    deciles = {
        f"p{share}": float(np.percentile(lengths, share)) for share in (10, 25, 50, 75, 90, 99)
    }
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "mean": float(lengths.mean()),
        **deciles,
        "max": int(lengths.max()),
        "real share when padded": float(kept.sum() / (len(kept) * sequence_length)),
        "tokens cut off when padded": float(1 - kept.sum() / lengths.sum()),
    }
