"""An adapter and its base as one model, in the layout of transformers."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.export.card import model_card, training_of
from bloomery.export.hf import (
    Exported,
    draft_of,
    finite,
    generation_settings,
    load_to_check,
    opens_in_transformers,
    probe,
    write_json,
)
from bloomery.model.adapters.base_model import read_settings
from bloomery.model.adapters.merge import merged_pieces, merged_state
from bloomery.model.config import ModelConfig
from bloomery.model.families.presets import read_config
from bloomery.model.io.weight_files import find_tensors
from bloomery.model.io.weights import load_decoder, write_model, write_model_piecewise
from bloomery.train.model_folder import Found
from bloomery.train.use import Use

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of the largest logit: float32 repeats the unmerged model's arithmetic in another order, 16 bits round every weight.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def export_merged(
    found: Found, out: Path, *, dtype: str | None = None, verify: bool = True, use: Use | None = None
) -> Exported:
    """Writes the new folder `out`, whole or not at all. `dtype`: None keeps the base's.

    Weights are merged in float32 and rounded once, one at a time and on the device of `use`. The base is the one that
    is stored, also where the run trained over it in few bits. Verification reads the folder back, compares its logits
    with those of base and adapter, and opens it in transformers where that is installed. Raises UserError.
    """
    if found.base is None:
        remedy = "--to hf copies a whole model"
        raise UserError("there is no adapter to merge here", where=str(found.weights), remedy=remedy, code=2)
    use = use or Use("cpu")
    with draft_of(out) as draft:
        config, kept = _write_merged(found, found.base, draft, dtype, use)
        write_json(draft / "generation_config.json", generation_settings(found.base, config))
        load_tokenizer(found.tokenizer).save(draft)
        (draft / "README.md").write_text(model_card(out.name, config, training_of(found.weights)), encoding="utf-8")
        proofs = (*_stated(found), *(_proofs(found, draft, kept, use) if verify else ()))
    return Exported(out, sum(path.stat().st_size for path in out.iterdir()), proofs)


def _write_merged(
    found: Found, base: Path, draft: Path, asked: str | None, use: Use
) -> tuple[ModelConfig, torch.dtype]:
    """Piece by piece where that can be; PEFT's own methods and foreign layers merge as a whole."""
    if read_settings(found.weights)["peft_type"] == "LORA" and read_config(base).foreign is None:
        stored = find_tensors(base)
        kept = next(iter(stored.values())).dtype if asked is None else DTYPES[asked]
        with merged_pieces(found.weights, base, kept, use.device) as (piece, config):
            write_model_piecewise(piece, config, kept, draft)
        return config, kept
    decoder = load_decoder(found.weights, base=base, dtype=torch.float32 if asked == "float32" else None)
    kept = decoder.model.embed_tokens.weight.dtype if asked is None else DTYPES[asked]
    write_model(merged_state(decoder, kept), decoder.config, draft)
    return decoder.config, kept


def _stated(found: Found) -> Iterator[str]:
    if found.trained is not None and (bits := found.trained.quantize.base) != "none":
        yield f"the base is merged as it is stored; the run trained over it in {bits}, so figures differ a little"


def _proofs(found: Found, draft: Path, dtype: torch.dtype, use: Use) -> Iterator[str]:
    """One model at a time is in memory."""
    expected = finite(probe(load_to_check(found.weights, use, base=found.base)), found.weights)
    merged = load_to_check(draft, use)
    logits, config = probe(merged), merged.config
    del merged
    error, scale = float((logits - expected).abs().max()), max(1.0, float(expected.abs().max()))
    if error > TOLERANCES[dtype] * scale:
        problem = f"the merged model computes other logits (they differ by {error:.2g} of {scale:.2g})"
        raise UserError(problem, where=str(draft), remedy="choose --type float32, which rounds less")
    yield f"base and adapter compute the same: logits within {error:.1e}"
    if importlib.util.find_spec("transformers") is not None:
        yield opens_in_transformers(draft, logits, config)
