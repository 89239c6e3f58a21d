"""The generated pages of docs/reference are current, and what they show is what the code accepts."""

import ast
import inspect
import re
import sys
from dataclasses import fields

import pytest
from words_of_docs import ROOT, quoted

sys.path.append(str(ROOT / "scripts"))

import python_page
import reference_pages

import bloomery
from bloomery.cli import COMMANDS
from bloomery.data.sources.formats import FORMATS
from bloomery.hardware.specs import gpu_table
from bloomery.monitor.events import KINDS


@pytest.mark.parametrize("path", reference_pages.PAGES, ids=lambda path: path.name)
def test_a_page_is_current(path) -> None:
    made = reference_pages.PAGES[path]().rstrip() + "\n"
    assert path.read_text(encoding="utf-8") == made, "run python scripts/reference_pages.py"


def test_every_command_has_a_section() -> None:
    page = reference_pages.commands_page()
    assert all(f"\n## {name}\n" in page for name in COMMANDS)


def test_every_format_has_samples_that_are_read_as_that_format() -> None:
    assert set(reference_pages.SAMPLES) == set(FORMATS)
    for name, rows in reference_pages.SAMPLES.items():
        assert all(reference_pages.example_of(name, row).kind for row in rows)
        needed = set(FORMATS[name].required_roles)
        assert all(needed <= set(row) for row in rows)
    assert reference_pages.takers("messages") == ["pretrain", "sft", "distill"]
    assert reference_pages.takers("preference") == ["dpo", "ipo", "simpo", "orpo", "kto", "reward"]
    assert reference_pages.takers("kto") == ["kto"]


def test_every_event_has_a_section_with_its_fields() -> None:
    sections = dict(
        part.partition("\n")[::2] for part in reference_pages.events_page().split("\n## ")[1:]
    )
    assert set(sections) == set(KINDS)
    for name, kind in KINDS.items():
        assert {field.name for field in fields(kind)} - {"step", "time"} <= set(
            quoted(sections[name])
        ), name


def test_every_gpu_has_a_row() -> None:
    page = reference_pages.hardware_page()
    assert all(f"| {spec.name} | {spec.arch} |" in page for spec in gpu_table().gpu)


def test_the_python_api_is_plain_markdown_with_every_function() -> None:
    """Readable on a code host, too: no directive of a site builder, no signature with a lambda."""
    page = python_page.page()
    assert ":::" not in page
    assert "lambda" not in page
    assert {f"### {name}" for name in bloomery.__all__ if name != "__version__"} <= set(
        page.splitlines()
    )
    sections = dict(part.partition("\n")[::2] for part in page.split("\n### ")[1:])
    for name in python_page.FUNCTIONS:
        parameters = inspect.signature(getattr(bloomery, name)).parameters
        signature, _, text = sections[name].partition("```python\n")[2].partition("```")
        assert [
            parameter for parameter in parameters if not re.search(rf"\b{parameter}\b", signature)
        ] == []
        assert "```python" in text, f"{name} has no example"
        for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            ast.parse(example)
