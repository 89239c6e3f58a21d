"""Measuring a machine with the loop's own step, beside what the plan said of it."""
