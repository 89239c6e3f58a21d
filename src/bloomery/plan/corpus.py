"""What a plan knows of the text: counted when it is prepared, guessed from the size of its files before."""

from pathlib import Path

from bloomery.data.documents import open_corpora
from bloomery.data.example_rows import wants_of
from bloomery.data.files import unread
from bloomery.data.packing import count_rows
from bloomery.data.prepare import finished
from bloomery.data.shards import Manifest
from bloomery.data.tokenizer import Tokenizer
from bloomery.data.tokenizer_source import find_tokenizer, tokenizer_spec
from bloomery.errors import UserError
from bloomery.hub import cached_model, data_place
from bloomery.model.presets import known_config
from bloomery.plan.types import CorpusFacts
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.schema import Data, Recipe, Source

BYTES_PER_TOKEN = 3.4  # byte-level BPE of 4k to 50k tokens on source code and English: 2.6 to 4.4
SPREAD = 0.3


def counted(manifest: Manifest, data: Data, prepared: Path) -> CorpusFacts:
    """The facts of prepared text in the recipe's layout."""
    laid = count_rows(prepared, manifest, sequence_length=data.sequence_length, layout=data.layout)
    rows = [count * part.weight for count, part in zip(laid.counts, manifest.train.parts, strict=True)]
    return CorpusFacts(
        rows_per_epoch=sum(map(round, rows)),
        left_out=sum(fitted.dropped + fitted.unlearned for fitted in laid.fitted),
        cut_short=sum(fitted.truncated for fitted in laid.fitted),
        tokens=manifest.train.tokens,
        learned=_learned(manifest),
        vocab_size=manifest.vocab_size,
        bos_id=manifest.bos_id,
        eos_id=manifest.eos_id,
        pad_id=manifest.pad_id,
    )


def _learned(manifest: Manifest) -> float:
    learned, tokens = manifest.train.learned_tokens, manifest.train.tokens
    return 1.0 if learned is None or not tokens else learned / tokens


def corpus_of(loaded: LoadedRecipe, prepared: Path) -> CorpusFacts | None:
    """Counted facts when `prepared` holds the recipe's text, a guess when its files are here, else None.

    Raises UserError for a folder that holds another recipe's text.
    """
    manifest = finished(loaded, prepared)
    return counted(manifest, loaded.recipe.data, prepared) if manifest is not None else guessed(loaded.recipe)


def absent(recipe: Recipe) -> list[str]:
    """The places of the recipe's text at which nothing lies here."""
    places = [recipe.data.path, *(source.path for source in recipe.data.sources)]
    return [place for place in places if place is not None and not data_place(place).exists()]


def left_aside(recipe: Recipe) -> list[str]:
    """What of the recipe's folders may be data and is not read, each with what reads it."""
    data, rows = recipe.data, wants_of(recipe) in ("sft", "pairs", "kto")
    told = [unread(source, rows=rows, key="in data.sources glob: ") for source in data.sources]
    if data.path is not None:
        told.append(unread(Source(path=data.path, glob=data.glob, format=data.format), rows=rows))
    return [line for line in told if line is not None]


def guessed(recipe: Recipe) -> CorpusFacts | None:
    """From the bytes of the files, 30% to each side; None where they are not here. Raises UserError."""
    data = recipe.data
    if absent(recipe):
        return None
    size = sum(corpus.text_bytes * corpus.weight for corpus in open_corpora(data, wants_of(recipe)))
    tokens = round(size / BYTES_PER_TOKEN)
    return CorpusFacts(
        rows_per_epoch=max(1, tokens // data.sequence_length),
        tokens=tokens,
        vocab_size=planned_vocabulary(recipe),
        spread=SPREAD,
    )


def planned_vocabulary(recipe: Recipe) -> int | None:
    """Of the tokenizer that will be trained, or that tokens are added to; None for one that is taken as it is."""
    spec = tokenizer_spec(recipe)
    if "add_tokens" in spec:
        if recipe.model.from_ is not None and cached_model(recipe.model.from_) is None:  # planned from our table
            return known_config(recipe.model.from_).vocab_size + len(recipe.tokenizer.add_tokens)
        found = find_tokenizer(recipe)
        assert isinstance(found, Tokenizer)
        return found.vocab_size
    if "from" in spec and recipe.model.from_ is None and recipe.model.vocab_size is None:
        refuse_absent(spec["from"])
    trained = spec.get("train")
    return int(trained["vocab_size"]) if trained is not None else None


def refuse_absent(name: str) -> None:
    """Raises UserError for a tokenizer that a new model takes its vocabulary from and that is not on this disk."""
    path = Path(name)
    if path.exists():
        return
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(
            "there is no such file or folder, and the model takes its vocabulary from it",
            where=f"tokenizer.from: {name}",
            remedy="mend the path, or set model.vocab_size to plan without the tokenizer",
            code=2,
        )
