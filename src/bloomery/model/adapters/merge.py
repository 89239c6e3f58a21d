"""An adapter merged into its base: plain matrices that compute the same alone."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from bloomery.model.adapters.base_model import refuse_other_base
from bloomery.model.adapters.lora import LoraLinear, adapt_as, is_adapter
from bloomery.model.adapters.peft_methods import has_method, merge_methods
from bloomery.model.adapters.peft_read import read_adaptation
from bloomery.model.adapters.peft_write import read_trained
from bloomery.model.config import ModelConfig
from bloomery.model.decoder import Decoder
from bloomery.model.families.presets import read_config
from bloomery.model.io.weights import StoredModel


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


@contextmanager
def merged_pieces(
    folder: Path, base: Path, dtype: torch.dtype, device: str | torch.device
) -> Iterator[tuple[Callable[[str], Tensor], ModelConfig]]:
    """`merged_state` of a low-rank adapter, a parameter at a time: of the base no more than that is in memory.

    Raises UserError as `load_decoder` does.
    """
    refuse_other_base(folder, base)
    settings, config = read_adaptation(folder, read_config(base))
    with torch.device("meta"):
        model = Decoder(config)
        adapt_as(model, settings)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_adapter(name) or parameter.requires_grad:
                held = torch.empty(parameter.shape, dtype=torch.float32, device=device)
                setattr(module, name, nn.Parameter(held))
        if isinstance(module, LoraLinear) and module.pissa:
            module.first_A, module.first_B = (torch.empty_like(each) for each in (module.lora_A, module.lora_B))
    model.tie()
    with torch.no_grad():
        read_trained(model, settings, config, folder, shared=True)
    with StoredModel(config, base, seed=0) as stored:

        @torch.no_grad()
        def piece(name: str) -> Tensor:
            parameter = model.get_parameter(name)
            if not parameter.is_meta:  # trained in full
                return parameter.detach().to(dtype)
            whole = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            stored.fill(name, whole)
            module = model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, LoraLinear) and name.endswith(".weight"):
                module.weight = nn.Parameter(whole)
                whole = module.merged_weight()
                module.weight = parameter
            return whole.to(dtype)

        yield piece, config


def merged(model: Decoder, dtype: torch.dtype = torch.float32) -> Decoder:
    """A plain decoder that does the same, in evaluation mode."""
    with torch.device("meta"):
        plain = Decoder(model.config, attention=model.model.backend)
    for name, tensor in merged_state(model, dtype).items():
        parent, _, leaf = name.rpartition(".")
        setattr(plain.get_submodule(parent), leaf, torch.nn.Parameter(tensor))
    plain.tie()
    return plain.eval()
