"""Adapters in PEFT's format (adapter_config.json and adapter_model.safetensors): writing and reading.

R rank of a stored pair. A module that files store fused (GPT-2's c_attn, Phi-3's qkv_proj) gets one pair, in which
those of its parts stand side by side: their A below each other, their B on the diagonal. PiSSA's pair and the one that
it began with stand the same way, so that the file is a plain LoRA for the model as it was published.

The tensors of an adapter define its modules and ranks; unsupported settings that could change the function are
refused.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.model.adapters.lora import LoraLinear
from bloomery.model.adapters.settings import (
    AGAIN,
    CONFIG,
    EMBEDDING,
    HEAD,
    TENSORS,
    VALUES,
    Adaptation,
    Pair,
    linear_modules,
    read_settings,
    right_base,
    shares_head,
    stored_modules,
)
from bloomery.model.config import ModelConfig
from bloomery.model.counting import Shape, parameter_shapes
from bloomery.model.decoder import Decoder
from bloomery.model.io.parameters import first_row, local, put
from bloomery.model.io.safetensors import TensorReader, to_hf_names
from bloomery.model.io.stored import (
    WEIGHTS,
    StoredTensor,
    refuse_whole_numbers,
    stored_in,
    tensor_locations,
)
from bloomery.model.presets import grown

TASKS = {"tokens": "CAUSAL_LM", "values": "SEQ_CLS"}
PREFIX = "base_model.model."
MAGNITUDE = "lora_magnitude_vector"
# Keys that do not change what the adapter computes, or whose meaning is read from the tensors.
HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "init_lora_weights",
    }
)
# Starts that leave the base as it was published; the others replace it: pissa, olora, corda, ... by a residual, loftq
# by its quantized weight (PEFT 0.21, LoraLayer.loftq_init).
KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
PAIR = re.compile(r"(.+)\.(lora_A|lora_B)\.weight")
MERGE = "merge it with PEFT (merge_and_unload) and use the merged model"


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
) -> None:
    """Writes both files of an adapter into a folder that exists.

    `state`: the result of `lora.trained_state`. `base`: a folder or an id on the Hub.
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

    # Modules that are trained in full are stored as in a file of the base.
    saved_parameters = {
        name: state[name]
        for name in locations
        if name.rpartition(".")[0] in settings.modules_to_save
    }
    saved_tensors = to_hf_names(saved_parameters, config)
    tensors |= saved_tensors
    # PEFT trains a copy of a tied embedding and one of its head, and reads both.
    if shares_head(config) and EMBEDDING in settings.modules_to_save:
        stored_embedding = locations[f"{EMBEDDING}.weight"].name
        tensors[f"{HEAD}.weight"] = saved_tensors[stored_embedding].clone()

    peft_tensors = {PREFIX + name: tensor.cpu() for name, tensor in tensors.items()}
    write_named(peft_tensors, adapter_config(settings, config, base=base), folder)


def write_named(
    tensors: Mapping[str, Tensor], config_json: Mapping[str, object], folder: Path
) -> None:
    """Writes both files of an adapter: tensors on the CPU with PEFT's names, and its config."""
    save_file(dict(tensors), folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")


def adapter_config(settings: Adaptation, config: ModelConfig, *, base: str) -> dict[str, object]:
    """PEFT's LoraConfig for what `write_adapter` writes."""
    locations = tensor_locations(config)
    modules_by_stored_module = stored_modules(config)

    # PEFT divides alpha by the rank of the stored pair, which is the sum of those of its parts.
    ranks = dict[str, int]()
    alphas = dict[str, float]()
    for stored_module, slices in layout(config, settings).items():
        rank = slices[-1].ranks.stop
        scale = settings.pairs[slices[0].module].scale
        alpha = scale * (math.sqrt(rank) if settings.rslora else rank)
        is_whole_number = math.isclose(alpha, round(alpha), rel_tol=1e-12)
        ranks[stored_module] = rank
        alphas[stored_module] = round(alpha) if is_whole_number else alpha
    # The most frequent values are the config's; the patterns name the modules with others.
    common_rank = Counter(ranks.values()).most_common(1)[0][0]
    common_alpha = Counter(alphas.values()).most_common(1)[0][0]

    # Targets: last names where they mean every module of that name, else full names.
    stored_linear_modules = {
        locations[f"{module}.weight"].name.removesuffix(".weight")
        for module in linear_modules(config)
    }
    targets = dict[str, None]()
    for stored_module in modules_by_stored_module:
        if stored_module not in ranks:
            continue
        leaf = stored_module.rpartition(".")[2]
        namesakes = {name for name in stored_linear_modules if name.rpartition(".")[2] == leaf}
        targets[leaf if namesakes <= ranks.keys() else stored_module] = None

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
        "lora_dropout": settings.dropout,
        "bias": "none",
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "init_lora_weights": True,
        "fan_in_fan_out": any(location.transposed for location in locations.values()),
        "target_modules": list(targets),
        "modules_to_save": saved_modules or None,
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != common_rank},
        "alpha_pattern": {name: alpha for name, alpha in alphas.items() if alpha != common_alpha},
    }


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
    tensors = stored_in(folder, TENSORS)
    # PEFT's files differ in whether the magnitude's name ends with ".weight".
    for name in list(tensors):
        if MAGNITUDE in name:
            tensors[name.removesuffix(".weight")] = tensors[name]

    def tensor_named(name: str) -> StoredTensor:
        if PREFIX + name not in tensors:
            fix = "save or download the adapter again"
            raise UserError(f"the adapter lacks {name}", where=str(folder / TENSORS), fix=fix)
        return tensors[PREFIX + name]

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
                if module.pissa:
                    module.first_A.copy_(A[module.rank :])
                    module.first_B.copy_(-B[:, module.rank :])
                if module.dora:
                    module.lora_magnitude.copy_(stored_magnitude[part.outputs])

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


def adapter_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of an adapter_model.safetensors of another program, by their stored names.

    All of their values are finite: an adapter is small, and one of NaN makes every output noise. Raises UserError.
    """
    if not (folder / TENSORS).is_file() and (folder / "adapter_model.bin").is_file():
        raise UserError(
            "adapter_model.bin is a pickle: opening it could run anything",
            where=str(folder),
            fix="ask its author for safetensors, or save it again with PEFT's save_pretrained",
        )
    tensors = stored_in(folder, TENSORS)
    with TensorReader() as reader:
        for name, tensor in tensors.items():
            if tensor.kind not in WEIGHTS:
                continue
            flat = replace(tensor, shape=(math.prod(tensor.shape),))
            pieces = reader.pieces(flat, 0, *flat.shape, device=torch.device("cpu"))
            if not all(bool(piece.isfinite().all()) for _, piece in pieces):
                problem = f"{name[:120]} of the adapter holds values that are not finite (NaN or infinity)"
                fix = f"{AGAIN}; of a run, name an earlier checkpoint with --step"
                raise UserError(problem, where=str(folder / TENSORS), fix=fix)
    return tensors


def read_adaptation(folder: Path, config: ModelConfig) -> tuple[Adaptation, ModelConfig]:
    """The adaptation of a model with this config, and the config with the adapter's vocabulary and head.

    Raises UserError when the adapter is for another base, is damaged, or is unsupported.
    """
    settings = _settings(folder)
    where = str(folder / TENSORS)
    tensors = _tensors_by_base_name(folder)

    # The tensors decide which modules have a pair, and the settings its rank: the shapes must agree.
    modules_by_stored_module = stored_modules(config)
    shapes = parameter_shapes(config)
    locations = tensor_locations(config)
    pairs: dict[str, Pair] = {}
    for stored_module in sorted({match[1] for name in tensors if (match := PAIR.fullmatch(name))}):
        modules = modules_by_stored_module.get(stored_module, [])
        if not modules or ".layers." not in modules[0]:
            raise _not_in_base(stored_module, config, where)
        pair = settings.pair(stored_module)
        outputs = locations[f"{modules[0]}.weight"].stored_rows
        inputs = shapes[f"{modules[0]}.weight"][1]
        _expect(tensors, f"{stored_module}.lora_A.weight", (pair.rank, inputs), where)
        _expect(tensors, f"{stored_module}.lora_B.weight", (outputs, pair.rank), where)
        if settings.dora:
            magnitude = f"{stored_module}.{MAGNITUDE}"
            name = magnitude if magnitude in tensors else f"{magnitude}.weight"
            _expect(tensors, name, (outputs,), where)
        pairs |= dict.fromkeys(modules, pair)

    # Every other tensor replaces one of the base: an embedding brings its vocabulary, and a values
    # head makes a reward model.
    replacements = {
        name: tensor
        for name, tensor in tensors.items()
        if not PAIR.fullmatch(name) and not name.removesuffix(".weight").endswith(f".{MAGNITUDE}")
    }
    if f"{VALUES}.weight" in replacements:
        config = replace(config, head="values")
    embedding = replacements.get(tensor_locations(config)[f"{EMBEDDING}.weight"].name)
    if (
        embedding is not None
        and len(embedding.shape) == 2
        and embedding.shape[0] > config.vocab_size
    ):
        config = grown(config, embedding.shape[0])
    saved_modules = _replaced_modules(replacements, config, where)
    if not pairs and not saved_modules:
        raise UserError("the adapter changes nothing", where=where, fix=AGAIN)

    is_bfloat16 = all(str(tensor.dtype) == "torch.bfloat16" for tensor in tensors.values())
    adaptation = Adaptation(
        pairs=pairs,
        modules_to_save=saved_modules,
        dora=settings.dora,
        rslora=settings.rslora,
        dtype="bfloat16" if is_bfloat16 else "float32",
    )
    return adaptation, config


@dataclass(frozen=True)
class _Settings:
    """adapter_config.json, as far as it decides the numbers."""

    rank: int
    alpha: float
    rslora: bool
    dora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def pair(self, stored_module: str) -> Pair:
        """By PEFT's rule (get_pattern_key): the first pattern that is the whole name or its end from a dot on."""

        def matching_value(values: Mapping[str, float], default: float) -> float:
            for pattern, value in values.items():
                if re.match(rf"(.*\.)?({pattern})$", stored_module):
                    return value
            return default

        rank = int(matching_value(self.ranks, self.rank))
        alpha = matching_value(self.alphas, self.alpha)
        return Pair(rank, alpha / (math.sqrt(rank) if self.rslora else rank))


def _settings(folder: Path) -> _Settings:
    """Raises UserError for a setting that could change the numbers in an unsupported way."""
    config_json = read_settings(folder)
    where = str(folder / CONFIG)
    if config_json["peft_type"] != "LORA":
        raise UserError(
            f"{config_json['peft_type'][:40]!r} is another method than LoRA and DoRA",
            where=where,
            fix=MERGE,
        )

    # A setting that is unknown here is harmless while it is off.
    unsupported = [
        f"{key[:40]!r} ({str(value)[:40]!r})"
        for key, value in config_json.items()
        if key not in HARMLESS | READ
        and value not in (None, False, 0)
        and value != {}
        and value != []
    ]
    if config_json.get("bias", "none") != "none":
        unsupported.append(f"bias ({str(config_json['bias'])[:40]!r})")
    if unsupported:
        problem = f"unsupported adapter setting: {unsupported[0]}"
        raise UserError(problem, where=where, fix=MERGE)

    # An initialization that replaced the base's weights makes the published base the wrong one.
    initialization = config_json.get("init_lora_weights", True)
    if initialization not in KEEPS_BASE:
        raise UserError(
            "its base is not the published model but what init_lora_weights "
            f"{str(initialization)[:40]!r} left of it",
            where=where,
            fix=f"{MERGE}, or save it with its path_initial_model_for_weight_conversion",
        )

    def number(value: object, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
            raise UserError(
                f"{key} is {str(value)[:40]!r}, not a number above 0", where=where, fix=AGAIN
            )
        return float(value)

    def numbers_by_pattern(key: str) -> dict[str, float]:
        raw_patterns = config_json.get(key) or {}
        if not isinstance(raw_patterns, dict):
            raise UserError(f"{key} is no object", where=where, fix=AGAIN)
        for pattern in raw_patterns:
            if not _is_short_pattern(pattern):
                raise UserError(
                    f"{key} holds {pattern[:60]!r}, too wide a pattern",
                    where=where,
                    fix="write full names",
                )
        return {
            pattern: number(value, f"{key}[{pattern[:60]!r}]")
            for pattern, value in raw_patterns.items()
        }

    return _Settings(
        rank=int(number(config_json.get("r", 8), "r")),
        alpha=number(config_json.get("lora_alpha", 8), "lora_alpha"),
        rslora=config_json.get("use_rslora") is True,
        dora=config_json.get("use_dora") is True,
        ranks={key: int(value) for key, value in numbers_by_pattern("rank_pattern").items()},
        alphas=numbers_by_pattern("alpha_pattern"),
    )


def _is_short_pattern(pattern: str) -> bool:
    """Whether an untrusted regular expression cannot run for long: it has no groups and few repeats."""
    num_repeats = sum(map(pattern.count, "*+?"))
    if len(pattern) > 200 or re.search(r"[(){}]", pattern) or num_repeats > 4:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _tensors_by_base_name(folder: Path) -> dict[str, StoredTensor]:
    """The adapter's tensors by names without PEFT's prefix. Raises UserError for names and dtypes that PEFT does not
    write.
    """
    tensors = adapter_tensors(folder)
    unprefixed_names = [name for name in tensors if not name.startswith(PREFIX)]
    if unprefixed_names:
        problem = f"{unprefixed_names[0][:80]!r} is no name that PEFT gives a tensor"
        raise UserError(problem, where=str(folder / TENSORS), fix=AGAIN)
    for name, tensor in tensors.items():
        refuse_whole_numbers(name, tensor)
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _not_in_base(name: str, config: ModelConfig, where: str) -> UserError:
    return UserError(
        f"the adapter changes {name[:80]!r}, which this base does not have "
        f"({config.family}, layers 0 to {config.num_layers - 1})",
        where=where,
        fix=right_base(Path(where).parent),
    )


def _expect(tensors: Mapping[str, StoredTensor], name: str, shape: Shape, where: str) -> None:
    """Raises UserError when a tensor is missing or has another shape."""
    if name not in tensors:
        raise UserError(f"the adapter lacks {name[:120]}", where=where, fix=AGAIN)
    adapter_shape = tensors[name].shape
    if adapter_shape != shape:
        raise UserError(
            f"{name[:120]} is {list(adapter_shape)}; this base and {CONFIG} make it {list(shape)}",
            where=where,
            fix=right_base(Path(where).parent),
        )


def _replaced_modules(
    replacements: Mapping[str, StoredTensor], config: ModelConfig, where: str
) -> tuple[str, ...]:
    """The modules that the adapter replaces. Raises UserError where the base has no such tensor, or another shape."""
    shapes = parameter_shapes(config)
    locations = tensor_locations(config)
    known_names = {location.name for location in locations.values()}
    if shares_head(config):
        known_names.add(f"{HEAD}.weight")
    unknown_names = sorted(replacements.keys() - known_names)
    if unknown_names:
        raise _not_in_base(unknown_names[0], config, where)

    # A module is replaced in full: with its weight, its bias must be there.
    replaced_modules = {
        name.rpartition(".")[0]
        for name, location in locations.items()
        if location.name in replacements
    }
    replaced_parameters = [
        name for name in locations if name.rpartition(".")[0] in replaced_modules
    ]
    for name in replaced_parameters:
        location = locations[name]
        _expect(replacements, location.name, location.stored_shape(shapes[name]), where)

    # By default PEFT trains tied weights as separate copies, which one tied tensor cannot hold.
    if shares_head(config):
        copy_names = (locations[f"{EMBEDDING}.weight"].name, f"{HEAD}.weight")
        with TensorReader() as reader:
            copies = [
                reader.read(replacements[name]) for name in copy_names if name in replacements
            ]
        if copies and not (
            len(copies) == 2 and copies[0].shape == copies[1].shape and copies[0].equal(copies[1])
        ):
            raise UserError(
                "the adapter has trained the embedding apart from the head, which this model shares with it",
                where=where,
                fix=MERGE,
            )
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in replaced_parameters))
