"""Bloomery from Python: plain functions, which `import bloomery` offers too. Each imports what it needs when called."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloomery.model.decoder import Decoder
    from bloomery.plan.types import Plan
    from bloomery.train.run import Run


def load(folder: str | Path) -> "Decoder":
    """The decoder in a folder of Hugging Face's layout (a checkpoint, an export, a download), ready to evaluate."""
    from bloomery.model.io.weights import load_decoder

    return load_decoder(Path(folder))


def train(recipe: str | Path, overrides: Sequence[str] = (), *, run_dir: Path | None = None) -> "Run":
    """Train a recipe (a file or a packaged name) in a process of its own, without output. Raises UserError."""
    from bloomery.recipe.load import load_recipe
    from bloomery.runs.lifecycle import start

    return start(load_recipe(recipe, overrides), run_dir=run_dir, quiet=True)


def plan(recipe: str | Path, overrides: Sequence[str] = (), *, gpu: str | None = None) -> "Plan":
    """The plan of a recipe (a file or a packaged name) for this machine, or for `gpu`. Raises UserError."""
    from bloomery.plan.local import plan_here
    from bloomery.recipe.load import load_recipe

    return plan_here(load_recipe(recipe, overrides), gpu=gpu)[0]
