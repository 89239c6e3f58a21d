"""Helpers of the planner's tests and of the benchmarks are used here too."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "plan"), str(ROOT / "benchmarks")]
