"""Names that an installed package adds to a table of facts are names of the recipe."""

import subprocess
import sys

import pytest

from bloomery.core.errors import UserError
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.facts.table import OpenTable

ADDS = """
from typing import Literal

from bloomery.facts.objectives import OBJECTIVES, ObjectiveSpec
from bloomery.facts.optimizers import OPTIMIZERS, OptimizerSpec
from bloomery.recipe.objectives import OBJECTIVE_SECTIONS, ObjectiveSection
from bloomery.recipe.sections import key


class Cpo(ObjectiveSection):
    kind: Literal["cpo"] = key("cpo", "CPO.")
    beta: float = key(0.1, "Scale.")


OPTIMIZERS.add(
    "sign",
    OptimizerSpec(name="Sign", state_values=lambda _, shape: 1, update_bytes=lambda _: 0.0),
)
OBJECTIVES.add("cpo", ObjectiveSpec("cpo", "pairs", "pair"))
OBJECTIVE_SECTIONS.add("cpo", Cpo)

from bloomery.core.errors import UserError
from bloomery.plan.support_matrix import FEATURES
from bloomery.recipe.load import json_schema, load_recipe

recipe = load_recipe("llama2-7b-lora-qa-tiny", ["optimizer.kind=sign", "objective.kind=cpo"]).recipe
assert recipe.optimizer.kind == "sign" and isinstance(recipe.objective, Cpo)
assert recipe.objective.spec.data_kind == "pairs"
assert json_schema()["$defs"]["OptimizerSection"]["properties"]["kind"]["enum"][-1] == "sign"
assert len([row for row in FEATURES if row.is_used_by(recipe)]) >= 2
try:
    load_recipe("demo", ["optimizer.kind=sofia"])
except UserError as error:
    print(error.problem)
"""


def test_a_recipe_takes_what_is_added_before_its_schema_is_built() -> None:
    done = subprocess.run([sys.executable, "-c", ADDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"must be {', '.join(OPTIMIZERS)} or sign, not 'sofia'" in done.stdout


def test_names_are_added_once_and_in_time() -> None:
    table = OpenTable({"one": 1})
    table.add("two", 2)
    with pytest.raises(UserError, match="the name two is taken"):
        table.add("two", 3)
    assert table.name_literal().__args__ == ("one", "two")
    with pytest.raises(AssertionError, match="three comes too late"):
        table.add("three", 3)


def test_the_recipe_closes_the_table_of_optimizers() -> None:
    import bloomery.recipe.schema  # noqa: F401 (builds the schema)

    with pytest.raises(AssertionError, match="too late"):
        OPTIMIZERS.add("late", OPTIMIZERS["adamw"])
