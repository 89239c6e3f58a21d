"""Exports: a full model for transformers and vLLM, an adapter for PEFT, or an adapter merged into its base model"""

import copy
import glob
import importlib
import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bloomery.core.device import is_accelerator
from bloomery.core.errors import UserError
from bloomery.core.files import abandoned, flush_to_disk, remove
from bloomery.core.progress import progress
from bloomery.core.units import format_bytes
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.export import DTYPES as DTYPE_NAMES
from bloomery.export.card import Merge, write_card
from bloomery.export.merge_proof import proof_of_change, proof_of_changed_tower
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import parameter_shapes
from bloomery.facts.hf_config import config_to_hf, text_part
from bloomery.facts.pictures import vision_of
from bloomery.infer.load import Use
from bloomery.infer.model_folder import ModelFiles
from bloomery.model.adapters.base_changes import BaseChanges, refuse_unmergeable_biases
from bloomery.model.adapters.lora import LoraLinear, adapt_as, is_added, stack_adapter
from bloomery.model.adapters.peft_files import read_trained, write_as_peft
from bloomery.model.adapters.peft_methods import has_method, merge_methods
from bloomery.model.adapters.peft_reading import read_adaptation
from bloomery.model.adapters.settings import (
    CONFIG,
    TENSORS,
    Adaptation,
    adapter_file,
    base_of,
    is_adapter_folder,
    read_settings,
    refuse_other_base,
    stated_settings,
)
from bloomery.model.adapters.tower import merged_tower
from bloomery.model.configs import (
    headers_of,
    quantized_as,
    read_config,
    stated_config,
    untied_note,
)
from bloomery.model.decoder import Decoder
from bloomery.model.io.parameters import dtype_in
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import (
    INDEX,
    SINGLE,
    StoredTensor,
    dtype_of,
    find_tensors,
    read_object,
)
from bloomery.model.io.weights import (
    StoredModel,
    load_decoder,
    write_json,
    write_model,
    write_model_piecewise,
)
from bloomery.model.io.whole_models import is_inside_whole, make_whole

ReadParameter = Callable[[str], Tensor]  # a parameter by its name in the decoder
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
# Of the largest logit: float32 only changes the order of operations, 16-bit formats round every weight.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
TOLERANCE = (
    1e-3  # of the largest logit in another library: weights may be 16 bits wide, and kernels differ
)
PROBE_TOKENS = 16


@dataclass(frozen=True)
class Exported:
    """`proofs`: one sentence per check that passed; empty without verification. `next`: commands for the result, one a
    line. `mmproj`: a second GGUF file, with the tower of a model that sees pictures. `bytes`: of all files.
    """

    folder: Path
    bytes: int
    proofs: tuple[str, ...]
    next: str = ""
    mmproj: Path | None = None


# The layouts


def export(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    verify: bool = True,
    use: Use | None = None,
    keeps_vision: bool = False,
) -> Exported:
    """Writes the model in `source` to the new folder `out`, with tokenizer, generation settings and a model card.

    `dtype`: None copies the weights as they are; else each is rounded once, one at a time. `keeps_vision`: a multimodal
    model stays whole, with its tower as it is; else its language model is written alone. `out` is written completely
    or not at all. Verification reads it back, compares every tensor with the source, or the logits where weights were
    rounded, and loads it in transformers where that is installed. Raises UserError when `out` exists or a check fails.
    """
    if is_adapter_folder(source):
        raise UserError(
            "cannot export an adapter as a full model",
            where=str(source),
            fix="use --to merged for a full model, or --to adapter for the adapter",
            code=2,
        )
    use = use or Use("cpu")
    files = ModelFiles(source, None, source)
    config = read_config(source)
    tensors = find_tensors(source)
    stored_dtype = dtype_of(source)
    target_dtype = stored_dtype if dtype is None else DTYPES[dtype]

    # Weights that stay as they are are copied. Of a multimodal model the language model is written under the names
    # that it has alone.
    full_config = stated_config(source)
    is_text_part = text_part(full_config) is not full_config
    keeps_dtypes = dtype is None or all(stored.dtype == target_dtype for stored in tensors.values())
    # Quantized weights are written as numbers: no folder with half of a format is left.
    is_packed = any(stored.packing is not None for stored in tensors.values())
    # Names that transformers would not find are written as it expects them.
    is_whole = keeps_vision and vision_of(full_config, where=str(source)) is not None
    headers = headers_of(source, sees=is_whole)
    is_copy = keeps_dtypes and not is_text_part and not headers.is_renamed and not is_packed
    proofs = list(headers.notes)
    with draft_of(out) as draft:
        if is_copy:
            _copy_weights(source, draft, config, stored_dtype)
        else:
            with open_model(source, target_dtype) as (read_parameter, config):
                write_model_piecewise(read_parameter, config, target_dtype, draft)
        write_other_files(draft, out.name, config, files)
        if verify and is_copy:
            _compare_bytes(tensors, draft)
            proofs.append(f"read back: all {len(tensors)} tensors are identical")
            proofs += check_in_library(draft, *probe_logits(draft, use, where=source))
        elif verify:
            proofs += _compare_logits(draft, files, target_dtype, use)
        if is_whole:
            make_whole(draft, source)
            proofs.append("whole: the vision tower and its processor are those of the model")
    return finished_export(out, proofs)


def _copy_weights(source: Path, draft: Path, config: ModelConfig, dtype: torch.dtype) -> None:
    paths = {stored.path for stored in find_tensors(source).values()}
    index = source / INDEX
    if index.is_file() and source / SINGLE not in paths:
        paths.add(index)
    for path in paths:
        shutil.copyfile(path, draft / path.name)
    name = str(dtype).removeprefix("torch.")
    write_json(draft / "config.json", config_to_hf(config) | {"dtype": name, "torch_dtype": name})


def _compare_bytes(tensors: Mapping[str, StoredTensor], draft: Path) -> None:
    """Raises UserError where a tensor of the draft has other bytes than its original."""
    copies = find_tensors(draft)
    with TensorReader() as reader:
        for name, original in tensors.items():
            original_bytes = reader.read(original).view(torch.uint8)
            copied_bytes = reader.read(copies[name]).view(torch.uint8)
            if not torch.equal(original_bytes, copied_bytes):
                raise UserError(
                    f"{name} changed during the copy", where=str(draft), fix="check the disk"
                )


def export_adapter(
    model_files: ModelFiles, out: Path, *, verify: bool = True, use: Use | None = None
) -> Exported:
    """Copies the adapter to the new folder `out`, with tokenizer and card, completely or not at all.

    Verification compares the bytes, runs the copy on its base model, and loads it in PEFT where that is installed.
    Raises UserError.
    """
    if model_files.base is None:
        raise UserError(
            "cannot export an adapter: this is a full model",
            where=str(model_files.weights),
            fix="use --to hf",
            code=2,
        )
    base_name = base_of(model_files.base).name
    proofs = []
    packing = quantized_as(model_files.base)
    if packing:
        proofs.append(f"belongs to {base_name}, whose weights are stored as {packing}")
    with draft_of(out) as draft:
        is_peft = adapter_file(model_files.weights) == TENSORS
        config = read_config(model_files.base)
        if is_peft:
            settings = stated_settings(model_files.weights)
            write_json(draft / CONFIG, settings | {"base_model_name_or_path": base_name})
            shutil.copyfile(model_files.weights / TENSORS, draft / TENSORS)
        else:
            write_as_peft(model_files.weights, config, draft, base=base_name)
        load_tokenizer(model_files.tokenizer).save(draft)
        if (
            read_settings(draft)["peft_type"] == "LORA"
        ):  # with the adapter's own vocabulary and head
            config = read_adaptation(draft, config, base=model_files.base)[1]
        sources = [model_files.weights, model_files.base]
        write_card(draft, out.name, config, sources, base=base_name)
        if verify:
            if is_peft and (
                (model_files.weights / TENSORS).read_bytes() != (draft / TENSORS).read_bytes()
            ):
                raise UserError(
                    f"{TENSORS} changed during the copy", where=str(draft), fix="check the disk"
                )
            logits, config = probe_logits(
                draft, use or Use("cpu"), base=model_files.base, where=model_files.weights
            )
            proofs.append("read back: the tensors are identical and load into the base model")
            # transformers computes with quantized weights by kernels of other packages, mostly on a GPU.
            if not packing:
                proofs += check_in_library(draft, logits, config, base=model_files.base)
    return finished_export(out, proofs)


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
    also where the run trained with a quantized one. What the adapter changes must differ from the base in the files.
    Verification reads the folder back, compares its logits with those of base and adapter, and loads it in transformers
    where that is installed. Raises UserError.
    """
    if model_files.base is None:
        raise UserError(
            "cannot merge: this is a full model, not an adapter",
            where=str(model_files.weights),
            fix="use --to hf",
            code=2,
        )
    use = use or Use("cpu")
    is_whole = is_inside_whole(model_files.weights)
    proofs = list(headers_of(model_files.base, sees=is_whole).notes)
    if model_files.trained is not None and model_files.trained.quantize.kind != "none":
        proofs.append(
            "merged into the unquantized base model; the run trained with "
            f"{model_files.trained.quantize.kind}, so logits differ slightly"
        )
    with draft_of(out) as draft:
        config, target_dtype = _write_merged(model_files, model_files.base, draft, dtype, use)
        if (note := untied_note(model_files.base, config)) is not None:
            proofs.append(f"adapter: {note}")
        proofs.append(proof_of_change(draft, model_files.base, model_files.weights))
        write_other_files(draft, out.name, config, model_files)
        if verify:
            proofs += _compare_logits(draft, model_files, target_dtype, use)
        if is_whole:
            # Rounded to the type of the base's tower, unless float32 is asked for.
            tower_dtype = torch.float32 if dtype == "float32" else None
            changed = merged_tower(model_files.base, model_files.weights, config, dtype=tower_dtype)
            make_whole(draft, model_files.base, changed)
            proof = "whole: the vision tower and its processor are those of the base"
            if changed:
                counts = proof_of_changed_tower(changed, model_files.base, model_files.weights)
                proof += f", but for {counts}"
            proofs.append(proof)
    return finished_export(out, proofs)


def export_vllm(
    files: ModelFiles, out: Path, *, verify: bool = True, use: Use | None = None
) -> Exported:
    """Writes the new folder `out` for vLLM, completely or not at all: bfloat16, adapters merged, mode 0644.

    Verification as for `export` and `export_merged`. Raises UserError.
    """
    if files.base is not None:
        done = export_merged(files, out, dtype="bfloat16", verify=verify, use=use)
    else:
        done = export(
            files.weights,
            out,
            dtype="bfloat16",
            verify=verify,
            use=use,
            keeps_vision=files.trained is not None,
        )
    for path in out.iterdir():
        path.chmod(0o644)
    return replace(done, next=f"vllm serve {out}")


# The new folder, and what is in it besides weights


@contextmanager
def draft_of(out: Path, kind: Literal["folder", "file"] = "folder") -> Iterator[Path]:
    """A temporary folder, or the name of a file, next to `out`: renamed to `out` when the block succeeds, deleted when
    it fails.
    """
    is_empty_folder = kind == "folder" and out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty_folder:
        raise UserError(
            f"the output {kind} exists; nothing was overwritten",
            where=str(out),
            fix="choose another --out",
        )
    draft = out.with_name(f".tmp-{out.name}-{os.getpid()}")
    try:
        # Drafts that a killed export left are deleted first.
        for other_draft in out.parent.glob(f".tmp-{glob.escape(out.name)}-*"):
            if abandoned(other_draft):
                remove(other_draft)
        folder = draft if kind == "folder" else out.parent
        folder.mkdir(parents=True, exist_ok=kind == "file")
        yield draft
        # The content before the name: after a power loss, what has the name is complete.
        for path in (*(draft.rglob("*") if kind == "folder" else ()), draft):
            flush_to_disk(path)
        draft.replace(out)
        flush_to_disk(out.parent)
    except OSError as error:
        raise UserError(
            f"cannot write the export: {error.strerror or error}",
            where=str(out),
            fix="choose another --out, or free disk space",
        ) from error
    finally:
        if draft.exists():  # below a file it does not, and cannot be removed
            remove(draft)


def write_other_files(
    draft: Path,
    name: str,
    config: ModelConfig,
    files: ModelFiles,
    merge: Merge | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """The files of a full model besides config and weights: generation settings, tokenizer and card.

    `tokenizer`: None takes that of `files`.
    """
    settings = _generation_settings(files.base or files.weights, config)
    write_json(draft / "generation_config.json", settings)
    (tokenizer or load_tokenizer(files.tokenizer)).save(draft)
    sources = [files.weights, *([files.base] if files.base else [])]
    write_card(draft, name, config, sources, merge=merge)


def _generation_settings(source: Path, config: ModelConfig) -> dict[str, object]:
    """The model's own generation settings, else its special token ids."""
    path = source / "generation_config.json"
    if path.is_file():
        return read_object(path, fix="correct or delete that file")
    settings: dict[str, object] = {"_from_model_config": True}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (token_id := getattr(config, key)) is not None:
            settings[key] = token_id
    return settings


def finished_export(out: Path, proofs: list[str]) -> Exported:
    return Exported(out, sum(path.stat().st_size for path in out.iterdir()), tuple(proofs))


# Verification


def _compare_logits(draft: Path, files: ModelFiles, dtype: torch.dtype, use: Use) -> list[str]:
    """The logits of the draft with those of its source, then in transformers; one model at a time is in memory."""
    expected, _ = probe_logits(files.weights, use, base=files.base, where=files.weights)
    logits, config = probe_logits(draft, use, where=draft)
    error = float((logits - expected).abs().max())
    scale = max(1.0, float(expected.abs().max()))
    if not error <= TOLERANCES[dtype] * scale:
        raise UserError(
            f"the logits of the exported model differ by {error:.2g} (largest logit: {scale:.2g})",
            where=str(draft),
            fix="use --type float32",
        )
    source = "the source" if files.base is None else "base and adapter"
    return [
        logits_proof(dtype, error, scale, source),
        *check_in_library(draft, logits, config),
    ]


def logits_proof(dtype: torch.dtype, error: float, scale: float, source: str) -> str:
    """The proof that logits, computed in float32, are those of the source but for the rounding of the weights."""
    if dtype == torch.float32:
        return f"logits equal those of {source} within {error:.1e} (float32)"
    name = str(dtype).removeprefix("torch.")
    return (
        f"{name} weights, computed in float32: logits differ from those of {source} by at most "
        f"{error:.2g} of {scale:.2g} (rounding to {name}: up to {TOLERANCES[dtype]:.0%})"
    )


def probe_tokens(config: ModelConfig) -> Tensor:
    """A few token ids [1, T], spread over the vocabulary."""
    count = min(PROBE_TOKENS, config.max_positions)
    return torch.arange(count)[None] * 7919 % config.vocab_size


def load_in_float32(folder: Path, use: Use, *, base: Path | None = None) -> Decoder:
    """The model in float32 on the device. Raises UserError before memory is allocated where it does not fit."""

    def refuse_full(decoder: Decoder) -> None:
        needed_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
        free_bytes = use.free_bytes()
        if needed_bytes > free_bytes:
            raise UserError(
                f"verification needs {format_bytes(needed_bytes)}; {use.name} has "
                f"{format_bytes(free_bytes)} free",
                where=str(folder),
                fix="add --no-verify" + (" or --devices cpu" if is_accelerator(use.device) else ""),
            )

    return load_decoder(
        folder, dtype=torch.float32, device=use.device, base=base, arrange=refuse_full
    )


def probe_logits(
    folder: Path, use: Use, *, where: Path, base: Path | None = None
) -> tuple[Tensor, ModelConfig]:
    """Logits of `probe_tokens` in float32. Raises UserError as `load_in_float32` does, and when they are not finite;
    `where` is the model of that message.
    """
    progress("loading a model in float32 to compare logits")
    decoder = load_in_float32(folder, use, base=base)
    with torch.no_grad():
        device = decoder.model.embed_tokens.weight.device
        logits: Tensor = decoder(probe_tokens(decoder.config).to(device)).head.cpu()
    if not bool(torch.isfinite(logits).all()):
        raise UserError(
            "the logits of the exported model are not finite",
            where=str(where),
            fix="choose an earlier --step",
        )
    return logits, decoder.config


def check_in_library(
    draft: Path, logits: Tensor, config: ModelConfig, *, base: Path | None = None
) -> list[str]:
    """Loads a full model in transformers, or an adapter in PEFT on its `base`, and compares logits; returns the proof,
    or nothing where these packages are not installed.
    """
    packages = ("transformers",) if base is None else ("peft", "transformers")
    if any(importlib.util.find_spec(package) is None for package in packages):
        return []
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    library = transformers if base is None else importlib.import_module("peft")
    library_name = "transformers" if base is None else "PEFT"

    # transformers' classifiers return the value of the last token that is not padding. On a base their head is
    # initialized at random, and replaced by the adapter.
    tokens = probe_tokens(config)
    model_class = transformers.AutoModelForCausalLM
    settings: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if config.head == "values":
        model_class = transformers.AutoModelForSequenceClassification
        padding = -1 if config.pad_token_id is None else config.pad_token_id
        last_token = int((tokens[0] != padding).nonzero().max())
        logits = logits[:, last_token]
        if base is not None:
            settings["num_labels"] = 1
    elif base is not None and is_inside_whole(draft):
        model_class = transformers.AutoModelForImageTextToText

    # Under PEFT the libraries warn of each other.
    progress(f"opening the export in {library_name}")
    with warnings.catch_warnings(action="ignore" if base is not None else None):
        model = model_class.from_pretrained(draft if base is None else base, **settings)
        if base is None:
            transformers.AutoTokenizer.from_pretrained(draft)
        else:
            if config.vocab_size > model.get_input_embeddings().num_embeddings:
                model.resize_token_embeddings(config.vocab_size, mean_resizing=False)
            model = library.PeftModel.from_pretrained(model, draft)
        with torch.no_grad():
            library_logits = model.eval()(tokens).logits

    error = float((library_logits - logits).abs().max())
    if not error <= TOLERANCE * max(1.0, float(logits.abs().max())):
        raise UserError(
            f"the logits in {library_name} differ by {error:.2g}",
            where=str(draft),
            fix="add --no-verify to export without this check; report this bug",
        )
    return [f"loaded in {library_name} {library.__version__}: logits equal within {error:.1e}"]


# Weights, one parameter at a time


@torch.no_grad()
def merged_state(model: Decoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every parameter of the base by name with the adapters merged: computed in float32, rounded to `dtype` once."""
    if has_method(model):
        model = copy.deepcopy(model).float()
        merge_methods(model)
    state = {}
    for name, parameter in model.named_parameters():
        if is_added(name):
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, LoraLinear) and name.endswith(".weight"):
            state[name] = module.merged_weight().detach().to(dtype)
        elif (stack_lora := stack_adapter(model, name)) is not None:
            merged = parameter.detach().to(torch.float32, copy=True)
            stack_lora.add_to(merged)
            state[name] = merged.to(dtype)
        else:
            state[name] = parameter.detach().to(dtype_in(model.config, name, dtype))
    return state


def refuse_overflow(tensor: Tensor, name: str, *, where: Path) -> Tensor:
    """The tensor. Raises UserError where it is float16 and holds a weight that float16 cannot."""
    if tensor.dtype == torch.float16 and not bool(tensor.isfinite().all()):
        raise UserError(
            f"{name} holds a weight above 65,504, the largest of float16",
            where=str(where),
            fix="use --type bfloat16",
        )
    return tensor


@contextmanager
def open_model(folder: Path, dtype: torch.dtype) -> Iterator[tuple[ReadParameter, ModelConfig]]:
    """The parameters of a model folder, one at a time. Raises UserError as `load_decoder` does, and for a weight that
    `dtype` cannot hold.
    """
    config = read_config(folder)
    shapes = parameter_shapes(config)
    with StoredModel(config, folder) as stored:

        @torch.no_grad()
        def read_parameter(name: str) -> Tensor:
            tensor = torch.empty(shapes[name], dtype=dtype_in(config, name, dtype))
            stored.fill(name, tensor)
            return refuse_overflow(tensor, name, where=folder)

        yield read_parameter, config


def adapter_without_base(
    settings: Adaptation, config: ModelConfig, folder: Path, device: str | torch.device
) -> Decoder:
    """The adapted decoder, of which only what the adapter's file holds is in memory, in float32. Raises UserError."""
    with torch.device("meta"):
        model = Decoder(config)
        adapt_as(model, settings)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_added(name) or parameter.requires_grad:
                memory = torch.empty(parameter.shape, dtype=torch.float32, device=device)
                setattr(module, name, nn.Parameter(memory))
        if isinstance(module, LoraLinear) and module.pissa:
            module.first_A = torch.empty_like(module.lora_A)
            module.first_B = torch.empty_like(module.lora_B)
    model.tie()
    with torch.no_grad():
        read_trained(model, settings, config, folder, shared=True)
    return model


@contextmanager
def open_merged(
    folder: Path, base: Path, dtype: torch.dtype, device: str | torch.device
) -> Iterator[tuple[ReadParameter, ModelConfig]]:
    """`merged_state` of a low-rank adapter, one parameter at a time: only that parameter of the base is in memory.

    Raises UserError as `load_decoder` does.
    """
    refuse_other_base(folder, base)
    settings, config = read_adaptation(folder, read_config(base), base=base)
    refuse_unmergeable_biases(settings, config, folder)
    changes = BaseChanges(settings, config, folder)

    model = adapter_without_base(settings, config, folder, device)
    with StoredModel(config, base, seed=0) as stored:

        @torch.no_grad()
        def read_parameter(name: str) -> Tensor:
            parameter = model.get_parameter(name)
            own_dtype = dtype_in(config, name, dtype)
            if not parameter.is_meta:  # one of modules_to_save
                return refuse_overflow(
                    changes.applied(name, parameter.detach()).to(own_dtype), name, where=folder
                )
            weight = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            stored.fill(name, weight)
            weight = changes.applied(name, weight)
            module = model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, LoraLinear) and name.endswith(".weight"):
                module.weight = nn.Parameter(weight)
                module.note_residual()
                weight = module.merged_weight()
                module.weight = parameter
            if (stack_lora := stack_adapter(model, name)) is not None:
                stack_lora.add_to(weight)
            return refuse_overflow(weight.to(own_dtype), name, where=folder)

        yield read_parameter, config


@contextmanager
def open_weights(files: ModelFiles) -> Iterator[tuple[ReadParameter, ModelConfig]]:
    """The parameters of a full model, or of an adapter merged into its base, in float32. Raises UserError."""
    if files.base is None:
        with open_model(files.weights, torch.float32) as opened:
            yield opened
        return
    method = read_settings(files.weights)["peft_type"]
    if method != "LORA":
        raise UserError(
            f"an adapter of {method[:40]} cannot be merged piece by piece",
            where=str(files.weights),
            fix="export it with --to merged first",
        )
    with open_merged(files.weights, files.base, torch.float32, "cpu") as opened:
        yield opened


def _write_merged(
    model_files: ModelFiles, base: Path, draft: Path, dtype: str | None, use: Use
) -> tuple[ModelConfig, torch.dtype]:
    """One parameter at a time where possible; PEFT methods and transformers' layers are merged as a whole model."""
    is_lora = read_settings(model_files.weights)["peft_type"] == "LORA"
    if is_lora and read_config(base).transformers_backend is None:
        stored_dtype = dtype_of(base)
        target_dtype = stored_dtype if dtype is None else DTYPES[dtype]
        opened = open_merged(model_files.weights, base, target_dtype, use.device)
        with opened as (read_parameter, config):
            write_model_piecewise(read_parameter, config, target_dtype, draft)
        return config, target_dtype
    loaded_dtype = torch.float32 if dtype == "float32" else None
    decoder = load_decoder(model_files.weights, base=base, dtype=loaded_dtype)
    stored_dtype = decoder.model.embed_tokens.weight.dtype
    target_dtype = stored_dtype if dtype is None else DTYPES[dtype]
    write_model(merged_state(decoder, target_dtype), decoder.config, draft)
    return decoder.config, target_dtype
