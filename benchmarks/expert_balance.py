"""A small mixture of experts pretrained on code, with and without the loss that evens the load of its experts.

    python benchmarks/expert_balance.py

Writes benchmarks/results/expert_balance.json, and the load of each expert at the end as docs/figures/experts-*.svg.
Takes a few minutes of two cores.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bloomery.monitor.events import EvalDone, ExpertLoad, StepDone, read_events
from bloomery.report.charts import heat_map
from bloomery.report.experts import load_map

ROOT = Path(__file__).parent.parent
RECIPE = "moe-from-scratch-tiny"
RUNS = {
    "balanced": ("Load of each expert, router.loss=0.01", []),
    "unbalanced": ("Load of each expert, router.loss=none", ["router.loss=none"]),
}
LAST = 40  # steps whose mean is reported


def trained(name: str, edits: list[str], folder: Path) -> list[object]:
    """The events of a run of the recipe with these edits."""
    run = folder / name
    words = ["train", RECIPE, *edits, "--run-dir", str(run)]
    subprocess.run([sys.executable, "-m", "bloomery", *words], check=True, cwd=folder)
    return list(read_events(run / "events.jsonl"))


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (title, edits) in RUNS.items():
            events = trained(name, edits, Path(folder))
            steps = [event for event in events if isinstance(event, StepDone)]
            *_, load = (event for event in events if isinstance(event, ExpertLoad))
            *_, evaluation = (event for event in events if isinstance(event, EvalDone))
            names = [metric for metric in steps[-1].metrics if metric.startswith("router/")]
            results[name] = {
                "edits": edits,
                "steps": len(steps),
                "validation_bits_per_byte": evaluation.bits_per_byte,
                **{
                    metric: sum(step.metrics[metric] for step in steps[-LAST:]) / LAST
                    for metric in names
                },
                "load_variation_by_step": {
                    step.step: round(step.metrics["router/load_variation"], 3)
                    for step in steps
                    if step.step == 1 or step.step % 20 == 0
                },
                "last_load": load.ratios,
            }
            svg = heat_map(load_map(load, title), shape="heat_image")
            (ROOT / "docs" / "figures" / f"experts-{name}.svg").write_text(svg, encoding="utf-8")
    path = ROOT / "benchmarks" / "results" / "expert_balance.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
