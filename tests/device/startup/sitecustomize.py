"""Python runs this first in each process whose PYTHONPATH names this folder: torch will find the simulated device."""

import importlib.util
import os
import sys
from pathlib import Path


def _loaded(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if os.environ.get("BLOOMERY_SIMULATED"):
    _loaded("simulated_cards")
    _loaded("simulated").install_with_torch()
    _loaded("detected").install_with_detect()
