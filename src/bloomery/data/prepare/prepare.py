"""Prepare a dataset: text to shards of tokens. A killed `prepare` resumes, and its result is bitwise identical."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.errors import UserError
from bloomery.core.files import open_regular, try_lock
from bloomery.core.units import MIB
from bloomery.data.packing import count_sequences, pairs_need_packing
from bloomery.data.pictures.encoder import vision_source
from bloomery.data.prepare.kinds import max_prompt_tokens, refuse_no_room, train_on
from bloomery.data.prepare.pipeline import Limits, Preparation, Report, stale, streams
from bloomery.data.prepare.split import AUTO
from bloomery.data.shards import (
    FORMAT,
    MANIFEST,
    Manifest,
    check_record,
    check_shards,
    open_split,
    read_manifest,
)
from bloomery.data.sources import builtin, shapes
from bloomery.data.sources.documents import MADE_HERE
from bloomery.data.sources.plugin_formats import format_plugin, is_row_format
from bloomery.data.tokenizer.templates import BUILTIN, builtin_template
from bloomery.data.tokenizer.tokenizer import tokenizer_spec
from bloomery.hub import data_place
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.schema import Chat, Data, Recipe

DEFAULT = Limits()
_NOT_TOKENS = {  # keys that change no token
    "sequence_length",
    "packing",
    "document_masking",
    "chat",
    "prepared",
    "num_proc",
    "pin_memory",
    "prefetch",
}


def identity(loaded: LoadedRecipe) -> str:
    """sha256 of the keys that decide the tokens: sources, split and tokenizer, but not packing."""
    recipe = loaded.recipe
    data = recipe.data.model_dump(mode="json", exclude=_NOT_TOKENS)
    if data["validation"] == AUTO:  # resolved from the files, which are compared and may be gone
        data["validation"] = "1%"
    for section in (data, *data["sources"]):  # absent without a folder, as before there was the key
        if section["pictures"] is None:
            del section["pictures"]
    parts: dict[str, Any] = {"format": FORMAT, "data": data, "tokenizer": tokenizer_spec(recipe)}
    if recipe.data.builtin is not None and recipe.data.builtin not in MADE_HERE:
        parts["python"] = builtin.identity()
    if (longest_prompt := max_prompt_tokens(recipe)) is not None:
        parts["max_prompt_tokens"] = longest_prompt
    formats = {recipe.data.format, *(source.format for source in recipe.data.sources)}
    # Another version of a package may make other rows.
    if plugins := [plugin.origin for plugin in map(format_plugin, sorted(formats)) if plugin]:
        parts["plugins"] = plugins
    reads_text = recipe.objective.spec.reads_text
    if reads_text:  # can the keys of data.chat change the tokens?
        has_examples = recipe.data.builtin in ("stdlib-chat", "stdlib-pairs", shapes.NAME)
        formatted = has_examples or recipe.data.chat != Chat() or any(map(is_row_format, formats))
    else:
        formatted = recipe.data.builtin != "stdlib-code" and not formats <= {
            "text",
            "code",
            "tokens",
        }
    if formatted:
        template = recipe.data.chat.template  # its text; None for the tokenizer's own
        if template in BUILTIN:
            template = builtin_template(template)
        elif template is not None and os.path.isfile(template):  # noqa: PTH113 (Path's raises where the text of a template is longer than a file name may be)
            template = Path(template).read_text(encoding="utf-8", errors="replace")
        parts["examples"] = {
            "required_format": recipe.objective.spec.data_kind,
            "template": template,
            "train_on": train_on(recipe),
            "verbatim": reads_text,
        }
        if (source := vision_source(recipe)) is not None:
            parts["examples"]["vision"] = source.digest
        if recipe.data.chat.template_kwargs:
            parts["examples"]["template_kwargs"] = recipe.data.chat.template_kwargs
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def prepared_folder(loaded: LoadedRecipe, root: Path) -> Path:
    """data.prepared, else `prepared/<recipe>-<hash8>` below `root`."""
    folder = loaded.recipe.data.prepared
    return Path(folder) if folder else root / "prepared" / f"{loaded.name}-{identity(loaded)[:8]}"


def prepare(
    loaded: LoadedRecipe,
    folder: Path,
    *,
    report: Report = lambda *_: None,
    limits: Limits = DEFAULT,
) -> Manifest:
    """Write the recipe's dataset to `folder` as tokens. A finished folder is checked and kept.

    Raises UserError for a dataset that cannot be read, a folder of something else, a second `prepare` in it, a full
    disk.
    """
    refuse_layout(loaded.recipe)
    manifest = finished_manifest(loaded, folder)
    if manifest is None:
        with preparation(loaded, folder, report=report, limits=limits) as work:
            manifest = finished_manifest(loaded, folder) or work.run()
            check_sequences(manifest, loaded.recipe.data, folder)
    else:
        check_shards(folder, manifest, partial(report, "checksums"))
    return manifest


@contextmanager
def preparation(
    loaded: LoadedRecipe,
    folder: Path,
    *,
    report: Report = lambda *_: None,
    limits: Limits = DEFAULT,
) -> Iterator[Preparation]:
    """The folder, created and locked, with its Preparation. Raises UserError as `prepare` does."""
    if not (folder / MANIFEST).is_file():
        streams(loaded.recipe)  # raises for a missing path before the folder exists
    with locked(folder):
        yield Preparation(loaded.recipe, loaded.name, identity(loaded), folder, report, limits)


def finished_manifest(loaded: LoadedRecipe, folder: Path) -> Manifest | None:
    """The manifest when `folder` is ready for this recipe; None when it is unfinished. Raises UserError when it belongs
    to another recipe, is stale, or has less than one sequence.

    Sources that no longer exist are no error: you can copy tokens without their text.
    """
    if not (folder / MANIFEST).is_file():
        return None
    manifest = read_manifest(folder)
    if manifest.identity != identity(loaded):
        problem = f"the folder was prepared for other data or tokenizer settings (recipe {manifest.recipe})"
        raise UserError(
            problem,
            where=str(folder),
            fix="set data.prepared to another folder, or delete this one",
        )
    if manifest.padding is None and (
        not manifest.train.bytes or any("tokens" in kind for kind in manifest.formats)
    ):
        problem = "an earlier version prepared these token ids with their padding"
        raise UserError(
            problem, where=str(folder), fix=f"delete it and prepare again: rm -r {folder}"
        )
    data = loaded.recipe.data
    paths = [data.path] if data.path else [source.path for source in data.sources]
    if not paths or any(data_place(path).exists() for path in paths):
        if manifest.snapshot is not None:
            check_record(folder, manifest.snapshot)
        changed_file = stale(folder, streams(loaded.recipe))
        if changed_file is not None:
            problem = f"the dataset changed after it was prepared: {changed_file}"
            raise UserError(
                problem, where=str(folder), fix=f"delete it and prepare again: rm -r {folder}"
            )
    check_sequences(manifest, data, folder)
    return manifest


_MOST_READ = 256 * MIB  # of a file, for a warning


def changed_source(recipe: Recipe, folder: Path) -> str | None:
    """The first source file that differs from what `folder` was prepared from, as far as small files show; None without
    any, and where the sources are gone.
    """
    try:
        return stale(folder, streams(recipe), most_read=_MOST_READ)
    except UserError:
        return None


def refuse_layout(recipe: Recipe) -> None:
    """Raises UserError for pairs without document masking, and for completions as long as a sequence, before any file
    is read.
    """
    refuse_no_room(recipe)
    if recipe.data.layout == "fixed" and recipe.objective.spec.data_kind in ("pairs", "kto"):
        raise pairs_need_packing()


def check_sequences(manifest: Manifest, data: Data, folder: Path) -> None:
    """Raises UserError when no source fills one sequence, when all labels of conversations and pairs are masked, and
    without a prompt to train on.
    """
    if manifest.kind == "prompts":
        if not manifest.train.documents:
            problem = "there are no prompts to train on: the validation set has all of them"
            raise UserError(problem, where="data.validation", fix="add prompts, or set it to 0")
        return
    parts = manifest.train.parts
    length = data.sequence_length
    if manifest.kind == "text":
        longest = max((part.tokens for part in parts), default=0)
        if data.layout == "padded" or longest > length:
            return
        problem = f"the dataset has {manifest.train.tokens:,} tokens, less than one sequence of {length:,}"
        raise UserError(
            problem, where="data.sequence_length", fix=f"set it below {longest:,}, or add text"
        )
    sequence_counts = count_sequences(folder, manifest, sequence_length=length, layout=data.layout)
    # Where conversations or pairs are part of the dataset, plain text does not replace them.
    structured = any(part.documents for part in parts if not part.plain)
    if any(
        count
        for count, part in zip(sequence_counts.counts, parts, strict=True)
        if not (structured and part.plain)
    ):
        return
    if not any(source.dropped_units for source in sequence_counts.packed):
        raise UserError(
            "all labels are masked: no row has an assistant turn to train on",
            where="data.chat.train_on",
            fix="set data.chat.train_on=all, or print the loss mask: bloomery prepare RECIPE --preview 3",
        )
    if manifest.has_pictures:
        lengths = np.diff(open_split(folder, "train", manifest).bounds)
        raise UserError(
            f"no conversation with pictures fits into {length:,} tokens, and none is cut: the shortest has"
            f" {int(lengths.min()):,}",
            where="data.sequence_length",
            fix=f"set data.sequence_length={int(lengths.max())}",
        )
    raise UserError(
        f"no loss tokens: the first {length:,} labels of every row are masked",
        where="data.sequence_length",
        fix="raise it, or print the loss mask: bloomery prepare RECIPE --preview 3",
    )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder, for one `prepare`: the lock ends with its process. A full disk or a folder without write
    permission is a UserError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_regular(folder / ".lock", os.O_WRONLY | os.O_CREAT), "w") as file:
            if not try_lock(file.fileno()):
                problem = "another process is preparing this folder"
                fix = "wait until it ends, then run again"
                raise UserError(problem, where=str(folder), fix=fix)
            yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some space and run the same command again; it resumes"
            raise UserError("the disk is full", where=str(folder), fix=fix) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            problem = f"cannot write: {error.strerror}"
            where = str(error.filename or folder)
            fix = "set data.prepared to a folder with write permission"
            raise UserError(problem, where=where, fix=fix) from error
        raise
