"""An adapter alone, in the format that PEFT opens."""

import importlib
import importlib.util
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.export.card import model_card, training_of
from bloomery.export.hf import TOLERANCE, Exported, draft_of, finite, last_value, load_to_check, probe, probe_tokens
from bloomery.model.adapters.base_model import CONFIG, TENSORS, base_of, read_settings
from bloomery.model.adapters.peft_read import read_adaptation
from bloomery.model.config import ModelConfig
from bloomery.model.families.presets import read_config
from bloomery.train.model_folder import Found
from bloomery.train.use import Use


def export_adapter(found: Found, out: Path, *, verify: bool = True, use: Use | None = None) -> Exported:
    """Copies the adapter to the new folder `out`, with tokenizer and card; the folder appears whole or not at all.

    Verification compares the bytes, runs the copy on its base, and opens it in PEFT where that is installed. Raises
    UserError.
    """
    if found.base is None:
        problem, remedy = "this is a whole model: it has no adapter", "--to hf copies a whole model"
        raise UserError(problem, where=str(found.weights), remedy=remedy, code=2)
    base = base_of(found.base).name
    with draft_of(out) as draft:
        said = read_settings(found.weights) | {"base_model_name_or_path": base}
        (draft / CONFIG).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(found.weights / TENSORS, draft / TENSORS)
        load_tokenizer(found.tokenizer).save(draft)
        card = model_card(out.name, _config(draft, found.base), training_of(found.weights), base=base)
        (draft / "README.md").write_text(card, encoding="utf-8")
        proofs = tuple(_proofs(found, draft, use or Use("cpu"))) if verify else ()
    return Exported(out, sum(path.stat().st_size for path in out.iterdir()), proofs)


def _config(draft: Path, base: Path) -> ModelConfig:
    """With the vocabulary and the head that the adapter brings."""
    config = read_config(base)
    return read_adaptation(draft, config)[1] if read_settings(draft)["peft_type"] == "LORA" else config


def _proofs(found: Found, draft: Path, use: Use) -> Iterator[str]:
    if (found.weights / TENSORS).read_bytes() != (draft / TENSORS).read_bytes():
        raise UserError(f"{TENSORS} changed while it was copied", where=str(draft), remedy="check the disk")
    decoder = load_to_check(draft, use, base=found.base)
    logits, config = finite(probe(decoder), found.weights), decoder.config
    del decoder
    yield "read back: the tensors are the same, and the base takes them"
    if all(importlib.util.find_spec(name) is not None for name in ("peft", "transformers")):
        with warnings.catch_warnings(action="ignore"):  # what both libraries say of each other
            yield _opens_in_peft(found, draft, logits, config)


def _opens_in_peft(found: Found, draft: Path, logits: torch.Tensor, config: ModelConfig) -> str:
    peft: Any = importlib.import_module("peft")
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    settings: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    kind = transformers.AutoModelForCausalLM
    if config.head == "values":  # the base has no such head: it is drawn, and the adapter replaces it
        kind, settings["num_labels"] = transformers.AutoModelForSequenceClassification, 1
        logits = last_value(logits, config)
    model = kind.from_pretrained(found.base, **settings)
    if config.vocab_size > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(config.vocab_size, mean_resizing=False)
    model = peft.PeftModel.from_pretrained(model, draft).eval()
    with torch.no_grad():
        theirs = model(probe_tokens(config)).logits
    error = float((theirs - logits).abs().max())
    if error > TOLERANCE * max(1.0, float(logits.abs().max())):
        problem = f"PEFT computes other logits (they differ by {error:.2g})"
        raise UserError(problem, where=str(draft), remedy="--no-verify exports it unseen; please report this")
    return f"PEFT {peft.__version__} opens it: logits within {error:.1e}"
