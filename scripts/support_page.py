"""Write docs/reference/support-matrix.md: `python scripts/support_page.py`.

The rows come from bloomery.plan.support_matrix. A test compares the page with this output.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from bloomery.plan.support_matrix import ALL_AXES, FEATURES, Axis, Feature

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "support-matrix.md"
START = """# Support matrix

What trains on several devices, by the axis of `parallel`.
<!-- `python scripts/support_page.py` writes this page from the code. -->

- `tested`: compared with the same training on one device, on CPU processes with gloo: losses, gradients, and that the
  feature is in effect on every rank. The test fails where the feature is off. No GPU has run it yet.
- `not tested`: it trains, and no test on CPU processes can show a mistake.
- Other cells are the reason why `bloomery train` and `bloomery plan` refuse it, before any text is read.
- With `parallel` at `auto`, the plan avoids an axis that refuses a setting of the recipe.
  Where all of the first three refuse, `bloomery train` uses one device.
- `parallel.context` shares sequences among the devices of `parallel.replicate` and `parallel.shard`: what these refuse,
  it refuses too. It is never chosen by `auto`.
- `parallel.expert` divides the experts of a mixture among these devices. What it refuses is listed in
  [Train on several GPUs](../how-to/several-gpus.md#experts-over-several-gpus).

How the axes work: [How sharding works](../explanation/how-sharding-works.md).
How to use them: [Train on several GPUs](../how-to/several-gpus.md).
"""
END = """
## Not supported yet

| key | instead |
|---|---|
| tensor parallelism, which has no key yet | `parallel.shard`, `parallel.context`, `parallel.pipeline` |
| `parallel.context` with `parallel.pipeline` | one of them |
| `parallel.context` above the number of key/value heads | a divisor of that number |
"""


def page() -> str:
    """The whole page."""
    return "\n".join([START, *_table(), END.rstrip("\n"), ""])


def _table() -> Iterator[str]:
    yield (
        "| feature | " + " | ".join(f"`parallel.{axis}`" for axis in ALL_AXES) + " | set instead |"
    )
    yield "|---|" + "---|" * len(ALL_AXES) + "---|"
    for feature in FEATURES:
        cells = (_cell(feature, axis) for axis in ALL_AXES)
        yield f"| {_name(feature)} | {' | '.join(cells)} | {_fix(feature)} |"


def _cell(feature: Feature, axis: Axis) -> str:
    return feature.reason(axis) or (
        f"not tested: {feature.untested}" if feature.untested else "tested"
    )


def _name(feature: Feature) -> str:
    """Keys and their values are code, other words are not."""
    words = feature.name.replace(",", "").split()
    if words[0] in ("PEFT", "layers"):
        return feature.name
    if "." not in words[0]:  # a section, and values of its `kind`
        return f"{words[0]} " + ", ".join(f"`{word}`" for word in words[1:])
    return ", ".join(f"`{word}`" for word in words)


def _fix(feature: Feature) -> str:
    settings, colon, why = feature.fix.partition(": ")
    return f"`{settings}`{colon}{why}" if settings else ""


if __name__ == "__main__":
    stale = not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page()
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name}{' is rewritten' if stale else ''}\n")
