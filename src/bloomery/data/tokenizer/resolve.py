"""Which tokenizer a recipe means."""

from typing import Any

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.hub import cached_model, fetch_tokenizer
from bloomery.recipe.schema import Recipe, TrainTokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def tokenizer_spec(recipe: Recipe) -> dict[str, Any]:
    """What decides the tokenizer: a name to load from, or how to train one (the default where there is no model to
    take it from).
    """
    said = recipe.tokenizer
    if said.from_ and said.train:
        raise UserError(
            "the recipe both names a tokenizer and trains one",
            where="tokenizer",
            remedy="remove tokenizer.from or tokenizer.train",
        )
    name = said.from_ or (None if said.train else "same" if recipe.model.from_ else None)
    if name == "same":
        if not recipe.model.from_:
            raise UserError(
                "there is no model to take the tokenizer from",
                where="tokenizer.from",
                remedy="set model.from, or tokenizer.train",
            )
        name = recipe.model.from_
    if name:
        return {"from": name, "add_tokens": said.add_tokens} if said.add_tokens else {"from": name}
    train = said.train or TrainTokenizer(vocab_size=recipe.model.vocab_size or TrainTokenizer().vocab_size)
    own = [*train.special_tokens, *(token for token in said.add_tokens if token not in train.special_tokens)]
    return {"train": train.model_copy(update={"special_tokens": own}).model_dump(mode="json")}


def find_tokenizer(recipe: Recipe) -> Tokenizer | TrainTokenizer:
    """The tokenizer that the recipe names, from disk or the Hub, or how to train one. Raises UserError."""
    spec = tokenizer_spec(recipe)
    if "train" in spec:
        return TrainTokenizer.model_validate(spec["train"])
    name = spec["from"]
    return load_tokenizer(fetch_tokenizer(name)).with_tokens(spec.get("add_tokens", []))


def new_tokens(recipe: Recipe) -> int:
    """How many of `tokenizer.add_tokens` the named tokenizer lacks; all of them where it is not on this disk."""
    asked = set(recipe.tokenizer.add_tokens) if "from" in tokenizer_spec(recipe) else set()
    return len(asked) if asked and _grown(recipe) is None else len(new_ids(recipe))


def new_ids(recipe: Recipe) -> tuple[int, ...]:
    """The ids of `tokenizer.add_tokens` that the named tokenizer lacks; none where it is not on this disk."""
    known, asked = _grown(recipe), recipe.tokenizer.add_tokens
    return () if known is None else tuple(range(known.vocab_size, known.with_tokens(asked).vocab_size))


def _grown(recipe: Recipe) -> Tokenizer | None:
    """The tokenizer that tokens are added to, where there are any and it is on this disk."""
    spec = tokenizer_spec(recipe)
    folder = cached_model(spec["from"]) if spec.get("add_tokens") and "from" in spec else None
    if folder is None or (folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES)):
        return None
    return load_tokenizer(folder)
