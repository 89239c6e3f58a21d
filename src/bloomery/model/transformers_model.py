"""Transformers' config and model of a config.json, the model without memory for its matrices."""

import json
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

IMPLEMENTATIONS = ("sdpa", "eager")  # of attention, the better first


class Unlike(Exception):
    """Why an architecture does not fit between our embeddings and our head."""


class MatricesOnMeta(TorchFunctionMode):
    """Matrices are made by torch.empty and then filled; what is computed, as tables of rotations are, is not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        return func(*args, **options)


def decoded(value: Any) -> Any:
    """A config.json's value with the numbers that JSON has no words for, which transformers writes as objects."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        return float(value["__float__"])
    if isinstance(value, dict):
        return {key: decoded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [decoded(entry) for entry in value]
    return value


def built_config(raw_config: str) -> Any:
    """Transformers' config of a config.json. Raises what its class raises."""
    from transformers import CONFIG_MAPPING

    settings = decoded(json.loads(raw_config))
    return CONFIG_MAPPING[settings["model_type"]].from_dict(settings)


def blank_model(raw_config: str, attention: str | None = None) -> tuple[Any, str]:
    """Transformers' model of a config.json without memory for its matrices, and its attention. Raises ValueError."""
    from transformers import AutoModelForCausalLM

    config = built_config(raw_config)
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # for a loss that nobody asks for
    build: Any = AutoModelForCausalLM.from_config
    candidates = IMPLEMENTATIONS if attention is None else (attention,)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), MatricesOnMeta():
        for implementation in candidates[:-1]:
            try:
                model = build(config, attn_implementation=implementation, dtype=torch.float32)
            except ValueError:  # this architecture has no such kernel
                continue
            return model, implementation
        # The reason why not even the last one can be built is the caller's to report.
        model = build(config, attn_implementation=candidates[-1], dtype=torch.float32)
    return model, candidates[-1]
