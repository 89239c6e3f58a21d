"""Bloomery: language models on whatever GPUs you have."""

__version__ = "0.1.0"
