"""The figure and the table of pipelines are those of the schedules that a step takes."""

import re
import sys
from xml.etree import ElementTree

import pytest
from words_of_docs import ROOT

sys.path.append(str(ROOT / "scripts"))

import pipeline_page
import plan_pages

from bloomery.plan.pipeline import bubble, most_in_flight

SVG = "{http://www.w3.org/2000/svg}"


def test_the_figure_is_current() -> None:
    assert pipeline_page.FIGURE.read_text(encoding="utf-8") == pipeline_page.figure(), (
        "run python scripts/pipeline_page.py"
    )


def test_the_table_is_current() -> None:
    text = pipeline_page.PAGE.read_text(encoding="utf-8")
    assert pipeline_page.TABLE.search(text)
    assert pipeline_page.refreshed(text) == text, "run python scripts/pipeline_page.py"


@pytest.mark.parametrize("stages", [2, 4, 6])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize(("schedule", "chunks"), pipeline_page.SCHEDULES.items())
def test_the_drawn_waiting_is_the_formula_of_the_bubble(schedule, chunks, rounds, stages) -> None:
    micro_batches = rounds * stages
    passes = pipeline_page.timeline(
        schedule, stages=stages, micro_batches=micro_batches, chunks=chunks
    )
    duration = max(one_pass.end for one_pass in passes)
    expected = bubble(stages=stages, micro_batches=micro_batches, chunks=chunks)
    for stage in range(stages):
        busy = sum(one_pass.end - one_pass.start for one_pass in passes if one_pass.stage == stage)
        assert 1 - busy / duration == pytest.approx(expected)


@pytest.mark.parametrize(("schedule", "chunks"), pipeline_page.SCHEDULES.items())
def test_the_first_stage_of_the_drawing_holds_what_the_table_states(schedule, chunks) -> None:
    passes = pipeline_page.timeline(schedule, stages=4, micro_batches=16, chunks=chunks)
    held = most = 0
    for one_pass in (one_pass for one_pass in passes if one_pass.stage == 0):
        held += 1 if one_pass.action.is_forward else -1
        most = max(most, held)
    expected = most_in_flight(schedule, stages=4, stage=0, micro_batches=16, chunks=chunks)
    assert most == expected
    assert (
        f"{most / chunks:g} |"
        in next(row for row in pipeline_page.table().splitlines() if row.startswith("| 4 | 16 |"))
        + " |"
    )


def test_the_figure_shows_each_pass_once_inside_its_borders() -> None:
    root = ElementTree.fromstring(pipeline_page.figure())
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    boxes = [box for box in root.iter(f"{SVG}rect") if "p" in box.attrib["class"].split()]
    chunks = sum(pipeline_page.SCHEDULES.values())
    passes = 2 * chunks * pipeline_page.STAGES * pipeline_page.MICRO_BATCHES
    legend = 4
    assert len(boxes) == passes + legend
    for box in boxes:
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height
    style = root.findtext(f"{SVG}style") or ""
    assert re.search(r"prefers-color-scheme:dark\)\{text\{fill:#e6edf3", style)


def test_the_uneven_cut_of_the_page_is_planned() -> None:
    edits = ["train.activation_checkpointing=auto"]
    plan = plan_pages._planned("llama2-7b-pipeline-2gpu", "RTX 4090", edits)
    first, last = plan.train.pipeline_layers
    text = pipeline_page.PAGE.read_text(encoding="utf-8")
    assert f"stages of {first} and {last} layers" in text
