"""The table of architectures is that of the stored result, and says what the promise is."""

import sys

from words_of_docs import ROOT

sys.path.append(str(ROOT / "scripts"))

import architectures
import models_page

from bloomery.facts.families import FAMILIES


def test_the_table_is_current() -> None:
    text = models_page.PAGE.read_text(encoding="utf-8")
    assert models_page.BLOCK.search(text)
    assert models_page.refreshed(text) == text, "run python scripts/models_page.py"


def test_nine_of_ten_dense_and_hybrid_architectures_go_the_whole_way() -> None:
    rows = [row for row in architectures.stored_rows().values() if row.kind == "dense or hybrid"]
    assert len(rows) >= 50
    assert sum(row.passes for row in rows) >= 0.9 * len(rows)
    assert all(row.passes or len(row.problem) > 10 for row in rows)


def test_every_family_of_text_was_measured() -> None:
    assert FAMILIES.keys() <= architectures.stored_rows().keys()
