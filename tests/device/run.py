"""Runs tests on the simulated device: python tests/device/run.py [--device DEVICE] [arguments of pytest].

DEVICE is what `simulated_cards` reads: nvidia,2,4 or "amd:RX 6700 XT,1,12". With --build it only compiles.
"""

import os
import sys
from pathlib import Path

import simulated
from simulated_cards import vendor_of

arguments = sys.argv[1:]
chosen = "amd,2,4"
if arguments[:1] == ["--device"]:
    chosen = arguments[1]
    arguments = arguments[2:]
reason = simulated.why_not()
if reason:
    print(f"skipped: tests on the simulated device: {reason}")
    sys.exit(0)
simulated.build(vendor_of(chosen))
if arguments == ["--build"]:
    sys.exit(0)
os.environ.update(simulated.environment(chosen))
here = Path(__file__).parent
os.environ["PYTHONPATH"] += os.pathsep + str(here)  # for the plug-in of pytest
arguments = arguments or [str(here)]
plugin = ["-p", "simulated_reports"]
os.execv(sys.executable, [sys.executable, "-m", "pytest", *plugin, *arguments])
