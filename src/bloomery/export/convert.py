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
from bloomery.data.tokenizer.sentencepiece import MADE_BY
from bloomery.data.tokenizer.templates import BUILTIN, KEY, find_template
from bloomery.data.tokenizer.tokenizer import JsonBackend, Tokenizer, load_tokenizer, roles
from bloomery.export.gguf import export_gguf
from bloomery.export.gguf_import import import_gguf
from bloomery.export.layouts import (
    DTYPES,
    TOLERANCES,
    Exported,
    compared,
    draft_of,
    export,
    export_merged,
    exported,
    full_pieces,
    load_whole,
    opens_elsewhere,
    pieces_of,
    probe_tokens,
    probed,
    write_rest,
)
from bloomery.model.config import ModelConfig, checked
from bloomery.model.io.stored import find_tensors, read_object
from bloomery.model.io.weights import VOCABULARY, fill_new_rows, write_json, write_model_piecewise
from bloomery.model.presets import grown
from bloomery.train.model_folder import ModelFiles, find_model
from bloomery.train.use import Use

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
    stored = None if gguf else dtype
    foreign = source.is_file()
    with ExitStack() as stack:
        changed = changes != Changes()
        files = None if foreign else find_model(source, step)
        proofs = list[str]()
        if foreign:
            last = not changed and not gguf
            folder = out if last else stack.enter_context(_between(out))
            read = import_gguf(source, folder, dtype=stored)
            if last:
                return read
            proofs += [f"read: {each}" for each in read.proofs]
            files = find_model(folder)
        assert files is not None
        if changed:
            folder = stack.enter_context(_between(out)) if gguf else out
            done = change(files, folder, changes, dtype=stored, verify=verify, use=use)
            if not gguf:
                return replace(done, proofs=(*proofs, *done.proofs))
            proofs += done.proofs
            files = find_model(folder)
        if gguf:
            done = export_gguf(files, out, kind=dtype or "f16", verify=verify, use=use)
        elif files.base is not None:
            done = export_merged(files, out, dtype=dtype, verify=verify, use=use)
        else:
            done = export(files.weights, out, dtype=dtype, verify=verify, use=use)
        return replace(done, proofs=(*proofs, *done.proofs))


@contextmanager
def _between(out: Path) -> Iterator[Path]:
    """A new folder on the disk of `out` for an intermediate model; it is deleted at the end."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(
            "the output exists; nothing was overwritten", where=str(out), fix="choose another name"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=out.parent, prefix=".tmp-convert-", suffix=f"-{os.getpid()}"
    ) as whole:
        yield Path(whole) / "model"


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
    before = load_tokenizer(files.tokenizer)
    after = _tokenizer(before, changes)
    kept = (
        DTYPES[dtype]
        if dtype is not None
        else next(iter(find_tensors(files.base or files.weights).values())).dtype
    )
    proofs = []
    pieces = full_pieces(files.weights, kept) if files.base is None else pieces_of(files)
    with pieces as (piece, config), draft_of(out) as draft:
        changed = _config(config, changes, after.vocab_size)
        new = range(before.vocab_size, after.vocab_size)

        def produce(name: str) -> Tensor:
            whole = piece(name).to(kept)
            if name not in VOCABULARY or not new:
                return whole
            larger = torch.empty(changed.vocab_size, *whole.shape[1:], dtype=kept)
            larger[: len(whole)] = whole
            fill_new_rows(larger, len(whole), new)
            return larger

        write_model_piecewise(produce, changed, kept, draft)
        write_rest(draft, out.name, changed, files, tokenizer=after)
        if changes.checkpointing:
            path = draft / "config.json"
            write_json(
                path, read_object(path, fix="report this bug") | {"gradient_checkpointing": True}
            )
        if changes.context is not None:
            proofs.append(f"context {config.max_positions:,} -> {changed.max_positions:,} tokens")
        if new:
            proofs.append(
                f"{len(new)} new tokens from id {new.start:,}: embeddings are the mean of the others"
            )
        if changes.template is not None:
            with chat_format(after, None) as form:  # refuses one that does not render
                size = len(form.encode([Message("user", "Hello!")]))
            proofs.append(f"the chat template makes {size} tokens of a greeting")
        if verify:
            proofs += _verified(files, config, draft, kept, use or Use("cpu"))
    return exported(out, proofs)


def _tokenizer(before: Tokenizer, changes: Changes) -> Tokenizer:
    """As a tokenizer.json, which new tokens need."""
    if "" in changes.tokens:
        raise UserError(
            "a token without a text", where="--add-tokens", fix="write its text", code=2
        )
    settings = {key: each for key, each in before.config.items() if key != MADE_BY}
    if changes.context is not None:
        settings[LENGTH] = changes.context
    if changes.template is not None:
        try:
            settings[KEY] = find_template(changes.template, {}).text
        except UserError as error:
            fix = f"name a file, or one of {', '.join(BUILTIN)}"
            raise UserError(error.problem, where="--template", fix=fix, code=2) from error
    control = {name for name in roles(before.description, settings).values() if name}
    return Tokenizer(
        JsonBackend(before.description, "tokenizer.json", control), settings
    ).with_tokens(changes.tokens)


def _config(config: ModelConfig, changes: Changes, tokens: int) -> ModelConfig:
    changed = grown(config, tokens)
    if changes.context is None or changes.context == config.max_positions:
        return changed
    if config.positions != "rotary" or config.transformers_backend is not None:
        problem = f"the context of this model is fixed: {config.max_positions:,} tokens"
        raise UserError(problem, where="--max-length", fix="leave out --max-length", code=2)
    return checked(replace(changed, max_positions=changes.context), where="--max-length")


@torch.no_grad()
def _verified(
    files: ModelFiles, config: ModelConfig, draft: Path, kept: torch.dtype, use: Use
) -> list[str]:
    """Old tokens have their old logits; then transformers opens the folder."""
    tokens = probe_tokens(config).to(use.device)
    expected = load_whole(files.weights, use, base=files.base)(tokens).head.cpu()
    found = load_whole(draft, use)(tokens).head.cpu()[..., : config.vocab_size]
    # rows beyond are spare: new tokens may take them
    old = load_tokenizer(files.tokenizer).vocab_size
    error = float((found - expected)[..., :old].abs().max())
    if not error <= TOLERANCES[kept] * max(1.0, float(expected.abs().max())):
        problem = f"the logits of the converted model differ by {error:.2g}"
        raise UserError(
            problem, where=str(draft), fix="use --dtype float32, or --no-verify; report this bug"
        )
    return [
        compared(kept, error, max(1.0, float(expected.abs().max())), "the source"),
        *opens_elsewhere(draft, *probed(draft, use, where=draft)),
    ]
