"""Measures speed and memory of a recipe on this machine, and compares them with the plan."""
