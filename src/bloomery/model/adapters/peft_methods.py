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
from bloomery.core.extras import install_extra, install_packages
from bloomery.core.text import did_you_mean
from bloomery.facts.config import ModelConfig
from bloomery.model.adapters.peft_reading import adapter_tensors
from bloomery.model.adapters.settings import (
    method_name,
    method_settings,
    read_settings,
    refuse_stored_otherwise,
    right_base,
)
from bloomery.model.decoder import VALUE_HEAD, Decoder
from bloomery.model.transformers_backend import TransformersBackbone
from bloomery.recipe.schema import Peft

NAME = "default"  # PEFT's own for the only adapter of a model
RANKS = ("r", "rank", "init_r", "target_r")  # the names that methods give a rank
# What AdaLoRA's allocator remembers of each parameter.
IMPORTANCE = ("ipt", "exp_avg_ipt", "exp_avg_unc")


@final
class PeftAdapter:
    """One method of PEFT inside one decoder, whose base is frozen; the method's parameters are trainable."""

    def __init__(self, model: Decoder, config: Any, *, seed: int) -> None:
        """Changes the decoder in place; its base must have been read. The initial values follow from `seed`.

        Raises UserError when PEFT refuses the config.
        """
        from peft import PeftModel

        # PEFT draws from torch's global generator, which the run must not notice.
        rng_state = torch.get_rng_state()
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
            torch.set_rng_state(rng_state)
        self._model = model
        self._updates = 0
        self._allocator: Any = getattr(self._wrapped.base_model, "rankallocator", None)  # AdaLoRA's
        self._initial_pattern = getattr(self.settings, "rank_pattern", None)
        self._initial_tensors = {
            name: tensor.detach().clone() for name, tensor in self._method_tensors()
        }

    @property
    def settings(self) -> Any:
        """PEFT's config, whose ranks change while AdaLoRA trains."""
        return self._wrapped.peft_config[NAME]

    def _method_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The method's trainable parameters and buffers by the decoder's names."""
        trainable_names = {
            name
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and name != VALUE_HEAD
        }
        addresses = set[int]()  # VeRA's projections are one tensor under many names
        for name, tensor in self._model.state_dict().items():
            is_of_method = name in trainable_names or f".{NAME}" in name
            if is_of_method and tensor.data_ptr() not in addresses:
                addresses.add(tensor.data_ptr())
                yield name, tensor

    def file_tensors(self) -> dict[str, Tensor]:
        """The tensors of adapter_model.safetensors in PEFT's names."""
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self._wrapped, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in state.items()}

    def file_settings(self, base: str) -> dict[str, object]:
        """The content of adapter_config.json."""
        values = {
            name: sorted(value) if isinstance(value, set) else value
            for name, value in self.settings.to_dict().items()
        }
        peft_type = values["peft_type"]
        return values | {
            "peft_type": getattr(peft_type, "value", peft_type),
            "auto_mapping": None,
            "base_model_name_or_path": base,
            "inference_mode": True,
            "task_type": "CAUSAL_LM",
        }

    def resume_tensors(self) -> dict[str, Tensor]:
        """All tensors that a resumed run needs, uncut: those of the file may be cut to the ranks in use."""
        tensors = {f"own.{name}": tensor.detach() for name, tensor in self._method_tensors()}
        for field in IMPORTANCE:
            for name, tensor in getattr(self._allocator, field, {}).items():
                tensors[f"{field}.{name}"] = tensor
        return tensors

    def resume_scalars(self) -> dict[str, Any]:
        return {
            "rank_pattern": getattr(self.settings, "rank_pattern", None),
            "updates": self._updates,
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Restores the results of `resume_tensors` and `resume_scalars`."""
        device = next(self._model.parameters()).device
        for name, tensor in self._method_tensors():
            tensor.copy_(tensors[f"own.{name}"])
        if self._allocator is not None:
            for field in IMPORTANCE:
                importances = getattr(self._allocator, field)
                importances.clear()
                importances |= {
                    name.removeprefix(f"{field}."): value.to(device, copy=True)
                    for name, value in tensors.items()
                    if name.startswith(f"{field}.")
                }
        if hasattr(self.settings, "rank_pattern"):
            self.settings.rank_pattern = scalars["rank_pattern"]
        self._updates = scalars["updates"]

    def begin_again(self) -> None:
        """Restores the values before the first step."""
        tensors = {f"own.{name}": tensor for name, tensor in self._initial_tensors.items()}
        self.load(tensors, {"rank_pattern": self._initial_pattern, "updates": 0})

    def after_update(self) -> None:
        """Must run after an update, before gradients are freed: AdaLoRA reallocates ranks."""
        self._updates += 1
        if self._allocator is not None:
            tuner: Any = self._wrapped.base_model
            tuner.update_and_allocate(self._updates)

    def penalty(self) -> Tensor | None:
        """AdaLoRA's distance of P and Q from orthogonal (arXiv:2303.10512, equation 4), weighted; else None."""
        weight = getattr(self.settings, "orth_reg_weight", 0.0)
        if self._allocator is None or not weight:
            return None
        distances = []
        for name, parameter in self._model.named_parameters():
            if f"lora_A.{NAME}" in name or f"lora_B.{NAME}" in name:
                matrix = parameter.float()
                gram = matrix @ matrix.T if f"lora_A.{NAME}" in name else matrix.T @ matrix
                identity = torch.eye(len(gram), device=gram.device)
                distances.append(torch.linalg.matrix_norm(gram - identity))
        return weight * torch.stack(distances).mean()


def open_method(model: Decoder, folder: Path) -> None:
    """Puts the adapter of a folder into the decoder. Raises UserError when PEFT cannot read it or it does not fit."""
    settings = read_settings(folder)
    _config_class(settings["peft_type"])
    refuse_stored_otherwise(model.config)
    from peft import PeftConfig, PeftModel

    adapter_tensors(folder)  # refuses what is missing, damaged, a pickle or not finite
    try:
        config = PeftConfig.from_pretrained(str(folder))
        # With a task, PEFT would expect transformers' model of that task around the matrices.
        config.task_type = None
        # PEFT's pattern check does not match AdaLoRA's own rank keys.
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
    """Replaces each adapted layer by one plain matrix with the same results.

    Raises UserError where the method cannot be merged.
    """
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
    """Whether the decoder has a layer that one of PEFT's methods changes."""
    return any(hasattr(module, "base_layer") for module in model.modules())


def method_config(adapter: Peft, config: ModelConfig, *, steps: int | None) -> Any:
    """PEFT's config for the recipe's section. Raises UserError with what this decoder or PEFT refuses."""
    # An unknown key gets a suggestion; a value of another type is refused under its key.
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

    # PEFT itself refuses what contradicts another setting.
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
        fix = install_extra("peft")
        raise UserError("PEFT is not installed", where="adapter.kind=peft", fix=fix) from error
    name = method_name(method)
    for peft_type, config_class in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        if peft_type.value == name:
            return config_class
    problem = f"the PEFT that is installed has no {method}"
    raise UserError(
        problem, where="adapter.method", fix=install_packages("--upgrade", "peft"), code=2
    )
