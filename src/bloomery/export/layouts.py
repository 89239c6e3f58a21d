"""Exports: a full model for transformers and vLLM, an adapter for PEFT, or an adapter merged into its base model"""

import copy
import glob
import importlib
import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.core.files import abandoned, flush_to_disk, remove
from bloomery.core.progress import progress
from bloomery.core.units import format_bytes
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.export import DTYPES as WORDS
from bloomery.export.card import Merge, write_card
from bloomery.model.adapters.lora import LoraLinear, adapt_as, is_adapter
from bloomery.model.adapters.peft_files import read_adaptation, read_trained
from bloomery.model.adapters.peft_methods import has_method, merge_methods
from bloomery.model.adapters.settings import (
    CONFIG,
    TENSORS,
    base_of,
    is_adapter_folder,
    read_settings,
    refuse_other_base,
)
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_shapes
from bloomery.model.decoder import Decoder
from bloomery.model.families import config_to_hf, text_part
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import find_tensors, read_object
from bloomery.model.io.weights import (
    StoredModel,
    load_decoder,
    write_json,
    write_model,
    write_model_piecewise,
)
from bloomery.model.presets import read_config, stated_config
from bloomery.train.model_folder import ModelFiles
from bloomery.train.use import Use

Piece = Callable[[str], Tensor]  # a parameter by our name
TOLERANCE = 1e-3  # of the largest logit; weights may be 16 bits wide, and kernels differ
PROBE_TOKENS = 16
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in WORDS}
# Of the largest logit: float32 only changes the order of operations, 16-bit formats round every weight.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Exported:
    """`proofs`: one sentence per check that passed; empty without verification. `next`: a command for the result."""

    folder: Path
    bytes: int
    proofs: tuple[str, ...]
    next: str = ""


def export(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    verify: bool = True,
    use: Use | None = None,
) -> Exported:
    """Writes the model in `source` to the new folder `out`, with tokenizer, generation settings and a model card.

    `dtype`: None copies the weights as they are; else each is rounded once, one at a time. `out` is written completely
    or not at all. Verification reads it back, compares every tensor with the source, or the logits where weights were
    rounded, and loads it in transformers where that is installed. Raises UserError when `out` exists or a check fails.
    """
    if is_adapter_folder(source):
        raise UserError(
            "cannot export an adapter as a full model",
            where=str(source),
            code=2,
            fix="use --to merged for a full model, or --to adapter for the adapter",
        )
    files = ModelFiles(source, None, source)
    config = read_config(source)
    proofs = list[str]()
    tensors = find_tensors(source)
    index = source / "model.safetensors.index.json"
    # Of a multimodal model the language model is written under the names that it has alone.
    whole = stated_config(source)
    text_alone = text_part(whole) is not whole
    first = next(iter(tensors.values())).dtype
    target = first if dtype is None else DTYPES[dtype]
    copied = not text_alone and (
        dtype is None or all(stored.dtype == target for stored in tensors.values())
    )
    with draft_of(out) as draft:
        if copied:
            for path in {stored.path for stored in tensors.values()} | (
                {index} if index.is_file() else set()
            ):
                shutil.copyfile(path, draft / path.name)
            kept = str(first).removeprefix("torch.")
            write_json(
                draft / "config.json", config_to_hf(config) | {"dtype": kept, "torch_dtype": kept}
            )
        else:
            with full_pieces(source, target) as (piece, config):
                write_model_piecewise(piece, config, target, draft)
        write_rest(draft, out.name, config, files)
        if verify and copied:
            copies = find_tensors(draft)
            with TensorReader() as reader:
                for name, stored in tensors.items():
                    rows = stored.shape[0] if stored.shape else 1
                    one, other = (
                        reader.read(each, 0, rows).view(torch.uint8)
                        for each in (stored, copies[name])
                    )
                    if not torch.equal(one, other):
                        problem = f"{name} changed during the copy"
                        raise UserError(problem, where=str(draft), fix="check the disk")
            proofs.append(f"read back: all {len(tensors)} tensors are identical")
            proofs += opens_elsewhere(draft, *probed(draft, use or Use("cpu"), where=source))
        elif verify:
            proofs += _compared(draft, files, target, use or Use("cpu"))
    return exported(out, proofs)


def export_adapter(
    model_files: ModelFiles, out: Path, *, verify: bool = True, use: Use | None = None
) -> Exported:
    """Copies the adapter to the new folder `out`, with tokenizer and card; the folder is written completely or not at
    all.

    Verification compares the bytes, runs the copy on its base model, and loads it in PEFT where that is installed.
    Raises UserError.
    """
    if model_files.base is None:
        problem = "cannot export an adapter: this is a full model"
        fix = "use --to hf"
        raise UserError(problem, where=str(model_files.weights), fix=fix, code=2)
    base = base_of(model_files.base).name
    proofs = []
    with draft_of(out) as draft:
        write_json(
            draft / CONFIG, read_settings(model_files.weights) | {"base_model_name_or_path": base}
        )
        shutil.copyfile(model_files.weights / TENSORS, draft / TENSORS)
        load_tokenizer(model_files.tokenizer).save(draft)
        config = read_config(model_files.base)
        # with the adapter's own vocabulary and head
        if read_settings(draft)["peft_type"] == "LORA":
            config = read_adaptation(draft, config)[1]
        write_card(draft, out.name, config, [model_files.weights, model_files.base], base=base)
        if verify:
            if (model_files.weights / TENSORS).read_bytes() != (draft / TENSORS).read_bytes():
                raise UserError(
                    f"{TENSORS} changed during the copy", where=str(draft), fix="check the disk"
                )
            results = probed(
                draft, use or Use("cpu"), base=model_files.base, where=model_files.weights
            )
            proofs.append("read back: the tensors are identical and load into the base model")
            proofs += opens_elsewhere(draft, *results, base=model_files.base)
    return exported(out, proofs)


def export_merged(
    model_files: ModelFiles,
    out: Path,
    *,
    dtype: str | None = None,
    verify: bool = True,
    use: Use | None = None,
) -> Exported:
    """Writes the new folder `out`, completely or not at all. `dtype`: None keeps the base's.

    Merges weights in float32 and rounds them once, one at a time, on the device of `use`. Uses the stored base model,
    also where the run trained with a quantized one. Verification reads the folder back, compares its logits with those
    of base and adapter, and loads it in transformers where that is installed. Raises UserError.
    """
    if model_files.base is None:
        problem = "cannot merge: this is a full model, not an adapter"
        raise UserError(problem, where=str(model_files.weights), fix="use --to hf", code=2)
    use = use or Use("cpu")
    proofs = []
    if model_files.trained is not None and (bits := model_files.trained.quantize.kind) != "none":
        proofs.append(
            f"merged into the unquantized base model; the run trained with {bits}, so logits differ slightly"
        )
    with draft_of(out) as draft:
        config, kept = _write_merged(model_files, model_files.base, draft, dtype, use)
        write_rest(draft, out.name, config, model_files)
        if verify:
            proofs += _compared(draft, model_files, kept, use)
    return exported(out, proofs)


def export_vllm(
    files: ModelFiles, out: Path, *, verify: bool = True, use: Use | None = None
) -> Exported:
    """Writes the new folder `out` for vLLM, completely or not at all: bfloat16, adapters merged, mode 0644.

    Verification as for `export` and `export_merged`. Raises UserError.
    """
    if files.base is not None:
        done = export_merged(files, out, dtype="bfloat16", verify=verify, use=use)
    else:
        done = export(files.weights, out, dtype="bfloat16", verify=verify, use=use)
    for path in out.iterdir():
        path.chmod(0o644)
    return replace(done, next=f"vllm serve {out}")


@contextmanager
def draft_of(out: Path, kind: Literal["folder", "file"] = "folder") -> Iterator[Path]:
    """A temporary folder, or the name of a file, next to `out`: renamed to `out` when the block succeeds, deleted when
    it fails.
    """
    if out.exists() and not (kind == "folder" and out.is_dir() and not any(out.iterdir())):
        raise UserError(
            f"the output {kind} exists; nothing was overwritten",
            where=str(out),
            fix="choose another --out",
        )
    draft = out.with_name(f".tmp-{out.name}-{os.getpid()}")
    try:
        for left in out.parent.glob(f".tmp-{glob.escape(out.name)}-*"):
            if abandoned(left):
                remove(left)
        (draft if kind == "folder" else out.parent).mkdir(parents=True, exist_ok=kind == "file")
        yield draft
        for path in (*(draft.rglob("*") if kind == "folder" else ()), draft):
            flush_to_disk(path)  # before the name: after a power loss, what has it is whole
        draft.replace(out)
        flush_to_disk(out.parent)
    except OSError as error:
        problem = f"cannot write the export: {error.strerror or error}"
        raise UserError(
            problem, where=str(out), fix="choose another --out, or free disk space"
        ) from error
    finally:
        if draft.exists():  # below a file it does not, and cannot be removed
            remove(draft)


def write_rest(
    draft: Path,
    name: str,
    config: ModelConfig,
    files: ModelFiles,
    merge: Merge | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """The other files of a full model: generation settings, tokenizer and card. `tokenizer`: None takes that of
    `files`.
    """
    write_json(
        draft / "generation_config.json", _generation_settings(files.base or files.weights, config)
    )
    (tokenizer or load_tokenizer(files.tokenizer)).save(draft)
    write_card(
        draft, name, config, [files.weights, *([files.base] if files.base else [])], merge=merge
    )


def _compared(draft: Path, files: ModelFiles, kept: torch.dtype, use: Use) -> list[str]:
    """The logits of the draft with those of its source, then in transformers; one model at a time is in memory."""
    expected, _ = probed(files.weights, use, base=files.base, where=files.weights)
    logits, config = probed(draft, use, where=draft)
    error = float((logits - expected).abs().max())
    scale = max(1.0, float(expected.abs().max()))
    if not error <= TOLERANCES[kept] * scale:
        problem = (
            f"the logits of the exported model differ by {error:.2g} (largest logit: {scale:.2g})"
        )
        raise UserError(problem, where=str(draft), fix="use --type float32")
    source = "the source" if files.base is None else "base and adapter"
    return [compared(kept, error, scale, source), *opens_elsewhere(draft, logits, config)]


def compared(kept: torch.dtype, error: float, scale: float, source: str) -> str:
    """The proof that logits, computed in float32, are those of the source but for the rounding of the weights."""
    if kept == torch.float32:
        return f"logits equal those of {source} within {error:.1e} (float32)"
    word = str(kept).removeprefix("torch.")
    return (
        f"{word} weights, computed in float32: logits differ from those of {source} by at most {error:.2g} of "
        f"{scale:.2g} (rounding to {word}: up to {TOLERANCES[kept]:.0%})"
    )


def exported(out: Path, proofs: list[str]) -> Exported:
    return Exported(out, sum(path.stat().st_size for path in out.iterdir()), tuple(proofs))


def _generation_settings(source: Path, config: ModelConfig) -> dict[str, object]:
    """The model's own generation settings, else its special token ids."""
    raw_config = source / "generation_config.json"
    if raw_config.is_file():
        return read_object(raw_config, fix="correct or delete that file")
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"_from_model_config": True} | {
        key: value for key, value in ids.items() if value is not None
    }


def probe_tokens(config: ModelConfig) -> Tensor:
    return torch.arange(min(PROBE_TOKENS, config.max_positions))[None] * 7919 % config.vocab_size


def load_whole(folder: Path, use: Use, *, base: Path | None = None) -> Decoder:
    """The model in float32 on the device. Raises UserError before memory is allocated where it does not fit."""

    def refuse_full(decoder: Decoder) -> None:
        needed = sum(parameter.nbytes for parameter in decoder.parameters())
        free = use.free_bytes()
        if needed > free:
            problem = f"verification needs {format_bytes(needed)}; {use.name} has {format_bytes(free)} free"
            fix = "add --no-verify" + (" or --devices cpu" if use.device == "cuda" else "")
            raise UserError(problem, where=str(folder), fix=fix)

    return load_decoder(
        folder, dtype=torch.float32, device=use.device, base=base, arrange=refuse_full
    )


def probed(
    folder: Path, use: Use, *, where: Path, base: Path | None = None
) -> tuple[Tensor, ModelConfig]:
    """Logits of a few tokens of `load_whole`. Raises UserError as it does, and when they are not finite; `where` is the
    model of that message.
    """
    progress("loading a model in float32 to compare logits")
    decoder = load_whole(folder, use, base=base)
    with torch.no_grad():
        device = decoder.model.embed_tokens.weight.device
        logits: Tensor = decoder(probe_tokens(decoder.config).to(device)).head.cpu()
    if not bool(torch.isfinite(logits).all()):
        problem = "the logits of the exported model are not finite"
        raise UserError(problem, where=str(where), fix="choose an earlier --step")
    return logits, decoder.config


def opens_elsewhere(
    draft: Path, logits: Tensor, config: ModelConfig, *, base: Path | None = None
) -> list[str]:
    """Loads a full model in transformers, or an adapter in PEFT on its `base`, and compares logits; returns the proof,
    or nothing where these packages are not installed.
    """
    needed = ("transformers",) if base is None else ("peft", "transformers")
    if any(importlib.util.find_spec(name) is None for name in needed):
        return []
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    program, name = (
        (transformers, "transformers")
        if base is None
        else (importlib.import_module("peft"), "PEFT")
    )
    settings: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    tokens = probe_tokens(config)
    kind = transformers.AutoModelForCausalLM
    # transformers' classifiers return the value of the last token that is not padding
    if config.head == "values":
        kind = transformers.AutoModelForSequenceClassification
        kept = (tokens[0] != (-1 if config.pad_token_id is None else config.pad_token_id)).nonzero()
        logits = logits[:, int(kept.max())]
        # initialized at random, replaced by the adapter
        settings |= {} if base is None else {"num_labels": 1}
    progress(f"opening the export in {name}")
    # the libraries warn of each other
    with warnings.catch_warnings(action="ignore" if base is not None else None):
        model = kind.from_pretrained(draft if base is None else base, **settings)
        if base is None:
            transformers.AutoTokenizer.from_pretrained(draft)
        else:
            if config.vocab_size > model.get_input_embeddings().num_embeddings:
                model.resize_token_embeddings(config.vocab_size, mean_resizing=False)
            model = program.PeftModel.from_pretrained(model, draft)
        with torch.no_grad():
            theirs = model.eval()(tokens).logits
    error = float((theirs - logits).abs().max())
    if not error <= TOLERANCE * max(1.0, float(logits.abs().max())):
        problem = f"the logits in {name} differ by {error:.2g}"
        raise UserError(
            problem,
            where=str(draft),
            fix="add --no-verify to export without this check; report this bug",
        )
    return [f"loaded in {name} {program.__version__}: logits equal within {error:.1e}"]


@torch.no_grad()
def merged_state(model: Decoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every parameter of the base by name with the adapters merged: computed in float32, rounded to `dtype` once."""
    if has_method(model):
        model = copy.deepcopy(model).float()
        merge_methods(model)
    state = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        whole = (
            module.merged_weight()
            if isinstance(module, LoraLinear) and name.endswith(".weight")
            else parameter
        )
        state[name] = whole.detach().to(dtype)
    return state


def within(held: Tensor, name: str, *, where: Path) -> Tensor:
    """The tensor. Raises UserError where it is float16 and holds a weight that float16 cannot."""
    if held.dtype == torch.float16 and not bool(held.isfinite().all()):
        problem = f"{name} holds a weight above 65,504, the largest of float16"
        raise UserError(problem, where=str(where), fix="use --type bfloat16")
    return held


@contextmanager
def full_pieces(folder: Path, dtype: torch.dtype) -> Iterator[tuple[Piece, ModelConfig]]:
    """The parameters of a model folder by our names, one at a time. Raises UserError as `load_decoder` does, and for a
    weight that `dtype` cannot hold.
    """
    config = read_config(folder)
    shapes = parameter_shapes(config)
    with StoredModel(config, folder) as stored:

        @torch.no_grad()
        def piece(name: str) -> Tensor:
            """Raises UserError for a weight that float16 cannot hold."""
            held = torch.empty(shapes[name], dtype=dtype)
            stored.fill(name, held)
            return within(held, name, where=folder)

        yield piece, config


@contextmanager
def merged_pieces(
    folder: Path, base: Path, dtype: torch.dtype, device: str | torch.device
) -> Iterator[tuple[Piece, ModelConfig]]:
    """`merged_state` of a low-rank adapter, one parameter at a time: only that parameter of the base is in memory.

    Raises UserError as `load_decoder` does.
    """
    refuse_other_base(folder, base)
    settings, config = read_adaptation(folder, read_config(base))
    with torch.device("meta"):
        model = Decoder(config)
        adapt_as(model, settings)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_adapter(name) or parameter.requires_grad:
                held = torch.empty(parameter.shape, dtype=torch.float32, device=device)
                setattr(module, name, nn.Parameter(held))
        if isinstance(module, LoraLinear) and module.pissa:
            module.first_A, module.first_B = (
                torch.empty_like(each) for each in (module.lora_A, module.lora_B)
            )
    model.tie()
    with torch.no_grad():
        read_trained(model, settings, config, folder, shared=True)
    with StoredModel(config, base, seed=0) as stored:

        @torch.no_grad()
        def piece(name: str) -> Tensor:
            parameter = model.get_parameter(name)
            if not parameter.is_meta:  # a module to save
                return parameter.detach().to(dtype)
            whole = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            stored.fill(name, whole)
            module = model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, LoraLinear) and name.endswith(".weight"):
                module.weight = nn.Parameter(whole)
                whole = module.merged_weight()
                module.weight = parameter
            return within(whole.to(dtype), name, where=folder)

        yield piece, config


@contextmanager
def pieces_of(files: ModelFiles) -> Iterator[tuple[Piece, ModelConfig]]:
    """The parameters of a full model, or of an adapter merged into its base, in float32. Raises UserError."""
    if files.base is None:
        with full_pieces(files.weights, torch.float32) as found:
            yield found
        return
    if (kind := read_settings(files.weights)["peft_type"]) != "LORA":
        problem = f"an adapter of {kind[:40]} cannot be merged piece by piece"
        fix = "export it with --to merged first"
        raise UserError(problem, where=str(files.weights), fix=fix)
    with merged_pieces(files.weights, files.base, torch.float32, "cpu") as found:
        yield found


def _write_merged(
    model_files: ModelFiles, base: Path, draft: Path, asked: str | None, use: Use
) -> tuple[ModelConfig, torch.dtype]:
    """One parameter at a time where possible; PEFT methods and transformers' layers are merged as a whole model."""
    if (
        read_settings(model_files.weights)["peft_type"] == "LORA"
        and read_config(base).transformers_backend is None
    ):
        stored = find_tensors(base)
        kept = next(iter(stored.values())).dtype if asked is None else DTYPES[asked]
        with merged_pieces(model_files.weights, base, kept, use.device) as (piece, config):
            write_model_piecewise(piece, config, kept, draft)
        return config, kept
    decoder = load_decoder(
        model_files.weights, base=base, dtype=torch.float32 if asked == "float32" else None
    )
    kept = decoder.model.embed_tokens.weight.dtype if asked is None else DTYPES[asked]
    write_model(merged_state(decoder, kept), decoder.config, draft)
    return decoder.config, kept
