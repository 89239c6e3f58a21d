"""plan.json: written whole or not at all, read with every field checked."""

from pathlib import Path

from pydantic import ValidationError

from bloomery.errors import UserError
from bloomery.plan.head import read_sealed, write_sealed
from bloomery.plan.types import Plan


def write_plan(plan: Plan, path: Path) -> None:
    """Replaces the file in one step: a reader sees the old plan or the new one. The run's head lists both."""
    write_sealed(path.parent, {path.name: dumped(plan)})


def dumped(plan: Plan) -> str:
    """What the file holds."""
    return plan.model_dump_json(indent=1) + "\n"


def read_plan(path: Path) -> Plan:
    """Raises UserError when there is no plan, it changed since it was written, or this version does not know it."""
    try:
        return Plan.model_validate_json(read_sealed(path))
    except FileNotFoundError as missing:
        raise UserError(
            "this run has no plan yet", where=str(path), remedy="bloomery resume starts it over"
        ) from missing
    except ValidationError as broken:
        first = broken.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        problem = f"the plan cannot be read: {place}: {first['msg']}"
        raise UserError(problem, where=str(path), remedy="start a new run from its recipe.yaml") from broken
