"""Conversion of a model from any format into another, and changes on the way: context, chat template, new tokens."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.data.chat.render import chat_format
from bloomery.data.examples import Message
from bloomery.data.tokenizer.roles import roles
from bloomery.data.tokenizer.sentencepiece import MADE_BY
from bloomery.data.tokenizer.templates import BUILTIN, KEY, find_template
from bloomery.data.tokenizer.tokenizer import JsonBackend, Tokenizer, load_tokenizer
from bloomery.export.gguf import export_gguf
from bloomery.export.gguf_import import import_gguf
from bloomery.export.layouts import (
    DTYPES,
    TOLERANCES,
    Exported,
    check_in_library,
    draft_of,
    export,
    export_merged,
    finished_export,
    load_in_float32,
    logits_proof,
    open_model,
    open_weights,
    probe_logits,
    probe_tokens,
    write_other_files,
)
from bloomery.facts.config import ModelConfig, checked_config
from bloomery.facts.pictures import vision_of
from bloomery.infer.held_model import held_model
from bloomery.infer.load import Use
from bloomery.infer.model_folder import ModelFiles, find_model
from bloomery.model.configs import grown, stated_config
from bloomery.model.io.parameters import dtype_in
from bloomery.model.io.stored import dtype_of, read_object
from bloomery.model.io.weights import VOCABULARY, fill_new_rows, write_json, write_model_piecewise

LENGTH = "model_max_length"  # in tokenizer_config.json


@dataclass(frozen=True)
class Changes:
    """`context`: its positions. `template`: a chat template's file or name. `tokens`: new special tokens.

    `checkpointing`: programs that read config.json, such as transformers, recompute activations in training.
    """

    context: int | None = None
    template: str | None = None
    tokens: tuple[str, ...] = ()
    checkpointing: bool = False


def convert(
    source: Path,
    out: Path,
    *,
    gguf: bool,
    dtype: str | None = None,
    changes: Changes | None = None,
    step: str = "best",
    verify: bool = True,
    use: Use | None = None,
) -> Exported:
    """Writes `source` (a GGUF file, a model or a run) as the new folder or GGUF file `out`.

    `dtype`: a word of DTYPES, or of GGUF_TYPES and K_TYPES; None keeps the weights' own, of GGUF f16. An
    adapter is merged into its base. Raises UserError.
    """
    changes = changes or Changes()
    is_changed = changes != Changes()
    folder_dtype = None if gguf else dtype  # of a folder that this conversion writes
    proofs: list[str] = []
    with ExitStack() as stack:
        # A GGUF file becomes a folder first: the result, or an intermediate one.
        if source.is_file():
            is_result = not is_changed and not gguf
            folder = out if is_result else stack.enter_context(_intermediate_folder(out))
            imported = import_gguf(source, folder, dtype=folder_dtype)
            if is_result:
                return imported
            proofs += [f"read: {proof}" for proof in imported.proofs]
            files = find_model(folder)
        else:
            files = stack.enter_context(held_model(source, step))

        # Changes are made in a folder, too.
        if is_changed:
            folder = stack.enter_context(_intermediate_folder(out)) if gguf else out
            done = change(files, folder, changes, dtype=folder_dtype, verify=verify, use=use)
            if not gguf:
                return replace(done, proofs=(*proofs, *done.proofs))
            proofs += done.proofs
            if vision_of(stated_config(files.base or files.weights)) is not None:
                proofs.append(
                    "differs    no mmproj file: changes are made in the language model alone; "
                    "without them both files are written"
                )
            files = find_model(folder)

        if gguf:
            done = export_gguf(files, out, kind=dtype or "f16", verify=verify, use=use)
        elif files.base is not None:
            done = export_merged(files, out, dtype=dtype, verify=verify, use=use)
        else:
            done = export(files.weights, out, dtype=dtype, verify=verify, use=use)
        return replace(done, proofs=(*proofs, *done.proofs))


@contextmanager
def _intermediate_folder(out: Path) -> Iterator[Path]:
    """A new folder on the disk of `out`; it is deleted at the end."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(
            "the output exists; nothing was overwritten", where=str(out), fix="choose another name"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=out.parent, prefix=".tmp-convert-", suffix=f"-{os.getpid()}"
    ) as folder:
        yield Path(folder) / "model"


def change(
    files: ModelFiles,
    out: Path,
    changes: Changes,
    *,
    dtype: str | None = None,
    verify: bool = True,
    use: Use | None = None,
) -> Exported:
    """Writes the model with its changes to the new folder `out`, completely or not at all, one parameter at a time.

    Rows of new tokens are the mean of the others, as in training. Verification compares the logits of old tokens with
    the source's, and opens the folder in transformers where that is installed. Raises UserError.
    """
    old_tokenizer = load_tokenizer(files.tokenizer)
    tokenizer = _changed_tokenizer(old_tokenizer, changes)
    new_ids = range(old_tokenizer.vocab_size, tokenizer.vocab_size)
    stored_dtype = dtype_of(files.base or files.weights)
    target_dtype = stored_dtype if dtype is None else DTYPES[dtype]
    is_full_model = files.base is None
    weights = open_model(files.weights, target_dtype) if is_full_model else open_weights(files)

    proofs = []
    with weights as (read_parameter, config), draft_of(out) as draft:
        changed_config = _changed_config(config, changes, tokenizer.vocab_size)

        def changed_parameter(name: str) -> Tensor:
            parameter = read_parameter(name).to(dtype_in(config, name, target_dtype))
            if name not in VOCABULARY or not new_ids:
                return parameter
            rows = changed_config.vocab_size
            larger = torch.empty(rows, *parameter.shape[1:], dtype=target_dtype)
            larger[: len(parameter)] = parameter
            fill_new_rows(larger, len(parameter), new_ids)
            return larger

        write_model_piecewise(changed_parameter, changed_config, target_dtype, draft)
        write_other_files(draft, out.name, changed_config, files, tokenizer=tokenizer)
        if changes.checkpointing:
            path = draft / "config.json"
            raw_config = read_object(path, fix="report this bug")
            write_json(path, raw_config | {"gradient_checkpointing": True})

        # What was changed is said, then compared.
        if changes.context is not None:
            old_context = config.max_positions
            new_context = changed_config.max_positions
            proofs.append(f"context {old_context:,} -> {new_context:,} tokens")
        if new_ids:
            proofs.append(
                f"{len(new_ids)} new tokens from id {new_ids.start:,}: embeddings are the mean of "
                "the others"
            )
        if changes.template is not None:
            with chat_format(tokenizer, None) as form:  # refuses one that does not render
                greeting = form.encode([Message("user", "Hello!")])
            proofs.append(f"the chat template makes {len(greeting)} tokens of a greeting")
        if verify:
            proofs += _verified(files, config, draft, target_dtype, use or Use("cpu"))
    return finished_export(out, proofs)


def _changed_tokenizer(tokenizer: Tokenizer, changes: Changes) -> Tokenizer:
    """As a tokenizer.json, which new tokens need."""
    if "" in changes.tokens:
        raise UserError(
            "a token without a text", where="--add-tokens", fix="write its text", code=2
        )
    settings = {key: value for key, value in tokenizer.config.items() if key != MADE_BY}
    if changes.context is not None:
        settings[LENGTH] = changes.context
    if changes.template is not None:
        try:
            settings[KEY] = find_template(changes.template, {}).text
        except UserError as error:
            fix = f"name a file, or one of {', '.join(BUILTIN)}"
            raise UserError(error.problem, where="--template", fix=fix, code=2) from error
    control_tokens = {name for name in roles(tokenizer.description, settings).values() if name}
    backend = JsonBackend(tokenizer.description, "tokenizer.json", control_tokens)
    return Tokenizer(backend, settings).with_tokens(changes.tokens)


def _changed_config(config: ModelConfig, changes: Changes, vocab_size: int) -> ModelConfig:
    changed = grown(config, vocab_size)
    if changes.context is None or changes.context == config.max_positions:
        return changed
    if config.positions != "rotary" or config.transformers_backend is not None:
        problem = f"the context of this model is fixed: {config.max_positions:,} tokens"
        raise UserError(problem, where="--max-length", fix="leave out --max-length", code=2)
    return checked_config(replace(changed, max_positions=changes.context), where="--max-length")


@torch.no_grad()
def _verified(
    files: ModelFiles, config: ModelConfig, draft: Path, dtype: torch.dtype, use: Use
) -> list[str]:
    """Old tokens have their old logits; then transformers opens the folder."""
    tokens = probe_tokens(config).to(use.device)
    expected = load_in_float32(files.weights, use, base=files.base)(tokens).head.cpu()
    logits = load_in_float32(draft, use)(tokens).head.cpu()
    # Rows beyond the tokenizer are spare: new tokens may have taken them.
    old_tokens = min(config.vocab_size, load_tokenizer(files.tokenizer).vocab_size)
    error = float((logits[..., :old_tokens] - expected[..., :old_tokens]).abs().max())
    scale = max(1.0, float(expected.abs().max()))
    if not error <= TOLERANCES[dtype] * scale:
        raise UserError(
            f"the logits of the converted model differ by {error:.2g}",
            where=str(draft),
            fix="use --dtype float32, or --no-verify; report this bug",
        )
    return [
        logits_proof(dtype, error, scale, "the source"),
        *check_in_library(draft, *probe_logits(draft, use, where=draft)),
    ]
