"""docs/reference/recipe.md and recipes/everything.yaml are what `python scripts/recipe_page.py` writes today."""

import importlib.util
from types import ModuleType

import pytest
from words_of_docs import ROOT

from bloomery.recipe.aliases import all_keys
from bloomery.recipe.load import json_schema


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe_page", ROOT / "scripts/recipe_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_files_are_current(script) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), (
        "run python scripts/recipe_page.py"
    )
    assert script.EVERYTHING.read_text(encoding="utf-8") == script.everything(), (
        "run python scripts/recipe_page.py"
    )


def test_every_key_has_a_description_and_a_row(script) -> None:
    schema, page = json_schema(), script.page()
    for section in [schema, *schema["$defs"].values()]:
        for key, part in section.get("properties", {}).items():
            assert part.get("description"), f"{section.get('title')}.{key}"
    for path in all_keys():
        assert f"| `{path[-1]}` |" in page, path


def test_editors_accept_the_short_spellings() -> None:
    schema = json_schema()
    for section in ("adapter", "objective", "optimizer", "quantize"):
        first, *_ = schema["properties"][section]["anyOf"]
        assert "none" in first["enum"] or len(first["enum"]) > 2
    assert schema["$defs"]["Checkpoint"]["properties"]["every"]["default"] == "15m"
    assert any(
        one.get("type") == "array"
        for one in schema["$defs"]["Logging"]["properties"]["trackers"]["anyOf"]
    )
