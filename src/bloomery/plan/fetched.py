"""What a recipe names on the Hub, fetched before anything is decided and read from disk from then on"""

from bloomery import hub
from bloomery.recipe.schema import Distil, Recipe


def fetch(recipe: Recipe, *, weights: bool) -> None:
    """Model, tokenizer, teacher and text of a recipe lie on this disk afterwards. Raises UserError.

    Without `weights`, as a plan needs it, models come as config and tokenizer, and text not at all.
    """
    if recipe.model.from_ is not None:
        hub.fetch_model(recipe.model.from_, weights=weights)
    if recipe.tokenizer.from_ not in (None, "same"):
        hub.fetch_tokenizer(str(recipe.tokenizer.from_))
    if isinstance(recipe.objective, Distil):
        hub.fetch_model(recipe.objective.teacher, weights=weights)
    if weights:
        fetch_text(recipe)


def fetch_text(recipe: Recipe) -> None:
    """The data sets of `hub:ORG/NAME`, of which a glob names a part. Raises UserError."""
    data = recipe.data
    places = [(data.path, data.glob), *((source.path, source.glob) for source in data.sources)]
    held_out = data.validation if isinstance(data.validation, str) else None
    for path, glob in (*places, (held_out, data.glob)):
        if path is not None and path.startswith(hub.PREFIX):
            hub.fetch_dataset(path, glob=glob)
