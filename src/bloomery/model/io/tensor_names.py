"""Names of tensors as other programs save them: wrappers around a model, and models without their head. No torch.

torch.compile, FSDP, activation checkpointing and DDP put a segment of their own into the names of a state_dict; PEFT,
TRL and Lightning put the model inside a module. AutoModel saves a language model without the outermost module.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bloomery.core.errors import UserError
from bloomery.core.units import counted

if TYPE_CHECKING:
    from bloomery.model.io.stored import StoredTensor

# Segments that wrappers put anywhere into a name: torch.compile, FSDP, activation checkpointing.
INNER_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# What PEFT keeps inside a layer that it changes.
PEFT_SEGMENTS = ("base_layer", "lora_A", "lora_B", "lora_embedding_A", "modules_to_save")


@dataclass(frozen=True)
class NamedTensors:
    """`by_name`: tensors by the names that transformers gives them. `notes`: what was read under another name."""

    by_name: Mapping[str, "StoredTensor"]
    notes: tuple[str, ...] = ()


def transformers_names(
    tensors: Mapping[str, "StoredTensor"],
    expected_names: Collection[str],
    embedding: str,
    where: str,
) -> NamedTensors:
    """The tensors under the names that a model expects, where another program put a prefix or left one out.

    `embedding`: the expected name of the embedding's weight, by which the model is found. Raises UserError where the
    names of two models fit, or PEFT's layers are inside the model.
    """
    notes: list[str] = []
    renamed = _without_inner_wrappers(tensors, notes)

    # The first module of every name, as "model." or "transformer.": a model saved by AutoModel lacks it.
    outermost = embedding.partition(".")[0] + "."
    if embedding not in renamed:
        bare_embedding = embedding.removeprefix(outermost)
        prefixes = {
            name.removesuffix(ending)
            for ending in (f".{embedding}", f".{bare_embedding}")
            for name in renamed
            if name.endswith(ending)
        }
        # ".model.embed_tokens.weight" ends with both, and the longer one leaves the wrapper alone.
        prefixes -= {f"{prefix}.{outermost.rstrip('.')}" for prefix in prefixes}
        if len(prefixes) > 1:
            first, second, *_ = sorted(prefixes)
            raise UserError(
                f"two models are in these files: {first!r} and {second!r} both have an embedding",
                where=where,
                fix="save the language model alone",
            )
        for prefix in prefixes:
            renamed = {name.removeprefix(f"{prefix}."): tensor for name, tensor in renamed.items()}
            notes.append(f"names begin with {prefix!r}, which is left out")

    _refuse_peft_layers(renamed, where)

    # Name by name, as transformers adds the prefix of a base model.
    full_names = {}
    for name, tensor in renamed.items():
        full_name = outermost + name
        is_bare = name not in expected_names and full_name in expected_names
        full_names[full_name if is_bare and full_name not in renamed else name] = tensor
    return NamedTensors(full_names, tuple(notes))


def _without_inner_wrappers(
    tensors: Mapping[str, "StoredTensor"], notes: list[str]
) -> Mapping[str, "StoredTensor"]:
    renamed = dict(tensors)
    for wrapper in INNER_WRAPPERS:
        if not any(wrapper in name.split(".") for name in renamed):
            continue
        shorter_names = {
            name: ".".join(segment for segment in name.split(".") if segment != wrapper)
            for name in renamed
        }
        # Two tensors that get one name stay as they are: the missing name is then reported.
        if len(set(shorter_names.values())) < len(shorter_names):
            continue
        num_wrapped = sum(name != shorter for name, shorter in shorter_names.items())
        renamed = {shorter_names[name]: tensor for name, tensor in renamed.items()}
        notes.append(f"{counted(num_wrapped, 'names')} hold {wrapper!r}, which is left out")
    return renamed


def _refuse_peft_layers(names: Collection[str], where: str) -> None:
    for name in sorted(names):
        if any(segment in PEFT_SEGMENTS for segment in name.split(".")):
            raise UserError(
                f"a model with PEFT's layers inside: {name[:120]}",
                where=where,
                fix="save it again after model.merge_and_unload(), or open its adapter as BASE+ADAPTER",
            )
