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
from torch import Tensor, nn

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
from bloomery.model.io.parameters import first_row, local, put
from bloomery.model.io.safetensors import TensorReader, to_hf_names
from bloomery.model.io.stored import WEIGHTS, Stored, places, refuse_whole_numbers, stored_in
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
    """The parts of each stored pair: side by side, or (`shared`, what others write) with one A for all of them."""
    where = places(config)
    found = dict[str, list[StoredSlice]]()
    for stored, modules in stored_modules(config).items():
        begin = 0
        parts = []
        for module in modules:
            if module in settings.pairs:
                place = where[f"{module}.weight"]
                rank = settings.pairs[module].rank * (2 if settings.pissa else 1)
                parts.append(
                    StoredSlice(
                        module,
                        slice(place.first, place.first + place.rows),
                        slice(begin, begin + rank),
                    )
                )
                begin += 0 if shared else rank
        if parts:
            found[stored] = parts
    return found


def write_adapter(
    state: Mapping[str, Tensor],
    settings: Adaptation,
    config: ModelConfig,
    folder: Path,
    *,
    base: str,
) -> None:
    """`state`: what `adapters.trained_state` gives. `base`: a folder or an id on the Hub. The folder exists."""
    where = places(config)
    tensors = dict[str, Tensor]()
    for stored, parts in layout(config, settings).items():
        pairs = []
        for part in parts:
            A = state[f"{part.module}.lora_A"]
            B = state[f"{part.module}.lora_B"]
            if settings.pissa:
                A = torch.cat((A, state[f"{part.module}.first_A"]))
                B = torch.cat((B, -state[f"{part.module}.first_B"]), 1)
            pairs.append((A, B))
        whole_B = torch.zeros(
            where[f"{parts[0].module}.weight"].of, parts[-1].ranks.stop, dtype=pairs[0][1].dtype
        )
        for part, (_, B) in zip(parts, pairs, strict=True):
            whole_B[part.outputs, part.ranks] = B.cpu()
        tensors[f"{stored}.lora_A.weight"] = torch.cat([A for A, _ in pairs]).contiguous()
        tensors[f"{stored}.lora_B.weight"] = whole_B
        if settings.dora:
            tensors[f"{stored}.{MAGNITUDE}"] = torch.cat(
                [state[f"{part.module}.lora_magnitude"] for part in parts]
            )
    whole = to_hf_names(
        {
            name: state[name]
            for name in where
            if name.rpartition(".")[0] in settings.modules_to_save
        },
        config,
    )
    tensors |= whole
    # PEFT trains a copy of each, and reads both
    if shares_head(config) and EMBEDDING in settings.modules_to_save:
        tensors[f"{HEAD}.weight"] = whole[where[f"{EMBEDDING}.weight"].name].clone()
    named = {PREFIX + name: tensor.cpu() for name, tensor in tensors.items()}
    write_named(named, adapter_config(settings, config, base=base), folder)


def write_named(
    tensors: Mapping[str, Tensor], config_json: Mapping[str, object], folder: Path
) -> None:
    """The two files of an adapter: tensors in PEFT's names, on the CPU, and its config."""
    save_file(dict(tensors), folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")


def adapter_config(settings: Adaptation, config: ModelConfig, *, base: str) -> dict[str, object]:
    """PEFT's LoraConfig for what `write_adapter` writes."""
    where = places(config)
    stored = stored_modules(config)
    ranks = dict[str, int]()
    alphas = dict[str, float]()
    for name, parts in layout(config, settings).items():
        ranks[name] = parts[-1].ranks.stop
        alpha = settings.pairs[parts[0].module].scale * (math.sqrt if settings.rslora else float)(
            ranks[name]
        )
        alphas[name] = round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    linear = {
        where[f"{name}.weight"].name.removesuffix(".weight") for name in linear_modules(config)
    }
    # last names where they mean every module of that name, else full names
    targets = dict[str, None]()
    for name in (name for name in stored if name in ranks):
        leaf = name.rpartition(".")[2]
        alike = {other for other in linear if other.rpartition(".")[2] == leaf}
        targets[leaf if alike <= ranks.keys() else name] = None
    # Full names of what is trained whole: PEFT takes every module whose name ends with the one that is given.
    whole = [name for name, modules in stored.items() if modules[0] in settings.modules_to_save]
    whole += [HEAD] if shares_head(config) and EMBEDDING in settings.modules_to_save else []
    return {
        "peft_type": "LORA",
        "task_type": TASKS[config.head],
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": settings.dropout,
        "bias": "none",
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "init_lora_weights": True,
        "fan_in_fan_out": any(place.transposed for place in where.values()),
        "target_modules": list(targets),
        "modules_to_save": whole or None,
        "rank_pattern": {name: r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {name: a for name, a in alphas.items() if a != alpha},
    }


@torch.no_grad()
def read_trained(
    model: nn.Module,
    settings: Adaptation,
    config: ModelConfig,
    folder: Path,
    *,
    shared: bool = False,
) -> None:
    """Fills what training changes: from a folder that `write_adapter` wrote for the same settings, or a `shared` one.

    Raises UserError when something is missing.
    """
    tensors = stored_in(folder, TENSORS)
    tensors |= {
        name.removesuffix(".weight"): each for name, each in tensors.items() if MAGNITUDE in name
    }

    def stored(name: str) -> Stored:
        if PREFIX + name not in tensors:
            fix = "save or download the adapter again"
            raise UserError(f"the adapter lacks {name}", where=str(folder / TENSORS), fix=fix)
        return tensors[PREFIX + name]

    kinds = ["lora_A.weight", "lora_B.weight"] + ([MAGNITUDE] if settings.dora else [])
    with TensorReader() as reader:
        for pair, parts in layout(config, settings, shared=shared).items():
            whole = {kind: stored(f"{pair}.{kind}") for kind in kinds}
            held = {kind: reader.read(each, 0, each.shape[0]) for kind, each in whole.items()}
            for part in parts:
                module = model.get_submodule(part.module)
                assert isinstance(module, LoraLinear)
                A = held["lora_A.weight"][part.ranks]
                B = held["lora_B.weight"][part.outputs, part.ranks]
                put(A[: module.rank], module.lora_A)
                put(B[:, : module.rank], module.lora_B)
                if module.pissa:
                    module.first_A.copy_(A[module.rank :])
                    module.first_B.copy_(-B[:, module.rank :])
                if module.dora:
                    module.lora_magnitude.copy_(held[MAGNITUDE][part.outputs])
        for name, place in places(config).items():
            if name.rpartition(".")[0] in settings.modules_to_save:
                target = model.get_parameter(name).data
                first = place.first + first_row(target)
                reader.fill(
                    local(target), stored(place.name), first=first, transposed=place.transposed
                )


def adapter_tensors(folder: Path) -> dict[str, Stored]:
    """What adapter_model.safetensors of another program holds, all of its values finite: an adapter is small, and one
    of NaN makes every output noise. Raises UserError.
    """
    if not (folder / TENSORS).is_file() and (folder / "adapter_model.bin").is_file():
        raise UserError(
            "adapter_model.bin is a pickle: opening it could run anything",
            where=str(folder),
            fix="ask its author for safetensors, or save it again with PEFT's save_pretrained",
        )
    found = stored_in(folder, TENSORS)
    with TensorReader() as reader:
        for name, stored in found.items():
            flat = replace(stored, shape=(math.prod(stored.shape),))
            pieces = (
                reader.pieces(flat, 0, *flat.shape, device=torch.device("cpu"))
                if stored.kind in WEIGHTS
                else ()
            )
            if not all(bool(piece.isfinite().all()) for _, piece in pieces):
                problem = f"{name[:120]} of the adapter holds values that are not finite (NaN or infinity)"
                fix = f"{AGAIN}; of a run, name an earlier checkpoint with --step"
                raise UserError(problem, where=str(folder / TENSORS), fix=fix)
    return found


def read_adaptation(folder: Path, config: ModelConfig) -> tuple[Adaptation, ModelConfig]:
    """The adaptation of a model with this config, and the config with the adapter's vocabulary.

    Raises UserError when it is for another base, is damaged, or unsupported.
    """
    settings = _settings(folder)
    where = str(folder / TENSORS)
    tensors = _by_names_of_the_base(folder)
    known = stored_modules(config)
    shapes = parameter_shapes(config)
    place = places(config)
    pairs: dict[str, Pair] = {}
    for stored in sorted({match[1] for name in tensors if (match := PAIR.fullmatch(name))}):
        modules = known.get(stored, [])
        if not modules or ".layers." not in modules[0]:
            raise _not_in_base(stored, config, where)
        pair = settings.pair(stored)
        outputs = place[f"{modules[0]}.weight"].of
        inputs = shapes[f"{modules[0]}.weight"][1]
        expected: dict[str, Shape] = {
            "lora_A.weight": (pair.rank, inputs),
            "lora_B.weight": (outputs, pair.rank),
        }
        if settings.dora:
            expected[MAGNITUDE if f"{stored}.{MAGNITUDE}" in tensors else f"{MAGNITUDE}.weight"] = (
                outputs,
            )
        for kind, shape in expected.items():
            _expect(tensors, f"{stored}.{kind}", shape, where)
        pairs |= dict.fromkeys(modules, pair)
    rest = {
        name: each
        for name, each in tensors.items()
        if not PAIR.fullmatch(name) and not name.removesuffix(".weight").endswith(f".{MAGNITUDE}")
    }
    # An adapter that brings an embedding brings its vocabulary, and one with values makes a reward model.
    if f"{VALUES}.weight" in rest:
        config = replace(config, head="values")
    embedding = rest.get(places(config)[f"{EMBEDDING}.weight"].name)
    if (
        embedding is not None
        and len(embedding.shape) == 2
        and embedding.shape[0] > config.vocab_size
    ):
        config = grown(config, embedding.shape[0])
    whole = _replaced_modules(rest, config, where)
    if not pairs and not whole:
        raise UserError("the adapter changes nothing", where=where, fix=AGAIN)
    dtype = (
        "bfloat16"
        if all(str(each.dtype) == "torch.bfloat16" for each in tensors.values())
        else "float32"
    )
    return Adaptation(
        pairs=pairs, modules_to_save=whole, dora=settings.dora, rslora=settings.rslora, dtype=dtype
    ), config


@dataclass(frozen=True)
class _Settings:
    """adapter_config.json, as far as it decides the numbers."""

    rank: int
    alpha: float
    rslora: bool
    dora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def pair(self, stored: str) -> Pair:
        """By PEFT's rule (get_pattern_key): the first pattern that is the whole name or its end from a dot on."""
        rank, alpha = (
            next(
                (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", stored)),
                default,
            )
            for patterns, default in ((self.ranks, self.rank), (self.alphas, self.alpha))
        )
        return Pair(int(rank), alpha / (math.sqrt(rank) if self.rslora else rank))


def _settings(folder: Path) -> _Settings:
    """Raises UserError for whatever could change the numbers in a way that is not known here."""
    config_json = read_settings(folder)
    where = str(folder / CONFIG)
    if config_json["peft_type"] != "LORA":
        raise UserError(
            f"{config_json['peft_type'][:40]!r} is another method than LoRA and DoRA",
            where=where,
            fix=MERGE,
        )
    unknown = [
        f"{key[:40]!r} ({str(value)[:40]!r})"
        for key, value in config_json.items()
        if key not in HARMLESS | READ
        and value not in (None, False, 0)
        and value != {}
        and value != []
    ]
    if config_json.get("bias", "none") != "none":
        unknown.append(f"bias ({str(config_json['bias'])[:40]!r})")
    if unknown:
        problem = f"unsupported adapter setting: {unknown[0]}"
        raise UserError(problem, where=where, fix=MERGE)
    start = config_json.get("init_lora_weights", True)
    if start not in KEEPS_BASE:
        raise UserError(
            f"its base is not the published model but what init_lora_weights {str(start)[:40]!r} left of it",
            where=where,
            fix=f"{MERGE}, or save it with its path_initial_model_for_weight_conversion",
        )

    def number(value: object, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
            raise UserError(
                f"{key} is {str(value)[:40]!r}, not a number above 0", where=where, fix=AGAIN
            )
        return float(value)

    def pattern(key: str) -> dict[str, float]:
        """Untrusted regular expressions: without groups and with few repeats, so that they cannot run for long."""
        raw_config = config_json.get(key) or {}
        if not isinstance(raw_config, dict):
            raise UserError(f"{key} is no object", where=where, fix=AGAIN)
        for name in raw_config:
            wide = len(name) > 200 or re.search(r"[(){}]", name) or sum(map(name.count, "*+?")) > 4
            try:
                re.compile("" if wide else name)
            except re.error:
                wide = True
            if wide:
                raise UserError(
                    f"{key} holds {name[:60]!r}, too wide a pattern",
                    where=where,
                    fix="write full names",
                )
        return {name: number(value, f"{key}[{name[:60]!r}]") for name, value in raw_config.items()}

    return _Settings(
        rank=int(number(config_json.get("r", 8), "r")),
        alpha=number(config_json.get("lora_alpha", 8), "lora_alpha"),
        rslora=config_json.get("use_rslora") is True,
        dora=config_json.get("use_dora") is True,
        ranks={key: int(value) for key, value in pattern("rank_pattern").items()},
        alphas=pattern("alpha_pattern"),
    )


def _by_names_of_the_base(folder: Path) -> dict[str, Stored]:
    found = adapter_tensors(folder)
    if strange := [name for name in found if not name.startswith(PREFIX)]:
        problem = f"{strange[0][:80]!r} is no name that PEFT gives a tensor"
        raise UserError(problem, where=str(folder / TENSORS), fix=AGAIN)
    for name, stored in found.items():
        refuse_whole_numbers(name, stored)
    return {name.removeprefix(PREFIX): each for name, each in found.items()}


def _not_in_base(name: str, config: ModelConfig, where: str) -> UserError:
    return UserError(
        f"the adapter changes {name[:80]!r}, which this base does not have "
        f"({config.family}, layers 0 to {config.num_layers - 1})",
        where=where,
        fix=right_base(Path(where).parent),
    )


def _expect(tensors: Mapping[str, Stored], name: str, shape: Shape, where: str) -> None:
    if name not in tensors:
        raise UserError(f"the adapter lacks {name[:120]}", where=where, fix=AGAIN)
    if (found := tensors[name].shape) != shape:
        raise UserError(
            f"{name[:120]} is {list(found)}; this base and {CONFIG} make it {list(shape)}",
            where=where,
            fix=right_base(Path(where).parent),
        )


def _replaced_modules(
    rest: Mapping[str, Stored], config: ModelConfig, where: str
) -> tuple[str, ...]:
    """The modules that the adapter replaces. By default PEFT trains tied weights as separate copies."""
    shapes = parameter_shapes(config)
    place = places(config)
    tied = shares_head(config)
    known = {each.name for each in place.values()} | ({f"{HEAD}.weight"} if tied else set())
    if strange := sorted(rest.keys() - known):
        raise _not_in_base(strange[0], config, where)
    wanted = {name.rpartition(".")[0] for name, each in place.items() if each.name in rest}
    mine = [name for name in place if name.rpartition(".")[0] in wanted]
    for name in mine:
        _expect(rest, place[name].name, place[name].stored_shape(shapes[name]), where)
    copies = (
        [rest.get(name) for name in (place[f"{EMBEDDING}.weight"].name, f"{HEAD}.weight")]
        if tied
        else []
    )
    if any(copies):
        with TensorReader() as reader:
            both = [reader.read(each, 0, each.shape[0]) for each in copies if each is not None]
        if len(both) < 2 or both[0].shape != both[1].shape or not both[0].equal(both[1]):
            raise UserError(
                "the adapter has trained the embedding apart from the head, which this model shares with it",
                where=where,
                fix=MERGE,
            )
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in mine))
