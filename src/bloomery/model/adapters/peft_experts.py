"""LoRA of stacks of experts in PEFT's files: names and layouts, both ways.

PEFT calls a stack a target parameter. Its wrapper is put around the module of the parameter, and a second one around
the first: the wrapper of the last stack has the module's name, those before it one `base_layer` more each. A is
[E R, I], the rows of an expert together; B is [O, R E], the columns of a rank together (PEFT 0.19 to 0.21,
`ParamWrapper.get_delta_weight` in peft/tuners/lora/layer.py).

E experts, R rank, O outputs and I inputs of a matrix.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import Shape, expert_parts, expert_stacks
from bloomery.model.adapters.peft_names import AGAIN, MERGE
from bloomery.model.adapters.settings import Pair, linear_modules, stacks_in_memory, stored_modules
from bloomery.model.io.expert_tensors import stored_experts
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import StoredTensor, tensor_locations

# The version whose format is written, and the first that has it: 0.18 took the axes of a stack for each other.
VERSION = "0.21.2"
FIRST_VERSION = (0, 19)


def is_target(parameter: str, target_parameters: Iterable[str]) -> bool:
    """Whether PEFT adapts the parameter: it is named, or its name ends with one of the list, from a dot on."""
    return any(f".{parameter}".endswith(f".{target}") for target in target_parameters)


def wrapped_names(config: ModelConfig, stacks: Collection[str]) -> dict[str, str]:
    """What PEFT's names of the matrices of these stacks, which it adapts, begin with; by our names of the stacks."""
    in_memory = stacks_in_memory(config)
    stacks_by_module: dict[str, list[str]] = {}
    for stack, parameter in in_memory.items():
        if stack in stacks:
            stacks_by_module.setdefault(parameter.rpartition(".")[0], []).append(stack)
    names = {}
    for module, wrapped in stacks_by_module.items():
        for depth, stack in enumerate(reversed(wrapped)):
            names[stack] = module + ".base_layer" * depth
    return names


def modules_of_stacks(config: ModelConfig) -> set[str]:
    """The modules around which PEFT puts its wrappers."""
    return {parameter.rpartition(".")[0] for parameter in stacks_in_memory(config).values()}


def targets_of_settings(
    config_json: Mapping[str, Any], config: ModelConfig, *, where: str
) -> tuple[list[str], list[str]]:
    """The stacks, and the linear maps, that `target_parameters` of an adapter_config.json name.

    Raises UserError for what is no parameter that an adapter can change here.
    """
    targets = config_json.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        problem = f"target_parameters is {str(targets)[:40]!r}, no list of names"
        raise UserError(problem, where=where, fix=AGAIN)
    in_memory = stacks_in_memory(config)
    stacks = [stack for stack, parameter in in_memory.items() if is_target(parameter, targets)]
    stored_by_module = {
        module: stored for stored, modules in stored_modules(config).items() for module in modules
    }
    linear = [
        stored_by_module[module]
        for module in linear_modules(config)
        if is_target(f"{stored_by_module[module]}.weight", targets)
    ]
    parameters = [in_memory[stack] for stack in stacks] + [f"{module}.weight" for module in linear]
    for target in targets:
        if not any(is_target(parameter, [target]) for parameter in parameters):
            raise UserError(
                f"unsupported adapter setting: target_parameters ({target[:60]!r} is no matrix of a layer here)",
                where=where,
                fix=MERGE,
            )
    return stacks, linear


# The numbers


def to_file(A_ERI: Tensor, B_EOR: Tensor, config: ModelConfig, stack: str) -> tuple[Tensor, Tensor]:
    """[E R, I] and [O, R E], the rows of outputs in the order of transformers' memory."""
    if _is_interleaved(config, stack):
        B_EOR = B_EOR.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return A_ERI.flatten(0, 1).contiguous(), B_EOR.permute(1, 2, 0).flatten(1).contiguous()


def from_file(A: Tensor, B: Tensor, config: ModelConfig, stack: str) -> tuple[Tensor, Tensor]:
    """Undoes `to_file`: [E, R, I] and [E, O, R]."""
    experts = expert_stacks(config)[stack][0]
    A_ERI, B_EOR = A.unflatten(0, (experts, -1)), B.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if _is_interleaved(config, stack):
        B_EOR = B_EOR.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return A_ERI, B_EOR


def _is_interleaved(config: ModelConfig, stack: str) -> bool:
    """Whether transformers' rows of gate and up take turns, and are not those of gate first, as here."""
    return stored_experts(config).interleaved and stack.endswith(".gate_up_proj")


def is_swapped(
    A_shape: Shape,
    B_shape: Shape,
    config: ModelConfig,
    stack: str,
    *,
    version: object,
    where: str,
) -> bool:
    """Whether A and B of a stack have its outputs and inputs in each other's place, as PEFT 0.18 wrote them.

    It took every stack for [experts, inputs, outputs], as gpt-oss' are. Shapes answer; where outputs and inputs are
    equal, the version does. Raises UserError where neither can.
    """
    _, outputs, inputs = expert_stacks(config)[stack]
    if stored_experts(config).transposed:
        return False
    if outputs != inputs:
        return (A_shape[-1], B_shape[0]) == (outputs, inputs)
    match = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    if match is None:
        raise UserError(
            f"{stacks_in_memory(config)[stack]} is [{outputs}, {inputs}] both ways round, and no peft_version says "
            "whether PEFT 0.18, which took one axis for the other, or a later one wrote it",
            where=where,
            fix=f'write "peft_version" into adapter_config.json, or {MERGE}',
        )
    return (int(match[1]), int(match[2])) < FIRST_VERSION


def read_stack(
    reader: TensorReader,
    tensors: Mapping[str, StoredTensor],
    config: ModelConfig,
    stack: str,
    *,
    version: object,
    where: str,
) -> tuple[Tensor, Tensor]:
    """A [E, R, I] and B [E, O, R] of a stack, from its own tensors or from those of each expert.

    `tensors`: as `peft_reading.base_tensors` names them; `pairs_of_stacks` has compared their shapes.
    """
    parameter = stacks_in_memory(config)[stack]
    A_name, B_name = f"{parameter}.lora_A.weight", f"{parameter}.lora_B.weight"
    if A_name in tensors:
        A = reader.read(tensors[A_name])
        B = reader.read(tensors[B_name])
        A_shape, B_shape = tuple(A.shape), tuple(B.shape)
        A_ERI, B_EOR = from_file(A, B, config, stack)
        if not is_swapped(A_shape, B_shape, config, stack, version=version, where=where):
            return A_ERI, B_EOR
        # What was A of the outputs is B of them.
        A_ERO, B_EIR = A_ERI, B_EOR
        return B_EIR.mT.contiguous(), A_ERO.mT.contiguous()

    # Each expert has a pair of its own for gate and up, which stand side by side: their A below each other, their B on
    # the diagonal.
    names = expert_names(config, stack)
    A_of_expert: list[Tensor] = []
    B_of_expert: list[Tensor] = []
    for modules in names:
        pairs = [
            tuple(reader.read(tensors[f"{module}.{part}.weight"]) for part in ("lora_A", "lora_B"))
            for module in modules
        ]
        A_of_expert.append(torch.cat([A for A, _ in pairs]))
        B_of_expert.append(torch.block_diag(*(B for _, B in pairs)))
    return torch.stack(A_of_expert), torch.stack(B_of_expert)


def expert_names(config: ModelConfig, stack: str) -> list[list[str]]:
    """By expert: what files call the modules of its parts of a stack, in the order of rows."""
    locations = tensor_locations(config)
    names: dict[int, list[str]] = {}
    for part in expert_parts(stack, expert_stacks(config)[stack]):
        module = locations[part.name].name.removesuffix(".weight")
        names.setdefault(part.expert, []).append(module)
    return list(names.values())


def pair_of_experts(
    pair_of_module: Mapping[str, Pair], modules_by_expert: Sequence[Sequence[str]], *, where: str
) -> Pair:
    """The pair of a stack whose experts have pairs of their own. Raises UserError where they are not alike."""
    first_modules = modules_by_expert[0]
    for place, first in enumerate(first_modules):
        for modules in modules_by_expert:
            for module in (first, modules[place]):
                if module not in pair_of_module:
                    raise UserError(
                        f"the adapter changes some experts alone: it lacks {module[:120]}",
                        where=where,
                        fix=MERGE,
                    )
            if pair_of_module[modules[place]] != pair_of_module[first]:
                raise UserError(
                    f"{modules[place][:120]} has another rank or alpha than {first[:120]}",
                    where=where,
                    fix=MERGE,
                )
    pairs = [pair_of_module[module] for module in first_modules]
    if len({pair.scale for pair in pairs}) > 1:
        raise UserError(
            f"{first_modules[0][:120]} and {first_modules[1][:120]}, which are one matrix here, differ in alpha / rank",
            where=where,
            fix=MERGE,
        )
    return Pair(sum(pair.rank for pair in pairs), pairs[0].scale)
