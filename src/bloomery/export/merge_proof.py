"""The proof that a merged model is not its base: what an adapter changes is compared in both folders.

A merge that applies an adapter to other names, or loses it by rounding, writes a model that opens and answers as the
base does.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import expert_parts, expert_stacks, unstacked_shapes
from bloomery.model.adapters.peft_experts import expert_names
from bloomery.model.adapters.peft_reading import base_tensors, read_adaptation
from bloomery.model.adapters.settings import (
    Adaptation,
    read_settings,
    stored_modules,
)
from bloomery.model.configs import read_config
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import vision_tensors
from bloomery.model.io.weights import StoredModel, load_decoder

ROWS = 64  # compared at once: a tensor that changed mostly differs in the first of them

# Rows of a parameter: its name, the first row, and how many.
ReadRows = Callable[[str, int, int], Tensor]


def proof_of_change(merged: Path, base: Path, adapter: Path) -> str:
    """`proof_of_changes` of a folder that was written."""
    with _opened(merged, base) as (rows_of_merged, rows_of_base, shapes):
        return proof_of_changes(
            lambda name: (
                name in shapes and _differs(name, shapes[name], rows_of_merged, rows_of_base)
            ),
            base,
            adapter,
            finer="--type float32",
        )


def proof_of_changes(
    differs: Callable[[str], bool], base: Path, adapter: Path, *, finer: str
) -> str:
    """One sentence with the counts of tensors that differ, by the last part of their name.

    `differs`: of a parameter, or a matrix of an expert, by its name. `finer`: a type that rounds less. Raises UserError
    where the merged model has the numbers of the base, or a kind of matrices has whose LoRA is not 0.
    """
    names_by_kind, settings = _adapted(base, adapter)
    changed = Counter({kind: sum(map(differs, names)) for kind, names in names_by_kind.items()})
    changed = +changed

    unchanged = [kind for kind in names_by_kind if not changed[kind]]
    if settings is not None and changed:
        config = read_config(base)
        unchanged = [kind for kind in unchanged if _is_nonzero(kind, settings, config, adapter)]
    if (settings is not None and unchanged) or not changed:
        raise UserError(
            f"the merged model has the numbers of its base: no change in {', '.join(unchanged)}",
            where=str(adapter),
            fix=f"use {finer} if the changes are smaller than the rounding of the type; an adapter of a run that has "
            "not trained changes nothing",
        )
    counts = [
        f"{kind} {changed[kind]:,} of {len(names):,}"
        for kind, names in names_by_kind.items()
        if changed[kind]
    ]
    return f"merged: {sum(changed.values()):,} tensors differ from the base ({', '.join(counts)})"


def proof_of_changed_tower(changed: Mapping[str, Tensor], base: Path, adapter: Path) -> str:
    """How many of the tensors that an adapter changes of what reads pictures differ from those of the base.

    `changed`: by the names of the base's files. Raises UserError where none does.
    """
    stored = vision_tensors(base)
    with TensorReader() as reader:
        differing = [
            name
            for name, tensor in changed.items()
            if not torch.equal(tensor, reader.read(stored[name]).to(tensor.dtype))
        ]
    if not differing:
        raise UserError(
            "the merged model reads pictures with the numbers of its base",
            where=str(adapter),
            fix="use --type float32 if the changes are smaller than the rounding of the type",
        )
    return f"{len(differing):,} of {len(changed):,} tensors that the adapter changes"


def _adapted(base: Path, adapter: Path) -> tuple[dict[str, list[str]], Adaptation | None]:
    """The parameters that the adapter changes by their kind, each matrix of an expert by itself; and its settings,
    None for a method of PEFT, which may change any.
    """
    config = read_config(base)
    names_by_kind: dict[str, list[str]] = {}
    if read_settings(adapter)["peft_type"] != "LORA":
        for name in unstacked_shapes(config):
            names_by_kind.setdefault(_kind(name), []).append(name)
        return names_by_kind, None
    settings, config = read_adaptation(adapter, config, base=base)
    stacks = expert_stacks(config)
    for target in settings.pairs:
        parts = expert_parts(target, stacks[target]) if target in stacks else ()
        names = [part.name for part in parts] or [f"{target}.weight"]
        names_by_kind.setdefault(target.rpartition(".")[2], []).extend(names)
    modules = [*settings.modules_to_save, *settings.vocabulary]
    whole = [*(f"{module}.weight" for module in modules), *settings.biases]
    for name in dict.fromkeys(whole):
        names_by_kind.setdefault(_kind(name), []).append(name)
    return names_by_kind, settings


def _kind(name: str) -> str:
    """ "model.layers.0.mlp.up_proj.weight" is an "up_proj", its bias an "up_proj.bias"."""
    module, _, parameter = name.rpartition(".")
    leaf = module.rpartition(".")[2]
    return leaf if parameter == "weight" else f"{leaf}.{parameter}"


def _is_nonzero(kind: str, settings: Adaptation, config: ModelConfig, adapter: Path) -> bool:
    """Whether a LoRA matrix B of this kind has a number other than 0."""
    names = {
        stored
        for stored, modules in stored_modules(config).items()
        if any(module in settings.pairs and module.endswith(f".{kind}") for module in modules)
    }
    for stack in settings.pairs:
        if stack.endswith(f".{kind}") and stack in expert_stacks(config):
            names.update(module for modules in expert_names(config, stack) for module in modules)
    tensors = base_tensors(adapter, config).by_name
    with TensorReader() as reader:
        for name, tensor in tensors.items():
            module, is_B, _ = name.rpartition(".lora_B.weight")
            is_of_kind = is_B and (module in names or module.endswith(f".{kind}"))
            if is_of_kind and bool(reader.read(tensor).any()):
                return True
    return False


@contextmanager
def _opened(
    merged: Path, base: Path
) -> Iterator[tuple[ReadRows, ReadRows, dict[str, tuple[int, ...]]]]:
    """Readers of both folders, and the shapes of the merged parameters."""
    config = read_config(merged)
    backend = config.transformers_backend
    if backend is not None and backend.safe_reason:
        # Files that transformers converts as it loads them have other names: whole models are compared.
        models = [dict(load_decoder(folder).named_parameters()) for folder in (merged, base)]
        shapes = {name: tuple(parameter.shape) for name, parameter in models[0].items()}
        rows_of_merged, rows_of_base = (
            lambda name, first, count, model=model: model[name].detach()[first : first + count]
            for model in models
        )
        yield rows_of_merged, rows_of_base, shapes
        return
    with (
        StoredModel(config, merged, seed=0) as of_merged,
        StoredModel(config, base, seed=0) as of_base,
    ):
        yield _reader(of_merged), _reader(of_base), dict(unstacked_shapes(config))


def _reader(model: StoredModel) -> ReadRows:
    def rows(name: str, first: int, count: int) -> Tensor:
        if name not in model.tensors:  # a values head that is drawn
            return torch.empty(0)
        location = model.locations[name]
        tensor = model.tensors[name]
        if location.transposed and not location.stacked:
            stored = model.reader.read(tensor)
            return stored[:, location.first + first : location.first + first + count]
        start = first if location.stacked else location.first + first
        return model.reader.read(tensor, (start, max(0, min(count, tensor.shape[0] - start))))

    return rows


def _differs(
    name: str, shape: tuple[int, ...], rows_of_merged: ReadRows, rows_of_base: ReadRows
) -> bool:
    if not shape:
        return False  # a number that no adapter changes
    for first in range(0, shape[0], ROWS):
        count = min(ROWS, shape[0] - first)
        merged = rows_of_merged(name, first, count)
        base = rows_of_base(name, first, count).to(merged.dtype)
        if not torch.equal(merged, base):
            return True
    return False
