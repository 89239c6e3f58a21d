"""The matrices of experts in a model's files: each by itself, or those of a layer in one tensor. No torch.

Families store them either way, and transformers opens both: every file is read as single matrices.
"""

from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import ExpertPart, Shape, expert_parts, parameter_shapes
from bloomery.facts.families import FAMILIES
from bloomery.facts.family import StoredExperts

if TYPE_CHECKING:
    from bloomery.model.io.stored import StoredTensor

OURS = StoredExperts()
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
FIX = "save or download it again"


def take_experts(
    tensors: MutableMapping[str, "StoredTensor"], config: ModelConfig, *, where: str
) -> dict[str, "StoredTensor"]:
    """The tensor of each part of a stack, by the part's name; what they lie in leaves `tensors`.

    Raises UserError where one is missing, is there twice, or has another shape than in the config.
    """
    family = FAMILIES.get(config.family)
    stored = OURS if family is None or family.stored.experts is None else family.stored.experts
    by_part: dict[str, StoredTensor] = {}
    for name, shape in parameter_shapes(config).items():
        parts = expert_parts(name, shape)
        if not parts:
            continue
        layer, _, stack = name.rpartition(".mlp.experts.")
        whole = [
            file_name for file_name in _stack_names(layer, stack, stored) if file_name in tensors
        ]
        for part in parts:
            single = [
                file_name for file_name in _part_names(layer, part, stored) if file_name in tensors
            ]
            found = single + whole
            if not found:
                first = next(_part_names(layer, part, stored))
                raise UserError(f"{first} is missing", where=where, fix=FIX)
            if len(found) > 1:
                raise UserError(
                    f"{found[0]} is there twice: {found[1]} holds it, too", where=where, fix=FIX
                )
            tensor = tensors[found[0]]
            expected = shape if whole else (part.rows, *shape[2:])
            if tensor.shape != expected:
                raise UserError(
                    f"{found[0]} is {list(tensor.shape)}; config.json makes it {list(expected)}",
                    where=str(tensor.path),
                    fix="put the config.json there that was saved with these weights",
                )
            by_part[part.name] = _part_of_stack(tensor, part, shape) if whole else tensor
            if single:
                del tensors[single[0]]
        for file_name in whole:
            del tensors[file_name]
    return by_part


def _stack_names(layer: str, stack: str, stored: StoredExperts) -> Iterator[str]:
    """What a tensor of all experts may be called: by the family's files, or in transformers' memory."""
    if stack in stored.stacks:
        yield f"{layer}.{stored.stacks[stack]}"
    yield from dict.fromkeys((f"{layer}.{stored.prefix}.{stack}", f"{layer}.mlp.experts.{stack}"))


def _part_names(layer: str, part: ExpertPart, stored: StoredExperts) -> Iterator[str]:
    _, module, kind = part.name.rsplit(".", 2)
    own_module = stored.modules.get(module, module)
    own_name = f"{layer}.{stored.prefix}.{part.expert}.{own_module}.{kind}"
    yield from dict.fromkeys((own_name, part.name))


def _part_of_stack(tensor: "StoredTensor", part: ExpertPart, shape: Shape) -> "StoredTensor":
    row_bytes = ITEM_BYTES[tensor.kind] * prod(shape[2:])
    first_row = part.expert * shape[1] + part.first
    return replace(
        tensor, offset=tensor.offset + first_row * row_bytes, shape=(part.rows, *shape[2:])
    )
