"""A model as a folder that transformers, vLLM and other readers of that layout open."""

import glob
import importlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bloomery.core.errors import UserError
from bloomery.core.files import abandoned, remove
from bloomery.core.units import format_bytes
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.export.card import model_card, training_of
from bloomery.model.adapters.base_model import is_adapter_folder
from bloomery.model.config import ModelConfig
from bloomery.model.decoder import Decoder
from bloomery.model.families.presets import read_config
from bloomery.model.families.registry import config_to_hf
from bloomery.model.io.safetensors import Reader
from bloomery.model.io.weight_files import find_tensors
from bloomery.model.io.weights import load_decoder
from bloomery.train.use import Use

TOLERANCE = 1e-3  # of the largest logit; weights may be 16 bits wide, and kernels differ
PROBE_TOKENS = 16


@dataclass(frozen=True)
class Exported:
    """`proofs` says what was checked, one sentence each; empty without verification."""

    folder: Path
    bytes: int
    proofs: tuple[str, ...]


def export(source: Path, out: Path, *, verify: bool = True, use: Use | None = None) -> Exported:
    """Copies the model in `source` to the new folder `out`, with tokenizer, generation settings and a model card.

    `out` appears whole or not at all. Verification reads it back, compares every tensor with the source, runs it, and
    opens it in transformers where that is installed. Raises UserError when `out` exists or the copy does not hold.
    """
    if is_adapter_folder(source):
        raise UserError(
            "this is an adapter: there is no whole model to copy", where=str(source), code=2,
            remedy="--to merged writes a whole model, --to adapter the adapter alone",
        )  # fmt: skip
    config = read_config(source)
    with draft_of(out) as draft:
        dtype = _copy_weights(source, draft)
        write_json(draft / "config.json", config_to_hf(config) | {"dtype": dtype, "torch_dtype": dtype})
        write_json(draft / "generation_config.json", generation_settings(source, config))
        load_tokenizer(source).save(draft)
        (draft / "README.md").write_text(model_card(out.name, config, training_of(source)), encoding="utf-8")
        proofs = tuple(_proofs(source, draft, use or Use("cpu"))) if verify else ()
    return Exported(out, sum(path.stat().st_size for path in out.iterdir()), proofs)


@contextmanager
def draft_of(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name when the block ends well, and disappears when it does not."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError("this place is taken; nothing is overwritten", where=str(out), remedy="choose another --out")
    draft = out.with_name(f".tmp-{out.name}-{os.getpid()}")
    try:
        for left in out.parent.glob(f".tmp-{glob.escape(out.name)}-*"):
            if abandoned(left):
                remove(left)
        draft.mkdir(parents=True)
        yield draft
        draft.replace(out)
    except OSError as error:
        problem = f"the export cannot be written: {error.strerror or error}"
        raise UserError(problem, where=str(out), remedy="choose another --out, or make room") from error
    finally:
        if draft.exists():
            shutil.rmtree(draft)


def _copy_weights(source: Path, draft: Path) -> str:
    """Copies the weight files; answers the dtype of the first tensor."""
    tensors = find_tensors(source)
    for path in sorted({stored.path for stored in tensors.values()}):
        shutil.copyfile(path, draft / path.name)
    index = source / "model.safetensors.index.json"
    if index.is_file():
        shutil.copyfile(index, draft / index.name)
    return str(next(iter(tensors.values())).dtype).removeprefix("torch.")


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def generation_settings(source: Path, config: ModelConfig) -> dict[str, object]:
    """The settings that came with the model, else its token ids."""
    stated = source / "generation_config.json"
    if stated.is_file():
        try:
            settings: dict[str, object] = json.loads(stated.read_text(encoding="utf-8"))
        except ValueError as error:
            problem = f"generation_config.json is not JSON: {error}"
            raise UserError(problem, where=str(stated), remedy="mend or delete that file") from error
        return settings
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"_from_model_config": True} | {key: value for key, value in ids.items() if value is not None}


def _proofs(source: Path, draft: Path, use: Use) -> Iterator[str]:
    yield _same_tensors(source, draft)
    decoder = load_to_check(draft, use)
    logits, config = finite(probe(decoder), source), decoder.config
    del decoder
    if importlib.util.find_spec("transformers") is not None:
        yield opens_in_transformers(draft, logits, config)


def load_to_check(folder: Path, use: Use, *, base: Path | None = None) -> Decoder:
    """The model in float32 on the device. Raises UserError where it does not fit, before memory is taken."""

    def refuse_full(decoder: Decoder) -> None:
        needed, free = sum(parameter.nbytes for parameter in decoder.parameters()), use.free_bytes()
        if needed > free:
            problem = f"to check the export takes {format_bytes(needed)}, and {use.name} has {format_bytes(free)} free"
            remedy = "--no-verify leaves the check out" + (", or --devices cpu" if use.device == "cuda" else "")
            raise UserError(problem, where=str(folder), remedy=remedy)

    return load_decoder(folder, dtype=torch.float32, device=use.device, base=base, arrange=refuse_full)


def _same_tensors(source: Path, draft: Path) -> str:
    ours, theirs = find_tensors(source), find_tensors(draft)
    with Reader() as reader:
        for name, stored in ours.items():
            copies = [reader.read(each, 0, each.shape[0] if each.shape else 1) for each in (stored, theirs[name])]
            if not torch.equal(copies[0].view(torch.uint8), copies[1].view(torch.uint8)):
                raise UserError(f"{name} changed while it was copied", where=str(draft), remedy="check the disk")
    return f"read back: all {len(ours)} tensors are the same"


def probe(decoder: Decoder) -> torch.Tensor:
    with torch.no_grad():
        device = decoder.model.embed_tokens.weight.device
        logits: torch.Tensor = decoder(probe_tokens(decoder.config).to(device))
    return logits.cpu()


def finite(logits: torch.Tensor, source: Path) -> torch.Tensor:
    """The same logits. Raises UserError when they are no numbers."""
    if not bool(torch.isfinite(logits).all()):
        problem = "the exported model answers with numbers that are not finite"
        raise UserError(problem, where=str(source), remedy="choose an earlier --step")
    return logits


def probe_tokens(config: ModelConfig) -> torch.Tensor:
    length = min(PROBE_TOKENS, config.max_positions)
    return torch.arange(length)[None] * 7919 % config.vocab_size


def last_value(values_BT: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Of the probe's values the one that transformers' classifiers give: of the last token that is not padding."""
    kept = (probe_tokens(config)[0] != (-1 if config.pad_token_id is None else config.pad_token_id)).nonzero()
    return values_BT[:, int(kept.max())]


def opens_in_transformers(draft: Path, logits: torch.Tensor, config: ModelConfig) -> str:
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    values, tokens = config.head == "values", probe_tokens(config)
    kind = transformers.AutoModelForSequenceClassification if values else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(draft, dtype=torch.float32, attn_implementation="eager")
    transformers.AutoTokenizer.from_pretrained(draft)
    with torch.no_grad():
        theirs = model.eval()(tokens).logits
    logits = last_value(logits, config) if values else logits
    error = float((theirs - logits).abs().max())
    if error > TOLERANCE * max(1.0, float(logits.abs().max())):
        problem = f"transformers computes other logits (they differ by {error:.2g})"
        raise UserError(problem, where=str(draft), remedy="--no-verify exports it unseen; please report this")
    return f"transformers {transformers.__version__} opens it: logits within {error:.1e}"
