"""The settings of each run of a sweep: all combinations, or some drawn at random. No torch."""

import hashlib
import itertools
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from bloomery.core.errors import UserError
from bloomery.recipe.axes import axes_of
from bloomery.recipe.load import LoadedRecipe, load_recipe
from bloomery.recipe.yaml import read_yaml
from bloomery.sweep.ranges import Range, range_of

Search = Literal["grid", "random", "halving"]
MOST_RUNS = 256
DEFAULT_RUNS = 10  # of a search that draws
_TRIES = 100  # draws for each run, until one differs from the others
WHERE = "the command line"
EXAMPLE = "optimizer.learning_rate=1e-5,3e-5,1e-4"


@final
@dataclass(frozen=True)
class Point:
    """One run of a sweep. `name`: of its folder; `settings`: what differs between runs, as typed."""

    name: str
    settings: Mapping[str, str]
    recipe: LoadedRecipe

    @property
    def text(self) -> str:
        """The settings in a line."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items())

    @property
    def values(self) -> dict[str, Any]:
        """The settings as YAML reads them: numbers are numbers."""
        return {key: value_of(text) for key, text in self.settings.items()}


def points_of(
    recipe: str, overrides: Sequence[str], *, search: Search, runs: int | None, seed: int
) -> list[Point]:
    """The runs in their order; every recipe is read and checked. Raises UserError.

    `random` draws `runs` different combinations (Bergstra and Bengio 2012, "Random search for hyper-parameter
    optimization"); with a larger number the first ones stay the same. The others take all combinations, in the order
    of the command line, or with `halving` as many as `runs`, drawn the same way. A key with a range (`ranges.py`) is
    drawn in each run.
    """
    axes = axes_of(overrides, where=WHERE, example=EXAMPLE)
    ranges = ranges_of(axes)
    swept_keys = [key for key, values in axes.items() if len(values) > 1 or key in ranges]
    if not swept_keys:
        problem = "nothing to compare: no key has several values"
        raise UserError(problem, where=WHERE, fix=f"write {EXAMPLE}", code=2)
    if runs is not None and search == "grid":
        fix = "add --search random, or name fewer values"
        raise UserError("a grid takes all combinations", where="--runs", fix=fix, code=2)
    if ranges and search == "grid":
        key = next(iter(ranges))
        fix = f"add --search random or --search halving, or name values: {key}=A,B,C"
        raise UserError(f"a grid has no end with a range: {key}", where=WHERE, fix=fix, code=2)

    if ranges:
        combinations = _drawn(axes, ranges, runs=runs or DEFAULT_RUNS, seed=seed)
    else:
        combinations = list(itertools.product(*axes.values()))
        if search == "random" or runs is not None:
            random.Random(seed).shuffle(combinations)
            combinations = combinations[: runs or DEFAULT_RUNS]
    if len(combinations) > MOST_RUNS:
        problem = f"too many combinations: {len(combinations):,}"
        fix = f"name fewer values, or draw some of them: --search random --runs {MOST_RUNS}"
        raise UserError(problem, where=WHERE, fix=fix, code=2)

    points = []
    for combination in combinations:
        values = dict(zip(axes, combination, strict=True))
        settings = {key: values[key] for key in swept_keys}
        loaded_recipe = _loaded(recipe, values, settings)
        points.append(Point(_folder_name(settings), settings, loaded_recipe))
    return points


def ranges_of(axes: Mapping[str, Sequence[str]]) -> dict[str, Range]:
    """The keys whose value is a range. Raises UserError (code 2) for a range that is one of several values."""
    ranges: dict[str, Range] = {}
    for key, values in axes.items():
        for value in values:
            found = range_of(key, value, where=f"{key}={value}")
            if found is not None and len(values) > 1:
                fix = f"write {key}={value} alone, or only values"
                problem = "a range and other values of the same key"
                raise UserError(problem, where=f"{key}={','.join(values)}", fix=fix, code=2)
            if found is not None:
                ranges[key] = found
    return ranges


def _drawn(
    axes: Mapping[str, Sequence[str]], ranges: Mapping[str, Range], *, runs: int, seed: int
) -> list[tuple[str, ...]]:
    """Different combinations; fewer than `runs` where whole numbers and choices have no more."""
    source = random.Random(seed)
    combinations: dict[tuple[str, ...], None] = {}
    for _ in range(runs * _TRIES):
        if len(combinations) == runs:
            break
        drawn = [
            ranges[key].draw(source) if key in ranges else source.choice(values)
            for key, values in axes.items()
        ]
        combinations[tuple(drawn)] = None
    return list(combinations)


def _loaded(recipe: str, values: Mapping[str, str], settings: Mapping[str, str]) -> LoadedRecipe:
    """Raises UserError, also for a list without brackets, whose parts would each be a run."""
    try:
        loaded_recipe = load_recipe(recipe, [f"{key}={value}" for key, value in values.items()])
    except UserError as error:
        text = " ".join(f"{key}={value}" for key, value in settings.items())
        where = f"{error.where} (the run with {text})"
        raise UserError(error.problem, where=where, fix=error.fix, code=error.code) from error
    sections = loaded_recipe.recipe.model_dump(by_alias=True)
    for key, value in settings.items():
        if isinstance(_value_at(sections, key), list | tuple) and not value.startswith("["):
            raise UserError(
                f"{key} is a list, and each value between commas is a run of its own",
                where=f"{key}={value}",
                fix=f"write {key}=[a,b],[c] for two runs, or {key}=[a,b] for one list in every run",
                code=2,
            )
    return loaded_recipe


def _value_at(sections: Mapping[str, Any], key: str) -> Any:
    """The value of a key such as "adapter.rank"."""
    value: Any = sections
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


REDUCTION = 3  # of the runs from one rung to the next: eta of Li et al. 2018


def rungs_of(steps: int, runs: int) -> list[int]:
    """The steps after which successive halving compares its runs, the last one the whole length.

    Each rung trains three times as long as the one before it, and a third of the runs goes on to it (Jamieson and
    Talwalkar 2016, "Non-stochastic best arm identification and hyperparameter optimization", with the reduction of Li
    et al. 2018, "A system for massively parallel hyperparameter tuning", which names the rungs of ASHA). One run trains
    at a time here, so that nothing is gained by promoting before a rung is complete, as ASHA does.
    """
    rungs = [steps]
    while runs >= REDUCTION and rungs[0] >= REDUCTION:
        runs //= REDUCTION
        rungs.insert(0, rungs[0] // REDUCTION)
    return rungs


def _folder_name(settings: Mapping[str, str]) -> str:
    """Such as learning_rate-1e-4-rank-8, without a character that a shell or an override would read.

    It follows from the settings alone: a sweep with more values finds the runs that it has. Where the readable name
    does not tell two settings apart, a digest does.
    """
    text = "-".join(f"{key.rpartition('.')[2]}-{value}" for key, value in settings.items())
    readable = re.sub(r"[^\w.-]+", "-", text)[:60].strip("-.")
    if readable == text:
        return readable
    digest = hashlib.sha256(json.dumps(dict(settings)).encode()).hexdigest()[:6]
    return f"{readable}-{digest}"


def value_of(text: str) -> Any:
    """A value of the command line as YAML reads it."""
    document = read_yaml(f"value: {text}", source=WHERE, folder=Path.cwd())
    return document.data["value"]
