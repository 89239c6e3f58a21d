"""What a machine wants, for a process that computes itself: set before it imports torch."""

import os
from collections.abc import MutableMapping

from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.hardware.private import private_caches
from bloomery.hardware.profile import build_profile


def adopt(machine: Machine | None = None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets in `environment` what `machine` (default: this one) wants and the user has not, as for a run's child."""
    wanted = private_caches(build_profile(machine or detect()).environment.value)
    for name, value in wanted.items():
        environment.setdefault(name, value)
