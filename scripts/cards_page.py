"""Writes the tables of docs/reference/cards.md: the parts of `bloomery doctor --gpu-check`, and who ran it on what.

    python scripts/cards_page.py

A row for each file in benchmarks/results/gpu-check/. Raises an error for a file that is no result, of `--tiny`, or of a
device that was simulated.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from bloomery.bench.gpu_check.parts import PARTS
from bloomery.bench.gpu_check.results import CheckResult, read_result

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference/cards.md"
RESULTS = ROOT / "benchmarks/results/gpu-check"
TABLES = re.compile(r"<!-- (parts|cards) -->\n.*?<!-- end -->", re.DOTALL)
NONE = "Nobody has sent a result yet: no GPU has run this check, and no figure of this project was measured on one."


def parts_table() -> Iterator[str]:
    yield "| part | what it does | what the file has of it | minutes at most |"
    yield "|---|---|---|--:|"
    for part in PARTS:
        yield f"| `{part.name}` | {part.does} | {part.keeps} | {part.seconds / 60:.1f} |"
    total = sum(part.seconds for part in PARTS) / 60
    yield f"| together | | | {total:.0f} |"


def cards_table(results: list[CheckResult]) -> Iterator[str]:
    """A row for each result, the newest first."""
    if not results:
        yield NONE
        return
    yield "| card | driver | PyTorch | day | by | passed | did not pass | skipped |"
    yield "|---|---|---|---|---|--:|---|---|"
    for result in sorted(results, key=lambda each: each.day, reverse=True):
        card = result.card
        memory = f", {card.memory_gib:.0f} GiB" if card.memory_gib else ""
        skipped = [part.part for part in result.parts if part.outcome == "skipped"]
        cells = (
            f"{card.name}{memory}",
            card.driver,
            card.torch,
            result.day,
            result.by or "anonymous",
            str(len(result.passed)),
            ", ".join(result.failed) or "none",
            ", ".join(skipped) or "none",
        )
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def results_in(folder: Path) -> list[CheckResult]:
    """Raises UserError for a file that is no result, ValueError for one that says nothing of a card."""
    results = []
    for file in sorted(folder.glob("*.json")):
        result = read_result(file)
        if result.card.is_simulated or result.card.device == "cpu":
            raise ValueError(f"{file.name} is no result of a card, but of {result.card.torch}")
        if result.tiny:
            raise ValueError(f"{file.name} is of --tiny, which proves little about a card")
        results.append(result)
    return results


def refreshed(text: str, results: list[CheckResult]) -> str:
    """The page with today's tables."""
    tables = {"parts": list(parts_table()), "cards": list(cards_table(results))}

    def table(match: re.Match[str]) -> str:
        name = match[1]
        return "\n".join([f"<!-- {name} -->", *tables[name], "<!-- end -->"])

    return TABLES.sub(table, text)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(refreshed(text, results_in(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    main()
