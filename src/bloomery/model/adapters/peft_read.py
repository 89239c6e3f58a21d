"""Adapters of others: what PEFT's adapter_config.json and adapter_model.safetensors mean for a model of ours.

Which modules are adapted, and at which rank, is read from the tensors; what could change the function and is not known
here is refused.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError
from bloomery.model.adapters.base_model import AGAIN, CONFIG, TENSORS, read_settings, right_base
from bloomery.model.adapters.peft_write import PREFIX, adapter_tensors
from bloomery.model.adapters.targets import EMBEDDING, HEAD, VALUES, Adaptation, Pair, shares_head, stored_modules
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_shapes
from bloomery.model.families.presets import grown
from bloomery.model.families.weight_names import places
from bloomery.model.io.safetensors import Reader
from bloomery.model.io.weight_files import Stored, refuse_whole_numbers

# Keys that do not change what the adapter computes, or whose meaning is read from the tensors.
HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "target_modules", "task_type",
})  # fmt: skip
READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias",
                  "init_lora_weights"})  # fmt: skip
# Starts that leave the base as it was published; the others replace it: pissa, olora, corda, ... by a residual, loftq
# by its quantised self (PEFT 0.21, LoraLayer.loftq_init).
KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
PAIR = re.compile(r"(.+)\.(lora_A|lora_B)\.weight")
MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.weight)?")


@dataclass(frozen=True)
class _Said:
    """adapter_config.json, as far as it decides the numbers."""

    rank: int
    alpha: float
    rslora: bool
    dora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    where: str

    def pair(self, stored: str) -> Pair:
        rank, alpha = _matching(self.ranks, stored, self.rank), _matching(self.alphas, stored, self.alpha)
        return Pair(rank, alpha / (math.sqrt(rank) if self.rslora else rank))


def read_adaptation(folder: Path, config: ModelConfig) -> tuple[Adaptation, ModelConfig]:
    """What the adapter changes in a model of that config, and the config with the vocabulary that it brings.

    Raises UserError when it is for another base, is damaged, or does what this version does not know.
    """
    said, tensors = _checked(read_settings(folder), str(folder / CONFIG)), _tensors(folder)
    known, where = stored_modules(config), str(folder / TENSORS)
    shapes, place = parameter_shapes(config), places(config)
    pairs: dict[str, Pair] = {}
    adapted = {match[1] for name in tensors if (match := PAIR.fullmatch(name))}
    for stored in sorted(adapted):
        modules = known.get(stored, [])
        if not modules or ".layers." not in modules[0]:
            raise _stranger(stored, config, where)
        pair, first = said.pair(stored), place[f"{modules[0]}.weight"]
        inputs = shapes[f"{modules[0]}.weight"][1]
        _expect(tensors, f"{stored}.lora_A.weight", (pair.rank, inputs), where)
        _expect(tensors, f"{stored}.lora_B.weight", (first.of, pair.rank), where)
        if said.dora:
            _expect(tensors, _magnitude(tensors, stored), (first.of,), where)
        pairs |= dict.fromkeys(modules, pair)
    rest = {name: each for name, each in tensors.items() if not PAIR.fullmatch(name) and not MAGNITUDE.fullmatch(name)}
    config = _brought(config, rest)
    whole = _whole(rest, config, where)
    if not pairs and not whole:
        raise UserError("the adapter changes nothing", where=where, remedy=AGAIN)
    _refuse_untied(rest, config, where)
    dtype = "bfloat16" if all(str(each.dtype) == "torch.bfloat16" for each in tensors.values()) else "float32"
    return Adaptation(pairs=pairs, whole=whole, dora=said.dora, rslora=said.rslora, dtype=dtype), config


def _tensors(folder: Path) -> dict[str, Stored]:
    """By the names that the base's files would use."""
    found = adapter_tensors(folder)
    if strange := [name for name in found if not name.startswith(PREFIX)]:
        problem = f"{strange[0][:80]!r} is no name that PEFT gives a tensor"
        raise UserError(problem, where=str(folder / TENSORS), remedy=AGAIN)
    for name, stored in found.items():
        refuse_whole_numbers(name, stored)
    return {name.removeprefix(PREFIX): each for name, each in found.items()}


def _checked(said: Mapping[str, Any], where: str) -> _Said:
    if said["peft_type"] != "LORA":
        problem = f"{said['peft_type'][:40]!r} is another method than LoRA and DoRA"
        raise UserError(problem, where=where, remedy="merge it with PEFT (merge_and_unload) and use the merged model")
    for key, value in said.items():
        if key not in HARMLESS | READ and value not in (None, False, 0) and value != {} and value != []:
            raise _refused(f"{key[:40]!r} ({str(value)[:40]!r})", where)
    if said.get("bias", "none") != "none":
        raise _refused(f"bias ({str(said['bias'])[:40]!r})", where)
    start = said.get("init_lora_weights", True)
    if start not in KEEPS_BASE:
        raise UserError(
            f"its base is not the published model but what init_lora_weights {str(start)[:40]!r} left of it",
            where=where,
            remedy="merge it with PEFT (merge_and_unload) and use the merged model, or save it with its"
            " path_initial_model_for_weight_conversion",
        )  # fmt: skip
    return _Said(
        rank=int(_number(said.get("r", 8), "r", where)), alpha=_number(said.get("lora_alpha", 8), "lora_alpha", where),
        rslora=said.get("use_rslora") is True, dora=said.get("use_dora") is True,
        ranks={key: int(value) for key, value in _pattern(said, "rank_pattern", where).items()},
        alphas=_pattern(said, "alpha_pattern", where), where=where,
    )  # fmt: skip


def _refused(what: str, where: str) -> UserError:
    problem = f"the adapter uses {what}, which Bloomery does not know"
    return UserError(problem, where=where, remedy="merge it with PEFT (merge_and_unload) and use the merged model")


def _number(value: object, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
        raise UserError(f"{key} is {str(value)[:40]!r}, not a number above 0", where=where, remedy=AGAIN)
    return float(value)


def _pattern(said: Mapping[str, Any], key: str, where: str) -> dict[str, float]:
    """Regular expressions from a stranger: without groups and with few repeats they cannot run for long."""
    pattern = said.get(key) or {}
    if not isinstance(pattern, dict):
        raise UserError(f"{key} is no object", where=where, remedy=AGAIN)
    for name in pattern:
        if len(name) > 200 or re.search(r"[(){}]", name) or sum(map(name.count, "*+?")) > 4 or not _compiles(name):
            raise UserError(f"{key} holds {name[:60]!r}, too wide a pattern", where=where, remedy="write full names")
    return {name: _number(value, f"{key}[{name[:60]!r}]", where) for name, value in pattern.items()}


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _matching(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """PEFT's rule (get_pattern_key): the first pattern that is the whole name or its end from a dot on."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)


def _stranger(name: str, config: ModelConfig, where: str) -> UserError:
    return UserError(
        f"the adapter changes {name[:80]!r}, which this base does not have "
        f"({config.family}, layers 0 to {config.num_layers - 1})",
        where=where, remedy=right_base(Path(where).parent),
    )  # fmt: skip


def _expect(tensors: Mapping[str, Stored], name: str, shape: tuple[int, ...], where: str) -> None:
    if name not in tensors:
        raise UserError(f"the adapter lacks {name[:120]}", where=where, remedy=AGAIN)
    if (found := tensors[name].shape) != shape:
        raise UserError(
            f"{name[:120]} is {list(found)}; this base and {CONFIG} make it {list(shape)}", where=where,
            remedy=right_base(Path(where).parent),
        )  # fmt: skip


def _magnitude(tensors: Mapping[str, Stored], stored: str) -> str:
    name = f"{stored}.lora_magnitude_vector"
    return name if name in tensors else f"{name}.weight"


def _brought(config: ModelConfig, rest: Mapping[str, Stored]) -> ModelConfig:
    """An adapter that brings an embedding brings its vocabulary, and one with values makes a reward model."""
    if f"{VALUES}.weight" in rest:
        config = replace(config, head="values")
    embedding = rest.get(places(config)[f"{EMBEDDING}.weight"].name)
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[0] <= config.vocab_size:
        return config
    return grown(config, embedding.shape[0])


def _whole(rest: Mapping[str, Stored], config: ModelConfig, where: str) -> tuple[str, ...]:
    """Our modules that the adapter replaces."""
    shapes = parameter_shapes(config)
    place = places(config)
    known = {each.name for each in place.values()} | ({f"{HEAD}.weight"} if shares_head(config) else set())
    if strange := sorted(rest.keys() - known):
        raise _stranger(strange[0], config, where)
    wanted = {name.rpartition(".")[0] for name, each in place.items() if each.name in rest}
    mine = [name for name in place if name.rpartition(".")[0] in wanted]
    for name in mine:
        _expect(rest, place[name].name, place[name].stored_shape(shapes[name]), where)
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in mine))


def _refuse_untied(rest: Mapping[str, Stored], config: ModelConfig, where: str) -> None:
    """PEFT trains copies of tied weights apart, unless it is told otherwise."""
    if not shares_head(config):
        return
    both = rest.get(places(config)[f"{EMBEDDING}.weight"].name), rest.get(f"{HEAD}.weight")
    if both == (None, None):
        return
    if None not in both and _equal(each for each in both if each is not None):
        return
    raise UserError(
        "the adapter has trained the embedding apart from the head, which this model shares with it", where=where,
        remedy="merge it with PEFT (merge_and_unload) and use the merged model",
    )  # fmt: skip


def _equal(stored: Iterable[Stored]) -> bool:
    with Reader() as reader:
        one, other = (reader.read(each, 0, each.shape[0]) for each in stored)
        return bool(one.shape == other.shape and one.equal(other))
