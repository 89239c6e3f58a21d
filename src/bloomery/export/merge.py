"""Merges of whole models and of adapters, one parameter at a time, computed in float32.

The weighted mean of models: Wortsman et al., "Model soups", arXiv:2203.05482. A base with the changes of its adapters:
task arithmetic, Ilharco et al., arXiv:2212.04089.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

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
from bloomery.infer.held_model import held_model
from bloomery.infer.load import Use
from bloomery.infer.model_folder import ModelFiles
from bloomery.model.adapters.settings import Base
from bloomery.model.io.parameters import dtype_in
from bloomery.model.io.stored import dtype_of
from bloomery.model.io.weights import write_model_piecewise

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


def weighted_mean(parameters: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """One parameter of the merged model from those of the models, all float32 and of one shape."""
    shares = [weight / sum(weights) for weight in weights]
    weighted = [parameter * share for parameter, share in zip(parameters, shares, strict=True)]
    return torch.stack(weighted).sum(0)


def with_changes(base: Tensor, parameters: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """A parameter of the base, plus what each model changed of it, times its weight."""
    changes = [parameter - base for parameter in parameters]
    weighted = [change * weight for change, weight in zip(changes, weights, strict=True)]
    return base + torch.stack(weighted).sum(0)


def merge(
    models: Sequence[ModelFiles],
    out: Path,
    *,
    base: ModelFiles | None = None,
    weights: Sequence[float] | None = None,
    dtype: str | None = None,
    verify: bool = True,
    use: Use | None = None,
) -> Exported:
    """Writes the merged model to the new folder `out`, completely or not at all; the same models give the same bytes.

    `models`: full models, or adapters on their base. The result is their weighted mean; with `base`, the base plus the
    weighted changes. `weights`: one for each. `dtype`: None keeps the first model's. Tokenizer, config and generation
    settings are the first model's. Holds one parameter of each model at a time, in float32. Raises UserError for models
    that do not fit together.
    """
    weights = list(weights or [1.0] * len(models))
    _refuse_arguments(models, weights, are_shares=base is None)
    method = "linear" if base is None else "task-arithmetic"
    sources = [*models, *([] if base is None else [base])]
    # Sources from which no parameter of the merged model has differed so far.
    same = set(range(len(sources))) if all(weights) else set[int]()
    with ExitStack() as stack:
        # All models are open together, and must be of one architecture with one tokenizer.
        opened_models = [stack.enter_context(open_weights(files)) for files in sources]
        config = opened_models[0][1]
        tokenizer = load_tokenizer(models[0].tokenizer)
        for files, (_, other_config) in zip(sources[1:], opened_models[1:], strict=True):
            _refuse_other(files, config, other_config, tokenizer, first=models[0])
        stored_dtype = dtype_of(models[0].base or models[0].weights)
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
            if base is None:
                merged = weighted_mean(parameters, weights)
            else:
                merged = with_changes(parameters[-1], parameters[:-1], weights)
            stored = refuse_overflow(
                merged.to(dtype_in(config, name, target_dtype)), name, where=out
            )
            for number in list(same):
                if not torch.equal(parameters[number].to(stored.dtype), stored):
                    same.discard(number)
            return stored

        with draft_of(out) as draft:
            write_model_piecewise(merged_parameter, config, target_dtype, draft)
            _refuse_unchanged([sources[number] for number in sorted(same)])
            names = [_display_name(files) for files in models]
            about = Merge(
                method,
                models=tuple(zip(names, weights, strict=True)),
                base=None if base is None else _display_name(base),
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
    with ExitStack() as stack:
        adapted_models = [Path(f"{base}+{adapter}") for adapter in adapters]
        return merge(
            [stack.enter_context(held_model(adapted, step)) for adapted in adapted_models],
            out,
            base=stack.enter_context(held_model(Path(base))),
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
    models: Sequence[ModelFiles], weights: Sequence[float], *, are_shares: bool
) -> None:
    """Raises UserError for weights that cannot be used. `are_shares`: of a mean, so that none is negative."""
    problem = fix = ""
    where = "--weights"
    if len(models) < 2:
        where = "bloomery merge"
        problem = "a merge needs two models at least"
        fix = "name two or more models"
    elif len(weights) != len(models):
        problem = f"{len(weights)} weights for {len(models)} models"
        fix = "give one weight for each model"
    elif not all(map(math.isfinite, weights)) or (
        are_shares and (min(weights) < 0 or not any(weights))
    ):
        problem = f"not usable as weights: {', '.join(f'{weight:g}' for weight in weights)}"
        fix = "give numbers of 0 or more, not all 0"
    elif not math.isfinite(sum(map(abs, weights))):
        problem = "the sum of the weights is too large for a number"
        fix = "give smaller numbers, such as 0.7,0.3"
    if problem:
        raise UserError(problem, where=where, fix=fix, code=2)


def _refuse_unchanged(same: Sequence[ModelFiles]) -> None:
    """Raises UserError where the merged model has the numbers of one that it was made of."""
    if same:
        raise UserError(
            f"the merged model has the numbers of {_display_name(same[0])}: the merge changes nothing",
            where=str(same[0].weights),
            fix="name models that differ; use --type float32 if they differ by less than the rounding of the type",
        )


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
