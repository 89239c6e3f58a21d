"""Modules that an adapter changes, the model that it adapts, and the settings of PEFT's methods. No torch."""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.files import digest_of, digests_of_file, read_input
from bloomery.core.text import closest
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import (
    ROUTER,
    Shape,
    expert_parts,
    expert_stacks,
    is_expert_stack,
    layers,
    parameter_shapes,
)
from bloomery.facts.families import FAMILIES
from bloomery.hub import fetch_model, is_hub_id
from bloomery.model.adapters import mlx_files
from bloomery.model.adapters.mlx_files import is_of_mlx, peft_settings
from bloomery.model.adapters.peft_names import AGAIN, MERGE
from bloomery.model.io.expert_tensors import stored_experts
from bloomery.model.io.stored import (
    INDEX,
    LARGEST_CONFIG,
    is_bare,
    read_object,
    tensor_locations,
    weight_files,
)
from bloomery.recipe.schema import Lora, Peft

ALL_LINEAR = "all-linear"
NORMS = "norms"
VALUES = "score"
HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"


# LoRA: its matrices, and the modules that are trained in full


@dataclass(frozen=True)
class Pair:
    """LoRA of one linear layer: scale * B @ A, with A [rank, inputs] and B [outputs, rank]; of each matrix of a stack
    of experts likewise, all of one rank and scale.
    """

    rank: int
    scale: float


@dataclass(frozen=True, kw_only=True)
class VocabularyChange:
    """What an adapter of PEFT does to the embedding or the head: LoRA matrices, or new numbers for some tokens."""

    pair: Pair | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """`pairs` by the module, or stack of experts, that they adapt; `modules_to_save` are trained in full, a tied head
    as the embedding.

    `pissa`: each pair starts as its matrix's largest singular values, which a frozen copy subtracts again.

    Only adapters of PEFT have the rest, which `base_changes` merges into the weights of the base: `vocabulary` by
    module, `biases` that replace the base's, `lora_biases` of the modules whose B has a bias, and `residual`, the
    initialization ("pissa", "olora") that PEFT takes out of the base whenever it loads the adapter.
    """

    pairs: Mapping[str, Pair]
    vocabulary: Mapping[str, VocabularyChange] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    lora_biases: tuple[str, ...] = ()
    residual: str = ""
    modules_to_save: tuple[str, ...] = ()
    dora: bool = False
    pissa: bool = False
    rslora: bool = False  # the scale is alpha / sqrt(rank)
    dropout: float = 0.0
    dtype: str = "float32"


def adaptation(config: ModelConfig, adapter: Lora) -> Adaptation:
    """Raises UserError when a name matches nothing, or two settings contradict each other."""
    targets = target_modules(config, adapter.target_modules)
    # A reward model's values start at random, so that they are trained, as in PEFT's adapters of classifiers.
    value_head = [VALUES] if config.head == "values" else []
    saved_modules = modules_to_save(config, adapter.modules_to_save + value_head)

    # A module is adapted or trained, and PiSSA needs as many singular values as its rank.
    for module in targets:
        if module in saved_modules:
            raise UserError(
                f"{module} is both adapted and trained in full",
                where="adapter.modules_to_save",
                fix="name it in one of the two",
                code=2,
            )
    _refuse_on_experts(config, adapter, targets)
    pairs = _pairs(config, adapter, targets)
    if adapter.init == "pissa":
        shapes = parameter_shapes(config)
        for module, pair in pairs.items():
            singular_values = min(shapes[f"{module}.weight"])
            if pair.rank > singular_values:
                raise UserError(
                    f"{module} has only {singular_values} singular values, and PiSSA starts from "
                    f"{pair.rank} of them",
                    where="adapter.rank",
                    fix=f"set adapter.rank={singular_values} or lower",
                    code=2,
                )
    if adapter.kind == "dora":
        _refuse_parts_of_fused(config, targets, "adapter.target_modules")

    return Adaptation(
        pairs=pairs,
        modules_to_save=saved_modules,
        dora=adapter.kind == "dora",
        pissa=adapter.init == "pissa",
        rslora=adapter.use_rslora,
        dropout=adapter.dropout,
        dtype=adapter.dtype,
    )


def _pairs(config: ModelConfig, adapter: Lora, targets: Collection[str]) -> dict[str, Pair]:
    """The pair of each target: of two patterns that mean it the first counts, as in PEFT.

    Raises UserError for a pattern that means none of the targets.
    """
    ranks = dict.fromkeys(targets, adapter.rank)
    for pattern, rank in reversed(adapter.rank_pattern.items()):
        ranks.update(dict.fromkeys(_meant(config, targets, pattern, "rank_pattern"), rank))
    alphas = dict.fromkeys(targets, adapter.alpha)
    for pattern, alpha in reversed(adapter.alpha_pattern.items()):
        alphas.update(dict.fromkeys(_meant(config, targets, pattern, "alpha_pattern"), alpha))
    # rsLoRA: arXiv:2312.03732, theorem 3.2
    pairs = {
        module: Pair(rank, alphas[module] / (math.sqrt(rank) if adapter.use_rslora else rank))
        for module, rank in ranks.items()
    }
    for fused_modules in _fused_modules(config):
        first, *others = [module for module in fused_modules if module in pairs] or [""]
        for module in others:
            if not math.isclose(pairs[module].scale, pairs[first].scale):
                raise UserError(
                    f"a {config.family} model stores {module} fused with {first}, whose LoRA matrices have one scale",
                    where="adapter.rank_pattern"
                    if adapter.rank_pattern
                    else "adapter.alpha_pattern",
                    fix="give both the same alpha / rank: set adapter.alpha_pattern for both",
                    code=2,
                )
    return pairs


def _meant(config: ModelConfig, targets: Collection[str], pattern: str, key: str) -> list[str]:
    meant = [name for name in target_modules(config, [pattern]) if name in targets]
    if not meant:
        raise UserError(
            f"{pattern!r} of {key} means no target module",
            where=f"adapter.{key}",
            fix="take it out, or add it to adapter.target_modules",
            code=2,
        )
    return meant


def _refuse_on_experts(config: ModelConfig, adapter: Lora, targets: Collection[str]) -> None:
    """Raises UserError for what PEFT's files cannot say of experts, and PEFT does not compute."""
    all_stacks = expert_stacks(config)
    stacks = [target for target in targets if target in all_stacks]
    parameters = [target for target in targets if is_adapted_by_parameter(config, target)]
    settings = (
        (adapter.dropout > 0, "dropout of LoRA", "adapter.dropout", "0", stacks),
        (adapter.kind == "dora", "DoRA", "adapter.kind", "lora", stacks + parameters),
        (adapter.init == "pissa", "PiSSA", "adapter.init", "default", stacks),
    )
    others = {
        module.rpartition(".")[2]: None
        for module in linear_modules(config)
        if not is_adapted_by_parameter(config, module)
    }
    for is_set, name, where, default, modules in settings:
        if is_set and modules:
            raise UserError(
                f"{name} does not work on {modules[0]}: PEFT adapts it as a parameter, without its inputs, and would "
                "open no such adapter",
                where=where,
                fix=f"set {where}={default}, or leave it out: adapter.target_modules=[{', '.join(others)}]",
                code=2,
            )


def refuse_untrained_rows(config: ModelConfig, adapter: Lora, *, new: int) -> None:
    """Raises UserError when the embeddings of `new` tokens would stay frozen."""
    tables = [name for name in (EMBEDDING, HEAD) if f"{name}.weight" in parameter_shapes(config)]
    saved_modules = modules_to_save(config, adapter.modules_to_save)
    frozen_tables = [name for name in tables if name not in saved_modules]
    if not new or not frozen_tables:
        return
    leaves = [name.rpartition(".")[2] for name in frozen_tables]
    required_modules = ", ".join(dict.fromkeys([*adapter.modules_to_save, *leaves]))
    subject, pronoun = ("tokens are", "them") if new > 1 else ("token is", "it")
    raise UserError(
        f"{new} {subject} new to the model, and an adapter alone would never learn {pronoun}",
        where="adapter.modules_to_save",
        fix=f"set adapter.modules_to_save=[{required_modules}]",
        code=2,
    )


# Modules by name


def linear_modules(config: ModelConfig) -> list[str]:
    """The linear maps inside the layers, by full name; before them that which makes the inputs of all layers."""
    inputs = ["model.per_layer_model_projection"] if config.per_layer_input_size else []
    inside = [
        f"{layer.name}.{matrix.name}" for layer in layers(config) for matrix in layer.matrices
    ]
    return inputs + inside


# Linear maps of transformers' layers that choose experts: afmoe's router.gate, Hunyuan's gate.wg, Phi-3.5's router.
ROUTER_PATH = re.compile(r"\.(router|mlp\.gate)\.")


@dataclass(frozen=True)
class _Target:
    """What an adapter may change, and the names that mean it.

    Of a stack of experts each of `parts`, gate and up, has names of its own: one of them alone means no matrix.
    """

    name: str
    names: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_gate: bool = False  # of the shared expert: a row that "all-linear" leaves out, as the router

    def is_meant(self, pattern: str) -> bool:
        if pattern == ALL_LINEAR:
            return not self.is_gate
        return any(_matches(pattern, name) for name in self.names)

    def parts_meant(self, pattern: str) -> set[str]:
        return {
            part
            for part, names in self.parts.items()
            if any(_matches(pattern, name) for name in names)
        }


def _targets(config: ModelConfig) -> list[_Target]:
    """In the model's order."""
    locations = tensor_locations(config)
    stacks = expert_stacks(config)
    memory_names = stacks_in_memory(config)
    targets = []
    order = [*linear_modules(config), *stacks]
    order.sort(key=lambda name: int(name.split(".")[2]) if ".layers." in name else -1)
    for name in order:
        if name not in stacks:
            stored_name = locations[f"{name}.weight"].name.removesuffix(".weight")
            if ROUTER_PATH.search(f"{name}."):
                continue
            is_gate = name.endswith(".shared_expert_gate")
            targets.append(_Target(name, (name, stored_name), is_gate=is_gate))
            continue
        # The stack, the module that it is in, and its parts by the names that they have with or without a number.
        experts = name.rpartition(".")[0]
        stack_in_memory = memory_names[name]
        whole = (name, experts, stack_in_memory, stack_in_memory.rpartition(".")[0])
        parts: dict[str, tuple[str, ...]] = {}
        for part in expert_parts(name, (1, *stacks[name][1:])):
            module = part.name.split(".")[-2]
            parts[module] = (f"{experts}.{module}",)
            if not locations[part.name].stacked:
                stored_name = locations[part.name].name.removesuffix(".weight")
                stored_expert, _, stored_leaf = stored_name.rpartition(".")
                parts[module] += (f"{stored_expert.rpartition('.')[0]}.{stored_leaf}",)
        targets.append(_Target(name, whole, parts))
    return targets


def target_modules(config: ModelConfig, names: Iterable[str]) -> tuple[str, ...]:
    """The linear maps and stacks of experts that names, patterns over full names, or "all-linear" mean; in the model's
    order. "all-linear" leaves out the router and the gate of a shared expert.

    Names that saved files of the family use for them (c_attn, qkv_proj, w1) are understood, too.
    """
    where = "adapter.target_modules"
    targets = _targets(config)

    # Each name must mean a module: one that means none would train less than you asked for.
    meant: set[str] = set()
    parts_by_stack: dict[str, set[str]] = {}
    for name in names:
        matching = [target.name for target in targets if target.is_meant(name)]
        parts_of_name = {target.name: target.parts_meant(name) for target in targets}
        if not matching and not any(parts_of_name.values()):
            raise _no_target(config, name, [target.name for target in targets], where)
        meant.update(matching)
        for stack, parts in parts_of_name.items():
            parts_by_stack.setdefault(stack, set()).update(parts)

    # The rows of gate and up are one matrix, whose LoRA they share.
    for target in targets:
        parts = parts_by_stack.get(target.name, set())
        if not parts or target.name in meant:
            continue
        if missing := target.parts.keys() - parts:
            raise UserError(
                f"the {min(parts)} of experts is a part of {target.name}, whose LoRA its other part shares",
                where=where,
                fix=f"add {min(missing)}, or name a module of attention or of an MLP in full",
                code=2,
            )
        meant.add(target.name)
    if not meant:
        raise UserError(
            "the adapter has no targets",
            where=where,
            fix="set adapter.target_modules=[q_proj, v_proj] or adapter.target_modules=[all-linear]",
            code=2,
        )
    return tuple(target.name for target in targets if target.name in meant)


def _no_target(config: ModelConfig, name: str, targets: list[str], where: str) -> UserError:
    """For a name that means no target."""
    for module in (HEAD, EMBEDDING):
        if _matches(name, module):
            leaf = module.rpartition(".")[2]
            return UserError(
                f"not a linear layer inside the decoder layers: {leaf}",
                where=where,
                fix=f"remove it, and train it with adapter.modules_to_save=[{leaf}]",
                code=2,
            )
    routers = {
        path
        for parameter, location in tensor_locations(config).items()
        if parameter.endswith(ROUTER) or ROUTER_PATH.search(parameter)
        for path in (parameter.rpartition(".")[0], location.name.rpartition(".")[0])
    }
    if routers and (name == "router" or any(_matches(name, router) for router in routers)):
        return UserError(
            f"the router is no target of LoRA: {name[:80]!r}. Its few rows choose the experts, and vLLM and "
            "SGLang open no adapter with it",
            where=where,
            fix="take it out: it stays frozen; adapter.modules_to_save=[mlp.gate] trains it in full",
            code=2,
        )
    count = f"; the model has layers 0 to {config.num_layers - 1}" if "." in name else ""
    return unknown_module(name, targets, where, ALL_LINEAR + count)


def counted_by_kind(modules: Iterable[str]) -> str:
    """ "gate_proj, up_proj, down_proj: 32 each; q_proj, v_proj: 8 each": which modules of the layers, and how many.

    A name that stands for two kinds (an expert's and a shared expert's `up_proj`) has the part before it.
    """
    counts = Counter(
        tuple(part for part in module.split(".")[1:] if not part.isdecimal() and part != "layers")
        for module in modules
    )
    last_names = Counter(kind[-1] for kind in counts)
    names_by_count: dict[int, list[str]] = {}
    for kind, count in counts.items():
        name = kind[-1] if last_names[kind[-1]] == 1 else ".".join(kind[-2:])
        names_by_count.setdefault(count, []).append(name)
    return "; ".join(
        f"{', '.join(names)}: {count:,}{' each' if len(names) > 1 else ''}"
        for count, names in sorted(names_by_count.items(), reverse=True)
    )


def modules_to_save(config: ModelConfig, names: Iterable[str]) -> tuple[str, ...]:
    """The modules that `adapter.modules_to_save` means, in the model's order; "norms" are all of them."""
    where = "adapter.modules_to_save"
    # PEFT's files know a module by its weight.
    names_of_parameters = parameter_shapes(config)
    modules = [
        name.removesuffix(".weight") for name in names_of_parameters if name.endswith(".weight")
    ]
    saved_modules: set[str] = set()
    for name in names:
        matching_modules = [
            module
            for module in modules
            if _matches(name, module) or (name == NORMS and module.endswith("norm"))
        ]
        if shares_head(config) and _matches(name, HEAD):
            matching_modules.append(EMBEDDING)
        if not matching_modules:
            raise unknown_module(name, modules, where, f"{NORMS} (all of them)")
        saved_modules.update(matching_modules)
    _refuse_parts_of_fused(config, saved_modules, where)
    return tuple(module for module in modules if module in saved_modules)


def _matches(pattern: str, module: str) -> bool:
    """A full name, the end of one from a dot on, or a pattern over either."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"*.{pattern}")


def unknown_module(name: str, modules: list[str], where: str, alternatives: str) -> UserError:
    """For a name that matches none of the modules, with one near it; `alternatives`: what else may be written there."""
    leaves = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    leaf = name.rpartition(".")[2]
    near_leaves = closest(leaf, leaves, count=1, cutoff=0.5) if leaf not in leaves else []
    suggestion = f"did you mean {near_leaves[0]}? " if near_leaves else ""
    return UserError(
        f"{name[:80]!r} matches no module of this model",
        where=where,
        fix=f"{suggestion}known: {', '.join(leaves)}, {alternatives}",
        code=2,
    )


@cache
def stacks_in_memory(config: ModelConfig) -> Mapping[str, str]:
    """The names of parameters in transformers' memory, which PEFT targets, by our names of stacks of experts."""
    module = stored_experts(config).module
    names = {}
    for name in expert_stacks(config):
        layer, _, stack = name.rpartition(".mlp.experts.")
        names[name] = f"{layer}.{module}.{stack}"
    return MappingProxyType(names)


def has_stacks(settings: Adaptation) -> bool:
    """Whether the adapter changes stacks of experts."""
    return any(map(is_expert_stack, settings.pairs))


def adapter_module(target: str) -> str:
    """The module with the LoRA matrices of a target: of a stack of experts, which is a parameter, one beside it."""
    experts, _, stack = target.rpartition(".")
    return f"{experts}.lora.{stack}" if is_expert_stack(target) else target


def adapter_shapes(target: str, rank: int, shape: Shape) -> dict[str, Shape]:
    """The LoRA matrices of a matrix of `shape`, or of a stack of them, by the names of parameters."""
    *experts, outputs, inputs = shape
    module = adapter_module(target)
    return {
        f"{module}.lora_A": (*experts, rank, inputs),
        f"{module}.lora_B": (*experts, outputs, rank),
    }


# What PEFT 0.21 takes for matrices of experts wherever a module of that name is (_MOE_TARGET_MODULE_MAPPING in
# peft/utils/transformers_weight_conversion.py).
_NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def is_adapted_by_parameter(config: ModelConfig, module: str) -> bool:
    """Whether PEFT reaches a linear map only by its weight, as target parameter: by its name it would adapt experts."""
    stored_name = (
        tensor_locations(config)[f"{module}.weight"].name if _is_linear(config, module) else ""
    )
    leaf = stored_name.removesuffix(".weight").rpartition(".")[2]
    return config.experts is not None and leaf in _NAMES_OF_EXPERTS


def _is_linear(config: ModelConfig, module: str) -> bool:
    return f"{module}.weight" in tensor_locations(config)


def shares_head(config: ModelConfig) -> bool:
    """Whether the embedding is the head, too."""
    return config.tie_embeddings and config.head == "tokens"


@cache  # a plan asks for the same model many times, and a mixture has ten thousands of modules
def stored_modules(config: ModelConfig) -> Mapping[str, tuple[str, ...]]:
    """Modules with a weight, by the name of the module that transformers has for it, as files have it but for the few
    that it renames when it loads them; of fused ones in the order of rows.
    """
    modules_by_stored_name: dict[str, list[str]] = {}
    for name, location in tensor_locations(config).items():
        module, _, kind = name.rpartition(".")
        if kind == "weight":
            stored_name = in_memory(location.name.rpartition(".")[0], config)
            modules_by_stored_name.setdefault(stored_name, []).append(module)
    return MappingProxyType({name: tuple(m) for name, m in modules_by_stored_name.items()})


@cache
def _fused_modules(config: ModelConfig) -> tuple[tuple[str, ...], ...]:
    """Those of `stored_modules` that are one in the files."""
    return tuple(modules for modules in stored_modules(config).values() if len(modules) > 1)


def in_memory(stored_module: str, config: ModelConfig) -> str:
    """The name in transformers' memory of a module of files (`stored.as_saved` undoes it)."""
    family = FAMILIES.get(config.family)
    for ending, ending_in_memory in (family.stored.in_memory if family else {}).items():
        if stored_module.endswith(f".{ending}"):
            return stored_module.removesuffix(ending) + ending_in_memory
    return stored_module


def _refuse_parts_of_fused(config: ModelConfig, names: Collection[str], where: str) -> None:
    """Raises UserError for modules that files store fused with another: they can only be written together."""
    for fused_modules in _fused_modules(config):
        missing_modules = [module for module in fused_modules if module not in names]
        if not missing_modules or len(missing_modules) == len(fused_modules):
            continue
        module = min(set(fused_modules) - set(missing_modules))
        missing_leaf = missing_modules[0].rpartition(".")[2]
        raise UserError(
            f"a {config.family} model stores {module} fused with {missing_modules[0]}",
            where=where,
            fix=f"add {missing_leaf}, or take {module.rpartition('.')[2]} out",
            code=2,
        )


# Methods of PEFT

# The tuners of PEFT 0.21 that change matrices of a model and that Bloomery has not of its own.
METHODS = frozenset(
    {
        "ADALORA",
        "ADAMSS",
        "BEFT",
        "BOFT",
        "C3A",
        "DEFT",
        "DELORA",
        "FOURIERFT",
        "FROD",
        "GLORA",
        "GRALORA",
        "HIRA",
        "HRA",
        "IA3",
        "LILY",
        "LN_TUNING",
        "LOHA",
        "LOKR",
        "MISS",
        "OFT",
        "OSF",
        "PEANUT",
        "PSOFT",
        "PVERA",
        "RANDLORA",
        "ROAD",
        "SHIRA",
        "SUPERTUNING",
        "TINYLORA",
        "UNILORA",
        "VBLORA",
        "VERA",
        "WAVEFT",
    }
)
NATIVE = {
    "LORA": "set adapter.kind=lora, which is Bloomery's own",
    "TRAINABLE_TOKENS": "set adapter.kind=lora adapter.modules_to_save=[embed_tokens, lm_head]",
}
# These change the input or the past of transformers' own forward, not the matrices of a model.
PROMPTS = frozenset(
    {
        "ADAPTION_PROMPT",
        "CARTRIDGE",
        "CPT",
        "MULTITASK_PROMPT_TUNING",
        "POLY",
        "PREFIX_TUNING",
        "PROMPT_TUNING",
        "P_TUNING",
        "SHADOW",
        "XLORA",
    }
)
# What methods that are not about attention's matrices change; of the others PEFT's usual q_proj and v_proj.
DEFAULT_TARGET_MODULES: dict[str, str | list[str]] = {
    "LN_TUNING": ".*norm",
    "IA3": ["k_proj", "v_proj", "down_proj"],
}


def method_name(method: str) -> str:
    """The method's name as PEFT writes it. Raises UserError for one that PEFT lacks or that does not train here."""
    name = method.upper().replace("-", "_")
    if name in METHODS:
        return name
    problem = f"PEFT has no method {method!r}"
    near_names = closest(name, METHODS)
    fix = "PEFT has: " + ", ".join(sorted(METHODS)).lower()
    if name in NATIVE:
        problem = f"{method} is not PEFT's here"
        fix = NATIVE[name]
    elif name in PROMPTS:
        problem = (
            f"{method} changes the input of transformers' own forward, which this decoder does "
            "not have"
        )
        fix = "set adapter.kind=lora"
    elif near_names:
        fix = f"did you mean adapter.method={near_names[0].lower()}?"
    raise UserError(problem, where="adapter.method", fix=fix, code=2)


def targets_of(adapter: Peft, config: ModelConfig) -> str | list[str]:
    """`target_modules` as PEFT takes them: names or their ends from a dot on, or a regular expression over full names.

    Raises UserError for what matches no module.
    """
    where = "adapter.target_modules"
    example = "name modules: adapter.target_modules=[q_proj]"
    defaults = DEFAULT_TARGET_MODULES.get(method_name(adapter.method), ["q_proj", "v_proj"])
    targets = (adapter.model_extra or {}).get("target_modules") or defaults
    if targets in (ALL_LINEAR, [ALL_LINEAR]):  # PEFT supports it for transformers' models only
        return sorted({matrix.name for layer in layers(config) for matrix in layer.matrices})

    # Of transformers' layers PEFT sees the names of files, inside the layers: the rest has two owners.
    parameters: Iterable[str] = parameter_shapes(config)
    if backend := config.transformers_backend:
        parameters = [
            stored_name
            for name, stored_name, _ in backend.parameters
            if name.startswith("model.layers.")
        ]
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in parameters))

    # A text is a regular expression, a list holds names.
    if isinstance(targets, str):
        try:
            matches = any(re.fullmatch(targets, module) for module in modules)
        except re.error as error:
            problem = f"{targets[:80]!r} is no pattern: {error}"
            raise UserError(problem, where=where, fix=example, code=2) from error
        if not matches:
            alternatives = f"{ALL_LINEAR}; a text alone is a pattern over full names"
            raise unknown_module(targets, modules, where, alternatives)
        return targets
    if not isinstance(targets, list):
        problem = f"target_modules is {str(targets)[:40]}, no list of names"
        raise UserError(problem, where=where, fix=example, code=2)
    for name in targets:
        if not any(module == name or module.endswith(f".{name}") for module in modules):
            raise unknown_module(str(name), modules, where, ALL_LINEAR)
    return list(targets)


# PeftConfig's own fields, and why a recipe does not set them.
NATIVE_ONLY = {
    "peft_type": "adapter.method names the method",
    "task_type": "the objective decides it",
    "inference_mode": "a run trains its adapter, and what is saved is marked for inference",
    "base_model_name_or_path": "model.from names the base",
    "revision": "model.from names it: ORG/NAME@REVISION",
    "auto_mapping": "PEFT writes it for classes of its own",
    "peft_version": "PEFT writes it",
}


def method_settings(adapter: Peft, config: ModelConfig, *, steps: int | None) -> dict[str, Any]:
    """The arguments of PEFT's config class: the recipe's keys, with defaults for this decoder.

    `steps`: of the run, None where they are not known. Raises UserError for keys that a run sets itself, and for
    modules that the decoder does not have. Everything else is PEFT's to refuse (`peft_methods.method_config`).
    """
    method = method_name(adapter.method)

    # Keys that a run sets are refused; the targets have defaults for this decoder.
    settings = dict(adapter.model_extra or {})
    for name in settings:
        if name in NATIVE_ONLY:
            problem = f"{name} is not a recipe's to set: {NATIVE_ONLY[name]}"
            raise UserError(problem, where=f"adapter.{name}", fix="take it out", code=2)
    settings["target_modules"] = targets_of(adapter, config)
    refuse_stored_otherwise(config)

    # Two methods need settings that depend on the decoder or the run.
    if method == "IA3":
        # Modules whose inputs are scaled instead of their outputs. PEFT has no default for this decoder.
        targets = settings["target_modules"]
        names = targets if isinstance(targets, list) else []
        settings.setdefault("feedforward_modules", [n for n in names if n.endswith("down_proj")])
    if method == "ADALORA":
        # The schedule of its ranks ends with the run.
        total_steps = settings.setdefault("total_step", steps)
        if total_steps:
            settings.setdefault("tinit", round(0.1 * total_steps))
            settings.setdefault("tfinal", round(0.5 * total_steps))
            settings.setdefault("deltaT", max(1, total_steps // 100))
    return settings


def refuse_stored_otherwise(config: ModelConfig) -> None:
    """Raises UserError where PEFT's file, with transformers' modules, would not fit the decoder's."""
    is_rearranged = any(
        location.name != name or location.transposed
        for name, location in tensor_locations(config).items()
    )
    if is_rearranged and config.transformers_backend is None:
        raise UserError(
            f"{config.family} is stored with fused or transposed matrices, which are others than "
            "those that train here",
            where="adapter.kind=peft",
            fix="set adapter.kind=lora: Bloomery's own writes PEFT's format for it, too",
            code=2,
        )


# The base model of an adapter

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
LONGEST_PATH = 4000  # characters; the system refuses longer ones


@dataclass(frozen=True)
class Base:
    """The folder of a base model, and a digest of its weights."""

    folder: str
    digest: str

    @property
    def name(self) -> str:
        """The Hub id of a folder in the Hub's cache, else the folder."""
        # models--ORG--NAME/snapshots/COMMIT
        repository = Path(self.folder).parent.parent.name
        if not repository.startswith("models--"):
            return self.folder
        return repository.removeprefix("models--").replace("--", "/", 1)

    def refuse_change(self, digest: str, *, where: str, fix: str | None = None) -> None:
        """Raises UserError when the adapter in `where` was trained on other weights than these, and without any."""
        if digest != self.digest and not Path(self.folder).is_dir():
            raise UserError(
                f"the adapter's base is not here: {self.folder}",
                where=where,
                fix="put the base model back into that folder",
            )
        if digest != self.digest:
            raise UserError(
                f"the adapter was trained on other weights than those in {self.folder}",
                where=where,
                fix=fix or "put the base model back that it was trained on",
            )


def base_of_name(folder: Path) -> str:
    """The name that the base in a folder has on the Hub, else the folder."""
    return Base(str(folder.resolve()), "").name


def base_of(folder: Path) -> Base:
    return Base(str(folder.resolve()), digest(folder))


def digest(folder: Path) -> str:
    """The digest of every byte of the weights and of config.json: as fast as the disk, or some GB/s from its cache."""
    files = [
        folder / "config.json",
        folder / INDEX,
        *(() if is_bare(folder) else weight_files(folder)),
    ]
    lines = []
    for path in files:
        if path.is_file():
            status = path.stat()
            lines.append(
                f"{path.name} {_content_digest(path, status.st_size, status.st_mtime_ns)}\n"
            )
    return digest_of("".join(lines).encode())


@lru_cache(maxsize=256)  # a run asks several times before it begins
def _content_digest(path: Path, size: int, mtime_ns: int) -> str:
    del mtime_ns
    return f"{size} {digest_of(''.join(digests_of_file(path)).encode())}"


def is_adapter_folder(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def stated_settings(folder: Path) -> dict[str, Any]:
    """adapter_config.json as it is. Raises UserError when it is no object."""
    return read_object(folder / CONFIG, fix=AGAIN)


def read_settings(folder: Path) -> dict[str, Any]:
    """adapter_config.json as PEFT's LoRA would have written it, where the adapter is one. Raises UserError."""
    path = folder / CONFIG
    settings = stated_settings(folder)
    if is_of_mlx(settings):
        return peft_settings(settings, where=str(path))
    if not isinstance(settings.get("peft_type"), str):
        problem = f"{CONFIG} names no peft_type: it is neither PEFT's nor mlx-lm's"
        raise UserError(problem, where=str(path), fix=AGAIN)
    # PEFT trains single tokens with LoRA or alone.
    if settings["peft_type"] == "TRAINABLE_TOKENS":
        shared = {key: settings[key] for key in ("base_model_name_or_path",) if key in settings}
        tokens = {"trainable_token_indices": settings.get("token_indices")}
        return {"peft_type": "LORA", **shared, **tokens}
    return settings


def adapter_file(folder: Path) -> str:
    """The name of the file with the adapter's tensors."""
    is_peft = (folder / TENSORS).is_file() or not (folder / mlx_files.TENSORS).is_file()
    return TENSORS if is_peft else mlx_files.TENSORS


def base_folder(folder: Path) -> Path:
    """The model that the adapter in `folder` names: a local folder first, else one of the Hub. Raises UserError."""
    name = _base_name(folder)
    where = str(folder / CONFIG)
    fix = f"name the base yourself: BASE+{folder.name}"
    if name is None:
        raise UserError("the adapter names no base model", where=where, fix=fix)

    # A path may be relative to the adapter. A run that was moved has its base in its own folder.
    folders = [Path(name), folder / name]
    if folder.parent.name == "checkpoints":
        folders.append(folder.parent.parent / "base")
    for candidate in folders if len(name) < LONGEST_PATH else []:
        if (candidate / "config.json").is_file():
            return candidate

    if not is_hub_id(name):
        raise UserError(f"the adapter's base is not here: {name[:200]}", where=where, fix=fix)
    return fetch_model(name)


def right_base(folder: Path, used_base: Path | None = None) -> str:
    """The fix for an adapter that does not fit `used_base`: the arguments with the base that it was trained on.

    Where that base is the one that was used, naming it again would change nothing.
    """
    name = _base_name(folder)
    if name is not None and used_base is not None and len(name) < LONGEST_PATH:
        candidates = [Path(name), folder / name]
        same_folder = any(candidate.resolve() == used_base.resolve() for candidate in candidates)
        if same_folder or name == base_of_name(used_base):
            return mlx_files.FUSE if adapter_file(folder) == mlx_files.TENSORS else MERGE
    if name is None or len(name) >= LONGEST_PATH:
        return "name the base that it was trained on: BASE+ADAPTER"
    return f"name the base that it was trained on: {shlex.quote(f'{name}+{folder}')}"


def _base_name(folder: Path) -> str | None:
    """The base that adapter_config.json names; None where it is no printable text."""
    name = read_settings(folder).get("base_model_name_or_path")
    return name if isinstance(name, str) and name and name.isprintable() else None


def refuse_other_base(folder: Path, base: Path) -> None:
    """Raises UserError when a run's own checkpoint was trained on other weights than those in `base`."""
    path = folder / "state.json"
    if not path.is_file() or path.stat().st_size > LARGEST_CONFIG:
        return
    try:
        state = json.loads(read_input(path, LARGEST_CONFIG))
    except (ValueError, RecursionError) as error:
        problem = f"state.json is not JSON: {error}"[:200]
        raise UserError(problem, where=str(path), fix=AGAIN) from error
    match state:
        case {"base": {"digest": str(trained_digest), **trained_base}}:
            base_now = base_of(base)
            # Another folder means another base; the same folder, that its files have changed.
            is_same_folder = trained_base.get("folder", base_now.folder) == base_now.folder
            fix = None if is_same_folder else right_base(folder)
            base_now.refuse_change(trained_digest, where=str(folder), fix=fix)
