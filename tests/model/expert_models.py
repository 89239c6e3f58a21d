"""Tiny mixtures of transformers beside ours: what a router chooses, logits, gradients by our names."""

from pathlib import Path

import torch
from tiny_models import saved_reference
from torch import Tensor, nn

from bloomery.model.decoder import Decoder
from bloomery.model.experts import Choice, Router
from bloomery.model.io.parameters import unstacked
from bloomery.model.io.safetensors import to_hf_names
from bloomery.model.io.weights import load_decoder


def pair(case: str, folder: Path) -> tuple[nn.Module, Decoder]:
    """Transformers' model with eager experts, and ours of its folder."""
    theirs = saved_reference(case, folder)
    theirs.config._experts_implementation = "eager"
    return theirs, load_decoder(folder, attention="math")


def choices_of(decoder: Decoder, tokens_BT: Tensor) -> list[Choice]:
    """Of each layer with experts."""
    choices: list[Choice] = []
    hooks = [
        module.register_forward_hook(lambda _, __, choice: choices.append(choice))
        for module in decoder.modules()
        if isinstance(module, Router)
    ]
    decoder(tokens_BT)
    for hook in hooks:
        hook.remove()
    return choices


def stored_gradients(decoder: Decoder) -> dict[str, Tensor]:
    """As files name and arrange the parameters that they belong to."""
    gradients = {
        name: parameter.grad
        for name, parameter in decoder.named_parameters()
        if parameter.grad is not None
    }
    return to_hf_names(gradients, decoder.config)


def parts(decoder: Decoder) -> dict[str, Tensor]:
    """Every parameter, each matrix of an expert by itself."""
    return {
        part_name: part.detach()
        for name, parameter in decoder.named_parameters()
        for part_name, part in unstacked(name, parameter)
    }


def saved_names(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values by the names that transformers' parameters have in memory, as it would save them."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, values)


def is_close(actual: Tensor, expected: Tensor, limit: float = 1e-5) -> bool:
    """Within `limit` of the largest number."""
    difference = (actual - expected).detach().abs().max()
    return float(difference) <= limit * float(expected.detach().abs().max())


def gradients_of_both(
    theirs: nn.Module, ours: Decoder, tokens_BT: Tensor
) -> list[dict[str, Tensor]]:
    """Theirs and ours, of the same weighted sum of logits, as files name them."""
    weights = None
    for model in (theirs, ours):
        output = model(tokens_BT)
        logits = output.head if isinstance(model, Decoder) else output.logits
        if weights is None:
            weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
        (logits * weights).sum().backward()
    their_gradients = {
        name: parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }
    return [saved_names(theirs, their_gradients), stored_gradients(ours)]
