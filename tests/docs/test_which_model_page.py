"""The tables of models by card are those of today's plans."""

import sys

from words_of_docs import ROOT

sys.path.append(str(ROOT / "scripts"))

import which_model_page as page

AGAIN = "run python scripts/which_model_page.py"


def test_the_tables_are_current() -> None:
    """A model of each card, from small to large: all rows take ten seconds."""
    text = page.PAGE.read_text(encoding="utf-8")
    models = page.known_models()
    for number, card in enumerate(page.CARDS):
        table = text.partition(f"## {card.title}\n")[2].partition("\n## ")[0]
        name = models[number * (len(models) - 1) // (len(page.CARDS) - 1)]
        cells = page.row(name, card)
        expected = f"`{name}`" if cells is None else f"| {' | '.join(cells)} |\n"
        assert expected in table, AGAIN


def test_every_card_and_every_missing_model_is_named() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert all(f"## {card.title}\n" in text for card in page.CARDS), AGAIN
    assert "\n".join(page.missing()) in text, AGAIN
    assert len(page.MODELS) == 25 and len(page.known_models()) >= 12


def test_a_row_is_what_the_plan_says() -> None:
    card = page.CARDS[0]
    cells = page.row("Qwen/Qwen3-1.7B", card)
    plan = page.planned("Qwen/Qwen3-1.7B", "LoRA", card)
    assert plan is not None and cells is not None
    assert plan.memory.fits and plan.adapter.kind == "lora" and plan.quantize.kind == "none"
    assert cells[3:5] == [str(plan.train.micro_batch_size), f"{plan.memory.total / 2**30:.1f}"]
    # Weights of 2 bytes, and the whole on a card of 12 GB.
    assert 3.3 < float(cells[4]) < 12
    assert page.planned("Qwen/Qwen3-32B", "QLoRA", card) is None
