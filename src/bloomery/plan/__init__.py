"""Planning. The package can be called, because `bloomery.plan(...)` is also how Python users ask for a plan."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloomery.plan.types import Plan


class _Callable(ModuleType):
    def __call__(self, recipe: str | Path, overrides: Sequence[str] = (), *, gpu: str | None = None) -> "Plan":
        """The plan of a recipe (a file or a packaged name) for this machine, or for `gpu`. Raises UserError."""
        from bloomery.plan.here import plan_here
        from bloomery.recipe.load import load_recipe

        return plan_here(load_recipe(recipe, overrides), gpu=gpu)[0]


sys.modules[__name__].__class__ = _Callable
