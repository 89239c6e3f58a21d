"""The tables of docs/how-to/migrate-from-*.md are the answers of the recipe's aliases today."""

import shlex
import sys

import pytest
from words_of_docs import ROOT, quoted

from bloomery.recipe.aliases import ROLLOUTS, accepted

sys.path.append(str(ROOT / "scripts"))

import migration_pages


@pytest.mark.parametrize("page", migration_pages.PAGES, ids=lambda page: page.stem)
def test_a_table_is_what_the_aliases_answer(page) -> None:
    text = page.read_text(encoding="utf-8")
    assert migration_pages.refreshed(text) == text, "run python scripts/migration_pages.py"
    tables = migration_pages.TABLE.findall(text)
    assert len(tables) >= 1
    assert sum(len(migration_pages.FIRST.findall(table)) for _, table in tables) >= 15


@pytest.mark.parametrize("page", migration_pages.PAGES, ids=lambda page: page.stem)
def test_the_edits_of_a_table_load_in_a_recipe(page) -> None:
    for program, table in migration_pages.TABLE.findall(page.read_text(encoding="utf-8")):
        for line in table.splitlines():
            cell = line.rstrip("| ").rpartition(" | ")[2]
            edits = [
                edit
                for edit in quoted(cell.partition(" (")[0])
                if "=" in edit and " RUN" not in edit
            ]
            kinds = [edit for edit in edits if ".kind=" in edit]
            for edit in edits:
                is_of_rollouts = program == ROLLOUTS or line.startswith("| `trl.")
                objectives = ("grpo", "ppo") if is_of_rollouts else ("dpo", "distill")
                lora = edit.startswith("adapter.") and "adapter.kind=lora" not in kinds
                adapter = ["adapter.kind=lora"] if lora else []
                needs_objective = edit.startswith("objective.") and not kinds
                assert any(
                    accepted(
                        edit,
                        *kinds,
                        *([f"objective.kind={objective}"] if needs_objective else []),
                        *adapter,
                    )
                    for objective in objectives
                ), shlex.quote(edit)
