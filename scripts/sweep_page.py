"""Writes the table of a measured sweep into its page: `python scripts/sweep_page.py [SWEEP]`.

With the folder of a sweep its figures go to scripts/sweep_example.json first. The table is between `<!-- measured -->`
and `<!-- end -->` in docs/how-to/sweep.md, as the command prints it.
"""

import json
import os
import re
import sys
from pathlib import Path

from bloomery.cli.sweep import table_lines, verdict_lines
from bloomery.sweep.table import SweepRun, SweepTable, read_sweep

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "scripts/sweep_example.json"
PAGE = ROOT / "docs/how-to/sweep.md"
TABLE = re.compile(r"<!-- measured -->\n.*?<!-- end -->", re.DOTALL)
COLUMNS = 118


def stored(table: SweepTable) -> dict[str, object]:
    """What the page needs of a sweep, without folders of a machine."""
    runs = [
        {
            "settings": dict(run.settings),
            "run": run.run.name,
            "metric": run.metric,
            "interval": run.interval,
            "p_value": run.p_value,
            "contender": run.contender,
        }
        for run in table.runs
    ]
    return {"sweep": table.path.name, "p_limit": table.p_limit, "runs": runs}


def shown(figures: dict[str, object]) -> str:
    """The table as on a terminal of 118 columns, and the verdict without the commands after it."""
    path = Path("runs").absolute() / str(figures["sweep"])
    rows = figures["runs"]
    assert isinstance(rows, list), "a list of runs"
    runs = tuple(
        SweepRun(
            row["settings"],
            path / row["run"],
            row["metric"],
            tuple(row["interval"]),
            row["p_value"],
            row["contender"],
        )
        for row in rows
    )
    p_limit = figures["p_limit"]
    assert isinstance(p_limit, float), "a probability"
    table = SweepTable(path, "eval.loss", True, p_limit, runs)
    os.environ["COLUMNS"] = str(COLUMNS)
    lines = [*table_lines(table), verdict_lines(table)[0]]
    return "\n".join(["<!-- measured -->", "```console", *lines, "```", "<!-- end -->"])


def written(page: str) -> str:
    """The page with the table."""
    text = shown(json.loads(FIGURES.read_text(encoding="utf-8")))
    return TABLE.sub(lambda _: text, page)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        document = json.dumps(stored(read_sweep(Path(sys.argv[1]))), indent=1)
        FIGURES.write_text(document + "\n", encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
