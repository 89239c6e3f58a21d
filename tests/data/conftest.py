"""Recipes and corpora small enough to see through."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from small_text import sentences

from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.schema import Recipe

# For its first text Hypothesis makes a table of all characters, which on busy cores takes longer than it allows itself.
settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture
def recipe_of() -> Callable[..., LoadedRecipe]:
    def make(
        *, tokenizer: dict[str, Any] | None = None, objective: str = "pretrain", **data: Any
    ) -> LoadedRecipe:
        tokenizer = {"train": {"vocab_size": 300}} if tokenizer is None else tokenizer
        recipe_fields = {
            "model": {"preset": "go-coder-tiny"},
            "tokenizer": tokenizer,
            "data": {"sequence_length": 16, "num_proc": 0, **data},
            "objective": {"kind": objective},
        }
        return LoadedRecipe(Recipe.model_validate(recipe_fields), "small")

    return make


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of 60 text files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index, text in enumerate(sentences(60)):
        (folder / f"{index:03d}.txt").write_text(text)
    return folder
