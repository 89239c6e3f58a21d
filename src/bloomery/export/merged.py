"""An adapter and its base as one model, in the layout of transformers."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch

from bloomery.data.tokenizer import load_tokenizer
from bloomery.errors import UserError
from bloomery.export.card import model_card, training_of
from bloomery.export.hf import (
    Exported,
    draft_of,
    finite,
    generation_settings,
    opens_in_transformers,
    probe,
    write_json,
)
from bloomery.model.decoder import Decoder
from bloomery.model.merge import merged_state
from bloomery.model.weights import load_decoder, write_model
from bloomery.train.model_folder import Found

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of the largest logit: float32 repeats the unmerged model's arithmetic in another order, 16 bits round every weight.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def export_merged(found: Found, out: Path, *, dtype: str | None = None, verify: bool = True) -> Exported:
    """Writes the new folder `out`, whole or not at all. `dtype`: None keeps the base's.

    Weights are merged in float32 and rounded once. Verification reads the folder back, compares its logits with those
    of base and adapter, and opens it in transformers where that is installed. Raises UserError.
    """
    if found.base is None:
        remedy = "--to hf copies a whole model"
        raise UserError("there is no adapter to merge here", where=str(found.weights), remedy=remedy, code=2)
    exact = torch.float32 if dtype == "float32" else None
    decoder = load_decoder(found.weights, base=found.base, dtype=exact)
    kept = decoder.model.embed_tokens.weight.dtype if dtype is None else DTYPES[dtype]
    with draft_of(out) as draft:
        write_model(merged_state(decoder, kept), decoder.config, draft)
        write_json(draft / "generation_config.json", generation_settings(found.base, decoder.config))
        load_tokenizer(found.tokenizer).save(draft)
        card = model_card(out.name, decoder.config, training_of(found.weights))
        (draft / "README.md").write_text(card, encoding="utf-8")
        proofs = tuple(_proofs(found, decoder.float(), draft, kept)) if verify else ()
    return Exported(out, sum(path.stat().st_size for path in out.iterdir()), proofs)


def _proofs(found: Found, unmerged: Decoder, draft: Path, dtype: torch.dtype) -> Iterator[str]:
    expected = finite(probe(unmerged), found.weights)
    del unmerged
    merged = load_decoder(draft, dtype=torch.float32)
    logits = probe(merged)
    error, scale = float((logits - expected).abs().max()), max(1.0, float(expected.abs().max()))
    if error > TOLERANCES[dtype] * scale:
        problem = f"the merged model computes other logits (they differ by {error:.2g} of {scale:.2g})"
        raise UserError(problem, where=str(draft), remedy="choose --type float32, which rounds less")
    yield f"base and adapter compute the same: logits within {error:.1e}"
    if importlib.util.find_spec("transformers") is not None:
        yield opens_in_transformers(draft, logits, merged.config)
