"""An OpenAI-compatible server for trying models and for small use."""
