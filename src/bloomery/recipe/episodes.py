"""The sections of tools and environments: completions of several turns. No torch."""

from typing import Annotated
from urllib.parse import urlsplit

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


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _address(value: str) -> str:
    place = urlsplit(value)
    if place.scheme not in ("http", "https") or not place.hostname:
        raise ValueError("must be an address, such as http://127.0.0.1:8000")
    return value


class Tool(Section):
    """A function that the model may call. Its type hints and its docstring tell the model how."""

    python: Annotated[str, AfterValidator(file_and_function)] = Field(
        description="FILE:FUNCTION of a Python file, relative to the recipe.",
        examples=["my_tools.py:search"],
    )


class EnvironmentSection(Section):
    """A class with a state for each episode, in TRL's form: `reset(**row)`, methods that are tools, `get_reward()`.

    Or an environment of OpenEnv, as a class or in a server.

    The limits hold for `tools`, too.
    """

    python: Annotated[str, AfterValidator(_file_and_class)] | None = key(
        None, "FILE:CLASS of a Python file, relative to the recipe.", "my_games.py:Guess"
    )
    openenv: Annotated[str, AfterValidator(_address)] | None = key(
        None, "Address of an OpenEnv server, in place of python.", "http://127.0.0.1:8000"
    )
    timeout: WallTime = key(
        Duration(10.0, "seconds"), "Longest time of one call; the model is told of a longer one."
    )
    memory: Memory = key(GIB, "Address space of an episode's tools.", "1GiB")
    network: bool = key(False, "Tools may reach other machines.")

    @property
    def is_set(self) -> bool:
        """Whether episodes have an environment."""
        return self.python is not None or self.openenv is not None

    @property
    def place(self) -> str | None:
        """Where it is, in errors; None without one."""
        return self.python or self.openenv

    @property
    def leaves_machine(self) -> bool:
        """Whether its server is another machine."""
        return self.openenv is not None and urlsplit(self.openenv).hostname not in LOOPBACK
