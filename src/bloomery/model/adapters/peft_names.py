"""Names of an adapter's tensors, as PEFT and the programs around it write them, by the names of the base. No torch.

PEFT wraps a module in another: `q_proj.base_layer` is what was `q_proj`, `modules_to_save` its trained copy. Programs
that save a state_dict themselves leave the name of the adapter ("default") and wrappers of their own in the names.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from bloomery.core.errors import UserError
from bloomery.model.io.stored import LANGUAGE, VISION, StoredTensor
from bloomery.model.io.tensor_names import INNER_WRAPPERS

PREFIX = "base_model.model."
AGAIN = "download or save the adapter again"
MERGE = "merge it with PEFT (merge_and_unload) where it was trained, and use the merged model"
# What PEFT names by the adapter: a module or a parameter, and then the adapter's name.
NAMED_PARTS = (
    r"lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|modules_to_save|trainable_tokens_delta"
)
ADAPTER_NAME = re.compile(rf"\.({NAMED_PARTS})\.(?!(?:weight|bias)$)([^.]+)(?=\.|$)")
TOKEN_ROWS = "trainable_tokens_delta"
# A tensor of the base itself inside PEFT's wrapper around it, and the trained copy of a module to save.
BASE_PARTS = (".token_adapter.base_layer.", ".base_layer.")
COPY_PART = ".modules_to_save."
ORIGINAL_PART = ".original_module."


@dataclass(frozen=True)
class AdapterTensors:
    """`by_name`: tensors by names of the base. `of_base`: those that PEFT loads into the base's own modules, so that
    weights that are tied there change together.
    """

    by_name: Mapping[str, StoredTensor]
    of_base: frozenset[str] = frozenset()


def names_of_base(
    tensors: Mapping[str, StoredTensor], modules: Collection[str], *, where: str
) -> AdapterTensors:
    """The tensors by names of the base, whose files have these `modules`.

    Raises UserError for a name that cannot be an adapter's, and for the tensors of two adapters in one file.
    """
    plain_names = {name: _plain_name(name, modules) for name in tensors}
    unprefixed = [name for name in tensors if plain_names[name] is None]
    if unprefixed:
        problem = f"{unprefixed[0][:80]!r} is no name that PEFT gives a tensor"
        raise UserError(problem, where=where, fix=AGAIN)

    # PEFT's files leave the name of the adapter out; those of a whole state_dict have it in them.
    adapter_names = set[str]()
    by_name: dict[str, StoredTensor] = {}
    of_base = set[str]()
    copies: dict[str, StoredTensor] = {}
    for stored_name, tensor in tensors.items():
        name = plain_names[stored_name]
        assert name is not None
        if match := ADAPTER_NAME.search(name):
            adapter_names.add(match[2])
            name = name[: match.start(2) - 1] + name[match.end(2) :]
        # Trained tokens alone have no wrapper of their own.
        if name.endswith(f".{TOKEN_ROWS}") and ".token_adapter." not in name:
            name = f"{name.removesuffix(TOKEN_ROWS)}token_adapter.{TOKEN_ROWS}"
        if ORIGINAL_PART in name:  # what a module to save was before training
            continue
        if COPY_PART in name:
            copies[name.replace(COPY_PART, ".")] = tensor
            continue
        # Of a second wrapper around a first one, the matrices are the adapter's own.
        is_wrapped = re.search(r"\.base_layer\.lora_[AB]\.", name) is not None
        part = next((part for part in BASE_PARTS if part in name and not is_wrapped), None)
        if part is not None:
            name = name.replace(part, ".")
            of_base.add(name)
        by_name[name] = tensor
    if len(adapter_names) > 1:
        listed = ", ".join(sorted(adapter_names))
        problem = f"the tensors of {len(adapter_names)} adapters are in one file: {listed[:80]}"
        raise UserError(problem, where=where, fix="save each adapter alone, with save_pretrained")

    # After a change of the vocabulary PEFT stores a module to save twice, and reads the plain name.
    for name, tensor in copies.items():
        by_name.setdefault(name, tensor)
    return AdapterTensors(by_name, frozenset(of_base))


def _plain_name(stored_name: str, modules: Collection[str]) -> str | None:
    """Without PEFT's prefix, wrappers and a multimodal model's prefix; None for what no base can have."""
    segments = [segment for segment in stored_name.split(".") if segment not in INNER_WRAPPERS]
    name = ".".join(segments).removeprefix("module.")
    is_prefixed = name.startswith(PREFIX)
    name = name.removeprefix(PREFIX)
    if name.startswith(VISION):
        return name  # refused by its name: no decoder of text has it

    # The language model inside a multimodal one, and a model that AutoModel opened without its head.
    for prefix, text_prefix in LANGUAGE.items():
        if name.startswith(prefix) and not is_module(name, modules):
            name = text_prefix + name.removeprefix(prefix)
    outermost = next(iter(modules), "").partition(".")[0]
    if not is_module(name, modules) and is_module(f"{outermost}.{name}", modules):
        name = f"{outermost}.{name}"
    return name if is_prefixed or is_module(name, modules) else None


def is_module(name: str, modules: Collection[str]) -> bool:
    """Whether a tensor of that name belongs to one of the modules, or to PEFT's wrapper around it."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in modules:
            return True
    return False


def without_ties(tensors: AdapterTensors, pairs_of_names: Mapping[str, str]) -> AdapterTensors:
    """With a tensor of the base under both names of a tied weight, as PEFT loads it into both."""
    by_name = dict(tensors.by_name)
    for name, other_name in pairs_of_names.items():
        if name in tensors.of_base and other_name not in by_name:
            by_name[other_name] = by_name[name]
    return replace(tensors, by_name=by_name)


def refuse_vision(name: str, *, where: str) -> None:
    if name.startswith(VISION):
        raise UserError(
            f"the adapter changes the vision part of a multimodal model: {name[:100]}",
            where=where,
            fix=MERGE,
        )
