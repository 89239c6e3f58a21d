"""Runs tests on the simulated device: python tests/device/run.py [--device nvidia,2,4] [arguments of pytest]."""

import os
import sys
from pathlib import Path

import simulated

arguments = sys.argv[1:]
chosen = ["amd", "2", "4"]
if arguments[:1] == ["--device"]:
    chosen = arguments[1].split(",")
    arguments = arguments[2:]
simulated.build(chosen[0])
os.environ.update(simulated.environment(*chosen))
arguments = arguments or [str(Path(__file__).parent)]
os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
