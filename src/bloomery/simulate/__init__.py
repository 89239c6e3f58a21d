"""A training step that runs on tensors without memory, to read what it would hold."""
