"""The sections of tools and environments: completions of several turns. No torch."""

from typing import Annotated

from pydantic import AfterValidator, Field

from bloomery.core.units import GIB, Duration
from bloomery.recipe.rewards import file_and_function
from bloomery.recipe.sections import Section, key
from bloomery.recipe.values import Memory, WallTime


def _file_and_class(value: str) -> str:
    file, _, name = value.rpartition(":")
    if not file or not name.isidentifier():
        raise ValueError("must be FILE:CLASS, such as my_games.py:Guess")
    return value


class Tool(Section):
    """A function that the model may call. Its type hints and its docstring tell the model how."""

    python: Annotated[str, AfterValidator(file_and_function)] = Field(
        description="FILE:FUNCTION of a Python file, relative to the recipe.",
        examples=["my_tools.py:search"],
    )


class EnvironmentSection(Section):
    """A class with a state for each episode, in TRL's form: `reset(**row)`, methods that are tools, `get_reward()`.

    The limits hold for `tools`, too.
    """

    python: Annotated[str, AfterValidator(_file_and_class)] | None = key(
        None, "FILE:CLASS of a Python file, relative to the recipe.", "my_games.py:Guess"
    )
    timeout: WallTime = key(
        Duration(10.0, "seconds"), "Longest time of one call; the model is told of a longer one."
    )
    memory: Memory = key(GIB, "Address space of an episode's tools.", "1GiB")
    network: bool = key(False, "Tools may reach other machines.")
