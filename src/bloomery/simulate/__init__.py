"""A training step that runs on tensors without memory, to read what it would hold."""

from bloomery.simulate.parent import Simulated, simulate

__all__ = ["Simulated", "simulate"]
