"""Pictures of conversations: where rows say that they are, reading them under limits, and the model's own processor."""
