"""Training: the loop and what it holds."""
