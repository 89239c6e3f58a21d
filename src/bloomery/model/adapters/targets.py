"""Which modules an adapter changes and which are trained in full, from names and patterns. No torch."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from bloomery.core.errors import UserError
from bloomery.core.text import closest
from bloomery.model.config import ModelConfig
from bloomery.model.counting import layers, parameter_shapes
from bloomery.model.io.stored import places
from bloomery.recipe.schema import Lora

ALL_LINEAR, NORMS = "all-linear", "norms"
VALUES = "score"
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"


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

    def trained(self, config: ModelConfig) -> int:
        """How many numbers are learned."""
        shapes = parameter_shapes(config)
        sizes = {name: shapes[f"{name}.weight"] for name in self.pairs}
        low = sum(self.pairs[name].rank * sum(shape) + self.dora * shape[0] for name, shape in sizes.items())
        full = sum(math.prod(shape) for name, shape in shapes.items() if name.rpartition(".")[0] in self.whole)
        return low + full


def adaptation(config: ModelConfig, adapter: Lora) -> Adaptation:
    """Raises UserError when a name matches nothing, or two settings contradict each other."""
    names = target_modules(config, adapter.target_modules)
    # Nothing is known yet of a reward model's values, as in PEFT's adapters of classifiers.
    whole = whole_modules(config, adapter.modules_to_save + ([VALUES] if config.head == "values" else []))
    if both := [name for name in names if name in whole]:
        problem = f"{both[0]} is both adapted and trained in full"
        raise UserError(problem, where="adapter.modules_to_save", fix="name it in one of the two", code=2)
    shapes = parameter_shapes(config)
    for name in names if adapter.init == "pissa" else ():
        if adapter.rank > (most := min(shapes[f"{name}.weight"])):
            problem = f"{name} has only {most} singular values, and PiSSA starts from {adapter.rank} of them"
            raise UserError(problem, where="adapter.rank", fix=f"set adapter.rank={most} or lower", code=2)
    if adapter.kind == "dora":
        _refuse_parts(config, names, "adapter.target_modules")
    rank = adapter.rank
    # rsLoRA: arXiv:2312.03732, theorem 3.2
    scale = adapter.alpha / (math.sqrt(rank) if adapter.use_rslora else rank)
    return Adaptation(
        pairs={name: Pair(rank, scale) for name in names}, whole=whole, dora=adapter.kind == "dora",
        pissa=adapter.init == "pissa", rslora=adapter.use_rslora, dropout=adapter.dropout, dtype=adapter.dtype,
    )  # fmt: skip


def refuse_untrained_rows(config: ModelConfig, adapter: Lora, *, new: int) -> None:
    """Raises UserError when the embeddings of `new` tokens would stay frozen."""
    needed = [name for name in (EMBEDDING, HEAD) if f"{name}.weight" in parameter_shapes(config)]
    missing = [name for name in needed if name not in whole_modules(config, adapter.modules_to_save)]
    if new and missing:
        leaves = ", ".join(dict.fromkeys([*adapter.modules_to_save, *(name.rpartition(".")[2] for name in missing)]))
        raise UserError(
            f"{new} token{'s are' if new > 1 else ' is'} new to the model, and an adapter alone would never learn"
            f" {'them' if new > 1 else 'it'}",
            where="adapter.modules_to_save", fix=f"set adapter.modules_to_save=[{leaves}]", code=2,
        )  # fmt: skip


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
        means = [name for name in known if target == ALL_LINEAR or _means(target, name) or _means(target, stored[name])]
        if not means and (_means(target, HEAD) or _means(target, EMBEDDING)):
            leaf = HEAD if _means(target, HEAD) else "embed_tokens"
            raise UserError(
                f"not a linear layer inside the decoder layers: {leaf}",
                where="adapter.target_modules", code=2,
                fix=f"remove it, and train it with adapter.modules_to_save=[{leaf}]",
            )  # fmt: skip
        if not means:
            inside = f"; the model has layers 0 to {config.num_layers - 1}" if "." in target else ""
            raise unknown_module(target, known, "adapter.target_modules", ALL_LINEAR + inside)
        found.update(means)
    if not found:
        fix = "set adapter.target_modules=[q_proj, v_proj] or adapter.target_modules=[all-linear]"
        raise UserError("the adapter has no targets", where="adapter.target_modules", fix=fix, code=2)
    return tuple(name for name in known if name in found)


def whole_modules(config: ModelConfig, names: Iterable[str]) -> tuple[str, ...]:
    """The modules that `modules_to_save` means, in the model's order; "norms" are all of them."""
    known = list(dict.fromkeys(name.rpartition(".")[0] for name in parameter_shapes(config)))
    found: set[str] = set()
    for wanted in names:
        tied = shares_head(config) and _means(wanted, HEAD)
        means = [name for name in known if _means(wanted, name) or (wanted == NORMS and name.endswith("norm"))]
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
    near = closest(wanted, leaves, count=3, cutoff=0.5)
    fix = f"near it: {', '.join(near)}" if near and wanted not in leaves else f"known: {', '.join(leaves)}, {more}"
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
            fused, leaf = min(set(together) - set(missing)), missing[0].rpartition(".")[2]
            raise UserError(
                f"a {config.family} model stores {fused} fused with {missing[0]}", where=where,
                fix=f"add {leaf}, or take {fused.rpartition('.')[2]} out", code=2,
            )  # fmt: skip
