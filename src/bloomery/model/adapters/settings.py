"""Modules that an adapter changes, the model that it adapts, and the settings of PEFT's methods. No torch."""

import json
import math
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.files import digest_of, digests_of_file
from bloomery.core.text import closest
from bloomery.hub import fetch_model, is_hub_id
from bloomery.model.config import ModelConfig
from bloomery.model.counting import layers, parameter_shapes
from bloomery.model.io.stored import INDEX, LARGEST_CONFIG, SINGLE, places, read_object
from bloomery.recipe.schema import Lora, Peft

ALL_LINEAR = "all-linear"
NORMS = "norms"
VALUES = "score"
HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True)
class Pair:
    """LoRA of one linear layer: scale * B @ A, with A [rank, inputs] and B [outputs, rank]."""

    rank: int
    scale: float


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """`pairs` by the module that they adapt; `whole`: modules that are trained in full, a tied head as the embedding.

    `pissa`: each pair starts as its matrix's largest singular values, which a frozen copy subtracts again.
    """

    pairs: Mapping[str, Pair]
    whole: tuple[str, ...] = ()
    dora: bool = False
    pissa: bool = False
    rslora: bool = False  # the scale is alpha / sqrt(rank)
    dropout: float = 0.0
    dtype: str = "float32"


def adaptation(config: ModelConfig, adapter: Lora) -> Adaptation:
    """Raises UserError when a name matches nothing, or two settings contradict each other."""
    names = target_modules(config, adapter.target_modules)
    # Nothing is known yet of a reward model's values, as in PEFT's adapters of classifiers.
    whole = whole_modules(
        config, adapter.modules_to_save + ([VALUES] if config.head == "values" else [])
    )
    if both := [name for name in names if name in whole]:
        problem = f"{both[0]} is both adapted and trained in full"
        raise UserError(
            problem, where="adapter.modules_to_save", fix="name it in one of the two", code=2
        )
    shapes = parameter_shapes(config)
    for name in names if adapter.init == "pissa" else ():
        if adapter.rank > (most := min(shapes[f"{name}.weight"])):
            problem = f"{name} has only {most} singular values, and PiSSA starts from {adapter.rank} of them"
            raise UserError(
                problem, where="adapter.rank", fix=f"set adapter.rank={most} or lower", code=2
            )
    if adapter.kind == "dora":
        _refuse_parts(config, names, "adapter.target_modules")
    rank = adapter.rank
    # rsLoRA: arXiv:2312.03732, theorem 3.2
    scale = adapter.alpha / (math.sqrt(rank) if adapter.use_rslora else rank)
    return Adaptation(
        pairs={name: Pair(rank, scale) for name in names},
        whole=whole,
        dora=adapter.kind == "dora",
        pissa=adapter.init == "pissa",
        rslora=adapter.use_rslora,
        dropout=adapter.dropout,
        dtype=adapter.dtype,
    )


def refuse_untrained_rows(config: ModelConfig, adapter: Lora, *, new: int) -> None:
    """Raises UserError when the embeddings of `new` tokens would stay frozen."""
    needed = [name for name in (EMBEDDING, HEAD) if f"{name}.weight" in parameter_shapes(config)]
    missing = [
        name for name in needed if name not in whole_modules(config, adapter.modules_to_save)
    ]
    if new and missing:
        leaves = ", ".join(
            dict.fromkeys(
                [*adapter.modules_to_save, *(name.rpartition(".")[2] for name in missing)]
            )
        )
        raise UserError(
            f"{new} token{'s are' if new > 1 else ' is'} new to the model, and an adapter alone would never learn"
            f" {'them' if new > 1 else 'it'}",
            where="adapter.modules_to_save",
            fix=f"set adapter.modules_to_save=[{leaves}]",
            code=2,
        )


def linear_modules(config: ModelConfig) -> list[str]:
    """The linear maps inside the layers, by full name."""
    return [f"{layer.name}.{matrix.name}" for layer in layers(config) for matrix in layer.matrices]


def target_modules(config: ModelConfig, names: Iterable[str]) -> tuple[str, ...]:
    """The linear maps that names, patterns over full names, or "all-linear" mean; in the model's order.

    Names that saved files of the family use for them (c_attn, qkv_proj) are understood, too.
    """
    known = linear_modules(config)
    kept = places(config)
    stored = {name: kept[f"{name}.weight"].name.removesuffix(".weight") for name in known}
    found: set[str] = set()
    for target in names:
        means = [
            name
            for name in known
            if target == ALL_LINEAR or _means(target, name) or _means(target, stored[name])
        ]
        if not means and (_means(target, HEAD) or _means(target, EMBEDDING)):
            leaf = HEAD if _means(target, HEAD) else "embed_tokens"
            raise UserError(
                f"not a linear layer inside the decoder layers: {leaf}",
                where="adapter.target_modules",
                code=2,
                fix=f"remove it, and train it with adapter.modules_to_save=[{leaf}]",
            )
        if not means:
            inside = f"; the model has layers 0 to {config.num_layers - 1}" if "." in target else ""
            raise unknown_module(target, known, "adapter.target_modules", ALL_LINEAR + inside)
        found.update(means)
    if not found:
        fix = "set adapter.target_modules=[q_proj, v_proj] or adapter.target_modules=[all-linear]"
        raise UserError(
            "the adapter has no targets", where="adapter.target_modules", fix=fix, code=2
        )
    return tuple(name for name in known if name in found)


def whole_modules(config: ModelConfig, names: Iterable[str]) -> tuple[str, ...]:
    """The modules that `modules_to_save` means, in the model's order; "norms" are all of them."""
    known = list(dict.fromkeys(name.rpartition(".")[0] for name in parameter_shapes(config)))
    found: set[str] = set()
    for wanted in names:
        tied = shares_head(config) and _means(wanted, HEAD)
        means = [
            name
            for name in known
            if _means(wanted, name) or (wanted == NORMS and name.endswith("norm"))
        ]
        if not means and not tied:
            raise unknown_module(wanted, known, "adapter.modules_to_save", f"{NORMS} (all of them)")
        found.update([*means, EMBEDDING] if tied else means)
    _refuse_parts(config, found, "adapter.modules_to_save")
    return tuple(name for name in known if name in found)


def _means(pattern: str, name: str) -> bool:
    """A full name, the end of one from a dot on, or a pattern over either."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def unknown_module(name: str, known: list[str], where: str, more: str) -> UserError:
    """For a name that matches none of `known`, with those near it; `more`: what else may be written there."""
    leaves = list(dict.fromkeys(module.rpartition(".")[2] for module in known))
    wanted = name.rpartition(".")[2]
    near = closest(wanted, leaves, count=1, cutoff=0.5) if wanted not in leaves else []
    meant = f"did you mean {near[0]}? " if near else ""
    fix = f"{meant}known: {', '.join(leaves)}, {more}"
    return UserError(f"{name[:80]!r} matches no module of this model", where=where, fix=fix, code=2)


def shares_head(config: ModelConfig) -> bool:
    """Whether the embedding is the head, too."""
    return config.tie_embeddings and config.head == "tokens"


def stored_modules(config: ModelConfig) -> dict[str, list[str]]:
    """Modules with a weight, by the name of the module that files keep it in; of fused ones in the order of rows."""
    found: dict[str, list[str]] = {}
    for name, place in places(config).items():
        module, _, kind = name.rpartition(".")
        if kind == "weight":
            found.setdefault(place.name.rpartition(".")[0], []).append(module)
    return found


def _refuse_parts(config: ModelConfig, chosen: Collection[str], where: str) -> None:
    """Modules that files store fused can only be written together."""
    for together in stored_modules(config).values():
        missing = [name for name in together if name not in chosen]
        if missing and len(missing) < len(together):
            fused = min(set(together) - set(missing))
            leaf = missing[0].rpartition(".")[2]
            raise UserError(
                f"a {config.family} model stores {fused} fused with {missing[0]}",
                where=where,
                fix=f"add {leaf}, or take {fused.rpartition('.')[2]} out",
                code=2,
            )


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


def named(method: str) -> str:
    """As PEFT writes it. Raises UserError for what is no method of PEFT's that trains here."""
    name = method.upper().replace("-", "_")
    if name in NATIVE:
        raise UserError(
            f"{method} is not PEFT's here", where="adapter.method", fix=NATIVE[name], code=2
        )
    if name in PROMPTS:
        problem = f"{method} changes the input of transformers' own forward, which this decoder does not have"
        raise UserError(problem, where="adapter.method", fix="set adapter.kind=lora", code=2)
    if name not in METHODS:
        near = closest(name, METHODS)
        known = "PEFT has: " + ", ".join(sorted(METHODS)).lower()
        fix = f"did you mean adapter.method={near[0].lower()}?" if near else known
        raise UserError(f"PEFT has no method {method!r}", where="adapter.method", fix=fix, code=2)
    return name


def targets_of(adapter: Peft, config: ModelConfig) -> str | list[str]:
    """`target_modules` as PEFT takes them: names or their ends from a dot on, or a regular expression over full names.

    Raises UserError for what matches no module.
    """
    where = "adapter.target_modules"
    given = (adapter.model_extra or {}).get("target_modules")
    asked = given or DEFAULT_TARGET_MODULES.get(named(adapter.method), ["q_proj", "v_proj"])
    if asked in (ALL_LINEAR, [ALL_LINEAR]):  # PEFT supports it for transformers' models only
        return sorted({matrix.name for layer in layers(config) for matrix in layer.matrices})
    names: Iterable[str] = parameter_shapes(config)
    # by the names of files, those in its layers: the rest has two owners
    if backend := config.transformers_backend:
        names = [
            theirs for ours, theirs, _ in backend.parameters if ours.startswith("model.layers.")
        ]
    known = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    if not isinstance(asked, str | list):
        problem = f"target_modules is {str(asked)[:40]}, no list of names"
        raise UserError(
            problem, where=where, fix="name modules: adapter.target_modules=[q_proj]", code=2
        )
    if isinstance(asked, str):
        try:
            matches = any(re.fullmatch(asked, name) for name in known)
        except re.error as error:
            problem = f"{asked[:80]!r} is no pattern: {error}"
            fix = "name modules: adapter.target_modules=[q_proj]"
            raise UserError(problem, where=where, fix=fix, code=2) from error
        if not matches:
            raise unknown_module(
                asked, known, where, f"{ALL_LINEAR}; a text alone is a pattern over full names"
            )
        return asked
    for wanted in asked:
        if not any(name == wanted or name.endswith(f".{wanted}") for name in known):
            raise unknown_module(str(wanted), known, where, ALL_LINEAR)
    return list(asked)


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
    method = named(adapter.method)
    settings = dict(adapter.model_extra or {})
    for name in settings:
        if name in NATIVE_ONLY:
            problem = f"{name} is not a recipe's to set: {NATIVE_ONLY[name]}"
            raise UserError(problem, where=f"adapter.{name}", fix="take it out", code=2)
    settings["target_modules"] = targets_of(adapter, config)
    refuse_stored_otherwise(config)
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
    moved = any(place.name != name or place.transposed for name, place in places(config).items())
    if moved and config.transformers_backend is None:
        raise UserError(
            f"{config.family} is stored with fused or transposed matrices, which are others than those that train here",
            where="adapter.kind=peft",
            fix="set adapter.kind=lora: Bloomery's own writes PEFT's format for it, too",
            code=2,
        )


CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
AGAIN = "download or save the adapter again"


@dataclass(frozen=True)
class Base:
    folder: str
    digest: str

    @property
    def name(self) -> str:
        """The Hub id of a folder in the Hub's cache, else the folder."""
        cached = Path(self.folder).parent.parent.name  # models--x--y/snapshots/<commit>
        return (
            cached.removeprefix("models--").replace("--", "/", 1)
            if cached.startswith("models--")
            else self.folder
        )

    def refuse_change(self, digest: str, *, where: str, fix: str | None = None) -> None:
        """Raises UserError when the adapter in `where` was trained on other weights than these."""
        if digest != self.digest:
            raise UserError(
                f"the adapter was trained on other weights than those in {self.folder}",
                where=where,
                fix=fix or "put the base model back that it was trained on",
            )


def base_of(folder: Path) -> Base:
    return Base(str(folder.resolve()), digest(folder))


def digest(folder: Path) -> str:
    """Of every byte of the weights and of config.json: as fast as the disk, or some GB/s where memory holds them."""
    paths = [
        path
        for path in (folder / "config.json", folder / INDEX, *_weights(folder))
        if path.is_file()
    ]
    moments = [(path, path.stat()) for path in paths]
    lines = (f"{path.name} {_content(path, at.st_size, at.st_mtime_ns)}\n" for path, at in moments)
    return digest_of("".join(lines).encode())


@lru_cache(maxsize=256)  # a run asks several times before it begins
def _content(path: Path, size: int, mtime_ns: int) -> str:
    del mtime_ns
    return f"{size} {digest_of(''.join(digests_of_file(path)).encode())}"


def _weights(folder: Path) -> list[Path]:
    """The files that the model is read from."""
    index = folder / INDEX
    single = folder / SINGLE
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return [path for path in sorted(folder.glob("*.safetensors")) if path.name in names]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = "the index of the weights cannot be read"
            raise UserError(
                problem, where=str(index), fix="download or save the model again"
            ) from error
    return [single] if single.is_file() else []


def is_adapter_folder(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_settings(folder: Path) -> dict[str, Any]:
    """adapter_config.json. Raises UserError when it is none."""
    path = folder / CONFIG
    said = read_object(path, fix=AGAIN)
    if not isinstance(said.get("peft_type"), str):
        raise UserError(f"{CONFIG} names no peft_type", where=str(path), fix=AGAIN)
    return said


def base_folder(folder: Path) -> Path:
    """The model that the adapter in `folder` names: a local folder first, else one of the Hub. Raises UserError."""
    name = read_settings(folder).get("base_model_name_or_path")
    where = str(folder / CONFIG)
    fix = f"name the base yourself: BASE+{folder.name}"
    if not isinstance(name, str) or not name or not name.isprintable():
        raise UserError("the adapter names no base model", where=where, fix=fix)
    # a run that was moved
    moved = [folder.parent.parent / "base"] if folder.parent.name == "checkpoints" else []
    for place in (Path(name), folder / name, *moved):
        if len(name) < 4000 and (place / "config.json").is_file():
            return place
    if not is_hub_id(name):
        raise UserError(f"the adapter's base is not here: {name[:200]}", where=where, fix=fix)
    return fetch_model(name)


def right_base(folder: Path) -> str:
    """The fix for an adapter on another base: the arguments with the base that it was trained on."""
    name = read_settings(folder).get("base_model_name_or_path")
    known = isinstance(name, str) and bool(name) and name.isprintable() and len(name) < 4000
    return f"name the base that it was trained on: {shlex.quote(f'{name}+{folder}') if known else 'BASE+ADAPTER'}"


def refuse_other_base(folder: Path, base: Path) -> None:
    """Raises UserError when a run's own checkpoint was trained on other weights than those in `base`."""
    path = folder / "state.json"
    if not path.is_file() or path.stat().st_size > LARGEST_CONFIG:
        return
    try:
        match json.loads(path.read_text(encoding="utf-8")):
            case {"base": {"digest": str(noted), **told}}:
                given = base_of(base)
                fix = (
                    None if given.folder == told.get("folder", given.folder) else right_base(folder)
                )
                given.refuse_change(noted, where=str(folder), fix=fix)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"state.json is not JSON: {error}"[:200], where=str(path), fix=AGAIN
        ) from error
