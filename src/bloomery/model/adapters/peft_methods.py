"""Every other adapter method of PEFT, injected into our decoder: AdaLoRA with its ranks driven by the loop, OFT, VeRA.

PEFT computes and stores them; this module trains, saves and resumes them.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, final, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean
from bloomery.model.adapters.peft_files import adapter_tensors
from bloomery.model.adapters.settings import (
    method_settings,
    named,
    read_settings,
    refuse_stored_otherwise,
    right_base,
)
from bloomery.model.config import ModelConfig
from bloomery.model.decoder import Decoder
from bloomery.model.transformers_backend import TransformersBackbone
from bloomery.recipe.schema import Peft

NAME = "default"  # PEFT's own for the only adapter of a model
INSTALL = 'pip install "bloomery[peft]"'
# as methods call it
RANKS = ("r", "rank", "init_r", "target_r")
# what AdaLoRA's allocator remembers of each parameter
IMPORTANCE = ("ipt", "exp_avg_ipt", "exp_avg_unc")


@final
class PeftAdapter:
    """One method inside of one decoder. Its base is frozen; its own parameters are trainable."""

    def __init__(self, model: Decoder, config: Any, *, seed: int) -> None:
        """In place, after the base was read; the adapter's first values follow from `seed`."""
        from peft import PeftModel

        states = torch.get_rng_state()
        torch.manual_seed(seed)
        try:
            self._wrapped = PeftModel(_named_as_files(model), config, adapter_name=NAME)
        except (ValueError, TypeError, RuntimeError, KeyError, ImportError) as error:
            raise UserError(
                f"PEFT refuses this adapter: {str(error).splitlines()[0][:200]}",
                where="adapter",
                fix="bloomery recipes show everything names its keys; the method's own are PEFT's",
                code=2,
            ) from error
        finally:
            torch.set_rng_state(states)
        self._model = model
        self._updates = 0
        self._allocator: Any = getattr(self._wrapped.base_model, "rankallocator", None)  # AdaLoRA's
        self._first_pattern = getattr(self.settings, "rank_pattern", None)
        self._first = {name: tensor.detach().clone() for name, tensor in self._own()}

    @property
    def settings(self) -> Any:
        """PEFT's config, whose ranks change while AdaLoRA trains."""
        return self._wrapped.peft_config[NAME]

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        """The method's trainable parameters and buffers by the decoder's names."""
        trained = {
            name for name, parameter in self._model.named_parameters() if parameter.requires_grad
        }
        seen = set[int]()  # VeRA's projections are one tensor under many names
        for name, tensor in self._model.state_dict().items():
            if (name in trained or f".{NAME}" in name) and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield name, tensor

    def file_tensors(self) -> dict[str, Tensor]:
        """The tensors of adapter_model.safetensors in PEFT's names."""
        from peft import get_peft_model_state_dict

        found = get_peft_model_state_dict(self._wrapped, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in found.items()}

    def file_settings(self, base: str) -> dict[str, object]:
        """The content of adapter_config.json."""
        values = {
            name: sorted(value) if isinstance(value, set) else value
            for name, value in self.settings.to_dict().items()
        }
        kind = values["peft_type"]
        own = {
            "auto_mapping": None,
            "base_model_name_or_path": base,
            "inference_mode": True,
            "task_type": "CAUSAL_LM",
        }
        return values | {"peft_type": getattr(kind, "value", kind)} | own

    def resume_tensors(self) -> dict[str, Tensor]:
        """All that a resumed run needs, as it is: the file's tensors may be cut to the ranks that are left."""
        kept = {f"own.{name}": tensor.detach() for name, tensor in self._own()}
        for field in IMPORTANCE:
            kept |= {
                f"{field}.{name}": tensor
                for name, tensor in getattr(self._allocator, field, {}).items()
            }
        return kept

    def resume_scalars(self) -> dict[str, Any]:
        return {
            "rank_pattern": getattr(self.settings, "rank_pattern", None),
            "updates": self._updates,
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Replaces all by what `resume_tensors` and `resume_scalars` gave."""
        device = next(self._model.parameters()).device
        for name, tensor in self._own():
            tensor.copy_(tensors[f"own.{name}"])
        if self._allocator is not None:
            for field in IMPORTANCE:
                held = getattr(self._allocator, field)
                held.clear()
                held |= {
                    name.removeprefix(f"{field}."): value.to(device, copy=True)
                    for name, value in tensors.items()
                    if name.startswith(f"{field}.")
                }
        if hasattr(self.settings, "rank_pattern"):
            self.settings.rank_pattern = scalars["rank_pattern"]
        self._updates = scalars["updates"]

    def begin_again(self) -> None:
        """As before the first step."""
        kept = {f"own.{name}": tensor for name, tensor in self._first.items()}
        self.load(kept, {"rank_pattern": self._first_pattern, "updates": 0})

    def after_update(self) -> None:
        """Call after the update, before gradients are dropped: AdaLoRA reallocates ranks."""
        self._updates += 1
        if self._allocator is not None:
            tuner: Any = self._wrapped.base_model
            tuner.update_and_allocate(self._updates)

    def penalty(self) -> Tensor | None:
        """AdaLoRA's distance of P and Q from orthogonal (arXiv:2303.10512, equation 4), weighted; else None."""
        weight = getattr(self.settings, "orth_reg_weight", 0.0)
        if self._allocator is None or not weight:
            return None
        parts = []
        for name, parameter in self._model.named_parameters():
            if f"lora_A.{NAME}" in name or f"lora_B.{NAME}" in name:
                exact = parameter.float()
                gram = exact @ exact.T if f"lora_A.{NAME}" in name else exact.T @ exact
                parts.append(
                    torch.linalg.matrix_norm(gram - torch.eye(len(gram), device=gram.device))
                )
        return weight * torch.stack(parts).mean()


def open_method(model: Decoder, folder: Path) -> None:
    """Puts the adapter of a folder into the decoder. Raises UserError when PEFT cannot read it or it does not fit."""
    said = read_settings(folder)
    _config_class(said["peft_type"])
    refuse_stored_otherwise(model.config)
    from peft import PeftConfig, PeftModel

    adapter_tensors(folder)  # refuses what is missing, damaged, a pickle or not finite
    try:
        config = PeftConfig.from_pretrained(str(folder))
        # what belongs to a task is transformers' own model around the matrices
        config.task_type = None
        # PEFT's pattern check does not match AdaLoRA's own rank keys
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="The following rank_pattern keys did not match"
            )
            PeftModel.from_pretrained(
                _named_as_files(model), str(folder), adapter_name=NAME, config=config
            )
    except (ValueError, TypeError, RuntimeError, KeyError, ImportError) as error:
        problem = f"PEFT cannot put this adapter into the model: {str(error).splitlines()[0][:200]}"
        raise UserError(problem, where=str(folder), fix=right_base(folder)) from error
    model.requires_grad_(False)


def _named_as_files(model: Decoder) -> Any:
    """The module that PEFT changes; for transformers' layers, transformers' own model."""
    return model.model.reference if isinstance(model.model, TransformersBackbone) else model


@torch.no_grad()
def merge_methods(model: Decoder) -> None:
    """In place: plain matrices that do the same alone. Raises UserError where the method cannot be merged."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if not isinstance(module, BaseTunerLayer):
            continue
        try:
            module.merge(safe_merge=True)
        except (NotImplementedError, AttributeError, ValueError) as error:
            problem = f"this method cannot be merged ({type(module).__name__}: {error})"
            raise UserError(
                problem, where=name, fix="--to adapter exports it without its base"
            ) from error
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, module.get_base_layer())


def has_method(model: Decoder) -> bool:
    """Whether one of PEFT's methods is in it."""
    return any(hasattr(module, "base_layer") for module in model.modules())


def method_config(adapter: Peft, config: ModelConfig, *, steps: int | None) -> Any:
    """PEFT's config for the recipe's section. Raises UserError with what this decoder or PEFT refuses."""
    config_class = _config_class(adapter.method)
    settings = method_settings(adapter, config, steps=steps)
    known_names = {field.name for field in fields(config_class)}
    for name in settings:
        if name not in known_names:
            keys = f"its keys are those of PEFT's {adapter.method}"
            raise UserError(
                f"{adapter.method} has no key {name}",
                where=f"adapter.{name}",
                fix=did_you_mean(name, sorted(known_names), keys),
                code=2,
            )
    _check_values(adapter, config_class)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return config_class(**settings)
    except (ValueError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:200]
        raise UserError(
            f"PEFT refuses these settings of {adapter.method}: {reason}",
            where="adapter",
            fix=f"correct them: they are fields of {config_class.__name__}",
            code=2,
        ) from error


def _check_values(adapter: Peft, config_class: Any) -> None:
    """Raises UserError for a value of the recipe whose type is not the field's, or for a rank below 1.

    PEFT's dataclasses accept any value; training would fail with it, after the dataset is prepared.
    """
    types = get_type_hints(config_class)
    defaults = {field.name: field.default for field in fields(config_class)}
    strict = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    for name, value in (adapter.model_extra or {}).items():
        # Some methods have a rank of 0 as the default, where another key decides.
        if value == defaults[name]:
            continue
        problem = ""
        try:
            TypeAdapter(types[name], config=strict).validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"].lower()
        if not problem and name in RANKS and isinstance(value, int) and value < 1:
            problem = "a rank is above 0"
        if problem:
            raise UserError(
                f"{adapter.method} cannot train with {name}={str(value)[:40]}: {problem}",
                where=f"adapter.{name}",
                fix=f"correct it: it is a field of {config_class.__name__}",
                code=2,
            )


def _config_class(method: str) -> Any:
    try:
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    except ImportError as error:
        raise UserError("PEFT is not installed", where="adapter.kind=peft", fix=INSTALL) from error
    found = next(
        (kind for each, kind in PEFT_TYPE_TO_CONFIG_MAPPING.items() if each.value == named(method)),
        None,
    )
    if found is None:
        problem = f"the PEFT that is installed has no {method}"
        raise UserError(problem, where="adapter.method", fix="pip install --upgrade peft", code=2)
    return found
