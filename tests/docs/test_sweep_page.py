"""The measured sweep of docs/how-to/sweep.md is the one whose figures are stored."""

import sys

from words_of_docs import ROOT

sys.path.append(str(ROOT / "scripts"))

import sweep_page as page

AGAIN = "run python scripts/sweep_page.py"


def test_the_table_is_as_the_command_prints_it(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "118")
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.written(text) == text, AGAIN
    (table,) = page.TABLE.findall(text)
    assert table.count("optimizer.learning_rate") >= 1 and "95% interval" in table
