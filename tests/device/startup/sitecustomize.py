"""Python runs this first in each process whose PYTHONPATH names this folder: torch will find the simulated device."""

import importlib.util
import os
from pathlib import Path

if os.environ.get("BLOOMERY_SIMULATED"):
    _place = Path(__file__).parent.parent / "simulated.py"
    _spec = importlib.util.spec_from_file_location("simulated", _place)
    assert _spec is not None and _spec.loader is not None
    simulated = importlib.util.module_from_spec(_spec)
    import sys

    sys.modules["simulated"] = simulated
    _spec.loader.exec_module(simulated)
    simulated.install_with_torch()
