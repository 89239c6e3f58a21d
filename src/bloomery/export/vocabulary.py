"""A model with fewer tokens: those that a dataset uses, and what they are made of."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.data.sources.documents import ReadStats, open_dataset, read_documents
from bloomery.data.tokenizer.tokenizer import JsonBackend, Tokenizer, load_tokenizer
from bloomery.export.layouts import (
    Exported,
    draft_of,
    exported,
    full_pieces,
    load_whole,
    opens_elsewhere,
    probed,
    write_rest,
)
from bloomery.model.adapters.settings import is_adapter_folder
from bloomery.model.io.stored import find_tensors, read_object
from bloomery.model.io.weights import VOCABULARY, load_decoder, write_json, write_model_piecewise
from bloomery.recipe.schema import Source
from bloomery.train.model_folder import ModelFiles
from bloomery.train.use import Use

Json = dict[str, Any]
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
CHECKED = 64  # tokens of the first text whose logits are compared
EXACT = 1e-4  # of the largest logit: the same weights, in another number of rows


def made_of(token: str, ranks: Mapping[tuple[str, str], int]) -> set[str]:
    """The tokens that byte-pair encoding passes through from the characters of `token`, the first of equal pairs first.

    No merge of a text crosses the border of a final token, so these are all that the token needs in any text.
    """
    parts = list(token)
    seen = set(token)
    while len(parts) > 1:
        at = min(
            range(len(parts) - 1), key=lambda n: ranks.get((parts[n], parts[n + 1]), len(ranks))
        )
        if (parts[at], parts[at + 1]) not in ranks:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        seen.add(parts[at])
    return seen


def cut(tokenizer: Tokenizer, used: set[int]) -> tuple[Tokenizer, list[int]]:
    """A tokenizer of the used tokens, single characters and bytes, and added tokens; and the old id of each new one.

    Texts of used tokens have the same tokens as before. Raises UserError for a model other than BPE and Unigram.
    """
    description = tokenizer.description
    model = description["model"]
    added = description.get("added_tokens") or []
    kind = model.get("type")
    vocab = model["vocab"]
    ids = (
        dict(vocab)
        if isinstance(vocab, dict)
        else {entry[0]: index for index, entry in enumerate(vocab)}
    )
    names = {index: token for token, index in ids.items()}
    keep = {token for token in ids if len(token) == 1 or BYTE.fullmatch(token)}
    keep |= {names[index] for index in used if index in names} | {
        entry["content"] for entry in added
    }
    pairs: list[tuple[str, str]] = []
    if kind == "BPE":
        keep |= {model["unk_token"]} if model.get("unk_token") else set()
        for each in model["merges"]:  # "a b" in older files
            left, right = each.split(" ", 1) if isinstance(each, str) else each
            pairs.append((left, right))
        ranks = {pair: rank for rank, pair in reversed(list(enumerate(pairs)))}
        keep |= {part for token in list(keep) for part in made_of(token, ranks)} & ids.keys()
    elif kind == "Unigram":
        keep |= {names[model["unk_id"]]} if model.get("unk_id") is not None else set()
    else:
        problem = f"the vocabulary of a {str(kind)[:20]} tokenizer cannot be cut"
        raise UserError(
            problem, where="tokenizer.json", fix="use a model with a BPE or Unigram tokenizer"
        )
    extra = {entry["content"]: entry["id"] for entry in added}
    old = sorted({index for token, index in ids.items() if token in keep} | set(extra.values()))
    new = {index: position for position, index in enumerate(old)}
    model = dict(model)
    if kind == "BPE":
        model["vocab"] = {token: new[index] for token, index in ids.items() if token in keep}
        model["merges"] = [list(pair) for pair in pairs if {*pair, "".join(pair)} <= keep]
    else:
        model["vocab"] = [entry for entry in vocab if entry[0] in keep]
        model["unk_id"] = new.get(model.get("unk_id", -1))
        if [new[ids[entry[0]]] for entry in model["vocab"]] != list(range(len(model["vocab"]))):
            problem = "added tokens have ids below those of the vocabulary"
            fix = "use another tokenizer"
            raise UserError(problem, where="tokenizer.json", fix=fix)
    changed = {
        **description,
        "model": model,
        "added_tokens": [{**each, "id": new[each["id"]]} for each in added],
    }
    changed |= {
        key: _renumbered(each, new) for key, each in description.items() if key.startswith("post_")
    }
    config = dict(tokenizer.config)
    if isinstance(known := config.get("added_tokens_decoder"), dict):
        config["added_tokens_decoder"] = {
            str(new[int(index)]): each for index, each in known.items()
        }
    control = {
        str(config[role])
        for role in ("bos_token", "eos_token", "pad_token", "unk_token")
        if config.get(role)
    }
    return Tokenizer(JsonBackend(changed, "tokenizer.json", control), config), old


def _renumbered(step: Any, new: Mapping[int, int]) -> Any:
    """A post-processor with the new ids of its special tokens."""
    if isinstance(step, list):
        return [_renumbered(each, new) for each in step]
    if not isinstance(step, dict):
        return step
    changed = {key: _renumbered(each, new) for key, each in step.items()}
    if isinstance(special := step.get("special_tokens"), dict):
        changed["special_tokens"] = {
            name: {**each, "ids": [new[index] for index in each["ids"]]}
            for name, each in special.items()
        }
    for role in ("sep", "cls"):
        if isinstance(pair := step.get(role), list):
            changed[role] = [pair[0], new[pair[1]]]
    return changed


def export_cut(
    source: Path, data: Path, out: Path, *, verify: bool = True, use: Use | None = None
) -> Exported:
    """Writes the model in `source` with the tokens of the texts in `data` to the new folder `out`, completely or not at
    all. Verification compares the logits of the kept tokens. Raises UserError.
    """
    if is_adapter_folder(source):
        raise UserError(
            "the vocabulary of an adapter cannot be cut",
            where=str(source),
            fix="use --to merged first",
        )
    tokenizer = load_tokenizer(source)
    used = set[int]()
    first = ""
    documents = read_documents(
        open_dataset(Source(path=str(data))), on_error="stop", stats=ReadStats()
    )
    for document in documents:
        first = first or document.text
        used.update(tokenizer.encode(document.text))
    smaller, old = cut(tokenizer, used)
    kept = next(iter(find_tensors(source).values())).dtype
    with full_pieces(source, kept) as (piece, config), draft_of(out) as draft:
        rows = torch.tensor([index for index in old if index < config.vocab_size])
        if len(rows) < len(old):
            fix = "use the tokenizer that the model was trained with"
            raise UserError(
                "the tokenizer has more tokens than the model", where=str(source), fix=fix
            )
        new = {index: position for position, index in enumerate(old)}
        special = (config.bos_token_id, config.eos_token_id, config.pad_token_id)
        bos, eos, pad = (None if index is None else new.get(index) for index in special)
        small = replace(
            config, vocab_size=len(old), bos_token_id=bos, eos_token_id=eos, pad_token_id=pad
        )

        def produce(name: str) -> Tensor:
            whole = piece(name)
            return whole[rows] if name in VOCABULARY else whole

        write_model_piecewise(produce, small, kept, draft)
        write_rest(draft, out.name, small, ModelFiles(source, None, source), tokenizer=smaller)
        settings = read_object(draft / "generation_config.json", fix="delete it")
        write_json(draft / "generation_config.json", _renumbered_settings(settings, new))
        proofs = [f"{len(old):,} of {config.vocab_size:,} tokens kept"]
        if verify:
            proofs += _same(source, draft, tokenizer, smaller, first, rows, use or Use("cpu"))
    return exported(out, proofs)


def _renumbered_settings(settings: Json, new: Mapping[int, int]) -> Json:
    """Generation settings with the new token ids; those of tokens that are gone are left out."""
    changed = {}
    for key, value in settings.items():
        if not key.endswith("token_id") or value is None:
            changed[key] = value
        elif isinstance(value, list):
            changed[key] = [new[each] for each in value if each in new]
        elif value in new:
            changed[key] = new[value]
    return changed


@torch.no_grad()
def _same(
    source: Path,
    draft: Path,
    before: Tokenizer,
    after: Tokenizer,
    text: str,
    rows: Tensor,
    use: Use,
) -> Iterator[str]:
    """The first text has the same tokens, and these the same logits; then transformers opens the folder."""
    tokens = before.encode(text)[:CHECKED]
    again = after.encode(text)[:CHECKED]
    if [int(rows[index]) for index in again] != tokens:
        problem = "the smaller tokenizer splits the first text in another way"
        raise UserError(
            problem,
            where=str(draft),
            fix="add --no-verify to export without this check; report this bug",
        )
    expected = load_whole(source, use)(torch.tensor([tokens]))[..., rows]
    difference = float(
        (load_decoder(draft, dtype=torch.float32)(torch.tensor([again])) - expected).abs().max()
    )
    if not difference <= EXACT * max(1.0, float(expected.abs().max())):
        problem = f"the logits of kept tokens differ by {difference:.2g}"
        raise UserError(
            problem,
            where=str(draft),
            fix="add --no-verify to export without this check; report this bug",
        )
    yield f"logits of kept tokens equal within {difference:.1e}"
    yield from opens_elsewhere(draft, *probed(draft, use, where=draft))
