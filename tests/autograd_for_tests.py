"""What autograd keeps for backward, measured."""

from collections.abc import Callable

import torch
from torch import nn


def kept_bytes(model: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes of all that `forward` saves, each storage once, without the model's parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            # held, so that no address is used twice
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
