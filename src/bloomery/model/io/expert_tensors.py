"""The matrices of experts in a model's files: each by itself, or those of a layer in one tensor. No torch.

Families store them either way, and transformers opens both: every file is read as single matrices.
"""

import re
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import (
    ExpertPart,
    Shape,
    expert_matrices,
    expert_parts,
    is_expert_stack,
    parameter_shapes,
)
from bloomery.facts.families import FAMILIES
from bloomery.facts.family import StoredExperts
from bloomery.facts.limits import WEIGHTS_BLOCK
from bloomery.model.io.lines import Lines
from bloomery.model.io.packed import BYTES, Packing, refuse_unsaid

if TYPE_CHECKING:
    from bloomery.model.io.stored import StoredTensor

Tensors = MutableMapping[str, "StoredTensor"]
OURS = StoredExperts()
FIX = "save or download it again"
OTHER_CONFIG = "put the config.json there that was saved with these weights"


def take_experts(tensors: Tensors, config: ModelConfig, *, where: str) -> dict[str, "StoredTensor"]:
    """The tensor of each part of a stack, by the part's name; what they lie in leaves `tensors`.

    Raises UserError where one is missing, is there twice, or has another shape than in the config.
    """
    stored = stored_experts(config)
    stacks = _stacks(config)
    transposed = {
        layer: _is_transposed(layer, tensors, stacks, stored)
        for layer in dict.fromkeys(map(_layer_of, stacks))
    }
    by_part: dict[str, StoredTensor] = {}
    taken: set[str] = set()
    for name, shape in stacks.items():
        layer = _layer_of(name)
        whole = [file_name for file_name in _stack_names(name, stored) if file_name in tensors]
        layout = _Layout(
            shape,
            transposed=transposed[layer] and len(shape) == 3,
            interleaved=stored.interleaved and bool(whole),
        )
        if len(whole) > 1:
            raise _twice(whole, where)
        for file_name in whole:
            _check(file_name, tensors[file_name], layout.stored_shape)
        for part in expert_parts(name, shape):
            single = [
                file_name for file_name in _part_names(layer, part, stored) if file_name in tensors
            ]
            if len(single + whole) > 1:
                raise _twice(single + whole, where)
            if single:
                _check(single[0], tensors[single[0]], (part.rows, *shape[2:]))
                by_part[part.name] = tensors[single[0]]
            elif whole:
                by_part[part.name] = layout.part(tensors[whole[0]], part)
            else:
                first = next(_part_names(layer, part, stored))
                for file_name in (first, *_stack_names(name, stored)):
                    refuse_unsaid(file_name, tensors, where=where)
                raise UserError(f"{first} is missing", where=where, fix=FIX)
            taken.update(single + whole)
    for file_name in taken:
        del tensors[file_name]
    _refuse_more(tensors, config, stored, where)
    return by_part


def stored_experts(config: ModelConfig) -> StoredExperts:
    """How the family's files keep them."""
    family = FAMILIES.get(config.family)
    return OURS if family is None or family.stored.experts is None else family.stored.experts


def expert_names(config: ModelConfig) -> Iterator[str]:
    """Every name that files of the model may have for matrices of its experts."""
    stored = stored_experts(config)
    for name, shape in _stacks(config).items():
        yield from _stack_names(name, stored)
        for part in expert_parts(name, shape):
            yield from _part_names(_layer_of(name), part, stored)


@dataclass(frozen=True)
class _Layout:
    """How a tensor holds a stack that has `shape` in memory."""

    shape: Shape
    transposed: bool
    interleaved: bool

    @property
    def stored_shape(self) -> Shape:
        return _turned(self.shape) if self.transposed else self.shape

    def part(self, tensor: "StoredTensor", part: ExpertPart) -> "StoredTensor":
        """A matrix or bias of one expert, where it lies in the tensor of all."""
        rows = self.shape[1]
        inputs = self.shape[2:]
        lines = Lines(rows, part.first)
        if self.interleaved:
            num_parts = rows // part.rows
            lines = Lines(rows, part.first // part.rows, num_parts)

        def rows_of(stack: "StoredTensor", width: Shape, *, are_columns: bool) -> "StoredTensor":
            """The part in a stack of which a row has the shape `width`."""
            row_bytes = BYTES[stack.kind] * prod(width)
            matrix_offset = stack.offset + part.expert * rows * row_bytes
            shape = (part.rows, *width)
            if are_columns or lines.step > 1:
                own_lines = replace(lines, are_columns=are_columns)
                return replace(stack, offset=matrix_offset, shape=shape, lines=own_lines)
            return replace(stack, offset=matrix_offset + part.first * row_bytes, shape=shape)

        if tensor.packing is None:
            return rows_of(tensor, inputs, are_columns=self.transposed)
        # Blocks and exponents lie in rows, whatever the matrix that they become.
        codes, scales = (stack for _, stack in tensor.packing.parts)
        groups = codes.shape[-2]
        pieces = {
            "codes": rows_of(codes, (groups * codes.shape[-1],), are_columns=False),
            "scales": rows_of(scales, (groups,), are_columns=False),
        }
        packing = Packing(
            tensor.packing.label,
            "fp4",
            tuple(pieces.items()),
            bits=4,
            block=(1, inputs[0] // groups),
        )
        return replace(tensor, shape=(part.rows, *inputs), packing=packing)


def _stacks(config: ModelConfig) -> dict[str, Shape]:
    """Every stack, those of biases included; transformers' layers keep their experts as their class has them."""
    if config.transformers_backend is not None:
        return {}
    shapes = parameter_shapes(config)
    return {name: shape for name, shape in shapes.items() if is_expert_stack(name)}


def _layer_of(name: str) -> str:
    """ "model.layers.0" of a stack in it."""
    return name.rpartition(".mlp.experts.")[0]


def _turned(shape: Shape) -> Shape:
    return (shape[0], *reversed(shape[1:]))


def _is_transposed(
    layer: str, tensors: Tensors, stacks: dict[str, Shape], stored: StoredExperts
) -> bool:
    """Whether a layer's stacks are [E, inputs, outputs]: its family's are, or their shapes say so.

    Of gate and up together, and down, at most one is square and says nothing.
    """
    for name, shape in stacks.items():
        if _layer_of(name) != layer or len(shape) < 3 or shape == _turned(shape):
            continue
        stack = name.rpartition(".")[2]
        if stack in stored.stacks and f"{layer}.{stored.stacks[stack]}" in tensors:
            return stored.transposed
        for file_name in _stack_names(name, stored):
            if file_name in tensors and tensors[file_name].shape in (shape, _turned(shape)):
                return tensors[file_name].shape != shape
    return stored.transposed


def _check(name: str, tensor: "StoredTensor", expected: Shape) -> None:
    """Raises UserError where the tensor has another shape."""
    if tensor.shape != expected:
        raise UserError(
            f"{name} is {list(tensor.shape)}; config.json makes it {list(expected)}",
            where=str(tensor.path),
            fix=OTHER_CONFIG,
        )


def _twice(names: list[str], where: str) -> UserError:
    problem = f"{names[0]} is there twice: {names[1]} holds it, too"
    return UserError(problem, where=where, fix=FIX)


def _refuse_more(tensors: Tensors, config: ModelConfig, stored: StoredExperts, where: str) -> None:
    """Raises UserError where files have matrices of more experts than the config counts."""
    if config.experts is None:
        return
    count = config.experts.count
    prefixes = "|".join(re.escape(prefix) for prefix in dict.fromkeys((stored.prefix, OURS.prefix)))
    pattern = re.compile(rf"model\.layers\.\d+\.(?:{prefixes})\.(\d+)\.")
    for name in sorted(tensors):
        found = pattern.match(name)
        if found and int(found[1]) >= count:
            problem = f"{name} is of expert {int(found[1])}, and config.json has {count} experts"
            raise UserError(problem, where=where, fix=OTHER_CONFIG)


def _stack_names(name: str, stored: StoredExperts) -> Iterator[str]:
    """What a tensor of all experts may be called: by the family's files, or in transformers' memory."""
    layer, _, stack = name.rpartition(".mlp.experts.")
    names = [f"{layer}.{stored.prefix}.{stack}", f"{layer}.mlp.experts.{stack}"]
    if stack in stored.stacks:
        names.insert(0, f"{layer}.{stored.stacks[stack]}")
    yield from dict.fromkeys(names)


def _part_names(layer: str, part: ExpertPart, stored: StoredExperts) -> Iterator[str]:
    _, module, kind = part.name.rsplit(".", 2)
    own_module = stored.modules.get(module, module)
    own_name = f"{layer}.{stored.prefix}.{part.expert}.{own_module}.{kind}"
    yield from dict.fromkeys((own_name, part.name))


def stacks_of_transformers(config: ModelConfig) -> dict[str, int]:
    """The weights of each stack of experts in transformers' own layers, which no adapter changes or quantizes here."""
    if config.transformers_backend is None:
        return {}
    return {
        name: prod(shape)
        for name, shape in parameter_shapes(config).items()
        if "expert" in name and len(shape) == 3
    }


def refuse_unquantizable(config: ModelConfig, kind: str) -> None:
    """Raises UserError where matrices of experts cannot be quantized one by one: none stays in floats unsaid."""
    for name, shape in expert_matrices(config).items():
        if prod(shape) % WEIGHTS_BLOCK:
            raise UserError(
                f"{name} has {prod(shape):,} weights, no multiple of {WEIGHTS_BLOCK}: a block of {kind} would belong "
                "to two experts",
                where=f"quantize.kind={kind}",
                fix="set quantize.kind=none, or take a model whose experts are of a width that is a multiple of 64",
                code=2,
            )
    if stacks := stacks_of_transformers(config):
        total = sum(prod(shape) for shape in parameter_shapes(config).values())
        raise UserError(
            f"{kind} would leave {sum(stacks.values()) / total:.0%} of the parameters in floats: transformers' layers "
            f"have experts as stacks ({next(iter(stacks))})",
            where=f"quantize.kind={kind}",
            fix="set quantize.kind=none",
            code=2,
        )
