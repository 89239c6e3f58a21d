"""Adapters in PEFT's format (adapter_config.json and adapter_model.safetensors): writing and reading.

R rank of a stored pair. A module that files store fused (GPT-2's c_attn, Phi-3's qkv_proj) gets one pair, in which
those of its parts stand side by side: their A below each other, their B on the diagonal. PiSSA's pair and the one that
it began with stand the same way, so that the file is a plain LoRA for the model as it was published.

`peft_reading` reads what other programs wrote.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import expert_stacks
from bloomery.model.adapters.lora import LoraLinear, stack_adapter
from bloomery.model.adapters.peft_experts import VERSION, read_stack, to_file, wrapped_names
from bloomery.model.adapters.peft_names import PREFIX
from bloomery.model.adapters.peft_reading import MAGNITUDE, base_tensors, read_adaptation
from bloomery.model.adapters.settings import (
    CONFIG,
    EMBEDDING,
    HEAD,
    TENSORS,
    Adaptation,
    adapter_module,
    in_memory,
    is_adapted_by_parameter,
    linear_modules,
    read_settings,
    shares_head,
    stacks_in_memory,
    stored_modules,
)
from bloomery.model.adapters.tower import InsideWhole
from bloomery.model.decoder import Decoder
from bloomery.model.io.parameters import first_row, local, put
from bloomery.model.io.safetensors import TensorReader, to_hf_names
from bloomery.model.io.stored import StoredTensor, tensor_locations

INSIDE_LAYER = 3  # of the parts of "model.layers.0.mlp", the first that is inside the layer
TASKS = {"tokens": "CAUSAL_LM", "values": "SEQ_CLS"}


@dataclass(frozen=True)
class StoredSlice:
    """One of our modules in a stored pair: its rows of B, and its rows of A, which are B's columns."""

    module: str
    outputs: slice
    ranks: slice


def layout(
    config: ModelConfig, settings: Adaptation, *, shared: bool = False
) -> dict[str, list[StoredSlice]]:
    """The slices of each stored pair, by stored module: side by side, or (`shared`) all with the same A.

    Other programs train one A for a module that they store fused; `write_adapter` writes one for each part.
    """
    locations = tensor_locations(config)
    slices_by_stored_module = dict[str, list[StoredSlice]]()
    for stored_module, modules in stored_modules(config).items():
        slices = []
        rank_start = 0
        for module in modules:
            if module not in settings.pairs:
                continue
            location = locations[f"{module}.weight"]
            # PiSSA's initial pair is stored below the trained one.
            rank = settings.pairs[module].rank * (2 if settings.pissa else 1)
            outputs = slice(location.first, location.first + location.rows)
            slices.append(StoredSlice(module, outputs, slice(rank_start, rank_start + rank)))
            rank_start += 0 if shared else rank
        if slices:
            slices_by_stored_module[stored_module] = slices
    return slices_by_stored_module


def write_adapter(
    state: Mapping[str, Tensor],
    settings: Adaptation,
    config: ModelConfig,
    folder: Path,
    *,
    base: str,
    inside: InsideWhole | None = None,
) -> None:
    """Writes both files of an adapter into a folder that exists.

    `state`: the result of `lora.trained_state`. `base`: a folder or an id on the Hub. `inside`: of a multimodal model,
    in which PEFT is to find the modules; None: the base is the language model.
    """
    locations = tensor_locations(config)
    tensors = dict[str, Tensor]()
    for stored_module, slices in layout(config, settings).items():
        # PiSSA subtracts its initial pair: B A - B0 A0 is one plain pair of twice the rank.
        A_parts = []
        B_parts = []
        for part in slices:
            A = state[f"{part.module}.lora_A"]
            B = state[f"{part.module}.lora_B"]
            if settings.pissa:
                A = torch.cat((A, state[f"{part.module}.first_A"]))
                B = torch.cat((B, -state[f"{part.module}.first_B"]), 1)
            A_parts.append(A)
            B_parts.append(B)

        # The parts of a fused module stay independent: B is zero outside of its diagonal blocks.
        stored_rows = locations[f"{slices[0].module}.weight"].stored_rows
        stored_B = torch.zeros(stored_rows, slices[-1].ranks.stop, dtype=B_parts[0].dtype)
        for part, B in zip(slices, B_parts, strict=True):
            stored_B[part.outputs, part.ranks] = B.cpu()
        tensors[f"{stored_module}.lora_A.weight"] = torch.cat(A_parts).contiguous()
        tensors[f"{stored_module}.lora_B.weight"] = stored_B
        if settings.dora:
            magnitudes = [state[f"{part.module}.lora_magnitude"] for part in slices]
            tensors[f"{stored_module}.{MAGNITUDE}"] = torch.cat(magnitudes)

    # Stacks of experts, each in the wrapper that PEFT gives it.
    targeted_stacks = [stack for stack in expert_stacks(config) if stack in settings.pairs]
    for stack, wrapped in wrapped_names(config, targeted_stacks).items():
        module = adapter_module(stack)
        A, B = (state[f"{module}.{part}"].cpu() for part in ("lora_A", "lora_B"))
        A, B = to_file(A, B, config, stack)
        tensors[f"{wrapped}.lora_A.weight"] = A
        tensors[f"{wrapped}.lora_B.weight"] = B

    # Modules that are trained in full are stored as in a file of the base.
    saved_parameters = {
        name: state[name]
        for name in locations
        if name.rpartition(".")[0] in settings.modules_to_save
    }
    saved_tensors = to_hf_names(saved_parameters, config)
    for name, tensor in saved_tensors.items():
        module, _, kind = name.rpartition(".")
        tensors[f"{in_memory(module, config)}.{kind}"] = tensor
    # PEFT trains a copy of a tied embedding and one of its head, and reads both.
    if shares_head(config) and EMBEDDING in settings.modules_to_save:
        stored_embedding = locations[f"{EMBEDDING}.weight"].name
        tensors[f"{HEAD}.weight"] = saved_tensors[stored_embedding].clone()

    settings_json = adapter_config(settings, config, base=base)
    if inside is not None:
        tensors = {inside.name_of(name): tensor for name, tensor in tensors.items()}
        tensors |= inside.tensors_of_tower(state)
        settings_json = inside.config(settings_json)
    peft_tensors = {PREFIX + name: tensor.cpu() for name, tensor in tensors.items()}
    write_named(peft_tensors, settings_json, folder)


def write_named(
    tensors: Mapping[str, Tensor], config_json: Mapping[str, object], folder: Path
) -> None:
    """Writes both files of an adapter: tensors on the CPU with PEFT's names, and its config."""
    save_file(dict(tensors), folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")


def write_as_peft(source: Path, config: ModelConfig, folder: Path, *, base: str) -> None:
    """Writes an adapter of mlx-lm for a model with this config in PEFT's format into a folder that exists.

    Raises UserError where it holds whole parameters of the model.
    """
    settings, _ = read_adaptation(source, config)
    if settings.modules_to_save:
        raise UserError(
            "whole parameters of the model are no adapter",
            where=str(source),
            fix="use --to merged",
            code=2,
        )
    tensors = base_tensors(source, config, is_tied=False).by_name
    parts = ("lora_A", "lora_embedding_A")
    targets = [
        name.rpartition(f".{part}")[0] for name in tensors for part in parts if f".{part}" in name
    ]
    with TensorReader() as reader:
        peft_tensors = {PREFIX + name: reader.read(tensor) for name, tensor in tensors.items()}
    peft_settings = read_settings(source) | {
        "base_model_name_or_path": base,
        "target_modules": sorted(targets),
        "inference_mode": True,
    }
    write_named(peft_tensors, peft_settings, folder)


def adapter_config(settings: Adaptation, config: ModelConfig, *, base: str) -> dict[str, object]:
    """PEFT's LoraConfig for what `write_adapter` writes."""
    locations = tensor_locations(config)
    modules_by_stored_module = stored_modules(config)

    # PEFT divides alpha by the rank of the stored pair, which is the sum of those of its parts.
    ranks = dict[str, int]()
    alphas = dict[str, float]()
    targets = dict[str, None]()
    parameters = dict[str, None]()

    def add(name: str, rank: int, scale: float) -> None:
        alpha = scale * (math.sqrt(rank) if settings.rslora else rank)
        is_whole_number = math.isclose(alpha, round(alpha), rel_tol=1e-12)
        ranks[name] = rank
        alphas[name] = round(alpha) if is_whole_number else alpha

    for stored_module, slices in layout(config, settings).items():
        by_parameter = is_adapted_by_parameter(config, slices[0].module)
        name = f"{stored_module}.weight" if by_parameter else stored_module
        (parameters if by_parameter else targets)[name] = None
        add(name, slices[-1].ranks.stop, settings.pairs[slices[0].module].scale)
    for stack, parameter in stacks_in_memory(config).items():
        if stack in settings.pairs:
            parameters[parameter] = None
            add(parameter, settings.pairs[stack].rank, settings.pairs[stack].scale)
    # The most frequent values are the config's; the patterns name the modules with others.
    common_rank = Counter(ranks.values()).most_common(1)[0][0]
    common_alpha = Counter(alphas.values()).most_common(1)[0][0]

    # Targets: last names where they mean every module of that name, else full names. Of parameters the name inside a
    # layer, likewise.
    stored_linear_modules = {
        locations[f"{module}.weight"].name.removesuffix(".weight")
        for module in linear_modules(config)
    }
    all_parameters = {*stacks_in_memory(config).values()}
    all_parameters |= {f"{module}.weight" for module in stored_linear_modules}

    # Modules to save: full names, as PEFT takes every module whose name ends with the given one.
    saved_modules = [
        stored_module
        for stored_module, modules in modules_by_stored_module.items()
        if modules[0] in settings.modules_to_save
    ]
    if shares_head(config) and EMBEDDING in settings.modules_to_save:
        saved_modules.append(HEAD)
    return {
        "peft_type": "LORA",
        "task_type": TASKS[config.head],
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": common_rank,
        "lora_alpha": common_alpha,
        # PEFT opens no parameters with a dropout, which is of training alone.
        "lora_dropout": 0.0 if parameters else settings.dropout,
        "bias": "none",
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "init_lora_weights": True,
        "fan_in_fan_out": any(location.transposed for location in locations.values()),
        "target_modules": _short_names(targets, stored_linear_modules, depth=-1),
        **_target_parameters(_short_names(parameters, all_parameters, depth=INSIDE_LAYER)),
        "modules_to_save": saved_modules or None,
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != common_rank},
        "alpha_pattern": {name: alpha for name, alpha in alphas.items() if alpha != common_alpha},
    }


def _short_names(names: Collection[str], all_names: Collection[str], *, depth: int) -> list[str]:
    """The names, without what is before the part number `depth` where every name that ends so is among them."""
    namesakes: dict[str, set[str]] = {}
    for name in all_names:
        namesakes.setdefault(".".join(name.split(".")[depth:]), set()).add(name)
    short_names: dict[str, None] = {}
    for name in names:
        end = ".".join(name.split(".")[depth:])
        short_names[end if namesakes.get(end, set()) <= set(names) else name] = None
    return list(short_names)


def _target_parameters(names: list[str]) -> dict[str, object]:
    """With the version of PEFT whose layout of experts is written: an earlier one had another."""
    return {"target_parameters": names, "peft_version": VERSION} if names else {}


@torch.no_grad()
def read_trained(
    model: Decoder,
    settings: Adaptation,
    config: ModelConfig,
    folder: Path,
    *,
    shared: bool = False,
) -> None:
    """Fills the trained parameters from a folder that `write_adapter` wrote for the same settings.

    `shared`: as in `layout`, for folders of other programs. Raises UserError when a tensor is missing.
    """
    tensors = base_tensors(folder, config).by_name

    def tensor_named(name: str) -> StoredTensor:
        if name not in tensors:
            fix = "save or download the adapter again"
            raise UserError(f"the adapter lacks {name}", where=str(folder / TENSORS), fix=fix)
        return tensors[name]

    with TensorReader() as reader:
        # A stored pair holds one module, or all modules that files store fused.
        for stored_module, slices in layout(config, settings, shared=shared).items():
            stored_A = reader.read(tensor_named(f"{stored_module}.lora_A.weight"))
            stored_B = reader.read(tensor_named(f"{stored_module}.lora_B.weight"))
            if settings.dora:
                stored_magnitude = reader.read(tensor_named(f"{stored_module}.{MAGNITUDE}"))
            for part in slices:
                if not model.stage.has(part.module):
                    continue
                module = model.get_submodule(part.module)
                assert isinstance(module, LoraLinear)
                A = stored_A[part.ranks]
                B = stored_B[part.outputs, part.ranks]
                put(A[: module.rank], module.lora_A)
                put(B[:, : module.rank], module.lora_B)
                if settings.pissa:
                    module.first_A.copy_(A[module.rank :])
                    module.first_B.copy_(-B[:, module.rank :])
                if module.dora:
                    module.lora_magnitude.copy_(stored_magnitude[part.outputs])

        for stack in expert_stacks(config):
            if stack not in settings.pairs or not model.stage.has(stack):
                continue
            adapter = stack_adapter(model, stack)
            assert adapter is not None
            version = read_settings(folder).get("peft_version")
            A, B = read_stack(
                reader, tensors, config, stack, version=version, where=str(folder / CONFIG)
            )
            put(A, adapter.lora_A)
            put(B, adapter.lora_B)

        # Modules that are trained in full: this rank reads its own rows of them.
        for name, location in tensor_locations(config).items():
            if name.rpartition(".")[0] in settings.modules_to_save and model.stage.has(name):
                parameter = model.get_parameter(name).data
                reader.fill(
                    local(parameter),
                    tensor_named(location.name),
                    first=location.first + first_row(parameter),
                    transposed=location.transposed,
                )
