"""plan.json: written whole or not at all, read with every field checked."""

from pathlib import Path

from pydantic import ValidationError

from bloomery.disk import read_whole, write_durably
from bloomery.errors import UserError
from bloomery.plan.types import Plan


def write_plan(plan: Plan, path: Path) -> None:
    """Replaces the file in one step: a reader sees the old plan or the new one."""
    write_durably(path, plan.model_dump_json(indent=1) + "\n")


def read_plan(path: Path) -> Plan:
    """Raises UserError when there is no plan or it is not one that this version understands."""
    try:
        return Plan.model_validate_json(read_whole(path))
    except FileNotFoundError as missing:
        raise UserError(
            "this run has no plan yet", where=str(path), remedy="bloomery resume starts it over"
        ) from missing
    except ValidationError as broken:
        first = broken.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        problem = f"the plan cannot be read: {place}: {first['msg']}"
        raise UserError(problem, where=str(path), remedy="start a new run from its recipe.yaml") from broken
