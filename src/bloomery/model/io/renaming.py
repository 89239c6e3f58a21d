"""Tensors under our names and under those of saved files, both ways."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bloomery.model.config import ModelConfig
from bloomery.model.families.weight_names import places


def to_hf_names(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our tensors as transformers stores them; fused and transposed ones are new, the others are the same tensors.

    `state` may be some of them, but of what is stored fused all parts or none.
    """
    pieces: dict[str, list[str]] = {}
    where = places(config)
    for name, place in where.items():
        if name in state:
            pieces.setdefault(place.name, []).append(name)
    stored = {}
    for target, names in pieces.items():
        parts = [state[name] for name in names]  # in the order of their rows, as parameter_shapes lists them
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        stored[target] = (whole.t() if where[names[0]].transposed else whole).contiguous()
    return stored


def from_hf_names(stored: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Undoes `to_hf_names`: views where the storage allows it."""
    state = {}
    for name, place in places(config).items():
        whole = stored[place.name].t() if place.transposed else stored[place.name]
        state[name] = whole[place.first : place.first + place.rows]
    return state
