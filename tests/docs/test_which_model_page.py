"""The tables of models by card are those of today's plans."""

import sys

from words_of_docs import ROOT

sys.path.append(str(ROOT / "scripts"))

import which_model_page as page

from bloomery.plan.which_model import ModelFit, known_models, model_fit

AGAIN = "run python scripts/which_model_page.py"


def fit_on(card: page.Card, name: str) -> ModelFit:
    return model_fit(name, page.machine(card), count=card.count)


def test_the_tables_are_current() -> None:
    """A model of each card, from small to large: all rows take ten seconds."""
    text = page.PAGE.read_text(encoding="utf-8")
    models = known_models()
    for number, card in enumerate(page.CARDS):
        table = text.partition(f"## {card.title}\n")[2].partition("\n## ")[0]
        name = models[number * (len(models) - 1) // (len(page.CARDS) - 1)]
        cells = page.cells(fit_on(card, name))
        expected = f"`{name}`" if cells is None else f"| {' | '.join(cells)} |\n"
        assert expected in table, AGAIN


def test_every_card_and_every_missing_model_is_named() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert all(f"## {card.title}\n" in text for card in page.CARDS), AGAIN
    assert "\n".join(page.missing()) in text, AGAIN
    assert len(page.MODELS) == 25 and len(known_models()) >= 12


def test_a_row_is_what_the_plan_says() -> None:
    card = page.CARDS[0]
    fit = fit_on(card, "Qwen/Qwen3-1.7B")
    cells, plan = page.cells(fit), fit.plan
    assert plan is not None and cells is not None
    assert plan.memory.fits and plan.adapter.kind == "lora" and plan.quantize.kind == "none"
    assert cells[3:5] == [str(plan.train.micro_batch_size), f"{plan.memory.total / 2**30:.1f}"]
    # Weights of 2 bytes, and the whole on a card of 12 GB.
    assert 3.3 < float(cells[4]) < 12
    assert fit_on(card, "Qwen/Qwen3-32B").plan is None
