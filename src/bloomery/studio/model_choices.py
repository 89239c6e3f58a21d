"""The models that a new run may start from: those of this folder, of packaged recipes and of recent runs. No torch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole
from bloomery.core.run_folder import all_runs
from bloomery.core.text import harmless
from bloomery.core.units import format_count
from bloomery.facts.counting import parameter_count
from bloomery.facts.families import family_label
from bloomery.facts.published import published_models
from bloomery.hardware.detect import detect
from bloomery.hardware.profile import build_profile
from bloomery.hub import cached_model, is_hub_id
from bloomery.infer.model_folder import folder_of_step
from bloomery.model.configs import known_config
from bloomery.recipe.load import by_release, load_recipe, packaged, twins
from bloomery.recipe.yaml import read_yaml
from bloomery.studio.stored_models import ADAPTER, GGUF, stored_models

RECENT_RUNS = 12  # whose models and datasets are offered again
# The first that a page offers: small models of this year, each with a recipe for one GPU.
FIRST_RECIPES = ("qwen3.5-2b-lora", "gemma4-e2b-lora", "lfm2.5-1.2b-lora", "smollm3-3b-qlora")
# Without a GPU: models that a CPU trains in minutes.
FIRST_ON_A_CPU = (
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "google/gemma-3-270m-it",
    "Qwen/Qwen3-0.6B",
)
MOST_FIRST = 2  # of this folder


@dataclass(frozen=True)
class Choice:
    """`value`: what is typed for it. `title`: what it is called. `words`: what it is. `problem`: why it is not for
    training.
    """

    value: str
    title: str
    words: str = ""
    problem: str = ""


@cache
def recipe_choices() -> tuple[Choice, ...]:
    """The packaged recipes that train a model, without their small twins: the first line of each says what it does."""
    small_twins = twins()
    choices = list[Choice]()
    newest_first = sorted(packaged().items(), key=lambda item: (by_release(item[0]), item[0]))
    for name, path in newest_first:
        method, colon, description = _first_line(path).partition(": ")
        if not colon or name in small_twins or name.startswith("demo"):
            continue
        model, _, gpu = description.split(", ")
        choices.append(Choice(name, model, f"{method}, {gpu} · {name}"))
    return tuple(choices)


def _first_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").rstrip(".")


def first_choices() -> list[Choice]:
    """What a page offers first: the newest models of this folder, and small ones that this machine trains soon."""
    here = [choice for choice in models_here() if not choice.problem]
    if build_profile(detect()).accelerator is None:
        # A folder here before a download of the same name.
        by_name = {Path(choice.value).name: choice for choice in reversed(here)}
        shorts = {name: name.partition("/")[2] for name in FIRST_ON_A_CPU}
        others = [by_name.get(short) or Choice(name, short) for name, short in shorts.items()]
    else:
        by_name = {choice.value: choice for choice in recipe_choices()}
        others = [by_name[name] for name in FIRST_RECIPES if name in by_name]
    return [*here[:MOST_FIRST], *others]


@cache
def known_choices() -> tuple[Choice, ...]:
    """The models whose shapes the table of published ones has: planned without a network."""
    return tuple(
        Choice(model.names[0], model.names[0], f"{_number(model.parameters)} parameters")
        for model in published_models()
    )


def _number(published: int | str) -> str:
    return published if isinstance(published, str) else format_count(published)


def models_here() -> list[Choice]:
    """Model folders and GGUF files of this folder, the newest first; adapters and GGUF with why they train no run."""
    choices = list[Choice]()
    for model in stored_models():
        path = model.model.removeprefix("./")
        title = path
        if model.step is not None:
            path = str(folder_of_step(Path(model.model) / "checkpoints", model.step))
            best = ", best" if model.is_best else ""
            title = f"{model.model.removeprefix('runs/')}, step {model.step:,}{best}"
        problem = ""
        if model.kind.startswith(ADAPTER):
            problem = "an adapter: Models merges it into its base"
        elif model.kind == GGUF:
            problem = "GGUF: training needs the folder it was made from"
        elif not model.kind.startswith("full"):
            problem = model.kind
        choices.append(Choice(path, title, model.kind.removeprefix("full, "), problem))
    return choices


def recent_answers() -> tuple[list[str], list[str]]:
    """The models and datasets of the newest runs, the newest first."""
    models, datasets = dict[str, None](), dict[str, None]()
    for run in reversed(all_runs()[-RECENT_RUNS:]):
        with suppress(UserError, OSError):
            text = read_whole(run / "recipe.yaml").decode("utf-8", errors="replace")
            recipe = read_yaml(text, source=run.name, folder=run).data
            if isinstance(recipe, dict):
                for names, section, key in ((models, "model", "from"), (datasets, "data", "path")):
                    value = (recipe.get(section) or {}).get(key)
                    if isinstance(value, str):
                        names[near(value)] = None
    return list(models), list(datasets)


def near(name: str) -> str:
    """A path below the working folder as it would be typed."""
    path = Path(name)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return name


def about_model(name: str) -> str:
    """What a model is, from files here or the table of known ones: "1.9 B parameters, Qwen3.5". Raises UserError where
    no such folder exists and the name is no id of the Hub; "" for an id that is not known here.
    """
    if name in packaged():
        recipe = load_recipe(name).recipe
        start = recipe.model.from_ or recipe.model.preset or recipe.model.family or ""
        return f"{start} · packaged recipe"
    is_here = cached_model(name) is not None
    if is_here and (Path(name) / "adapter_config.json").is_file():
        fix = "merge it into its base first: the page Models exports it"
        raise UserError("that is an adapter, not a model", where=name, fix=fix)
    try:
        config = known_config(name)
    except UserError:
        if is_here or not is_hub_id(name):
            raise
        return ""
    words = f"{format_count(parameter_count(config))} parameters, {family_label(config)}"
    return words if is_here else f"{words}, to be downloaded"


def matching(choices: list[Choice], typed: str) -> Iterator[Choice]:
    """Those that hold every word that is typed."""
    words = typed.lower().split()
    for choice in choices:
        text = f"{choice.value} {choice.title} {choice.words}".lower()
        if all(word in text for word in words):
            yield choice


def told_apart(choices: Sequence[Choice]) -> list[Choice]:
    """Each value once; what has the title of another one gets its value behind it."""
    by_value = dict[str, Choice]()
    for choice in choices:
        by_value.setdefault(choice.value, choice)
    distinct = list(by_value.values())
    times = Counter(choice.title for choice in distinct)
    return [
        replace(choice, title=f"{choice.title} · {choice.value}")
        if times[choice.title] > 1
        else choice
        for choice in distinct
    ]


def shown(choice: Choice) -> Choice:
    """Without characters that change the page."""
    return Choice(choice.value, harmless(choice.title), harmless(choice.words), choice.problem)
