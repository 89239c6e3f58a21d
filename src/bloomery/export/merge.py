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
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import parameter_shapes
from bloomery.infer.load import Use
from bloomery.infer.model_folder import ModelFiles, find_model
from bloomery.model.adapters.settings import Base
from bloomery.model.io.stored import find_tensors
from bloomery.model.io.weights import write_model_piecewise

Method = Literal["linear", "slerp", "ties", "task-arithmetic"]
METHODS: tuple[Method, ...] = get_args(Method)
NEEDS_BASE = ("ties", "task-arithmetic")
DENSITY = 0.2  # of each parameter's changes that TIES keeps (section 4 of the paper)
PARALLEL_COSINE = (
    0.9995  # above it SLERP is the straight line: the sine of the angle would divide noise
)
FLOAT64_NUMBERS = 2**20  # of a dot product at a time
# Facts of a config that do not change what a layer computes: the first model's are kept.
FREE_FACTS = (
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
        shares = [weight / sum(weights) for weight in weights]
        weighted = [part * share for part, share in zip(parts, shares, strict=True)]
        return torch.stack(weighted).sum(0)
    assert base is not None
    changes = [part - base for part in parts]
    if method == "ties":
        return base + ties(changes, weights, density)
    weighted = [change * weight for change, weight in zip(changes, weights, strict=True)]
    return base + torch.stack(weighted).sum(0)


def slerp(first: Tensor, second: Tensor, share: float) -> Tensor:
    """The point at `share` of the arc from `first` to `second`, taken as vectors; the line where they are parallel."""

    def dot(a: Tensor, b: Tensor) -> float:
        a_parts = a.flatten().split(FLOAT64_NUMBERS)
        b_parts = b.flatten().split(FLOAT64_NUMBERS)
        parts = zip(a_parts, b_parts, strict=True)
        return sum(float(a_part.double() @ b_part.double()) for a_part, b_part in parts)

    norms = math.sqrt(dot(first, first) * dot(second, second))
    cosine = dot(first, second) / norms if norms else 1.0
    if abs(cosine) > PARALLEL_COSINE:
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
    # Trim: small changes become 0.
    trimmed_changes = []
    for change in changes:
        num_kept = int(density * change.numel())
        if num_kept == 0:
            trimmed_changes.append(torch.zeros_like(change))
            continue
        smallest_kept = change.abs().flatten().kthvalue(change.numel() - num_kept + 1).values
        trimmed_changes.append(torch.where(change.abs() >= smallest_kept, change, 0.0))

    # Elect: the sign of the sum. Mean: of the changes that have it.
    total = torch.stack(trimmed_changes).sum(0)
    elected_sign = torch.where(total >= 0, 1.0, -1.0)
    merged = torch.zeros_like(total)
    count = torch.zeros_like(total)
    for change, weight in zip(trimmed_changes, weights, strict=True):
        agrees = change.sign() == elected_sign
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
    sources = [*models, *([] if base is None else [base])]
    with ExitStack() as stack:
        # All models are open together, and must be of one architecture with one tokenizer.
        opened_models = [stack.enter_context(open_weights(files)) for files in sources]
        config = opened_models[0][1]
        tokenizer = load_tokenizer(models[0].tokenizer)
        for files, (_, other_config) in zip(sources[1:], opened_models[1:], strict=True):
            _refuse_other(files, config, other_config, tokenizer, first=models[0])
        tensors = find_tensors(models[0].base or models[0].weights)
        stored_dtype = next(iter(tensors.values())).dtype
        target_dtype = stored_dtype if dtype is None else DTYPES[dtype]

        @torch.no_grad()
        def merged_parameter(name: str) -> Tensor:
            parameters = [read_parameter(name) for read_parameter, _ in opened_models]
            for files, parameter in zip(sources, parameters, strict=True):
                if not bool(parameter.isfinite().all()):
                    raise UserError(
                        f"{name} has numbers that are not finite: the model is damaged or has "
                        "diverged",
                        where=str(files.weights),
                        fix="merge another checkpoint or copy of it",
                    )
            base_parameter = parameters.pop() if base is not None else None
            merged = combine(method, parameters, base_parameter, weights, density)
            return refuse_overflow(merged.to(target_dtype), name, where=out)

        with draft_of(out) as draft:
            write_model_piecewise(merged_parameter, config, target_dtype, draft)
            names = [_display_name(files) for files in models]
            about = Merge(
                method,
                models=tuple(zip(names, weights, strict=True)),
                base=None if base is None else _display_name(base),
                density=density if method == "ties" else None,
            )
            write_other_files(draft, out.name, config, models[0], merge=about)
            num_parameters = len(parameter_shapes(config))
            proofs = [f"{len(models)} models merged by {method}: {num_parameters} parameters"]
            if verify:
                logits, config = probe_logits(draft, use or Use("cpu"), where=draft)
                proofs += check_in_library(draft, logits, config)
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


def _display_name(files: ModelFiles) -> str:
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
    """Raises UserError for arguments that contradict each other, or that the method does not take."""
    are_finite = all(map(math.isfinite, weights))
    are_shares = method in NEEDS_BASE or (min(weights, default=0) >= 0 and any(weights))
    problem = fix = ""
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
    elif not are_finite or not are_shares:
        where = "--weights"
        problem = f"not usable as weights: {', '.join(f'{weight:g}' for weight in weights)}"
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
    other_config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    first: ModelFiles,
) -> None:
    """Raises UserError unless the model has the architecture, the sizes and the tokens of the first one."""
    fix = f"merge models that were fine-tuned from the same base as {first.weights}"
    first_facts = asdict(config)
    facts = asdict(other_config)
    for key, first_value in first_facts.items():
        if key not in FREE_FACTS and facts[key] != first_value:
            raise UserError(
                f"the models differ in {key}: {str(facts[key])[:60]} instead of "
                f"{str(first_value)[:60]}",
                where=str(files.weights),
                fix=fix,
            )

    other_tokenizer = load_tokenizer(files.tokenizer)
    if other_tokenizer.hash == tokenizer.hash:
        return
    first_ids = _token_ids(tokenizer)
    ids = _token_ids(other_tokenizer)
    if ids != first_ids:
        differing_entries = set(ids.items()) ^ set(first_ids.items())
        token = min(differing_entries, key=lambda entry: (entry[1], entry[0]))[0]
        raise UserError(
            f"the tokenizers differ: token {token[:40]!r} has the id {ids.get(token)} instead of "
            f"{first_ids.get(token)}",
            where=str(files.tokenizer),
            fix=fix,
        )


def _token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The id of each token. BPE states them; Unigram states a list of tokens with their scores."""
    vocabulary = tokenizer.description["model"]["vocab"]
    if isinstance(vocabulary, dict):
        ids = dict(vocabulary)
    else:
        ids = {token: index for index, (token, *_) in enumerate(vocabulary)}
    for added_token in tokenizer.description.get("added_tokens") or []:
        ids[added_token["content"]] = added_token["id"]
    return ids
