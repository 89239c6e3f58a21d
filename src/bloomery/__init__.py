"""Bloomery: language models on whatever GPUs you have."""

import bloomery.plan  # first: a package that is imported later would take the function's name
import bloomery.train  # noqa: F401
from bloomery.api import load, plan, train
from bloomery.core.version import __version__

__all__ = ["__version__", "load", "plan", "train"]
