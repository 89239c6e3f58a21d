"""Bloomery: language models on whatever GPUs you have.

`bloomery.plan`, `bloomery.train` and `bloomery.export` are functions and packages. The functions have the attribute: a
package that is imported for the first time takes its name on its parent, so these are imported before the functions
are. `from bloomery.plan.types import RunPlan` finds the package all the same, as imports look into `sys.modules`.
"""

import sys

# `python -m bloomery` looks for modules in the working folder first, where a user's random.py stands in for the
# library's. This is the first line of Bloomery that runs, and only then `sys.argv` begins so.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    del sys.path[0]

import bloomery.export
import bloomery.plan
import bloomery.train  # noqa: F401 (as above: imported for the names on this package)
from bloomery.api import (
    Run,
    compare,
    convert,
    evaluate,
    evaluate_environment,
    evaluate_harness,
    evaluate_task,
    export,
    generate,
    load,
    merge,
    plan,
    train,
)
from bloomery.core import __version__

__all__ = [
    "Run",
    "__version__",
    "compare",
    "convert",
    "evaluate",
    "evaluate_environment",
    "evaluate_harness",
    "evaluate_task",
    "export",
    "generate",
    "load",
    "merge",
    "plan",
    "train",
]
