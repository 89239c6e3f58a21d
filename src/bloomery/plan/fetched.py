"""What a recipe names on the Hub, fetched before anything is decided and read from disk from then on"""

from dataclasses import replace
from pathlib import Path

from bloomery import hub
from bloomery.model.presets import read_config
from bloomery.model.published import published_config
from bloomery.model.weight_files import find_tensors, is_bare, stored_parameters
from bloomery.recipe.schema import Distil, Model, Recipe


def fetch(recipe: Recipe, *, weights: bool) -> None:
    """Model, tokenizer, teacher and text of a recipe lie on this disk afterwards. Raises UserError.

    Without `weights`, as a plan needs it, models come as config and tokenizer; those of our table, tokenizers of their
    own and text not at all. Weights that lie here are judged by the headers of their files before any text is read; a
    plan takes a local folder that holds a config alone.
    """
    if recipe.model.from_ is not None:
        _fetch_model(recipe.model.from_, weights=weights)
        _refuse_bad_weights(recipe.model, weights=weights, reward=recipe.objective.kind == "reward")
    if weights and recipe.tokenizer.from_ not in (None, "same"):
        hub.fetch_tokenizer(str(recipe.tokenizer.from_))
    if isinstance(recipe.objective, Distil):
        _fetch_model(recipe.objective.teacher, weights=weights)
        _refuse_bad_weights(Model(**{"from": recipe.objective.teacher}), weights=weights, reward=False)
    if weights:
        fetch_text(recipe)


def _fetch_model(name: str, *, weights: bool) -> None:
    if weights or published_config(name) is None:
        hub.fetch_model(name, weights=weights)


def _refuse_bad_weights(model: Model, *, weights: bool, reward: bool) -> None:
    """Raises UserError for what `model.weights.read_model` would refuse: files that are missing, damaged or pickles,
    tensors of another shape than config.json says, weights of whole numbers.
    """
    name = str(model.from_)
    of_hub = hub.is_hub_id(name)
    folder = hub.cached_model(name, weights=of_hub)
    if folder is None or (not weights and not of_hub and is_bare(folder)):
        return
    if (folder / "config.json").is_file():
        find_tensors(folder)  # what is wrong with the files themselves comes first
    config = read_config(folder, model.implementation)
    if config.foreign is not None and (model.safe_load or config.foreign.safe_because):
        return  # transformers itself says what it makes of the tensors
    stored_parameters(folder, replace(config, head="values") if reward else config, headless=reward)


def models_of(recipe: Recipe) -> list[str]:
    """Those that the recipe takes weights from."""
    start = [] if recipe.model.from_ is None else [recipe.model.from_]
    return [*start, recipe.objective.teacher] if isinstance(recipe.objective, Distil) else start


def unfetched(recipe: Recipe) -> list[str]:
    """Models that only our table knows so far."""
    return [name for name in models_of(recipe) if hub.cached_model(name) is None]


def weightless(recipe: Recipe) -> list[str]:
    """Local folders of a shape alone, from which a run cannot begin."""
    return [name for name in models_of(recipe) if not hub.is_hub_id(name) and is_bare(hub.local_model(name))]


def place_of(name: str) -> Path:
    """The folder of a model, or its name where it is not here and our table was asked instead. Raises UserError."""
    if hub.cached_model(name) is None and published_config(name) is not None:
        return Path(name)
    return hub.local_model(name)


def fetch_text(recipe: Recipe) -> None:
    """The data sets of `hub:ORG/NAME`, of which a glob names a part. Raises UserError."""
    data = recipe.data
    places = [(data.path, data.glob), *((source.path, source.glob) for source in data.sources)]
    held_out = data.validation if isinstance(data.validation, str) else None
    for path, glob in (*places, (held_out, data.glob)):
        if path is not None and path.startswith(hub.PREFIX):
            hub.fetch_dataset(path, glob=glob)
