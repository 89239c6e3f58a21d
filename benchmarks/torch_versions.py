"""One recipe with two versions of PyTorch: `python benchmarks/torch_versions.py RECIPE PYTHON PYTHON [KEY=VALUE ...]`.

PYTHON is the interpreter of a virtual environment in which Bloomery is installed, such as `.venv-rocm/bin/python`.
`bloomery bench --json` runs in both in turns: a machine that gets warm or busy slows both. The figure is the mean
of the rounds' ratios. The environment that was measured last is the one whose speed `bloomery plan` knows.
"""

import argparse
import json
import statistics
import subprocess
from typing import Any

# The planned settings alone: without a search for the largest micro-batch, and no other setting in the time.
ONLY_AS_PLANNED = ("--sweep", "train.micro_batch_size=1", "--limit", "1s")
# Relative difference of the first losses; the same weights and tokens, in bfloat16 by another kernel, differ by less.
SAME_LOSS = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("pythons", nargs=2, metavar="PYTHON")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()

    rates: dict[str, list[float]] = {python: [] for python in arguments.pythons}
    first_losses = []
    for round_number in range(1, arguments.rounds + 1):
        for python in arguments.pythons:
            point = measured_point(python, arguments.recipe, arguments.overrides)
            learning = point["learning"]
            rates[python].append(point["tokens_per_second"])
            first_losses.append(learning["loss_before"])
            losses = f"loss {learning['loss_before']:.4f} -> {learning['loss_after']:.4f}"
            speed = f"{point['tokens_per_second']:>9,.0f} tokens/s"
            print(f"round {round_number}  {python}  {speed}  {losses}", flush=True)

    first, second = rates.values()
    ratios = [rate / base_rate for base_rate, rate in zip(first, second, strict=True)]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds"
    print(f"ratio    {statistics.geometric_mean(ratios):.2f} ({spread}), second to first")
    if min(ratios) <= 1 <= max(ratios):
        print("         no difference beyond the noise")
    difference = max(first_losses) / min(first_losses) - 1
    if difference > SAME_LOSS:
        print(f"warning  the first losses differ by {difference:.1%}: one computes something else")


def measured_point(python: str, recipe: str, overrides: list[str]) -> dict[str, Any]:
    """The recipe as planned, measured by one interpreter. A setting that learns nothing ends the comparison."""
    command = [python, "-P", "-m", "bloomery", "bench", recipe, *overrides, *ONLY_AS_PLANNED]
    output = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True)
    if output.returncode != 0:
        raise SystemExit(f"{python} could not measure the recipe (exit code {output.returncode})")
    point: dict[str, Any] = json.loads(output.stdout)["points"][0]
    return point


if __name__ == "__main__":
    main()
