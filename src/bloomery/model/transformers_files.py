"""Parameters that transformers keeps in another form in its files, as experts one by one: by its own conversions.

A conversion makes one or several parameters of tensors of files. Which tensors these are, transformers' rules show on a
model without memory; what is in them goes through the same rules when it is read and written.
"""

from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from bloomery.facts.config import StoredConversion, TransformersBackend
from bloomery.model.transformers_model import Unlike, blank_model


class SavedForms(NamedTuple):
    """`names`: by the identity of a parameter or buffer that files hold as it is, its name there. `groups`: names in
    memory and the tensors of files (names, shapes) that they are made of.
    """

    names: dict[int, str]
    groups: tuple[tuple[tuple[str, ...], tuple[tuple[str, tuple[int, ...]], ...]], ...]


@final
class Conversions:
    """Transformers' rules for a model of its own."""

    def __init__(self, reference: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

        rules = [
            rule
            for rule in get_model_conversion_mapping(reference, add_legacy=False)
            if not isinstance(rule, PrefixChange)
        ]
        self._reference = reference
        self._in_memory = reference.state_dict()
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def to_files(self, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of files, of parameters by transformers' names; what keeps its form is the same tensor."""
        from transformers.core_model_loading import revert_weight_conversion

        saved: dict[str, Tensor] = revert_weight_conversion(self._reference, dict(memory))
        return saved

    def target_of(self, stored_name: str) -> tuple[str, str | None]:
        """The first parameter that a tensor of a file becomes a part of, and the pattern that says so."""
        from transformers.core_model_loading import rename_source_key

        target: tuple[str, str | None] = rename_source_key(
            stored_name,
            self._renamings,
            self._converters,
            self._reference.base_model_prefix,
            self._in_memory,
        )
        return target

    @torch.no_grad()
    def to_memory(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters that all tensors of a group make, by transformers' names."""
        from transformers.core_model_loading import dot_natural_key

        converter: Any = None
        first_target = ""
        for name in sorted(stored, key=dot_natural_key):
            first_target, pattern = self.target_of(name)
            if pattern is None:
                return {first_target: stored[name]}
            if converter is None:
                converter = deepcopy(
                    next(rule for rule in self._converters if pattern in rule.source_patterns)
                )
            converter.add_tensor(first_target, name, pattern, stored[name])
        values: dict[str, Any] = converter.convert(
            first_target, model=self._reference, config=self._reference.config
        )
        return {
            name: value[0] if isinstance(value, list) else value for name, value in values.items()
        }


def saved_forms(reference: Any, memory: Mapping[str, Tensor]) -> SavedForms:
    """How transformers saves parameters and buffers, by its names. Raises Unlike where its rules do not lead back."""
    try:
        conversions = Conversions(reference)
    except ImportError:  # before transformers 5 a model computes with the names of its files
        return SavedForms({id(tensor): name for name, tensor in memory.items()}, ())
    saved = conversions.to_files(memory)
    in_memory = {id(tensor) for tensor in memory.values()}
    names = {id(tensor): name for name, tensor in saved.items() if id(tensor) in in_memory}

    # The others are parts of what a converter makes.
    stored_by_target: dict[str, dict[str, Tensor]] = {}
    for name, tensor in saved.items():
        if id(tensor) not in in_memory:
            stored_by_target.setdefault(conversions.target_of(name)[0], {})[name] = tensor
    groups = []
    for stored in stored_by_target.values():
        made = conversions.to_memory(stored)
        for name, value in made.items():
            if name not in memory or value.shape != memory[name].shape:
                raise Unlike(f"files keep {name} in another shape than transformers computes with")
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in stored.items())
        groups.append((tuple(made), shapes))
    return SavedForms(names, tuple(groups))


def refuse_lossy_files(reference: Any, memory: Mapping[str, Tensor]) -> None:
    """Raises Unlike where parameters do not come back from files as they were."""
    forms = saved_forms(reference, memory)
    if not forms.groups:
        return
    conversions = Conversions(reference)
    saved = conversions.to_files(memory)
    for _, stored in forms.groups:
        made = conversions.to_memory({name: saved[name] for name, _ in stored})
        for name, value in made.items():
            if not torch.equal(value, memory[name]):
                raise Unlike(f"transformers does not read {name} as it saves it")


# The last two models: the one that is read or written, and the teacher of a distillation.
@lru_cache(maxsize=2)
def _conversions_of(raw_config: str, attention: str) -> Conversions:
    reference, _ = blank_model(raw_config, attention)
    return Conversions(reference.to("meta"))


def made_parameters(
    backend: TransformersBackend, conversion: StoredConversion, stored: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The parameters of a conversion by our names, of all its tensors of files."""
    rules = _conversions_of(backend.raw_config, backend.attention)
    made = rules.to_memory(stored)
    return {name: made[name_in_memory] for name, name_in_memory in _names(backend, conversion)}


def stored_tensors_of(
    backend: TransformersBackend, conversion: StoredConversion, values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of files of a conversion, of all its parameters by our names."""
    rules = _conversions_of(backend.raw_config, backend.attention)
    return rules.to_files(
        {name_in_memory: values[name] for name, name_in_memory in _names(backend, conversion)}
    )


def _names(backend: TransformersBackend, conversion: StoredConversion) -> list[tuple[str, str]]:
    """Our name and transformers' of each parameter."""
    return [
        (name, name_in_memory)
        for name, name_in_memory, _ in backend.parameters
        if name in conversion.parameters
    ]
