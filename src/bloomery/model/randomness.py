"""Random numbers of their own for each parameter: keyed by seed and name, drawn on the CPU."""

import hashlib

import torch


def stream(seed: int, name: str) -> torch.Generator:
    """The values it draws depend neither on the device nor on which other parameters exist."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
