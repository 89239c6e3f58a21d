"""docs/reference/recipe.md and recipes/everything.yaml are what `python scripts/recipe_page.py` writes today."""

import importlib.util
import re
import sys
from types import ModuleType

import pytest
from words_of_docs import ROOT

from bloomery.core.errors import UserError
from bloomery.recipe.aliases import all_keys
from bloomery.recipe.load import dump_recipe, json_schema, load_recipe
from bloomery.recipe.values import write_memory


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe_page", ROOT / "scripts/recipe_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there for its module
    spec.loader.exec_module(module)
    return module


def test_both_files_are_current(script) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), (
        "run python scripts/recipe_page.py"
    )
    assert script.EVERYTHING.read_text(encoding="utf-8") == script.everything(), (
        "run python scripts/recipe_page.py"
    )


def test_every_key_has_a_description_and_an_anchor(script) -> None:
    schema, page = json_schema(), script.page()
    for section in [schema, *schema["$defs"].values()]:
        for key, part in section.get("properties", {}).items():
            assert part.get("description"), f"{section.get('title')}.{key}"
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    anchors = re.findall(r'<a id="([^"]+)">', page)
    assert len(anchors) > 300
    for path in all_keys():
        assert ".".join(path) in {*anchors, *headings}, path
    # Every form of a section has a key of its own, too: `objective.beta` has other defaults in grpo and dpo.
    assert {"objective.grpo.beta", "objective.dpo.beta", "rewards.python.memory"} <= set(anchors)
    links = [*anchors, *(script.slug(title) for title in headings)]
    assert sorted(set(links)) == sorted(links), "two places have one anchor"
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= set(links)


def test_no_key_stands_twice_in_a_table_and_no_heading_twice(script) -> None:
    page = script.page()
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    assert len(set(headings)) == len(headings)
    for section in re.split(r"^#+ ", page, flags=re.MULTILINE):
        keys = re.findall(r"^\| (?:<a [^|]*</a>)?\[?`([^`|]+)`", section, re.MULTILINE)
        assert len(set(keys)) == len(keys), section.splitlines()[0]


def test_sizes_are_written_with_a_unit(script) -> None:
    """4GiB, not 4294967296: also in what `bloomery recipes show` and a run's recipe.yaml print."""
    assert re.findall(r"`\d{8,}`", script.page()) == []
    assert "`4GiB`" in script.page()
    assert write_memory(4 * 2**30) == "4GiB"
    assert write_memory(1500 * 2**20) == "1500MiB"
    assert write_memory(500_000_000) == 500_000_000
    text = dump_recipe(load_recipe("demo-rl", ['rewards=[{python: "a.py:f", memory: 8GiB}]']))
    assert '"memory": "8GiB"' in text
    assert "4294967296" not in text


def test_the_example_of_each_section_loads(script, tmp_path) -> None:
    schema = json_schema()
    tables = [table for table in script.tables(schema, (), schema) if table.section["properties"]]
    assert [table.title for table in tables if table.title not in script.EXAMPLES] == []
    assert [
        title for title in script.EXAMPLES if title not in {table.title for table in tables}
    ] == []
    for table in tables:
        text = script.EXAMPLES[table.title]
        sections = {line.partition(":")[0] for line in text.splitlines()}
        text += "" if "model" in sections else "model: {from: Qwen/Qwen3-0.6B}\n"
        text += "" if "data" in sections else "data: {path: chats.jsonl}\n"
        file = tmp_path / "example.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            recipe = load_recipe(file).recipe
        except UserError as fault:
            fault.add_note(table.title)
            raise
        # The example shows the section that it stands in.
        value = recipe
        for key in table.path:
            value = getattr(value, "from_" if key == "from" else key)
            value = value[0] if isinstance(value, list) else value
        assert value is not None, table.title
        if "kind" in table.section["properties"]:
            assert value.kind in table.kinds or not table.kinds, table.title


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
