"""Training. The package can be called, because `bloomery.train(...)` is also how Python users start a run."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloomery.train.run import Run


class _Callable(ModuleType):
    def __call__(self, recipe: str | Path, overrides: Sequence[str] = (), *, run_dir: Path | None = None) -> "Run":
        """Train a recipe (a file or a packaged name) in a process of its own, without output. Raises UserError."""
        from bloomery.recipe.load import load_recipe

        launcher = importlib.import_module("bloomery.launch.local")  # above this layer: a door, not a dependency
        run: Run = launcher.start(load_recipe(recipe, overrides), run_dir=run_dir, quiet=True)
        return run


sys.modules[__name__].__class__ = _Callable
