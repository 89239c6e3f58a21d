"""Tiny models with a tokenizer, as folders that can be exported to GGUF."""

import shutil
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent / "model"))

import tiny_models

from models_for_tests import make_tokenizer

VOCABULARY = 320


def saved_case(case: str, folder: Path, **changed) -> Path:
    """A case of tiny_models with the byte-level tokenizer of models_for_tests."""
    prefix, settings = tiny_models.CASES[case]
    tiny_models.CASES["changed"] = (prefix, settings | {"vocab_size": VOCABULARY} | changed)
    try:
        tiny_models.saved_reference("changed", folder)
    finally:
        del tiny_models.CASES["changed"]
    (folder / "tokenizer").mkdir()
    make_tokenizer(folder / "tokenizer")
    for path in (folder / "tokenizer").iterdir():
        shutil.move(path, folder / path.name)
    (folder / "tokenizer").rmdir()
    return folder


def tokens(length: int = 24) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(3)).tolist()
