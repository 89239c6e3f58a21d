"""An adapter merged into its base: plain matrices that compute the same alone."""

import copy

import torch
from torch import Tensor

from bloomery.model.adapters import LoraLinear, is_adapter
from bloomery.model.decoder import Decoder
from bloomery.model.peft_methods import has_method, merge_methods


@torch.no_grad()
def merged_state(model: Decoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every parameter of the base by name, with what the adapters add: computed in float32, rounded to `dtype` once."""
    if has_method(model):
        model = copy.deepcopy(model).float()
        merge_methods(model)
    state = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        whole = module.merged_weight() if isinstance(module, LoraLinear) and name.endswith(".weight") else parameter
        state[name] = whole.detach().to(dtype)
    return state


def merged(model: Decoder, dtype: torch.dtype = torch.float32) -> Decoder:
    """A plain decoder that does the same, in evaluation mode."""
    with torch.device("meta"):
        plain = Decoder(model.config, attention=model.model.backend)
    for name, tensor in merged_state(model, dtype).items():
        parent, _, leaf = name.rpartition(".")
        setattr(plain.get_submodule(parent), leaf, torch.nn.Parameter(tensor))
    plain.tie()
    return plain.eval()
