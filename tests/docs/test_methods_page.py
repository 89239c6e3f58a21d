"""The tables and pictures of how training methods compare are those of the last measurement and of today's planner."""

import json
import sys

import pytest
from words_of_docs import ROOT

sys.path.append(str(ROOT / "scripts"))
sys.path.append(str(ROOT / "benchmarks"))

import methods
import methods_page


@pytest.mark.parametrize("page", methods_page.PAGES, ids=lambda path: path.name)
def test_a_page_shows_what_was_measured_and_what_is_planned_today(page):
    text = page.read_text(encoding="utf-8")
    assert methods_page.BLOCK.search(text)
    assert methods_page.refreshed(text) == text, "run scripts/methods_page.py"


def test_every_method_was_measured_on_the_same_tokens():
    found = methods_page.report()
    assert [row["name"] for row in found["rows"]] == list(methods.METHODS)
    assert len({(row["tokens"], row["loss_tokens"]) for row in found["rows"]}) == 1
    for row in found["rows"]:
        assert row["held_out"] < found["before"]["loss"]
    assert set(found["spectra"]) == set(methods.CHANGED)


def test_a_lora_of_rank_8_has_no_more_than_8_directions():
    spectra = methods_page.report()["spectra"]
    assert spectra["LoRA r8"]["caught"]["8"] == pytest.approx(1.0, abs=1e-6)
    assert spectra["full"]["caught"]["8"] < 0.99


@pytest.mark.parametrize("name", list(methods_page.PICTURES))
def test_a_picture_is_drawn_from_todays_figures(name):
    text = (methods_page.FIGURES / f"{name}.svg").read_text(encoding="utf-8")
    assert methods_page.DRAWN.findall(text) == [methods_page.number()], (
        "run scripts/methods_page.py --draw"
    )
    assert any(
        f"figures/{name}.svg" in page.read_text(encoding="utf-8") for page in methods_page.PAGES
    )


def test_shares_of_a_change_are_those_of_its_singular_values():
    import torch

    change = torch.diag(torch.tensor([3.0, 4.0, 0.0]))
    values = torch.linalg.svdvals(change)
    assert methods.caught([values], 1) == pytest.approx(16 / 25)
    assert methods.caught([values, values], 2) == pytest.approx(1.0)
    assert json.dumps(methods.table(methods_page.report()))
