"""A recipe and a machine become a plan."""
