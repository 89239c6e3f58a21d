"""Merges of whole models, one parameter at a time: linear, SLERP, TIES and task arithmetic, computed in float32.

Linear: Wortsman et al., "Model soups", arXiv:2203.05482. TIES: Yadav et al., arXiv:2306.01708. Task arithmetic:
Ilharco et al., arXiv:2212.04089. SLERP: Shoemake, "Animating rotation with quaternion curves", 1985.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.export.card import Merge, public
from bloomery.export.layouts import (
    DTYPES,
    Exported,
    check_in_library,
    draft_of,
    finished_export,
    open_weights,
    probe_logits,
    refuse_overflow,
    write_other_files,
)
from bloomery.model.adapters.settings import Base
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_shapes
from bloomery.model.io.stored import find_tensors
from bloomery.model.io.weights import write_model_piecewise
from bloomery.train.model_folder import ModelFiles, find_model
from bloomery.train.use import Use

Method = Literal["linear", "slerp", "ties", "task-arithmetic"]
METHODS: tuple[Method, ...] = get_args(Method)
NEEDS_BASE = ("ties", "task-arithmetic")
DENSITY = 0.2  # of each parameter's changes that TIES keeps (section 4 of the paper)
# cosine above which SLERP is the straight line: the sine of the angle would divide noise
PARALLEL = 0.9995
PIECE = 2**20  # numbers of a dot product that are float64 at a time
# Facts of a config that do not change what a layer computes: the first model's are kept.
FREE = (
    "max_positions",
    "embedding_dropout",
    "residual_dropout",
    "attention_dropout",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def combine(
    method: Method,
    parts: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    density: float,
) -> Tensor:
    """One parameter of the merged model from those of the models, all float32 and of one shape."""
    if method == "slerp":
        return slerp(parts[0], parts[1], weights[1] / sum(weights))
    if method == "linear":
        return torch.stack(
            [part * (weight / sum(weights)) for part, weight in zip(parts, weights, strict=True)]
        ).sum(0)
    assert base is not None
    changes = [part - base for part in parts]
    if method == "ties":
        return base + ties(changes, weights, density)
    return base + torch.stack(
        [change * weight for change, weight in zip(changes, weights, strict=True)]
    ).sum(0)


def slerp(first: Tensor, second: Tensor, share: float) -> Tensor:
    """The point at `share` of the arc from `first` to `second`, taken as vectors; the line where they are parallel."""

    def dot(one: Tensor, other: Tensor) -> float:
        pieces = zip(one.flatten().split(PIECE), other.flatten().split(PIECE), strict=True)
        return sum(float(a.double() @ b.double()) for a, b in pieces)

    norms = math.sqrt(dot(first, first) * dot(second, second))
    cosine = dot(first, second) / norms if norms else 1.0
    if abs(cosine) > PARALLEL:
        return first * (1 - share) + second * share
    angle = math.acos(cosine)
    return (first * math.sin((1 - share) * angle) + second * math.sin(share * angle)) / math.sin(
        angle
    )


def ties(changes: Sequence[Tensor], weights: Sequence[float], density: float) -> Tensor:
    """Trim, elect sign, disjoint mean: the mean of the largest changes that have the sign of most of their sum.

    With equal weights of 1 the algorithm of the paper; weights multiply the trimmed changes as in PEFT. Numbers that
    are equal to the smallest one kept are kept too, so that the result does not depend on their order.
    """
    trimmed = []
    for change in changes:
        kept = int(density * change.numel())
        if kept == 0:
            trimmed.append(torch.zeros_like(change))
            continue
        least = change.abs().flatten().kthvalue(change.numel() - kept + 1).values
        trimmed.append(torch.where(change.abs() >= least, change, 0.0))
    total = torch.stack(trimmed).sum(0)
    elected = torch.where(total >= 0, 1.0, -1.0)
    merged = torch.zeros_like(total)
    count = torch.zeros_like(total)
    for change, weight in zip(trimmed, weights, strict=True):
        agrees = change.sign() == elected
        merged += torch.where(agrees, change * weight, 0.0)
        count += agrees
    return merged / count.clamp(min=1.0)


def merge(
    models: Sequence[ModelFiles],
    out: Path,
    *,
    method: Method = "linear",
    base: ModelFiles | None = None,
    weights: Sequence[float] | None = None,
    density: float = DENSITY,
    dtype: str | None = None,
    verify: bool = True,
    use: Use | None = None,
) -> Exported:
    """Writes the merged model to the new folder `out`, completely or not at all; the same models give the same bytes.

    `models`: full models, or adapters on their base. `weights`: one for each; linear and SLERP divide them by their
    sum, TIES and task arithmetic multiply the changes to `base` by them. `density`: the share of changes that TIES
    keeps. `dtype`: None keeps the first model's. Tokenizer, config and generation settings are the first model's.
    Holds one parameter of each model at a time, in float32. Raises UserError for models that do not fit together.
    """
    weights = list(weights or [1.0] * len(models))
    _refuse_arguments(models, method, base, weights, density)
    every = [*models, *([] if base is None else [base])]
    with ExitStack() as stack:
        opened = [stack.enter_context(open_weights(files)) for files in every]
        config = opened[0][1]
        tokenizer = load_tokenizer(models[0].tokenizer)
        for files, (_, other) in zip(every[1:], opened[1:], strict=True):
            _refuse_other(files, config, other, tokenizer, first=models[0])
        stored = find_tensors(models[0].base or models[0].weights)
        kept = next(iter(stored.values())).dtype if dtype is None else DTYPES[dtype]

        @torch.no_grad()
        def produce(name: str) -> Tensor:
            parts = [piece(name) for piece, _ in opened]
            for files, part in zip(every, parts, strict=True):
                if not bool(part.isfinite().all()):
                    problem = f"{name} has numbers that are not finite: the model is damaged or has diverged"
                    raise UserError(
                        problem,
                        where=str(files.weights),
                        fix="merge another checkpoint or copy of it",
                    )
            below = parts.pop() if base is not None else None
            return refuse_overflow(
                combine(method, parts, below, weights, density).to(kept), name, where=out
            )

        with draft_of(out) as draft:
            write_model_piecewise(produce, config, kept, draft)
            about = Merge(
                method,
                tuple(zip(map(_named, models), weights, strict=True)),
                None if base is None else _named(base),
                density if method == "ties" else None,
            )
            write_other_files(draft, out.name, config, models[0], merge=about)
            proofs = [
                f"{len(models)} models merged by {method}: {len(parameter_shapes(config))} parameters"
            ]
            if verify:
                proofs += check_in_library(
                    draft, *probe_logits(draft, use or Use("cpu"), where=draft)
                )
    return finished_export(out, proofs)


def export_several(
    model: Path,
    out: Path,
    *,
    weights: Sequence[float] | None,
    step: str = "best",
    dtype: str | None = None,
    verify: bool = True,
    use: Use | None = None,
) -> Exported:
    """BASE+ADAPTER+ADAPTER as one model: the base plus the weighted sum of what each adapter changes (1 by default).

    Equal to PEFT's `add_weighted_adapter` with `combination_type="cat"`, merged. Otherwise as `merge`.
    """
    base, *adapters = str(model).split("+")
    files = [find_model(Path(f"{base}+{adapter}"), step) for adapter in adapters]
    return merge(
        files,
        out,
        method="task-arithmetic",
        base=find_model(Path(base)),
        weights=weights,
        dtype=dtype,
        verify=verify,
        use=use,
    )


def is_several(model: Path) -> bool:
    """Whether the path is BASE+ADAPTER+ADAPTER, of folders."""
    parts = str(model).split("+")
    return len(parts) > 2 and not model.exists() and all(Path(part).is_dir() for part in parts)


def _named(files: ModelFiles) -> str:
    """The id on the Hub, or the last part of a path; of a run with its checkpoint."""
    if files.weights.parent.name == "checkpoints":
        return f"{files.weights.parent.parent.name}, {files.weights.name}"
    return public(Base(str(files.weights.resolve()), "").name)


def _refuse_arguments(
    models: Sequence[ModelFiles],
    method: Method,
    base: ModelFiles | None,
    weights: Sequence[float],
    density: float,
) -> None:
    problem = ""
    fix = ""
    where = f"--method {method}"
    if len(models) < 2:
        problem = "a merge needs two models at least"
        fix = "name two or more models"
    elif method == "slerp" and len(models) != 2:
        problem = f"SLERP merges two models, not {len(models)}"
        fix = "use --method linear"
    elif method in NEEDS_BASE and base is None:
        problem = f"{method} needs the model that the others were trained from"
        fix = "add --base MODEL"
    elif method not in NEEDS_BASE and base is not None:
        problem = f"{method} has no base"
        fix = "remove --base, or use --method ties"
    elif len(weights) != len(models):
        where = "--weights"
        problem = f"{len(weights)} weights for {len(models)} models"
        fix = "give one weight for each model"
    elif not all(map(math.isfinite, weights)) or (
        method not in NEEDS_BASE and (min(weights) < 0 or not any(weights))
    ):
        where = "--weights"
        problem = f"not usable as weights: {', '.join(f'{each:g}' for each in weights)}"
        fix = "give numbers of 0 or more, not all 0"
    elif not math.isfinite(sum(map(abs, weights))):
        where = "--weights"
        problem = "the sum of the weights is too large for a number"
        fix = "give smaller numbers, such as 0.7,0.3"
    elif not 0 < density <= 1:
        where = "--density"
        problem = f"not a share: {density:g}"
        fix = "give a number above 0, up to 1"
    if problem:
        raise UserError(problem, where=where, fix=fix, code=2)


def _refuse_other(
    files: ModelFiles,
    config: ModelConfig,
    other: ModelConfig,
    tokenizer: Tokenizer,
    *,
    first: ModelFiles,
) -> None:
    """Raises UserError unless the model has the architecture, the sizes and the tokens of the first one."""
    mine = asdict(config)
    theirs = asdict(other)
    fix = f"merge models that were fine-tuned from the same base as {first.weights}"
    for key in mine:
        if key not in FREE and mine[key] != theirs[key]:
            shown = (f"{str(value)[:60]}" for value in (theirs[key], mine[key]))
            problem = "the models differ in {}: {} instead of {}".format(key, *shown)
            raise UserError(problem, where=str(files.weights), fix=fix)
    own = load_tokenizer(files.tokenizer)
    if own.hash == tokenizer.hash:
        return
    ids = _ids(own)
    expected = _ids(tokenizer)
    if ids != expected:
        token = min(set(ids.items()) ^ set(expected.items()), key=lambda pair: (pair[1], pair[0]))[
            0
        ]
        problem = (
            f"the tokenizers differ: token {token[:40]!r} "
            f"has the id {ids.get(token)} instead of {expected.get(token)}"
        )
        raise UserError(problem, where=str(files.tokenizer), fix=fix)


def _ids(tokenizer: Tokenizer) -> dict[str, int]:
    model = tokenizer.description["model"]
    vocab = model["vocab"]
    ids = (
        dict(vocab)
        if isinstance(vocab, dict)
        else {entry[0]: index for index, entry in enumerate(vocab)}
    )
    return ids | {
        entry["content"]: entry["id"] for entry in tokenizer.description.get("added_tokens") or []
    }
