"""Without the simulated device nothing here is collected: `python tests/device/run.py` has it."""

import os

if not os.environ.get("BLOOMERY_SIMULATED"):
    collect_ignore_glob = ["test_*.py"]
